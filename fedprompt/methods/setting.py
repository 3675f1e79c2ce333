"""Settings and federations: what every method of the gallery shares, and the data of each client.

A :class:`Setting` has the models, the classes and the budget, and no client's inputs. A
:class:`Federation` has the inputs of some clients, and nothing else. A method has the setting that
it was made from, so a run has one setting::

    method = methods.fedprox(setting)
    for now in fp.run_rounds(method, federation):
        model = now.model(method, federation, client=3)
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import islice
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import numpy as np
import torch
import torch.nn as nn
from jaxtyping import Float, Int
from torch import Tensor

import fedprompt as fp
import fedprompt._refusals as check
from fedprompt import _casts
from fedprompt._trees import digest
from fedprompt.backbones.attributes import find_module, tensors

__all__ = [
    "Batch",
    "ClientData",
    "Federation",
    "Inputs",
    "Setting",
    "check_inputs",
    "owned",
    "plain_texts",
]

_Module = TypeVar("_Module", bound=nn.Module)
_Given = TypeVar("_Given", bound="Setting")

Batch = tuple[Tensor, Tensor]
"""Inputs and labels."""


@runtime_checkable
class Inputs(Protocol):
    """Inputs by position: a tensor, or an object that reads them when they are needed."""

    def __len__(self) -> int:
        """Return the number of inputs."""

    def __getitem__(self, positions: Int[Tensor, chosen], /) -> Tensor:
        """Return the inputs at these positions, stacked."""


@dataclass(kw_only=True)
class Setting:
    """Clients, classes, the budget of a run, and the seed. It has no client's inputs.

    Attributes:
        rounds: Number of rounds.
        num_classes: Number of classes.
        clients: Ids of the clients that take part. The others never train. If empty, all clients
            of a federation take part, in one process. On ranks and nodes, and for methods that
            count their clients, name them.
        steps: Number of batches of a client in a round, each drawn from all its inputs. If None, a
            client trains for `epochs`, so clients with more inputs take more steps.
        epochs: Number of epochs of a client in a round, at least 1, in place of `steps`. In an
            epoch, each input is in one batch. If both are None, one epoch.
        drop_last: Whether an epoch has full batches only. A client with fewer inputs than a batch
            keeps its only one.
        cohort_size: Number of clients in a round. If None, all clients.
        batch_size: Number of inputs in a batch.
        seed: Seed of initial values, cohorts and batches, common to all methods.
        public: Inputs without labels that the server and all clients have. If None, none.
        augment: Random augmentation of a batch, or None.
        make_optimizer: Constructor of the optimizer of clients.
        schedule: Function from the share of rounds that are over, in [0, 1), to a factor of the
            learning rate of clients. Rounds after the last one keep its factor, with a warning. If
            None, the learning rate is constant.
        autocast: Dtype in which clients compute on a batch, torch.bfloat16 or None, for float32.
            Parameters, messages, optimizers, the server and predictions stay in float32.
        device: Device of models and batches. Stored inputs may stay on the CPU. Methods make
            further tensors on torch's default device, so run them under
            ``with torch.device(setting.device)``.

    Example:
        >>> setting = Setting(num_classes=3, rounds=2, clients=range(10), cohort_size=3)
        >>> [len(cohort) for cohort in setting.cohorts()]
        [3, 3]
    """

    rounds: int
    num_classes: int = 0
    clients: Sequence[int] = ()
    steps: int | None = None
    epochs: int | None = None
    drop_last: bool = False
    cohort_size: int | None = None
    batch_size: int = 32
    seed: int = 0
    public: Tensor = None  # type: ignore[assignment]
    augment: Callable[[Tensor, torch.Generator], Tensor] | None = None
    make_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    schedule: Callable[[float], float] | None = None
    autocast: torch.dtype | None = None
    device: torch.device | str = "cpu"
    _warned: list[int] = field(default_factory=list, init=False, repr=False, compare=False)
    _models: dict[int, tuple[nn.Module, dict[str, Tensor]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        for name, least in {"rounds": 0, "batch_size": 1, "seed": 0}.items():
            check.count(name, getattr(self, name), at_least=least)
        check.optional(check.count, "steps", self.steps, at_least=0)
        check.optional(check.count, "epochs", self.epochs)
        check.flag("drop_last", self.drop_last)
        if self.steps is not None and (self.epochs is not None or self.drop_last):
            given = "epochs" if self.epochs is not None else "drop_last"
            raise check.wrong("steps", f"be None with `{given}`", self.steps)
        self._check_classes()
        if cast(Any, self.public) is None:
            self.public = torch.empty(0)
        check.iterable("clients", self.clients, "ids, such as range(100)")
        if not isinstance(cast(Any, self.clients), Sequence):
            self.clients = [*self.clients]
        if len({*self.clients}) < len(self.clients):
            raise check.wrong("clients", "have each id once", check.kind(self.clients))
        check.optional(check.function, "schedule", self.schedule)
        check.function("make_optimizer", self.make_optimizer, "make an optimizer")
        rule = "be torch.bfloat16 or None, because float16 needs scaled losses"
        check.require(self.autocast in (None, torch.bfloat16), "autocast", rule, self.autocast)
        try:
            torch.device(self.device)
        except (RuntimeError, TypeError) as error:
            raise check.wrong("device", "name a device of PyTorch", repr(self.device)) from error

    def _check_classes(self) -> None:
        check.count("num_classes", self.num_classes)

    def completed(self: _Given, clients: Iterable[int]) -> _Given:
        """Return a setting of these clients of a federation, or this one if it names its own."""
        return self if self.clients else replace(self, clients=sorted(clients))

    @property
    def frozen_networks(self) -> Sequence[Any]:
        """Frozen networks, which are not in the state of a round."""
        return ()

    @property
    def _fingerprint(self) -> str:
        """Digest of the frozen networks, computed again if a tensor of them has changed."""
        models = map(find_module, self.frozen_networks)
        weights = [each for model in models for each in tensors(model).values()]
        frozen = [weight for weight in weights if not weight.requires_grad]
        now = [(id(each), 0 if each.is_inference() else each._version) for each in frozen]
        if vars(self).get("_versions") != now:
            self._versions = now
            self._told = digest([fp.fingerprint(each) for each in self.frozen_networks])[:16]
        return self._told

    def described(self) -> dict[str, str]:
        """Describe plain values and frozen networks; rounds, clients and device may change."""
        names = {each.name for each in fields(self) if each.init} - {"rounds", "clients", "device"}
        values = plain_texts({name: getattr(self, name) for name in sorted(names)})
        return {f"setting.{name}": text for name, text in values.items()} | {
            "frozen network": self._fingerprint
        }

    @property
    def named_clients(self) -> Sequence[int]:
        """Ids of the clients, for methods that need them when they are made."""
        check.some("setting.clients", self.clients, "name the clients, such as range(100)")
        return self.clients

    def cohort(self, server_round: int) -> list[int]:
        """Draw the clients of a round."""
        clients = self.named_clients
        draw = fp.stream_generator(self.seed, server_round=server_round, purpose="cohort")
        size = len(clients) if self.cohort_size is None else self.cohort_size
        return fp.sample_clients(clients, size=size, generator=draw)

    def cohorts(self) -> list[list[int]]:
        """Draw the clients of all rounds."""
        return [self.cohort(server_round) for server_round in range(self.rounds)]

    def generator(
        self, server_round: int, client: int | None = None, *, purpose: str
    ) -> torch.Generator:
        """Make the random generator of a client, or of the server, for one purpose in one round.

        It is on the device of the setting. Batches are drawn on the CPU, the same on every device.
        """
        draw = self.stream(server_round, client, purpose=purpose)
        if torch.device(self.device).type == "cpu":
            return draw
        seed = int(torch.randint(2**62, (), generator=draw, device="cpu"))
        return torch.Generator(self.device).manual_seed(seed)

    def stream(
        self, server_round: int, client: int | None = None, *, purpose: str
    ) -> torch.Generator:
        """Make such a generator on the CPU, for batches, initial values and privacy noise."""
        return fp.stream_generator(
            self.seed, server_round=server_round, client=client, purpose=purpose
        )

    def optimizer(
        self,
        parameters: nn.Module | Sequence[nn.Parameter],
        learning_rate: float,
        server_round: int = 0,
    ) -> torch.optim.Optimizer:
        """Make the optimizer of a client for the parameters, or for a module."""
        if isinstance(parameters, nn.Module):
            parameters = [weight for weight in parameters.parameters() if weight.requires_grad]
        return self.make_optimizer(parameters, lr=self.learning_rate(learning_rate, server_round))

    def learning_rate(self, rate: float, server_round: int = 0) -> float:
        """Multiply a learning rate of clients by the factor of the schedule in a round."""
        if self.schedule is None:
            return rate
        if server_round >= self.rounds and not self._warned:
            self._warned.append(server_round)
            text = f"Round {server_round} is after the {self.rounds} rounds of the setting, so its"
            warnings.warn(f"{text} schedule stays at its last value.", stacklevel=2)
        last = max(self.rounds - 1, 0)
        return rate * self.schedule(min(server_round, last) / max(self.rounds, 1))

    def seeded(self, make: Callable[..., _Module], *arguments: Any) -> _Module:
        """Make a module whose initial values are drawn from the seed, not from the global stream.

        They are drawn on the CPU, and moved to the device of the setting.

        Args:
            make: Class of the module, or another function that makes it.
            arguments: Its arguments.
        """
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(self.seed)
            return make(*arguments).to(self.device)

    def unknown_rows(self, width: int) -> fp.Weighted:
        """Make an entry of one row for each class, of which nothing is known."""
        return fp.Weighted(torch.zeros(self.num_classes, width), torch.zeros(self.num_classes))

    @property
    def num_backbones(self) -> int:
        """Number of backbones, which clients have in turn."""
        return 1

    def backbone_of(self, client: int) -> int:
        """Return the number of the backbone of a client, by its place in `clients`.

        A client that `clients` does not name has its id as place.
        """
        if self.num_backbones == 1:
            return 0
        place = self.clients.index(client) if client in self.clients else client
        return place % self.num_backbones

    def shared_head(self, data: ClientData, head: Any, state: fp.interfaces.State) -> Any:
        """Predict with the model that a client keeps in its state, and with this head."""
        model = self.model(data.id, state)
        fp.load_values(model.head, head)
        return model

    def private_model(self, data: ClientData, answer: Any, state: fp.interfaces.State) -> Any:
        """Predict with the model that a client keeps in its state, or with a new one."""
        return self.model(data.id, state)

    def new_model(self, client: int = 0) -> Any:
        """Make the model of a client, the same for every client with the same backbone."""
        raise NotImplementedError(f"{type(self).__name__} does not say which model a client has.")

    def model(self, client: int, values: fp.interfaces.Message) -> Any:
        """Load values into the model of a client.

        There is one module for each backbone, so the next call changes the module of this one. If
        you need two models at a time, make another one by :meth:`new_model`.

        Args:
            client: Id of the client.
            values: Values by parameter name, and by buffer name. All others get their initial
                values.
        """
        kind = self.backbone_of(client)
        if kind not in self._models:
            model = self.new_model(client)
            self._models[kind] = model, fp.snapshot(model, buffers=True)
        model, initial = self._models[kind]
        fp.load_values(model, {**initial, **values})
        return model


@dataclass(frozen=True)
class ClientData:
    """Training data of one client, in one round.

    Attributes:
        setting: Setting of the run.
        id: Id of the client.
        server_round: Round (0-based).
        labels: Classes of the client's inputs.
        inputs_at: Function from positions among these inputs to inputs.

    Example:
        >>> setting = Setting(num_classes=2, rounds=1, steps=3, batch_size=4)
        >>> labels = torch.tensor([0, 1, 1, 1, 1])
        >>> data = ClientData(setting, 0, 0, labels, lambda chosen: torch.eye(5)[chosen])
        >>> data.num_examples, data.class_counts
        (5, tensor([1., 4.]))
        >>> [len(labels) for inputs, labels in data.batches()]
        [4, 4, 4]
    """

    setting: Setting
    id: int
    server_round: int
    labels: Int[Tensor, shard]
    inputs_at: Callable[[Int[Tensor, chosen]], Tensor]

    @property
    def epochs(self) -> int:
        """Number of epochs in a round, if the setting has no number of steps."""
        return 1 if self.setting.epochs is None else self.setting.epochs

    @property
    def steps(self) -> int:
        """Number of batches in a round, or in each of its phases if the setting has epochs."""
        if self.setting.steps is None:
            return self.epochs * self._batches_of(self.num_examples)
        return self.setting.steps

    def _batches_of(self, size: int) -> int:
        """Count the batches of an epoch of `size` inputs."""
        full, rest = divmod(size, self.setting.batch_size)
        return full if self.setting.drop_last and full else full + bool(rest)

    @property
    def num_examples(self) -> int:
        """Number of inputs."""
        return len(self.labels)

    @property
    def class_counts(self) -> Float[Tensor, classes]:
        """Number of inputs of each class."""
        counts = torch.bincount(self.labels, minlength=self.setting.num_classes)
        return counts.to(torch.get_default_dtype())

    def batches(
        self, *, among: Int[Tensor, chosen] | None = None, purpose: str = "batches"
    ) -> Iterator[Batch]:
        """Yield the training batches of this round, `steps` in all.

        If the setting has a number of steps, each batch is drawn from all inputs. Otherwise each
        input is in one batch of an epoch. A second call yields the same batches. In the body of the
        loop, PyTorch computes in `autocast` of the setting.

        Args:
            among: Positions of the inputs to draw from. If None, all inputs.
            purpose: Name of the random stream. Another name yields other batches.
        """
        return self._drawn(self.epochs, among, purpose)

    def phases(self, count: int) -> Iterator[Iterator[Batch]]:
        """Yield the batches of each phase of this round, to be read one phase after the other.

        Each phase has the epochs of the setting. A number of steps is divided equally, and the last
        phase has what is left over.
        """
        batches = self._drawn(count * self.epochs)
        divided = self.steps if self.setting.steps is None else self.steps // count
        for phase in range(1, count + 1):
            yield islice(batches, divided if phase < count else None)

    def _drawn(
        self, epochs: int, among: Int[Tensor, chosen] | None = None, purpose: str = "batches"
    ) -> Iterator[Batch]:
        rng = self.stream(purpose)
        chosen = torch.arange(self.num_examples, device="cpu") if among is None else among
        positions, steps = chosen.cpu().long(), self.setting.steps
        kept = self._batches_of(len(positions)) if steps is None else 1
        for _ in range(epochs if steps is None else steps):
            order = positions[torch.randperm(len(positions), generator=rng, device="cpu")]
            for part in torch.split(order, self.setting.batch_size)[:kept]:
                batch = self.batch(part, rng)
                with self.autocast():
                    yield batch

    def batch(self, chosen: Int[Tensor, chosen], rng: torch.Generator) -> Batch:
        """Return chosen inputs, augmented, and their labels, on the device of the setting."""
        inputs = self.inputs_at(chosen)
        if self.setting.augment is not None:
            inputs = self.setting.augment(inputs, rng)
        return inputs.to(self.setting.device), self.labels[chosen.to(self.labels.device)]

    def own(self) -> Batch:
        """Return all inputs and their labels, without augmentation."""
        inputs = self.inputs_at(torch.arange(self.num_examples, device="cpu"))
        return inputs.to(self.setting.device), self.labels

    def autocast(self) -> AbstractContextManager[None]:
        """Compute in the dtype of the setting, for steps without `batches`.

        Weights are cast at each use, because PyTorch's cache would keep those before a step.
        """
        dtype, device = self.setting.autocast, torch.device(self.setting.device).type
        return nullcontext() if dtype is None else _casts.entered(device, dtype)

    def learning_rate(self, rate: float) -> float:
        """Multiply a learning rate by the factor of the schedule in this round."""
        return self.setting.learning_rate(rate, self.server_round)

    def parts(self, size: int = 128) -> Iterator[Batch]:
        """Yield all inputs and their labels in parts of about equal size, without augmentation.

        A pass over parts needs the memory of one part, so a client may have any number of inputs.

        Args:
            size: Number of inputs in a part. A part may have more, but less than twice as many.
                Fewer than `size` inputs are one part.
        """
        count = max(1, self.num_examples // size)
        for chosen in torch.arange(self.num_examples, device="cpu").tensor_split(count):
            inputs = self.inputs_at(chosen).to(self.setting.device)
            yield inputs, self.labels[chosen.to(self.labels.device)]

    def optimizer(
        self, parameters: nn.Module | Sequence[nn.Parameter], learning_rate: float
    ) -> torch.optim.Optimizer:
        """Make the optimizer of this round for the parameters, or for a module."""
        return self.setting.optimizer(parameters, learning_rate, self.server_round)

    def generator(self, purpose: str) -> torch.Generator:
        """Make the random generator of this client for one purpose in this round."""
        return self.setting.generator(self.server_round, self.id, purpose=purpose)

    def stream(self, purpose: str) -> torch.Generator:
        """Make the random generator of this client on the CPU, from which batches are drawn."""
        return self.setting.stream(self.server_round, self.id, purpose=purpose)

    def at(self, server_round: int) -> ClientData:
        """Return the data of this client in another round, with the batches of that round."""
        return replace(self, server_round=server_round)


@dataclass(frozen=True)
class Federation:
    """Training inputs of clients. A node of one client has a federation of its inputs alone.

    Clients, class names and the budget belong to the :class:`Setting` of a method.

    Args:
        inputs: Training images of these clients, or the tokens of a frozen network for them: a
            tensor, or another object whose ``inputs[positions]`` is a batch.
        labels: Their classes.
        shards: Positions of the inputs of each client, by client id; tensors or NumPy arrays, as of
            :func:`fedprompt.data.dirichlet`.

    Raises:
        ValueError: If labels or positions are out of range, or a client has no input.

    Example:
        >>> from fedprompt import samples
        >>> from fedprompt.data import dirichlet
        >>> images, labels, *_ = samples.digits()
        >>> shards = dirichlet(labels, 4, alpha=0.5, generator=torch.Generator().manual_seed(0))
        >>> federation = Federation(images, labels, dict(enumerate(shards)))
        >>> setting = Setting(num_classes=10, rounds=5)
        >>> federation.data(setting, 3, server_round=0).num_examples == len(shards[3])
        True
    """

    inputs: Inputs
    labels: Int[Tensor, inputs]
    shards: Mapping[int, Int[Tensor, _] | Int[np.ndarray, _]]

    def __post_init__(self) -> None:
        check_inputs("inputs", self.inputs)
        size = len(self.inputs)
        check.instance("shards", self.shards, Mapping, "map ids of clients to positions")
        shards = {c: owned("shards", c, shard, size) for c, shard in self.shards.items()}
        object.__setattr__(self, "shards", shards)
        check.labels("labels", self.labels, sys.maxsize, size=size, of="inputs")

    @cached_property
    def _digests(self) -> dict[int, str]:
        return {}

    def images_of(self, client: int) -> str:
        """Return a digest of the labels and, of a tensor, of the first and the last input."""
        if client not in self._digests:
            shard = self.shards[client]
            seen = [self.labels[shard].to(torch.int64)]
            if isinstance(self.inputs, Tensor):
                seen.append(self.inputs[shard[[0, -1]]])
            self._digests[client] = digest(seen, "inputs")[:16]
        return self._digests[client]

    @cached_property
    def _num_classes(self) -> int:
        return int(self.labels.max()) + 1 if len(self.labels) else 0

    def data(self, setting: Setting, client: int, server_round: int) -> ClientData:
        """Return the data of a client in a round of a method with this setting."""
        check.instance("setting", setting, Setting, "be a Setting, such as VitSetting")
        known, classes = setting.num_classes, self._num_classes
        rule = f"be at least {classes}, because of the labels of the federation"
        check.require(known >= classes, "setting.num_classes", rule, known)
        shard = self.shards[client]
        return ClientData(
            setting,
            client,
            server_round,
            self.labels[shard].to(setting.device, torch.int64),
            lambda chosen: self.inputs[shard[chosen]],
        )


def plain_texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Write numbers, strings, dtypes, None, sequences and dicts of them; leave out other values."""
    texts = {name: _text(value) for name, value in values.items()}
    return {name: text for name, text in texts.items() if text is not None}


def _text(value: Any) -> str | None:
    if isinstance(value, Mapping):
        texts = plain_texts({str(key): each for key, each in value.items()})
        pairs = ", ".join(f"{key}: {texts[key]}" for key in sorted(texts))
        return f"{{{pairs}}}" if len(texts) == len(value) else None
    if isinstance(value, tuple | list | range):
        parts = [_text(part) for part in value]
        return None if None in parts else f"[{', '.join(map(str, parts))}]"
    value = value.item() if isinstance(value, np.generic) else value
    if type(value) is float:
        return f"{value:.6g}"  # the last bits depend on the machine
    known = value is None or isinstance(value, bool | int | str | torch.dtype)
    return repr(value) if known else None


def check_inputs(argument: str, inputs: object) -> None:
    """Require a tensor, or another object that returns batches by positions."""
    fits = isinstance(inputs, Inputs) and not isinstance(inputs, Sequence)
    check.typed(fits, argument, "be a tensor, or return batches by positions", inputs)


def owned(argument: str, client: int, shard: Tensor | np.ndarray, size: int) -> Int[Tensor, shard]:
    """Require at least one position of a client among `size` inputs, and copy them."""
    check.count(f"key of {argument}", client, at_least=0)
    shard = torch.as_tensor(shard)
    check.labels(f"{argument}[{client}]", shard, size)
    check.some(f"{argument}[{client}]", len(shard), "have at least one position")
    return shard.to(torch.int64, copy=True)  # as uint8 it would be a mask
