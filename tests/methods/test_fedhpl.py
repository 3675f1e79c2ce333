"""FedHPL: all variants are those of the paper, and a message has the correct logits alone."""

from functools import partial

import pytest
import torch
import torch.nn as nn
from timm.models.vision_transformer import VisionTransformer

import fedprompt as fp
from fedprompt.interfaces import PromptInjector
from fedprompt.methods import ClientData
from fedprompt.methods.fedhpl import fedhpl, fedhpl_h, fedhpl_p
from references import fedhpl as paper
from references.fedhpl import Axes
from refusals import refused
from sent_messages import sent_by
from tiny_federations import CLASSES, last, mixed_federation, parameters, trunk, vit_federation

VARIANTS = {
    "as in the paper": Axes(),
    "+P, all logits": Axes(share=("prompts",), keep_all=True, temperature=1.5, gamma=2.0),
    "+H, uniform, shallow": Axes(share=("head",), uniform=True, smoothing=0.0, deep=False),
}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("axes", VARIANTS.values(), ids=VARIANTS)
def test_two_rounds_are_those_of_the_paper(axes):
    """Trunks differ in width and depth, and their large weights make prompts count."""
    sgd = partial(torch.optim.SGD, momentum=0.9, weight_decay=1e-4)
    trunks = [wild_trunk(8, 2), wild_trunk(12, 3)]
    made = vit_federation(trunks=trunks, num_prompts=5, batch_size=2, make_optimizer=sgd)
    axes = axes._replace(rate=0.1)
    start, expected, known = reference(made, axes)
    names = ("temperature", "smoothing", "keep_all", "deep", "share")
    values = {name: getattr(axes, name) for name in names} | {"num_prompts": 2}
    values |= {"learning_rate": axes.rate, "distillation_weight": axes.gamma}
    found = last(fedhpl, made, similarity=1.0 if axes.uniform else None, **values)
    for client in made.clients:
        for name, value in parameters(found, client).items():
            torch.testing.assert_close(value, expected[client][name], rtol=0, atol=1e-12)
    for dim, (rows, evidence) in known.items():
        teacher = found.now.server[str(dim)]["logits"]
        torch.testing.assert_close(tuple(teacher), (rows, evidence), rtol=0, atol=1e-12)
        assert (evidence > 0).any()
    moved = expected[1]["prompts.tokens"] - start[1]["prompts.tokens"]
    assert moved.abs().max() > 0.01


def wild_trunk(dim, depth):
    torch.manual_seed(dim)
    sizes = {"img_size": 8, "patch_size": 4, "in_chans": 1, "num_classes": 0, "num_heads": 2}
    model = VisionTransformer(embed_dim=dim, depth=depth, **sizes)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.7)
    return fp.vit_trunk(model)


def reference(made, axes):
    """Return first and last values of all clients, and the last teacher of each width."""
    kind = partial(fp.DeepPrompts if axes.deep else fp.ShallowPrompts, 2)
    start = {k: fp.snapshot(made.new_model(k, prompts=kind)) for k in made.clients}
    values, nothing = dict(start), torch.zeros(CLASSES, CLASSES)
    known = {trunk.dim: (nothing, nothing[0]) for trunk in made.trunks}
    shared = {dim: {} for dim in known}
    for number, cohort in enumerate(made.cohorts()):
        sent = {}
        for k in cohort:
            (vit, dim), (images, labels) = vit_of(made, k), made.own(k)
            own, batches = {**values[k], **shared[dim]}, made.batches(k, number)
            values[k] = paper.train(vit, own, batches, known[dim], axes)
            logits = paper.forward(vit, values[k], images, axes)
            sent[k] = paper.Client(dim, list(logits), labels.tolist())
        known = {dim: paper.teacher([*sent.values()], dim, CLASSES, axes) for dim in known}
        for dim in known:
            alike = {k: values[k] for k in cohort if sent[k].dim == dim}
            if alike and axes.share:
                shared[dim] = paper.averaged(alike, made.num_examples, axes.share)
    return start, values, known


def vit_of(made, client):
    trunk = made.trunk_of(client)
    return trunk.model, trunk.dim


class OneToken(nn.Module):
    """Injector of one's own: a token before the last block alone."""

    def __init__(self, trunk):
        super().__init__()
        self.layer, self.token = trunk.depth - 1, nn.Parameter(torch.zeros(1, trunk.dim))

    def forward(self):
        return fp.PromptStream({self.layer: self.token})


def test_a_foreign_injector_is_trained_in_a_loop_and_in_the_method():
    injector = OneToken(trunk(8))
    assert isinstance(injector, PromptInjector)
    pooled = fp.encode_prompted(trunk(8), torch.ones(2, 1, 8, 8), injector()).pooled
    pooled.square().sum().backward()
    assert injector.token.grad.any()
    for share in ([], ["prompts"]):
        trained = parameters(last(fedhpl, mixed_federation(), prompts=OneToken, share=share), 1)
        assert trained["prompts.token"].any()


test_hyperparameters_out_of_range_are_refused_by_name = refused(globals())("""
fedhpl(SETTING, similarity=-1.0) -> ValueError: `similarity(8, 8)` must be at least 0; got -1.0
fedhpl(SETTING, num_prompts=-1) -> ValueError: `num_prompts` must be at least 0; got -1
fedhpl(SETTING, prompts=fp.DeepPrompts, num_prompts=3) -> ValueError: `prompts` must be None with
fedhpl(SETTING, prompts=fp.DeepPrompts, deep=False) -> ValueError: `prompts` must be None with
fedhpl(SETTING, prompts=lambda trunk: 3) -> TypeError: `prompts(trunk)` must be an nn.Module; got 3
fedhpl(SETTING, prompts=fp.DeepPrompts(2, 8, depth=2)) -> TypeError: `prompts` must make a module
fedhpl(SETTING, prompts=3) -> TypeError: `prompts` must be a function
""")
SETTING = mixed_federation()


def test_parts_of_images_give_the_means_of_all(monkeypatch):
    made = mixed_federation()
    whole = last(fedhpl, made).now.server
    monkeypatch.setattr(ClientData.parts, "__defaults__", (3,))
    in_parts = last(fedhpl, made).now.server
    for width, reply in whole.items():
        torch.testing.assert_close(tuple(in_parts[width]["logits"]), tuple(reply["logits"]))


def test_a_message_has_one_count_for_each_class_and_the_rows_of_correct_classes():
    made = mixed_federation()
    messages = sent_by(made)
    last(fedhpl, made)
    for server_round, client, message in messages.of("up"):
        correct = message["logits"].weight
        sent = made.ledger.total(direction="up", client=client, server_round=server_round)
        assert sent == 4 * (CLASSES + CLASSES * int((correct > 0).sum()))
        assert (correct <= made.data(client, 0).class_counts).all()


@pytest.mark.parametrize(
    ("federation", "parts"),
    [(vit_federation, {"logits", "head"}), (mixed_federation, {"logits", "projection", "head"})],
)
def test_a_projection_is_shared_with_the_head_if_there_is_one(federation, parts):
    made = federation()
    messages = sent_by(made)
    last(fedhpl_h, made)
    names = {name.split(".")[0] for _, _, payload in messages.of("up") for name in payload}
    assert names == parts


def test_prompts_of_unlike_depth_are_refused_by_name():
    deep = VisionTransformer(8, 4, 1, num_classes=0, embed_dim=8, depth=3, num_heads=2)
    made = mixed_federation(trunks=[trunk(8), fp.vit_trunk(deep)])
    with pytest.raises(ValueError, match=r"\['prompts.tokens'\].value` must have the shape of the"):
        fedhpl_p(made)
    fedhpl_h(made)


def test_a_newcomer_with_a_trunk_that_no_client_has_gets_an_answer():
    made = mixed_federation(clients=[1, 3], cohort_size=2)
    predictions, model = last(fedhpl, made), made.new_model(0)
    assert torch.equal(predictions.received(0).head.weight, model.head.weight)


class Counted(fp.DeepPrompts):
    """Prompts with a buffer that each pass changes, in eval mode and in training."""

    def __init__(self, trunk):
        super().__init__(2, trunk, generator=torch.Generator().manual_seed(0))
        self.register_buffer("passes", torch.zeros(2))

    def forward(self):
        self.passes[int(self.training)] += 1
        return super().forward()


def test_buffers_of_a_client_are_there_again_in_a_new_process():
    """Class logits are computed in eval mode, and steps are taken in training mode."""
    made, fresh = mixed_federation(), mixed_federation()
    *_, now = fp.run_rounds(fedhpl(made, prompts=Counted), made.data, [[0], [0]])
    model = now.model(fedhpl(fresh, prompts=Counted), fresh.data(0, 1))
    assert model.prompts.passes.tolist() == [2 * len([*made.data(0, 0).parts()]), 2 * made.steps]
