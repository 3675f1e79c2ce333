"""Two settings or methods that differ do not share a key of records."""

import json
import sys
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import beartype
import jaxtyping
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
