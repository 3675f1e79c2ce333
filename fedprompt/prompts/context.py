"""Learnable text contexts for CLIP: token embeddings around a class name."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

import fedprompt._nouns as nouns
import fedprompt._refusals as check
from fedprompt._conversions import single
from fedprompt._random_streams import device_of
from fedprompt.interfaces import ClassNames, PromptedText
from fedprompt.prompts._streams import normal_values


class ContextPrompts(nn.Module):
    r"""Learnable contexts that replace the words "a photo of a" around a class name (CoOp).

    You can use the same contexts with other classes, unless they are class-specific. FedOTP uses
    two of these modules: one is shared by all clients, the other is private.

    Args:
        dim: Width of a token, ``tower.dim``.
        num_contexts: Number of contexts. Contexts with equal initial values stay equal if the
            loss treats them alike, so combine `init` with a single context only.
        length: Number of tokens of each context (CoOp's ``n_ctx``). Ignored if `init` is given.
        num_classes: Number of classes, for class-specific contexts. If None, all classes share
            the contexts.
        init: Initial values (length, dim) of every context, such as
            ``tower.words("a photo of a")``. If None, values are drawn from CoOp's
            :math:`N(0, 0.02^2)`.
        generator: Generator of the initial values. If None, torch's global generator is used.

    Attributes:
        context: Parameter (contexts, length, dim), or (contexts, classes, length, dim) if
            class-specific. Its dtype is at least float32.

    Raises:
        ValueError: If a number is out of range, or `init` does not have shape (length, dim).

    Example:
        >>> context = ContextPrompts(8, num_contexts=2, length=4)
        >>> context().shape
        torch.Size([2, 4, 8])
        >>> list(context.state_dict())
        ['context']

    References:
        Zhou et al., "Learning to Prompt for Vision-Language Models", IJCV 2022.
    """

    context: nn.Parameter

    def __init__(
        self,
        dim: int,
        *,
        num_contexts: int = 1,
        length: int = 16,
        num_classes: int | None = None,
        init: Float[Tensor, "length dim"] | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        check.count("dim", dim)
        check.count("num_contexts", num_contexts)
        check.count("length", length, at_least=0)
        check.optional(check.count, "num_classes", num_classes)
        rows = (num_contexts,) if num_classes is None else (num_contexts, num_classes)
        if init is None:
            values = normal_values((*rows, length, dim), 0.02, generator)
        else:
            device_of(generator)
            values = _start(init, dim).repeat(*rows, 1, 1)
        self.context = nn.Parameter(values)

    def forward(self) -> Float[Tensor, "contexts *classes length dim"]:
        """Return the contexts."""
        return self.context

    def extra_repr(self) -> str:
        """Show the sizes."""
        num_contexts, *classes, length, dim = self.context.shape
        sizes = f"{dim}, num_contexts={num_contexts}, length={length}"
        return sizes + "".join(f", num_classes={number}" for number in classes)


def prompted_text(
    context: Float[Tensor, "*axes length dim"],
    names: ClassNames,
    *,
    name_position: int | None = None,
    class_specific: bool = False,
    per_sample: bool = False,
) -> PromptedText:
    """Write one sentence for each context and class: start token, context, name, full stop, end.

    The two flags declare the axes of a context, because they cannot be inferred from its shape.

    The function is differentiable with respect to the context, and supports ``torch.compile`` and
    ``torch.func.vmap``.

    Args:
        context: Contexts (contexts, length, dim). To combine the modules of a client, use
            ``torch.cat([shared(), private()])``.
        names: Class names from ``tower.class_names``.
        name_position: Number of context tokens before the class name, at most the length of the
            context. CoOp's "middle" is ``length // 2`` and its "front" is 0. If None, the whole
            context comes before the name, and a causal tower encodes it once for many classes.
        class_specific: Whether each class has contexts. If True, `context` has shape
            (contexts, classes, length, dim).
        per_sample: Whether each sample has contexts, as :func:`fedprompt.privacy.per_sample`
            makes them. If True, `context` has one more axis in front, which may be empty.

    Returns:
        The sentences. The start token and the tokens of a shared context before the name are the
        same for all classes, so they are stored once.

    Raises:
        ValueError: If the shapes do not match, or a name is too long for the tower with such a
            context.

    Example:
        >>> names = ClassNames(  # the result of tower.class_names(["cat", "polar bear"])
        ...     start=torch.zeros(1, 8),
        ...     tokens=torch.zeros(2, 4, 8),
        ...     length=(3, 4),
        ...     pad=torch.zeros(8),
        ...     context_length=77,
        ...     causal=True,
        ...     names=("cat", "polar bear"),
        ...     ending=(2, 2),
        ... )
        >>> text = prompted_text(ContextPrompts(8, length=16)(), names)
        >>> text.prefix.shape, text.suffix.shape, text.end
        (torch.Size([1, 17, 8]), torch.Size([1, 2, 4, 8]), (19, 20))
    """
    _check_context(context, names, class_specific, per_sample)
    num_classes = len(names.names)
    length = context.shape[-2]
    axes = context.shape[:-3] if class_specific else context.shape[:-2]
    before = length if name_position is None else name_position
    check.count("name_position", before, at_least=0, at_most=length, of="the length of the context")
    start = names.start.expand(*axes, -1, -1)
    leading, trailing = context[..., :before, :], context[..., before:, :]
    if class_specific:
        prefix = start
        suffix = torch.cat([leading, _after_names(trailing, names)], -2)
    else:
        prefix = torch.cat([start, leading], -2)
        suffix = _after_names(trailing[..., None, :, :].expand(*axes, num_classes, -1, -1), names)
    if not names.causal:
        missing = names.context_length - prefix.shape[-2] - suffix.shape[-2]
        suffix = torch.cat([suffix, names.pad.expand(*axes, num_classes, missing, -1)], -2)
    before_words = len(names.start) + length
    return PromptedText(
        prefix,
        suffix,
        end=tuple(before_words + number - 1 for number in names.length),
        context=length if before == length and not class_specific else None,
    )


def _after_names(trailing: Tensor, names: ClassNames) -> Tensor:
    """Insert context (..., classes, length, dim) between each name and its closing tokens."""
    words = names.tokens.expand(*trailing.shape[:-3], -1, -1, -1)
    num_classes, num_words, num_trailing = *words.shape[-3:-1], trailing.shape[-2]
    if num_trailing == 0:
        return words
    device = words.device
    ends = [length - ending for length, ending in zip(names.length, names.ending, strict=True)]
    closing = torch.arange(num_words, device=device) >= torch.tensor(ends, device=device)[:, None]
    # A stable sort by 0 for the name, 1 for the context and 2 for the closing tokens.
    order = F.pad(2 * closing, (0, num_trailing), value=1).argsort(stable=True)
    classes = torch.arange(num_classes, device=device)[:, None]
    return torch.cat([words, trailing], -2)[..., classes, order, :]


def _start(init: Tensor, dim: int) -> Tensor:
    shape = "of shape (length, dim), such as tower.words('a photo of a')"
    check.number_tensor("init", init, f"be a floating-point tensor {shape}")
    check.require(init.shape[1:] == (dim,), "init", f"have shape (length, {dim})", init)
    check.finite("init", init)
    return single(init.detach())


def _check_context(
    context: Any, names: ClassNames, class_specific: object, per_sample: object
) -> None:
    nouns.class_names(names)
    check.number_tensor("context", context, read=True)
    flags = {"per_sample": per_sample, "class_specific": class_specific}
    for argument, flag in flags.items():
        check.flag(argument, flag)
    num_classes, longest, dim = names.tokens.shape
    axes = ["batch"] * bool(per_sample) + ["contexts"] + [str(num_classes)] * bool(class_specific)
    fits = context.ndim == len(axes) + 2 and context.shape[-1] == dim
    if not fits or (class_specific and context.shape[-3] != num_classes):
        unset = " or ".join(f"`{argument}=True`" for argument, flag in flags.items() if not flag)
        rule = f"have shape ({', '.join(axes)}, length, {dim})"
        hint = f"; {unset} adds one axis" if unset else ""
        raise check.wrong("context", rule + hint, tuple(context.shape))
    check.same_device("context", context, names.tokens.device, "the device of `names`,")
    length = context.shape[-2]
    available = names.context_length - len(names.start) - length
    # With too long a context, not even names of one token fit.
    rule = f"be shorter, because no name fits into {names.context_length} positions with it"
    check.require(available > min(names.ending), "context", rule, f"one of length {length}")
    if longest > available:
        name = names.names[names.length.index(longest)]
        rule = (
            f"have at most {available} tokens each, so that a context of length {length} "
            f"fits into {names.context_length} positions"
        )
        got = f"{name!r} with {longest} tokens, full stop and end token included"
        raise check.wrong("names", rule, got)
