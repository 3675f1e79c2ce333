"""A FedOTP step as the authors published it.

It encodes sentences of full length, runs the image tower at every step, and solves transport by a
loop with dense diagonal matrices.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fedprompt import prompted_text
from references.transport import marginals, published_plan


def whole_sentences(tower, names, context):
    """Encode every sentence in full length, and pool after the last norm."""
    model, text = tower.model, prompted_text(context, names)
    num_prompts, num_classes, length, dim = text.suffix.shape
    padding = names.pad.expand(num_prompts, num_classes, 77 - text.prefix.shape[1] - length, dim)
    tokens = torch.cat(
        [text.prefix[:, None].expand(-1, num_classes, -1, -1), text.suffix, padding], 2
    ).flatten(0, 1)
    hidden = model.ln_final(
        model.transformer(tokens + model.positional_embedding, attn_mask=model.attn_mask)
    )
    pooled = (
        hidden[torch.arange(len(hidden)), torch.tensor(text.end * num_prompts)]
        @ model.text_projection
    )
    return pooled.unflatten(0, (num_prompts, num_classes))


def published_logits(
    patches: Tensor, text: Tensor, *, scale: float, mass: float = 0.8, threshold: float = 1e-3
) -> Tensor:
    """Return transport logits with epsilon 0.1; the plan is constant in the backward pass."""
    similarity = torch.einsum(
        "bvd,pkd->bkvp", F.normalize(patches, dim=-1), F.normalize(text, dim=-1)
    )
    flat = similarity.detach().flatten(0, 1)
    masses = (
        marginal.expand(len(flat), -1)
        for marginal in marginals(patches.shape[1], len(text), mass, flat.dtype)
    )
    plan = published_plan(1 - flat, *masses, epsilon=0.1, threshold=threshold)
    return scale * (plan.reshape(similarity.shape) * similarity).sum((2, 3))
