"""Good calls of the library, recorded while the examples in its docstrings run."""

import ast
import copy
import doctest
import functools
import importlib
import inspect
import pkgutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext, redirect_stdout
from io import StringIO
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

import fedprompt
from fedprompt import samples

INTERNAL = ("product", "_own_tangent")
"""Functions that a rule of guidance passes to the evaluation of the user's model."""

APART = ("fedprompt.methods", "fedprompt.flower", "fedprompt.samples", "fedprompt.interfaces.")


class GoodCall(NamedTuple):
    """A function or another callable, and arguments that it takes."""

    name: str
    function: Callable[..., Any]
    arguments: inspect.BoundArguments

    def copied(self) -> "GoodCall":
        """Copy everything that a call may change."""
        given = (self.function, self.arguments.args, self.arguments.kwargs)
        function, args, kwargs = copy.deepcopy(given)
        return self._replace(function=function, arguments=bound(function, args, kwargs))


def names_of_examples() -> dict[str, object]:
    """Return the names that the examples in docstrings use without importing them."""
    names: dict[str, object] = {"torch": torch, "nn": torch.nn, "np": np, "samples": samples}
    for name in fedprompt.__all__:
        thing = names[name] = getattr(fedprompt, name)
        if isinstance(thing, ModuleType):
            names.update({inner: getattr(thing, inner) for inner in thing.__all__})
    return names


def public_callables() -> dict[str, Callable[..., Any]]:
    """Return the public functions and the classes with code, without nouns and protocols."""
    found = {}
    modules = ["fedprompt", *(f"fedprompt.{module.name}" for module in _public_modules())]
    for module in map(importlib.import_module, modules):
        for name in getattr(module, "__all__", ()):
            thing = getattr(module, name)
            if inspect.isfunction(thing) or (inspect.isclass(thing) and _has_code(thing)):
                found[name_of(thing)] = thing
    return found


def good_calls(modules: tuple[str, ...] = ("",)) -> list[GoodCall]:
    """Record one call of each callable and each choice of arguments, from the examples.

    Args:
        modules: Beginnings of the names of modules, after ``fedprompt.``.
    """
    recorded: dict[tuple[Any, ...], GoodCall] = {}
    record = functools.partial(_record, recorded)
    for test in _examples(modules):
        _run(test.examples, record, test.globs)
    if modules == ("",):
        _run(doctest.DocTestParser().get_examples(MORE), record, {})
    return list(recorded.values())


def name_of(function: Any) -> str:
    """Return the name of a callable, after that of its class."""
    function = getattr(function, "func", function)  # of a partial
    if hasattr(function, "__qualname__"):
        return function.__qualname__
    called = "forward" if isinstance(function, torch.nn.Module) else "__call__"
    return f"{type(function).__qualname__}.{called}"


def bound(function: Callable[..., Any], args: Any, kwargs: Any) -> inspect.BoundArguments:
    """Bind arguments by the names of the parameters."""
    called = function.forward if isinstance(function, torch.nn.Module) else function
    return inspect.signature(called).bind(*args, **kwargs)


def _public_modules() -> Iterator[pkgutil.ModuleInfo]:
    for module in pkgutil.iter_modules(fedprompt.__path__):
        if not (module.name.startswith("_") or f"fedprompt.{module.name}" in APART):
            yield module


def _has_code(thing: type) -> bool:
    return not (hasattr(thing, "_fields") or getattr(thing, "_is_protocol", False))


def _examples(modules: tuple[str, ...]) -> Iterator[doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    for module in pkgutil.walk_packages(fedprompt.__path__, "fedprompt."):
        wanted = module.name.removeprefix("fedprompt.").startswith(modules)
        if wanted and not module.name.startswith(APART[:3]):
            yield from finder.find(importlib.import_module(module.name))


def _run(
    examples: list[doctest.Example], record: Callable[..., Any], names: dict[str, Any]
) -> None:
    names = names | names_of_examples() | {"__call__": record, "__name__": "example"}
    for example in examples:
        if example.exc_msg is not None:
            continue
        tree = ast.fix_missing_locations(_Recorded().visit(ast.parse(example.source)))
        with redirect_stdout(StringIO()):
            exec(compile(tree, "<example>", "exec"), names)


class _Recorded(ast.NodeTransformer):
    """Replace ``f(x)`` by ``__call__(f, x)``, but ``super()``, which needs its place."""

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "super":
            return node
        name = ast.Name("__call__", ast.Load())
        return ast.Call(name, [node.func, *node.args], node.keywords)


def _record(
    recorded: dict[tuple[Any, ...], GoodCall], function: Any, *args: Any, **kwargs: Any
) -> Any:
    if function is tempfile.TemporaryDirectory:
        return nullcontext(tempfile.mkdtemp())  # the files must outlive the example
    if _of_the_library(function):
        arguments = bound(function, args, kwargs)
        kinds = tuple((name, type(value)) for name, value in arguments.arguments.items())
        key = (name_of(function), kinds)
        if key not in recorded:
            arguments = bound(function, *_leaves((args, kwargs)))
            recorded[key] = GoodCall(key[0], function, arguments).copied()
    return function(*args, **kwargs)


def _leaves(thing: Any) -> Any:
    """Detach tensors with a graph, which cannot be copied otherwise."""
    if isinstance(thing, torch.Tensor):
        return thing if thing.is_leaf else thing.detach().clone().requires_grad_()
    if isinstance(thing, dict):
        return {name: _leaves(inner) for name, inner in thing.items()}
    if isinstance(thing, tuple) and hasattr(thing, "_fields"):
        return type(thing)(*map(_leaves, thing))
    return type(thing)(map(_leaves, thing)) if isinstance(thing, list | tuple) else thing


def _of_the_library(function: Any) -> bool:
    if inspect.isclass(function) and not _has_code(function):
        return False
    function = getattr(function, "func", function)
    if getattr(function, "__name__", "") in INTERNAL:
        return False
    module = getattr(function, "__module__", None) or ""
    return module.startswith("fedprompt") and not module.startswith(APART)


MORE = """
>>> from functools import partial
>>> from timm.models.vision_transformer import VisionTransformer
>>> from fedprompt.interfaces import PromptStream
>>> model = VisionTransformer(8, 4, embed_dim=4, depth=2, num_heads=1, num_classes=0)
>>> trunk, images = vit_trunk(model), torch.rand(2, 3, 8, 8)
>>> tokens = encode_front(trunk, images, start=1)
>>> stream = PromptStream({1: torch.ones(2, 4)}, replace=True)
>>> encoded = encode_from(trunk, tokens, stream, start=1, image_size=8)
>>> encoded = encode_prompted(trunk, images, stream, depth=2, dtype=torch.float32)
>>> model = VisionTransformer(8, 4, embed_dim=4, depth=2, num_heads=1, num_classes=0)
>>> tuned = vit_trunk(model, attention_mask=torch.ones(5, 5), trainable=[model.norm])
>>> size = {"patch_size": (4, 4), "generator": torch.Generator()}
>>> groups = GroupPrompts(2, 3, trunk, layers=[0, 1], replace=True, **size)
>>> prompts = LayeredPrompts(2, 4, layers=[0, 1], replace=True, **size)
>>> prompts = ContextPrompts(4, length=2, num_classes=3, generator=torch.Generator())
>>> padding = PadPrompts((8, 8), padding=1, mean=[0.5] * 3, std=[0.5] * 3)
>>> generated = PromptGenerator(2, 4, key_dim=4, num_heads=2)
>>> usage, query, keys = torch.tensor([1, 0]), torch.eye(2), torch.eye(2)
>>> chosen = select_balanced(query, keys, usage=usage, solver=partial(transport.newton))
>>> chosen = select_nearest(query, keys, usage=usage, offset=0.1)
>>> own = SelectionKeys(2, 2, selector=partial(select_nearest), generator=torch.Generator())
>>> start = orthogonal_keys(2, 2, generator=torch.Generator())
>>> health = selection_health(usage, query, max_cosine=0.5)
>>> centered = CenteredQueries(2, center=torch.ones(2))
>>> means = class_means(query, usage, num_classes=2, keep=torch.tensor([True, False]))
>>> entry = Weighted(torch.ones(2, 2), torch.tensor([1.0, 2.0]))
>>> values, payload = {"x": torch.zeros(2, 2)}, {"x": entry}
>>> loss = distillation_loss(query, usage, entry, temperature=2.0)
>>> logits = cosine_logits(query, query, scale=torch.tensor(2.0))
>>> loss = guided_loss(query, query, usage, entry, guide_weight=0.5)
>>> loss = proximal_loss(nn.Linear(2, 2), snapshot(nn.Linear(2, 2)))
>>> clipped = privacy.clip_norm(payload, max_norm=1.0, center=values)
>>> random = {"generator": torch.Generator().manual_seed(3)}
>>> noisy = privacy.gaussian_noise(payload, multiplier=1.0, sensitivity=1.0, **random)
>>> change = delta(payload, values)
>>> rules = [ema(decay=0.5), descend(partial(torch.optim.SGD, lr=1.0), max_norm=1.0)]
>>> rules += [fedadam(learning_rate=0.1), fedyogi(learning_rate=0.1), fedavgm(momentum=0.9)]
>>> rules += [fedopt(partial(torch.optim.Adam, lr=0.1), max_norm=1.0), overwrite()]
>>> stepped = [rule.step(values, payload, rule.init(values)) for rule in rules]
>>> means = weighted_mean([payload, payload]), trimmed_mean([payload] * 5, fraction=0.2)
>>> middle = weighted_median([payload] * 3)
>>> chosen = cohort([3, 5, 7], size=2, generator=torch.Generator())
>>> generator = stream_generator(1, purpose="dropout", server_round=3, client=2)
>>> features = precompute(lambda batch: batch, images, batch_size=1, dtype=torch.float32)
>>> header = wire.Header({"backbone": "vit"}, 3, "client 1", {"loss": "0.5"})
>>> blob = wire.encode_payload(payload, header=header)
>>> expect = wire.Expected(payload, {"backbone": "vit"}, 3, "client 1", max_abs=9.0)
>>> message = wire.decode_payload(blob, expect=expect, max_bytes=10_000)
>>> plan = transport.newton(torch.rand(2, 3, 2), torch.ones(2, 3), torch.ones(2), epsilon=0.5)
>>> score = [score(torch.rand(2, 3, 2), plan) for score in (transport.envelope, transport.implicit)]
"""
"""Calls with arguments that the examples leave out."""
