"""Chunks, checkpointing, devices, precision and compilation of the text tower."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from clips import NAMES, TOKENIZER, TOWERS, draw, make_clip
from fedprompt import TextTower, freeze, prompted_text
from tolerance import assert_near


def gradients(features, *inputs):
    return torch.autograd.grad((features * draw(*features.shape, seed=5)).sum(), inputs)


@pytest.mark.parametrize(
    ("kind", "chunk", "specific"),
    [
        ("CLIP", 1, False), ("CLIP", 4, True), ("CLIP", 11, False), ("CLIP", 100, True),
        ("both ways, last", 4, False), ("both ways, last", 11, True),
    ],
)  # fmt: skip
def test_chunks_of_classes_change_neither_features_nor_gradients(kind, chunk, specific):
    model = make_clip(**TOWERS[kind])
    context = draw(2, *[len(NAMES)] * specific, 5, 16).requires_grad_()
    results = []
    for tower in (TextTower(model, TOKENIZER), TextTower(model, TOKENIZER, class_chunk=chunk)):
        text = prompted_text(
            context, tower.class_names(NAMES), name_position=2, class_specific=specific
        )
        features = tower(text)
        results.append((features, *gradients(features, context)))
    for chunked, expected in zip(*reversed(results), strict=True):
        assert_near(chunked, expected)
    with torch.no_grad():
        assert_near(tower(text), results[0][0])


def test_the_backward_pass_encodes_each_chunk_again():
    """There are 3 chunks of up to 4 classes."""
    tower = TextTower(make_clip(), TOKENIZER, class_chunk=4)
    runs = counted(tower.model.transformer.resblocks[0].mlp)
    context = draw(1, 5, tower.dim).requires_grad_()
    features = tower(
        prompted_text(context, tower.class_names(["cat", "dog", "oak"] * 3 + ["elm", "ash"]))
    )
    assert len(runs) == 3
    features.sum().backward()
    assert len(runs) == 6


def test_gradient_checkpointing_of_the_model_is_respected():
    model = make_clip()
    tower = TextTower(model, TOKENIZER)
    context = draw(2, 5, tower.dim).requires_grad_()
    plain = gradients(tower(prompted_text(context, tower.class_names(["cat", "dog"]))), context)
    model.set_grad_checkpointing()
    runs = counted(model.transformer.resblocks[0].mlp)
    frugal = gradients(tower(prompted_text(context, tower.class_names(["cat", "dog"]))), context)
    assert len(runs) == 2
    assert_near(*frugal, *plain)


def counted(module):
    runs = []
    module.register_forward_pre_hook(lambda *_: runs.append(1))
    return runs


def test_vmap_over_clients_equals_a_loop():
    tower = TextTower(make_clip(), TOKENIZER)
    names = tower.class_names(NAMES)

    def loss(context):
        return tower(prompted_text(context, names)).square().sum()

    contexts = draw(3, 2, 5, tower.dim)
    with sdpa_kernel(SDPBackend.MATH):  # vmap over the fused CPU kernel warns
        stacked = torch.func.vmap(torch.func.grad(loss))(contexts)
    for client, context in enumerate(contexts.requires_grad_()):
        assert_near(stacked[client], torch.autograd.grad(loss(context), context)[0])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", ["CLIP", "both ways, last"])
def test_sentences_are_on_the_device_of_the_model(kind, device):
    """Compare float32 on the device with float64 on the CPU."""
    expected, _ = encoded(make_clip(**TOWERS[kind]))
    features, text = encoded(make_clip(**TOWERS[kind]).float().to(device))
    assert {tensor.device.type for tensor in (features, *text[:2])} == {device}
    assert_near(features.cpu(), expected)


def encoded(model):
    tower = TextTower(model, TOKENIZER, class_chunk=4)
    context = draw(2, 5, 16).to(model.logit_scale.detach())
    text = prompted_text(context, tower.class_names(NAMES), name_position=2)
    return tower(text), text


@pytest.mark.parametrize("kind", ["CLIP", "both ways, end of text"])
def test_autocast_gives_the_features_of_the_model(kind):
    model = make_clip(**TOWERS[kind]).float()
    tower = TextTower(model, TOKENIZER)
    with torch.autocast("cpu", torch.bfloat16):
        features = tower(prompted_text(tower.words("a photo of a")[None], tower.class_names(NAMES)))
        expected = model.encode_text(TOKENIZER([f"a photo of a {name}." for name in NAMES]))
    assert features.dtype == expected.dtype
    assert_near(features[0], expected, dtype=torch.bfloat16)


@pytest.mark.benchmark
@pytest.mark.parametrize("kind", ["CLIP", "both ways, last"])
def test_the_tower_compiles_in_one_graph(kind):
    torch.compiler.reset()
    tower = TextTower(make_clip(**TOWERS[kind]), TOKENIZER)
    names, context = tower.class_names(NAMES), draw(2, 5, 16).requires_grad_()

    def encode(context):
        return tower(prompted_text(context, names))

    results = []
    for call in (encode, torch.compile(encode, fullgraph=True, backend="aot_eager")):
        features = call(context)
        results.append((features, *gradients(features, context)))
    for compiled, expected in zip(*reversed(results), strict=True):
        assert_near(compiled, expected)


def with_lora(part):
    """Inject LoRA into one part of a model."""
    from peft import LoraConfig, inject_adapter_in_model

    model = make_clip()
    inject_adapter_in_model(LoraConfig(target_modules=["c_fc"]), part(model))
    return model


@pytest.mark.parametrize("part", ["visual", "transformer"])
def test_a_model_with_adapters_is_refused_unless_it_is_frozen(part):
    model = with_lora(lambda model: getattr(model, part))
    rule = rf"`clip_model` must have no adapters.*; got a model that trains {part}\..*lora_A"
    with pytest.raises(ValueError, match=rule):
        TextTower(model, TOKENIZER)
    TextTower(freeze(model), TOKENIZER)


def test_one_tower_may_already_be_frozen():
    sine = make_clip(vision={"pos_embed_type": "sin_cos_2d"})  # a position table without gradients
    image, text = make_clip(), make_clip()
    freeze(image.visual)
    text.lock_text_tower()
    for model in (sine, image, text):
        TextTower(model, TOKENIZER)
