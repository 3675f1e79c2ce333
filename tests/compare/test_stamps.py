"""Stamps: change any one input, and a stamp changes, or it cannot be told from others."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from importlib import import_module
from textwrap import dedent

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import comparisons
from comparisons import Lazy, digits, dimmed, folder, tiny_vit
from fedprompt import compare, samples, vit_trunk
from fedprompt.compare import problems, records, rows, runs, stamps
from fedprompt.compare.problems import Budget, Protocol
from fedprompt.compare.stamps import UntoldError
from fedprompt.compare.trials import CompareError, Machine
from fedprompt.methods import HeldOut, fedprox


def brighter(values, place=-1):
    changed = values.clone()
    changed.flatten()[place] += 0.01
    return changed


IMAGES, LABELS, TESTS, TEST_LABELS = samples.digits()
ONE = [{"inputs": brighter(IMAGES[:90])}, {"labels": LABELS[:90].roll(1)}]
ONE += [{"tests": HeldOut(brighter(TESTS[:60]), TEST_LABELS[:60])}]
ONE += [{"tests": HeldOut(TESTS[:60], TEST_LABELS[:60].roll(1))}]
ONE += [{"tests": HeldOut(TESTS[:60], TEST_LABELS[:60], own={0: torch.arange(9)})}]
ONE += [{"inputs": Lazy(brighter(IMAGES[:90], place=40 * 64))}, {"newcomers": 1}]
ONE += [{"rounds": 3}, {"steps": 3}, {"steps": None}, {"batch_size": 5}, {"cohort_size": 2}]
ONE += [{"num_prompts": 3}, {"num_features": 12}, {"augment": dimmed}]
ONE += [{"make_optimizer": torch.optim.SGD}, {"autocast": torch.bfloat16}, {"public": IMAGES[:3]}]
ONE += [{"make_optimizer": partial(torch.optim.SGD, momentum=m)} for m in (0.5, 0.9)]
ONE += [{"trunks": [vit_trunk(samples.vit("B"))]}, {"num_classes": 11}]


def stamp(problem, machine=None, seeds=2):
    made, secret = runs.stamp_of(problem, machine or Machine(), range(seeds))
    return secret or json.dumps(made, sort_keys=True, default=str)


def test_each_changed_input_of_a_problem_has_another_stamp():
    whole = [digits(), digits(seeds_differ=True), *(digits(**change) for change in ONE)]
    found = [stamp(each) for each in whole]
    assert len({*found}) == len(found)
    assert found[0] == stamp(digits())
    assert found[0] == stamp(digits(inputs=Lazy(IMAGES[:90])))  # the same inputs, read in parts
    machines = Machine(shrink=0.5), Machine("meta")
    assert len({found[0], *(stamp(digits(), each) for each in machines)}) == 3
    torch.set_default_dtype(torch.float64)
    try:
        assert stamp(digits()) not in found
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_division_that_differs_in_one_seed_is_refused_by_its_name(tmp_path):
    once = digits()
    records.enter(tmp_path / "a", runs.stamp_of(once, Machine(), range(1))[0])

    made, _ = runs.stamp_of(once, Machine(), range(2))
    records.enter(tmp_path / "a", made)  # further seeds continue
    (tmp_path / "a" / records.LINES).touch()
    other = {**made, records.DIVIDED: {"": made[records.DIVIDED][""] | {"1": "other"}}}
    with pytest.raises(CompareError, match=r"differs in the division of seed 1\. Begin"):
        records.enter(tmp_path / "a", other)


def test_a_setting_that_cannot_be_told_has_another_stamp_in_each_run():
    alike = [digits(schedule=lambda share: 1.0) for _ in range(2)]
    assert stamp(alike[0]) != stamp(alike[0]) != stamp(alike[1])


def test_an_augmentation_with_a_global_number_is_told_by_the_number(monkeypatch):
    before = stamp(digits(augment=dimmed))
    monkeypatch.setattr(comparisons, "AMOUNT", 2.0)
    assert stamp(digits(augment=dimmed)) != before


PIXEL = {"art/cat/art1.png": (0, 0)}


def test_a_pixel_a_label_and_each_option_of_a_folder_change_the_stamp(tmp_path):
    root = folder(tmp_path / "images", "{domain}/{name}")
    model, usual = tiny_vit(), {"layout": "domain/class", "rounds": 1}
    changes = [{}, {"rounds": 2}, {"epochs": 2}, {"steps": 3}, {"batch_size": 3}]
    changes += [{"cohort_size": 1}, {"shots": 1}, {"leave_one_out": True}, {"newcomers": 1}]
    changes += [{"clients": "iid:2"}, {"autocast": torch.bfloat16}]
    changes += [{"vit": tiny_vit(act_layer="quick_gelu")}, {"vit": tiny_vit(img_size=48)}]
    named = {one for kind in (Protocol, Budget) for one in kind.__dataclass_fields__}
    assert named - {"base_to_new"} == {*named} & {name for each in changes for name in each}
    made = {"cache": tmp_path / "cache"}
    found = [stamp(compare.folder(root, **{"vit": model, **usual, **made, **c})) for c in changes]
    assert len({*found}) == len(found)
    path = root / "art" / "cat" / "art1.png"
    times, content = path.stat(), bytearray(path.read_bytes())
    path.write_bytes((root / "art" / "cat" / "art2.png").read_bytes()[: len(content)] or content)
    path.write_bytes((root / "photo" / "dog" / "photo1.png").read_bytes())
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    allow = ["two-classes", "train-and-test"]
    again = compare.folder(root, vit=model, **usual, **made, allow=allow)
    assert stamp(again) not in found


VALUES = [None, True, False, 0, 1, 1.0, -0.0, 0.0, float("nan"), "1", b"1", (1,), [1], {1}, {1: 2}]
VALUES += [{2: 1}, (1, 2), (2, 1), frozenset({1}), torch.tensor(1), torch.tensor(1.0)]
VALUES += [torch.tensor([1]), np.array(1), np.array([1]), torch.float32, torch.bfloat16, range(2)]
VALUES += [torch.tensor(1.0, dtype=torch.bfloat16), torch.device("cpu"), F.relu, F.gelu, torch.relu]
VALUES += [partial(F.gelu, approximate="tanh"), partial(F.gelu, approximate="none"), Lazy, fedprox]
VALUES += [torch.optim.SGD, torch.optim.AdamW, Protocol(), Protocol(shots=1), np.float32(1), 1j]


def test_no_two_values_are_told_alike():
    told = [json.dumps(stamps.told(value)) for value in VALUES if not isinstance(value, np.generic)]
    assert len({*told}) == len(told)
    order = {"b": 1, "a": 2}
    assert stamps.told(order) != stamps.told(dict(sorted(order.items())))


@pytest.mark.parametrize(
    "value",
    [
        lambda images: images,
        Lazy(IMAGES).__getitem__,
        object(),
        np.array([object()]),
        partial(lambda images: images),
        [torch.Generator()],
        (lambda make: lambda setting: make(setting))(fedprox),
    ],
)
def test_functions_and_objects_of_no_file_cannot_be_told(value):
    with pytest.raises(UntoldError):
        stamps.told(value)


FILES = {
    "mine.py": """
        import json, helper
        from package.inner import third
        LIMIT = 3
        def mine(setting):
            import late
            return helper.second, late.number, third, LIMIT
        def untouched(setting):
            return 1
        if __name__ == "__main__":
            print("a program, too")
    """,
    "helper.py": "from deep import first\ndef second(): return first",
    "deep.py": "first = 1",
    "late.py": "number = 1",
    "package/__init__.py": "WIDTH = 1",
    "package/inner.py": "from . import sibling\nfrom .cousin import c\ndef third(): return 1",
    "package/sibling.py": "x = 1",
    "package/cousin.py": "c = 1",
    "other.py": "y = 1",
}
PROGRAM = """
import sys; sys.path.insert(0, ".")
from fedprompt.compare import rows
print(rows.chosen(["mine.py:mine"], ["one model"])[0].stamp())
"""


def stamp_of_file(place):
    os.utime(place / "mine.py", (1, 1))
    for path in place.rglob("*.py"):
        os.utime(path, (1, path.stat().st_size))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM], cwd=place, capture_output=True, text=True
    )
    assert not done.returncode, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_method_is_told_by_its_file_and_all_that_it_imports(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(dedent(text))
    first = stamp_of_file(tmp_path)
    assert stamp_of_file(tmp_path) == first
    for name in FILES:
        text = (tmp_path / name).read_text()
        (tmp_path / name).write_text(text + "\nCHANGED = 1\n")
        assert (stamp_of_file(tmp_path) == first) == (name == "other.py"), name
        (tmp_path / name).write_text(text)


def stamped(path, text):
    """Return the row of a method that returns an expression, and the values of its module."""
    path.write_text(f"import os\nfrom pathlib import Path\ndef mine(setting):\n    return {text}\n")
    row = rows.chosen([f"{path}:mine"], ["one model"])[0]
    return row, vars(sys.modules[row.make.__module__])


@pytest.mark.parametrize(
    "text",
    [
        "Path(__file__).with_name('d.txt').read_text()",
        "(Path(__file__).parent / 'inner' / 'd.txt').read_text()",
        "open(os.path.join(os.path.dirname(__file__), 'inner', 'd.txt')).read()",
        "open(f'{os.path.dirname(__file__)}/inner/d.txt').read()",
        "open('d.txt').read()",
        "os.environ['FEDPROMPT_TEST']",
        "float(os.getenv('FEDPROMPT_TEST', '0'))",
        "__import__('read_later').number",
        "__import__('importlib').import_module('read_later').number",
    ],
)
def test_what_a_text_reads_is_told(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    row, _ = stamped(tmp_path / "mine.py", text)
    (tmp_path / "inner").mkdir()
    found = set[str]()
    for number in (1, 2):
        monkeypatch.setenv("FEDPROMPT_TEST", str(number))
        (tmp_path / "read_later.py").write_text(f"number = {number}")
        for name in ("d.txt", "inner/d.txt"):
            (tmp_path / name).write_text(str(number))
        found |= {row.stamp(), row.stamp()}
    assert len(found) == 2


@pytest.mark.parametrize(
    "text",
    [
        "open(setting.path).read()",
        "[path.read_text() for path in Path('some folder').glob('*')]",
        "__import__(setting.kind)",
        "dict(os.environ)",
    ],
)
def test_a_text_that_reads_what_it_does_not_name_cannot_be_told(text, tmp_path):
    with pytest.raises(UntoldError, match="what it does not name"):
        stamped(tmp_path / "mine.py", text)[0].stamp()


def test_the_version_of_a_library_that_a_text_imports_is_told(tmp_path, monkeypatch):
    row, _ = stamped(tmp_path / "mine.py", "__import__('safetensors').torch")
    first, installed = row.stamp(), stamps.installed
    monkeypatch.setattr(
        stamps, "installed", lambda name: "9" if name == "safetensors" else installed(name)
    )
    assert row.stamp() != first


CHANGES = """
class Config: rate = 1
Config.rate = 2
from types import SimpleNamespace; config = SimpleNamespace(rate=1)
config.rate = 2
own = Config()
own.rate = 3
table = {"rate": [1, len]}
table["rate"].append(2)
def made(rate): return lambda x=rate: rate
helper = made(1)
helper = made(2)
helper.__defaults__ = (5,)
helper.rate = 3
helper = os.path.join
from functools import partial; helper = partial(made(1), 3)
helper = partial(made(1), 4)
Config.step = made
Config.step = mine
from functools import cached_property; Config.lazy = cached_property(len)
Config.lazy = cached_property(abs)
import torch; layer = torch.nn.Linear(1, 1)
layer.bias.data.fill_(3)
from collections import Counter; counted = Counter(a=1)
counted["a"] = 2
"""


def test_what_a_program_changes_in_a_module_is_told(tmp_path):
    row, values = stamped(tmp_path / "mine.py", "setting")
    found = [row.stamp()]
    for change in CHANGES.strip().splitlines():
        exec(change, values)
        found.append(row.stamp())
        assert row.stamp() == found[-1], change
        assert found[-1] not in found[:-1], change


@pytest.mark.slow
def test_workers_must_have_the_values_and_the_texts_of_the_first_process(tmp_path):
    root = folder(tmp_path / "images", "{domain}/{name}")
    given = {"layout": "domain/class", "vit": "digits-B", "rounds": 1, "steps": 1}
    problem = compare.folder(root, **given)
    row, values = stamped(tmp_path / "mine.py", "fedprox(setting)")
    values["fedprox"], make = fedprox, row.make
    with pytest.raises(CompareError, match=r"^`workers` must be 1, or Mine be the same in each"):
        compare.run(problem, [make], seeds=1, workers=2)
    (root / "art" / "cat" / "new.png").write_bytes((root / "art/cat/art1.png").read_bytes() + b" ")
    with pytest.raises(CompareError, match=r"^The images or other inputs have changed since"):
        compare.run(problem, ["fedprox"], seeds=1, workers=2)


def test_a_module_that_was_edited_after_it_was_loaded_cannot_be_told(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "edited_later.py").write_text("number = 1")
    row, _ = stamped(tmp_path / "mine.py", "__import__('edited_later').number")
    first = row.stamp()
    import_module("edited_later")
    (tmp_path / "edited_later.py").write_text("number = 2")
    os.utime(tmp_path / "edited_later.py", (1, 1))  # as of a file that is moved here
    with pytest.raises(UntoldError, match=r"edited_later\.py, which has changed since"):
        row.stamp()
    monkeypatch.delitem(sys.modules, "edited_later")
    assert row.stamp() != first


def test_values_of_a_row_and_each_edit_of_its_file_are_told(tmp_path):
    path, found = tmp_path / "mine.py", []
    for text in ("", "K = 3", "K = 4", "#"):
        path.write_text(f"{text}\ndef mine(setting, *, learning_rate=0.1):\n    return setting\n")
        row = rows.chosen([f"{path}:mine"], ["one model"])[0]
        found += [row.stamp(), replace(row, values={"learning_rate": 0.2}).stamp()]
    assert len({*found}) == len(found)
    gallery = [row.stamp() for row in rows.chosen(["fedprox", "ditto"], ["one model"])]
    assert len({*gallery, *(row.stamp() for row in rows.chosen(["fedprox"], ["one model"]))}) == 2
    with pytest.raises(UntoldError):
        rows.chosen([lambda setting: fedprox(setting)], ["one model"])[0].stamp()


def test_options_are_arguments_and_have_words(capsys):
    with pytest.raises(TypeError, match="`roundz` must be an argument"):
        problems.split_options({"roundz": 1})
