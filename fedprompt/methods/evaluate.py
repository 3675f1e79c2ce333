"""Accuracy of a method after a round, and the number of backward passes."""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as distributed
import torch.nn as nn
import torch.nn.functional as F
from jaxtyping import Int, Real
from torch import Tensor

import fedprompt as fp
import fedprompt._checks as check
from fedprompt._seals import Seal, check_seals
from fedprompt.interfaces import Method, Round
from fedprompt.methods.setting import Federation, Inputs, Setting, check_inputs, take_step
from fedprompt.rounds import refuse_autocast
from fedprompt.wire.gather import is_here, on_all_ranks

__all__ = ["counted_passes", "evaluate"]

_BATCH_SIZE = 256
_FIGURES = {"full", "lowest", "highest", "own", "worst", "balanced", "macro_f1"}
_FIGURES |= {"received", "after", "trained"}


def evaluate(
    method: Method,
    federation: Federation,
    now: Round,
    inputs: Inputs,
    labels: Int[Tensor, "inputs"],
    *,
    clients: Iterable[int] | None = None,
    newcomers: Iterable[int] | None = None,
    mixes: Mapping[int, Real[Tensor, "cells"]] | None = None,
    cells: Int[Tensor, "inputs"] | None = None,
    domains: Mapping[str, Iterable[int]] | None = None,
    shared: bool = False,
    steps: int = 0,
    learning_rate: float = 1e-2,
    group: "distributed.ProcessGroup | None" = None,
) -> dict[str, float]:
    """Measure the accuracy of the clients' predictions after a round.

    A client's own mix weighs the accuracy on each class by the client's share of this class. So all
    clients are tested on the same inputs, and a client with few classes is tested on these. Classes
    without test inputs do not count.

    Args:
        method: Method that made the round.
        federation: Data of the clients. They are what `predict` may train on.
        now: Round after which clients predict.
        inputs: Test inputs, at least one: a tensor, or another object whose ``inputs[positions]``
            is a batch.
        labels: Their classes.
        clients: Ids of the clients to test. If None, all clients of the setting.
        newcomers: Ids of clients that never trained, which are tested on their own mixes alone. If
            None, all clients of the federation that are not in the setting.
        mixes: Number or share of each cell, by client id. If None, the numbers of the client's
            training inputs in each class.
        cells: Cell of each test input, for mixes of more than classes, such as pairs of domain and
            class. If None, cells are classes.
        domains: Some of the clients by a name. The figures have the mean on their own mixes under
            this name.
        shared: Whether all clients predict with one model, which is then tested once.
        steps: Number of batches on which each newcomer trains, for the figure `after`.
        learning_rate: Learning rate of these steps.
        group: Process group of :func:`fedprompt.run_rounds`. Each rank then tests its own clients,
            and all ranks return the same figures. If None, this process tests all clients.

    Returns:
        Accuracies in [0, 1] by name. The mean over clients on all test inputs is `full`; `lowest`
        and `highest` belong to the worst and the best client. The mean on their own mixes is `own`,
        and `worst` the lowest of these. On all test inputs, `balanced` is the balanced accuracy and
        `macro_f1` the macro F1. With newcomers, `received` is their mean, and `after` the mean
        after `steps` of training. In addition, `trained` is the number of parameters that the model
        of a client trains. An input whose predictions contain NaN counts as an error.

    Raises:
        ValueError: If a client is not in the federation, a newcomer has trained, a mix has another
            number of cells, a domain has the name of a figure, or predictions do not have one
            column for each class.

    Example:
        >>> from fedprompt import methods, run_rounds, samples, vit_trunk
        >>> images, labels, test_images, test_labels = samples.digits()
        >>> shards = {client: torch.arange(30) + 30 * client for client in range(4)}
        >>> setting = methods.VitSetting(
        ...     trunks=[vit_trunk(samples.vit("S"))], clients=range(3), num_classes=10,
        ...     rounds=4, steps=4, cohort_size=3, batch_size=16, seed=0, public=images[:0],
        ... )
        >>> federation = methods.Federation(setting, images, labels, shards)
        >>> method = methods.fedvpt_d(setting, learning_rate=0.05)
        >>> *_, now = run_rounds(method, federation.data, setting.cohorts())
        >>> figures = methods.evaluate(method, federation, now, test_images, test_labels)
        >>> print({name: figures[name] > 0.5 for name in ("full", "own", "worst", "received")})
        {'full': True, 'own': True, 'worst': True, 'received': True}
    """
    refuse_autocast("evaluate")
    check.method(method)
    check.instance("federation", federation, Federation, "be a Federation")
    check.instance("now", now, Round, "be a Round")
    check.flag("shared", shared)
    check.count("steps", steps, at_least=0)
    check.number("learning_rate", learning_rate, above=0)
    setting = federation.setting
    tested = _ids("clients", setting.clients if clients is None else clients, federation)
    others = [client for client in federation.shards if client not in setting.clients]
    new = _ids("newcomers", others if newcomers is None else newcomers, federation)
    check_new = partial(_check_new, new, now)  # a rank knows the clients that trained on it
    on_all_ranks(check_new, server_round=max(now.server_round, 0), group=group)
    tests = _tests(federation, inputs, labels, cells, mixes, [*tested, *new])
    named = _checked_domains(domains or {}, tested)
    run = _Run(method, federation, now, tests, group)
    return run.figures(tested, named, shared) | run.newcomers(new, steps, learning_rate)


def _check_new(clients: Sequence[int], now: Round) -> None:
    if trained := [client for client in clients if str(client) in now.clients]:
        raise check.wrong("newcomers", "be clients that never trained", trained)


@contextmanager
def counted_passes() -> Iterator[Counter[str]]:
    """Count calls of `torch.autograd.backward` and `torch.autograd.grad`.

    Calls of ``loss.backward()`` are among them. A call within another one is not counted, because
    PyTorch calls `grad` twice under ``with torch.device(...)``. All threads are counted.

    Yields:
        Number of calls by "backward" and "grad", so far.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> with counted_passes() as passes:
        ...     x.sum().backward()
        ...     gradient = torch.autograd.grad(x.sum(), x)
        >>> passes["backward"], passes.total()
        (1, 2)
    """
    passes: Counter[str] = Counter()
    functions = {name: getattr(torch.autograd, name) for name in ("backward", "grad")}
    thread = threading.local()

    def counting(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if getattr(thread, "inside", False):
                return functions[name](*args, **kwargs)
            passes[name] += 1
            thread.inside = True
            try:
                return functions[name](*args, **kwargs)
            finally:
                thread.inside = False

        return call

    for name in functions:
        setattr(torch.autograd, name, counting(name))
    try:
        yield passes
    finally:
        for name, function in functions.items():
            setattr(torch.autograd, name, function)


@dataclass(frozen=True)
class _Tests:
    """Test inputs with their cells, and the mix of cells of each client and of all, None."""

    setting: Setting
    inputs: Inputs
    labels: Tensor
    cells: Tensor
    mixes: Mapping[int | None, Tensor]

    @torch.no_grad()
    def predicted(self, model: Any) -> Tensor:
        """Predict the class of each test input, without dropout and with stored statistics."""
        modules = list(model.modules()) if isinstance(model, nn.Module) else []
        training = [module for module in modules if module.training]  # a frozen part is not
        batches = torch.split(torch.arange(len(self.labels), device="cpu"), _BATCH_SIZE)
        try:
            for module in training:
                module.training = False
            return torch.cat([self._classes(model, positions) for positions in batches])
        finally:
            for module in training:
                module.training = True

    def _classes(self, model: Any, positions: Tensor) -> Tensor:
        logits = model(self.inputs[positions].to(self.setting.device))
        check.instance("predictions", logits, Tensor, "be a tensor of logits")
        check.shape("predictions", logits, (len(positions), self.setting.num_classes))
        none = self.setting.num_classes  # NaN is no class
        return torch.where(logits.isnan().any(1), none, logits.argmax(1)).cpu()

    def accuracy(self, classes: Tensor, client: int | None) -> float:
        """Compute the accuracy on the mix of a client, or on all test inputs."""
        correct, mix = (classes == self.labels).float(), self.mixes[client]
        by_cell = fp.class_means(correct, self.cells, num_classes=len(mix)).value
        return fp.metrics.global_accuracy(by_cell[None], mix)

    def over_classes(self, classes: Tensor) -> dict[str, float]:
        """Compute means over classes."""
        number = self.setting.num_classes + 1  # the last has no samples
        table = fp.selection.contingency_table(classes, self.labels, number, number)
        present = int((table.sum(0) + table.sum(1) > 0).sum())
        others = present - int(table[-1].any())  # NaN is an error, and not a class of the mean
        return {
            "balanced": fp.metrics.balanced_accuracy(table),
            "macro_f1": fp.metrics.macro_f1(table) * (present / others),
        }


@dataclass(frozen=True)
class _Run:
    """Predictions of clients after a round."""

    method: Method
    federation: Federation
    now: Round
    tests: _Tests
    group: "distributed.ProcessGroup | None"

    def model(self, client: int) -> Any:
        """Return the model with which a client predicts."""
        with torch.device(self.federation.setting.device):
            return self.now.model(self.method, self.federation.data(client, self.now.server_round))

    def figures(
        self, clients: Sequence[int], domains: Mapping[str, Sequence[int]], shared: bool
    ) -> dict[str, float]:
        """Measure clients that are in the setting."""
        if not clients:
            return {}
        predictions: list[tuple[Tensor, int]] = []

        def measured(client: int) -> dict[str, float]:
            if not (shared and predictions):
                model = self.model(client)
                trained = sum(weights.numel() for weights in _trained(model))
                predictions[:] = [(self.tests.predicted(model), trained)]
            classes, trained = predictions[0]
            accuracy = partial(self.tests.accuracy, classes)
            found = {"full": accuracy(None), "own": accuracy(client)}
            return found | self.tests.over_classes(classes) | {"trained": trained}

        found = self.of_each(clients, measured)
        full, own = ([found[client][name] for client in clients] for name in ("full", "own"))
        figures = {"full": sum(full) / len(full), "lowest": min(full), "highest": max(full)}
        figures |= {"own": sum(own) / len(own), "worst": min(own)}
        models = [found[client] for client in clients][: 1 if shared else None]
        for name in ("balanced", "macro_f1"):
            figures[name] = sum(model[name] for model in models) / len(models)
        for name, ids in domains.items():
            figures[name] = float(np.mean([found[client]["own"] for client in ids]))
        return figures | {"trained": next(filter(None, (model["trained"] for model in models)), 0)}

    def newcomers(
        self, clients: Sequence[int], steps: int, learning_rate: float
    ) -> dict[str, float]:
        """Measure newcomers on their own mixes, before and after training."""

        def measured(client: int) -> dict[str, float]:
            model = self.model(client)
            found = {"received": self.tests.accuracy(self.tests.predicted(model), client)}
            if steps:
                self.train(model, client, steps, learning_rate)
                found["after"] = self.tests.accuracy(self.tests.predicted(model), client)
            return found

        found = self.of_each(clients, measured)
        names = ("received", "after")[: 1 + bool(steps)] if clients else ()
        return {n: sum(found[client][n] for client in clients) / len(clients) for n in names}

    def of_each(
        self, clients: Sequence[int], measured: Callable[[int], dict[str, float]]
    ) -> dict[int, dict[str, float]]:
        """Measure each client on its rank, and return the figures of all of them."""

        def here() -> dict[str, dict[str, float]]:
            found, server = {}, Seal(self.now.server)
            for client in (c for c in clients if is_here(c, self.group)):
                seals = {"the server's state": server}
                seals["the client's state"] = Seal(self.now.clients.get(str(client), {}))
                found[str(client)] = measured(client)
                check_seals(f"client {client}", "a prediction must change no argument", seals)
            return found

        trees = on_all_ranks(here, server_round=self.now.server_round, group=self.group)
        return {int(client): figures for tree in trees for client, figures in tree.items()}

    def train(self, model: Any, client: int, steps: int, learning_rate: float) -> None:
        """Train a model on batches of a newcomer; a plain function stays as it is."""
        if not (parameters := _trained(model)):
            return
        setting = self.federation.setting
        optimizer = setting.make_optimizer(parameters, lr=learning_rate)  # without a schedule
        longer = replace(setting, steps=steps)
        data = replace(self.federation, setting=longer).data(client, 0)
        for inputs, labels in data.batches(purpose="newcomer"):
            take_step(optimizer, F.cross_entropy(model(inputs), labels))


def _trained(model: Any) -> list[nn.Parameter]:
    """Return the trained parameters of a model; a plain function has none."""
    parameters = model.parameters() if isinstance(model, nn.Module) else ()
    return [parameter for parameter in parameters if parameter.requires_grad]


def _checked_mix(argument: str, mix: object) -> Tensor:
    rule = "be a tensor of one number for each cell"
    if not isinstance(mix, Tensor) or mix.ndim != 1:
        raise check.wrong_type(argument, rule, check.kind(mix))
    sizes = mix.double()
    if not bool((torch.isfinite(sizes) & (sizes >= 0)).all()) or sizes.sum() == 0:
        raise check.wrong(argument, "be finite, at least 0 and not all 0", check.kind(mix))
    return mix


def _ids(argument: str, clients: Iterable[int], federation: Federation) -> list[int]:
    check.iterable(argument, clients, "ids of clients")
    ids = list(clients)
    for position, client in enumerate(ids):
        check.count(f"{argument}[{position}]", client, at_least=0)
        if client not in federation.shards:
            raise check.wrong(argument, "have clients of `federation`", client)
    if doubled := sorted({client for client in ids if ids.count(client) > 1}):
        raise check.wrong(argument, "have a client at most once", doubled)
    return ids


def _checked_domains(
    domains: Mapping[str, Iterable[int]], clients: Sequence[int]
) -> dict[str, list[int]]:
    check.instance("domains", domains, Mapping, "map names to ids of clients")
    found = {}
    for name, ids in domains.items():
        if name in _FIGURES:
            raise check.wrong("domains", "have other names than the figures have", repr(name))
        check.iterable(f"domains[{name!r}]", ids, "ids of clients")
        found[name] = list(ids)
        if not found[name] or set(found[name]) - set(clients):
            rule = "have some of the clients that are tested"
            raise check.wrong(f"domains[{name!r}]", rule, found[name])
    return found


def _tests(
    federation: Federation,
    inputs: Inputs,
    labels: Tensor,
    cells: Tensor | None,
    mixes: Mapping[int, Tensor] | None,
    clients: Sequence[int],
) -> _Tests:
    """Check test inputs and mixes."""
    setting = federation.setting
    check_inputs("inputs", inputs)
    check.labels("labels", labels, setting.num_classes)
    if len(inputs) != len(labels) or not len(labels):
        rule = "have one label for each of `inputs`, and at least one"
        raise check.wrong("labels", rule, f"{len(labels)} for {len(inputs)}")
    if mixes is None:
        if cells is not None:
            raise check.wrong("mixes", "be given with `cells`", None)
        mixes = {client: federation.data(client, 0).class_counts for client in clients}
    check.instance("mixes", mixes, Mapping, "map ids of clients to tensors")
    if missing := [client for client in clients if client not in mixes]:
        raise check.wrong("mixes", "have all clients that are tested", f"none for {missing}")
    numbers = {client: _checked_mix(f"mixes[{client}]", mix) for client, mix in mixes.items()}
    num_cells = len(next(iter(numbers.values()), torch.empty(setting.num_classes)))
    cells = labels if cells is None else cells
    check.labels("cells", cells, num_cells)
    if len(cells) != len(labels):
        raise check.wrong("cells", f"have one entry for each of {len(labels)} inputs", len(cells))
    for client, mix in numbers.items():
        if len(mix) != num_cells:
            raise check.wrong(f"mixes[{client}]", f"have {num_cells} cells", check.kind(mix))
    seen: dict[int | None, Tensor] = {None: torch.bincount(cells.cpu(), minlength=num_cells)}
    seen |= {client: mix.cpu() * (seen[None] > 0) for client, mix in numbers.items()}
    for client in clients:
        if not seen[client].any():
            rule = "have a class, or a cell, of each client that is tested"
            raise check.wrong("labels", rule, f"none of client {client}")
    return _Tests(setting, inputs, labels.cpu(), cells.cpu(), seen)
