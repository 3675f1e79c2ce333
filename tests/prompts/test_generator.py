"""Generated prompts, against PyTorch's own multi-head attention, and their laws."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from errors import raises
from fedprompt import PromptGenerator, collect, prompted_text
from fedprompt.interfaces import ClassNames
from same import assert_identical
from tolerance import assert_near


def made(make=PromptGenerator, *, num_prompts=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    prompts = make(num_prompts, 12, key_dim=6, num_heads=3, generator=generator).double()
    with torch.no_grad():
        prompts.queries *= 30  # so that the attention is not uniform
    return prompts


@pytest.fixture
def keys(generator):
    return 2 * torch.randn(5, 7, 6, generator=generator, dtype=torch.float64)


def test_prompts_are_the_queries_plus_multi_head_attention(keys):
    prompts = made()
    attention = nn.MultiheadAttention(12, 3, bias=False, kdim=6, vdim=6, batch_first=True).double()
    with torch.no_grad():
        attention.q_proj_weight.copy_(prompts.query.weight)
        attention.k_proj_weight.copy_(prompts.key.weight)
        attention.v_proj_weight.copy_(prompts.value.weight)
        attention.out_proj.weight.copy_(prompts.output.weight)
    queries = prompts.queries.expand(5, -1, -1)
    expected = queries + attention(queries, keys, keys)[0]
    assert_near(prompts(keys), expected)


# Laws: each takes a generator and keys, and fails by an AssertionError.


def keys_have_no_order(prompts, keys):
    assert_near(prompts(keys.flip(1)), prompts(keys))


def repeated_keys_change_nothing(prompts, keys):
    assert_near(prompts(torch.cat([keys, keys], 1)), prompts(keys))


def samples_do_not_see_one_another(prompts, keys):
    assert_near(prompts(keys[2:3]), prompts(keys)[2:3])


def prompts_differ_even_for_a_single_key(prompts, keys):
    first, second = prompts(keys[:, :1])[:, :2].unbind(1)
    assert (first - second).abs().amax(1).min() > 1e-3


def samples_with_other_keys_get_other_prompts(prompts, keys):
    result = prompts(keys)
    assert (result[0] - result[1:]).abs().amax((1, 2)).min() > 1e-3


def gradients_reach_every_parameter_and_the_keys(prompts, keys):
    keys = keys.clone().requires_grad_()
    prompts(keys).square().sum().backward()
    tensors = [keys, *prompts.parameters()]
    assert all(tensor.grad is not None and bool(tensor.grad.any()) for tensor in tensors)


LAWS = [
    keys_have_no_order,
    repeated_keys_change_nothing,
    samples_do_not_see_one_another,
    prompts_differ_even_for_a_single_key,
    samples_with_other_keys_get_other_prompts,
    gradients_reach_every_parameter_and_the_keys,
]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_generated_prompts_obey_their_laws(law, keys):
    law(made(), keys)


def test_second_derivatives_exist_on_the_cpu(keys):
    prompts = made()
    (slope,) = torch.autograd.grad(
        prompts(keys).square().sum(), prompts.query.weight, create_graph=True
    )
    slope.square().sum().backward()
    assert prompts.key.weight.grad.any()


def test_prompts_from_class_names_are_a_context():
    names = ClassNames(
        start=torch.zeros(1, 12),
        tokens=torch.zeros(3, 2, 12),
        length=(2, 2, 2),
        pad=torch.zeros(12),
        context_length=16,
        causal=True,
        names=("a", "b", "c"),
        ending=(1, 1, 1),
    )
    prompts = PromptGenerator(4, 12, key_dim=6)
    features = F.normalize(torch.randn(3, 6), dim=1)
    assert prompted_text(prompts(features[None]), names).prefix.shape == (1, 5, 12)


def test_a_generator_determines_the_start_and_the_global_one_is_not_used():
    before = torch.get_rng_state()
    one, other = collect(made(), weight=1), collect(made(), weight=1)
    assert list(one) == [
        "queries",
        *(f"{part}.weight" for part in ("query", "key", "value", "output")),
    ]
    for name in one:
        assert_identical(one[name].value, other[name].value)
        assert bool(one[name].value.isfinite().all())
    assert torch.equal(torch.get_rng_state(), before)
    assert repr(made()).startswith("PromptGenerator(\n  4, 12, key_dim=6, num_heads=3\n")


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: PromptGenerator(-1, 8, key_dim=6), ValueError, "`num_prompts` must be at least"),
        (lambda: PromptGenerator(2, 0, key_dim=6), ValueError, "`dim` must be at least 1; got 0."),
        (lambda: PromptGenerator(2, 8, key_dim=0), ValueError, "`key_dim` must be at least 1;"),
        (lambda: PromptGenerator(2, 8, key_dim=6, num_heads=3), ValueError, "`num_heads` must"),
        (lambda: PromptGenerator(2, 8, key_dim=6, generator="seed"), TypeError, "`generator`"),
    ],
)
def test_bad_sizes_are_refused_by_name(make, error, message):
    with raises(error, message):
        make()


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        (torch.zeros(5, 6), ValueError, "at least one key; got (5, 6)."),
        (torch.zeros(5, 3, 7), ValueError, "`keys` must have shape (batch, keys, 6)"),
        (torch.zeros(5, 0, 6), ValueError, "at least one key; got (5, 0, 6)."),
        (torch.zeros(5, 3, 6).long(), TypeError, "`keys` must be floating-point of shape"),
    ],
)
def test_bad_keys_are_refused_by_name(keys, error, message):
    with raises(error, message):
        PromptGenerator(2, 8, key_dim=6)(keys)
