"""Control rows: what they send, and how many passes they take."""

import runpy
import sys
from functools import partial

import pytest
import torch

import fedprompt as fp
from fedprompt.methods import METHODS, counted_passes, fedclip, fedlora
from same import assert_same
from sent_messages import sent_by
from studies import STUDIES, controls
from studies.controls import CONTROLS, LONGER
from studies.core import Machine
from tiny_federations import federation_of, last, parameters

SENT = {
    "promptfl_csc": {"context"},
    "linear_head": {"head"},
    "fedlora_clip": {"tuned"},
    "plot_independent": {"context"},
    "fedsept_public": {"experts"},
    "fednorms": {"head", "tuned"},
    "pfedme_lora": {"head", "tuned"},
}


def made(name, **options):
    entry = CONTROLS[name]
    family = "CLIP" if entry.families == ("CLIP",) else "one model"
    return entry, federation_of(entry, family, **options)


def test_without_peft_the_other_rows_run(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    assert runpy.run_path(controls.__file__)["CONTROLS"].keys() == CONTROLS.keys()


@pytest.mark.parametrize("name", CONTROLS)
def test_only_averages_send_something(name):
    entry, federation = made(name, rounds=1)
    messages = sent_by(federation)
    last(entry.make, federation)
    sent = [{part.split(".")[0] for part in payload} for _, _, payload in messages.of("up")]
    expected = SENT.get(name, set())
    assert sent == [expected] * len(sent)
    assert sent


@pytest.mark.parametrize(
    ("name", "times"),
    [("local_twice", 2), ("local_thrice", 3), ("fedlora_thrice", 3), ("lora_thrice", 3)],
)
def test_rows_take_several_times_the_batches(name, times):
    entry, federation = made(name, rounds=1)
    with counted_passes() as passes:
        last(entry.make, federation)
    assert passes["backward"] == times * federation.steps * federation.cohort_size


@pytest.mark.parametrize(("name", "family"), [("local", "mixed models"), ("coop", "CLIP")])
def test_with_its_own_batches_alone_a_longer_row_is_training_alone_of_every_model(name, family):
    """Each client once had the network of client 0."""
    made = federation_of(METHODS[name], family, cohort_size=5)
    plain, same, twice = (
        last(make, made) for make in (METHODS[name].make, LONGER, partial(LONGER, times=2))
    )
    for client in range(6):
        values = [parameters(each, client) for each in (plain, same, twice)]
        assert_same(values[0], values[1])
        assert values[2].keys() == values[0].keys()
        moved = [not torch.equal(values[2][name], value) for name, value in values[0].items()]
        assert any(moved) == (client in made.clients)
    assert_same(*(fp.snapshot(each.received(4)) for each in (plain, twice)))


@pytest.mark.parametrize(
    ("alone", "average"),
    [
        ("norms_alone", CONTROLS["fednorms"].make),
        ("fedlora_alone", fedlora),
        ("lora_alone", partial(fedlora, rank=4)),
        ("adapter_alone", fedclip),
    ],
)
def test_alone_is_the_average_of_one_client_also_beside_others(alone, average):
    entry, several = made(alone, cohort_size=5)
    _, one = made(alone, clients=[4], cohort_size=1)
    values = [parameters(last(*of), 4) for of in ((entry.make, several), (average, one))]
    assert_same(*values)
    assert set(values[0]) - {"head.weight", "head.bias"}


@pytest.mark.parametrize(
    ("control", "controlled"), [("plot_independent", "fedplot"), ("fedsept_public", "fedsept")]
)
def test_a_control_lacks_the_mechanism(control, controlled):
    entry, federation = made(control, rounds=1, cohort_size=5)
    makes = entry.make, METHODS[controlled].make
    one, other = (parameters(last(make, federation), 0) for make in makes)
    assert one.keys() == other.keys()
    assert any(not torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("partition", ["fedl2g-iid", "fedl2g-dirichlet"])
def test_training_without_the_quiz_follows_no_guide_in_any_round(partition):
    task = STUDIES["ablations-fedl2g"]
    rows = {row.title: row for row in task.rows(partition)}
    row = rows["Local training without the quiz"]
    trial = task.make(partition, row, seed=0, machine=Machine())
    assert row.values["warm_up"] == trial.setting.rounds
    learned = {**rows["FedL2G-f"].values, "warm_up": trial.setting.rounds}
    assert row.values == learned
