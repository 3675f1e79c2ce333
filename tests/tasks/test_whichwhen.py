"""Which method when: the recommendation."""

import pytest

from fedprompt.compare import advice
from fedprompt.compare.trials import CompareError
from tasks import whichwhen
from tasks.core import Machine

HEAD, SCAFFOLD = "Head tuning", "SCAFFOLD"
LORA_ROW = whichwhen.ROWS[0]


def seeds(*own, sent=0):
    return [{"seed": n, "own": each, "bytes_up": sent} for n, each in enumerate(own)]


def test_the_cheapest_row_that_is_not_shown_to_be_worse_is_recommended():
    rows = {
        whichwhen.LOCAL: seeds(0.5, 0.5, 0.5, 0.5, 0.5),
        HEAD: seeds(0.70, 0.76, 0.70, 0.76, 0.70, sent=1),
        SCAFFOLD: seeds(0.73, 0.74, 0.73, 0.74, 0.73, sent=2),
    }
    # SCAFFOLD is .01 above the head, whose differences have an interval of .026
    gain = "+22.4 ± 4.1 points"  # mean of 20, 26, 20, 26, 20; 2.776 * 3.286 / sqrt(5)
    assert (
        advice.chosen(rows, "own", [whichwhen.LOCAL], "local training")
        == f"{HEAD} ({gain} to local training)"
    )
    rows[HEAD] = seeds(0.70, 0.72, 0.71, 0.72, 0.70, sent=1)  # .024 below, interval .008
    assert advice.chosen(rows, "own", [whichwhen.LOCAL], "local training").startswith(SCAFFOLD)
    rows[whichwhen.LOCAL] = seeds(0.73, 0.75, 0.73, 0.73, 0.74)
    assert advice.chosen(rows, "own", [whichwhen.LOCAL], "local training") == whichwhen.LOCAL


def test_a_missing_package_stops_before_the_other_rows(monkeypatch):
    monkeypatch.setattr(whichwhen, "find_spec", lambda name: None)
    with pytest.raises(CompareError, match="The row FedLoRA needs PEFT"):
        whichwhen.make("example", LORA_ROW, seed=0, machine=Machine(), validate=True)


def test_few_seeds_recommend_nothing():
    found = [record | {"partition": "example", "row": HEAD, "trial": None} for record in seeds(0.5)]
    assert (
        whichwhen.TASKS["which-when"]
        .advice(found, "example")
        .startswith("This run recommends nothing")
    )
    found = [*found] * advice.FEWEST  # without local training
    assert (
        whichwhen.TASKS["which-when"]
        .advice(found, "example")
        .startswith("This run recommends nothing")
    )
