"""FedL2G's guide gradient the way its equations read: take the step with a graph, judge it, differentiate the whole in the guides.

Zhang et al., "FedL2G: Learning to Guide Local Training in Heterogeneous Federated Learning", 2024, Eq. 4-6. Nothing here knows of
Jacobian-vector products. Whoever calls sets PyTorch's seed before: study batches are run first, in their order, then quiz batches.
"""

import copy
from collections.abc import Callable, Mapping

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

Pairs = list[tuple[Tensor, Tensor]]
Update = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], Mapping[str, Tensor]]


def run(
    model: nn.Module, parameters: Mapping[str, Tensor], images: Tensor
) -> tuple[Tensor, Tensor]:
    """Run a copy of a model with other parameters, on copies of its buffers; the model itself is never touched."""
    given = {
        id(value): parameters[name]
        for name, value in model.named_parameters()
        if name in parameters
    }
    given.update({id(buffer): buffer.clone() for buffer in model.buffers()})
    return _copied(model, given, {})(images)


def _copied(
    module: nn.Module, given: Mapping[int, Tensor], copies: dict[int, nn.Module]
) -> nn.Module:
    """Copy a tree of modules, each module once however many names it has; parameters and buffers are found by identity."""
    if id(module) not in copies:
        twin = copies[id(module)] = copy.copy(module)
        twin._parameters = {
            name: given.get(id(value), value) for name, value in module._parameters.items()
        }
        twin._buffers = {
            name: given.get(id(value), value) for name, value in module._buffers.items()
        }
        twin._modules = {
            name: None if child is None else _copied(child, given, copies)
            for name, child in module._modules.items()
        }
    return copies[id(module)]


def quiz_loss(
    model: nn.Module,
    guides: Tensor,
    study: Pairs,
    quiz: Pairs,
    update: Update,
    *,
    weight: float = 1.0,
    loss: Callable[[Tensor, Tensor], Tensor] = F.mse_loss,
    create_graph: bool = True,
) -> Tensor:
    """The loss after one guided step, as a differentiable function of the guides."""
    parameters = {
        name: value.detach().requires_grad_()
        for name, value in model.named_parameters()
        if value.requires_grad
    }
    with sdpa_kernel(SDPBackend.MATH):
        studied = []
        for images, labels in study:
            guided, logits = run(model, parameters, images)
            studied.append(F.cross_entropy(logits, labels) + weight * loss(guided, guides[labels]))
        total = torch.stack(studied).mean()
        gradients = torch.autograd.grad(
            total, list(parameters.values()), create_graph=create_graph, materialize_grads=True
        )
        stepped = update(parameters, dict(zip(parameters, gradients, strict=True)))
        judged = [
            F.cross_entropy(run(model, stepped, images)[1], labels) for images, labels in quiz
        ]
    return torch.stack(judged).mean()


def double_backward(
    model: nn.Module, guides: Tensor, study: Pairs, quiz: Pairs, update: Update, **options: object
) -> Tensor:
    """Reverse over reverse: the gradient of the whole meta step in the guides."""
    guides = guides.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(
        quiz_loss(model, guides, study, quiz, update, **options), guides
    )
    return gradient


def finite_differences(
    model: nn.Module,
    guides: Tensor,
    study: Pairs,
    quiz: Pairs,
    update: Update,
    *,
    seed: int,
    step: float,
    **options: object,
) -> Tensor:
    """Move every number of the table to both sides and run the whole meta step again, under the same seed."""
    gradient = torch.zeros_like(guides)
    for position in range(guides.numel()):
        values = []
        for sign in (1, -1):
            moved = guides.detach().clone()
            moved.view(-1)[position] += sign * step
            torch.manual_seed(seed)
            values.append(
                quiz_loss(model, moved, study, quiz, update, create_graph=False, **options).item()
            )
        gradient.view(-1)[position] = (values[0] - values[1]) / (2 * step)
    return gradient


def descend(learning_rate: float) -> Update:
    """Plain gradient descent: FedL2G's pseudo step."""
    return lambda parameters, gradients: {
        name: value - learning_rate * gradients[name] for name, value in parameters.items()
    }
