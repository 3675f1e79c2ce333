"""Experts of low rank in a public basis are shared, and a private residual and router are not.

The context of an expert is its factor times a fixed basis, plus a residual that belongs to the
client. A router reads the image features, and weighs the logits of the experts for each image. A
loss makes the factors of different experts orthogonal. Clients clip the gradient of each image in
the factors and add noise (local privacy), because only the factors are sent. Wang et al., "Towards
Privacy-Preserving Federated Prompt Tuning under Data Heterogeneity: A Subspace-Decomposed Expert
Approach", ACM Multimedia 2026 (FedSEPT), by the authors' code.

Up: M factors of rank r (M T r numbers). Down: M factors.

Deviations: the router has no dropout. Its attention has one key, the image, so the weight is 1, and
only the projections of value and output are left of it. Their README names a weight of the gate,
which the code does not have. Its noise follows from a budget epsilon. Here the multiplier is given,
and no epsilon is stated, because batches are not Poisson samples. ``private=False`` is their
``--dp_mode none``. The optimizer is as in all methods, where the code has SGD.

Compared: yuCoryx/FedSEPT d2fc0a4, `trainers/FEDSEPT.py`, `utils/noise_backend.py`, with the
deviations above and without noise, float64, largest difference 2.5e-15 (2026-11).
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from einops import einsum
from jaxtyping import Float
from torch import Tensor

import fedprompt as fp
from fedprompt.methods.models import ClipModel, ClipSetting
from fedprompt.methods.registry import LEARNING_RATE, register
from fedprompt.methods.steps import averaged


class _Experts(ClipModel):
    """Classifier of image tokens with contexts of experts, and a router over their logits."""

    def __init__(self, setting: ClipSetting, count: int, rank: int) -> None:
        super().__init__(setting)
        size, dim = setting.length, self.tower.dim
        width = setting.handwritten_text().shape[1]
        self.basis = torch.empty(rank, dim).normal_(0, 0.02)  # not trained
        self.experts = nn.Parameter(torch.empty(count, size, rank).normal_(0, 0.02))
        self.residual = nn.Parameter(torch.zeros(size, dim))
        gate = nn.Linear(width, count)
        nn.init.normal_(gate.weight, std=1e-2)
        nn.init.zeros_(gate.bias)
        layers = nn.Linear(width, width), nn.Linear(width, width), nn.LayerNorm(width), gate
        self.router = nn.Sequential(*layers)

    def forward(self, tokens: Float[Tensor, "batch tokens dim"]) -> Float[Tensor, "batch classes"]:
        """Classify images by their pooled token."""
        image = F.normalize(tokens[:, 0], dim=-1)
        weights = self.router(image).softmax(-1)
        text = F.normalize(self.encode_names(self.experts @ self.basis + self.residual), dim=-1)
        return self.scale * einsum(weights, image, text, "b expert, b d, expert c d -> b c")

    def likeness(self) -> Tensor:
        """Return the mean squared cosine of the factors of two experts."""
        units = F.normalize(self.experts.flatten(1), dim=-1, eps=1e-12)
        others = ~torch.eye(len(units), dtype=torch.bool, device=units.device)
        return (units @ units.T)[others].square().sum() / max(1, int(others.sum()))


def _clipped(losses: Tensor, experts: nn.Parameter, max_norm: float) -> dict[str, Tensor]:
    """Sum the gradients of the losses of images, each of at most this norm."""
    rows = torch.eye(len(losses), dtype=losses.dtype, device=losses.device)
    options = {"retain_graph": True, "is_grads_batched": True}
    (gradients,) = torch.autograd.grad(losses, [experts], rows, **options)
    return fp.privacy.clipped_sum({"experts": gradients}, max_norm=max_norm)


@register(
    "FedSEPT",
    families=("CLIP",),
    traits=("personalized", "private"),
    search=LEARNING_RATE | {"num_experts": [2, 4, 8], "diversity_weight": (0.1, 10.0)},
)
def fedsept(
    setting: ClipSetting,
    *,
    learning_rate: float = 5e-3,
    num_experts: int = 4,
    rank: int = 16,
    diversity_weight: float = 10.0,
    max_norm: float = 1.0,
    noise_multiplier: float = 1.0,
    private: bool = True,
) -> fp.Method:
    """FedSEPT."""
    model = setting.seeded(_Experts, setting, num_experts, rank)
    first = fp.snapshot(model)
    privacy = {"multiplier": noise_multiplier, "max_norm": max_norm}

    def train(data, answer, state):
        fp.load_values(model, {**first, **answer, **state})
        optimizer = data.optimizer(model, learning_rate)
        draw = data.stream("noise")
        for tokens, labels in data.batches():
            losses = F.cross_entropy(model(tokens), labels, reduction="none")
            losses = losses + diversity_weight * model.likeness()
            optimizer.zero_grad()
            if private:
                total = _clipped(losses, model.experts, max_norm)
                size = {"expected_batch_size": len(labels), "generator": draw}
                noisy = fp.privacy.noisy_mean(total, **size, **privacy)["experts"]
            torch.autograd.backward(losses.mean())
            if private:
                model.experts.grad = noisy.to(model.experts)
            optimizer.step()
        payload = fp.collect(model, weight=data.num_examples, only=["experts"])
        return payload, fp.snapshot(model, only=["residual", "router"])

    return averaged(model, train, shared=["experts"])
