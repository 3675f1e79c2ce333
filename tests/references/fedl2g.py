"""Guide gradients and rounds of FedL2G, written as its equations read.

The step is taken with a graph, and the quiz loss after it is differentiated in the guides. There
are no Jacobian-vector products. Study batches run first, in their order, then quiz batches, so
callers set PyTorch's seed to fix the dropout masks.

Zhang et al., "FedL2G: Learning to Guide Local Training in Heterogeneous Federated Learning",
2024, Eq. 4-6 and Alg. 1.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

Pairs = list[tuple[Tensor, Tensor]]
Values = Mapping[str, Any]
Step = Callable[[Values, Values, Values], tuple[Values, Values]]
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
    return lambda parameters, gradients: sgd(learning_rate)(parameters, gradients, {})[0]


def sgd(rate: float, *, momentum: float = 0.0, decay: float = 0.0) -> Step:
    """Return the step of SGD, from and to its momentum by name."""

    def step(parameters: Values, gradients: Values, memory: Values) -> tuple[Values, Values]:
        moved = {
            name: momentum * memory.get(name, 0) + slope + decay * parameters[name]
            for name, slope in gradients.items()
        }
        return {name: parameters[name] - rate * way for name, way in moved.items()}, moved

    return step


def adamw(rate: float, *, decay: float = 0.01, eps: float = 1e-8) -> Step:
    """Return the step of AdamW, from and to its moments by name and its number of steps."""

    def step(parameters: Values, gradients: Values, memory: Values) -> tuple[Values, Values]:
        count, stepped = memory.get("count", 0) + 1, {}
        moments = {"count": count}
        for name, slope in gradients.items():
            first, second = memory.get(name, (0, 0))
            moments[name] = first, second = (
                first + (slope - first) / 10,
                second + (slope**2 - second) / 1000,
            )
            root = (second / (1 - 0.999**count)).sqrt() + eps
            shrunk = parameters[name] * (1 - rate * decay)
            stepped[name] = shrunk - rate * first / (1 - 0.9**count) / root
        return stepped, moments

    return step


def network(parameters: Values, points: Tensor) -> tuple[Tensor, Tensor]:
    """Compute features and logits of a network with one hidden layer, or with two."""

    def layer(name: str, inputs: Tensor) -> Tensor:
        return inputs @ parameters[f"{name}.weight"].T + parameters[f"{name}.bias"]

    inner = layer("deep", points).tanh() if "deep.weight" in parameters else points
    return (features := layer("body", inner).tanh()), layer("head", features)


def client_round(
    values: Values,
    guides: Tensor,
    batches: Pairs,
    study: tuple[Tensor, Tensor],
    quiz: tuple[Tensor, Tensor],
    step: Step,
    *,
    by_features: bool,
    weight: float,
    followed: float,
    loss: Callable[[Tensor, Tensor], Tensor] = F.mse_loss,
    trial: Update | None = None,
) -> tuple[Values, Tensor]:
    """Run Alg. 1, lines 8 to 14: return the new parameters and the gradient of the guides.

    The trial step is the next step of the client, or another one.
    """

    def slopes(values: Values, batch: tuple[Tensor, Tensor], factor: float) -> Values:
        features, logits = network(values, batch[0])
        guided = loss(features if by_features else logits, table[batch[1]])
        total = F.cross_entropy(logits, batch[1]) + factor * guided
        found = torch.autograd.grad(total, [*values.values()], create_graph=True)
        return dict(zip(values, found, strict=True))

    table, memory = guides.clone().requires_grad_(), {}
    for batch in batches:
        values = {name: value.detach().requires_grad_() for name, value in values.items()}
        gradients = {
            name: slope.detach() for name, slope in slopes(values, batch, followed).items()
        }
        values, memory = step(values, gradients, memory)
    values = {name: value.detach().requires_grad_() for name, value in values.items()}
    gradients = slopes(values, study, weight)
    stepped = trial(values, gradients) if trial else step(values, gradients, memory)[0]
    (gradient,) = torch.autograd.grad(F.cross_entropy(network(stepped, quiz[0])[1], quiz[1]), table)
    return {name: value.detach() for name, value in values.items()}, gradient


def server_round(
    guides: Tensor, sent: list[tuple[Tensor, Tensor]], *, rate: float, max_norm: float
) -> Tensor:
    """Run Alg. 1, lines 16 and 17, for gradients and the labels of their study batches."""
    mean = torch.zeros_like(guides)
    for label in range(len(guides)):
        own = [gradient[label] for gradient, labels in sent if label in labels]
        if own:
            mean[label] = sum(own) / len(own)
    return guides - rate * mean * min(1.0, max_norm / (mean.norm().item() + 1e-6))  # as torch does
