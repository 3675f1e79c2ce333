"""Laws that every codec obeys, and wrong codecs that the laws reject."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fedprompt.codecs
from fedprompt import Weighted
from fedprompt.codecs import float16, int8, top_k
from fedprompt.interfaces import Codec
from fedprompt.wire import Expected, Header, decode_payload, encode_payload
from generated import examples
from known import known
from same import assert_identical

Sent = dict[str, Weighted]


def silent(entry: Weighted) -> Tensor:
    return torch.where(known(entry), entry.value, 0.0)


def half_bound(entry: Weighted) -> Tensor:
    return (silent(entry).abs().double() * 2**-11).clamp(min=2**-25)


def byte_bound(entry: Weighted) -> Tensor:
    """Compute 1/254 of the largest magnitude of each row by a loop, with a margin for rounding."""
    rows = silent(entry).double().reshape(entry.weight.numel(), -1)
    bounds = [float(row.abs().max()) / 254 if len(row) else 0.0 for row in rows]
    bound = torch.tensor(bounds, dtype=torch.float64).reshape(
        entry.weight.shape + (1,) * (entry.value.ndim - entry.weight.ndim)
    )
    rounding = silent(entry).abs().double() * torch.finfo(entry.value.dtype).eps
    return bound * (1 + 1e-4) + rounding + 1e-44


def late_bound(entry: Weighted) -> Tensor:
    """Return the magnitudes, because a number that is not sent has an error of its magnitude."""
    return silent(entry).abs().double()


def in_half(value: Tensor, weight: Tensor) -> Tensor:
    return value.half().to(value.dtype)


def in_bytes(value: Tensor, weight: Tensor) -> Tensor:
    """Make rows of integers up to 127, multiplied by a power of two. The first of a row is 127."""
    rows = value.reshape(weight.numel(), -1)
    codes = (10 * rows).round().clamp(-126, 126)
    if codes.numel():
        codes[:, 0] = 127
    scale = 2.0 ** torch.arange(weight.numel())[:, None].remainder(9).sub(4)
    return (codes * scale).to(value.dtype).reshape(value.shape)


def in_few(value: Tensor, weight: Tensor) -> Tensor:
    """Keep a quarter of the numbers of known rows, rounded up."""
    flat = torch.where(known(Weighted(value, weight)), value, 0.0).flatten()
    kept = flat.abs().argsort(descending=True)[: -(-len(flat) // 4)]
    return torch.zeros_like(flat).index_put((kept,), flat[kept]).reshape(value.shape)


class Implementation(NamedTuple):
    """Codec, with the properties that the laws need.

    Attributes:
        codec: Codec with an empty state.
        bound: Function from an entry to the largest error of each number in a first round.
        representable: Function from (value, weight) to a value that is decoded without error.
        most: Maximum size of a large message, as a fraction of the float32 payload.
    """

    codec: Codec
    bound: Callable[[Weighted], Tensor]
    representable: Callable[[Tensor, Tensor], Tensor]
    most: float


# Every public codec. Add new ones here.
CODECS = {
    "float16": Implementation(float16(), half_bound, in_half, 0.51),
    "int8": Implementation(int8(), byte_bound, in_bytes, 0.26),
    "top_k": Implementation(top_k(fraction=0.25), late_bound, in_few, 0.76),
}


def test_every_public_codec_is_in_the_table():
    assert set(fedprompt.codecs.__all__) == set(CODECS)
    assert all(isinstance(implementation.codec, Codec) for implementation in CODECS.values())


def through(codec: Codec, sent: Sent) -> Sent:
    message, _ = codec.encode(sent, codec.init(sent))
    return codec.decode(message, like=sent)


# Each law takes an implementation and a payload, and raises an AssertionError if it does not hold.


def the_error_is_bounded(implementation: Implementation, sent: Sent) -> None:
    received = through(implementation.codec, sent)
    for name, entry in sent.items():
        error = (received[name].value.double() - silent(entry).double()).abs()
        assert bool((error <= implementation.bound(entry) * (1 + 1e-12)).all())


def representable_values_are_unchanged(implementation: Implementation, sent: Sent) -> None:
    exact = {
        name: Weighted(implementation.representable(silent(entry), entry.weight), entry.weight)
        for name, entry in sent.items()
    }
    received = through(implementation.codec, exact)
    for name, entry in exact.items():
        assert_identical(received[name].value, silent(entry))


def weights_are_exact_and_unknown_rows_are_zeros(
    implementation: Implementation, sent: Sent
) -> None:
    received = through(implementation.codec, sent)
    assert list(received) == list(sent)
    for name, entry in sent.items():
        assert_identical(received[name].weight, entry.weight)
        assert received[name].value.dtype == entry.value.dtype
        assert received[name].value.shape == entry.value.shape
        nothing = received[name].value[~known(entry)]
        assert_identical(nothing, torch.zeros_like(nothing))


def the_message_can_be_sent_on_the_wire(implementation: Implementation, sent: Sent) -> None:
    """The form of a message depends only on the form of the payload, so a receiver can state it."""
    codec = implementation.codec
    message, _ = codec.encode(sent, codec.init(sent))
    like = {
        name: Weighted(torch.zeros_like(entry.value), torch.zeros_like(entry.weight))
        for name, entry in sent.items()
    }
    template, _ = codec.encode(like, codec.init(like))
    arrived, _ = decode_payload(
        encode_payload(message, header=Header()), expect=Expected(template), max_bytes=2**20
    )
    assert_identical(codec.decode(arrived, like=like), codec.decode(message, like=sent))


def nothing_is_mutated_nor_shared(implementation: Implementation, sent: Sent) -> None:
    codec = implementation.codec
    before = {name: [tensor.clone() for tensor in entry] for name, entry in sent.items()}
    state = codec.init(sent)
    kept = {name: tensor.clone() for name, tensor in state.items()}
    message, after = codec.encode(sent, state)
    tensors = [
        tensor
        for entry in message.values()
        for tensor in (entry if isinstance(entry, Weighted) else [entry])
    ]
    copies = [tensor.clone() for tensor in tensors]
    received = codec.decode(message, like=sent)
    assert_identical([list(entry) for entry in sent.values()], list(before.values()))
    assert_identical(dict(state), kept)
    for tensor in [tensor for entry in received.values() for tensor in entry]:
        tensor.fill_(3)
    assert_identical(tensors, copies)
    for tensor in [*tensors, *after.values()]:
        tensor.fill_(1)
    assert_identical([list(entry) for entry in sent.values()], list(before.values()))


def errors_do_not_accumulate_over_rounds(implementation: Implementation, sent: Sent) -> None:
    """The messages of all rounds plus the state are the sum of the payloads.

    Without a state, each round is within the bound of one round.
    """
    codec, state = implementation.codec, implementation.codec.init(sent)
    total = {
        name: torch.zeros_like(entry.value, dtype=torch.float64) for name, entry in sent.items()
    }
    rounds = 6
    for _ in range(rounds):
        message, state = codec.encode(sent, state)
        for name, entry in codec.decode(message, like=sent).items():
            total[name] += entry.value.double()
    for name, entry in sent.items():
        missing = rounds * silent(entry).double() - total[name]
        if state:
            error = (missing - state[name].double()).abs()
            assert bool(
                (
                    error
                    <= 20
                    * torch.finfo(torch.float64).eps
                    * rounds
                    * silent(entry).double().abs().max()
                    + 1e-30
                ).all()
            )
        else:
            assert bool((missing.abs() <= rounds * implementation.bound(entry) * (1 + 1e-9)).all())


LAWS = [
    the_error_is_bounded,
    representable_values_are_unchanged,
    weights_are_exact_and_unknown_rows_are_zeros,
    the_message_can_be_sent_on_the_wire,
    nothing_is_mutated_nor_shared,
    errors_do_not_accumulate_over_rounds,
]


def payload(
    generator: torch.Generator,
    *,
    rows: tuple[int, ...],
    event: tuple[int, ...],
    dtype: torch.dtype,
    scale: float,
) -> Sent:
    """Make a payload of two names; rows of weight 0 contain arbitrary numbers."""
    sent = {}
    for name in ("b", "a"):
        value = scale * torch.randn((*rows, *event), generator=generator)
        weight = torch.where(
            torch.rand(rows, generator=generator) < 0.3,
            0.0,
            1 + torch.rand(rows, generator=generator),
        )
        sent[name] = Weighted(
            torch.where(known(Weighted(value, weight)), value, torch.nan).to(dtype), weight
        )
    return sent


@st.composite
def payloads(draw: st.DrawFn) -> Sent:
    sizes = st.lists(st.integers(1, 4), max_size=2).map(tuple)
    return payload(
        torch.Generator().manual_seed(draw(st.integers(0, 2**32))),
        rows=draw(sizes),
        event=draw(sizes),
        dtype=draw(st.sampled_from([torch.float32, torch.float64])),
        scale=draw(st.sampled_from([1e-6, 1.0, 1e3])),
    )


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("label", CODECS)
@examples(10)
@given(sent=payloads())
def test_law_holds(label, law, sent):
    law(CODECS[label], sent)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("label", CODECS)
def test_half_precision_values_obey_the_laws_too(label, dtype, generator):
    sent = payload(generator, rows=(3,), event=(5,), dtype=dtype, scale=1.0)
    for law in LAWS:
        law(CODECS[label], sent)


@pytest.mark.parametrize("label", CODECS)
def test_zeros_empty_rows_and_unknown_rows_are_encoded(label):
    for value, weight in (
        (torch.zeros(2, 3), torch.ones(2)),
        (torch.zeros(2, 0), torch.ones(2)),
        (torch.zeros(0, 3), torch.zeros(0)),
        (torch.full((2, 3), torch.nan), torch.zeros(2)),
        (torch.full((2, 3), 1e-45), torch.ones(2)),
    ):
        received = through(CODECS[label].codec, {"a": Weighted(value, weight)})["a"]
        assert_identical(received.weight, weight)
        assert received.value.shape == value.shape
        assert bool((received.value.abs() <= 1e-45).all())


def test_the_missing_squared_length_is_at_most_the_fraction_not_sent(generator):
    for fraction in (0.01, 0.3, 1.0):
        value = torch.randn(10, 10, generator=generator)
        received = through(top_k(fraction=fraction), {"a": Weighted(value, torch.tensor(1.0))})[
            "a"
        ].value
        assert (received - value).square().sum() <= (1 - fraction) * value.square().sum() + 1e-9
        assert int((received != 0).sum()) == round(100 * fraction)


@pytest.mark.parametrize(
    ("fraction", "numel", "count"),
    [(0.07, 100, 7), (0.29, 100, 29), (0.07, 101, 8), (1e-13, 5, 1), (1.0, 3, 3), (0.1, 0, 0)],
)
def test_a_fraction_is_rounded_up_without_floating_point_error(fraction, numel, count):
    sent = {"a": Weighted(torch.zeros(numel), torch.tensor(1.0))}
    message, _ = top_k(fraction=fraction).encode(sent, top_k(fraction=fraction).init(sent))
    assert message["a/indices"].shape == (count,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_nothing_is_lost_over_twenty_rounds_of_any_dtype(dtype, generator):
    """Numbers are from 0.01 to 100. A state in the payload's dtype would lose small ones."""
    codec, form = (
        top_k(fraction=0.2),
        {"a": Weighted(torch.zeros(50, dtype=dtype), torch.tensor(1.0))},
    )
    state, missing = codec.init(form), torch.zeros(50, dtype=torch.float64)
    for scale in 10 ** (4 * torch.rand(20, generator=generator) - 2):
        value = (scale * torch.randn(50, generator=generator)).to(dtype)
        message, state = codec.encode({"a": Weighted(value, torch.tensor(1.0))}, state)
        assert message["a/values"].dtype == dtype
        missing += value.double() - codec.decode(message, like=form)["a"].value.double()
    assert (missing - state["a"]).abs().max() < 1e-11


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("label", ["int8", "top_k"])
def test_numbers_at_the_end_of_the_range_stay_finite(label, dtype):
    """If a scale is rounded up, 127 times the scale may exceed the largest number of the dtype."""
    values = [torch.tensor(torch.finfo(dtype).max, dtype=dtype)]
    while len(values) < 50:
        values.append(values[-1].nextafter(torch.zeros((), dtype=dtype)))
    value = torch.stack(values)[:, None] * torch.tensor([1.0, -1.0, 0.5], dtype=dtype)
    the_error_is_bounded(CODECS[label], {"a": Weighted(value, torch.ones(50))})


@pytest.mark.bad_input
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_scale_that_makes_a_payload_infinite_is_refused(dtype):
    """Each number of the message is finite, so the wire accepts it."""
    form = {"a": Weighted(torch.zeros(2, 3, dtype=dtype), torch.zeros(2))}
    codes, scale = (
        torch.full((2, 3), 127, dtype=torch.int8),
        Weighted(torch.tensor([3e38, 3e38]), torch.tensor([1.0, 0.0])),
    )
    name = str(dtype).removeprefix("torch.")
    reason = rf"`message\['a'\] in {name}` must be finite; got 3 entries of 6"
    with pytest.raises(ValueError, match=reason):
        BYTE.codec.decode({"a/codes": codes, "a/scale": scale}, like=form)
    with pytest.raises(ValueError, match=reason):
        HALF.codec.decode(
            {"a": Weighted(torch.full((2, 3), torch.inf).half(), scale.weight)}, like=form
        )
    indices, sent = (
        torch.tensor([1, 3], dtype=torch.int16),
        torch.full((2,), torch.nan, dtype=dtype),
    )
    with pytest.raises(ValueError, match=reason.replace("3 entries", "1 entries")):
        TOP.codec.decode(
            {"a/indices": indices, "a/values": sent, "a/weight": scale.weight}, like=form
        )


# Known-wrong codecs, each with the law that must reject it.


class Wrapped:
    """Correct codec with a change of the payload, the message, the state or the result."""

    def __init__(self, codec: Codec, **changes: Callable) -> None:
        unchanged = dict.fromkeys(("sent", "message", "state", "received"), lambda thing: thing)
        self.codec, self.init, self.change = codec, codec.init, unchanged | changes

    def encode(self, payload, state):
        message, state = self.codec.encode(self.change["sent"](payload), state)
        return self.change["message"](message), self.change["state"](state)

    def decode(self, message, *, like):
        return self.change["received"](self.codec.decode(message, like=like))


def each(change: Callable[[Weighted], Weighted]) -> Callable[[Sent], Sent]:
    return lambda sent: {name: change(entry) for name, entry in sent.items()}


def in_bfloat16(entry: Weighted) -> Weighted:
    return entry._replace(value=entry.value.bfloat16().to(entry.value.dtype))


def shrunk(entry: Weighted) -> Weighted:
    return entry._replace(value=entry.value * 126 / 127)


def in_place(sent: Sent) -> Sent:
    for entry in sent.values():
        entry.weight.mul_(2)
    return sent


HALF, BYTE, TOP = CODECS["float16"], CODECS["int8"], CODECS["top_k"]
TINY = {"extra": torch.ones(1)}  # sent if some number is not 0
WRONG = {
    "rounds twice": (the_error_is_bounded, HALF, {"sent": each(in_bfloat16)}),
    "shrinks": (representable_values_are_unchanged, BYTE, {"received": each(shrunk)}),
    "invents rows": (
        weights_are_exact_and_unknown_rows_are_zeros,
        BYTE,
        {"received": each(lambda entry: entry._replace(value=entry.value + 1))},
    ),
    "a form that depends on numbers": (
        the_message_can_be_sent_on_the_wire,
        TOP,
        {"message": lambda sent: sent | (TINY if any(map(torch.any, sent.values())) else {})},
    ),
    "doubles weights in place": (nothing_is_mutated_nor_shared, HALF, {"sent": in_place}),
    "forgets what it left out": (
        errors_do_not_accumulate_over_rounds,
        TOP,
        {"state": lambda state: {name: torch.zeros_like(rest) for name, rest in state.items()}},
    ),
}


def rejects(law: Callable, implementation: Implementation) -> bool:
    for seed, dtype in ((0, torch.float32), (1, torch.float64), (2, torch.float32)):
        sent = payload(
            torch.Generator().manual_seed(seed), rows=(6,), event=(4,), dtype=dtype, scale=3.0
        )
        try:
            law(implementation, sent)
        except (AssertionError, ValueError):  # the wire refuses a form that it does not expect
            return True
    return False


@pytest.mark.parametrize("label", WRONG)
def test_laws_reject_known_wrong_codecs(label):
    law, right, changes = WRONG[label]
    assert not rejects(law, right)
    assert rejects(law, right._replace(codec=Wrapped(right.codec, **changes)))
