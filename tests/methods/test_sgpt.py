"""SGPT against slow loops in float64, with its defaults and with the values of its paper."""

from functools import cache, partial

import pytest
import timm
import torch
import torch.nn as nn
from timm.models.vision_transformer import VisionTransformer

import fedprompt as fp
from fedprompt.methods.sgpt import sgpt
from references import sgpt as reference
from refusals import refused
from tiny_federations import last, vit_federation

SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3}
SHARED, GROUPS = ("shared", "head"), ("groups", "selector", "head")
PAPER = {"shared_layers": (0, 1, 2), "group_layers": (3, 4, 5), "averaged": True, "replace": True}
VARIANTS = {
    "defaults, which have the paper's layers and readout": PAPER,
    "halves, old prompts kept, class token": {"shared_layers": (0, 1, 2), "group_layers": (3, 4, 5)}
    | {"averaged": False, "replace": False},
    "counts fixed within a round": PAPER | {"live": False},
    "features, two momenta": PAPER
    | {"query_depth": 5, "num_groups": 4, "key_decay": 0.2, "decay": 0.9},
    "Eq. 5 inserts, authors' readout, inverse": PAPER
    | {"insert_nearest": True, "replace": False, "blocks": [GROUPS, SHARED]},
    "class token, later groups, joint, no momentum": PAPER
    | {"averaged": False, "shared_layers": (0,), "group_layers": (2, 5), "decay": 0.0}
    | {"query_depth": 1}
    | {"blocks": [("shared", *GROUPS)]},
    "groups only, plain keys": PAPER | {"blocks": [GROUPS], "offset": 1e6},
    "shared only, one group": PAPER | {"blocks": [SHARED], "num_groups": 1},
}


@cache
def six_blocks(dtype):
    torch.manual_seed(0)
    sizes = {"img_size": 8, "patch_size": 4, "in_chans": 1, "num_classes": 0}
    network = VisionTransformer(embed_dim=8, depth=6, num_heads=2, **sizes)
    with torch.no_grad():
        for weight in network.blocks.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.3)
    return fp.vit_trunk(network)


def federation(**changes):
    """Three of five clients in each of two rounds, and six blocks in which prompts matter."""
    make = partial(torch.optim.SGD, **{name: SGD[name] for name in ("momentum", "weight_decay")})
    one = {
        "trunks": [six_blocks(torch.get_default_dtype())],
        "make_optimizer": make,
        "steps": 3,
        "num_prompts": 1,
    }
    return vit_federation(**one | changes)


@pytest.mark.parametrize("name", VARIANTS)
def test_two_rounds_are_those_of_the_reference(name, float64):
    made, values = federation(), dict(VARIANTS[name])
    given = {} if name.startswith("defaults") else values
    run = last(sgpt, made, learning_rate=SGD["lr"], **given)
    now, found = run.method.server.state["values"], run.of(0)
    usage = [0.0] * values.pop("num_groups", 5)
    values.setdefault("key_decay", values.get("decay", 0.5))
    model = reference.Model(made.trunk.model, **values)
    for server_round, cohort in enumerate(made.cohorts()):
        batches = [list(made.batches(client, server_round)) for client in cohort]
        trained = [reference.trained(model, now, usage, own, SGD) for own in batches]
        sent, counts = zip(*trained, strict=True)
        now = reference.server(model, now, sent, counts, [*map(made.num_examples, cohort)])
        usage = [sum(each) for each in zip(usage, *counts, strict=True)]
    near = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(fp.snapshot(found), now, **near)
    assert found.selector.usage.tolist() == usage
    expected = reference.predictions(model, now, made.inputs)
    torch.testing.assert_close(found(made.inputs).detach(), expected, **near)


def test_one_batch_trains_the_last_block():
    made = federation(steps=1)
    before = sgpt(made).server.state["values"]
    model = last(sgpt, made).of(0)
    assert not model.query(made.inputs[:2].requires_grad_()).requires_grad
    now = fp.snapshot(model)
    moved = {name.split(".")[0] for name in now if not torch.allclose(now[name], before[name])}
    assert moved == {"groups", "selector", "head"}
    assert model.selector.usage.sum() == 24  # 4 images of 3 clients in 2 rounds


def test_another_selector_chooses_and_is_counted():
    def third(query, keys, *, usage):
        return fp.interfaces.Selection(torch.full((len(query),), 2), query.new_zeros(len(query)))

    model = last(sgpt, federation(), selector=third).of(0)
    assert model.selector.usage.tolist() == [0, 0, 48, 0, 0]  # two of three batches


def made(**values):
    return sgpt(federation(), **values)


test_wrong_values_are_refused_by_name = refused(globals())("""
made(num_groups=9) -> ValueError: `num_groups` must be at most 8, `dim`, because more
made(shared_layers=(6,)) -> ValueError: `shared_layers` and `group_layers` must be below 6; got (
made(group_layers=(-1,)) -> ValueError: `shared_layers` and `group_layers` must be below 6; got (
made(shared_layers=0) -> TypeError: `shared_layers` must be a sequence of values; got 0
made(group_layers=[[0]]) -> ValueError: `shared_layers` and `group_layers` must be below 6; got (
made(group_layers=(3, 3)) -> ValueError: `layers` must contain at least one layer, and none twice
made(query_depth=7) -> ValueError: `query_depth` must be 1 to 6, or None; got 7.
made(key_decay=-0.1) -> ValueError: `key_decay` must be at least 0; got -0.1.
made(blocks=[]) -> ValueError: `blocks` must name parts among ['groups', 'head', 'selector', 'shared
made(blocks=("shared", "head")) -> TypeError: `blocks[0]` must be a sequence of values; got
made(blocks=[("shared", "heads")]) -> ValueError: `blocks` must name parts among ['groups', 'head',
last(sgpt, federation(), selector=lambda q, k, usage: None) -> TypeError: `selector` must return a
made(blocks=[("selector", "head")]) -> ValueError: and "selector" with "groups" only; got
made(selector=fp.selection.select_balanced) -> TypeError: `selector` must take (query, keys
made(offset=0.0) -> ValueError: `offset` must be above 0; got 0.0.
""")


def test_the_number_of_parameters_in_the_papers_cifar_100_setting():
    # ViT-B/16 with four shared layers, 20 groups at three layers and 20 keys, of one token each:
    # (4 + 60 + 20) * 768 + 100 * 769 = 141,412.
    with torch.device("meta"):
        trunk = fp.vit_trunk(timm.create_model("vit_base_patch16_224", pretrained=False))
        model = nn.ModuleDict(
            {
                "shared": fp.LayeredPrompts(1, trunk.dim, layers=range(4)),
                "groups": fp.GroupPrompts(20, 1, trunk.dim, layers=(4, 5, 6)),
                "selector": fp.selection.SelectionKeys(20, trunk.dim),
                "head": nn.Linear(trunk.dim, 100),
            }
        )
    assert sum(value.numel() for value in fp.snapshot(model).values()) == 141_412  # no buffers
