"""Nouns and protocols: the values that components exchange, and the types of the components.

A component is a function, an ``nn.Module`` that owns parameters, or an ``(init, step)`` pair that
remembers something between rounds. The protocols are the types of functions and pairs. Your own
piece can replace one of the library wherever it fits the protocol.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, overload, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

__all__ = [
    "Aggregator",
    "Answers",
    "ClassNames",
    "Codec",
    "Coupling",
    "Encoded",
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
    """Rows and the evidence behind each of them.

    Attributes:
        value: Rows ``(*rows, *event)``.
        weight: Evidence ``(*rows)``, finite and at least 0. Weight 0 means that nothing is known
            about the row. The row may hold anything then, NaN included.
    """

    value: Float[Tensor, "..."]
    weight: Float[Tensor, "..."]


Payload = Mapping[str, Weighted]
"""Entries by name: the message of a client to the server."""

Message = Mapping[str, Tensor | Weighted]
"""Tensors or entries by name: anything that is sent."""


class PromptStream(NamedTuple):
    """Prompt tokens that enter a transformer. Several streams can enter together.

    Attributes:
        layers: Tokens by the 0-based layer before which they enter: ``(prompts, dim)`` for all
            images, or ``(batch, prompts, dim)`` for each image.
        replace: Whether new tokens replace the stream's old ones (VPT-deep). If False, the old
            tokens stay.
    """

    layers: Mapping[int, Float[Tensor, "*batch prompts dim"]]
    replace: bool = False


class Encoded(NamedTuple):
    """Output of a prompted backbone.

    Attributes:
        pooled: Features ``(batch, dim)``, pooled as the backbone does before its classifier, with
            prompt tokens left out.
        streams: For each stream, its tokens ``(batch, tokens, dim)`` after the last block and the
            last norm.
    """

    pooled: Float[Tensor, "batch dim"]
    streams: tuple[Float[Tensor, "batch tokens dim"], ...]


class ClassNames(NamedTuple):
    """Class names, embedded by a text tower. Make them once; move their tensors with ``.to``.

    Attributes:
        start: Embeddings ``(start, dim)`` of the start tokens.
        tokens: Embeddings ``(classes, length, dim)`` of each name, its full stop and the end token,
            padded to the longest.
        length: Number of these tokens of each class, without padding.
        pad: Embedding ``(dim,)`` of the padding token.
        context_length: Number of positions of the tower.
        causal: Whether a token sees only the tokens before it. Nothing after the end token is read
            then.
        names: The names as text, for errors.
        ending: Number of tokens that end the sentence of each class: the full stop, where it is a
            token, and the end token.
    """

    start: Float[Tensor, "start dim"]
    tokens: Float[Tensor, "classes length dim"]
    length: tuple[int, ...]
    pad: Float[Tensor, " dim"]
    context_length: int
    causal: bool
    names: tuple[str, ...]
    ending: tuple[int, ...]

    def select(self, indices: Sequence[int] | Int[Tensor, " chosen"]) -> "ClassNames":
        """Return the names of some classes, in the order of `indices`.

        Args:
            indices: Numbers of the classes, at least one. A class may occur several times.

        Raises:
            IndexError: If a number is not that of a class.

        Example:
            >>> names = ClassNames(
            ...     start=torch.zeros(1, 8),
            ...     tokens=torch.zeros(3, 4, 8),
            ...     length=(3, 4, 3),
            ...     pad=torch.zeros(8),
            ...     context_length=77,
            ...     causal=True,
            ...     names=("cat", "polar bear", "dog"),
            ...     ending=(2, 2, 2),
            ... )
            >>> pets = names.select([2, 0])
            >>> pets.names, pets.tokens.shape
            (('dog', 'cat'), torch.Size([2, 3, 8]))
        """
        chosen = [int(index) for index in indices]
        wrong = [index for index in chosen if not 0 <= index < len(self.names)]
        if wrong or not chosen:
            rule = f"contain at least one number, all in [0, {len(self.names)})"
            raise IndexError(f"`indices` must {rule}; got {wrong[:5] or 'none'}.")
        length = tuple(self.length[index] for index in chosen)
        return self._replace(
            tokens=self.tokens[chosen, : max(length)],
            length=length,
            names=tuple(self.names[index] for index in chosen),
            ending=tuple(self.ending[index] for index in chosen),
        )


class PromptedText(NamedTuple):
    """Class sentences with a learned context.

    They are split so that a causal text tower can run the common part once.

    Attributes:
        prefix: Tokens ``(contexts, prefix_length, dim)`` that all classes share. Contexts of single
            samples add a batch axis in front.
        suffix: Other tokens ``(contexts, classes, suffix_length, dim)``, padded, with the same
            batch axis.
        end: Position of the end-of-text token of each class, counted from the start of the prefix.
        context: Number of context tokens at the end of the prefix. None if a part of the context is
            elsewhere, as with class-specific contexts.
    """

    prefix: Float[Tensor, "*batch contexts prefix_length dim"]
    suffix: Float[Tensor, "*batch contexts classes suffix_length dim"]
    end: tuple[int, ...]
    context: int | None = None


class Coupling(NamedTuple):
    """Transport plans, the problems that they solve, and their accuracy.

    Attributes:
        plan: Plans ``(*batch, rows, columns)``, without a graph.
        error: Largest relative violation ``(*batch)`` of either marginal. Of capped rows, only the
            excess counts.
        iterations: Number of iterations ``(*batch)`` of each problem.
        a: Masses of the rows ``(*#batch, rows)``, as the solver got them.
        b: Masses of the columns ``(*#batch, columns)``, as the solver got them.
        epsilon: Weight of the entropy. 0 for a linear program, infinity if the plan ignores the
            cost.
        duals: Dual variables ``(*batch, columns)``, from which ``transport.plan_from_duals``
            computes the plan again. None if the solver has none.
    """

    plan: Float[Tensor, "*batch rows columns"]
    error: Float[Tensor, "*batch"]
    iterations: Int[Tensor, "*batch"]
    a: Float[Tensor, "*#batch rows"]
    b: Float[Tensor, "*#batch columns"]
    epsilon: float
    duals: Float[Tensor, "*batch columns"] | None = None


class Selection(NamedTuple):
    """The key that was selected for each query.

    Attributes:
        indices: Rows ``(batch,)`` of the selected keys.
        similarity: Cosine ``(batch,)`` between each query and its key.
    """

    indices: Int[Tensor, " batch"]
    similarity: Float[Tensor, " batch"]


@runtime_checkable
class Aggregator(Protocol):
    """Function from entries to one entry, under the laws of ``tests/laws/test_aggregators.py``.

    The library's own aggregators also take payloads and then return a payload.
    :func:`aggregate_by_name` lifts any other aggregator over names.
    """

    def __call__(self, entries: Iterable[Weighted], /) -> Weighted:
        """Aggregate the entries of one name."""


Value = TypeVar("Value")
Mean = TypeVar("Mean", contravariant=True)


@runtime_checkable
class ServerUpdate(Protocol[Value, Mean]):
    """Pair of ``init`` and ``step``: the new value of a server from the mean of a round.

    ``Value`` is a tensor and ``Mean`` a :class:`Weighted`, or mappings of these by name. The state
    holds everything that is remembered between rounds. It is a (nested) mapping that ``torch.save``
    can write and ``torch.load(weights_only=True)`` can read. Pass it to the next step unchanged,
    and save it between rounds.
    """

    def init(self, previous: Value, /) -> Mapping[str, Any]:
        """Make the state before the first round."""

    def step(
        self, previous: Value, mean: Mean, state: Mapping[str, Any], /
    ) -> tuple[Value, Mapping[str, Any]]:
        """Return the new value and the new state; rows of total weight 0 keep their value."""


@runtime_checkable
class ServerRule(Protocol):
    """Server update that takes a tensor, or a dict of tensors name by name."""

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
"""Messages of a server by client id."""


@runtime_checkable
class Server(Protocol):
    """Pair of ``init`` and ``step``: an answer for each client from the payloads of all clients."""

    def init(self) -> tuple[Answers, Any]:
        """Return the first answers by client id, and the state."""

    def step(self, payloads: Mapping[int, Message], state: Any, /) -> tuple[Answers, Any]:
        """Return the next answers and state; `payloads` are in the order of client ids."""


@runtime_checkable
class Codec(Protocol):
    """Compression of payloads, under the laws of ``tests/laws/test_codecs.py``.

    The state holds everything that a client's codec remembers between rounds.
    """

    def init(self, payload: Payload, /) -> Mapping[str, Any]:
        """Make the state before the first round."""

    def encode(
        self, payload: Payload, state: Mapping[str, Any], /
    ) -> tuple[dict[str, Tensor | Weighted], Mapping[str, Any]]:
        """Return a message and the new state; its form depends on that of the payload alone."""

    def decode(self, message: Message, /, *, like: Payload) -> dict[str, Weighted]:
        """Return a payload of the form of `like`; the numbers of `like` are not read."""


@runtime_checkable
class Trunk(Protocol):
    """Frozen transformer that all clients share.

    It is a plain class, not an ``nn.Module``. Its ``__deepcopy__`` returns the trunk, so copies of
    a model share it.

    Attributes:
        prefix: Number of class and register tokens in front.
        dim: Width of a token.
        depth: Number of blocks.
    """

    prefix: int
    dim: int
    depth: int

    def embed(
        self, images: Float[Tensor, "batch channels height width"]
    ) -> tuple[Float[Tensor, "batch seq dim"], Any]:
        """Return tokens and a context (rotary tables, masks) that is passed to each block.

        Positions and the first norm are included in the tokens.
        """

    def block(
        self, layer: int, tokens: Float[Tensor, "batch seq dim"], context: Any, num_prompts: int
    ) -> Float[Tensor, "batch seq dim"]:
        """Run one block; `num_prompts` of the tokens, right after the prefix, are prompts."""

    def normalize(
        self, tokens: Float[Tensor, "batch tokens dim"]
    ) -> Float[Tensor, "batch tokens dim"]:
        """Apply the model's last norm to any tokens."""

    def pool(self, tokens: Float[Tensor, "batch seq dim"]) -> Float[Tensor, "batch pooled"]:
        """Pool tokens without prompts, before the last norm, as the model does."""


@runtime_checkable
class PromptSelector(Protocol):
    """Function that selects a key for each query."""

    def __call__(
        self,
        query: Float[Tensor, "batch dim"],
        keys: Float[Tensor, "groups dim"],
        /,
        *,
        usage: Tensor | None = None,
    ) -> Selection:
        """Select keys.

        In training, `usage` counts how often each of the ``groups`` keys was selected so far. At
        inference it is None.
        """


@runtime_checkable
class TextEncoder(Protocol):
    """Function from prompted class sentences to features.

    Attributes:
        dim: Width of a token. Features may have another width.
    """

    dim: int

    def __call__(self, text: PromptedText, /) -> Float[Tensor, "*batch contexts classes features"]:
        """Encode the sentences; features are not normalized."""


@runtime_checkable
class TransportSolver(Protocol):
    """Function that solves a batch of small optimal-transport problems."""

    def __call__(
        self,
        cost: Float[Tensor, "*batch rows columns"],
        a: Float[Tensor, "*#batch rows"],
        b: Float[Tensor, "*#batch columns"],
        /,
    ) -> Coupling:
        """Find a plan for masses `a` of the rows and `b` of the columns."""


Batches = Sequence[Tensor] | Sequence[Sequence[Tensor]]
"""One pair (images, labels), or several."""
