"""Guide gradients of FedL2G, written as its equations read.

The step is taken with a graph, and the quiz loss after it is differentiated in the guides. There
are no Jacobian-vector products. Study batches run first, in their order, then quiz batches, so
callers set PyTorch's seed to fix the dropout masks.

Zhang et al., "FedL2G: Learning to Guide Local Training in Heterogeneous Federated Learning",
2024, Eq. 4-6.
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
    """Run a copy of a model under other parameters, with copies of its buffers."""
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
    """Copy a tree of modules, and each shared module once.

    Parameters and buffers are found by identity.
    """
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
    """Compute the quiz loss after one guided step, as a differentiable function of the guides."""
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
        losses = [
            F.cross_entropy(run(model, stepped, images)[1], labels) for images, labels in quiz
        ]
    return torch.stack(losses).mean()


def double_backward(
    model: nn.Module, guides: Tensor, study: Pairs, quiz: Pairs, update: Update, **options: object
) -> Tensor:
    """Differentiate the whole step with respect to the guides, by reverse over reverse."""
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
    """Run the whole step again for each entry of the table, moved to both sides."""
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
    """Return plain gradient descent, which is the step of FedL2G."""
    return lambda parameters, gradients: {
        name: value - learning_rate * gradients[name] for name, value in parameters.items()
    }
