"""Checks of arguments, and the texts of their errors: argument, rule and value."""

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from numbers import Integral
from types import UnionType
from typing import Any, Concatenate, ParamSpec

import numpy as np
import torch
from jaxtyping import Integer
from torch import Tensor, nn

LARGEST_INT = 2**63
"""Integers of PyTorch are below it."""

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
"""Dtypes of integers with all operations; the wider unsigned ones have few."""

NUMBERS = (int, float, np.integer, np.floating)
"""Types of real numbers."""

LONGEST = 60
"""Longest text of a value that an error prints, in characters."""

P = ParamSpec("P")
"""Rule and limits of a check."""


def wrong(argument: str, rule: str, got: object) -> ValueError:
    """Build the error for a value or shape that breaks a rule."""
    return ValueError(f"`{argument}` must {rule}; got {got}.")


def require(
    holds: object, argument: str, rule: str, got: object, error: type[Exception] = ValueError
) -> None:
    """Require a condition. Of a tensor, the error has the shape."""
    if not holds:
        got = tuple(got.shape) if isinstance(got, Tensor | np.ndarray) else got
        raise error(f"`{argument}` must {rule}; got {got}.")


def typed(holds: object, argument: str, rule: str, value: object) -> None:
    """Require a condition of the type of a value."""
    if not holds:
        raise wrong_type(argument, rule, kind(value))


def nothing(found: Sequence[object], argument: str, rule: str) -> None:
    """Require that nothing was found that breaks a rule. The error has the first such thing."""
    if found:
        raise wrong(argument, rule, found[0])


def wrong_type(argument: str, rule: str, got: object) -> TypeError:
    """Build the error for an argument of another type."""
    return TypeError(f"`{argument}` must {rule}; got {got}.")


def kind(thing: object) -> str:
    """Describe an argument: dtype and shape of a tensor or an array, otherwise value and type.

    Of a collection, only type and length are given. A long value is left out.
    """
    if isinstance(thing, Tensor) and thing.is_nested:
        return "a nested tensor"
    if isinstance(thing, Tensor):
        return f"a {str(thing.dtype).removeprefix('torch.')} tensor of shape {tuple(thing.shape)}"
    if isinstance(thing, np.ndarray):
        return f"a {thing.dtype} array of shape {thing.shape}"
    name = type(thing).__name__
    if isinstance(thing, Collection) and not isinstance(thing, str | bytes):
        named = hasattr(thing, "_fields")  # the length of a NamedTuple is that of its type
        return f"a {name}" if named else f"a {name} of length {len(thing)}"
    text = repr(thing)
    short = len(text) <= LONGEST and "\n" not in text
    return f"{text} ({name})" if short else f"a {name}"


def instance(argument: str, value: object, kinds: type | UnionType, rule: str) -> None:
    """Require an argument of one of some types, and not a class, which can satisfy a protocol."""
    if not isinstance(value, kinds) or isinstance(value, type):
        raise wrong_type(argument, rule, kind(value))


def optional(
    required: Callable[Concatenate[str, Any, P], object],
    argument: str,
    value: object,
    *rule: P.args,
    **limits: P.kwargs,
) -> None:
    """Check an argument that may be None."""
    if value is not None:
        required(argument, value, *rule, **limits)


module = partial(instance, kinds=nn.Module, rule="be an nn.Module")
flag = partial(instance, kinds=bool, rule="be True or False")
text = partial(instance, kinds=str, rule="be a string")


def gradients_are_recorded(function: str) -> None:
    """Refuse to run under ``torch.inference_mode``."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"{function} computes gradients, which torch.inference_mode does not record. "
            "Leave the mode first."
        )


def function(
    argument: str, function: Any, rule: str = "be a function", *, of: Sequence[str] = ()
) -> None:
    """Require something that can be called, with the arguments `of` if they are given."""
    typed(callable(function), argument, rule, function)
    if of:
        _takes(argument, function, rule, of)


def _takes(argument: str, function: Any, rule: str, of: Sequence[str]) -> None:
    """Require a signature with room for some arguments."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions of C have none
        return
    try:
        signature.bind(*of)
    except TypeError:
        if "(" not in rule:
            rule = rule.replace("function", f"function ({', '.join(of)})", 1)
        got = f"a function ({', '.join(signature.parameters)})"
        raise wrong_type(argument, rule, got) from None


def some(argument: str, found: object, rule: str) -> None:
    """Require that something was found."""
    require(found, argument, rule, "none")


def names(
    argument: str, things: Any, rule: str = "map names to tensors", *, at_least: int = 0
) -> None:
    """Require a mapping from strings, with a smallest number of names."""
    instance(argument, things, Mapping, rule)
    some(argument, len(things) >= at_least, "hold at least one name")
    if strange := [name for name in things if not isinstance(name, str)]:
        raise wrong_type(argument, "have strings as names", kind(strange[0]))


def some_names(names: Iterable[object]) -> str:
    """List at most five names: a large model has hundreds."""
    listed = sorted(map(str, names))
    return f"{listed[:5]} and {len(listed) - 5} more" if len(listed) > 5 else f"{listed}"


def known(argument: str, given: Iterable[str], names: Collection[str], rule: str) -> None:
    """Require that all names are among some others."""
    if unknown := [name for name in given if name not in names]:
        raise wrong(argument, f"{rule} {some_names(names)}", some_names(unknown))


def sequence(argument: str, things: object, of: str) -> None:
    """Require a sequence other than a text."""
    if isinstance(things, str | bytes) or not isinstance(things, Sequence):
        raise wrong_type(argument, f"be a sequence of {of}", kind(things))


def texts(argument: str, texts: Any, *, at_least: int = 1) -> None:
    """Require a sequence of strings, by default one at least."""
    sequence(argument, texts, "strings")
    some(argument, len(texts) >= at_least, "contain at least one string")
    strange = (place for place, string in enumerate(texts) if not isinstance(string, str))
    if (position := next(strange, None)) is not None:
        text(f"{argument}[{position}]", texts[position])


def pair(argument: str, things: Any, rule: str) -> None:
    """Require a tuple or a list of two things."""
    typed(isinstance(things, tuple | list) and len(things) == 2, argument, rule, things)


def iterable(argument: str, things: object, of: str) -> None:
    """Require an iterable other than a text, and not one mapping or entry in its place."""
    single = isinstance(things, Mapping) or hasattr(things, "_fields")
    if single or isinstance(things, str | bytes) or not isinstance(things, Iterable):
        got = f"one {type(things).__name__}" if single else kind(things)
        raise wrong_type(argument, f"be an iterable of {of}", got)


def count(
    argument: str,
    value: Any,
    *,
    at_least: int = 1,
    at_most: int | None = None,
    of: str = "",
    below: int = LARGEST_INT,
) -> None:
    """Require an integer from `at_least` to `at_most`, the number `of` something."""
    integral = isinstance(value, Integral) and not isinstance(value, bool)
    typed(integral, argument, "be an integer", value)
    require(int(value) >= at_least, argument, f"be at least {at_least}", value)
    require(int(value) < below, argument, f"be below 2**{below.bit_length() - 1}", value)
    if at_most is not None:
        require(int(value) <= at_most, argument, f"be at most {at_most}, {of}", value)


@contextmanager
def located(where: str) -> Iterator[None]:
    """Begin the text of an error with the place where it happened."""
    try:
        yield
    except (TypeError, ValueError) as error:
        refused = ValueError if isinstance(error, ValueError) else TypeError
        raise refused(f"{where}: {error}") from error


def number(
    argument: str,
    value: Any,
    *,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
) -> None:
    """Require a finite real number within the bounds that are given."""
    real = isinstance(value, NUMBERS) and not isinstance(value, bool)
    typed(real, argument, "be a number", value)
    # as a comparison it compiles, for a symbolic float too
    require(-math.inf < value < math.inf, argument, "be finite", value)
    small = not isinstance(value, int) or -LARGEST_INT < value < LARGEST_INT
    require(small, argument, "be a float, or below 2**63 in magnitude", value)
    if above is not None:
        require(value > above, argument, f"be above {above:g}", value)
    if at_least is not None:
        require(value >= at_least, argument, f"be at least {at_least:g}", value)
    if at_most is not None:
        require(value <= at_most, argument, f"be at most {at_most:g}", value)


def values_readable(*tensors: Tensor, sync: bool = True) -> bool:
    """Whether values can be read: not while compiling, nor inside a ``torch.func`` transform.

    Without `sync`, they are read on the CPU only, to avoid a GPU synchronization.
    """
    if torch.compiler.is_compiling():
        return False
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    here = sync or all(tensor.device.type == "cpu" for tensor in tensors)
    return here and not any(map(wrapped, tensors))


def labels(
    argument: str,
    labels: Integer[Tensor, " batch"],
    num_classes: int,
    *,
    size: int | None = None,
    of: str = "",
    sync: bool = True,
) -> None:
    """Require integer class labels in ``[0, num_classes)``, as many as the number `of` something.

    Without `sync`, the range is checked on CPU tensors only, to avoid a GPU synchronization.
    """
    if not isinstance(labels, Tensor) or labels.dtype not in INTEGERS or labels.ndim != 1:
        what = "integers" if isinstance(labels, Tensor) else "a tensor of integers"
        raise wrong_type(argument, f"be {what} of shape (batch,)", kind(labels))
    dense(argument, labels, stored=False)
    if size not in (None, len(labels)):
        raise wrong(argument, f"have one entry for each of {size} {of}", len(labels))
    if labels.numel() == 0 or not values_readable(labels, sync=sync):
        return
    dense(argument, labels)
    lowest, highest = (int(bound) for bound in labels.aminmax())
    got = f"values from {lowest} to {highest}"
    require(lowest >= 0 and highest < num_classes, argument, f"lie in [0, {num_classes})", got)


def divisor(argument: str, value: object) -> None:
    """Require a number by which float32 numbers can be divided."""
    limits = torch.finfo(torch.float32)
    number(argument, value, above=0, at_least=limits.tiny, at_most=limits.max)


def factor(argument: str, value: object, *, above: float | None = None) -> None:
    """Require a factor of at least 0, or above a bound, within the range of float32."""
    number(argument, value, at_least=0, above=above, at_most=torch.finfo(torch.float32).max)


def comparable(argument: str, tensor: Tensor, other: str, like: Tensor) -> None:
    """Require the width and the device of another tensor, and that both or none are float64.

    Other precisions may be mixed.
    """
    if tensor.shape[-1] != like.shape[-1]:
        raise wrong(argument, f"have the width of `{other}`, {like.shape[-1]}", tensor.shape[-1])
    if (tensor.dtype == torch.float64) != (like.dtype == torch.float64):
        raise wrong_type(argument, f"have the dtype of `{other}`, {like.dtype}", tensor.dtype)
    same_device(argument, tensor, like.device, f"the device of `{other}`,")


def number_tensor(
    argument: str,
    tensor: Any,
    rule: str = "be a floating-point tensor",
    *,
    ndim: int | None = None,
    read: bool = False,
) -> None:
    """Require a floating-point tensor that is not sparse; with `read`, finite ones on the CPU."""
    floating = isinstance(tensor, Tensor) and tensor.is_floating_point()
    if not floating or ndim not in (None, tensor.ndim):
        raise wrong_type(argument, rule, kind(tensor))
    dense(argument, tensor, stored=False)
    if read:
        finite(argument, tensor, sync=False)


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor stores each of its numbers: not sparse, quantized, nested or on meta."""
    elsewhere = tensor.is_meta or tensor.is_quantized or tensor.is_nested
    return tensor.layout == torch.strided and not elsewhere


def dense(argument: str, tensor: Tensor, *, stored: bool = True) -> None:
    """Require a tensor that is not sparse or nested and, if `stored`, that has its numbers."""
    if hasattr(tensor, "placements"):
        rule = "be a tensor of this process; gather it first, as full_tensor() does"
        raise wrong_type(argument, rule, "a DTensor, which is sharded")
    if stored and not is_dense(tensor):
        got = f"{tensor.layout} of {tensor.dtype} on {tensor.device}"
        raise wrong_type(argument, "be a dense tensor with numbers", got)
    # A backward pass may not read the layout while compiling.
    if torch.compiler.is_compiling() or (tensor.layout == torch.strided and not tensor.is_nested):
        return
    got = "a nested one" if tensor.is_nested else f"one with layout {tensor.layout}"
    raise wrong_type(argument, "be a dense tensor", got)


def dense_message(argument: str, message: Mapping[str, Any]) -> None:
    """Require that no tensor of a message is sparse or nested."""
    for name, entry in message.items():
        for part in entry if isinstance(entry, tuple) else (entry,):
            if isinstance(part, Tensor):
                dense(f"{argument}[{name!r}]", part, stored=False)


def same_device(
    argument: str,
    tensor: Tensor,
    device: torch.device,
    of: str = "the device",
    *,
    or_cpu: bool = False,
) -> None:
    """Require a tensor on the device `of` something; PyTorch takes indices from the CPU, too."""
    if tensor.device != device and not (or_cpu and tensor.device.type == "cpu"):
        raise wrong(argument, f"be on {of} {device}", tensor.device)


def tensors(argument: str, tensors: Any, *, sync: bool = True, at_least: int = 1) -> None:
    """Require a mapping from names to finite floating-point tensors, by default one at least."""
    names(argument, tensors, at_least=at_least)
    for name, tensor in tensors.items():
        number_tensor(place := f"{argument}[{name!r}]", tensor)
        dense(place, tensor)
        finite(place, tensor, sync=sync)


def images(images: Any) -> None:
    """Require a batch of floating-point images."""
    fits = isinstance(images, Tensor) and images.ndim == 4
    if not fits or not images.is_floating_point():
        got = kind(images) if isinstance(images, Tensor) else f"a {type(images).__name__}"
        rule = "be floating-point of shape (batch, channels, height, width)"
        raise wrong_type("images", rule, got)
    dense("images", images, stored=False)
    finite("images", images, sync=False)


def finite(argument: str, tensor: Tensor, *, sync: bool = True) -> None:
    """Require finite numbers, by one sum and one synchronization.

    Without `sync`, only CPU tensors are checked.
    """
    if not values_readable(tensor, sync=sync):
        return
    dense(argument, tensor)
    if tensor.dtype.itemsize > 1 and bool(tensor.detach().sum().isfinite()):
        return  # floats of one byte have no sum, and finite numbers may have an infinite one
    if broken := int((~torch.isfinite(tensor)).sum()):
        got = f"{broken} entries of {tensor.numel()} that are not"
        raise wrong(argument, "be finite", got)


def nonnegative(argument: str, numbers: Tensor) -> None:
    """Require finite numbers of at least 0."""
    refused = ~(torch.isfinite(numbers) & (numbers >= 0))
    if bool(refused.any()):
        raise wrong(argument, "be finite and at least 0", numbers[refused][0].item())


def shape(argument: str, tensor: Tensor, shape: Sequence[int], of: str = "") -> None:
    """Require a shape, which is that `of` something."""
    if tensor.shape != torch.Size(shape):
        where = f"the shape of {of}" if of else "shape"
        raise wrong(argument, f"have {where} {tuple(shape)}", tuple(tensor.shape))


def first_axes(argument: str, rows: Tensor, of: str, value: Tensor) -> None:
    """Require the sizes of the first axes of a value, as weights of its rows have."""
    if rows.shape != value.shape[: rows.ndim]:
        *others, last = [str(tuple(value.shape[:count])) for count in range(value.ndim + 1)]
        shapes = f"{', '.join(others)} or {last}" if others else last
        rule = f"have shape {shapes}, the first axes of {of}"
        raise wrong(argument, rule, tuple(rows.shape))


def tensor(
    argument: str, tensor: Any, dtype: torch.dtype, sizes: Sequence[int], of: str = ""
) -> None:
    """Require a dtype and a shape, which are those `of` something."""
    if not isinstance(tensor, Tensor) or tensor.dtype != dtype:
        rule = f"be a tensor of {dtype}, as in {of}" if of else f"be a tensor of {dtype}"
        raise wrong_type(argument, rule, kind(tensor))
    dense(argument, tensor, stored=False)
    shape(argument, tensor, sizes, of)
