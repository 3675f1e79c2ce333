"""Forward-mode rules that PyTorch lacks, or that cost more in PyTorch."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

Function = Callable[..., Any]
make_dual: Callable[..., Tensor] = forward_ad.make_dual  # untyped in PyTorch
unpack_dual: Callable[..., forward_ad.UnpackedDualTensor] = forward_ad.unpack_dual
WITH_BIAS = (F.linear, torch.conv1d, torch.conv2d, torch.conv3d)
PRODUCTS = (*WITH_BIAS, torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.mm, Tensor.bmm)


class ForwardRules(TorchFunctionMode):
    """Function mode that adds rules for dual numbers.

    PyTorch computes a product of a dual and a plain tensor with the zeros of the plain tensor's
    tangent. Here such a product costs one further product. Attention, and layer normalization with
    frozen parameters, use fewer passes over memory than PyTorch's own rules.

    Values that a model computes with gradients turned off are constants, as in a backward pass.
    Operators that silently drop tangents are refused.
    """

    def __torch_function__(
        self, func: Function, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch._C._set_grad_enabled:
            torch._C._set_fwd_grad_enabled(args[0])
        if func in PRODUCTS and len(args) > 1 and "bias" not in kwargs:
            tangents = [tangent_of(argument) for argument in args[:2]]
            if (tangents[0] is None) != (tangents[1] is None):
                return _one_sided(func, tangents, args, kwargs)
        rule = RULES.get(func)
        result = rule(*args, **kwargs) if rule is not None else None
        if result is not None:
            return result
        result = func(*args, **kwargs)
        if isinstance(func, OpOverload | OpOverloadPacket):
            _check_tangents(func, [*args, *kwargs.values()], result)
        return result


def tangent_of(thing: object) -> Tensor | None:
    """Return the tangent of a dual tensor, and None for everything else."""
    return unpack_dual(thing).tangent if isinstance(thing, Tensor) else None


def _check_tangents(func: Function, arguments: list[object], result: object) -> None:
    """Refuse operators of other libraries that drop tangents, which PyTorch runs silently."""
    results = result if isinstance(result, tuple | list) else (result,)
    floating = [one for one in results if isinstance(one, Tensor) and one.is_floating_point()]
    lost = floating and all(tangent_of(one) is None for one in floating)
    if lost and any(tangent_of(one) is not None for one in arguments):
        raise NotImplementedError(f"{func} silently drops tangents")


def _one_sided(
    func: Function, tangents: list[Tensor | None], args: tuple[Any, ...], kwargs: Any
) -> Tensor:
    """Multiply a dual and a plain tensor. The tangent is the same product of the tangent."""
    plain = [
        unpack_dual(argument).primal if isinstance(argument, Tensor) else argument
        for argument in args
    ]
    pairs = zip(plain, tangents, strict=False)
    moved = [value if tangent is None else tangent for value, tangent in pairs] + plain[2:]
    if func in WITH_BIAS and len(args) > 2:
        moved[2] = tangent_of(args[2])
    return make_dual(func(*plain, **kwargs), func(*moved, **kwargs))


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **kwargs: Any,
) -> Tensor | None:
    r"""Compute plain attention of dual tensors in four products.

    The tangent of :math:`O = PV` is :math:`(P \circ \dot S) V + P \dot V - r \circ O`, where r are
    the row sums of :math:`P \circ \dot S`. Return None if PyTorch's own rule is needed.
    """
    tangents = [
        tangent for argument in (query, key, value) if (tangent := tangent_of(argument)) is not None
    ]
    special = attn_mask is not None or dropout_p != 0 or is_causal or kwargs.get("enable_gqa")
    if special or len(tangents) < 3 or not _computes_as_is(query):
        return None
    query, key, value = (unpack_dual(argument).primal for argument in (query, key, value))
    scale = query.shape[-1] ** -0.5 if kwargs.get("scale") is None else kwargs["scale"]
    with torch.no_grad():
        query, query_moved = query * scale, tangents[0] * scale
        weights = (query @ key.mT).softmax(-1)
        moved = torch.cat([query_moved, query], -1) @ torch.cat([key, tangents[1]], -1).mT
        moved *= weights
        output, tangent = (weights @ torch.cat([value, tangents[2]], -1)).chunk(2, -1)
        tangent = tangent + moved @ value - moved.sum(-1, keepdim=True) * output
    return make_dual(output.contiguous(), tangent)


def _frozen_layer_norm(
    input: Tensor,
    normalized_shape: Iterable[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor | None:
    """Apply layer normalization with constant weight and bias to a dual tensor.

    Without the weight, the Jacobian is symmetric, so the backward kernel computes the tangent.
    Return None if PyTorch's own rule is needed.
    """
    tangent = tangent_of(input)
    is_frozen = tangent_of(weight) is None and tangent_of(bias) is None
    if tangent is None or not is_frozen or not _computes_as_is(input):
        return None
    input = unpack_dual(input).primal
    shape = list(normalized_shape)
    with torch.no_grad():
        output, mean, deviation = torch.native_layer_norm(input, shape, weight, bias, eps)
        moved, *_ = torch.ops.aten.native_layer_norm_backward(
            tangent, input, shape, mean, deviation, None, None, [True, False, False]
        )
        tangent = moved if weight is None else moved * weight
    return make_dual(output, tangent)


def _computes_as_is(tensor: Tensor) -> bool:
    """Whether an operator computes in the dtype of its inputs."""
    autocast = torch.is_autocast_enabled(tensor.device.type)
    return tensor.dtype in (torch.float32, torch.float64) and not autocast


RULES: dict[Function, Function] = {
    F.scaled_dot_product_attention: _attention,
    F.layer_norm: _frozen_layer_norm,
}
