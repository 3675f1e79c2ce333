"""Generated prompts, against PyTorch's own multi-head attention."""

import pytest
import torch
import torch.nn as nn

from fedprompt import PromptGenerator
from tolerance import assert_near


@pytest.fixture
def prompts(generator):
    made = PromptGenerator(5, 12, key_dim=6, num_heads=3, generator=generator).double()
    with torch.no_grad():
        made.queries *= 30  # so that the attention is not uniform
    return made


@pytest.fixture
def keys(generator):
    return 2 * torch.randn(5, 7, 6, generator=generator, dtype=torch.float64)


def test_prompts_are_the_queries_plus_multi_head_attention(prompts, keys):
    attention = nn.MultiheadAttention(12, 3, bias=False, kdim=6, vdim=6, batch_first=True).double()
    weights = [getattr(attention, f"{part}_proj_weight") for part in "qkv"]
    weights.append(attention.out_proj.weight)
    own = [part.weight for part in (prompts.query, prompts.key, prompts.value, prompts.output)]
    with torch.no_grad():
        for weight, value in zip(weights, own, strict=True):
            weight.copy_(value)
    queries = prompts.queries.expand(5, -1, -1)
    expected, found = queries + attention(queries, keys.requires_grad_(), keys)[0], prompts(keys)
    assert_near(found, expected)
    pairs = zip([*own, prompts.queries, keys], [*weights, prompts.queries, keys], strict=True)
    for one, other in pairs:
        (gradient,) = torch.autograd.grad(found.sin().sum(), one, retain_graph=True)
        (wanted,) = torch.autograd.grad(expected.sin().sum(), other, retain_graph=True)
        assert_near(gradient, wanted)


def test_second_derivatives_exist_on_the_cpu(prompts, keys):
    slope = torch.autograd.grad(
        prompts(keys).square().sum(), prompts.query.weight, create_graph=True
    )[0]
    slope.square().sum().backward()
    assert prompts.key.weight.grad.any()


def test_its_text_shows_its_sizes(prompts):
    assert repr(prompts).startswith("PromptGenerator(\n  5, 12, key_dim=6, num_heads=3\n")
