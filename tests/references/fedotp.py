"""One round of FedOTP as its Algorithms 1 and 2 read, for one image and one class at a time.

Nothing is in the log domain, normalized twice, or solved as a batch. SGD is written out.

Li et al., "Global and Local Prompts Cooperation via Optimal Transport for Federated Learning",
CVPR 2024.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

Plan = Callable[[Tensor, Tensor, Tensor], Tensor]
Batches = Iterable[tuple[Tensor, Tensor]]


def algorithm_1(
    cost: Tensor, a: Tensor, b: Tensor, *, epsilon: float = 0.1, most: int = 100
) -> Tensor:
    """Solve one problem until no entry of v changes by 0.001, in at most 100 iterations."""
    kernel, v = torch.exp(-cost / epsilon), torch.ones_like(b)
    for _ in range(most):
        u = torch.minimum(1 / (kernel / a[:, None] @ v), torch.ones_like(a))
        v, before = 1 / (kernel.T / b[:, None] @ u), v
        if (v - before).abs().max() < 1e-3:
            break
    return u[:, None] * kernel * v


def logits(patches: Tensor, text: Tensor, *, scale: float, mass: float, plan: Plan) -> Tensor:
    """Return Eq. 10's exponents of one image: patches (V, dim), text (prompts, classes, dim)."""
    a = torch.full((len(patches),), 1 / len(patches), dtype=patches.dtype)
    b = torch.full((len(text),), mass / len(text), dtype=patches.dtype)
    scores = []
    for label in range(text.shape[1]):
        units = [each / each.norm(dim=1, keepdim=True) for each in (patches, text[:, label])]
        cost = 1 - units[0] @ units[1].T
        scores.append(scale * (1 - (plan(cost.detach(), a, b) * cost).sum()))
    return torch.stack(scores)


def trained(
    contexts: Sequence[Tensor],
    batches: Batches,
    encode: Callable[[Tensor], Tensor],
    match: Callable[[Tensor, Tensor], Tensor],
    *,
    learning_rate: float,
    momentum: float,
    weight_decay: float,
) -> list[Tensor]:
    """Train contexts (1, length, dim) by SGD; tokens have the pooled one first."""
    values = [context.clone().requires_grad_() for context in contexts]
    velocity = [torch.zeros_like(context) for context in contexts]
    for tokens, labels in batches:
        text = encode(torch.cat(values))
        rows = [match(image[1:], text).log_softmax(0) for image in tokens]
        loss = -torch.stack([row[label] for row, label in zip(rows, labels, strict=True)]).mean()
        for index, gradient in enumerate(torch.autograd.grad(loss, values)):
            value = values[index].detach()
            velocity[index] = momentum * velocity[index] + gradient + weight_decay * value
            values[index] = (value - learning_rate * velocity[index]).requires_grad_()
    return [value.detach() for value in values]
