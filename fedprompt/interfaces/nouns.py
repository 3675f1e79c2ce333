"""Nouns: the values that components exchange."""

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

import fedprompt._refusals as check
from fedprompt._signatures import short_types


class _Entry(NamedTuple):
    value: Float[Tensor, "..."]
    weight: Float[Tensor, "..."]


class Weighted(_Entry):
    """Rows and the evidence behind each of them.

    An entry checks its dtypes and shapes when it is built. Its numbers are not read then, because
    that costs a synchronization of a GPU. ``_make`` and ``_replace`` check nothing. An entry
    without any tensor, such as the axes of ``torch.func.vmap``, is refused where it is read.

    Attributes:
        value: Rows ``(*rows, *event)``.
        weight: Evidence ``(*rows)``, finite and at least 0. Weight 0 means that nothing is known
            about the row. The row may hold anything then, NaN included.

    Raises:
        TypeError: If one of both is not a dense floating-point tensor.
        ValueError: If the shape of `weight` is not the leading shape of `value`.

    Example:
        >>> entry = Weighted(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([5.0, 0.0]))
        >>> entry.known
        tensor([[1., 2.],
                [0., 0.]])
    """

    __slots__ = ()

    def __new__(cls, value: Any, weight: Any) -> "Weighted":
        """Make an entry whose parts fit."""
        if isinstance(value, Tensor) or isinstance(weight, Tensor):
            for name, part in (("value", value), ("weight", weight)):
                check.number_tensor(name, part)
            if weight.is_meta != value.is_meta:
                rule = f"be on the device of `value`, {value.device}"
                raise check.wrong("weight", rule, weight.device)
            check.first_axes("weight", weight, "`value`", value)
        return super().__new__(cls, value, weight)

    @property
    def rows(self) -> Bool[Tensor, "..."]:
        """Whether each row is known, with axes of size 1 behind, to broadcast over the value."""
        return self.per_row(self.weight > 0)

    @property
    def known(self) -> Float[Tensor, "..."]:
        """The value, with zeros in all rows of weight 0."""
        return torch.where(self.rows, self.value, 0.0)

    def per_row(self, rows: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
        """Append axes to a tensor (*rows), so that it broadcasts over the value."""
        return per_row(rows, self.value)


def per_row(rows: Shaped[Tensor, "..."], value: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
    """Append axes to a tensor (*rows), so that it broadcasts over `value` (*rows, *event)."""
    return rows.reshape(rows.shape + (1,) * (value.ndim - rows.ndim))


Payload = Mapping[str, Weighted]
"""Entries by name: the message of a client to the server."""

Message = Mapping[str, Tensor | Weighted]
"""Tensors or entries by name: anything that is sent."""


class _Stream(NamedTuple):
    layers: Mapping[int, Float[Tensor, "*batch prompts dim"]]
    replace: bool = False


class PromptStream(_Stream):
    """Prompt tokens that enter a transformer. Several streams can enter together.

    A stream checks its layers, dtypes and axes when it is built. A trunk checks the width.

    Attributes:
        layers: Tokens by the 0-based layer before which they enter: ``(prompts, dim)`` for all
            images, or ``(batch, prompts, dim)`` for each image.
        replace: Whether new tokens replace the stream's old ones (VPT-deep). If False, the old
            tokens stay.

    Raises:
        TypeError: If `layers` do not map integers to floating-point tensors.
        ValueError: If a layer is negative, or tokens have another number of axes.

    Example:
        >>> stream = PromptStream({0: torch.zeros(8, 48)}, replace=True)
        >>> stream.layers[0].shape
        torch.Size([8, 48])
    """

    __slots__ = ()

    def __new__(cls, layers: Any, replace: bool = False) -> "PromptStream":
        """Make a stream of tokens by layer."""
        check.instance("layers", layers, Mapping, "map layers to tokens")
        if any(isinstance(tokens, Tensor) for tokens in layers.values()):
            check.flag("replace", replace)
            for layer, tokens in layers.items():
                check.count("layers", layer, at_least=0)
                check.number_tensor(f"layers[{layer}]", tokens)
                rule = "have shape (prompts, dim), with axes in front if they differ"
                check.require(tokens.ndim >= 2, f"layers[{layer}]", rule, tokens)
        return super().__new__(cls, layers, replace)


class Encoded(NamedTuple):
    """Output of a prompted backbone.

    Attributes:
        pooled: Features ``(batch, features)``, pooled as the backbone does before its classifier,
            with prompt tokens left out. ``trunk.num_features`` is their width.
        streams: For each stream, its tokens ``(batch, tokens, dim)`` after the last block and the
            last norm.
        patches: Tokens ``(batch, patches, dim)`` of the patches after the last block and the last
            norm, row by row from the top left, for example for segmentation.
    """

    pooled: Float[Tensor, "batch features"]
    streams: tuple[Float[Tensor, "batch tokens dim"], ...]
    patches: Float[Tensor, "batch patches dim"]


class _Names(NamedTuple):
    start: Float[Tensor, "start dim"]
    tokens: Float[Tensor, "classes length dim"]
    length: tuple[int, ...]
    pad: Float[Tensor, " dim"]
    context_length: int
    causal: bool
    names: tuple[str, ...]
    ending: tuple[int, ...]


class ClassNames(_Names):
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

    Raises:
        TypeError: If a part is of another kind, or an embedding is not a floating-point tensor.
        ValueError: If widths, devices or the numbers of classes differ.
    """

    __slots__ = ()

    def __new__(cls, *parts: Any, **named: Any) -> "ClassNames":
        """Make class names whose parts fit."""
        made = super().__new__(cls, *parts, **named)
        if any(isinstance(part, Tensor) for part in (made.start, made.tokens, made.pad)):
            made._check()
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> "ClassNames":
        return self  # embeddings are frozen, and copies of a model share them

    def _check(self) -> None:
        classes = self.tokens
        for field, ndim in (("tokens", 3), ("start", 2), ("pad", 1)):
            part = getattr(self, field)
            rule = f"be a floating-point tensor with {ndim} axes"
            check.number_tensor(field, part, rule, ndim=ndim, read=True)
            if part.shape[-1:] != classes.shape[-1:] or part.device != classes.device:
                raise check.wrong(field, "be as wide and where `tokens` is", check.kind(part))
        check.count("context_length", self.context_length)
        check.flag("causal", self.causal)
        for field, kinds in (("length", Integral), ("ending", Integral), ("names", str)):
            parts = getattr(self, field)
            several = isinstance(parts, tuple) and len(parts) == len(classes)
            if not several or not all(isinstance(part, kinds) for part in parts):
                raise check.wrong(field, f"be a tuple for {len(classes)} names", check.kind(parts))
            check.require(kinds is str or min(parts) >= 0, field, "be at least 0", min(parts))

    def select(self, indices: Sequence[int] | Int[Tensor, " chosen"]) -> "ClassNames":
        """Return the names of some classes, in the order of `indices`.

        Args:
            indices: Numbers of the classes, at least one. A class may occur several times.

        Raises:
            IndexError: If a number is not that of a class.
            TypeError: If numbers are floats or a mask.

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
        numbers = torch.as_tensor(indices)
        whole = numbers.dtype != torch.bool and not numbers.is_floating_point()
        check.require(whole or not len(numbers), "indices", "be integers", numbers.dtype, TypeError)
        chosen = numbers.tolist()
        wrong = [index for index in chosen if not 0 <= index < len(self.names)]
        rule = f"contain at least one number, all in [0, {len(self.names)})"
        check.require(chosen and not wrong, "indices", rule, wrong[:5] or "none", IndexError)
        length = tuple(self.length[index] for index in chosen)
        return self._replace(
            tokens=self.tokens[torch.tensor(chosen, device="cpu"), : max(length)],
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


@short_types
class Coupling(NamedTuple):
    """Transport plans, the problems that they solve, and their accuracy.

    Attributes:
        plan: Plans ``(*batch, rows, columns)``, without a graph.
        error: Largest relative violation ``(*batch)`` of either marginal. Of capped rows, only the
            excess counts. If marginals are relaxed, the violation of their optimality conditions.
        iterations: Number of iterations ``(*batch)`` of each problem.
        a: Masses of the rows ``(*#batch, rows)``, as the solver got them.
        b: Masses of the columns ``(*#batch, columns)``, as the solver got them.
        epsilon: Weight of the entropy. 0 for a linear program, infinity if the plan ignores the
            cost.
        duals: Dual variables ``(*batch, columns)``, from which ``transport.plan_from_duals``
            computes the plan again. None if the solver has none.
        tolerance: Error at which the solver counts a problem as solved, at least the resolution of
            the plan's dtype. Logits of plans with ten times this error are warned of. If None, they
            are not.
        rho: Weights of the Kullback-Leibler penalties of rows and of columns, as in
            ``transport.unbalanced``. None if marginals are constraints.
    """

    plan: Float[Tensor, "*batch rows columns"]
    error: Float[Tensor, "*batch"]
    iterations: Int[Tensor, "*batch"]
    a: Float[Tensor, "*#batch rows"]
    b: Float[Tensor, "*#batch columns"]
    epsilon: float
    duals: Float[Tensor, "*batch columns"] | None = None
    tolerance: float | None = None
    rho: tuple[float, float] | None = None


class Selection(NamedTuple):
    """The key that was selected for each query.

    Attributes:
        indices: Rows ``(batch,)`` of the selected keys.
        similarity: Cosine ``(batch,)`` between each query and its key.
    """

    indices: Int[Tensor, " batch"]
    similarity: Float[Tensor, " batch"]
