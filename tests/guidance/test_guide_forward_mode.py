"""Operators that need care in forward mode, and the products that the tangent pass computes."""

import os
import subprocess
import sys
import warnings

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from fedprompt.guidance import double_backward, forward_mode, guide_gradient
from guided import (
    CLASSES,
    QUIZ,
    STUDY,
    WIDTH,
    Cube,
    Guided,
    Opaque,
    Prompted,
    assert_near_in_norm,
    draw_guides,
    mlp,
    seeded,
)
from references import fedl2g


class WithoutGradient(nn.Module):
    """Model with a gate from trainable weights, computed under no_grad and therefore constant."""

    def __init__(self):
        super().__init__()
        self.body = mlp()

    def forward(self, images):
        features = self.body(images)
        with torch.no_grad():
            gate = torch.sigmoid(self.body(images.flip(0)))
        return features * gate


def test_values_computed_under_no_grad_are_constants():
    model, guides = Guided(WithoutGradient(), features=False), draw_guides(CLASSES)
    expected = fedl2g.double_backward(model, guides, STUDY, QUIZ, fedl2g.descend(0.1))
    for method in (forward_mode, double_backward):
        assert_near_in_norm(
            guide_gradient(model, guides, STUDY, QUIZ, learning_rate=0.1, method=method).value,
            expected,
        )


class Attending(nn.Module):
    """Attention after a layer normalization, scaled by a copy computed under no_grad."""

    def __init__(self, norm, query=None, **options):
        super().__init__()
        self.embed, self.norm, self.join = (
            seeded(make)
            for make in (lambda: nn.Linear(256, 48), norm, lambda: nn.Linear(72, WIDTH))
        )
        self.query, self.options = query, options
        for number, parameter in enumerate(self.norm.parameters()):
            parameter.data = 1 + 0.5 * draw_guides(48, classes=1, seed=number)[0]

    def attend(self, hidden):
        heads = self.norm(hidden).unflatten(-1, (4, 12)).transpose(1, 2)
        query, key, value = heads[..., :3], heads[..., 3:6], heads[..., 6:]
        if self.options.get("enable_gqa", False):
            key, value = key[:, :2], value[:, :2]
        return F.scaled_dot_product_attention(
            query if self.query is None else self.query, key, value, **self.options
        ).flatten(1)

    def forward(self, images):
        hidden = self.embed(images.flatten(2))
        with torch.no_grad():
            gate = self.attend(hidden.flip(0))
        return self.join(self.attend(hidden) * (1 + gate))


def half_frozen():
    norm = nn.LayerNorm(48)
    norm.weight.requires_grad_(False)
    return norm


NORMS = {
    "trainable": lambda: nn.LayerNorm(48),
    "frozen": lambda: nn.LayerNorm(48).requires_grad_(False),
    "trainable bias": half_frozen,
    "trainable weight": lambda: nn.LayerNorm(48, bias=False),
    "no bias": lambda: nn.LayerNorm(48, bias=False, eps=0.5).requires_grad_(False),
    "no parameters": lambda: nn.LayerNorm(48, elementwise_affine=False),
}
ATTENTION = {
    "plain": {},
    "scale": {"scale": 0.3},
    "causal": {"is_causal": True},
    "numbers masked": {"attn_mask": draw_guides(3, classes=3)},
    "some masked": {"attn_mask": torch.ones(3, 3).tril().bool()},
    "grouped": {"enable_gqa": True},
    "constant query": {"query": draw_guides(3, classes=3).expand(4, 3, 3)},
}


@pytest.mark.parametrize(
    ("norm", "options"),
    [*((norm, {}) for norm in NORMS), *(("frozen", options) for options in ATTENTION.values())],
)
def test_every_form_of_attention_and_layer_normalization(norm, options):
    model, guides = Guided(Attending(NORMS[norm], **options), features=False), draw_guides(CLASSES)
    expected = fedl2g.double_backward(model, guides, STUDY, QUIZ, fedl2g.descend(0.1))
    assert_near_in_norm(
        guide_gradient(model, guides, STUDY, QUIZ, learning_rate=0.1).value, expected
    )


@torch.library.custom_op("fedprompt_tests::square", mutates_args=())
def square(x: torch.Tensor) -> torch.Tensor:
    return x * x


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


square.register_autograd(lambda ctx, slope: 2 * ctx.saved_tensors[0] * slope, setup_context=_keep)


@pytest.mark.parametrize("function", [Cube.apply, square, lambda x: square(x=x)])
def test_operators_without_forward_mode_use_double_backward_with_a_warning(function):
    model, guides = Guided(Opaque(function), features=True), draw_guides(WIDTH)
    expected = fedl2g.double_backward(model, guides, STUDY, QUIZ, fedl2g.descend(0.1))
    with pytest.warns(UserWarning, match="uses double_backward instead"):
        value = guide_gradient(model, guides, STUDY, QUIZ, learning_rate=0.1).value
    assert_near_in_norm(value, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_near_in_norm(
            guide_gradient(
                model, guides, STUDY, QUIZ, learning_rate=0.1, method=double_backward
            ).value,
            expected,
        )


def test_a_result_whose_tangent_was_dropped_uses_double_backward_with_a_warning():
    """No function mode sees an operator that runs while PyTorch's overrides are off."""

    def evaluate(parameters, then):
        with torch._C.DisableTorchFunction():
            squares = square(parameters["x"])
        return then(squares)

    at, along = {"x": torch.tensor([[3.0]])}, {"x": torch.tensor([[1.0]])}
    with pytest.warns(UserWarning, match="model silently drops tangents"):
        assert forward_mode(evaluate, at, along).item() == 6


PROGRAM = """
from fedprompt.guidance import guide_gradient
from guided import QUIZ, STUDY, WIDTH, Cube, Guided, Opaque, draw_guides
for _ in range(3):
    model = Guided(Opaque(Cube.apply), features=True)
    guide_gradient(model, draw_guides(WIDTH), STUDY, QUIZ, learning_rate=0.1)
"""


@pytest.mark.slow
def test_the_fallback_warns_once_at_the_line_of_the_call():
    """A new process is needed: pytest's filters and the import hook would repeat the warning."""
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert run.stderr.count("forward_mode uses double_backward instead") == 1, run.stderr
    assert run.stderr.startswith("<string>:6: UserWarning: forward_mode uses"), run.stderr


def test_the_tangent_pass_uses_the_shorter_rules_of_attention_and_frozen_norms():
    """Each of 3 attentions has 4 products (PyTorch: 6). Each of 9 norms has one backward kernel."""
    body = Prompted(checkpointing=False)
    parameters = {name: value.detach() for name, value in body.named_parameters()}

    def evaluate(values, then):
        return then(torch.func.functional_call(body, values, (STUDY[0][0],)))

    with profile(activities=[ProfilerActivity.CPU]) as record:
        forward_mode(evaluate, parameters, parameters)
    counts = {event.key: event.count for event in record.key_averages()}
    assert counts["aten::bmm"] == 3 * 4
    assert (
        counts["aten::native_layer_norm"] == counts["aten::native_layer_norm_backward"] == 3 * 2 + 3
    )  # two in each block; of the pooled token, the prompts and the patches
