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
the private context is a tenth of the shared one. Steps are plain gradient steps. Batches are not
Poisson samples, so the study states no epsilon.

Compared: linhhtran/DP-FPL cce74b4, with the deviations above and without noise, float64, largest
difference 2.4e-14 (2026-11).
"""

from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp
from fedprompt.methods.registry import register
from fedprompt.methods.setting import ClipSetting, PromptedClassifier


def factors(private: Tensor, rank: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Find orthonormal columns and rows for the leading part of a context (one power iteration)."""
    start = torch.randn(private.shape[1], rank, generator=draw)
    columns = torch.linalg.qr(private @ start).Q
    return columns, torch.linalg.qr(private.T @ columns).Q.T


def gradients(model: PromptedClassifier, tokens: Tensor, labels: Tensor) -> Tensor:
    """Compute the gradient (images, length, dim) of the context for each image."""
    copies = fp.privacy.per_sample(model.context, len(labels))
    text = model.tower(fp.prompted_text(copies(), model.names, per_sample=True))
    logits = fp.cosine_logits(tokens[:, 0], text[:, 0], scale=model.scale)
    F.cross_entropy(logits, labels, reduction="sum").backward()
    return copies.context.grad[:, 0]


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
    model, draw = setting.new_model(), setting.generator(0, purpose="private")
    shared = model.context().detach()[0].clone()
    new = torch.empty_like(shared).normal_(0, 0.02, generator=draw)
    noise = {"multiplier": noise_multiplier, "max_norm": max_norm}

    def train(data, answer, state):
        number, private = state.get("step", 0), state.get("private", new)
        draw = data.generator("noise")  # one stream for all steps of a round
        if number:
            draw.set_state(state["noise"])
        batch = next(islice(data.batches(), number, None))
        by_image = gradients(predict(data, answer, state), *batch)
        u, v = factors(private, rank, draw)
        parts = {"u": by_image @ v.T, "v": u.T @ by_image, "shared": by_image}
        sums = {n: fp.privacy.clipped_sum({n: p}, max_norm=max_norm) for n, p in parts.items()}
        size = {"expected_batch_size": setting.batch_size, "generator": draw}
        of_u, of_v = (fp.privacy.noisy_mean(sums[n], **noise, **size)[n].to(private) for n in "uv")
        full = of_u @ v + u @ of_v - u @ (u.T @ of_u) @ v
        private = private - private_factor * learning_rate * full
        after = {"step": (number + 1) % setting.steps, "noise": draw.get_state()}
        return {"shared": sums["shared"]["shared"].to(private)}, {"private": private, **after}

    def answer(client, state):
        return {"shared": state["shared"]}

    def step(server_round, payloads, state):
        draw = setting.generator(server_round, purpose="noise")
        if state["step"]:
            draw.set_state(state["noise"])
        total = sum(payload["shared"] for payload in payloads.values())
        size = {"expected_batch_size": setting.batch_size * len(payloads), "generator": draw}
        mean = fp.privacy.noisy_mean({"shared": total}, **noise, **size)["shared"]
        after = {"step": (state["step"] + 1) % setting.steps, "noise": draw.get_state()}
        return {"shared": state["shared"] - learning_rate * mean.to(shared), **after}

    def predict(data, answer, state):
        context = (answer["shared"] + state.get("private", new))[None]
        fp.load_values(model, {"context.context": context})
        return model

    def form(client):
        return {"shared": shared}

    server = fp.Server({"shared": shared, "step": 0}, answer, step)
    return fp.Method(train, server, predict, setting.steps, form)
