"""PromptFL whose gradient never opposes the direction towards the zero-shot predictions.

The second direction is the gradient of the KL divergence from the predictions of a handwritten
sentence. Where the gradient of the labels opposes it, that part is removed. ProGrad is from Zhu et
al., "Prompt-aligned Gradient for Prompt Tuning", ICCV 2023.

Up: a context (T D numbers). Down: a context.

Deviations: the context is averaged over clients. The projected gradient enters the optimizer of
all methods, where the paper uses SGD. The opposing part is removed completely, as with the paper's
factor 1.

Compared: BeierZhu/Prompt-align 1b76203, with the deviations above, float64, largest difference
2.7e-15 (2026-11).
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp
from methods.federation import ClipFederation, Predictions

FAMILIES = ("CLIP",)
TRAITS = ()
SEARCH = {"learning_rate": (1e-3, 1e-1)}


def prograd(federation: ClipFederation, *, learning_rate: float = 1e-2) -> Iterator[Predictions]:
    """ProGrad (averaged)."""
    model, server, handwritten = (
        federation.new_model(),
        fp.overwrite(),
        federation.handwritten_text(),
    )
    values, context = fp.snapshot(model), model.context.context
    state = server.init(values)
    for server_round in range(federation.rounds):
        payloads = []
        for client in federation.cohort(server_round):
            fp.load_values(model, federation.send_down(client, values))
            optimizer = federation.optimizer(model, learning_rate)
            for tokens, labels in federation.batches(client, server_round):
                logits = model(tokens)
                zero_shot = fp.cosine_logits(tokens[:, 0], handwritten, scale=federation.scale)
                divergence = fp.mutual_loss(logits, zero_shot, temperature=1.0)
                (guide,) = torch.autograd.grad(divergence, context, retain_graph=True)
                (gradient,) = torch.autograd.grad(F.cross_entropy(logits, labels), context)
                context.grad = aligned(gradient, guide)
                optimizer.step()
            payload = fp.collect(model, weight=federation.num_examples(client))
            payloads.append(federation.send_up(client, payload))
        values, state = server.step(values, fp.weighted_mean(payloads), state)
        fp.load_values(model, values)
        yield Predictions(everyone=model)


def aligned(gradient: Tensor, guide: Tensor) -> Tensor:
    opposing = (gradient * guide).sum().clamp(max=0)
    smallest = torch.finfo(guide.dtype).tiny
    return gradient - opposing / guide.square().sum().clamp(min=smallest) * guide
