"""Settings and federations: what every method of the gallery shares, and the data of each client.

A :class:`Setting` has the models, the classes and the budget, and no client's inputs. A
:class:`Federation` has the inputs of some clients, and makes the :class:`ClientData` of each::

    method = methods.fedprox(setting)
    for now in fp.run_rounds(method, federation.data, setting.cohorts()):
        model = now.model(method, federation.data(3, now.server_round))
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

import fedprompt as fp
import fedprompt._refusals as check
from fedprompt.interfaces import PromptInjector, TrainableTrunk, Trunk
from fedprompt.rounds import load_optimizer, optimizer_state

__all__ = [
    "Batch",
    "ClientData",
    "ClipModel",
    "ClipSetting",
    "Federation",
    "Inputs",
    "LayeredClip",
    "NearestPrototype",
    "PromptedClassifier",
    "PromptedModel",
    "Setting",
    "Tune",
    "VitSetting",
    "adam_steps",
    "attention",
    "attentive_server",
    "averaged",
    "broadcast",
    "check_at_least_zero",
    "check_inputs",
    "check_logits",
    "check_sequences",
    "fedavg_client",
    "known_rows",
    "owned",
    "prototypes",
    "replace_contexts",
    "take_step",
    "tuned_trunk",
]

_Module = TypeVar("_Module", bound=nn.Module)

Batch = tuple[Tensor, Tensor]
"""Inputs and labels."""

Tune = Callable[[nn.Module], tuple[nn.Module, list[nn.Parameter]]]
"""Function from a model to a copy and its trained parameters."""


@runtime_checkable
class Inputs(Protocol):
    """Inputs by position: a tensor, or an object that reads them when they are needed."""

    def __len__(self) -> int:
        """Return the number of inputs."""

    def __getitem__(self, positions: Int[Tensor, "chosen"], /) -> Tensor:
        """Return the inputs at these positions, stacked."""


@dataclass(kw_only=True)
class Setting:
    """Clients, classes, the budget of a run, and the seed. It has no client's inputs.

    Attributes:
        clients: Ids of the clients that take part. The others never train.
        num_classes: Number of classes.
        rounds: Number of rounds.
        steps: Number of batches of a client in a round.
        cohort_size: Number of clients in a round.
        batch_size: Number of inputs in a batch.
        seed: Seed of initial values, cohorts and batches, common to all methods.
        public: Inputs without labels that the server and all clients have.
        augment: Random augmentation of a batch, or None.
        make_optimizer: Constructor of the optimizer of clients.
        schedule: Function from the share of rounds that are over, in [0, 1), to a factor of the
            learning rate of clients. If None, the learning rate is constant.
        autocast: Dtype in which clients compute on a batch, torch.bfloat16 or None, for float32.
            Parameters, messages, optimizers, the server and predictions stay in float32.
        device: Device of models and batches. Stored inputs may stay on the CPU. Methods make
            further tensors on torch's default device, so run them under
            ``with torch.device(setting.device)``.

    Example:
        >>> setting = Setting(
        ...     clients=range(10), num_classes=3, rounds=2, steps=4, cohort_size=3,
        ...     batch_size=16, seed=0, public=torch.empty(0),
        ... )
        >>> [len(cohort) for cohort in setting.cohorts()]
        [3, 3]
    """

    clients: Sequence[int]
    num_classes: int
    rounds: int
    steps: int
    cohort_size: int
    batch_size: int
    seed: int
    public: Tensor
    augment: Callable[[Tensor, torch.Generator], Tensor] | None = None
    make_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    schedule: Callable[[float], float] | None = None
    autocast: torch.dtype | None = None
    device: torch.device | str = "cpu"
    _models: dict[int, tuple[nn.Module, dict[str, Tensor]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        for name, least in {"num_classes": 1, "rounds": 0, "steps": 0, "batch_size": 1}.items():
            check.count(name, getattr(self, name), at_least=least)
        check.count("seed", self.seed, at_least=0)
        check.sequence("clients", self.clients, "ids, such as range(100)")
        check.optional(check.function, "schedule", self.schedule)
        check.function("make_optimizer", self.make_optimizer, "make an optimizer")
        if self.autocast not in (None, torch.bfloat16):
            rule = "be torch.bfloat16 or None, because float16 needs scaled losses"
            raise check.wrong("autocast", rule, self.autocast)
        try:
            torch.device(self.device)
        except (RuntimeError, TypeError) as error:
            raise check.wrong("device", "name a device of PyTorch", repr(self.device)) from error

    def cohort(self, server_round: int) -> list[int]:
        """Draw the clients of a round."""
        draw = fp.stream_generator(self.seed, server_round=server_round, purpose="cohort")
        return fp.sample_clients(self.clients, size=self.cohort_size, generator=draw)

    def cohorts(self) -> Iterator[list[int]]:
        """Draw the clients of all rounds, one round after the other."""
        return map(self.cohort, range(self.rounds))

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
        return rate if self.schedule is None else rate * self.schedule(server_round / self.rounds)

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

    def shared_head(self, data: "ClientData", head: Any, state: fp.interfaces.State) -> Any:
        """Predict with the model that a client keeps in its state, and with this head."""
        model = self.model(data.id, state)
        fp.load_values(model.head, head)
        return model

    def private_model(self, data: "ClientData", answer: Any, state: fp.interfaces.State) -> Any:
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
        kind = client % self.num_backbones
        if kind not in self._models:
            model = self.new_model(client)
            self._models[kind] = model, fp.snapshot(model, buffers=True)
        model, initial = self._models[kind]
        fp.load_values(model, {**initial, **values})
        return model


class _Casts(threading.local):
    """Autocast of a thread. Iterators of batches may take turns, so the last one ends it."""

    depth = 0
    context: torch.autocast

    def enter(self, device: str, dtype: torch.dtype) -> None:
        if not self.depth:
            self.context = torch.autocast(device, dtype, cache_enabled=False)
            self.context.__enter__()  # type: ignore[no-untyped-call]
        self.depth += 1

    def leave(self) -> None:
        self.depth -= 1
        if not self.depth:
            self.context.__exit__(None, None, None)


_CASTS = _Casts()


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
        >>> setting = Setting(
        ...     clients=[0], num_classes=2, rounds=1, steps=3, cohort_size=1, batch_size=4, seed=0,
        ...     public=torch.empty(0),
        ... )
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
    labels: Int[Tensor, "shard"]
    inputs_at: Callable[[Int[Tensor, "chosen"]], Tensor]

    @property
    def steps(self) -> int:
        """Number of batches in a round."""
        return self.setting.steps

    @property
    def num_examples(self) -> int:
        """Number of inputs."""
        return len(self.labels)

    @property
    def class_counts(self) -> Float[Tensor, "classes"]:
        """Number of inputs of each class."""
        return torch.bincount(self.labels, minlength=self.setting.num_classes).float()

    def batches(
        self, *, among: Int[Tensor, "chosen"] | None = None, purpose: str = "batches"
    ) -> Iterator[Batch]:
        """Yield the training batches of this round, `steps` in all.

        A second call yields the same batches. In the body of the loop, PyTorch computes in
        `autocast` of the setting.

        Args:
            among: Positions of the inputs to draw from. If None, all inputs.
            purpose: Name of the random stream. Another name yields other batches.
        """
        rng = self.stream(purpose)
        chosen = torch.arange(self.num_examples, device="cpu") if among is None else among
        positions = chosen.cpu().long()
        for _ in range(self.setting.steps):
            order = torch.randperm(len(positions), generator=rng, device="cpu")
            batch = self.batch(positions[order[: self.setting.batch_size]], rng)
            with self.autocast():
                yield batch

    def phases(self, count: int) -> Iterator[Iterator[Batch]]:
        """Divide the batches of this round into equal phases; the last has what is left over."""
        batches = self.batches()
        for phase in range(1, count + 1):
            yield islice(batches, self.steps // count if phase < count else None)

    def batch(self, chosen: Int[Tensor, "chosen"], rng: torch.Generator) -> Batch:
        """Return chosen inputs, augmented, and their labels, on the device of the setting."""
        inputs = self.inputs_at(chosen)
        if self.setting.augment is not None:
            inputs = self.setting.augment(inputs, rng)
        return inputs.to(self.setting.device), self.labels[chosen.to(self.labels.device)]

    def own(self) -> Batch:
        """Return all inputs and their labels, without augmentation."""
        inputs = self.inputs_at(torch.arange(self.num_examples, device="cpu"))
        return inputs.to(self.setting.device), self.labels

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Compute in the dtype of the setting, for steps without `batches`.

        Weights are cast at each use, because PyTorch's cache would keep those before a step.
        """
        dtype, device = self.setting.autocast, torch.device(self.setting.device).type
        if dtype is None:
            yield
            return
        _CASTS.enter(device, dtype)
        try:
            yield
        finally:
            _CASTS.leave()

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

    def at(self, server_round: int) -> "ClientData":
        """Return the data of this client in another round, with the batches of that round."""
        return replace(self, server_round=server_round)


@dataclass(frozen=True)
class Federation:
    """Training inputs of clients. A node of one client has a federation of its inputs alone.

    Args:
        setting: Setting of the run.
        inputs: Training images of these clients, or the tokens of a frozen network for them: a
            tensor, or another object whose ``inputs[positions]`` is a batch.
        labels: Their classes.
        shards: Positions of the inputs of each client, by client id; tensors or NumPy arrays, as of
            :func:`fedprompt.data.dirichlet`.

    Raises:
        ValueError: If labels or positions are out of range, or a client has no input.

    Example:
        >>> from fedprompt import samples, vit_trunk
        >>> from fedprompt.data import dirichlet
        >>> images, labels, *_ = samples.digits()
        >>> shards = dirichlet(labels, 4, alpha=0.5, generator=torch.Generator().manual_seed(0))
        >>> setting = VitSetting(
        ...     trunks=[vit_trunk(samples.vit("S"))], clients=range(4), num_classes=10,
        ...     rounds=5, steps=8, cohort_size=2, batch_size=16, seed=0, public=images[:0],
        ... )
        >>> federation = Federation(setting, images, labels, dict(enumerate(shards)))
        >>> federation.data(3, server_round=0).num_examples == len(shards[3])
        True
    """

    setting: Setting
    inputs: Inputs
    labels: Int[Tensor, "inputs"]
    shards: Mapping[int, Int[Tensor, "_"] | Int[np.ndarray, "_"]]

    def __post_init__(self) -> None:
        check.instance("setting", self.setting, Setting, "be a Setting, such as VitSetting")
        check_inputs("inputs", self.inputs)
        size = len(self.inputs)
        check.labels("labels", self.labels, self.setting.num_classes, size=size, of="inputs")
        check.instance("shards", self.shards, Mapping, "map ids of clients to positions")
        shards = {c: owned("shards", c, shard, size) for c, shard in self.shards.items()}
        object.__setattr__(self, "shards", shards)

    def data(self, client: int, server_round: int) -> ClientData:
        """Return the data of a client in a round."""
        shard = self.shards[client]
        return ClientData(
            self.setting,
            client,
            server_round,
            self.labels[shard].to(self.setting.device, torch.int64),
            lambda chosen: self.inputs[shard[chosen]],
        )


def check_inputs(argument: str, inputs: object) -> None:
    """Require a tensor, or another object that returns batches by positions."""
    if isinstance(inputs, Sequence) or not isinstance(inputs, Inputs):
        rule = "be a tensor, or return batches by positions"
        raise check.wrong_type(argument, rule, check.kind(inputs))


def owned(
    argument: str, client: int, shard: Tensor | np.ndarray, size: int
) -> Int[Tensor, "shard"]:
    """Require at least one position of a client among `size` inputs, and copy them."""
    check.count(f"key of {argument}", client, at_least=0)
    shard = torch.as_tensor(shard)
    check.labels(f"{argument}[{client}]", shard, size)
    check.some(f"{argument}[{client}]", len(shard), "have at least one position")
    return shard.to(torch.int64, copy=True)  # as uint8 it would be a mask


class PromptedModel(nn.Module):
    """Prompts and a linear head on a frozen trunk, which is shared and has no part in messages.

    Args:
        trunk: Frozen vision transformer.
        num_classes: Number of classes.
        num_features: Width of the features, by a learned projection. If None, features are those
            of the trunk.

    Attributes:
        prompts: Module that returns a prompt stream, or None, as in a new model.
    """

    def __init__(self, trunk: Trunk, num_classes: int, *, num_features: int | None = None) -> None:
        super().__init__()
        self.trunk = trunk
        self.prompts: nn.Module | None = None
        self.projection = (
            nn.Identity() if num_features is None else nn.Linear(trunk.num_features, num_features)
        )
        self.head = nn.Linear(num_features or trunk.num_features, num_classes)

    def features(self, images: Tensor) -> Float[Tensor, "batch dim"]:
        """Encode images with `prompts`, if there are any."""
        streams = () if self.prompts is None else (self.prompts(),)
        encoded = fp.encode_prompted(self.trunk, images, *streams)
        return cast(Tensor, self.projection(encoded.pooled))

    def forward(self, images: Tensor) -> Float[Tensor, "batch classes"]:
        """Classify images."""
        return cast(Tensor, self.head(self.features(images)))


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
    model: nn.Module, learning_rate: float
) -> Callable[[ClientData, fp.interfaces.Message, fp.interfaces.State], Any]:
    """Make the client of FedAvg, which takes a step on each batch and sends what it trained."""

    def train(data: ClientData, answer: Any, state: Any) -> Any:
        fp.load_values(model, answer)
        optimizer = data.optimizer(model, learning_rate)
        for inputs, labels in data.batches():
            take_step(optimizer, F.cross_entropy(model(inputs), labels))
        return fp.collect(model, weight=data.num_examples), state

    return train


def take_step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """Take a step of an optimizer along the gradient of a loss."""
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


@torch.no_grad()
def prototypes(model: PromptedModel, data: ClientData) -> fp.Weighted:
    """Average the features of each class over all inputs of a client, in parts."""
    classes = data.setting.num_classes
    return fp.weighted_mean(
        fp.class_means(model.features(images), labels, num_classes=classes)
        for images, labels in data.parts()
    )


def check_at_least_zero(**values: float) -> None:
    """Require finite hyperparameters of at least 0."""
    for name, value in values.items():
        check.number(name, value, at_least=0)


def check_sequences(**values: Any) -> None:
    """Require sequences, such as layers or names of parts."""
    for name, value in values.items():
        check.sequence(name, value, "values")


def check_logits(argument: str, logits: Any, batch: int, classes: int) -> None:
    """Require that a function of the caller returned logits (batch, classes)."""
    check.instance(argument, logits, Tensor, "return logits")
    check.shape(argument, logits, (batch, classes), "logits (batch, classes) =")


def replace_contexts(model: nn.Module, **learners: Any) -> None:
    """Put copies of learners in place of contexts of a model; all have equal lengths.

    Args:
        model: Model with context learners as parts.
        learners: New learners by part. If None, the part stays.
    """
    for name, learner in learners.items():
        if learner is not None:
            check.module(name, learner)
            setattr(model, name, deepcopy(learner))
    first, *others = learners
    shape, of = model.get_submodule(first)()[0].shape, f"`{first}()`, each context"
    for name in others:
        check.shape(f"{name}()", model.get_submodule(name)()[0], shape, of)


def known_rows(
    entries: Sequence[fp.Weighted],
) -> tuple[Float[Tensor, "rows dim"], Int[Tensor, "rows"]]:
    """Collect the rows of positive weight, and their classes, from the prototypes of clients."""
    values = torch.cat([entry.value[entry.weight > 0] for entry in entries])
    return values, torch.cat([entry.weight.nonzero()[:, 0] for entry in entries])


def attentive_server(
    clients: Sequence[int], first: fp.interfaces.Payload, temperature: float
) -> fp.Server:
    """Make the server of FedAMP, which mixes the last payloads of all clients.

    Args:
        clients: Ids of the clients.
        first: Payload of a client that has not sent any.
        temperature: Squared distance at which the weight of another client falls to 1/e.
    """
    clients = sorted(clients)

    def answer(client: int, state: fp.interfaces.State) -> Any:
        row = clients.index(client) if client in clients else -1
        return fp.mixtures(models(state["latest"]), state["attention"][row, None])[0]

    def step(server_round: int, payloads: Mapping[int, Any], state: fp.interfaces.State) -> Any:
        latest = state["latest"] | {str(client): sent for client, sent in payloads.items()}
        return {"latest": latest, "attention": rows(latest)}

    def models(latest: Mapping[str, Any]) -> list[Any]:
        return [*(latest.get(str(client), first) for client in clients), first]  # last: a newcomer

    def rows(latest: Mapping[str, Any]) -> Float[Tensor, "rows clients"]:
        distances = fp.distances(models(latest))
        of_clients = F.pad(attention(distances[:-1, :-1], temperature), (0, 1))
        return torch.cat([of_clients, attention(distances, temperature)[-1:]])

    return fp.Server({"latest": {}, "attention": rows({})}, answer, step, changes=False)


def attention(
    distances: Float[Tensor, "clients clients"], temperature: float
) -> Float[Tensor, "clients clients"]:
    """Weigh the models of other clients by their nearness, and the client's own by the rest."""
    others = torch.exp(-distances.square() / temperature) / len(distances)
    others.fill_diagonal_(0)
    return others + torch.diag(1 - others.sum(1))


class NearestPrototype(nn.Module):
    """Classify by the nearest prototype: logits are negative Euclidean distances.

    Args:
        model: Model of the features.
        prototypes: Prototype of each class. Classes of weight 0 are never predicted.
    """

    def __init__(self, model: PromptedModel, prototypes: fp.Weighted) -> None:
        super().__init__()
        self.model = model
        self.prototypes = prototypes

    def forward(self, images: Tensor) -> Float[Tensor, "batch classes"]:
        """Classify images."""
        distances = torch.cdist(self.model.features(images), self.prototypes.value)
        return (-distances).masked_fill(self.prototypes.weight == 0, -1e4)


@dataclass(kw_only=True)
class VitSetting(Setting):
    """Setting of images and frozen vision transformers.

    Attributes:
        trunks: Frozen trunks, given to clients in turn. With one trunk, all clients share it.
        num_prompts: Number of prompts at a layer.
        num_features: Width of the features that clients with different trunks have in common. If
            None, they are the features of the trunk.
        tune: What clients train in place of deep prompts, such as
            ``partial(fedprompt.tuning.lora, rank=2)``. Methods that name prompts or choose parts,
            such as FedPer and FedVPT, need None.
        prompts: Function from a trunk to a module that returns a prompt stream, such as
            ``partial(fedprompt.ShallowPrompts, 4)``. If None, deep prompts. Methods that make
            prompts themselves do not use it.

    Example:
        >>> from fedprompt import samples, vit_trunk
        >>> setting = VitSetting(
        ...     trunks=[vit_trunk(samples.vit("S")), vit_trunk(samples.vit("B"))], num_features=32,
        ...     clients=range(4), num_classes=10, rounds=2, steps=4, cohort_size=2, batch_size=16,
        ...     seed=0, public=torch.empty(0),
        ... )
        >>> [setting.new_model(client).trunk.dim for client in setting.clients]
        [48, 64, 48, 64]
    """

    trunks: Sequence[Trunk]
    num_prompts: int = 8
    num_features: int | None = None
    tune: Tune | None = None
    prompts: Callable[[Trunk], PromptInjector] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check.sequence("trunks", self.trunks, "trunks")
        check.some("trunks", self.trunks, "have at least one trunk")
        check.optional(check.function, "tune", self.tune)
        check.optional(check.function, "prompts", self.prompts)
        if isinstance(self.prompts, nn.Module):
            raise check.wrong_type("prompts", "make a module from a trunk", "a module")
        check.optional(check.count, "num_features", self.num_features)
        trunks = [trunk for trunk in self.trunks if isinstance(trunk, TrainableTrunk)]
        if any([*trunk.trainable.parameters()] for trunk in trunks):
            rule = "be frozen, because `tune` says what clients train"
            raise check.wrong("trunks", rule, "a trunk with trained parameters")

    @property
    def trunk(self) -> Trunk:
        """The trunk of all clients."""
        if len(self.trunks) > 1:
            rule = "have one trunk, for a model that all clients share"
            raise check.wrong("trunks", rule, len(self.trunks))
        return self.trunks[0]

    @property
    def num_backbones(self) -> int:
        """Number of trunks."""
        return len(self.trunks)

    def trunk_of(self, client: int | None = None) -> Trunk:
        """Return the trunk of a client, or that of all clients."""
        return self.trunk if client is None else self.trunks[client % len(self.trunks)]

    def model_class(self, trunk: Trunk) -> type[PromptedModel]:
        """Return the class of models with this trunk."""
        return PromptedModel

    def new_model(
        self,
        client: int | None = None,
        *,
        prompts: Callable[[Trunk], nn.Module | None] | None = None,
        tune: Tune | None = None,
    ) -> PromptedModel:
        """Make a model; the initial values depend on the seed, the trunk and `prompts` alone.

        Args:
            client: Id of the client that owns the model; it decides the trunk. If None, all
                clients share the model.
            prompts: Function from the trunk to a module of prompts. For a model without prompts,
                ``lambda trunk: None``. If None, deep prompts, and with `tune` no prompts.
            tune: Function from the model of the trunk to a copy and its trained parameters, such as
                :func:`fedprompt.tuning.norms`. They are the part "tuned" of the model. If None,
                that of the setting; without one, the trunk is frozen and shared.

        Raises:
            ValueError: If no client is named, and there are several trunks.
        """
        trunk = self.trunk_of(client)
        prompts = prompts or cast(Any, self.prompts)
        if self.tune is not None:
            if prompts is not None or tune is not None:
                raise check.wrong("tune", "be None for a method with parts of its own", self.tune)
            tune = self.tune
        make = prompts or (self.deep_prompts if tune is None else lambda trunk: None)

        def drawn() -> PromptedModel:
            kind = self.model_class(trunk)
            model = kind(trunk, self.num_classes, num_features=self.num_features)
            if model.prompts is None:
                check.optional(check.module, "prompts(trunk)", made := make(trunk))
                model.prompts = made
            if tune is not None:
                model.trunk = tuned_trunk(trunk, tune)
                model.tuned = model.trunk.trainable
            return model

        return self.seeded(drawn)

    def deep_prompts(self, trunk: Trunk) -> fp.DeepPrompts:
        """Make prompts for all blocks of a trunk, for methods that need prompts."""
        return fp.DeepPrompts(self.num_prompts, trunk)


def tuned_trunk(trunk: Any, tune: Tune) -> TrainableTrunk:
    """Make a trunk of a copy of a trunk's model, with trained parameters.

    A trunk with a function `tuned`, from `tune` to such a trunk, makes it itself.
    """

    def copied(model: nn.Module) -> tuple[nn.Module, list[nn.Parameter]]:
        tuned, parameters = tune(model)
        if tuned is model:
            raise check.wrong("tune", "return a copy of the model", "the model itself")
        return tuned, parameters

    if hasattr(trunk, "tuned"):
        return cast(TrainableTrunk, trunk.tuned(copied))
    if not (hasattr(trunk, "model") and hasattr(trunk, "mask")):
        raise check.wrong_type("trunks", "be made by vit_trunk to be tuned", check.kind(trunk))
    model, parameters = copied(trunk.model)
    return fp.vit_trunk(model, attention_mask=trunk.mask, trainable=parameters)


class ClipModel(nn.Module):
    """Text tower of a frozen CLIP and its class names, for models with prompts.

    Args:
        setting: Setting with the frozen CLIP.
    """

    def __init__(self, setting: "ClipSetting") -> None:
        super().__init__()
        self.tower = setting.tower
        self.names = setting.names
        self.scale = setting.scale

    def encode_names(
        self, contexts: Float[Tensor, "..."], **axes: bool
    ) -> Float[Tensor, "*contexts classes dim"]:
        """Encode all class names behind each context of :func:`fedprompt.prompted_text`."""
        return self.tower(fp.prompted_text(contexts, self.names, **axes))


class LayeredClip(ClipModel):
    """Both towers of a frozen CLIP, for prompts of each layer that replace the previous ones."""

    def __init__(self, setting: "ClipSetting") -> None:
        super().__init__(setting)
        self.setting = setting
        self.trunk = fp.vit_trunk(setting.clip.visual)

    def encode(
        self, images: Tensor, visual: Mapping[int, Tensor], text: Mapping[int, Tensor]
    ) -> tuple[Float[Tensor, "batch dim"], Float[Tensor, "classes dim"]]:
        """Encode images and class names with prompts by layer."""
        visual = {**visual, 0: self.setting.clip.visual.ln_pre(visual[0])}
        image = fp.encode_prompted(self.trunk, images, fp.PromptStream(visual, replace=True)).pooled
        first = fp.prompted_text(text[0][None], self.names)
        later = {layer: tokens for layer, tokens in text.items() if layer > 0}
        return image, self.tower(first, fp.PromptStream(later, replace=True))[0]


class PromptedClassifier(ClipModel):
    """Learnable context before the class names, which classifies the image features of a CLIP.

    Args:
        setting: Setting with the frozen CLIP.
        context: Module that returns contexts, such as :class:`fedprompt.ContextPrompts`.
    """

    def __init__(self, setting: "ClipSetting", context: nn.Module) -> None:
        super().__init__(setting)
        self.context = context

    def text(self) -> Float[Tensor, "contexts classes dim"]:
        """Encode all class names behind each context."""
        return self.encode_names(self.context())

    def forward(self, tokens: Float[Tensor, "batch tokens dim"]) -> Float[Tensor, "batch classes"]:
        """Classify images by their pooled token, which is first."""
        return fp.cosine_logits(tokens[:, 0], self.text()[0], scale=self.scale)


@dataclass(kw_only=True)
class ClipSetting(Setting):
    """Setting of a frozen CLIP. Inputs are image tokens, the pooled one first, or images.

    Attributes:
        clip: Frozen model of open_clip.
        tower: Its text tower, which takes contexts.
        class_names: Names of the classes.
        scale: Factor of the cosines in logits.
        template: Sentence around a class name, such as ``"a photo of a {}."``.
        length: Number of learnable tokens of a context.

    Example:
        >>> from fedprompt import TextTower, samples
        >>> clip = samples.clip()
        >>> setting = ClipSetting(
        ...     clip=clip, tower=TextTower(clip, samples.tokenize), scale=100.0,
        ...     class_names=samples.CLASS_NAMES, template="a photo of a {}.", clients=range(4),
        ...     num_classes=10, rounds=2, steps=4, cohort_size=2, batch_size=16, seed=0,
        ...     public=torch.empty(0),
        ... )
        >>> setting.new_model().text().shape == (1, 10, setting.handwritten_text().shape[1])
        True
    """

    clip: Any
    tower: fp.TextTower
    class_names: Sequence[str]
    scale: float
    template: str
    length: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.class_names) != self.num_classes:
            rule = f"have a name for each of {self.num_classes} classes"
            raise check.wrong("class_names", rule, len(self.class_names))
        self.names = self.tower.class_names(self.class_names)

    def new_context(self) -> fp.ContextPrompts:
        """Make a context whose initial values depend on the seed alone."""
        return self.seeded(lambda: fp.ContextPrompts(self.tower.dim, length=self.length))

    def new_model(self, client: int = 0) -> PromptedClassifier:
        """Make a model with a new context, the same for every client."""
        return PromptedClassifier(self, self.new_context())

    def handwritten_text(self) -> Float[Tensor, "classes dim"]:
        """Encode the class names in the handwritten template, normalized."""
        return fp.zero_shot_classifier(self.tower, self.class_names, [self.template])
