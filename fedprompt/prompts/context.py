"""CLIP's learnable text contexts: tokens around a class name."""

import torch
import torch.nn as nn
from jaxtyping import Float
from torch import Tensor

from fedprompt._checks import check_count, check_initial_generator, kind, wrong_type, wrong_value
from fedprompt.interfaces import ClassNames, PromptedText


class ContextPrompts(nn.Module):
    r"""Learnable contexts of a class name (CoOp): token embeddings in the place of "a photo of a".

    Initial values are CoOp's, :math:`N(0, 0.02^2)`, or those of words. The parameter does not depend on class names: the same context
    serves other classes, unless it is class-specific. FedOTP uses two of these modules, a shared one and a private one.

    Args:
        dim: Width of a token, ``tower.dim``.
        num_contexts: Number of contexts. Contexts that start equal stay equal where the loss treats them alike, so give `init` to a
            single one only.
        length: Number of tokens of a context (CoOp's ``n_ctx``); ignored when `init` is given.
        num_classes: Number of classes, for class-specific contexts. If None, all classes share them.
        init: Initial values (length, dim) of every context, such as ``tower.words("a photo of a")``.
        generator: Generator of the initial values. If None, torch's global one.

    Attributes:
        context: Parameter (contexts, length, dim), class-specific (contexts, classes, length, dim); at least float32.

    Raises:
        TypeError: If a number is not an integer, or `init` not a floating-point tensor.
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
        check_count("dim", dim)
        check_count("num_contexts", num_contexts)
        check_count("length", length, at_least=0)
        if num_classes is not None:
            check_count("num_classes", num_classes)
        check_initial_generator(generator)
        rows = (num_contexts,) if num_classes is None else (num_contexts, num_classes)
        if init is None:
            device = None if generator is None else generator.device
            values = torch.empty((*rows, length, dim), device=device).normal_(
                0, 0.02, generator=generator
            )
        else:
            values = _checked_init(init, dim).repeat(*rows, 1, 1)
        self.context = nn.Parameter(values)

    def forward(self) -> Float[Tensor, "contexts *classes length dim"]:
        """Return the contexts."""
        return self.context

    def extra_repr(self) -> str:
        """Show the sizes."""
        num_contexts, *classes, length, dim = self.context.shape
        return f"{dim}, num_contexts={num_contexts}, length={length}" + "".join(
            f", num_classes={number}" for number in classes
        )


def prompted_text(
    context: Float[Tensor, "*axes length dim"],
    names: ClassNames,
    *,
    name_position: int | None = None,
    class_specific: bool = False,
    per_sample: bool = False,
) -> PromptedText:
    """Write one sentence for each context and class: start of text, context and class name, full stop, end of text.

    Axes of a context are claimed, never guessed from sizes: 7 samples with 10 contexts each have the shape of 7 contexts for each of 10
    classes.

    Pure tensor operations: gradients reach the context, and ``torch.compile`` and ``torch.func.vmap`` go through.

    Args:
        context: (contexts, length, dim). Concatenate the modules of a client, as in ``torch.cat([shared(), private()])``.
        names: From ``tower.class_names``.
        name_position: Number of context tokens before the class name, at most the length of the context. If None, all of them: a causal
            tower then runs the longest common part once. CoOp's "middle" is ``length // 2``, its "front" is 0.
        class_specific: Whether each class has contexts of its own; `context` is then (contexts, classes, length, dim).
        per_sample: Whether each sample has contexts of its own, as those of ``fedprompt.per_sample``; `context` then has an axis for
            them in front, which may be empty.

    Returns:
        The sentences. The tokens that all classes share, the start and the part of a shared context before the name,
        are kept apart from the rest.

    Raises:
        TypeError: If `context` is not a floating-point tensor or `names` not a :class:`ClassNames`.
        ValueError: If the shapes do not fit, or a name is too long for the tower with such a context.

    Example:
        >>> names = ClassNames(  # as tower.class_names(["cat", "polar bear"]) returns
        ...     start=torch.zeros(1, 8), tokens=torch.zeros(2, 4, 8), length=torch.tensor([3, 4]), pad=torch.zeros(8),
        ...     context_length=77, causal=True, names=("cat", "polar bear"), ending=torch.tensor([2, 2]))
        >>> text = prompted_text(ContextPrompts(8, length=16)(), names)
        >>> text.prefix.shape, text.suffix.shape, text.end
        (torch.Size([1, 17, 8]), torch.Size([1, 2, 4, 8]), tensor([19, 20]))
    """
    _check_context(context, names, class_specific, per_sample)
    num_classes, length = len(names.names), context.shape[-2]
    axes = context.shape[:-3] if class_specific else context.shape[:-2]
    before = length if name_position is None else name_position
    check_count("name_position", before, at_least=0)
    if before > length:
        raise wrong_value("name_position", f"be at most the length {length} of the context", before)
    start = names.start.expand(*axes, -1, -1)
    leading, trailing = context[..., :before, :], context[..., before:, :]
    if class_specific:
        prefix, suffix = start, torch.cat([leading, _behind_names(trailing, names)], -2)
    else:
        prefix = torch.cat([start, leading], -2)
        suffix = _behind_names(trailing[..., None, :, :].expand(*axes, num_classes, -1, -1), names)
    if not names.causal:
        missing = names.context_length - prefix.shape[-2] - suffix.shape[-2]
        suffix = torch.cat([suffix, names.pad.expand(*axes, num_classes, missing, -1)], -2)
    return PromptedText(prefix, suffix, names.length + (len(names.start) + length - 1))


def _behind_names(trailing: Tensor, names: ClassNames) -> Tensor:
    """Put context (..., classes, length, dim) between each name and the tokens that close its sentence."""
    words = names.tokens.expand(*trailing.shape[:-3], -1, -1, -1)
    num_words, num_trailing = words.shape[-2], trailing.shape[-2]
    if num_trailing == 0:
        return words
    position = torch.arange(num_words + num_trailing, device=words.device)
    past_name = position - (names.length - names.ending)[:, None]
    from_words = torch.where(past_name < 0, position, position - num_trailing)
    source = torch.where(
        (past_name >= 0) & (past_name < num_trailing), num_words + past_name, from_words
    )
    classes = torch.arange(source.shape[0], device=words.device)[:, None]
    return torch.cat([words, trailing], -2)[..., classes, source, :]


def _checked_init(init: object, dim: int) -> Tensor:
    if not isinstance(init, Tensor) or not init.is_floating_point():
        raise wrong_type("init", "be a floating-point tensor of shape (length, dim)", kind(init))
    if init.ndim != 2 or init.shape[1] != dim:
        raise wrong_value("init", f"have shape (length, {dim})", tuple(init.shape))
    return init.detach().to(torch.promote_types(init.dtype, torch.float32))


def _check_context(
    context: object, names: object, class_specific: object, per_sample: object
) -> None:
    if not isinstance(names, ClassNames):
        raise wrong_type("names", "be ClassNames, from tower.class_names", kind(names))
    if not isinstance(context, Tensor) or not context.is_floating_point():
        raise wrong_type("context", "be a floating-point tensor", kind(context))
    for argument, claim in (("class_specific", class_specific), ("per_sample", per_sample)):
        if not isinstance(claim, bool):
            raise wrong_type(argument, "be True or False", kind(claim))
    num_classes, longest, dim = names.tokens.shape
    axes = ["batch"] * bool(per_sample) + ["contexts"] + [str(num_classes)] * bool(class_specific)
    fits = context.ndim == len(axes) + 2 and context.shape[-1] == dim
    if not fits or (class_specific and context.shape[-3] != num_classes):
        unclaimed = ["`per_sample=True`"] * (not per_sample) + ["`class_specific=True`"] * (
            not class_specific
        )
        more = f"; {' or '.join(unclaimed)} claims one axis more" if unclaimed else ""
        raise wrong_value(
            "context", f"have shape ({', '.join(axes)}, length, {dim}){more}", tuple(context.shape)
        )
    room = names.context_length - len(names.start) - context.shape[-2]
    if longest > room:
        name = names.names[int(names.length.argmax())]
        rule = f"have at most {room} tokens each, so that {context.shape[-2]} of context fit into {names.context_length}"
        raise wrong_value(
            "names", rule, f"{name!r} with {longest}, full stop and end of text included"
        )
