"""Two settings or methods that differ do not share a key of records."""

import json
import sys
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import beartype
import jaxtyping
import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import fedprompt as fp
from fedprompt import methods, samples
from fedprompt.compare import rows
from fedprompt.compare.identity import settled, told
from fedprompt.compare.trials import CompareError
from refusals import refused

MIDDLE = torch.tensor(1000)
FIELDS = {
    "lambdas": lambda factor: {"schedule": (lambda s: 0.5) if factor else (lambda s: 0.25)},
    "variables around a lambda": lambda factor: {"schedule": lambda s: factor},
    "default values": lambda factor: {"schedule": lambda s, factor=factor: factor},
    "values of an optimizer": lambda lr: {"make_optimizer": partial(torch.optim.SGD, momentum=lr)},
    "one of many public inputs": lambda x: {"public": torch.zeros(2000).index_fill(0, MIDDLE, x)},
    "an object without a description": lambda x: {"augment": SimpleAugment(x)},
    "a network around a function": lambda x: {"augment": moved(nn.Linear(1, 1), x)},
    "code of a class": lambda code: {"augment": classed(code)()},
    "layers of prompts": lambda n: {"prompts": partial(fp.ShallowPrompts, int(n) + 1)},
}


@dataclass(frozen=True)
class Described:
    values: set


class SimpleAugment:
    def __init__(self, size):
        self.size, self.own = SimpleNamespace(size=size), self

    def __call__(self, images, generator):
        return images + self.size.size


def classed(code):
    class Same:
        def __call__(self, images, generator):
            return images

    class Other:
        def __call__(self, images, generator):
            return -images

    Other.__qualname__ = Same.__qualname__
    return Other if code else Same


def moved(model, by):
    nn.init.constant_(model.weight, by)
    nn.init.zeros_(model.bias)
    return lambda images, generator: model(images)


@pytest.mark.parametrize("kind", FIELDS)
def test_settings_with_other_functions_or_values_are_not_the_same(kind):
    def made(value):
        trunk = fp.vit_trunk(samples.vit("S"))
        setting = methods.VitSetting(trunk=trunk, num_classes=2, rounds=1, **FIELDS[kind](value))
        return json.dumps(settled(setting))

    assert made(0.0) == made(0.0) != made(1.0)


def test_a_setting_that_was_used_is_the_same():
    setting = methods.VitSetting(trunk=fp.vit_trunk(samples.vit("S")), num_classes=2, rounds=1)
    before = settled(setting)
    setting.model(0, setting.model(0, {}).state_dict())
    assert settled(setting) == before


def test_a_method_with_another_value_around_it_is_another_run():
    """A function of the same name takes the place of the old one, as in a notebook."""

    def keyed(rate):
        def mine(setting):
            return methods.fedprox(setting, learning_rate=rate)

        once, twice = (rows.code(*rows.chosen([mine], "one model")) for _ in range(2))
        assert once == twice
        return once

    assert keyed(0.1) == keyed(0.1) != keyed(0.2)


def ditto(setting):
    return methods.ditto(setting)


REFUSED = """
rows.chosen('ditto', 'one model') -> TypeError: `methods` must be a sequence of names or functions
rows.chosen([3], 'one model') -> TypeError: `methods` must be names or functions; write a function
rows.chosen([partial(ditto)], 'one model') -> TypeError: `methods` must be names or functions
rows.chosen([ditto], 'one model') -> CompareError: `methods` must have new names; got ditto.
rows.chosen([moved, moved], 'CLIP') -> CompareError: `--methods` must name each once; got 'moved'
"""
test_wrong_methods_are_refused = refused(globals())(REFUSED)


def test_functions_of_libraries_have_names_and_an_object_of_c_is_refused():
    assert told(torch.relu) != told(torch.tanh)
    assert told(F.relu) != told(F.gelu)
    for function in (F.relu, told):
        assert told(function)[:3] == [function.__module__, function.__name__, []]  # no code
    with pytest.raises(CompareError, match="A object of a setting or a method must have a __repr"):
        told([object()])


def test_checks_of_shapes_around_a_function_do_not_count():
    def scaled(images, generator):
        return 2 * images

    checked = jaxtyping.jaxtyped(typechecker=beartype.beartype)(scaled)
    assert checked is not scaled
    assert told(checked) == told(scaled)


def test_the_order_of_a_set_does_not_count():
    """Texts have another order in each process."""
    one, other = {0, 8}, {8, 0}
    assert repr(one) != repr(other)
    assert told(one) == told(other) != told({0, 9})
    assert told(Described(one)) == told(Described(other)) != told(Described({0, 9}))
    first, second, third = (
        lambda x: x in {0, 8}, lambda x: x in {8, 0}, lambda x: x in {0, 9},
    )  # fmt: skip
    assert told(first) == told(second) != told(third)


def code(text, **names):
    """Run a text as a file that is not installed, and return what it calls `value`."""
    names["__name__"] = "mine"
    exec(text, names)
    return names["value"]


class Scaled(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self._factor = factor


def headed(weight, mean):
    """Make a network whose head has a weight, and a norm with a running mean."""
    network = nn.ModuleDict({"norm": nn.BatchNorm1d(1), "head": nn.Linear(1, 1)})
    nn.init.constant_(network["norm"].running_mean, mean)
    nn.init.constant_(network["head"].weight, weight)
    return network


def method_of(by):
    return SimpleAugment(by).__call__


VALUES = """
0; 1; True; None; 1.0; "1"; b"1"; [1]; (1,); [[1]]; [1, 2]; [2, 1]; {1}; {1: 1}; {1: 2}; {2: 1}
torch.zeros(2); torch.zeros(2, 1); torch.zeros(2).double(); torch.ones(()); torch.zeros(1, 2).int()
torch.ones(2); torch.ones(2).bfloat16(); torch.ones(1, requires_grad=True)
np.zeros(2, np.int64); np.array([1, "a"], object); np.array([1, "b"], object); frozenset([1])
torch; np; torch.relu; len; max; [].append; torch.float32; torch.device("cpu")
Described({1}); range(3)
partial(max); partial(max, 1); partial(max, key=1); partial(min); partial(max, key=2)
nn.Linear(1, 2); nn.Linear(2, 1); nn.Identity(); nn.Linear; nn.Identity
nn.ReLU(); nn.AdaptiveAvgPool2d(3); headed(1, 0); headed(2, 0); headed(1, 3)
Scaled(1); Scaled(2); Scaled(True); Scaled((1,)); Scaled("1")
nn.Sequential(Scaled(2)); method_of(1); method_of(2)
SimpleAugment(1); SimpleAugment(2).__init__
code("value = lambda x: torch.sin(x)"); code("value = lambda x: torch.cos(x)")
code("value = lambda x: x + 1"); code("value = lambda x: x - 1"); code("value = lambda x: x + 2")
code("value = lambda *, x=1: x"); code("value = lambda *, x=2: x"); code("value = lambda x=1: x")
code("def value(): return lambda: 1"); code("def value(): return lambda: 2")
code("class value:\\n def f(self): return 1"); code("class value:\\n def f(self): return 2")
code("class value:\\n @staticmethod\\n def f(): return 11")
code("class value:\\n @staticmethod\\n def f(): return 12")
code("class value:\\n @classmethod\\n def f(cls): return 13")
code("class value:\\n @classmethod\\n def f(cls): return 14")
code("import functools as f\\nclass value:\\n @f.cached_property\\n def f(self): return 15")
code("import functools as f\\nclass value:\\n @f.cached_property\\n def f(self): return 16")
code("class value:\\n @property\\n def f(self): return 3")
code("class value:\\n @property\\n def f(self): return 4")
code("class value:\\n f = 5"); code("class value:\\n f = 6"); code("class value:\\n g = 6")
code("class base:\\n def f(self): return 7\\nclass value(base): pass")
code("class base:\\n def f(self): return 8\\nclass value(base): pass")
"""


def test_values_of_other_kinds_or_contents_are_described_otherwise_and_copies_alike():
    listed = [text for line in VALUES.strip().splitlines() for text in line.split("; ")]
    found = {}
    for text in listed:
        with torch.random.fork_rng():
            one, other = (
                json.dumps(told(eval(text, {**globals(), "np": np, "_": torch.manual_seed(0)})))
                for _ in range(2)
            )
        assert one == other, text
        assert one not in found, (text, found[one])
        found[one] = text


def test_a_function_of_a_program_is_the_same_in_a_worker_and_an_object_in_itself_ends():
    def mine(x):
        return x

    inner, names = SimpleAugment(1), []
    for module in ("mine", "__main__", "__mp_main__"):
        mine.__module__ = module
        names.append(told(mine)[0])
    assert names == ["mine", "__main__", "__main__"]
    assert "itself" in json.dumps(told(inner))


def test_flags_and_private_values_of_installed_modules_depend_on_the_machine_and_do_not_count():
    layers = [nn.Identity() for _ in range(4)]
    for layer, (name, value) in zip(
        layers, {"fused": True, "_seen": 3, "training": False, "size": 3}.items(), strict=True
    ):
        setattr(layer, name, value)
    assert [told(layer) == told(nn.Identity()) for layer in layers] == [True, True, True, False]


@pytest.mark.parametrize("network", ["tower", "clip", "trunks"])
def test_settings_with_other_frozen_weights_are_not_the_same(network):
    @dataclass
    class Parts:
        rate: float
        tower: nn.Module | None = None
        clip: nn.Module | None = None
        trunks: tuple[nn.Module, ...] = ()
        made: int = field(default=0, init=False)

    def filled(value):
        layer = nn.Linear(1, 1)
        nn.init.constant_(layer.weight, value)
        nn.init.zeros_(layer.bias)
        return Parts(0.5, **{network: (layer,) if network == "trunks" else layer})

    first, again, other = map(filled, (1, 1, 2))
    again.made = 3
    assert settled(first) == settled(again) != settled(other)
    assert settled(Parts(0.5)) == [Parts.__qualname__, told({"rate": 0.5})]


@pytest.mark.parametrize("shared", ["shared_file.py", "shared_package/__init__.py"])
@pytest.mark.parametrize("direct", [True, False])
def test_files_of_two_folders_have_no_module_of_one_name(shared, direct, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(rows, "SOURCES", {})
    for module in ("shared_file", "shared_package", "inner_a", "inner_b"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    line = f"from {shared.partition('/')[0].removesuffix('.py')} import NAME"
    for name in ("a", "b"):
        text = {shared: f"NAME = {name!r}", f"inner_{name}.py": line}
        text["mine.py"] = line if direct else f"from inner_{name} import NAME"
        for file, lines in text.items():
            (tmp_path / name / file).parent.mkdir(exist_ok=True, parents=True)
            (tmp_path / name / file).write_text(lines)
    rows.read_methods(tmp_path / "a" / "mine.py")
    with pytest.raises(
        CompareError, match=r"b/mine.py cannot be imported: .*`shared_\w+` is a mod"
    ):
        rows.read_methods(tmp_path / "b" / "mine.py")
