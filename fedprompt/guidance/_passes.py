"""Forward passes under other parameters that leave the model and the random streams unchanged."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from fedprompt._random_streams import RandomStreams
from fedprompt._threads import PROCESS_STATE, replacing

Result = TypeVar("Result")

Parameters = Mapping[str, Tensor]
"""Trainable parameters by name, or one tensor of the same shape for each."""

Evaluate = Callable[[Parameters, Callable[[Tensor], Tensor]], Tensor]
"""(parameters, then) -> then(guided)."""
# Position of the dropout probability among the arguments.
DROPOUT_POSITION = {F.scaled_dot_product_attention: 4, F.multi_head_attention_forward: 10}


class Passes:
    """Forward passes of one model under given parameters.

    The model keeps its own parameters, buffers and gradients. Each pass starts from the model's
    buffers and writes to a copy of them. Passes draw from the random streams of the devices of
    the parameters and of `images`.
    """

    def __init__(self, model: nn.Module, images: Iterable[Tensor]) -> None:
        self.model = getattr(model, "_orig_mod", model)  # inside a compiled module
        self.outer = _Outer(self.model)
        self.slots = _slots(self.model)
        self.streams = RandomStreams([*self.parameters().values(), *images])

    def parameters(self) -> dict[str, Tensor]:
        """Return each trainable parameter once, as a constant."""
        parameters = self.model.named_parameters()
        return {name: value.detach() for name, value in parameters if value.requires_grad}

    def run(
        self, parameters: Mapping[str, Tensor], images: object, then: Callable[[Any], Result]
    ) -> Result:
        """Return ``then(model(images))`` under the given parameters.

        Gradient checkpointing runs blocks again during the backward pass, and they must find the
        same parameters. Therefore gradients are computed inside `then`.
        """
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        given = {**buffers, **parameters}
        placed = {slot: value for name, value in given.items() for slot in self.slots[name]}
        result: Result = functional_call(self.outer, placed, (images, then), tie_weights=False)
        return result


@contextmanager
def passes_alone(model: nn.Module, images: Iterable[Tensor]) -> Iterator[Passes]:
    """Return the passes of a model, while no other thread makes passes. Restore random streams."""
    with replacing(model), PROCESS_STATE:
        passes = Passes(model, images)
        with passes.streams.restored():
            yield passes


class _Outer(nn.Module):
    """A model and a function of its outputs, as one module."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: object, then: Callable[[Any], Result]) -> Result:
        return then(self.model(images))


def _slots(model: nn.Module) -> dict[str, list[str]]:
    """Map the first name of each parameter and buffer to all its places inside :class:`_Outer`.

    A tied tensor is registered in several modules and must be replaced in all of them. A module
    with several names is listed once: ``functional_call`` would otherwise replace its tensors
    twice and afterwards restore the replacement.
    """
    slots = dict[Tensor, list[str]]()
    for prefix, module in model.named_modules(prefix="model"):
        for name, tensor in {**module._parameters, **module._buffers}.items():
            if tensor is not None:
                slots.setdefault(tensor, []).append(f"{prefix}.{name}")
    return {names[0].removeprefix("model."): names for names in slots.values()}


@contextmanager
def differentiable_attention() -> Iterator[None]:
    """Compute attention from operators that forward mode and double backward support.

    Fused kernels and the fast path of ``nn.MultiheadAttention`` are turned off.
    """
    fastpath = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)


class ReplayableAttention(TorchFunctionMode):
    """Attention whose dropout masks are the same under :func:`differentiable_attention`.

    Attention without dropout uses the fastest kernel.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs = kwargs or {}
        dropout = 0.0
        if (position := DROPOUT_POSITION.get(func)) is not None:
            dropout = args[position] if len(args) > position else kwargs.get("dropout_p", 0.0)
        with sdpa_kernel(SDPBackend.MATH) if dropout else nullcontext():
            return func(*args, **kwargs)
