"""A check that the outputs of a sample do not depend on the other samples of its batch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils._pytree import tree_leaves

import fedprompt._refusals as check
from fedprompt._conversions import widened
from fedprompt._random_streams import RandomStreams

_Model = Callable[..., Any]
_Order = Sequence[int]
_RULE = "compute the outputs of each sample from that sample alone"


def check_independence(model: _Model, batch: Tensor | Sequence[Tensor]) -> None:
    """Check that a sample's outputs do not change when other samples of the batch change.

    Only then does :func:`per_sample` give gradients that depend on one sample each. It recognizes
    normalization layers that mix samples, but not ``x - x.mean(0)`` or ``F.batch_norm`` in your
    modules. Call this function once, before training, with the mode (``train()`` or ``eval()``) of
    the training.

    Each sample in turn is replaced by another one of the batch. Then the first sample is left out,
    which shows outputs that depend on the size of the batch. Every pass starts with the same random
    numbers, so dropout does not raise an error. If the model draws random numbers, no sample is
    left out, because masks would differ.

    A dependence must be visible in the outputs. Outputs multiplied by weights that are still 0, or
    hooks that change gradients, may hide it. Differences of a few units in the last place of the
    largest output are ignored.

    Buffers of a module and PyTorch's random streams are unchanged afterwards. Gradients are not
    computed.

    Args:
        model: Module, or function of a batch that calls modules. Pass the model itself, not the
            copies of :func:`per_sample`. Its outputs are tensors (batch, ...), alone or in tuples
            and dicts.
        batch: Tensor (batch, ...), or several, which are passed as positional arguments. The
            samples must differ. Eight are enough: the model runs three times, and once more for
            each sample.

    Raises:
        ValueError: If outputs of a sample depend on another sample, or on the size of the batch.
            The error names the samples. If `model` is a module, it also names the first submodule
            with such outputs. Also if the model does not repeat its outputs from the same state of
            PyTorch's random streams.

    Example:
        >>> images = torch.randn(4, 3)
        >>> check_independence(nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2)), images)
        >>> check_independence(lambda images: images - images.mean(0), images)
        Traceback (most recent call last):
        ValueError: `model` must compute the outputs of each sample from that sample alone; got
        outputs of samples [1, 2, 3] that change with sample 0.
    """
    check.function("model", model, "be a module or a function")
    inputs = _inputs_of(batch)
    runs = _Runs(model, inputs)
    order = list(range(len(inputs[0])))
    first = runs.outputs(order)
    rule = "repeat its outputs from the same state of PyTorch's random streams"
    check.require(not _moved(first, runs.outputs(order)), "model", rule, "others in a second pass")
    for sample, other in enumerate(_others(inputs)):
        changed = [*order[:sample], other, *order[sample + 1 :]]
        if moved := [row for row in _moved(first, runs.outputs(changed)) if row != sample]:
            where = runs.first_module(order, changed, sample)
            got = f"outputs of samples {moved[:5]} that change with sample {sample}{where}"
            raise check.wrong("model", _RULE, got)
    if not runs.random:
        fewer = runs.outputs(order[1:])
        if _moved([output[1:] for output in first], fewer, rounding=0.5):
            raise check.wrong("model", _RULE, "outputs that change when sample 0 is left out")


class _Runs:
    """Runs of a model that start from the same random streams and buffers.

    Attributes:
        random: Whether a run has drawn random numbers.
    """

    def __init__(self, model: _Model, inputs: Sequence[Tensor]) -> None:
        self.model = model
        self.inputs = inputs
        self.random = False
        self.root = model if isinstance(model, nn.Module) else nn.Module()
        self.streams = RandomStreams([*self.root.parameters(), *inputs])

    def run(self, order: _Order) -> Any:
        """Run the model on the samples of an order."""
        before = self.streams.states()
        with _buffers_restored(self.root), self.streams.restored():
            result = self.model(*(tensor[list(order)] for tensor in self.inputs))
            after = self.streams.states()
        self.random |= not all(map(torch.equal, before, after))
        return result

    def outputs(self, order: _Order) -> list[Tensor]:
        """Return all tensors of the result."""
        outputs = _tensors(self.run(order))
        for output in outputs:
            rule = f"return tensors (batch={len(order)}, ...)"
            check.require(output.shape[:1] == (len(order),), "model", rule, check.kind(output))
            check.finite("model(batch)", output)
        check.require(outputs, "model", "return tensors (batch, ...)", "none", TypeError)
        return outputs

    def first_module(self, order: _Order, changed: _Order, sample: int) -> str:
        """Name the first submodule with outputs of other samples that differ in two runs."""
        runs = [self._trace(order), self._trace(changed)]
        for (name, module, *outputs), (*_, again) in zip(*runs, strict=False):
            if name and any(row != sample for row in _moved(outputs[0], again)):
                return f", first in module {name!r} ({type(module).__name__})"
        return ""

    def _trace(self, order: _Order) -> list[tuple[str, nn.Module, list[Tensor]]]:
        """Return the outputs (batch, ...) of all submodules, in the order in which they end."""
        calls = list[tuple[str, nn.Module, list[Tensor]]]()
        with ExitStack() as hooks:
            for name, module in self.root.named_modules():

                def record(module: nn.Module, _: Any, result: Any, name: str = name) -> None:
                    rows = [x for x in _tensors(result) if x.shape[:1] == (len(order),)]
                    calls.append((name, module, rows))

                hooks.callback(module.register_forward_hook(record).remove)
            self.run(order)
        return calls


def _tensors(result: object) -> list[Tensor]:
    return [leaf.detach().clone() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def _inputs_of(batch: object) -> list[Tensor]:
    """Require one tensor (batch, ...) or several, with at least two samples."""
    inputs = [batch] if isinstance(batch, Tensor) else batch
    if not isinstance(inputs, list | tuple) or not all(isinstance(x, Tensor) for x in inputs):
        raise check.wrong_type("batch", "be a tensor or a sequence of tensors", check.kind(batch))
    sizes = {tuple(tensor.shape[:1]) for tensor in inputs}
    rule = "have tensors (batch, ...) of one batch of at least 2 samples"
    fits = len(sizes) == 1 and min(sizes) >= (2,)
    check.require(fits, "batch", rule, [tuple(tensor.shape) for tensor in inputs])
    return [tensor.detach() for tensor in inputs]


def _others(inputs: Sequence[Tensor]) -> Iterator[int]:
    """Return for each sample the next one that differs from it."""
    size = len(inputs[0])

    def differs(sample: int, other: int) -> bool:
        return not all(torch.equal(tensor[sample], tensor[other]) for tensor in inputs)

    for sample in range(size):
        following = ((sample + step) % size for step in range(1, size))
        other = next((other for other in following if differs(sample, other)), None)
        if other is None:
            raise check.wrong("batch", "have samples that differ", f"{size} equal ones")
        yield other


def _moved(
    first: Sequence[Tensor], second: Sequence[Tensor], *, rounding: float = 1.0
) -> list[int]:
    """Return the samples whose outputs differ by more than ``8 eps ** rounding`` of the largest."""
    rows = set[int]()
    for one, other in zip(first, second, strict=True):
        if one.shape != other.shape:
            return list(range(len(one)))
        eps = torch.finfo(one.dtype).eps if one.is_floating_point() else 0.0
        one, other = (widened(output[..., None]).flatten(1) for output in (one, other))
        if one.numel():
            allowed = 8 * eps**rounding * one.abs().max()
            rows.update(((one - other).abs() > allowed).any(1).nonzero().flatten().tolist())
    return sorted(rows)


@contextmanager
def _buffers_restored(model: nn.Module) -> Iterator[None]:
    """Restore the buffers of a model, those that the model replaces included."""
    saved = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        for module, name, buffer, value in saved:
            module._buffers[name] = buffer
            if not torch.equal(buffer, value):
                with torch.no_grad():
                    buffer.copy_(value)
