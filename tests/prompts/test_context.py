"""Contexts and sentences. Tokens are numbers here, so that sentences are readable."""

import math
from functools import partial

import pytest
import torch

from fedprompt import ContextPrompts, prompted_text
from fedprompt.interfaces import ClassNames, PromptedText

START, PAD, STOP, END = -1.0, -2.0, -3.0, -4.0
WORDS = [[10.0], [20.0, 21.0, 22.0], [30.0, 31.0]]
# Context tokens before the name.
PLACES = {"end": lambda n: n, "middle": lambda n: n // 2, "front": lambda n: 0}


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
    write = partial(prompted_text, names=class_names(), name_position=position)
    assert write(numbered(2, 5)).prefix.shape == (2, 1 + shared, 1)
    assert write(numbered(2, 3, 5), class_specific=True).prefix.shape == (2, 1, 1)


@pytest.mark.parametrize("shape", [(2, 5), (2, 3, 5)])
@pytest.mark.parametrize("place", PLACES)
def test_sentences_for_a_bidirectional_tower_have_full_length(place, shape):
    where = {"name_position": PLACES[place](5), "class_specific": len(shape) == 3}
    write = partial(prompted_text, numbered(*shape), **where)
    text, short = write(class_names(causal=False)), whole(write(class_names()))
    assert whole(text).shape == (2, 3, 16)
    assert torch.equal(whole(text)[..., : short.shape[-1]], short)
    assert (whole(text)[..., short.shape[-1] :] == PAD).all()


def test_gradients_reach_each_context_token_once_for_each_class():
    context = numbered(2, 5).requires_grad_()
    whole(prompted_text(context, class_names(), name_position=2)).sum().backward()
    assert (context.grad == 3).all()


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


def test_a_context_may_be_empty_or_as_long_as_the_names_permit():
    assert ContextPrompts(4, length=0)().shape == (1, 0, 4)
    text = prompted_text(numbered(1, 10), class_names())  # 1 + 10 + 3 + 2 of 16 positions
    assert (max(text.end), text.context) == (15, 10)
    assert prompted_text(numbered(1, 10), class_names(), name_position=9).context is None
    own = prompted_text(numbered(1, 3, 10), class_names(), class_specific=True)
    assert own.context is None


def test_a_context_initialized_in_half_precision_is_float32():
    assert ContextPrompts(4, init=torch.ones(3, 4, dtype=torch.bfloat16))().dtype == torch.float32
