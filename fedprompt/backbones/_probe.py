"""Probe of a model when its trunk or text tower is made, because a model is more than its class."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

import fedprompt._refusals as check
from fedprompt.backbones._models import classifier, listed

HALF, _STEP = 5e-2, 1e-2
_BOUNDS = dict.fromkeys((torch.float64, torch.float32), 3e-4)  # softmax may be in float32
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_Modules = Sequence[nn.Module]
_PARTS = "because prompts enter between its blocks"


def changes(module: nn.Module) -> list[tuple[str, object]]:
    """Return hooks and replaced methods of an instance, and hooks of all modules."""
    own = [(name, part) for name, part in vars(module).items() if callable(part)]
    found: list[tuple[str, object]] = [pair for pair in own if hasattr(type(module), pair[0])]
    for name in _HOOKS:
        shared = getattr(torch.nn.modules.module, f"_global{name}")
        hooks = (*shared.values(), *getattr(module, name).values())
        found += [(name.strip("_"), hook) for hook in hooks]
    return found


class Probe:
    """Comparison of a model with its trunk or tower, repeated when hooks or methods change.

    Args:
        backbone: Trunk or tower of a frozen `model` in eval mode. Its ``as_a_whole()`` is the
            model's features of one input, and its ``part_by_part(prompts)`` are the features of the
            backbone with the prompts of each layer, or with none.
        name: Name of the backbone in errors.
        argument: Name of the model in errors.
        containers: Modules that are not called, because their parts are.
        parts: Modules that must stay frozen and in eval mode, except for trained parameters and a
            classifier.
    """

    enabled = False

    def __init__(
        self, backbone: Any, name: str, argument: str, containers: _Modules, parts: _Modules
    ) -> None:
        self.backbone, self.name, self.argument = backbone, name, argument
        self.containers = containers
        own = classifier(backbone.model)
        # Read in every forward pass, so stored as flat lists.
        self.modules = [each for part in parts for each in part.modules() if each not in own]
        self.parameters = [each for part in self.modules for each in part.parameters(recurse=False)]
        self.trained: dict[str, nn.Parameter] = {}
        self.seen: object = None

    def begin(self, trained: dict[str, nn.Parameter], *, enabled: bool) -> None:
        """Let some parameters require gradients, and probe the model.

        If weights are on meta, offloaded or sharded, it is probed at the first use.
        """
        chosen = set(trained.values())
        self.parameters = [frozen for frozen in self.parameters if frozen not in chosen]
        own = {each for part in classifier(self.backbone.model) for each in part.parameters()}
        self.trained = {name: each for name, each in trained.items() if each not in own}
        self.enabled = enabled
        weights = self.backbone.model.parameters()
        if not any(part.is_meta or hasattr(part, "placements") for part in weights):
            self._look()

    def look(self, inputs: Tensor) -> None:
        """Require a frozen model, and probe it unless that was done with the same hooks."""
        if torch.compiler.is_compiling():
            return
        rule = "stay in eval mode, as freeze(model) left it"
        fits = not any(module.training for module in self.modules)
        check.require(fits, self.name, rule, "a model in train mode")
        rule = "stay frozen, as freeze(model) left it"
        fits = not any(parameter.requires_grad for parameter in self.parameters)
        check.require(fits, self.name, rule, "a model with parameters that require gradients")
        if not inputs.is_meta:
            self._look()

    def _look(self) -> None:
        if not self.enabled:
            return
        seen = [found for part in self.containers for found in changes(part)]
        if seen == self.seen:
            return
        self.enabled = False  # in the passes of the probe
        try:
            with without_traces(self.backbone.model):
                self._compare()
                self._differentiate()
            self.seen = seen
        finally:
            self.enabled = True

    def _compare(self) -> None:
        with torch.no_grad():
            expected = self._run("run in eval mode", self.backbone.as_a_whole)
            if not isinstance(expected, Tensor):
                raise self._wrong("return one tensor of features", check.kind(expected))
            found = self._run("run part by part", partial(self.backbone.part_by_part, ()))
        if found.shape != expected.shape:
            rule = f"return features of shape {tuple(found.shape)}"
            raise self._wrong(rule, tuple(expected.shape))
        if not expected.isfinite().all():
            raise self._wrong("return finite features", "NaN or infinity")
        if got := apart(found, expected, self._bound()):
            parts = [
                f"{type(part).__name__}.{n}" for part in self.containers for n, _ in changes(part)
            ]
            where = f"from {listed(parts)}" if parts else "from it"
            rule = (
                f"compute part by part what it computes as a whole, {_PARTS}; remove hooks and "
                f"replaced methods {where}, or write a trunk"
            )
            raise self._wrong(rule, got)

    def _differentiate(self) -> None:
        generator = torch.Generator().manual_seed(0)
        weight = next(self.backbone.model.parameters())
        size = self.backbone.depth, 1, self.backbone.dim
        prompts = list(torch.randn(size, generator=generator, device="cpu").to(weight.device))

        def run(prompts: Sequence[Tensor]) -> Tensor:
            found: Tensor = self.backbone.part_by_part(prompts)
            return found

        with_prompts = partial(unreached, run, prompts, self.backbone.model, self.trained)
        broken, unread = self._run("run with prompts", with_prompts)
        rule = "have a backward pass in each layer; load it in float32 or bfloat16"
        if broken:
            raise self._wrong(rule, broken)
        read = "be read by the features; leave out the others"
        check.require(not unread, "trainable", read, listed(unread))

    def _run(self, rule: str, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except Exception as error:  # a model of others raises errors of any type
            got = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise self._wrong(rule, got.rstrip(".")) from error

    def _bound(self) -> float:
        weights = self.backbone.model.parameters()
        dtypes = {weight.dtype for weight in weights if weight.is_floating_point()}
        exact = torch.get_float32_matmul_precision() == "highest"
        return max(_BOUNDS.get(dtype, HALF) if exact else HALF for dtype in dtypes)

    def _wrong(self, rule: str, got: object) -> ValueError:
        return check.wrong(self.argument, f"{rule} (`probe=False` skips this probe)", got)


def apart(found: Tensor, expected: Tensor, bound: float) -> str:
    """Say how two tensors differ by more than a bound, relative to the largest number."""
    if found.shape != expected.shape:
        return f"shape {tuple(found.shape)} in place of {tuple(expected.shape)}"
    if not found.numel():
        return ""
    found, expected = found.detach().double(), expected.detach().to(found.device).double()
    scale, difference = expected.abs().max(), (found - expected).abs().max()
    if difference <= bound * scale:  # not so for NaN
        return ""
    return f"features up to {scale:.2g} that differ by {difference:.2g}"


def unreached(
    run: Callable[[Sequence[Tensor]], Tensor],
    inputs: Sequence[Tensor],
    model: nn.Module,
    trained: Mapping[str, Tensor] = MappingProxyType({}),
) -> tuple[str, list[str]]:
    """Say which inputs (tokens, dim) of a function have no gradient, if it depends on them.

    Behind a saturated softmax, a gradient of zero is right. There, a small step changes nothing.

    Returns:
        Where there is no gradient, empty if there is no such place, and the names of trained
        parameters that the result does not depend on.
    """
    inputs = [each.detach().requires_grad_() for each in inputs]
    every, gradients = [*inputs, *trained.values()], None
    generator = torch.Generator().manual_seed(1)
    draw = partial(torch.randn, generator=generator, device="cpu")
    with torch.enable_grad(), watched(model) as lost:
        result = run(inputs)
    if lost:
        return f"none in {listed(lost)}", []
    if result.requires_grad:
        weights = draw(result.shape).to(result)
        gradients = torch.autograd.grad(result, every, weights, allow_unused=True)
    found = gradients or [None] * len(every)
    for place, (tokens, gradient) in enumerate(zip(inputs, found, strict=False)):
        if gradient is not None and gradient.isnan().any():
            return f"a gradient of NaN for prompts at layer {place}", []
        none = torch.ones_like(tokens[..., :1]) if gradient is None else ~gradient.any(-1, True)
        if none.any():
            step = draw(tokens.shape).to(tokens)
            size = 1 if gradient is None else _STEP * tokens.detach().std()
            moved = [*inputs[:place], tokens + size * none * step, *inputs[place + 1 :]]
            with torch.no_grad():
                after = run(moved)
            if not torch.allclose(after, result.detach(), equal_nan=True):
                return f"no gradient of prompts at layer {place}", []
    named = zip(trained, found[len(inputs) :], strict=True)
    return "", [name for name, gradient in named if gradient is None]


@contextmanager
def watched(model: nn.Module) -> Iterator[list[str]]:
    """Collect the names of modules whose outputs have no graph, though an input has one."""
    lost: list[str] = []

    def hook(name: str, _: object, given: tuple[Any, ...], named: Any, output: Any) -> None:
        outputs = output if isinstance(output, tuple | list) else (output,)
        floats = [each for each in outputs if isinstance(each, Tensor) and each.is_floating_point()]
        inputs = [each for each in (*given, *named.values()) if isinstance(each, Tensor)]
        if floats and not any(map(_has_backward, floats)):
            lost.extend([name] * any(each.requires_grad for each in inputs))

    handles = [
        module.register_forward_hook(partial(hook, name), with_kwargs=True)
        for name, module in model.named_modules()
        # A hook on blocks or attention would change how open_clip's blocks are run.
        if not isinstance(module, nn.MultiheadAttention)
        and not any(next(part.children(), None) for part in module.children())
    ]
    try:
        yield lost
    finally:
        for handle in handles:
            handle.remove()


def _has_backward(output: Tensor) -> bool:
    """Whether a tensor has a graph, also behind a cast of the output of an int8 kernel."""
    if output.grad_fn is None:
        return output.requires_grad
    before = (step for step, _ in output.grad_fn.next_functions if step is not None)
    names = [step.name() for step in (output.grad_fn, *before)]
    return not any(name.endswith("NotImplemented") for name in names)


@contextmanager
def without_traces(model: nn.Module) -> Iterator[None]:
    """Run a model outside of the caller's modes, and restore random streams and buffers."""
    owners = [(owner, dict(owner._buffers)) for owner in model.modules() if owner._buffers]
    buffers = [each for _, named in owners for each in named.values() if each is not None]
    before = [(each, each._version, each.detach().clone()) for each in buffers]
    weight = next(model.parameters())
    devices = [weight.device] if weight.is_cuda else []
    with ExitStack() as modes:
        modes.enter_context(torch.random.fork_rng(devices))
        modes.enter_context(torch.inference_mode(False))  # turns gradients on, too
        modes.enter_context(torch.autocast("cuda" if devices else "cpu", enabled=False))
        compiled = [vars(part).get("_compiled_call_impl") for part in model.modules()]
        if any(compiled) or any("_orig_mod" in part._modules for part in model.modules()):
            modes.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            yield
        finally:
            for owner, named in owners:
                owner._buffers.update(named)
            for buffer, version, value in before:
                if buffer._version != version:
                    buffer.copy_(value)
