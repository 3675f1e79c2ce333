"""Nouns: the values that components exchange."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor


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
        if len(numbers) and (numbers.dtype == torch.bool or numbers.is_floating_point()):
            raise TypeError(f"`indices` must be integers; got {numbers.dtype}.")
        chosen = numbers.tolist()
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
