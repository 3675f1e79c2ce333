"""Protocols: types of functions, of ``(init, step)`` pairs, and of backbones.

Your own piece can replace one of the library wherever it fits the protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeVar, overload, runtime_checkable

import torch.nn as nn
from jaxtyping import Float, Num
from torch import Tensor

from fedprompt.interfaces.nouns import (
    Coupling,
    Message,
    Payload,
    PromptedText,
    PromptStream,
    Selection,
    Weighted,
)


@runtime_checkable
class Aggregator(Protocol):
    """Function from entries to one entry, under the laws of ``tests/laws/test_aggregators.py``.

    The library's own aggregators also take payloads and then return a payload.
    :func:`~fedprompt.robust.aggregate_by_name` lifts any other aggregator over names.
    """

    def __call__(self, entries: Iterable[Weighted], /) -> Weighted:
        """Aggregate the entries of one name."""


_Value = TypeVar("_Value")
_Mean = TypeVar("_Mean", contravariant=True)


@runtime_checkable
class ServerUpdate(Protocol[_Value, _Mean]):
    """Pair of ``init`` and ``step``: the new value of a server from the mean of a round.

    A value is a tensor and its mean a :class:`Weighted`, or mappings of these by name. The state
    holds everything that is remembered between rounds. It is a (nested) mapping that ``torch.save``
    can write and ``torch.load(weights_only=True)`` can read. Pass it to the next step unchanged,
    and save it between rounds.
    """

    def init(self, previous: _Value, /) -> Mapping[str, Any]:
        """Make the state before the first round."""

    def step(
        self, previous: _Value, mean: _Mean, state: Mapping[str, Any], /
    ) -> tuple[_Value, Mapping[str, Any]]:
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
        dim: Width of a token, and so of a prompt.
        depth: Number of blocks.
        num_features: Width of the pooled features, and so of a head's input. It equals `dim`
            unless the model projects its features.
        patch_size: Side of a patch in pixels, the larger one if they differ.
    """

    prefix: int
    dim: int
    depth: int
    num_features: int
    patch_size: int

    def embed(self, images: Num[Tensor, "batch ..."]) -> tuple[Float[Tensor, "batch seq dim"], Any]:
        """Return tokens and a context (rotary tables, masks) that is passed to each block.

        Positions and the first norm are included in the tokens. The trunk decides what it takes,
        such as images, spectrograms or token ids, and refuses other inputs here.
        """

    def block(
        self, layer: int, tokens: Float[Tensor, "batch seq dim"], context: Any, num_prompts: int
    ) -> Float[Tensor, "batch seq dim"]:
        """Run one block; `num_prompts` of the tokens, right after the prefix, are prompts."""

    def normalize(
        self, tokens: Float[Tensor, "batch tokens dim"]
    ) -> Float[Tensor, "batch tokens dim"]:
        """Apply the model's last norm to any tokens."""

    def pool(self, tokens: Float[Tensor, "batch seq dim"]) -> Float[Tensor, "batch features"]:
        """Pool tokens without prompts, before the last norm, as the model does."""


@runtime_checkable
class ResumableTrunk(Trunk, Protocol):
    """Trunk that can go on from tokens before a later block. All trunks of the library can."""

    def resume(
        self,
        tokens: Float[Tensor, "batch seq dim"],
        *,
        start: int,
        image_size: tuple[int, int] | None,
    ) -> tuple[Float[Tensor, "batch seq dim"], Any]:
        """Return tokens in the dtype of the blocks, and the context as :meth:`embed` returns it.

        The tokens are those before block `start`, without prompts. `image_size` is the size of
        their images in pixels, if it is known.
        """


@runtime_checkable
class TrainableTrunk(ResumableTrunk, Protocol):
    """Trunk of which some parameters can be trained, such as LoRA's."""

    @property
    def trainable(self) -> nn.Module:
        """Module that has the trained parameters under their names in the model, or none."""


@runtime_checkable
class PromptInjector(Protocol):
    """Module or function that returns the prompts of a pass, as :class:`~fedprompt.DeepPrompts`.

    :func:`~fedprompt.encode_prompted` inserts its stream into a trunk. Parameters of a module are
    trained, and sent under their names.
    """

    def __call__(self) -> PromptStream:
        """Return tokens by layer, of the trunk's width and below its depth."""


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


_Tensors = Mapping[str, Tensor]


@runtime_checkable
class TransportScore(Protocol):
    """Differentiable score of transport plans, such as :func:`~fedprompt.transport.plan_fixed`."""

    def __call__(
        self, cost: Float[Tensor, "*batch rows columns"], coupling: Coupling, /
    ) -> Float[Tensor, "*batch"]:
        """Score the plan of each problem; gradients flow into `cost`."""


@runtime_checkable
class PatchMatcher(Protocol):
    """Function from patches and text features to logits, as :func:`~fedprompt.transport_logits`.

    Patches are ``(batch, patches, dim)`` and text features ``(prompts, classes, dim)``. Neither is
    normalized.
    """

    def __call__(self, patches: Tensor, text: Tensor, /, *, scale: float) -> Tensor:
        """Compute logits ``(batch, classes)``; gradients flow into both."""


@runtime_checkable
class ContextLearner(Protocol):
    """Module that returns contexts for class names, such as :class:`~fedprompt.ContextPrompts`.

    It is an ``nn.Module``. Its parameters are trained, and cross the wire under their names. The
    contexts may be any function of them.
    """

    def __call__(self) -> Float[Tensor, "contexts *classes length dim"]:
        """Return the contexts; the axis of classes exists if they are class-specific."""


@runtime_checkable
class GuideLoss(Protocol):
    """Twice differentiable loss between outputs of samples and the guides of their classes."""

    def __call__(
        self, guided: Float[Tensor, "batch dim"], guides: Float[Tensor, "batch dim"], /
    ) -> Float[Tensor, ""]:
        """Return the loss, a mean over the batch."""


@runtime_checkable
class GuideUpdate(Protocol):
    """Differentiable step of a client, for :func:`guide_gradient`."""

    def __call__(
        self, parameters: _Tensors, gradients: _Tensors, /, *, learning_rate: float
    ) -> _Tensors:
        """Return the parameters after the step, by name, as a function of their gradients."""


@runtime_checkable
class GuideDerivative(Protocol):
    """Derivative of a model's guided output along a direction of its parameters.

    ``evaluate(parameters, then)`` runs the model and returns ``then(guided)``, with the same
    dropout masks and buffers in each call.
    """

    def __call__(
        self,
        evaluate: Callable[[_Tensors, Callable[[Tensor], Tensor]], Tensor],
        parameters: _Tensors,
        direction: _Tensors,
        /,
    ) -> Float[Tensor, "batch dim"]:
        """Return the derivative at `parameters`, of the shape of the guided output."""
