"""Each client adds a private context to the shared one; gradients of both carry privacy noise.

Before each step, the private context is written as u v plus a residual, with orthonormal u and v of
low rank. The client clips and perturbs the gradients of u and v (local privacy). Together they give
the gradient of the private context. The gradient of the shared context is clipped by the client and
perturbed by the server (global privacy), in every step. Tran et al., "Privacy-Preserving
Personalized Federated Prompt Learning for Multimodal Large Language Models", ICLR 2025 (DP-FPL).

Up: a gradient of the shared context (T D) in each of S steps. Down: the shared context (T D) in
each of S steps.

Deviations: the gradient of each image is clipped, as differential privacy requires. The authors'
code clips the gradient of a batch. The gradient of the private context is the projection of its
full gradient, as in reparametrized gradient perturbation (Yu et al., ICML 2021). Their code adds
the term that belongs to both projections and should be subtracted. As in their code, the step of
the private context is a tenth of the shared one. Steps are plain gradient steps, and
`make_optimizer` of the setting is not read. Batches are not
Poisson samples, so the study states no epsilon.

Compared: linhhtran/DP-FPL cce74b4, with the deviations above and without noise, float64, largest
difference 2.4e-14 (2026-11).
"""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp
from fedprompt.methods.models import ClipSetting, PromptedClassifier
from fedprompt.methods.registry import register


def _factors(private: Tensor, rank: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Find orthonormal columns and rows for the leading part of a context (one power iteration)."""
    start = torch.randn(private.shape[1], rank, generator=draw, device="cpu")
    columns = torch.linalg.qr(private @ start.to(private)).Q
    return columns, torch.linalg.qr(private.T @ columns).Q.T


def _gradients(model: PromptedClassifier, tokens: Tensor, labels: Tensor) -> Tensor:
    """Compute the gradient (images, length, dim) of the context for each image."""
    copies = fp.privacy.per_sample(model.context, len(labels))
    text = model.encode_names(copies(), per_sample=True)
    logits = fp.cosine_logits(tokens[:, 0], text[:, 0], scale=model.scale)
    F.cross_entropy(logits, labels, reduction="sum").backward()
    return copies.context.grad[:, 0]


def _clipped(gradients: Tensor, max_norm: float) -> Tensor:
    """Sum the gradients of images, each of at most this norm."""
    return fp.privacy.clipped_sum({"sum": gradients}, max_norm=max_norm)["sum"]


def _projected(of_u: Tensor, of_v: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """Project the gradient of u v onto their columns and rows, from the gradients of u and v."""
    return of_u @ v + u @ of_v - u @ (u.T @ of_u) @ v


def _resumed(draw: torch.Generator, state: Mapping[str, Any]) -> torch.Generator:
    """Continue the noise of the last step; all steps of a round share one stream."""
    if state.get("step"):
        draw.set_state(state["noise"])
    return draw


def _advanced(state: Mapping[str, Any], draw: torch.Generator, steps: int) -> dict[str, Any]:
    """Return the number of the next step in its round, and where its noise continues."""
    return {"step": (state.get("step", 0) + 1) % steps, "noise": draw.get_state()}


def _server(
    setting: ClipSetting, shared: Tensor, rate: float, noisy_mean: Callable[..., dict[str, Tensor]]
) -> fp.Server:
    """Make the server, which perturbs the gradient of the shared context (global privacy)."""

    def answer(client, state):
        return {"shared": state["shared"]}

    def step(server_round, payloads, state):
        draw = _resumed(setting.stream(server_round, purpose="noise"), state)
        total = {"shared": sum(payload["shared"] for payload in payloads.values())}
        size = setting.batch_size * len(payloads)
        mean = noisy_mean(total, expected_batch_size=size, generator=draw)["shared"].to(shared)
        new = state["shared"] - setting.learning_rate(rate, server_round) * mean
        return {"shared": new, **_advanced(state, draw, setting.steps)}

    return fp.Server({"shared": shared, "step": 0}, answer, step)


@register(
    "DP-FPL",
    families=("CLIP",),
    traits=("personalized", "private"),
    search={"learning_rate": (1e-3, 1.0), "max_norm": (0.1, 10.0), "rank": [1, 2, 4]},
)
def dpfpl(
    setting: ClipSetting,
    *,
    learning_rate: float = 1e-1,
    max_norm: float = 1.0,
    rank: int = 4,
    noise_multiplier: float = 1.0,
    private_factor: float = 0.1,
) -> fp.Method:
    """DP-FPL."""
    if not setting.steps:
        got = f"a step an exchange; got {setting.steps}"
        raise ValueError(f"`steps` must be at least 1 for DP-FPL, {got}.")
    model = setting.new_model()
    draw = setting.stream(0, purpose="private")
    shared = model.context.context.detach()[0].clone()
    new = torch.empty_like(shared, device="cpu").normal_(0, 0.02, generator=draw).to(shared)
    noisy_mean = partial(fp.privacy.noisy_mean, multiplier=noise_multiplier, max_norm=max_norm)

    def train(data, answer, state):
        private = state.get("private", new)
        draw = _resumed(data.stream("noise"), state)
        number = state.get("step", 0)
        for batch in islice(data.batches(), number, number + 1):
            by_image = _gradients(predict(data, answer, state), *batch)
        u, v = _factors(private, rank, draw)
        size = {"expected_batch_size": setting.batch_size, "generator": draw}
        sums = (_clipped(part, max_norm) for part in (by_image @ v.T, u.T @ by_image))
        of_u, of_v = (noisy_mean({"mean": total}, **size)["mean"].to(private) for total in sums)
        rate = data.learning_rate(private_factor * learning_rate)
        private = private - rate * _projected(of_u, of_v, u, v)
        payload = {"shared": _clipped(by_image, max_norm).to(shared)}
        return payload, {"private": private, **_advanced(state, draw, setting.steps)}

    def predict(data, answer, state):
        context = (answer["shared"] + state.get("private", new))[None]
        fp.load_values(model, {"context.context": context})
        return model

    server = _server(setting, shared, learning_rate, noisy_mean)
    return fp.Method(train, server, predict, setting.steps, lambda client: {"shared": shared})
