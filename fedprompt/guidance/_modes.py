"""Two torch function modes: which attention draws dropout masks, and which products of dual numbers are worth computing."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

Function = Callable[..., Any]
make_dual: Function = forward_ad.make_dual  # untyped in PyTorch
unpack_dual: Function = forward_ad.unpack_dual
DROPOUT_POSITION = {F.scaled_dot_product_attention: 4, F.multi_head_attention_forward: 10}
WITH_BIAS = (F.linear, torch.conv1d, torch.conv2d, torch.conv3d)
PRODUCTS = (*WITH_BIAS, torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.mm, Tensor.bmm)


class ReplayableAttention(TorchFunctionMode):
    """Where attention drops weights out, let it draw the masks that the tangent pass can draw again; elsewhere the fastest kernel runs."""

    def __torch_function__(self, func: Function, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        position = DROPOUT_POSITION.get(func)
        if position is not None and (args[position] if len(args) > position else kwargs.get("dropout_p", 0.0)) > 0:
            with sdpa_kernel(SDPBackend.MATH):
                return func(*args, **kwargs)
        return func(*args, **kwargs)


class ForwardRules(TorchFunctionMode):
    """Three rules that dual numbers lack.

    A product of which only one side has a tangent costs one further product; PyTorch multiplies the other side's zeros, too. And what a
    model computes with gradients turned off is a constant here, as it is in a backward pass. An operator that loses tangents is refused.
    """

    def __torch_function__(self, func: Function, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch._C._set_grad_enabled:
            torch._C._set_fwd_grad_enabled(args[0])
        if func in PRODUCTS and len(args) > 1 and "bias" not in kwargs:
            tangents = [tangent_of(argument) for argument in args[:2]]
            if (tangents[0] is None) != (tangents[1] is None):
                return _one_sided(func, tangents, args, kwargs)
        result = func(*args, **kwargs)
        if isinstance(func, OpOverload | OpOverloadPacket):
            _check_kept(func, [*args, *kwargs.values()], result)
        return result


def tangent_of(thing: object) -> Tensor | None:
    """The tangent of a dual tensor; None for everything else."""
    if not isinstance(thing, Tensor):
        return None
    tangent: Tensor | None = unpack_dual(thing).tangent
    return tangent


def _check_kept(func: Function, arguments: list[object], result: object) -> None:
    """Refuse operators of other libraries that drop tangents: PyTorch runs those without a word."""
    results = result if isinstance(result, tuple | list) else (result,)
    kept = [tangent_of(one) is not None for one in results if isinstance(one, Tensor) and one.is_floating_point()]
    if kept and not any(kept) and any(tangent_of(one) is not None for one in arguments):
        raise NotImplementedError(f"{func} drops tangents without saying so")


def _one_sided(func: Function, tangents: list[Tensor | None], args: tuple[Any, ...], kwargs: Any) -> Tensor:
    """The product of a dual and a plain tensor: linear in the dual, so its tangent is the same product of the tangent."""
    plain = [unpack_dual(argument).primal if isinstance(argument, Tensor) else argument for argument in args]
    moved = [*(own if tangent is None else tangent for own, tangent in zip(plain, tangents, strict=False)), *plain[2:]]
    if func in WITH_BIAS and len(args) > 2:
        moved[2] = tangent_of(args[2])
    product: Tensor = make_dual(func(*plain, **kwargs), func(*moved, **kwargs))
    return product
