"""The whole package: fast to import, typed, and with a complete table of contents."""

import ast
import importlib
import pkgutil
import re
import tomllib
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

import fedprompt
from fedprompt import interfaces

ROOT = Path(fedprompt.__file__).parent
SOURCES = {path: ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}
PROGRAM = """
import sys, time, torch
start = time.process_time()
import fedprompt
seconds = time.process_time() - start
fedprompt.transport.newton(torch.eye(2), torch.ones(2), torch.ones(2))
heavy = ("timm", "open_clip", "transformers", "ot", "triton", "flwr", "sklearn", "matplotlib")
heavy += ("fedprompt.flower", "fedprompt.samples", "fedprompt.methods")
print(seconds, *(name for name in heavy if name in sys.modules))
"""
WITHOUT_EXTRAS = """
import sys
sys.modules |= dict.fromkeys(("flwr", "matplotlib", "matplotlib.axes"))
import fedprompt
for use in ("from fedprompt import flower", "fedprompt.plots.group_usage([1.0], axes=None)"):
    try:
        exec(use)
    except ImportError as error:
        print(error)
"""
LONGEST_BODY = 40


def test_import_is_light_and_does_not_import_the_heavy_libraries(in_new_process):
    """One of three new processes needs less than 0.5 CPU seconds in addition to torch."""
    for _ in range(3):
        (seconds,) = in_new_process(PROGRAM).split()  # names of heavy libraries would follow
        if float(seconds) < 0.5:
            return
    pytest.fail(f"the last import took {seconds} CPU seconds")


def test_without_an_extra_the_error_names_it(in_new_process):
    expected = "`fedprompt.flower` needs flwr 1.41 or later: pip install 'fedprompt[flower]'\n"
    expected += "`fedprompt.plots` needs matplotlib: pip install 'fedprompt[plots]'\n"
    assert in_new_process(WITHOUT_EXTRAS) == expected


def test_the_table_of_contents_is_complete_and_has_no_duplicates():
    flat = fedprompt.__all__
    assert len(set(flat)) == len(flat)
    assert len(flat) <= 70  # what a loop needs, and the families with all others
    submodules = {module.name for module in pkgutil.iter_modules(fedprompt.__path__)}
    imported = {name for name in vars(fedprompt) if not name.startswith("_")}
    import_hook = {"jaxtyping"}  # inserted by the import hook of the tests
    assert imported - set(flat) <= submodules | import_hook


def family_names() -> list[tuple[str, str]]:
    return [
        (family, name)
        for family in fedprompt.__all__
        if isinstance(getattr(fedprompt, family), ModuleType)
        for name in getattr(fedprompt, family).__all__
    ]


def test_public_names_of_families_exist():
    missing = [
        (family, name)
        for family, name in family_names()
        if not hasattr(getattr(fedprompt, family), name)
    ]
    assert len(family_names()) > 50
    assert missing == []


def test_the_version_is_the_installed_one_and_classifiers_name_the_pythons_of_the_workflow():
    assert fedprompt.__version__ == version("fedprompt")
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]
    named = re.findall(r"Python :: (3\.\d+)$", "\n".join(project["classifiers"]), re.MULTILINE)
    workflow = (ROOT.parent / ".github" / "workflows" / "tests.yml").read_text()
    assert named == sorted(set(re.findall(r'"(3\.\d+)"', workflow)))


def test_a_file_name_is_used_once():
    names = sorted(path.name for path in SOURCES if path.name not in ("__init__.py", "__main__.py"))
    assert [name for name in set(names) if names.count(name) > 1] == []


def functions(tree: ast.Module) -> list[tuple[str, int]]:
    """Return the name and the number of lines of every function.

    Docstrings do not count, and inner functions count alone.
    """
    sizes = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0
            inner = [each for each in body if isinstance(each, ast.FunctionDef)]
            lines -= sum(each.end_lineno - each.lineno + 1 for each in inner)
            sizes.append((node.name, lines))
    return sizes


def test_no_function_body_is_longer_than_forty_lines():
    sizes = [
        (path.name, name, lines)
        for path, tree in SOURCES.items()
        for name, lines in functions(tree)
    ]
    assert len(sizes) > 500
    assert [function for function in sizes if function[2] > LONGEST_BODY] == []


def foreign_private_imports(path: Path, tree: ast.Module) -> list[str]:
    """Return the imports of `fedprompt.X._y` in a file outside `fedprompt/X`."""
    package = path.relative_to(ROOT).parts[0]
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom | ast.Import):
            continue
        modules = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            modules = [f"{node.module}.{name}" for name in modules]
        for module in modules:
            parts = module.split(".")
            private = len(parts) > 2 and any(part.startswith("_") for part in parts[2:])
            if parts[0] == "fedprompt" and private and parts[1] not in (package, f"{package}.py"):
                found.append(module)
    return found


def test_private_modules_are_imported_only_in_their_own_package():
    found = [(path, foreign_private_imports(path, tree)) for path, tree in SOURCES.items()]
    assert len(found) > 100
    assert [(path, names) for path, names in found if names] == []


def test_every_module_imports():
    names = [module.name for module in pkgutil.walk_packages(fedprompt.__path__, "fedprompt.")]
    for name in names:
        if not name.startswith("fedprompt.flower") and not name.endswith("__main__"):
            importlib.import_module(name)


def test_typed_and_every_protocol_is_checkable_at_run_time():
    assert (ROOT / "py.typed").exists()
    public = [getattr(interfaces, name) for name in interfaces.__all__]
    protocols = [thing for thing in public if getattr(thing, "_is_protocol", False)]
    assert protocols
    assert all(getattr(protocol, "_is_runtime_protocol", False) for protocol in protocols)
    assert isinstance(fedprompt.weighted_mean, interfaces.Aggregator)
    assert isinstance(fedprompt.ema(decay=0.5), interfaces.ServerUpdate)
    assert not isinstance(fedprompt.weighted_mean, interfaces.ServerUpdate)
