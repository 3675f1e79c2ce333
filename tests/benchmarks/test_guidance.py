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

from fedprompt import DeepPrompts, encode_prompted, vit_trunk
from fedprompt.guidance import _forward_rules, forward_mode, guide_gradient
from references import fedl2g

pytestmark = pytest.mark.benchmark
CLASSES, RATE = 10, 0.01


class Guided(nn.Module):
    """Client that is guided in its logits."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, images):
        logits = self.model(images)
        return logits, logits


class Prompted(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.trunk = vit_trunk(model)
        self.prompts = DeepPrompts(
            10, self.trunk.dim, self.trunk.depth, generator=torch.Generator().manual_seed(0)
        )
        self.head = nn.Linear(self.trunk.dim, CLASSES)

    def forward(self, images):
        return self.head(encode_prompted(self.trunk, images, self.prompts()).pooled)


def vit(depth, *, checkpointing=False):
    model = timm.create_model(
        "vit_tiny_patch16_224", pretrained=False, num_classes=CLASSES, depth=depth
    ).eval()
    model.set_grad_checkpointing(checkpointing)
    return model


# name: (model, twin without checkpointing for the reference, (batch, pixels),
#        largest ratio of times, smallest ratio of memory)
CASES = {
    "ViT-Ti, all weights": (vit, None, (8, 224), 1.15, 3.3),
    "ViT-Ti, prompts": (lambda depth: Prompted(vit(depth)), None, (8, 224), 1.15, 3.3),
    "ResNet-18": (
        lambda depth: timm.create_model("resnet18", pretrained=False, num_classes=CLASSES),
        None,
        (32, 64),
        0.87,
        1.7,
    ),
    "ViT-Ti, all weights, checkpointing": (
        lambda depth: vit(depth, checkpointing=True),
        vit,
        (8, 224),
        None,
        8.0,
    ),
}


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
    seconds = meter.seconds(**calls)
    meter.report(
        f"{case}: guide gradient / double backward, time",
        seconds["ours"] / seconds["published"],
        at_most=slowest,
    )
    peak = meter.peak_bytes(**calls, steps=partial(first_order, model, guides, study, quiz))
    meter.report(
        f"{case}: double backward / guide gradient, memory",
        peak["published"] / peak["ours"],
        at_least=leanest,
    )
    if make_twin is None:  # the plain steps do not support gradient checkpointing
        meter.report(
            f"{case}: guide gradient / first-order steps alone, memory",
            peak["ours"] / peak["steps"],
            at_most=1.05,
        )
    meter.report(
        f"{case}: MiB { ({name: round(size / 2**20) for name, size in peak.items()}) }",
        peak["ours"] / peak["published"],
    )


def test_tangent_pass_of_prompts(meter):
    model = Guided(Prompted(vit(12)))
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

    with torch.no_grad():
        seconds = meter.seconds(
            plain=partial(model, study[0]), tangent=tangent, pytorch=with_rules_of_pytorch
        )
    meter.report(
        "ViT-Ti, prompts: tangent pass / plain forward, time",
        seconds["tangent"] / seconds["plain"],
        at_most=2.5,
    )
    meter.report(
        "ViT-Ti, prompts: tangent pass / the same with PyTorch's rules alone, time",
        seconds["tangent"] / seconds["pytorch"],
        at_most=0.9,
    )
