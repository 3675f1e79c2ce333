"""The methods of a folder of files: their hyperparameters, texts, and lines."""

import ast
import importlib
import importlib.util
import inspect
import io
import sys
import tokenize
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from fedprompt.methods import METHODS
from methods import as_generator

FOLDER = Path(__file__).parents[2] / "methods"
NOT_CODE = {"ABOUT", "RATES", "SEARCH"}
"""Assignments that describe a method and are not counted as lines of code."""

Range = tuple[float, float] | list[Any]


class MethodsError(ValueError):
    """A mistake in `--methods`."""


@dataclass(frozen=True)
class Method:
    """A generator of the gallery.

    Attributes:
        name: Name of the function.
        title: Name in tables, from the first line of its docstring.
        function: The generator.
        path: Its file.
        families: Families of tasks that it can run.
        traits: What it is, such as "personalized".
        search: Range of each tuned hyperparameter: a pair of numbers, on a logarithmic scale, or
            a list of choices.
        inputs: "images" if it needs images in place of the tokens of CLIP.
    """

    name: str
    title: str
    function: Callable[..., Iterator[Any]]
    path: Path
    families: Sequence[str]
    traits: Sequence[str]
    search: Mapping[str, Range]
    inputs: str

    @property
    def defaults(self) -> dict[str, Any]:
        """Default values of the hyperparameters."""
        parameters = inspect.signature(self.function).parameters.values()
        return {each.name: each.default for each in parameters if each.default is not each.empty}


def gallery() -> dict[str, Method]:
    """Return the methods of the gallery by name, in the order of their files."""
    found = {
        name: Method(
            name,
            each.title,
            as_generator(each.make, everyone="personalized" not in each.traits),
            Path(inspect.getfile(each.make)),
            *each[3:],
        )
        for name, each in METHODS.items()
    }
    for path in sorted(FOLDER.glob("*.py")):
        if path.stem not in ("__init__", "federation"):
            found |= in_module(importlib.import_module(f"methods.{path.stem}"))
    return dict(sorted(found.items(), key=lambda item: item[1].path.stem))


def in_file(path: Path) -> dict[str, Method]:
    """Return the methods of any file, by name. It may import modules of its folder."""
    if found := {name: each for name, each in gallery().items() if each.path == path}:
        return found
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.exists():
        raise MethodsError(f"`--methods` must name an existing Python file; got {path}.")
    if (folder := str(path.parent.resolve())) not in sys.path:
        sys.path.insert(0, folder)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return in_module(module)


def in_module(module: ModuleType) -> dict[str, Method]:
    """Return the public functions of a module whose first parameter is `federation`.

    Functions without a docstring are helpers and are left out.
    """
    found = {}
    for name, function in vars(module).items():
        if not inspect.isfunction(function) or function.__module__ != module.__name__:
            continue
        parameters = list(inspect.signature(function).parameters)
        if name.startswith("_") or not function.__doc__ or parameters[:1] != ["federation"]:
            continue
        search = getattr(module, "SEARCH", {"learning_rate": (1e-3, 1e-1)})
        found[name] = Method(
            name,
            function.__doc__.splitlines()[0].split(":")[0].rstrip("."),
            function,
            Path(inspect.getfile(module)),
            getattr(module, "FAMILIES", ("one model", "mixed models", "CLIP")),
            getattr(module, "TRAITS", ()),
            {key: values for key, values in search.items() if key in parameters},
            getattr(module, "INPUTS", ""),
        )
    return found


def documented(tree: ast.Module) -> list[Any]:
    """Return the module, classes and functions that have a docstring."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    return [node for node in ast.walk(tree) if isinstance(node, kinds) and ast.get_docstring(node)]


def lines_of_code(path: Path) -> int:
    """Count lines without texts, imports, and what describes the method: decorator, `NOT_CODE`."""
    text = path.read_text()
    tree = ast.parse(text)
    left_out = [
        node
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        or (isinstance(node, ast.Assign) and {target.id for target in node.targets} & NOT_CODE)
    ]
    left_out += [node.body[0] for node in documented(tree)]
    left_out += [each for node in tree.body for each in getattr(node, "decorator_list", [])]
    skipped = {line for node in left_out for line in range(node.lineno, node.end_lineno + 1)}
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    code = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in {*silent, tokenize.ENDMARKER}
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(code - skipped)
