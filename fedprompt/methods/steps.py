"""Steps that many methods of the gallery share: of a client, of its server, and of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

import fedprompt as fp
from fedprompt.methods.models import PromptedModel
from fedprompt.methods.setting import ClientData
from fedprompt.methods.whole_networks import NetworkModel
from fedprompt.rounds import load_optimizer, optimizer_state


def averaged(
    model: nn.Module,
    train: Callable[[ClientData, fp.interfaces.Message, fp.interfaces.State], Any],
    *,
    shared: Sequence[str] | None = None,
    server: fp.Server | None = None,
    predict: Callable[[ClientData, fp.interfaces.Message, fp.interfaces.State], Any] | None = None,
) -> fp.Method:
    """Make a method whose clients share the parameters of one model.

    Args:
        model: Model of all clients, with the initial values.
        train: Client function, as in :class:`fedprompt.Method`.
        shared: Names or dotted prefixes of the parameters in payloads. If None, all of them.
        server: Server. If None, :func:`fedprompt.averaging_server` of the parameters in payloads.
        predict: Prediction, as in :class:`fedprompt.Method`. If None, the model with the values of
            the server's answer. Values in the client's state, if there are any, take their place.

    Example:
        >>> model = nn.Linear(3, 2)
        >>> client = fedavg_client(model, learning_rate=0.1)
        >>> list(averaged(model, client, shared=["weight"]).server.state["values"])
        ['weight']
    """
    first = fp.snapshot(model)

    def loaded(data: Any, answer: Any, state: Any) -> nn.Module:
        fp.load_values(model, {**first, **answer, **state})
        return model

    def form(client: int) -> fp.interfaces.Message:
        return fp.collect(model, weight=0, only=shared)

    server = server or fp.averaging_server(fp.snapshot(model, only=shared))
    return fp.Method(train, server, predict or loaded, form=form)


def fedavg_client(
    model: nn.Module, learning_rate: float, *, shared: Sequence[str] | None = None
) -> Callable[[ClientData, fp.interfaces.Message, fp.interfaces.State], Any]:
    """Make the client of FedAvg, which takes a step on each batch and sends what it trained.

    Args:
        model: Model of all clients, which is trained in place.
        learning_rate: Learning rate of the optimizer of the setting.
        shared: Names or dotted prefixes of the parameters in payloads. If None, all of them.

    Returns:
        Client function, as in :class:`fedprompt.Method`.

    Example:
        >>> from fedprompt.methods import Federation, Setting
        >>> model = nn.Linear(3, 2)
        >>> setting = Setting(num_classes=2, rounds=1, batch_size=2)
        >>> inputs, labels = torch.eye(3), torch.tensor([0, 1, 1])
        >>> data = Federation(inputs, labels, {0: torch.arange(3)}).data(setting, 0, 0)
        >>> payload, _ = fedavg_client(model, learning_rate=0.1)(data, fp.snapshot(model), {})
        >>> payload["bias"].weight
        tensor(3.)
    """

    def client(data: ClientData, answer: Any, state: Any) -> Any:
        fp.load_values(model, answer)
        train(model, data, learning_rate)
        return fp.collect(model, weight=data.num_examples, only=shared), state

    return client


def train(model: nn.Module, data: ClientData, learning_rate: float, *, times: int = 1) -> None:
    """Train a model on the batches of a round, and on as many others for each further time.

    Args:
        model: Model, which is changed.
        data: Data of a client in a round.
        learning_rate: Learning rate.
        times: Number of times, at least 1.
    """
    optimizer = data.optimizer(model, learning_rate)
    for time in range(times):
        for inputs, labels in data.batches(purpose=f"batches {time}" if time else "batches"):
            take_step(optimizer, F.cross_entropy(model(inputs), labels))


def take_step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """Take a step of an optimizer along the gradient of a loss.

    Args:
        optimizer: Optimizer, whose earlier gradients are cleared.
        loss: Loss ().

    Example:
        >>> weight = nn.Parameter(torch.ones(2))
        >>> take_step(torch.optim.SGD([weight], lr=0.5), weight.square().sum())
        >>> weight.tolist()
        [0.0, 0.0]
    """
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    optimizer.step()


def adam_steps(
    module: nn.Module,
    loss: Callable[[], Tensor],
    state: Mapping[str, Any],
    *,
    learning_rate: float,
    steps: int,
) -> fp.interfaces.State:
    """Train a module of the server, whose values and optimizer continue from the last round.

    Args:
        module: Module of the server.
        loss: Function that computes the loss of a step.
        state: Values of the module, under "values", and of its optimizer, under "adam". At first,
            "adam" is {}.
        learning_rate: Learning rate of Adam.
        steps: Number of steps.

    Returns:
        New "values" and "adam".
    """
    fp.load_values(module, state["values"])
    adam = torch.optim.Adam(module.parameters(), learning_rate)
    load_optimizer(adam, state["adam"])
    for _ in range(steps):
        take_step(adam, loss())
    return {"values": fp.snapshot(module), "adam": optimizer_state(adam)}


def broadcast(client: int, state: fp.interfaces.State) -> Any:
    """Answer every client with the whole state of the server."""
    return state


def rounds_server(
    first: Mapping[str, Tensor], weight: Callable[[int], float], *, first_weight: float = 0.0
) -> fp.Server:
    """Make a server that sends the mean of the last round, and a weighted mean of all rounds.

    Args:
        first: Initial values, under "newest" and "mean" of the state and of answers.
        weight: Function from a round to its weight in the mean of all rounds.
        first_weight: Weight of the initial values in that mean.
    """

    def answer(client: int, state: Any) -> Any:
        return fp.named("newest", state["newest"]) | fp.named("mean", state["mean"])

    def step(server_round: int, payloads: Any, state: Any) -> Any:
        newest = {n: entry.value for n, entry in fp.weighted_mean(payloads.values()).items()}
        now = weight(server_round)
        total = state["total"] + now
        mean = {n: old + (newest[n] - old) * (now / total) for n, old in state["mean"].items()}
        return {"newest": newest, "mean": mean, "total": total}

    return fp.Server({"newest": first, "mean": first, "total": first_weight}, answer, step)


def mean_of_rounds(model: nn.Module) -> Callable[[ClientData, Any, Any], nn.Module]:
    """Make the prediction with the mean of all rounds of :func:`rounds_server`."""

    def predict(data: ClientData, answer: Any, state: Any) -> nn.Module:
        fp.load_values(model, fp.part(answer, "mean"))
        return model

    return predict


@torch.no_grad()
def prototypes(model: PromptedModel | NetworkModel, data: ClientData) -> fp.Weighted:
    """Average the features of each class over all inputs of a client, in parts."""
    classes = data.setting.num_classes
    return fp.weighted_mean(
        fp.class_means(model.features(images), labels, num_classes=classes)
        for images, labels in data.parts()
    )


def known_rows(
    entries: Sequence[fp.Weighted],
) -> tuple[Float[Tensor, "rows dim"], Int[Tensor, rows]]:
    """Collect the rows of positive weight, and their classes, from the prototypes of clients."""
    values = torch.cat([entry.value[entry.weight > 0] for entry in entries])
    return values, torch.cat([entry.weight.nonzero()[:, 0] for entry in entries])
