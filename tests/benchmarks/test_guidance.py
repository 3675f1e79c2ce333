"""Time and memory of a guide gradient, and of its tangent pass.

The reference is reverse over reverse, as published. With ``--check``, models are a ViT-Ti at 224
pixels (batches of 8), trained whole and by 10 deep prompts, and a ResNet-18 at 64 pixels (batches
of 32). Otherwise, the ViT-Ti has two blocks and batches are small.
"""

from functools import partial
from unittest import mock

import pytest
import timm
import torch
import torch.nn as nn
import torch.nn.functional as F

from fedprompt.guidance import _forward_rules, forward_mode, guide_gradient
from references import fedl2g
from timed import CLASSES, Client, vit

pytestmark = pytest.mark.benchmark
RATE = 0.01


class Guided(nn.Module):
    """Client that is guided in its logits."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, images):
        logits = self.model(images)
        return logits, logits


def deep(depth, *, checkpointing=False):
    model = vit(depth=depth, num_classes=CLASSES)
    model.set_grad_checkpointing(checkpointing)
    return model


# name: (model, twin without checkpointing for the reference, (batch, pixels),
#        largest ratio of times, smallest ratio of memory)
CASES = {
    "ViT-Ti, all weights": (deep, None, (8, 224), 1.15, 3.3),
    "ViT-Ti, prompts": (lambda depth: Client(vit(depth=depth)), None, (8, 224), 1.15, 3.3),
    "ResNet-18": (
        lambda depth: timm.create_model("resnet18", pretrained=False, num_classes=CLASSES),
        None, (32, 64), 0.87, 1.7,
    ),
    "ViT-Ti, all weights, checkpointing": (
        partial(deep, checkpointing=True), deep, (8, 224), None, 8.0,
    ),
}  # fmt: skip


def draw(batch, pixels):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(batch, 3, pixels, pixels, generator=generator), torch.arange(batch) % CLASSES)
        for _ in range(2)
    ]


def first_order(model, guides, study, quiz):
    """Take the step and compute its quiz gradient, as two ordinary training steps."""
    parameters = {
        name: value.detach().requires_grad_()
        for name, value in model.named_parameters()
        if value.requires_grad
    }
    guided, logits = fedl2g.run(model, parameters, study[0])
    total = F.cross_entropy(logits, study[1]) + F.mse_loss(guided, guides[study[1]])
    gradients = torch.autograd.grad(total, list(parameters.values()))
    del guided, logits, total
    moved = {
        name: (value - RATE * own).detach().requires_grad_()
        for (name, value), own in zip(parameters.items(), gradients, strict=True)
    }
    del gradients
    torch.autograd.grad(
        F.cross_entropy(fedl2g.run(model, moved, quiz[0])[1], quiz[1]), list(moved.values())
    )


@pytest.mark.parametrize("case", CASES)
def test_guide_gradient(meter, case):
    make, make_twin, (batch, pixels), slowest, leanest = CASES[case]
    depth = meter.size(12)
    torch.manual_seed(0)
    model = Guided(make(depth))
    torch.manual_seed(0)
    twin = model if make_twin is None else Guided(make_twin(depth))
    (study, quiz), guides = (
        draw(meter.size(batch), pixels),
        torch.randn(CLASSES, CLASSES, generator=torch.Generator().manual_seed(2)),
    )
    calls = {
        "ours": partial(guide_gradient, model, guides, study, quiz, learning_rate=RATE),
        "published": partial(
            fedl2g.double_backward, twin, guides, [study], [quiz], fedl2g.descend(RATE)
        ),
    }
    expected = calls["published"]()
    error = (calls["ours"]().value - expected).norm() / expected.norm()
    meter.report(f"{case}: relative difference in float32 x 1e6", error * 1e6, at_most=100.0)
    ratios = f"""
        ours / published, time{f" <= {slowest}" if slowest else ""}
        published / ours, memory >= {leanest}
    """
    if make_twin is None:  # the plain steps do not support gradient checkpointing
        calls["steps"] = partial(first_order, model, guides, study, quiz)
        ratios += "ours / steps, memory <= 1.05"
    meter.compare(f"{case}: guide gradient", ratios, **calls)


def test_tangent_pass_of_prompts(meter):
    model = Guided(Client(vit()))
    (study, _), parameters = (
        draw(meter.size(8), 224),
        {name: value.detach() for name, value in model.named_parameters()},
    )
    direction = {name: torch.ones_like(value) for name, value in parameters.items()}

    def evaluate(values, then):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return then(fedl2g.run(model, values, study[0])[0])

    tangent = partial(forward_mode, evaluate, parameters, direction)

    def with_rules_of_pytorch():
        with mock.patch.multiple(_forward_rules, PRODUCTS=(), RULES={}):
            return tangent()

    ratios = """
        tangent / plain, time <= 2.5
        tangent / pytorch, time <= 0.9
    """
    calls = {"plain": partial(model, study[0]), "tangent": tangent}
    with torch.no_grad():
        meter.compare(
            "ViT-Ti, prompts: tangent pass", ratios, **calls, pytorch=with_rules_of_pytorch
        )
