"""Which method when: the example, folders of clients, and the recommendation."""

import pytest
from PIL import Image

from tasks import runs, whichwhen
from tasks.core import Machine, TaskError
from tasks.runs import Cell

HEAD, SCAFFOLD = "Head tuning", "SCAFFOLD"
(HEAD_ROW,) = (row for row in whichwhen.ROWS if row.title == HEAD)
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
    assert whichwhen.chosen(rows, "own") == f"{HEAD} ({gain} to local training)"
    rows[HEAD] = seeds(0.70, 0.72, 0.71, 0.72, 0.70, sent=1)  # .024 below, interval .008
    assert whichwhen.chosen(rows, "own").startswith(SCAFFOLD)
    rows[whichwhen.LOCAL] = seeds(0.73, 0.75, 0.73, 0.73, 0.74)
    assert whichwhen.chosen(rows, "own") == whichwhen.LOCAL


def test_each_folder_is_a_client_with_its_test_images(tmp_path):
    for number, (client, count) in enumerate({"a": 24, "b": 36}.items()):
        for side, size in (("train", count), ("test", 4)):
            for place in range(size):
                path = tmp_path / client / side / f"class {place % 2}" / f"{place}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (32, 32), (number * 100, place, 0)).save(path)
    machine = Machine(root=tmp_path, weights={"vit_tiny_patch16_224": None}, shrink=0.01)
    trial = whichwhen.make("yours", HEAD_ROW, seed=0, machine=machine, validate=False)
    assert trial.mixes.tolist() == [[12, 12, 0, 0], [0, 0, 18, 18]]
    assert trial.test_cells.bincount().tolist() == [2, 2, 2, 2]
    for row in (HEAD_ROW, LORA_ROW):
        found = runs.run(Cell("which-when", "yours", row, 0, None, machine))
        assert 0 <= found["own"] <= 1
    trial = whichwhen.make("yours", HEAD_ROW, seed=0, machine=machine, validate=True)
    tested, trained = (
        {tuple(image[:2, 0, 0].tolist()) for image in side}
        for side in (trial.test, trial.federation.inputs)
    )
    assert not tested & trained
    assert trial.test_cells.bincount().tolist() == [3, 3, 4, 4]  # a quarter of 12 and of 18


def test_folders_without_clients_are_refused(tmp_path):
    (tmp_path / "a" / "train").mkdir(parents=True)
    with pytest.raises(TaskError, match="`--root` must have a folder for each client"):
        whichwhen.read(tmp_path)


def test_a_network_must_be_named():
    with pytest.raises(TaskError, match="`--weights NAME=FILE` is missing"):
        whichwhen.network(Machine())


def test_a_missing_package_stops_before_the_other_rows(monkeypatch):
    monkeypatch.setattr(whichwhen, "find_spec", lambda name: None)
    with pytest.raises(TaskError, match="The row FedLoRA needs PEFT"):
        whichwhen.make("example", LORA_ROW, seed=0, machine=Machine(), validate=True)


def test_few_seeds_recommend_nothing():
    found = [record | {"partition": "example", "row": HEAD, "trial": None} for record in seeds(0.5)]
    assert whichwhen.advice(found, "example").startswith("This run recommends nothing")
