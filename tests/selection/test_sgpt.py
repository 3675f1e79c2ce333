"""SGPT on a small transformer in float64: laws of its blocks, its server and a round."""

import pytest
import timm
import torch
import torch.nn as nn
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

import fedprompt as fp
from models import draw_images, tiny_vit
from references import sgpt
from references.vpt import prompted_vit
from same import assert_identical
from tolerance import assert_near

DIM, CLASSES, EPOCHS, BATCH = 12, 3, 2, 4
SIZES = {0: 6, 1: 9, 2: 4}  # clients that differ in data and in size
BACKBONE = tiny_vit(depth=4)
TRUNK = fp.vit_trunk(BACKBONE)


class Model(nn.Module):
    """Trained modules of an SGPT client."""

    def __init__(self, groups=5, *, seed=0, shared=(0, 1), own=(2, 3), lengths=(1, 1), **selection):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.shared = fp.LayeredPrompts(
            lengths[0], DIM, layers=shared, patch_size=1, generator=generator
        )
        self.groups = fp.GroupPrompts(
            groups, lengths[1], DIM, layers=own, patch_size=1, generator=generator
        )
        self.selector = fp.SelectionKeys(groups, DIM, generator=generator, **selection)
        self.head = nn.Linear(DIM, CLASSES)
        for parameter in self.head.parameters():
            nn.init.normal_(parameter, generator=generator)
        self.double()

    def first(self, images):
        """Block I: shared prompts, no groups."""
        return self.head(fp.encode_prompted(TRUNK, images, self.shared()).pooled)

    def second(self, images, indices):
        """Block II and inference: the mean of the pooled token and the groups' own tokens."""
        pooled, streams, _ = fp.encode_prompted(TRUNK, images, self.shared(), self.groups(indices))
        return self.head(torch.cat([pooled[:, None], streams[1]], 1).mean(1))

    def forward(self, images):
        return self.second(images, self.selector(query_of(images)).indices)


@torch.no_grad()
def query_of(images):
    return fp.encode_prompted(TRUNK, images).pooled


def data_of(client):
    images = draw_images(BACKBONE, SIZES[client], seed=10 + client)
    return images + client, torch.arange(SIZES[client]) % CLASSES


def sgd(*parts, weight_decay=0.0):
    return torch.optim.SGD(
        [parameter for part in parts for parameter in part.parameters()],
        0.05,
        0.9,
        weight_decay=weight_decay,
    )


def descend(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def block_one(model, images, labels):
    with fp.training_only(model, model.shared, model.head):
        optimizer = sgd(model.shared, model.head)
        for _ in range(EPOCHS):
            for part in torch.arange(len(images)).split(BATCH):
                descend(optimizer, F.cross_entropy(model.first(images[part]), labels[part]))


def block_two(model, images, labels):
    queries = query_of(images)
    with fp.training_only(model, model.groups, model.selector, model.head):
        optimizer = sgd(model.groups, model.selector, model.head)
        for _ in range(EPOCHS):
            for part in torch.arange(len(images)).split(BATCH):
                indices = model.selector(queries[part]).indices
                loss = F.cross_entropy(model.second(images[part], indices), labels[part])
                descend(optimizer, loss + fp.key_loss(queries[part], model.selector.keys, indices))


def upload_of(model, values, usage, client, blocks=(block_one, block_two)):
    fp.load_values(model, values)
    model.selector.start_round(usage)
    for block in blocks:
        block(model, *data_of(client))
    return fp.collect(model, weight=SIZES[client], rows={"selector.keys": model.selector.counts})


def server_of(values, decay=0.5):
    server = fp.update_by_name({"selector": fp.ema(decay=decay), "groups": fp.ema(decay=decay)})
    return server, server.init(values)


def moved(model, before):
    return {
        name for name, value in fp.snapshot(model).items() if not torch.equal(value, before[name])
    }


# Blocks.


def test_each_block_changes_its_own_parts_only():
    model, data = Model(), data_of(1)
    before = fp.snapshot(model)
    block_one(model, *data)
    assert moved(model, before) == {"shared.tokens", "head.weight", "head.bias"}
    before = fp.snapshot(model)
    block_two(model, *data)
    assert moved(model, before) == {"groups.tokens", "selector.keys", "head.weight", "head.bias"}


def test_rows_of_groups_that_were_not_selected_are_unchanged():
    model = Model(groups=12)
    before = fp.snapshot(model)
    block_two(model, *data_of(2))
    idle = model.selector.counts == 0
    assert 0 < idle.sum() < 12
    for name in ("groups.tokens", "selector.keys"):
        after = fp.snapshot(model)[name]
        assert torch.equal((after != before[name]).flatten(1).any(1), ~idle), name


def test_no_gradient_reaches_the_backbone():
    weights = {name: value.clone() for name, value in BACKBONE.state_dict().items()}
    model = Model()
    block_one(model, *data_of(0))
    block_two(model, *data_of(0))
    assert all(parameter.grad is None for parameter in BACKBONE.parameters())
    assert all(torch.equal(weights[name], value) for name, value in BACKBONE.state_dict().items())


def test_blocks_can_be_swapped_or_trained_jointly():
    """The paper's ablation has block II first, or both jointly. All three results differ."""

    def joint(model, images, labels):
        optimizer = sgd(model)
        for part in torch.arange(len(images)).split(BATCH):
            queries = query_of(images[part])
            indices = model.selector(queries).indices
            loss = F.cross_entropy(model.second(images[part], indices), labels[part])
            descend(optimizer, loss + fp.key_loss(queries, model.selector.keys, indices))

    model, results = Model(), []
    values = fp.snapshot(model)
    for blocks in ((block_one, block_two), (block_two, block_one), (joint,)):
        upload_of(model, values, torch.zeros(5), 1, blocks)
        assert moved(model, values) == values.keys()
        results.append(fp.snapshot(model)["head.weight"])
    assert all(
        (one - other).abs().max() > 1e-6
        for one, other in [(results[0], results[1]), (results[1], results[2])]
    )


# The model.


def test_with_one_group_the_selection_has_no_effect():
    model, (images, labels) = Model(groups=1), data_of(1)
    logits = model.eval()(images)
    with torch.no_grad():
        model.selector.keys.normal_(generator=torch.Generator().manual_seed(3))
    assert torch.equal(model(images), logits)
    block_two(model.train(), images, labels)
    assert model.selector.counts.tolist() == [EPOCHS * SIZES[1]]


def test_with_equal_prompts_in_all_groups_the_selection_has_no_effect():
    model, (images, _) = Model(), data_of(1)
    with torch.no_grad():
        different = [model.second(images, torch.full((SIZES[1],), group)) for group in range(5)]
        model.groups.tokens.copy_(model.groups.tokens[:1].expand(5, -1, -1, -1))
        same = [model.second(images, torch.full((SIZES[1],), group)) for group in range(5)]
    assert all(torch.equal(logits, same[0]) for logits in same)
    assert all((logits - different[0]).abs().max() > 1e-3 for logits in different[1:])


@pytest.mark.parametrize("pool", ["token", "avg"])
def test_without_group_prompts_sgpt_is_vpt_with_accumulated_prompts(pool):
    backbone = tiny_vit(depth=4, global_pool=pool)
    images = draw_images(backbone, 3)
    shared = fp.LayeredPrompts(
        2, DIM, layers=(0, 1, 3), generator=torch.Generator().manual_seed(0)
    ).double()
    empty = fp.GroupPrompts(5, 0, DIM, layers=(1, 2)).double()
    pooled, streams, _ = fp.encode_prompted(
        fp.vit_trunk(backbone), images, shared(), empty(torch.tensor([4, 0, 0]))
    )
    expected, _ = prompted_vit(backbone, images, [(shared().layers, False)])
    assert streams[1].shape == (3, 0, DIM)
    assert_near(torch.cat([pooled[:, None], streams[1]], 1).mean(1), expected)


@settings(deadline=None, max_examples=15)
@given(
    layers=st.tuples(*[st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True)] * 2),
    lengths=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    replace=st.tuples(st.booleans(), st.booleans()),
    order=st.booleans(),
)
def test_the_readout_is_the_mean_of_pooled_and_group_tokens_for_any_layers(
    layers, lengths, replace, order
):
    """Shared and group layers have any order. The reference tracks the owner of each token."""
    generator, images = torch.Generator().manual_seed(0), draw_images(BACKBONE, 3)
    shared = fp.LayeredPrompts(
        lengths[0], DIM, layers=layers[0], replace=replace[0], generator=generator
    ).double()
    groups = fp.GroupPrompts(
        4, lengths[1], DIM, layers=layers[1], replace=replace[1], generator=generator
    ).double()
    chosen = torch.tensor([3, 0, 3])
    streams, position = [shared(), groups(chosen)], 1
    tokens = {layer: groups.tokens.detach()[chosen, row] for row, layer in enumerate(layers[1])}
    reference = [
        (dict(zip(layers[0], shared.tokens.detach(), strict=True)), replace[0]),
        (tokens, replace[1]),
    ]
    if order:
        streams, reference, position = streams[::-1], reference[::-1], 0
    encoded, (pooled, outputs) = (
        fp.encode_prompted(TRUNK, images, *streams),
        prompted_vit(BACKBONE, images, reference),
    )
    assert encoded.streams[position].shape[1] == lengths[1] * (1 if replace[1] else len(layers[1]))
    readout = torch.cat([encoded.pooled[:, None], encoded.streams[position]], 1).mean(1)
    assert_near(readout, torch.cat([pooled[:, None], outputs[position]], 1).mean(1))


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
    assert (
        sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        == 141_412
    )
    assert (
        sum(value.numel() for value in fp.snapshot(model).values()) == 141_412
    )  # no buffer is sent


@pytest.mark.parametrize("depth", [None, 2])
def test_queries_are_features_of_the_unprompted_backbone_and_can_be_computed_once(depth):
    images, _ = data_of(1)
    expected, _ = prompted_vit(BACKBONE, images, [], depth=depth)

    def encode(images):
        return fp.encode_prompted(TRUNK, images, depth=depth).pooled

    cached = fp.precompute(encode, TensorDataset(images), batch_size=4)
    assert_near(cached, expected)
    selector = fp.SelectionKeys(5, DIM, generator=torch.Generator().manual_seed(0)).double().eval()
    assert torch.equal(selector(cached).indices, selector(encode(images)).indices)


# The server.


def test_the_server_against_the_equations():
    """Keys have counts as weights, prompts and head have sizes. The first two have momentum."""
    model = Model(groups=12)
    values = fp.snapshot(model)
    before = torch.tensor(
        [5.0, *[0] * 4, *[900] * 7]
    )  # seven groups with large counts, which are not selected
    payloads = [upload_of(model, values, before, client) for client in SIZES]
    counts = torch.stack([upload["selector.keys"].weight for upload in payloads])
    assert ((counts.sum(0) == 0).any(), (counts[:, counts.sum(0) > 0].std(0) > 0).any()) == (
        True,
        True,
    )
    server, state = server_of(values)
    new, _ = server.step(values, fp.weighted_mean(payloads), state)

    def plain(message, counts, size):
        prompts = message["groups.tokens"].flatten(1).tolist()
        return sgpt.Upload(
            message["selector.keys"].tolist(), prompts, message["head.bias"].tolist(), counts, size
        )

    sent = [
        plain(
            {name: entry.value for name, entry in upload.items()},
            upload["selector.keys"].weight.tolist(),
            SIZES[client],
        )
        for client, upload in zip(SIZES, payloads, strict=True)
    ]
    keys, prompts, head = sgpt.server(plain(values, [], 0), sent, decay=0.5)
    for name, expected in (
        ("selector.keys", keys),
        ("groups.tokens", prompts),
        ("head.bias", head),
    ):
        assert_near(
            new[name].reshape(torch.tensor(expected).shape),
            torch.tensor(expected, dtype=torch.float64),
        )
    idle = counts.sum(0) == 0
    assert_identical(
        new["selector.keys"][idle], values["selector.keys"][idle]
    )  # law G-g: exactly, because rows of weight 0 have no momentum


def test_group_prompts_can_be_weighted_by_counts():
    model = Model()
    values = fp.snapshot(model)
    upload_of(model, values, torch.zeros(5), 1)
    counts = model.selector.counts
    payload = fp.collect(model, weight=9, rows={"selector.keys": counts, "groups.tokens": counts})
    assert torch.equal(payload["groups.tokens"].weight, counts.float())
    server, state = server_of(values, decay=0.0)
    new, _ = server.step(values, fp.weighted_mean([payload]), state)
    assert_identical(new["groups.tokens"][counts == 0], values["groups.tokens"][counts == 0])


def a_round(model, values, usage, order, start=upload_of):
    """Run a round with clients in any order; the server sums in the order of their ids."""
    payloads = {client: start(model, values, usage, client) for client in order}
    server, state = server_of(values)
    mean = fp.weighted_mean(payloads[client] for client in sorted(payloads))
    return server.step(values, mean, state)[0], usage + mean["selector.keys"].weight


def test_the_servers_result_is_independent_of_the_order_of_clients():
    model = Model()
    values, usage = fp.snapshot(model), torch.zeros(5)
    for number in range(1, 3):
        forwards = a_round(model, values, usage, [0, 1, 2])
        assert_identical(a_round(model, values, usage, [2, 0, 1]), forwards)
        values, usage = forwards
        assert usage.sum() == number * EPOCHS * sum(SIZES.values())
