"""Trained parameters inside a trunk: LoRA, adapters and norms, with and without prompts."""

import copy
import pickle

import pytest
import torch
import torch.nn as nn
from timm.models.deit import VisionTransformerDistilled
from torchvision.models import VisionTransformer as TorchVit

import fedprompt as fp
import models
from errors import raises
from fedprompt.interfaces import TrainableTrunk
from fedprompt.privacy import per_sample
from models import draw_images, perturbed, plain, tiny_vit
from tolerance import assert_near

DIM, DEPTH = 12, 3


def with_lora(layers=None):
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(target_modules=["qkv"], r=2, layers_to_transform=layers)
    config.layers_pattern = "blocks" if layers is not None else None
    torch.manual_seed(0)
    return perturbed(inject_adapter_in_model(config, tiny_vit()))  # B is not 0


def left_trainable(model):
    """Return the parameters that peft did not freeze."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def norms(model):
    return [block.norm1 for block in model.blocks]


def biases(model):
    return [parameter for name, parameter in model.named_parameters() if name.endswith("qkv.bias")]


def make(part):
    model = with_lora() if part is left_trainable else tiny_vit()
    return model, fp.vit_trunk(model, trainable=part(model))


every_part = pytest.mark.parametrize("part", [left_trainable, norms, biases])


class Client(models.Client):
    """Trained part of a trunk, prompts and a head."""

    def __init__(self, trunk):
        super().__init__(trunk, torch.Generator().manual_seed(0))
        self.inside = trunk.trainable


def step(client, images, labels, parameters=None):
    optimizer = torch.optim.SGD(client.parameters() if parameters is None else parameters, lr=0.1)
    optimizer.zero_grad()
    nn.functional.cross_entropy(client(images), labels).backward()
    optimizer.step()


@every_part
def test_exactly_the_chosen_parameters_are_trained_under_their_names(part):
    model, trunk = make(part)
    chosen = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    held = dict(trunk.trainable.named_parameters())
    assert isinstance(trunk, TrainableTrunk)
    assert held.keys() == chosen
    assert len(chosen) == {left_trainable: 6, norms: 6, biases: 3}[part]
    assert all(parameter is model.get_parameter(name) for name, parameter in held.items())
    fp.encode_prompted(trunk, draw_images(model))  # the check of frozen parameters allows them
    part = next(each for each in trunk.trainable.modules() if each._parameters)
    name = next(iter(part._parameters))
    with raises(KeyError, name):
        delattr(part, name)
    assert len(part._parameters) == len(list(part.parameters()))


@every_part
def test_gradients_equal_those_of_the_models_own_forward_pass(part):
    model, trunk = make(part)
    images = draw_images(model)
    parameters = list(trunk.trainable.parameters())
    ours = torch.autograd.grad(fp.encode_prompted(trunk, images).pooled.square().sum(), parameters)
    own = torch.autograd.grad(plain(model, images).square().sum(), parameters)
    for actual, expected in zip(ours, own, strict=True):
        assert_near(actual, expected)
        assert actual.abs().max() > 1e-6


def test_clients_that_take_turns_equal_clients_with_models_of_their_own(generator):
    """The reference has a deep copy of the model for each client, and a mean by hand."""
    model = with_lora()
    trunk = fp.vit_trunk(model, trainable=left_trainable(model))
    client = Client(trunk)
    data = {
        seed: (draw_images(model, 4, seed=seed), torch.tensor([0, 1, 2, 3])) for seed in range(2)
    }
    weights = {0: 10.0, 1: 30.0}
    separate = {}
    for seed in data:  # pickling copies the model, too
        separate[seed] = pickle.loads(pickle.dumps(client))
        assert separate[seed].trunk.model is not model

    values = fp.snapshot(client)
    for _ in range(2):
        payloads = []
        for seed, batch in data.items():
            fp.load_values(client, values)
            step(client, *batch)
            payloads.append(fp.collect(client, weight=weights[seed]))
        values = {name: entry.value for name, entry in fp.weighted_mean(payloads).items()}

        for seed, batch in data.items():
            step(separate[seed], *batch)
        for group in zip(*(each.parameters() for each in separate.values()), strict=True):
            mean = sum(weights[seed] * each.detach() for seed, each in enumerate(group)) / 40
            for each in group:
                each.data.copy_(mean)
    expected = fp.snapshot(separate[0])
    assert values.keys() == expected.keys()
    assert sum(name.startswith("inside.blocks") for name in values) == 6
    for name, value in values.items():
        assert_near(value, expected[name])


def test_training_changes_the_chosen_parameters_and_no_others():
    model, trunk = make(left_trainable)
    before = copy.deepcopy(model.state_dict())
    client = Client(trunk).train()
    step(client, draw_images(model), torch.tensor([0, 1]))
    changed = {name for name, value in model.state_dict().items() if (value != before[name]).any()}
    assert changed == {name for name, _ in trunk.trainable.named_parameters()}
    assert not any(module.training for module in model.modules())  # the client is in train mode


def test_other_parameters_must_stay_frozen():
    model, trunk = make(left_trainable)
    model.blocks[1].norm1.weight.requires_grad_()
    with raises(ValueError, "`trunk` must stay frozen, as freeze(model) left it; got a model with"):
        fp.encode_prompted(trunk, draw_images(model))


HEADS = {
    "timm": lambda: tiny_vit(num_classes=5),
    "distilled": lambda: VisionTransformerDistilled(16, 8, embed_dim=12, num_heads=2, depth=2),
    "torchvision": lambda: TorchVit(16, 8, 2, 2, 12, 24),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_classifier_stays_yours_to_train(name):
    model, images = HEADS[name]().train(), torch.rand(2, 3, 16, 16)
    found = model.heads if name == "torchvision" else model.get_classifier()
    heads = list(found) if isinstance(found, tuple) else [found]
    parameters = [parameter for head in heads for parameter in head.parameters()]
    before = fp.fingerprint(fp.vit_trunk(model))
    for given in (None, heads):  # passing it changes nothing but its place in `trainable`
        trunk = fp.vit_trunk(model, trainable=given)
        assert all(each.requires_grad for each in parameters)
        assert all(head.training for head in heads)
        trained = [each for each in model.parameters() if each.requires_grad]
        assert list(map(id, trained)) == list(map(id, parameters))
        assert len(list(trunk.trainable.parameters())) == len(parameters) * (given is not None)
    with torch.no_grad():
        parameters[0].add_(1)
    fp.encode_prompted(trunk, images.to(parameters[0]))
    assert fp.fingerprint(trunk) == before
    frozen = fp.vit_trunk(fp.freeze(model))
    assert not any(each.requires_grad for each in frozen.model.parameters())


def test_adapters_that_were_not_named_are_not_frozen_silently():
    model = with_lora()
    model.blocks[1].mlp.adapter_down = nn.Linear(DIM, 2)
    lora = [each for name, each in model.named_parameters() if "lora_" in name]
    with raises(ValueError, "got a model that trains blocks.1.mlp.adapter_down.weight, blocks.1"):
        fp.vit_trunk(model, trainable=lora)
    assert model.blocks[1].mlp.adapter_down.weight.requires_grad


# --- Copies


@every_part
def test_a_deep_copy_trains_its_own_parameters_and_shares_the_frozen_ones(part):
    model, trunk = make(part)
    client = Client(trunk)
    images, labels = draw_images(model), torch.tensor([0, 1])
    before, first = fp.snapshot(client), client(images)
    twin = copy.deepcopy(client)
    assert torch.equal(twin(images), first)
    for name, value in model.named_parameters():
        places = [torch._C._data_address(p) for p in (twin.trunk.model.get_parameter(name), value)]
        shared = places[0] == places[1]
        assert shared == (name not in dict(trunk.trainable.named_parameters()))
    step(twin, images, labels)
    assert all(torch.equal(value, before[name]) for name, value in fp.snapshot(client).items())
    assert torch.equal(client(images), first)
    step(client, images, labels)
    assert torch.equal(client(images), twin(images))  # both took the same step
    assert not torch.equal(client(images), first)


def test_a_deep_copy_without_trained_parameters_has_the_same_trunk():
    _, trunk = make(left_trainable)
    with raises(RuntimeError, "The trainable parameters of a trunk belong to its model"):
        copy.copy(trunk.trainable)
    frozen = Client(fp.vit_trunk(tiny_vit()))
    assert copy.deepcopy(frozen).trunk is frozen.trunk


def test_gradients_of_single_samples_are_refused():
    """They need a copy for each sample, and would miss the parameters inside the trunk."""
    _, trunk = make(left_trainable)
    with raises(RuntimeError, "The trainable parameters of a trunk belong to its model"):
        per_sample(Client(trunk), 2)


@every_part
@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_reaches_them_too(part, assign):
    model, trunk = make(part)
    images = draw_images(model)
    state = {name: value + 0.1 for name, value in trunk.trainable.state_dict().items()}
    before = fp.encode_prompted(trunk, images).pooled
    trunk.trainable.load_state_dict(state, assign=assign)
    for name, value in state.items():
        assert torch.equal(model.get_parameter(name), value)
    assert (fp.encode_prompted(trunk, images).pooled - before).abs().max() > 1e-6


# --- Fingerprints and late prompts


def test_the_fingerprint_is_that_of_the_frozen_part():
    model, trunk = make(left_trainable)
    before = fp.fingerprint(trunk)
    with torch.no_grad():
        for parameter in trunk.trainable.parameters():
            parameter += 1
    assert fp.fingerprint(trunk) == before
    with torch.no_grad():
        model.blocks[0].norm1.weight[0] += 1
    assert fp.fingerprint(trunk)["weights"] != before["weights"]


def test_late_lora_goes_with_late_prompts():
    model = tiny_vit()
    trunk = fp.vit_trunk(model, trainable=[model.blocks[2].mlp, model.norm])
    images = draw_images(model)
    prompts = fp.LayeredPrompts(2, trunk, layers=(2,)).double()
    tokens = fp.encode_front(trunk, images, start=2)
    assert not tokens.requires_grad
    late = fp.encode_from(trunk, tokens, prompts(), start=2).pooled
    expected = fp.encode_prompted(trunk, images, prompts()).pooled
    assert torch.equal(late, expected)
    parameters = [*trunk.trainable.parameters(), prompts.tokens]
    ours = torch.autograd.grad(late.square().sum(), parameters)
    for actual, other in zip(
        ours, torch.autograd.grad(expected.square().sum(), parameters), strict=True
    ):
        assert torch.equal(actual, other)


@pytest.mark.parametrize(
    ("part", "name"),
    [
        (lambda model: [model.blocks[1].norm2], "blocks.1.norm2.weight"),
        (lambda model: [model.cls_token], "cls_token"),
        (lambda model: [model.patch_embed], "patch_embed.proj.weight"),
    ],
)
def test_cached_tokens_behind_trained_parameters_are_refused(part, name):
    model = tiny_vit()
    trunk = fp.vit_trunk(model, trainable=part(model))
    with torch.no_grad():
        tokens = fp.encode_front(trunk, draw_images(model), start=2)
    with raises(ValueError, f"because tokens before them are out of date; got 2, behind {name}."):
        fp.encode_from(trunk, tokens, start=2)
