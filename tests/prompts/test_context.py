"""Contexts and sentences. Tokens are numbers here, so that sentences are readable."""

import math
from functools import partial

import pytest
import torch

from fedprompt import ContextPrompts, prompted_text
from fedprompt.interfaces import ClassNames, PromptedText

START, PAD, STOP, END = -1.0, -2.0, -3.0, -4.0
WORDS = [[10.0], [20.0, 21.0, 22.0], [30.0, 31.0]]
PLACES = {
    "end": lambda n: n,
    "middle": lambda n: n // 2,
    "front": lambda n: 0,
}  # context tokens before the name


def class_names(*, causal=True, context_length=16, words=WORDS, closing=(STOP, END)):
    rows = [[*word, *closing] for word in words]
    longest = max(map(len, rows))
    return ClassNames(
        start=torch.tensor([[START]]),
        tokens=torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])[..., None],
        length=tuple(map(len, rows)),
        pad=torch.tensor([PAD]),
        context_length=context_length,
        causal=causal,
        names=tuple(f"class {number}" for number in range(len(words))),
        ending=(len(closing),) * len(words),
    )


def numbered(*shape):
    """Make a context of different tokens: 100, 101, and so on."""
    return torch.arange(100.0, 100.0 + math.prod(shape)).reshape(*shape, 1)


def whole(text):
    """Return sentences (contexts, classes, length) as the tower encodes them."""
    prefix = text.prefix[:, None].expand(-1, text.suffix.shape[1], -1, -1)
    return torch.cat([prefix, text.suffix], 2).squeeze(-1)


@pytest.mark.parametrize("closing", [(STOP, END), (END,)])
@pytest.mark.parametrize("length", [0, 1, 2, 5])
@pytest.mark.parametrize("place", PLACES)
def test_sentences_are_those_put_together_by_hand(place, length, closing):
    names, before = class_names(closing=closing), PLACES[place](length)
    generic, specific = numbered(2, length), numbered(2, 3, length)
    for context in (generic, specific):
        text = prompted_text(
            context, names, name_position=before, class_specific=context is specific
        )
        assert whole(text).shape[-1] == 1 + length + 3 + len(closing)
        for prompt in range(2):
            for number, word in enumerate(WORDS):
                own = context[prompt] if context is generic else context[prompt, number]
                own = own.flatten().tolist()
                expected = [START, *own[:before], *word, *own[before:], *closing]
                sentence = whole(text)[prompt, number].tolist()
                assert sentence[: len(expected)] == expected
                assert set(sentence[len(expected) :]) <= {PAD}
                assert text.end[number] == len(expected) - 1


@pytest.mark.parametrize(("position", "shared"), [(None, 5), (5, 5), (2, 2), (0, 0)])
def test_the_prefix_is_the_start_and_the_shared_context_before_the_name(position, shared):
    assert prompted_text(numbered(2, 5), class_names(), name_position=position).prefix.shape == (
        2,
        1 + shared,
        1,
    )
    assert prompted_text(
        numbered(2, 3, 5), class_names(), name_position=position, class_specific=True
    ).prefix.shape == (2, 1, 1)


@pytest.mark.parametrize("place", PLACES)
def test_class_specific_contexts_with_equal_rows_are_a_generic_one(place):
    context = numbered(2, 5)
    tied = prompted_text(
        context[:, None].expand(-1, 3, -1, -1),
        class_names(),
        name_position=PLACES[place](5),
        class_specific=True,
    )
    generic = prompted_text(context, class_names(), name_position=PLACES[place](5))
    assert torch.equal(whole(tied), whole(generic))
    assert tied.end == generic.end


@pytest.mark.parametrize("shape", [(2, 5), (2, 3, 5)])
@pytest.mark.parametrize("place", PLACES)
def test_sentences_for_a_bidirectional_tower_have_full_length(place, shape):
    write = partial(
        prompted_text,
        numbered(*shape),
        name_position=PLACES[place](5),
        class_specific=len(shape) == 3,
    )
    text, short = write(class_names(causal=False)), whole(write(class_names()))
    assert whole(text).shape == (2, 3, 16)
    assert torch.equal(whole(text)[..., : short.shape[-1]], short)
    assert (whole(text)[..., short.shape[-1] :] == PAD).all()


def test_gradients_reach_each_context_token_once_for_each_class():
    context = numbered(2, 5).requires_grad_()
    whole(prompted_text(context, class_names(), name_position=2)).sum().backward()
    assert (context.grad == 3).all()


def test_vmap_over_clients_equals_a_loop():
    contexts = torch.stack([numbered(2, 5), 1 + numbered(2, 5)])
    stacked = torch.func.vmap(
        lambda context: prompted_text(context, class_names(), name_position=2)[:2]
    )(contexts)
    for client, context in enumerate(contexts):
        alone = prompted_text(context, class_names(), name_position=2)[:2]
        assert all(
            torch.equal(together[client], own) for together, own in zip(stacked, alone, strict=True)
        )


@pytest.mark.benchmark
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("shape", [(2, 5), (2, 3, 5)])
def test_sentences_compile_in_one_graph(place, shape):
    torch.compiler.reset()
    write = partial(
        prompted_text,
        names=class_names(causal=False),
        name_position=PLACES[place](5),
        class_specific=len(shape) == 3,
    )
    expected = write(numbered(*shape))
    compiled = torch.compile(write, fullgraph=True, backend="aot_eager")(numbered(*shape))
    assert isinstance(compiled, PromptedText)
    assert all(torch.equal(*pair) for pair in zip(compiled[:2], expected[:2], strict=True))
    assert compiled[2:] == expected[2:]


def test_initial_values_have_the_distribution_of_coop(generator):
    context = ContextPrompts(64, num_contexts=3, length=50, generator=generator)()
    assert context.shape == (3, 50, 64)
    # 9600 draws of N(0, .02^2): five standard errors, .02 / sqrt(9600) = 2.0e-4 of the mean and
    # .02 / sqrt(2 * 9600) = 1.4e-4 of the standard deviation.
    assert context.mean().item() == pytest.approx(0, abs=1.1e-3)
    assert context.std().item() == pytest.approx(0.02, abs=7.5e-4)
    assert not torch.equal(context[0], context[1])


@pytest.mark.parametrize(("num_classes", "shape"), [(None, (2, 3, 4)), (5, (2, 5, 3, 4))])
def test_words_set_the_values_and_the_length(num_classes, shape):
    words = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    prompts = ContextPrompts(4, num_contexts=2, num_classes=num_classes, init=words)
    assert prompts().shape == shape
    assert prompts().dtype == torch.float64
    assert (prompts() == words).all()
    with torch.no_grad():
        prompts.context[0] += 1  # each prompt has its own copy
    assert torch.equal(prompts()[1].reshape(-1, 3, 4)[0], words)


def test_a_context_initialized_in_half_precision_is_float32():
    assert ContextPrompts(4, init=torch.ones(3, 4, dtype=torch.bfloat16))().dtype == torch.float32


def test_a_context_can_be_used_with_other_class_names():
    source, target = ContextPrompts(1, length=5), ContextPrompts(1, length=5)
    assert list(source.state_dict()) == ["context"]
    target.load_state_dict(source.state_dict())
    few, many = class_names(words=WORDS[:1]), class_names(words=[*WORDS, [40.0]])
    assert torch.equal(prompted_text(target(), few).prefix, prompted_text(source(), many).prefix)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"dim": 0}, ValueError, "`dim` must be at least 1"),
        ({"dim": 4, "length": -1}, ValueError, "`length` must be at least 0"),
        ({"dim": 4, "num_contexts": 0}, ValueError, "`num_contexts` must be at least 1"),
        ({"dim": 4, "num_classes": 2.0}, TypeError, "`num_classes` must be an integer"),
        ({"dim": 4, "init": "a photo of a"}, TypeError, "`init` must be a floating-point"),
        ({"dim": 4, "init": torch.zeros(3, 4, dtype=torch.long)}, TypeError, r"`init` .*int64"),
        ({"dim": 4, "init": torch.zeros(3, 5)}, ValueError, r"`init` must have shape \(length,"),
        ({"dim": 4, "init": torch.zeros(4)}, ValueError, r"`init` must have shape \(length,"),
    ],
)
def test_bad_arguments_of_contexts_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        ContextPrompts(**arguments)


ONE_MORE = "`per_sample=True` or `class_specific=True` adds one axis"


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("context", "claims", "error", "message"),
    [
        ([[[0.0]]], {}, TypeError, "`context` must be a floating-point tensor"),
        (torch.zeros(1, 5, 1, dtype=torch.long), {}, TypeError, "`context` must be a"),
        (
            torch.zeros(1, 5, 2),
            {},
            ValueError,
            rf"`context` must have shape \(contexts, length, 1\); {ONE_MORE}; got \(1, 5, 2\)",
        ),
        (torch.zeros(1, 3, 5, 1), {}, ValueError, rf"{ONE_MORE}; got \(1, 3, 5, 1\)"),
        (torch.zeros(5, 1), {}, ValueError, r"got \(5, 1\)"),
        (torch.zeros(1, 2, 5, 1), {"class_specific": True}, ValueError, r"\(contexts, 3,"),
        (torch.zeros(1, 5, 1), {"class_specific": True}, ValueError, r"\(contexts, 3, length,"),
        (torch.zeros(1, 5, 1), {"per_sample": True}, ValueError, r"\(batch, contexts, length,"),
        (
            torch.zeros(3, 1, 2, 5, 1),
            {"per_sample": True, "class_specific": True},
            ValueError,
            r"`context` must have shape \(batch, contexts, 3, length, 1\); got \(3, 1, 2, 5, 1\)",
        ),
        (torch.zeros(1, 5, 1), {"per_sample": 7}, TypeError, "`per_sample` must be True or"),
        (torch.zeros(1, 5, 1), {"class_specific": 3}, TypeError, "`class_specific` must be True"),
        (torch.zeros(1, 2, 1, device="meta"), {}, ValueError, "`context` must be on the device"),
        (torch.zeros(1, 40, 1), {}, ValueError, "`context` must be shorter, because no name"),
        (torch.zeros(1, 11, 1), {}, ValueError, "`names` must have at most 4 tokens .* of"),
    ],
)
def test_contexts_of_other_shapes_are_refused(context, claims, error, message):
    with pytest.raises(error, match=message):
        prompted_text(context, class_names(), **claims)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("position", "message"),
    [
        (6, "at most the length 5 of the context; got 6"),
        (-1, "at least 0; got -1"),
        (2.5, "an integer; got 2.5"),
    ],
)
def test_a_name_position_outside_the_context_is_refused(position, message):
    with pytest.raises((ValueError, TypeError), match=f"`name_position` must be {message}"):
        prompted_text(numbered(1, 5), class_names(), name_position=position)


@pytest.mark.bad_input
def test_names_must_come_from_a_tower():
    with pytest.raises(
        TypeError, match=r"`names` must be ClassNames, from tower.class_names; got a list of"
    ):
        prompted_text(numbered(1, 5), ["cat"])
