"""Which method when: the example, folders of clients, and the recommendation."""

import pytest
import timm
from PIL import Image
from safetensors.torch import save_file

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


def write(root, counts, size=32):
    """Write images of a client, side and class, whose color says where they are."""
    for number, (folder, count) in enumerate(counts.items()):
        for place in range(count):
            path = root / folder / f"{place}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (size, size), (number * 20, place, 0)).save(path)


TWO = {"a/train/one": 12, "a/train/two": 12, "a/test/one": 2, "a/test/two": 2}
TWO |= {"b/train/one": 18, "b/train/two": 18, "b/test/one": 2, "b/test/two": 2}
FEW = {"a/train/one": 2, "a/test/one": 1, "b/train/three": 2, "b/train/two": 1, "b/test/four": 1}


@pytest.fixture
def weights(tmp_path):
    path = tmp_path / "weights" / "vit.safetensors"
    path.parent.mkdir()
    model = timm.create_model("test_vit", num_classes=0, img_size=whichwhen.SIZE)
    save_file(model.state_dict(), path)
    return {"test_vit": path}


def test_each_folder_is_a_client_with_its_test_images(tmp_path, weights):
    root = tmp_path / "images"
    write(root, TWO)
    machine = Machine(root=root, weights=weights, shrink=0.01)
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
    assert (trial.test_cells // 2).bincount().tolist() == [6, 9]  # a quarter of each client's


def test_clients_may_have_different_classes_and_few_images(tmp_path, weights):
    write(tmp_path / "images", FEW)
    (tmp_path / "images" / "a" / "train" / ".hidden").mkdir()
    machine = Machine(root=tmp_path / "images", weights=weights)
    trial = whichwhen.make("yours", HEAD_ROW, seed=0, machine=machine, validate=False)
    assert trial.setting.num_classes == 4  # four, one, three and two
    assert trial.mixes.tolist() == [[0, 2, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 2, 1]]
    trial = whichwhen.make("yours", HEAD_ROW, seed=0, machine=machine, validate=True)
    assert (trial.test_cells // 4).tolist() == [0, 1]


def test_records_and_decoded_images_belong_to_their_images_and_weights(tmp_path, weights):
    root, other = tmp_path / "images", tmp_path / "other"
    write(root, TWO)
    write(other, TWO, size=40)

    def key(root, weights=weights):
        return Cell("which-when", "yours", HEAD_ROW, 0, None, Machine("cpu", root, weights)).key()

    first = key(root)
    write(root, TWO)  # the same names and sizes, later
    whichwhen.identity.cache_clear()
    assert key(root) != first
    first = key(root)
    assert first == key(root) != key(other)
    changed = tmp_path / "changed.safetensors"
    changed.write_bytes(weights["test_vit"].read_bytes()[:-1] + b"x")
    assert key(root, {"test_vit": changed}) != first
    whichwhen.read(root)
    (root / "a/train/one/0.png").rename(root / "b/train/two/18.png")
    whichwhen.identity.cache_clear()
    assert key(root) != first
    train, _, count = whichwhen.read(root)
    assert train.cells(count).bincount().tolist() == [11, 12, 18, 19]


def test_folders_without_clients_are_refused(tmp_path):
    (tmp_path / "a" / "train").mkdir(parents=True)
    with pytest.raises(TaskError, match="`--root` must have a folder for each client"):
        whichwhen.read(tmp_path)


def test_a_side_of_a_client_without_images_is_named(tmp_path):
    write(tmp_path, {name: count for name, count in TWO.items() if "b/test" not in name})
    with pytest.raises(TaskError, match=r"b/test must have at least 1 images .*; got 0"):
        whichwhen.read(tmp_path)


def test_one_vision_transformer_must_be_named(tmp_path, weights):
    for wrong in ({}, weights | {"vit_tiny_patch16_224": tmp_path}):
        with pytest.raises(TaskError, match="`--weights NAME=FILE` must be given once"):
            whichwhen.network(Machine(weights=wrong))
    for name in ("resnet18", "vit_tiny_patch16_224", "no_such_network"):
        with pytest.raises(TaskError, match=f"must name a vision transformer; {name}: "):
            whichwhen.network(Machine(weights={name: weights["test_vit"]}))


def test_a_missing_package_stops_before_the_other_rows(monkeypatch):
    monkeypatch.setattr(whichwhen, "find_spec", lambda name: None)
    with pytest.raises(TaskError, match="The row FedLoRA needs PEFT"):
        whichwhen.make("example", LORA_ROW, seed=0, machine=Machine(), validate=True)


def test_few_seeds_recommend_nothing():
    found = [record | {"partition": "example", "row": HEAD, "trial": None} for record in seeds(0.5)]
    assert whichwhen.advice(found, "example").startswith("This run recommends nothing")
    found = [*found] * whichwhen.FEWEST  # without local training
    assert whichwhen.advice(found, "example").startswith("This run recommends nothing")
