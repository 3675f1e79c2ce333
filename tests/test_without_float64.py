"""Pieces that compute in float64, on a stand-in for a device that has none (Apple's MPS)."""

from functools import partial

import pytest
import torch

import fedprompt as fp
from fedprompt import Weighted
from fedprompt._float64 import supports_float64
from narrow_device import narrow_device
from same import assert_same

MOMENTUM = partial(torch.optim.SGD, lr=1.0, momentum=0.9)
FRACTION = partial(fp.robust.trimmed_mean, fraction=0.2)
ONE_LIAR = {"num_byzantine": 1}


def drawn_payloads(generator):
    """Five clients; each knows other rows, and the second name has one weight."""
    payloads = []
    for client in range(5):
        rows = torch.randn(4, 3, generator=generator)
        weight = 1 + 10 * torch.rand(4, generator=generator)
        weight[client % 4] = 0
        rows[client % 4] = torch.nan
        head = torch.randn(2, generator=generator)
        whole = Weighted(head, torch.tensor(1.0 + client))
        payloads.append({"prompts": Weighted(rows, weight), "head": whole})
    return payloads


def moved(thing, device):
    """Move all tensors of a nested structure to a device."""
    if isinstance(thing, torch.Tensor):
        return thing.to(device)
    if isinstance(thing, dict):
        return {key: moved(part, device) for key, part in thing.items()}
    if isinstance(thing, Weighted):
        return Weighted(*(moved(part, device) for part in thing))
    if isinstance(thing, list | tuple):
        return [moved(part, device) for part in thing]
    return thing


def tensors_of(thing):
    if isinstance(thing, torch.Tensor):
        return [thing]
    parts = thing.values() if isinstance(thing, dict) else thing
    return [leaf for part in parts for leaf in tensors_of(part)]


def alike(payloads):
    """The second names of the payloads, which all clients know."""
    return [{"head": payload["head"]} for payload in payloads]


def class_means(payloads):
    value = payloads[0]["prompts"].value.nan_to_num()
    labels = torch.tensor([2, 0, 2, 3]).to(value.device)
    keep = torch.tensor([True, True, True, False]).to(value.device)
    return fp.class_means(value, labels, num_classes=4, keep=keep)


def stepped(server, payloads):
    values = {name: torch.ones_like(entry.value) for name, entry in payloads[0].items()}
    return server.step(values, payloads[1], server.init(values))


def mixed(payloads):
    return fp.aggregation.mixtures(payloads, torch.tensor([[0.5, 0.0, 1.0, 2.0, 0.1], [0.0] * 5]))


def change(payloads):
    broadcast = {name: entry.value.nan_to_num() for name, entry in payloads[1].items()}
    return fp.delta(payloads[0], broadcast)


def coded(codec, payloads):
    message, state = codec.encode(payloads[0], codec.init(payloads[0]))
    again, _ = codec.encode(payloads[1], state)
    return [message, again, codec.decode(message, like=payloads[0])]


def clipped(payloads, *, max_norm):
    center = {name: torch.ones_like(entry.value) for name, entry in payloads[0].items()}
    return fp.privacy.clip_norm(payloads[0], max_norm=max_norm, center=center)


def noisy(payloads):
    draw = torch.Generator().manual_seed(3)
    return fp.privacy.gaussian_noise(payloads[0], multiplier=1.0, sensitivity=1.0, generator=draw)


def summed(payloads):
    total = sum(fp.privacy.to_summable(payload) for payload in payloads)
    return fp.privacy.from_sum(total, like=payloads[0])


PIECES = {
    "weighted_mean": fp.weighted_mean,
    "weighted_median": fp.robust.weighted_median,
    "trimmed_mean": FRACTION,
    "krum": lambda payloads: fp.robust.krum(alike(payloads), **ONE_LIAR),
    "multi_krum": lambda payloads: fp.robust.multi_krum(
        alike(payloads), num_selected=2, **ONE_LIAR
    ),
    "heterogeneous_means": lambda payloads: fp.heterogeneous_means(
        [payload["prompts"] for payload in payloads], [2, 4, 4, 8, 2]
    ),
    "class_means": class_means,
    "query_mean": lambda payloads: fp.selection.query_mean(payloads[0]["head"].value[None]),
    "ema": partial(stepped, fp.ema(decay=0.3)),
    "adam": partial(stepped, fp.aggregation.adam(learning_rate=0.1)),
    "yogi": partial(stepped, fp.aggregation.yogi(learning_rate=0.1)),
    "fedopt": lambda payloads: stepped(fp.aggregation.fedopt(MOMENTUM), payloads)[0],
    "mixtures": mixed,
    "distances": lambda payloads: fp.aggregation.distances(alike(payloads)),
    "delta": change,
    "int8": partial(coded, fp.codecs.int8()),
    "top_k": partial(coded, fp.codecs.top_k(fraction=0.3)),
    "clip_norm": partial(clipped, max_norm=0.5),
    "clip_norm within the bound": partial(clipped, max_norm=100.0),
    "cap_weight": lambda payloads: fp.privacy.cap_weight(payloads[0], max_weight=3.3),
    "gaussian_noise": noisy,
    "secure sums": summed,
}


@pytest.mark.parametrize("name", PIECES)
def test_results_are_those_of_the_cpu_and_come_back_to_their_device(name, generator):
    payloads = drawn_payloads(generator)
    expected = PIECES[name](payloads)
    with narrow_device() as device:
        results = PIECES[name](moved(payloads, device))
        assert {tensor.device.type for tensor in tensors_of(results)} == {device}
        assert_same(moved(results, "cpu"), moved(expected, "cpu"))


def dp_sgd(device, generator):
    gradients = {"a": torch.randn(6, 3, generator=generator), "b": torch.zeros(6)}
    total = fp.privacy.clipped_sum(moved(gradients, device), max_norm=0.5)
    draw = torch.Generator().manual_seed(3)
    options = {"multiplier": 1.0, "max_norm": 0.5, "expected_batch_size": 6}
    return total, fp.privacy.noisy_mean(total, **options, generator=draw)


def test_sums_that_are_returned_in_float64_are_on_the_cpu():
    expected = dp_sgd("cpu", torch.Generator().manual_seed(0))
    with narrow_device() as device:
        results = dp_sgd(device, torch.Generator().manual_seed(0))
    assert {(each.device.type, each.dtype) for each in tensors_of(results)} == {
        ("cpu", torch.float64)
    }
    assert_same(results, expected)


@pytest.mark.parametrize("solver", [fp.transport.newton, fp.transport.exact])
def test_solvers_return_plans_on_their_device(solver, generator):
    cost = torch.rand(2, 5, 2, generator=generator)
    problem = cost, torch.full((5,), 0.2), torch.full((2,), 0.4)
    solve = partial(solver, epsilon=0.1) if solver is fp.transport.newton else solver
    expected = solve(*problem).plan
    with narrow_device() as device:
        plan = solve(*moved(problem, device)).plan
        assert plan.device.type == device
        torch.testing.assert_close(plan.cpu(), expected)


def test_only_mps_lacks_float64():
    lacks = {kind: not supports_float64(torch.device(kind)) for kind in ("cpu", "cuda", "mps")}
    assert lacks == {"cpu": False, "cuda": False, "mps": True}
