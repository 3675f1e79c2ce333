"""SGPT: two blocks, each with its own part of the model, and momentum for keys and groups alone."""

import pytest
import timm
import torch
import torch.nn as nn
import torch.nn.functional as F

import fedprompt as fp
from fedprompt.methods.sgpt import _GroupedModel, sgpt
from tiny_federations import descend, last, parameters, vit_federation


def one_client(**changes):
    one = {"rounds": 1, "clients": [0], "cohort_size": 1, "make_optimizer": torch.optim.SGD}
    return vit_federation(**one | changes)


def start(federation):
    torch.manual_seed(federation.seed)
    return fp.snapshot(_GroupedModel(federation, 5, [["shared", "groups"]]))


def test_momentum_moves_groups_and_keys_half_of_the_way_and_nothing_else():
    federation = one_client()
    before = start(federation)
    full, half, none = (
        parameters(last(sgpt, one_client(), learning_rate=0.5, decay=decay), 0)
        for decay in (0.0, 0.5, 1.0)
    )
    for name, value in full.items():
        if name.startswith(("groups", "selector")):
            assert not torch.equal(value, before[name])
            assert torch.equal(none[name], before[name])
            torch.testing.assert_close(half[name], (value + before[name]) / 2)
        else:
            assert torch.equal(none[name], value)
            assert torch.equal(half[name], value)


def test_the_first_block_has_no_groups_and_the_second_no_gradient_of_shared_prompts():
    federation = one_client()
    found = parameters(last(sgpt, federation, learning_rate=0.5, decay=0.0), 0)
    torch.manual_seed(federation.seed)
    model = _GroupedModel(federation, 5, [["shared", "groups"]])
    first, second = federation.batches(0, 0)
    parts = nn.ModuleList([model.shared, model.head])
    descend(F.cross_entropy(model.logits(first[0]), first[1]), parts.parameters(), 0.5)
    nearest = F.normalize(model.query(second[0])) @ F.normalize(model.selector.keys.detach()).T
    chosen = nearest.argmax(1)
    keys = F.normalize(model.selector.keys[chosen])
    loss = F.cross_entropy(model.logits(second[0], chosen), second[1])
    loss = loss - (F.normalize(model.query(second[0])) * keys).sum(1).mean()
    parts = nn.ModuleList([model.groups, model.selector, model.head])
    descend(loss, parts.parameters(), 0.5)
    torch.testing.assert_close(found, fp.snapshot(model))


def test_the_server_counts_the_images_of_the_second_block():
    """Two of three batches of four images are in the second block, at each of three clients."""
    usage = last(sgpt, vit_federation(steps=3)).of(0).selector.usage
    assert usage.sum() == 2 * 2 * 4 * 3  # in two rounds


@pytest.mark.parametrize("steps", [2, 5])
def test_all_batches_are_used_once(steps, monkeypatch):
    seen = []
    loss = _GroupedModel.loss
    monkeypatch.setattr(
        _GroupedModel, "loss", lambda *given: (seen.append(given[3]), loss(*given))[1]
    )
    last(sgpt, one_client(steps=steps))
    assert seen == [False] * (steps // 2) + [True] * (steps - steps // 2)


SHARED, GROUPS = ("shared", "head"), ("groups", "selector", "head")


@pytest.mark.parametrize(
    ("blocks", "still", "order"),
    [
        ([SHARED], {"groups", "selector"}, [False] * 4),
        ([GROUPS], {"shared"}, [True] * 4),
        ([("shared", *GROUPS)], set(), [True] * 4),
        ([GROUPS, SHARED], set(), [True, True, False, False]),
    ],
)
def test_blocks_train_their_parts_in_order_and_other_parts_are_not_used(
    blocks, still, order, monkeypatch
):
    seen, loss = [], _GroupedModel.loss
    monkeypatch.setattr(
        _GroupedModel, "loss", lambda *given: (seen.append(given[3]), loss(*given))[1]
    )
    federation = one_client(steps=4)
    before = start(federation)
    model = last(sgpt, federation, blocks=blocks, decay=0.0).of(0)
    found = fp.snapshot(model)
    assert seen == order
    assert {name.split(".")[0] for name in found if torch.equal(found[name], before[name])} == still
    logits = model(federation.inputs).detach()
    with torch.no_grad():
        for part in still:
            for parameter in getattr(model, part).parameters():
                parameter.normal_()
    assert torch.equal(model(federation.inputs), logits)


def test_a_large_offset_selects_the_nearest_key_in_training():
    model = last(sgpt, vit_federation(), offset=1e6).of(0).train()
    query = model.query(vit_federation().inputs)
    model.selector.start_round(torch.tensor([1e3, 0.0, 0.0, 0.0, 0.0]))
    assert torch.equal(
        model.selector(query).indices,
        fp.selection.select_nearest(query, model.selector.keys).indices,
    )


def test_the_head_reads_the_mean_with_group_tokens_at_the_given_layers():
    federation = one_client()
    model = last(sgpt, federation, averaged=True, layers=(0,)).of(0)
    images, chosen = federation.inputs[:3], torch.tensor([0, 1, 2])
    encoded = fp.encode_prompted(model.trunk, images, model.shared(), model.groups(chosen))
    read = (encoded.pooled + encoded.streams[1][:, 0]) / 2  # one token for each group
    torch.testing.assert_close(model.logits(images, chosen), model.head(read))
    assert model.groups.layers == (0,)


def test_the_number_of_parameters_in_the_papers_cifar_100_setting():
    # ViT-B/16 with four shared layers, 20 groups at three layers and 20 keys, of one token each:
    # (4 + 60 + 20) * 768 + 100 * 769 = 141,412.
    with torch.device("meta"):
        trunk = fp.vit_trunk(timm.create_model("vit_base_patch16_224", pretrained=False))
        model = nn.ModuleDict(
            {
                "shared": fp.LayeredPrompts(1, trunk.dim, layers=range(4)),
                "groups": fp.GroupPrompts(20, 1, trunk.dim, layers=(4, 5, 6)),
                "selector": fp.SelectionKeys(20, trunk.dim),
                "head": nn.Linear(trunk.dim, 100),
            }
        )
    assert sum(value.numel() for value in fp.snapshot(model).values()) == 141_412  # no buffers
