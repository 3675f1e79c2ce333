"""The package as a whole: it is light, typed, and says what is public."""

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import fedprompt
from fedprompt import interfaces

PROGRAM = """
import sys, time, torch
start = time.perf_counter()
import fedprompt
seconds = time.perf_counter() - start
heavy = ("timm", "open_clip", "ot", "triton", "flwr", "fedprompt.flower", "sklearn", "matplotlib")
print(seconds, *(name for name in heavy if name in sys.modules))
"""
WITHOUT_FLOWER = """
import sys
sys.modules["flwr"] = None
import fedprompt
try:
    from fedprompt import flower
except ImportError as error:
    print(error)
"""


def modules() -> list[str]:
    """All modules except the kernel, which needs Triton, and those whose names stay their own: Flower's and the plots."""
    names = [module.name for module in pkgutil.walk_packages(fedprompt.__path__, "fedprompt.")]
    return [name for name in names if not name.endswith("._triton") and not name.startswith(("fedprompt.flower", "fedprompt.plots"))]


def test_import_is_light_and_leaves_the_heavy_libraries_alone():
    """The best of three fresh processes: under 0.3 s on top of torch, and timm, open_clip, POT and Triton are not touched."""
    printed = [subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout.split() for _ in range(3)]
    assert all(len(words) == 1 for words in printed), printed
    assert min(float(words[0]) for words in printed) < 0.3


def test_without_flwr_the_adapter_says_what_to_install():
    printed = subprocess.run([sys.executable, "-c", WITHOUT_FLOWER], capture_output=True, text=True, check=True).stdout
    assert printed == "`fedprompt.flower` needs flwr 1.41 or later: pip install 'fedprompt[flower]'\n"


def test_every_room_names_what_is_public_and_the_top_has_it_all():
    public = {name for room in modules() for name in getattr(importlib.import_module(room), "__all__", ())}
    assert {"weighted_mean", "encode_prompted", "Weighted", "dirichlet", "local_accuracy"} <= public
    missing = sorted(name for name in public if not hasattr(fedprompt, name))
    assert not missing
    ours = public | {room.split(".")[1] for room in modules()} | {"jaxtyping", "plots"}  # the last is the import hook's, in tests alone
    leaked = sorted(name for name in vars(fedprompt) if not name.startswith("_") and name not in ours)
    assert not leaked


def test_files_and_functions_stay_small_enough_to_be_one_idea():
    for path in Path(fedprompt.__file__).parent.rglob("*.py"):
        assert path.read_text().count("\n") <= 260, path


def test_typed_and_every_protocol_is_checkable_at_run_time():
    assert (Path(fedprompt.__file__).parent / "py.typed").exists()
    protocols = [getattr(interfaces, name) for name in interfaces.__all__ if getattr(getattr(interfaces, name), "_is_protocol", False)]
    assert len(protocols) == 9
    assert all(getattr(protocol, "_is_runtime_protocol", False) for protocol in protocols)
    assert isinstance(fedprompt.weighted_mean, interfaces.Aggregator)
    assert isinstance(fedprompt.ema(decay=0.5), interfaces.ServerUpdate)
    assert isinstance(fedprompt.ema(decay=0.5), interfaces.ServerRule)
    assert not isinstance(fedprompt.weighted_mean, interfaces.ServerUpdate)
