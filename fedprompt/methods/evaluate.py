"""Accuracy of a method after a round, and the number of backward passes."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from itertools import cycle, islice
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as distributed
import torch.nn as nn
import torch.nn.functional as F
from jaxtyping import Int, Real
from torch import Tensor

import fedprompt as fp
import fedprompt._conversions as convert
import fedprompt._nouns as nouns
import fedprompt._refusals as check
from fedprompt import _casts
from fedprompt._random_streams import begin_streams, kept_streams
from fedprompt.interfaces import Method, Round
from fedprompt.methods.models import ClipSetting
from fedprompt.methods.registry import Prediction
from fedprompt.methods.setting import Federation, Inputs, Setting, check_inputs, owned
from fedprompt.methods.steps import take_step
from fedprompt.rounds import moved, noted, refuse_autocast
from fedprompt.wire.gather import on_all_ranks, rank_of, ranks_of

__all__ = ["Figures", "HeldOut", "counted_passes", "evaluate"]

_BATCH_SIZE = 256
_FIGURES = {"full", "lowest", "highest", "own", "worst", "pooled", "balanced", "macro_f1"}
_FIGURES |= {"received", "after", "trained", "participated"}


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Test inputs, and how much each of them counts for each client.

    All clients predict all inputs. A client is tested on inputs of its own (`own`), or on all of
    them, weighted by its mix of cells (`mixes`). Both have the same mean over clients if they have
    the same proportions. However, the worst of many clients is lower on few inputs of its own,
    because its figure also contains the error of drawing them.

    Args:
        inputs: Test inputs, at least one: a tensor, or another object whose ``inputs[positions]``
            is a batch.
        labels: Their classes.
        own: Positions of the test inputs of each client, by client id; tensors or NumPy arrays.
            Clients may have inputs in common.
        cells: Cell of each test input, for mixes of more than classes, such as pairs of domain and
            class. If None, cells are classes.
        mixes: Number or share of each cell, by client id. A cell without test inputs does not
            count. "classes" stands for the numbers of the client's training inputs in each class.
            Do not use it if clients have unlike images of the same classes, such as domains.

    Raises:
        ValueError: If `own` and `mixes` are both given, a client has no test input, mixes have
            unlike numbers of cells, or `cells` is given without mixes of them.

    Example:
        >>> from fedprompt.methods import HeldOut
        >>> inputs, labels = torch.rand(4, 2), torch.tensor([0, 0, 1, 1])
        >>> held_out = HeldOut(inputs, labels, own={3: torch.arange(2)})
        >>> held_out.own[3]
        tensor([0, 1])
    """

    inputs: Inputs
    labels: Int[Tensor, inputs]
    _: KW_ONLY
    own: Mapping[int, Int[Tensor, _] | Int[np.ndarray, _]] | None = None
    cells: Int[Tensor, inputs] | None = None
    mixes: Mapping[int, Real[Tensor, cells]] | Literal["classes"] | None = None

    def __post_init__(self) -> None:
        check_inputs("inputs", self.inputs)
        size = len(self.inputs)
        check.some("inputs", size, "have at least one test input")
        check.labels("labels", self.labels, sys.maxsize, size=size, of="inputs")
        if self.own is not None:
            check.instance("own", self.own, Mapping, "map ids of clients to positions")
            if self.mixes is not None:
                raise check.wrong("mixes", "be None if `own` is given", check.kind(self.mixes))
            own = {c: owned("own", c, given, size) for c, given in self.own.items()}
            for client, positions in own.items():
                once = len(torch.unique(positions)) == len(positions)
                rule, got = "have each position once", check.kind(positions)
                check.require(once, f"own[{client}]", rule, got)
            object.__setattr__(self, "own", own)
        if isinstance(self.mixes, Mapping):
            self._check_mixes(self.mixes)
        elif self.mixes not in (None, "classes"):
            rule = 'be "classes", or map ids of clients to tensors'
            raise check.wrong_type("mixes", rule, check.kind(self.mixes))
        elif self.cells is not None:
            rule = "be numbers of cells if `cells` is given"
            raise check.wrong("mixes", rule, repr(self.mixes))

    @property
    def by_client(self) -> bool:
        """Whether clients have tests of their own."""
        return self.own is not None or self.mixes is not None

    def _check_mixes(self, mixes: Mapping[int, Tensor]) -> None:
        name = "labels" if self.cells is None else "cells"
        for first in list(mixes.values())[:1]:
            for client, mix in mixes.items():
                check.count("key of mixes", client, at_least=0)
                convert.counts(f"mixes[{client}]", mix, "(cells,)", ndims=(1,))
                check.shape(f"mixes[{client}]", mix, first.shape)
                check.some(f"mixes[{client}]", mix.any(), "count at least one input")
            size = len(self.labels)
            check.labels(name, getattr(self, name), len(first), size=size, of="inputs")


class Figures(dict[str, float]):
    """Figures by name, and the figures of each client.

    Attributes:
        clients: Figures of each client by name, by client id. A client that took part has `full`,
            `balanced`, `macro_f1` and `trained`, and `participated`, which is 1 if it ever trained.
            With `own` or `mixes` it also has `own`, and `size`, its weight in `pooled`. A newcomer
            has `received`, and `after` if it trains.
        predicted: Predicted class of each test input, by client id; the number of classes stands
            for NaN. It has the clients that took part.

    Example:
        >>> from fedprompt.methods import Figures
        >>> found = Figures({"full": 0.75}, {0: {"full": 0.5}, 1: {"full": 1.0}})
        >>> found["full"], found.clients[1]["full"]
        (0.75, 1.0)
    """

    def __init__(
        self,
        figures: Mapping[str, float],
        clients: Mapping[int, Mapping[str, float]],
        predicted: Mapping[int, Tensor] | None = None,
    ) -> None:
        super().__init__(figures)
        self.clients = dict(clients)
        self.predicted = dict(predicted or {})


def evaluate(
    method: Method,
    federation: Federation,
    now: Round,
    held_out: HeldOut,
    *,
    class_names: Sequence[str] | None = None,
    clients: Iterable[int] | None = None,
    newcomers: Iterable[int] | None = None,
    domains: Mapping[str, Iterable[int]] | None = None,
    shared: bool = False,
    steps: int = 0,
    learning_rate: float = 1e-2,
    group: distributed.ProcessGroup | None = None,
) -> Figures:
    """Measure the accuracy of the clients' predictions after a round.

    Args:
        method: Method that made the round, with its setting.
        federation: Data of the clients. They are what `predict` may train on.
        now: Round after which clients predict.
        held_out: Test inputs. If they have neither `own` nor `mixes`, the result has no figure of
            own tests, and newcomers are not tested.
        class_names: Names of the classes of `held_out`, if these are others than in training. The
            clients of a :class:`ClipSetting` then predict them with what they learned, as in
            base-to-new experiments. If None, the classes of the setting.
        clients: Ids of the clients to test. If None, all clients of the setting; if it names none,
            all clients of the federation.
        newcomers: Ids of clients that never trained, which are tested on their own tests alone. If
            None, all clients of the federation that are not in the setting.
        domains: Some of the clients by a name. The figures have the mean on their own tests under
            this name.
        shared: Whether all clients predict with one model, which is then tested once.
        steps: Number of batches on which each newcomer trains, for the figure `after`.
        learning_rate: Learning rate of these steps.
        group: Process group of :func:`fedprompt.run_rounds`. The ranks then divide the clients
            evenly, and all of them return the same figures. If more clients than that are at home
            on a rank, others test the rest, with their states. If None, this process tests all.

    Returns:
        Accuracies in [0, 1] by name, and those of each client (``.clients``). The mean over clients
        on all test inputs is `full`; `lowest` and `highest` belong to the worst and the best
        client. The mean on their own tests is `own`, and `worst` the lowest of these. `pooled` is
        `own` with each client weighted by its number of own test inputs, so it is the accuracy on
        all own test inputs together; with mixes, by its number of training inputs. On all test
        inputs, `balanced` is the balanced accuracy and `macro_f1` the macro F1. With newcomers,
        `received` is their mean, and `after` the mean after `steps` of training. In addition,
        `trained` is the number of parameters that the model of a client trains, and `participated`
        the number of tested clients that ever trained. An input whose predictions contain NaN
        counts as an error.

    Raises:
        ValueError: If another method made `now`, a client is not in the federation or has no own
            tests, a newcomer has trained, a domain has the name of a figure, or predictions do not
            have one column for each class. With `class_names`, if the method learned something for
            each class, its prediction reads training inputs, it was not made by a function with
            :func:`register`, or the setting has no class names.

    Example:
        >>> from fedprompt import methods, run_rounds, samples, vit_trunk
        >>> images, labels, test_images, test_labels = samples.digits()
        >>> shards = {client: torch.arange(30) + 30 * client for client in range(4)}
        >>> setting = methods.VitSetting(
        ...     trunk=vit_trunk(samples.vit("S")), clients=range(3), num_classes=10, rounds=4,
        ...     steps=4,
        ... )
        >>> federation = methods.Federation(images, labels, shards)
        >>> method = methods.fedvpt_d(setting, learning_rate=0.05)
        >>> *_, now = run_rounds(method, federation)
        >>> held_out = methods.HeldOut(test_images, test_labels, mixes="classes")
        >>> figures = methods.evaluate(method, federation, now, held_out)
        >>> print({name: figures[name] > 0.5 for name in ("full", "own", "worst", "received")})
        {'full': True, 'own': True, 'worst': True, 'received': True}
        >>> min(figures.clients[client]["own"] for client in range(3)) == figures["worst"]
        True
    """
    refuse_autocast("evaluate")
    nouns.method(method)
    check.instance("federation", federation, Federation, "be a Federation")
    check.instance("now", now, Round, "be a Round")
    now.check_made_by(method)
    now = Round(*now, now.stateful)  # from here on, it may predict other classes
    check.flag("shared", shared)
    check.count("steps", steps, at_least=0)
    check.number("learning_rate", learning_rate, above=0)
    check.instance("held_out", held_out, HeldOut, "be a HeldOut")
    rule = "have a setting: Method(..., setting=setting)"
    check.instance("method.setting", method.setting, Setting, rule)
    setting: Setting = method.setting.completed(federation.shards)
    method = method._replace(setting=setting)
    of_names = None
    if class_names is not None:
        if isinstance(held_out.mixes, str):
            raise check.wrong("held_out.mixes", "count other classes", repr(held_out.mixes))
        check.require(not steps, "steps", "be 0 with `class_names`, which no client has", steps)
        of_names = _of_classes(method, class_names)
    tested = _ids("clients", setting.clients if clients is None else clients, federation)
    others = [c for c in federation.shards if held_out.by_client and c not in setting.clients]
    new = _ids("newcomers", others if newcomers is None else newcomers, federation)
    check_new = partial(_check_new, new, now)  # a rank knows the clients that trained on it
    on_all_ranks(check_new, server_round=max(now.server_round, 0), group=group)
    for name, given in {"newcomers": new, "domains": domains}.items():
        if given and not held_out.by_client:
            raise check.wrong("held_out", f"have `own` or `mixes` for `{name}`", "neither")
    predicted = of_names[0].setting if of_names else setting
    if shared:
        _check_shared(method, tested)
    tests = _tests(predicted, federation, held_out, [*tested, *new])
    named = _checked_domains(domains or {}, tested)
    run = _Run(method, of_names, federation, now, tests, group)
    with kept_streams():
        found = run.figures(tested, named, shared)
        received = run.newcomers(new, steps, learning_rate)
    return Figures(found | received, found.clients | received.clients, found.predicted)


def _check_shared(method: Method, tested: Iterable[int]) -> None:
    """Refuse clients with payloads of unlike shapes, which predict with models of their own."""
    form: Any = method.form or (lambda client: {})
    messages = (form(client).items() for client in tested)
    shapes = [{name: getattr(e, "value", e).shape for name, e in each} for each in messages]
    same = all(each == shapes[0] for each in shapes)
    check.require(same, "shared", "be False for clients of unlike size", True)


class _NoInputs:
    """Data of a client that predicts classes of which it has no inputs."""

    def __init__(self, setting: Setting, client: int, server_round: int) -> None:
        self.setting, self.id, self.server_round = setting, client, server_round

    def __getattr__(self, name: str) -> Any:
        rule = "be None for a method whose prediction reads training inputs"
        raise check.wrong("class_names", rule, f"a prediction that reads `data.{name}`")


def _of_classes(method: Method, class_names: Any) -> tuple[Method, Method]:
    """Return a method that predicts other classes than it learned, and only a few of them.

    The second has two or three classes, as many as were not learned.
    """
    check.texts("class_names", class_names)
    learned: Any = method.predict
    setting: Any = method.setting
    rule, got = "be None for a setting without class names", check.kind(class_names)
    check.require(isinstance(setting, ClipSetting), "class_names", rule, got)
    rule = "be made by a function with `register` to predict other classes"
    check.require(isinstance(learned, Prediction), "method", rule, check.kind(learned))

    def renamed(names: Sequence[str], value: Any) -> Any:
        return value.renamed(names) if isinstance(value, ClipSetting) else value

    def of(names: Sequence[str]) -> Method:
        predict = learned.of(partial(renamed, names))
        return method._replace(predict=predict, setting=setting.renamed(names))

    return of(class_names), of([*islice(cycle(class_names), 2 + (setting.num_classes == 2))])


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
    """Test inputs with their cells, and the tests of each client.

    They are positions or a mix of cells; those of all clients together, None, are a mix.
    """

    setting: Setting
    inputs: Inputs
    labels: Tensor
    cells: Tensor
    own: Mapping[int, Tensor]
    mixes: Mapping[int | None, Tensor]

    @torch.no_grad()
    def predicted(self, model: nn.Module) -> Tensor:
        """Predict the class of each test input, without dropout and with stored statistics."""
        training = [module for module in model.modules() if module.training]  # frozen parts are not
        batches = torch.split(torch.arange(len(self.labels), device="cpu"), _BATCH_SIZE)
        try:
            for module in training:
                module.training = False
            return torch.cat([self._classes(model, positions) for positions in batches])
        finally:
            for module in training:
                module.training = True

    def _classes(self, model: nn.Module, positions: Tensor) -> Tensor:
        logits = model(self.inputs[positions].to(self.setting.device))
        check.instance("predictions", logits, Tensor, "be a tensor of logits")
        check.shape("predictions", logits, (len(positions), self.setting.num_classes))
        none = self.setting.num_classes  # NaN is no class
        return torch.where(logits.isnan().any(1), none, logits.argmax(1)).cpu()

    def accuracy(self, classes: Tensor, client: int | None) -> float:
        """Compute the accuracy on the tests of a client, or on all test inputs."""
        correct = (classes == self.labels).float()
        if client in self.own:
            return correct[self.own[client]].double().mean().item()
        mix = self.mixes[client]
        by_cell = fp.class_means(correct, self.cells, num_classes=len(mix)).value
        return fp.metrics.global_accuracy(by_cell[None], mix)

    def over_classes(self, classes: Tensor) -> dict[str, float]:
        """Compute means over classes."""
        number = self.setting.num_classes + 1  # the last has no samples
        table = fp.metrics.contingency_table(classes, self.labels, number, number)
        present = int((table.sum(0) + table.sum(1) > 0).sum())
        others = present - int(table[-1].any())  # NaN is an error, and not a class of the mean
        return {
            "balanced": fp.metrics.balanced_accuracy(table),
            "macro_f1": fp.metrics.macro_f1(table) * (present / others),
        }


@dataclass(frozen=True)
class _Run:
    """Predictions of clients after a round, of the learned classes, or of others."""

    method: Method
    others: tuple[Method, Method] | None
    federation: Federation
    now: Round
    tests: _Tests
    group: distributed.ProcessGroup | None

    def model(self, client: int) -> nn.Module:
        """Return the model with which a client predicts."""
        with torch.device(self.method.setting.device):
            if self.others is None:
                return self.now.model(self.method, self.federation, client)
            return self._of_others(client, *self.others)

    def _of_others(self, client: int, others: Method, few: Method) -> nn.Module:
        """Return the model of a client, if what it learned predicts any number of classes."""

        def model(method: Method) -> nn.Module:
            data = _NoInputs(method.setting, client, self.now.server_round)
            return self.now.model(method, data)

        model(self.method)  # which may read training inputs
        tests = replace(self.tests, setting=few.setting, labels=self.tests.labels[:1])
        try:
            tests.predicted(model(few))
        except (RuntimeError, ValueError) as error:
            rule = "be None for a method that learned something for each class"
            raise check.wrong("class_names", rule, f"{error}".partition("\n")[0]) from error
        return model(others)

    def figures(
        self, clients: Sequence[int], domains: Mapping[str, Sequence[int]], shared: bool
    ) -> Figures:
        """Measure clients that are in the setting."""
        if not clients:
            return Figures({}, {})
        predictions: list[tuple[Tensor, int]] = []

        def measured(here: _Run, client: int) -> dict[str, Any]:
            if not (shared and predictions):
                model = here.model(client)
                trained = sum(weights.numel() for weights in _trained(model))
                predictions[:] = [(self.tests.predicted(model), trained)]
            classes, trained = predictions[0]
            found: dict[str, Any] = {"full": self.tests.accuracy(classes, None)}
            found |= {"trained": trained, "predicted": classes}
            found |= {"participated": int(str(client) in here.now.clients)}
            return found | self.own(client, classes) | self.tests.over_classes(classes)

        found = self.of_each(clients, measured)
        predicted = {client: found[client].pop("predicted") for client in clients}
        full = [found[client]["full"] for client in clients]
        figures = {"full": sum(full) / len(full), "lowest": min(full), "highest": max(full)}
        if "own" in found[clients[0]]:
            figures |= _own_figures([found[client] for client in clients])
        models = [found[client] for client in clients][: 1 if shared else None]
        for name in ("balanced", "macro_f1"):
            figures[name] = sum(model[name] for model in models) / len(models)
        for name, ids in domains.items():
            figures[name] = float(np.mean([found[client]["own"] for client in ids]))
        figures["trained"] = next(filter(None, (model["trained"] for model in models)), 0)
        figures["participated"] = sum(each["participated"] for each in found.values())
        return Figures(figures, found, predicted)

    def own(self, client: int, classes: Tensor) -> dict[str, float]:
        """Measure a client on its own tests, if it has any, and count them."""
        tests = self.tests
        if not (client in tests.own or client in tests.mixes):
            return {}
        size = len(tests.own.get(client, self.federation.shards[client]))
        return {"own": tests.accuracy(classes, client), "size": size}

    def newcomers(self, clients: Sequence[int], steps: int, learning_rate: float) -> Figures:
        """Measure newcomers on their own tests, before and after training."""

        def measured(here: _Run, client: int) -> dict[str, float]:
            model = here.model(client)
            found = {"received": self.tests.accuracy(self.tests.predicted(model), client)}
            if steps:
                self.train(model, client, steps, learning_rate)
                found["after"] = self.tests.accuracy(self.tests.predicted(model), client)
            return found

        found = self.of_each(clients, measured)
        names = found[clients[0]] if clients else ()
        total = {name: sum(figures[name] for figures in found.values()) for name in names}
        return Figures({name: total[name] / len(clients) for name in names}, found)

    def of_each(
        self, clients: Sequence[int], measured: Callable[[_Run, int], dict[str, Any]]
    ) -> dict[int, dict[str, Any]]:
        """Divide clients evenly over the ranks, and return the figures of all of them, in order."""
        rank, world = rank_of(self.group)
        hosts = ranks_of(clients, world, share=True)
        now = moved(self.now, ranks_of(clients, world), hosts, self.group)
        run, seed = replace(self, now=now), self.method.setting.seed

        def here() -> dict[str, dict[str, Any]]:
            found = {}
            for client in (c for c in clients if hosts[c] == rank):
                begin_streams(seed, now.server_round, 0, client, "evaluate")
                with noted(f"client {client}, round {now.server_round}"), _casts.ended():
                    found[str(client)] = measured(run, client)
            return found

        trees = on_all_ranks(here, server_round=self.now.server_round, group=self.group)
        found = {int(client): figures for tree in trees for client, figures in tree.items()}
        return {client: found[client] for client in clients}

    def train(self, model: nn.Module, client: int, steps: int, learning_rate: float) -> None:
        """Train a model on batches of a newcomer; without parameters it stays as it is."""
        if not (parameters := _trained(model)):
            return
        setting = self.method.setting
        optimizer = setting.make_optimizer(parameters, lr=learning_rate)  # without a schedule
        data = self.federation.data(replace(setting, steps=steps), client, 0)
        for inputs, labels in data.batches(purpose="newcomer"):
            take_step(optimizer, F.cross_entropy(model(inputs), labels))


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _own_figures(clients: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Summarize the accuracies of clients on their own tests."""
    own, sizes = ([figures[name] for figures in clients] for name in ("own", "size"))
    matrix = torch.tensor([own], dtype=torch.float64)
    pooled = fp.metrics.pooled_local_accuracy(matrix, torch.tensor(sizes))
    return {"own": sum(own) / len(own), "worst": min(own), "pooled": pooled}


def _doubled(ids: Sequence[int]) -> list[int]:
    return sorted({client for client in ids if ids.count(client) > 1})


def _ids(argument: str, clients: Iterable[int], federation: Federation) -> list[int]:
    check.iterable(argument, clients, "ids of clients")
    ids = list(clients)
    for position, client in enumerate(ids):
        check.count(f"{argument}[{position}]", client, at_least=0)
        check.require(client in federation.shards, argument, "have clients of `federation`", client)
    if twice := _doubled(ids):
        raise check.wrong(argument, "have a client at most once", twice)
    return ids


def _checked_domains(
    domains: Mapping[str, Iterable[int]], clients: Sequence[int]
) -> dict[str, list[int]]:
    check.instance("domains", domains, Mapping, "map names to ids of clients")
    found = {}
    for name, ids in domains.items():
        check.text("key of domains", name)
        if name in _FIGURES:
            raise check.wrong("domains", "have other names than the figures have", repr(name))
        check.iterable(f"domains[{name!r}]", ids, "ids of clients")
        found[name] = list(ids)
        if not found[name] or set(found[name]) - set(clients) or _doubled(found[name]):
            rule = "have some of the clients that are tested, each once"
            raise check.wrong(f"domains[{name!r}]", rule, found[name])
    return found


def _tests(
    setting: Setting, federation: Federation, held_out: HeldOut, clients: Sequence[int]
) -> _Tests:
    """Compare test inputs with the classes and the clients of a federation."""
    labels, mixes = held_out.labels.cpu(), held_out.mixes
    check.labels("held_out.labels", labels, setting.num_classes)
    if mixes == "classes":
        mixes = {c: federation.data(setting, c, 0).class_counts for c in clients}
    tests = mixes if held_out.own is None else held_out.own
    missing = [client for client in clients if tests is not None and client not in tests]
    rule = "have tests of all clients that are tested"
    check.require(not missing, "held_out", rule, f"none of {missing}")
    mixes = {} if mixes is None else mixes
    num_cells = len(next(iter(mixes.values()), torch.empty(setting.num_classes)))
    cells = labels if held_out.cells is None else held_out.cells.cpu()
    seen: dict[int | None, Tensor] = {None: torch.bincount(cells, minlength=num_cells)}
    seen |= {client: mix.cpu() * (seen[None] > 0) for client, mix in mixes.items()}
    for client in clients:
        if client in seen and not seen[client].any():
            rule = "have a class, or a cell, of each client that is tested"
            raise check.wrong("held_out.labels", rule, f"none of client {client}")
    own = {client: places.cpu() for client, places in (held_out.own or {}).items()}
    return _Tests(setting, held_out.inputs, labels, cells, own, seen)
