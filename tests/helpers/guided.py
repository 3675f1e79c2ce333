"""Small float64 clients, batches, losses and steps for the tests of guide gradients."""

from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from fedprompt import DeepPrompts, encode_prompted, vit_trunk
from models import tiny_vit

CLASSES, WIDTH = 5, 12
Pair = tuple[Tensor, Tensor]


class Guided(nn.Module):
    """Client with a body and a head, guided in its logits or in the features before the head."""

    def __init__(self, body: nn.Module, *, features: bool) -> None:
        super().__init__()
        self.body, self.head, self.features = (
            body,
            seeded(lambda: nn.Linear(WIDTH, CLASSES)),
            features,
        )

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(images)
        logits = self.head(hidden)
        return (hidden if self.features else logits), logits


class Prompted(nn.Module):
    """Prompts on a frozen trunk that is not a submodule."""

    def __init__(self, *, checkpointing: bool) -> None:
        super().__init__()
        model = tiny_vit()
        model.set_grad_checkpointing(checkpointing)
        self.trunk = vit_trunk(model)
        self.prompts = DeepPrompts(2, WIDTH, 3, generator=torch.Generator().manual_seed(0)).double()

    def forward(self, images: Tensor) -> Tensor:
        return encode_prompted(self.trunk, images, self.prompts()).pooled


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """Build a module from a fixed seed, and leave PyTorch's global stream unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return make().double()


def mlp() -> nn.Module:
    return seeded(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(768, 10), nn.Tanh(), nn.Linear(10, WIDTH))
    )


def cnn() -> nn.Module:
    """Return a CNN with batch normalization in train mode and one frozen layer."""
    body = seeded(
        lambda: nn.Sequential(
            nn.Conv2d(3, 6, 3, stride=2), nn.BatchNorm2d(6), nn.ReLU(),
            nn.Conv2d(6, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(),
            nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, WIDTH),
        )
    )  # fmt: skip
    body[3].requires_grad_(False)
    return body.train()


class Twice(nn.Module):
    """Body with shared parts.

    One block and one layer have two names each, and one weight and one buffer have two owners.
    """

    def __init__(self) -> None:
        super().__init__()
        self.enter = seeded(lambda: nn.Linear(768, WIDTH))
        self.features = self.enter
        block = seeded(
            lambda: nn.Sequential(
                nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.Tanh()
            )
        )
        self.blocks = nn.ModuleList([block, block])
        self.first, self.second = (seeded(lambda: nn.Linear(WIDTH, WIDTH)) for _ in range(2))
        self.second.weight = self.first.weight
        scale = torch.full((WIDTH,), 0.5, dtype=torch.float64)
        for layer in (self.first, self.second):
            layer.register_buffer("scale", scale)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.features(images.flatten(1)).tanh() + self.enter(images.flatten(1).flip(1))
        for block in self.blocks:
            hidden = block(hidden)
        return (
            self.first(hidden.tanh()) * self.first.scale + self.second(hidden) * self.second.scale
        )


def vit(*, dropout: float = 0.0, checkpointing: bool = False) -> nn.Module:
    """Return a ViT whose parameters are all trained."""
    model = tiny_vit(
        proj_drop_rate=dropout,
        attn_drop_rate=dropout,
        drop_path_rate=dropout,
        pos_drop_rate=dropout,
    ).train()
    model.set_grad_checkpointing(checkpointing)
    return model


# name: (body of the client, the same body without checkpointing for the reference)
BODIES: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "mlp": (mlp, mlp),
    "cnn": (cnn, cnn),
    "vit": (vit, vit),
    "vit, dropout": (lambda: vit(dropout=0.3), lambda: vit(dropout=0.3)),
    "vit, dropout, checkpointing": (
        lambda: vit(dropout=0.3, checkpointing=True),
        lambda: vit(dropout=0.3),
    ),
    "prompts": (lambda: Prompted(checkpointing=False), lambda: Prompted(checkpointing=False)),
    "prompts, checkpointing": (
        lambda: Prompted(checkpointing=True),
        lambda: Prompted(checkpointing=False),
    ),
}

LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": F.mse_loss,
    "cosine": lambda guided, rows: 1 - F.cosine_similarity(guided, rows).mean(),
    "kl": lambda guided, rows: F.kl_div(
        guided.log_softmax(1), rows.softmax(1), reduction="batchmean"
    ),
}


def draw_pair(labels: list[int], *, seed: int) -> Pair:
    """Draw images (batch, 3, 16, 16) for labels."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(
        len(labels), 3, 16, 16, generator=generator, dtype=torch.float64
    ), torch.tensor(labels)


def draw_guides(dim: int, *, classes: int = CLASSES, seed: int = 3) -> Tensor:
    return torch.randn(
        classes, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


# Batches have different sizes, and no sample of class 4.
STUDY = [draw_pair([0, 1, 1, 2, 0], seed=1), draw_pair([0, 1, 3], seed=2)]
QUIZ = [draw_pair([4, 1, 2, 4], seed=4), draw_pair([0, 4], seed=6)]


def assert_near_in_norm(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    """Assert that a tensor differs from a nonzero one by at most a fraction of its norm."""
    assert expected.norm() > 0
    assert (actual - expected).norm() <= tolerance * expected.norm()


def decay_and_momentum(parameters, gradients, *, learning_rate):
    return {
        name: value - learning_rate * (1.9 * (gradients[name] + 0.1 * value) + 0.05)
        for name, value in parameters.items()
    }


class Cube(torch.autograd.Function):
    """Function that is differentiable twice but has no forward mode."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, slope):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * slope


class Opaque(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.body, self.function = mlp(), function

    def forward(self, images):
        hidden = self.body(images)
        return hidden + self.function(hidden)  # has a tangent even if the function drops its own
