"""The example app runs methods in Flower's simulation and over real processes."""

import tomllib
from pathlib import Path

import pytest

import fedprompt as fp
import task
from flower_processes import as_a_user, flwr_lines, fresh_environment, running_flower, stand_in
from flower_runs import assert_equal

pytestmark = [pytest.mark.flower, pytest.mark.slow]

APP = Path(task.__file__).parent
CONFIG = {"clients": 2, "cohort": 2, "rounds": 2, "newcomers": 1}
DEFAULTS = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]


def check(folder: Path, names: list[str], *, simulation: bool) -> None:
    """Run methods with client and server states, and compare with runs in one process."""
    with running_flower(folder, nodes=2, simulation=simulation) as run:
        for name in names:
            out = folder / name
            # Of the first method, a second run goes on from the first.
            for rounds in range(1 if name == names[0] else CONFIG["rounds"], 1 + CONFIG["rounds"]):
                counts = " ".join(f"{key}={n}" for key, n in (CONFIG | {"rounds": rounds}).items())
                said = run(APP, f'method="{name}" out="{out}" {counts}')
                assert f"{name}: a new client classifies" in said, said
            method, federation, _ = task.load(DEFAULTS | CONFIG | {"method": name})
            *_, expected = fp.run_rounds(method, federation)
            found = fp.load_checkpoint(out / "server")
            assert_equal(tuple(found), tuple(expected._replace(clients={})))


def test_two_methods_over_a_superlink_and_supernodes_equal_one_process(tmp_path):
    check(tmp_path, ["scaffold", "pfedmoap"], simulation=False)


def test_a_method_in_the_simulation_equals_one_process(tmp_path):
    check(tmp_path, ["scaffold"], simulation=True)


@pytest.mark.parametrize(
    ("name", "backbone"), [("scaffold", "VisionTransformer"), ("pfedmoap", "CLIP")]
)
def test_both_sides_of_a_simulation_compare_the_backbone_of_a_client(name, backbone):
    made = task.load(DEFAULTS | CONFIG | {"method": name})
    assert task.wire(made.method)["fingerprint"](1)["backbone"] == backbone


def test_a_method_without_a_form_is_refused_by_name():
    with pytest.raises(ValueError, match=r"`method` must have a form, and fedmix has none"):
        task.load(DEFAULTS | CONFIG | {"method": "fedmix"})


@pytest.mark.parametrize(
    ("source", "page"), [("clone", "README.md"), ("wheel", "docs/reference/flower.md")]
)
def test_the_lines_of_the_pages_run_with_the_defaults_of_flower(source, page, tmp_path):
    """In a simulation, whatever an index has under our name."""
    programs = fresh_environment(tmp_path / "environment", source)
    ran = stand_in(tmp_path / "index")
    lines = flwr_lines(page)
    assert lines
    for line in lines:
        said = as_a_user(line, programs, tmp_path, tmp_path / "index")
        assert "a new client classifies" in said, said
    assert not ran.exists()
