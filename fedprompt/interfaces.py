"""The nouns and the shapes of components: what travels between the rooms of the library, and nothing that computes.

A component is a function, an ``nn.Module`` that owns parameters, or an ``(init, step)`` pair that remembers something between rounds. The
protocols below are the functions' and pairs' types; anything that fits one can stand wherever the library's own piece stands.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, overload, runtime_checkable

import torch.nn as nn
from jaxtyping import Float, Int
from torch import Tensor

__all__ = [
    "Aggregator",
    "Answers",
    "ClassNames",
    "Coupling",
    "Encoded",
    "GuideGradient",
    "Matcher",
    "Message",
    "Payload",
    "PromptSelector",
    "PromptStream",
    "PromptedText",
    "Selection",
    "Server",
    "ServerRule",
    "ServerUpdate",
    "TextEncoder",
    "TransportSolver",
    "Trunk",
    "Weighted",
]


class Weighted(NamedTuple):
    """Rows with the evidence behind them: the one thing that clients upload.

    Attributes:
        value: ``(*rows, *event)``, the rows.
        weight: ``(*rows)``, the shape of `value` without its last axes; finite and at least 0. Weight 0 says "I know nothing
            about this row", and the row may then hold anything, NaN included.
    """

    value: Float[Tensor, "..."]
    weight: Float[Tensor, "..."]


Payload = Mapping[str, Weighted]
"""What a client sends up: rows with evidence, by name."""

Message = Mapping[str, Tensor | Weighted]
"""Anything on the wire. Down go tensors, or :class:`Weighted` where the evidence matters."""


class PromptStream(NamedTuple):
    """Prompt tokens on their way into a transformer; several streams run side by side.

    Attributes:
        layers: From the 0-based layer to the tokens that enter before it: ``(prompts, dim)``, the same for every image, or
            ``(batch, prompts, dim)``, one set for each.
        replace: Whether new tokens take the place of the stream's own old ones (VPT-deep); otherwise old tokens are carried on.
    """

    layers: Mapping[int, Float[Tensor, "*batch prompts dim"]]
    replace: bool = False


class Encoded(NamedTuple):
    """What a prompted backbone makes of images.

    Attributes:
        pooled: ``(batch, dim)``, what the backbone itself pools, up to its classifier, with the prompt tokens left out.
        streams: For each stream ``(batch, tokens, dim)``, its tokens after the last block, through the model's last norm.
    """

    pooled: Float[Tensor, "batch dim"]
    streams: tuple[Float[Tensor, "batch tokens dim"], ...]


class ClassNames(NamedTuple):
    """Class names as a text tower embeds them; made once, moved with ``.to`` by hand.

    Attributes:
        start: ``(start, dim)``, embeddings of the start token(s).
        tokens: ``(classes, length, dim)``, embeddings of each name, its full stop and the end token, padded to the longest.
        length: ``(classes,)``, how many of these belong to each class.
        pad: ``(dim,)``, embedding of the padding token.
        context_length: The number of positions of the tower.
        causal: Whether a token sees only what stands before it, and nothing behind the end token is read.
        names: The names themselves, for errors.
        ending: ``(classes,)``, how many tokens close each sentence: the full stop, where it is a token of its own, and the end token.
    """

    start: Float[Tensor, "start dim"]
    tokens: Float[Tensor, "classes length dim"]
    length: Int[Tensor, " classes"]
    pad: Float[Tensor, " dim"]
    context_length: int
    causal: bool
    names: tuple[str, ...]
    ending: Int[Tensor, " classes"]


class PromptedText(NamedTuple):
    """Class sentences with a learned context, split so that a causal text tower can run the common part once.

    Attributes:
        prefix: ``(contexts, prefix_length, dim)``, the tokens that every class shares; an axis in front where samples bring their own.
        suffix: ``(contexts, classes, suffix_length, dim)``, the rest, padded; likewise.
        end: ``(classes,)``, the position of the end-of-text token, counted from the start of the prefix.
    """

    prefix: Float[Tensor, "*batch contexts prefix_length dim"]
    suffix: Float[Tensor, "*batch contexts classes suffix_length dim"]
    end: Int[Tensor, " classes"]


class Coupling(NamedTuple):
    """Transport plans, the problems that they solve, and how accurate they are.

    Attributes:
        plan: ``(*batch, rows, columns)``, without a graph.
        error: ``(*batch)``, largest relative violation of either marginal. Of capped rows only the excess counts.
        iterations: ``(*batch)``, number of iterations of each problem.
        a: ``(*#batch, rows)``, masses of the rows as the solver got them.
        b: ``(*#batch, columns)``, masses of the columns as the solver got them.
        epsilon: Weight of the entropy. 0 for a linear program, infinity if the plan ignores the cost.
        duals: ``(*batch, columns)``, from which ``transport.plan_from_duals`` computes the plan again. None if the
            solver has none.
    """

    plan: Float[Tensor, "*batch rows columns"]
    error: Float[Tensor, "*batch"]
    iterations: Int[Tensor, "*batch"]
    a: Float[Tensor, "*#batch rows"]
    b: Float[Tensor, "*#batch columns"]
    epsilon: float
    duals: Float[Tensor, "*batch columns"] | None = None


class Selection(NamedTuple):
    """Which key each query chose.

    Attributes:
        indices: ``(batch,)``, the chosen rows.
        similarity: ``(batch,)``, the cosine between each query and its key.
    """

    indices: Int[Tensor, " batch"]
    similarity: Float[Tensor, " batch"]


@runtime_checkable
class Aggregator(Protocol):
    """Entries in, one entry out, under the laws of ``tests/laws/test_aggregators.py``.

    The library's own aggregators also take payloads and then return a payload.
    :func:`aggregate_by_name` lifts any other aggregator over names.
    """

    def __call__(self, entries: Iterable[Weighted], /) -> Weighted:
        """Aggregate the entries of one name."""


Value = TypeVar("Value")
Mean = TypeVar("Mean", contravariant=True)


@runtime_checkable
class ServerUpdate(Protocol[Value, Mean]):
    """What the server does with a round's mean; all that it remembers between rounds is the state.

    ``Value`` is a tensor and ``Mean`` a :class:`Weighted`, or mappings of these by name. A state is a (nested) mapping of what
    ``torch.save`` writes and ``torch.load(weights_only=True)`` reads: hand it back at the next step, save it between rounds, and leave
    it alone otherwise.
    """

    def init(self, previous: Value, /) -> Mapping[str, Any]:
        """Make the state before the first round."""

    def step(
        self, previous: Value, mean: Mean, state: Mapping[str, Any], /
    ) -> tuple[Value, Mapping[str, Any]]:
        """Return the new value and the new state; rows of total weight 0 keep their previous value."""


@runtime_checkable
class ServerRule(Protocol):
    """A :class:`ServerUpdate` in both forms: for a tensor, or name by name for a dict of tensors."""

    def init(self, previous: Tensor | Mapping[str, Tensor], /) -> Mapping[str, Any]:
        """Make the state before the first round; for a dict, the state of each name."""

    @overload
    def step(
        self, previous: Tensor, mean: Weighted, state: Mapping[str, Any], /
    ) -> tuple[Tensor, Mapping[str, Any]]: ...
    @overload
    def step(
        self, previous: Mapping[str, Tensor], mean: Payload, state: Mapping[str, Any], /
    ) -> tuple[dict[str, Tensor], Mapping[str, Any]]: ...
    def step(self, previous: Any, mean: Any, state: Mapping[str, Any], /) -> Any:
        """Return the new value and the new state; names that the mean lacks keep both."""


Answers = Mapping[int, Message]
"""What a server sends to each client, by client id."""


@runtime_checkable
class Server(Protocol):
    """An ``(init, step)`` pair that answers each client; where it broadcasts, all alike."""

    def init(self) -> tuple[Answers, Any]:
        """Return the first answers, by client id, and the state."""

    def step(self, uploads: Mapping[int, Message], state: Any, /) -> tuple[Answers, Any]:
        """Return the next answers and state; `uploads` stand in the order of client ids."""


@runtime_checkable
class Trunk(Protocol):
    """A frozen transformer that all clients share: a plain class, not an ``nn.Module``, whose ``__deepcopy__`` returns itself.

    Attributes:
        prefix: Number of class and register tokens at the front.
        dim: Width of a token.
        depth: Number of blocks.
    """

    prefix: int
    dim: int
    depth: int

    def embed(
        self, images: Float[Tensor, "batch channels height width"]
    ) -> tuple[Float[Tensor, "batch seq dim"], Any]:
        """Make tokens, positions and pre-norm included, and a context (rotary tables, masks) that each block gets."""

    def block(
        self, layer: int, tokens: Float[Tensor, "batch seq dim"], context: Any, num_prompts: int
    ) -> Float[Tensor, "batch seq dim"]:
        """Run one block over tokens of which `num_prompts`, right after the prefix, are prompts."""

    def normalize(
        self, tokens: Float[Tensor, "batch tokens dim"]
    ) -> Float[Tensor, "batch tokens dim"]:
        """Apply the model's last norm to any tokens."""

    def pool(self, tokens: Float[Tensor, "batch seq dim"]) -> Float[Tensor, "batch pooled"]:
        """Pool un-normed tokens without prompts the way that the model does, up to its classifier."""


@runtime_checkable
class PromptSelector(Protocol):
    """Chooses a key for each query."""

    def __call__(
        self,
        query: Float[Tensor, "batch dim"],
        keys: Float[Tensor, "groups dim"],
        /,
        *,
        usage: Tensor | None = None,
    ) -> Selection:
        """Choose; `usage` is None at inference, in training it counts how often each of the ``groups`` keys was chosen so far."""


@runtime_checkable
class TextEncoder(Protocol):
    """Turns prompted class sentences into features.

    Attributes:
        dim: Width of a token, which need not be that of a feature.
    """

    dim: int

    def __call__(self, text: PromptedText, /) -> Float[Tensor, "*batch contexts classes features"]:
        """Encode, without normalising."""


@runtime_checkable
class TransportSolver(Protocol):
    """Solves a batch of small optimal-transport problems."""

    def __call__(
        self,
        cost: Float[Tensor, "*batch rows columns"],
        a: Float[Tensor, "*#batch rows"],
        b: Float[Tensor, "*#batch columns"],
        /,
    ) -> Coupling:
        """Find a plan for masses `a` of the rows and `b` of the columns."""


@runtime_checkable
class Matcher(Protocol):
    """Scores image features against text features."""

    def __call__(
        self,
        image: Float[Tensor, "batch *patches dim"],
        text: Float[Tensor, "*prompts classes dim"],
        /,
    ) -> Tensor:
        """Return logits ``(batch, classes)``."""


Batches = Sequence[Tensor] | Sequence[Sequence[Tensor]]  # one pair (images, labels), or several


@runtime_checkable
class GuideGradient(Protocol):
    """The gradient of the quiz loss after one guided step with respect to the guides."""

    def __call__(
        self,
        model: nn.Module,
        guides: Float[Tensor, "classes dim"],
        study: Batches,
        quiz: Batches,
        /,
        *,
        learning_rate: float,
    ) -> Weighted:
        """Return the gradient, with weight 1 for the classes of the study batch."""
