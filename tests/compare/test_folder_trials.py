"""Trials of a folder of which image k has the level k: clients and tests are counted by hand."""

import gc
import tempfile
from dataclasses import replace
from importlib import import_module
from itertools import chain

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import fedprompt as fp
from fedprompt import compare, data, samples
from fedprompt.backbones.pretrained import network
from fedprompt.compare import divisions
from fedprompt.compare.rows import Row
from fedprompt.compare.trials import CompareError, Machine
from refusals import refused

FOLDER = import_module("fedprompt.compare.folder")
GIVEN = dict.fromkeys(("clients", "shots", "steps", "cohort_size", "batch_size", "autocast"))
GIVEN |= {"base_to_new": False, "leave_one_out": False, "newcomers": 0, "rounds": 3}
GIVEN |= {"template": "a {}."}


@pytest.fixture(scope="module")
def vit():
    return network(timm.create_model("test_vit", img_size=32, num_classes=0), "vit")


@pytest.fixture(scope="module")
def clip():
    return network(fp.TextTower(samples.clip(), samples.tokenize), "clip")


@pytest.fixture
def store(vit, tmp_path):
    """24 images of three domains and two classes, every fourth one for testing."""

    def made(count=24, made=vit, classes=("an_ant", "bee"), domains=("a", "b", "c")):
        (tmp_path / "x.png").touch()
        numbers, split = np.arange(count), ["test", "train", "train", "train"] * (count // 4)
        pixels = torch.arange(count, dtype=torch.uint8)[:, None, None, None]
        pixels = pixels.expand(count, 3, made.preparation.size[0], made.preparation.size[0])
        paths, of = (tmp_path / "x.png",) * count, numbers * len(domains) // count
        labels = numbers // 2 % len(classes)
        found = data.Folder(tmp_path, "x", paths, labels, of, np.array(split), classes, domains)
        return FOLDER.Store(pixels, found, made, tmp_path)

    return made


def problem(*stores, say=print, **given):
    return FOLDER._problem(stores, GIVEN | given, "title", say)


def trial(made, partition="", row="fedprox", seed=0):
    return made.make(partition, Row.of(row), seed=seed, machine=Machine(), validate=False)


def levels(inputs, positions=None):
    chosen = inputs[torch.arange(len(inputs)) if positions is None else torch.as_tensor(positions)]
    return chosen[:, 0, 0, 0].int().tolist()


def test_a_domain_is_left_out_of_clients_and_their_tests(store):
    said = []
    made = problem(store(), say=said.append, leave_one_out=True)
    assert said == ["clients domains, seed 0\n  b: train 6, test 2\n  c: train 6, test 2"]
    assert dict(made.partitions) == {name: f"without {name}, domains" for name in "abc"}
    found = trial(made, "b", seed=5)
    shards = [levels(found.federation.inputs, found.federation.shards[k]) for k in (0, 1)]
    assert shards == [[1, 2, 3, 5, 6, 7], [17, 18, 19, 21, 22, 23]]
    assert [levels(found.test, part) for part in found.own] == [[0, 4], [16, 20]]
    assert found.test_cells.tolist() == [0, 0, 0, 0]
    assert (found.names, levels(found.further["unseen"].inputs)) == (("a", "c"), [*range(8, 16)])
    assert found.further["unseen"].labels.tolist() == [0, 0, 1, 1] * 2
    assert found.further["unseen"].class_names is None
    assert found.mixes.tolist() == [[2, 4], [2, 4]]
    setting, values = found.setting, {"num_classes": 2, "rounds": 3, "steps": 2, "batch_size": 4}
    values |= {"cohort_size": 2, "autocast": None, "seed": 5, "clients": range(2)}
    assert {name: getattr(setting, name) for name in values} == values


def test_a_budget_a_client_that_never_trains_and_few_images_of_each_class(store):
    budget = {"rounds": 4, "steps": 5, "cohort_size": 1, "batch_size": 3, "newcomers": 1}
    made = problem(store(), **budget, autocast=torch.bfloat16, clients="iid:2", shots=4)
    found = trial(made, seed=7)
    values = {"rounds": 4, "steps": 5, "cohort_size": 1, "batch_size": 3}
    values |= {"autocast": torch.bfloat16, "clients": range(1)}
    assert {name: getattr(found.setting, name) for name in values} == values
    assert (list(found.newcomers), found.mixes.sum(0).tolist()) == ([1], [4, 4])
    shards = [levels(found.federation.inputs, part) for part in found.federation.shards.values()]
    assert len({*chain(*shards)} - {*range(0, 24, 4)}) == 8
    assert sorted(chain(*(levels(found.test, part) for part in found.own))) == [*range(0, 24, 4)]
    other = trial(made, seed=8)
    assert [levels(other.federation.inputs, p) for p in other.federation.shards.values()] != shards


def test_classes_of_base_and_new_tests_are_numbered_among_their_own(store, clip):
    made = store(32, clip, ("a_b", "c", "d", "e_f"), ("",))
    found = trial(
        problem(made, made, base_to_new=True, clients="iid:1", template="one {}."), row="promptfl"
    )
    setting = found.setting
    assert (setting.class_names, setting.template) == (["a b", "c"], "one {}.")
    tests = dict(found.further)
    assert {name: part.labels.tolist() for name, part in tests.items()} == {
        "new": [0] * 4, "transfer": [0, 2] * 4,
    }  # fmt: skip
    assert [part.class_names for part in tests.values()] == [["d", "e f"], ["a b", "c", "d", "e f"]]
    prepared = FOLDER.preparation(clip)(made.pixels)
    with torch.no_grad():
        pooled, patches = fp.image_tokens(clip.model, prepared)
    tokens = torch.cat([pooled[:, None], patches], 1)
    places = [k for k in range(32) if k % 4 == 0 and k // 2 % 4 >= 2]
    torch.testing.assert_close(tests["new"].inputs[torch.arange(4)], tokens[places])
    shard = found.federation.inputs[found.federation.shards[0]]
    base = [k for k in range(32) if k % 4 and k // 2 % 4 < 2]
    torch.testing.assert_close(shard, tokens[base])
    images = made.inputs(np.array([3, 5]), "images", "cpu")[torch.tensor([1])]
    torch.testing.assert_close(images, prepared[5:6])


@pytest.mark.unhooked  # a network whose function fails
def test_tokens_are_computed_once_for_as_many_images(store, clip):
    made = store(8, clip, domains=("",))
    first = made.inputs(np.arange(8), "tokens", "cpu")[torch.arange(8)]
    failing = replace(clip)
    object.__setattr__(failing, "tokens", None)
    again = replace(made, network=failing).inputs(np.arange(8), "tokens", "cpu")
    assert torch.equal(again[torch.arange(8)], first)
    fewer = replace(made, pixels=made.pixels[:7])  # of the same files
    assert len(fewer.inputs(np.arange(7), "tokens", "cpu").inputs) == 7


def test_the_usual_division_and_batches_follow_from_the_number_of_images(store):
    for count, clients, batch_size in (
        (8, 2, 4),
        (104, 3, 6),
        (108, 4, 5),
        (160, 6, 5),
        (252, 9, 5),
    ):
        made = store(count, domains=("",))
        how, division = FOLDER.divided_once(made.folder, None, None)
        assert how == f"dirichlet:0.3:{clients}"
        rng = np.random.default_rng(0)
        assert str(division) == str(divisions.divide(made.folder, how, generator=rng))
        assert trial(problem(made)).setting.batch_size == batch_size
    large = store(1200, domains=("",))
    assert FOLDER.divided_once(large.folder, None, None)[0] == "dirichlet:0.3:10"
    for clients, batch_size in (("iid:8", 28), ("iid:6", 32)):  # 112 and 150 images of a client
        assert trial(problem(large, clients=clients)).setting.batch_size == batch_size
    assert FOLDER.divided_once(store().folder, None, None)[0] == "domains"


def test_problems_that_differ_in_one_argument_or_in_their_images_have_other_records(store, vit):
    usual = store()
    folder, given = usual.folder, [{"shots": 8}, {"clients": "iid:2"}, {"rounds": 4}, {"steps": 1}]
    given += [{"cohort_size": 1}, {"batch_size": 2}, {"newcomers": 1}, {"leave_one_out": True}]
    given += [{"autocast": torch.bfloat16}, {"template": "the {}."}]
    folders = {"labels": 1 - folder.labels, "domains": folder.domains[::-1].copy()}
    folders |= {"class_names": ("ant", "bee"), "domain_names": ("a", "b", "d")}
    folders |= {"split": np.where(folder.split == "test", "val", "train")}
    other = usual.folder.root / "y.png"
    other.touch()
    folders["paths"] = (other, *folder.paths[1:])
    stores = [replace(usual, folder=replace(folder, **{n: v})) for n, v in folders.items()]
    both = np.where(np.arange(24) == 1, "val", folder.split)
    stores.append(replace(usual, folder=replace(folder, split=both)))
    model = timm.create_model("test_vit", img_size=32, num_classes=0)
    networks = {"mean": (0.4,) * 3, "std": (0.4,) * 3, "interpolation": "bilinear"}
    own = vit.preparation
    others = [replace(vit, model=model)]
    others += [replace(vit, preparation=replace(own, **{n: v})) for n, v in networks.items()]
    stores += [replace(usual, network=other) for other in others]
    made = [problem(usual), problem(usual, usual), *(problem(usual, **each) for each in given)]
    found = [each.inputs("", Machine())["inputs"] for each in (*made, *map(problem, stores))]
    assert len({*map(str, found)}) == len(found) == 2 + 10 + 7 + 4
    assert problem(replace(usual)).inputs("", Machine()) == {"inputs": found[0]}


COLUMNS = {"full": "all tests", "own": "own tests", "worst": "worst client"}
BASE = {"full": "base classes", "new": "new classes", "h": "H", "own": "own base tests"}
LEFT = {"full": "seen domains", "own": "own tests", "worst": "worst client"}
LEFT |= {"unseen": "unseen domain"}
OTHER = {"transfer": "other folder"}


@pytest.mark.parametrize(
    ("given", "columns", "compared"),
    [
        ((False, False, False), COLUMNS, ("own", "full")),
        ((True, False, False), BASE, ("h", "new")),
        ((False, True, False), LEFT, ("unseen", "own")),
        ((False, False, True), COLUMNS | OTHER, ("transfer", "own")),
        ((True, False, True), BASE | OTHER, ("transfer", "h")),
        ((False, True, True), LEFT | OTHER, ("transfer", "unseen")),
    ],
)
def test_columns_are_those_of_the_protocol(given, columns, compared):
    assert FOLDER.columns_of(*given) == (columns, compared)


def test_a_folder_of_files_has_the_usual_protocol_and_leaves_no_file_but_the_cache(
    tmp_path, monkeypatch
):
    model, temporary = timm.create_model("test_vit", img_size=32, num_classes=0), tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    for domain in "pq":
        for name in ("ant", "bee"):
            (tmp_path / "all" / domain / name).mkdir(parents=True)
            for level in range(9):
                image = Image.new("RGB", (40, 32), (level, 0, 0))
                image.save(tmp_path / "all" / domain / name / f"{level}.png")
    said, cache = [], tmp_path / "cache"
    made = compare.folder(tmp_path / "all", vit=model, say=said.append)
    found, kept = trial(made), compare.folder(tmp_path / "all", vit=model, cache=cache)
    values = {"rounds": 10, "steps": 4, "batch_size": 4, "cohort_size": 2, "autocast": None}
    assert {name: getattr(found.setting, name) for name in values} == values
    assert (made.title, dict(made.partitions)) == ("all, VisionTransformer", {"": "domains"})
    assert (made.columns, made.compared, list(found.newcomers)) == (COLUMNS, ("own", "full"), [])
    assert said[0].startswith(f"{tmp_path / 'all'}: layout domain/class, 36 images")
    assert said[1:] == ["clients domains, seed 0\n  p: train 14, test 4\n  q: train 14, test 4"]
    drawn = divisions.held_out(np.arange(36) // 9, 0.2, np.random.default_rng(0))
    assert levels(found.test) == (np.arange(36) % 9)[drawn].tolist()
    assert len([*temporary.iterdir()]) == 1
    del made, found, kept
    gc.collect()
    assert ([*temporary.iterdir()], len([*cache.iterdir()])) == ([], 1)


def test_damaged_images_of_further_tests_are_left_out_too(tmp_path):
    for name, size in (("all", 3), ("other", 2)):
        for place in ("ant", "bee"):
            (tmp_path / name / place).mkdir(parents=True)
            for level in range(size):
                Image.new("RGB", (32, 32)).save(tmp_path / name / place / f"{level}.png")
    for place, text in (("ant/0.png", "x"), ("bee/0.png", "")):
        (tmp_path / "other" / place).write_text(text)
    model = timm.create_model("test_vit", img_size=32, num_classes=0)
    given = {"vit": model, "test": tmp_path / "other", "clients": "iid:2"}
    found = trial(compare.folder(tmp_path / "all", **given, skip=True))
    assert found.further["transfer"].labels.tolist() == [0, 1]
    with pytest.raises(CompareError, match=r"0\.png is empty\. .* by `skip=True`"):
        compare.folder(tmp_path / "all", **given)


test_wrong_protocols_are_refused = refused(globals())("""
compare.folder('x') -> CompareError: Give one network: `vit` or `clip`
compare.folder('x', vit='y', clip='z') -> CompareError: Give one network: `vit` or `clip`
compare.folder('x', vit='y', template='') -> ValueError: `template` must not be empty; got ''.
compare.folder('x', vit='y', template=3) -> TypeError: `template` must be a string; got 3 (int)
compare.folder('x', vit='y', leave_one_out=1) -> TypeError: `leave_one_out` must be True or False
compare.folder('x', vit='y', test=3) -> TypeError: `test` must be a path
compare.folder('x', vit='y', say=3) -> TypeError: `say` must be
compare.folder('x', vit='y', base_to_new=True) -> CompareError: `base_to_new` needs a CLIP, and no
compare.folder('x', clip='y', base_to_new=True, leave_one_out=True) -> CompareError: `base_to_new`
""")


@pytest.mark.parametrize("domains", [("",), ("a",)])
def test_one_domain_cannot_be_left_out(domains, store):
    with pytest.raises(CompareError, match="needs a folder with two domains or more"):
        problem(store(domains=domains), leave_one_out=True)
    assert list(problem(store(domains=("a", "b")), leave_one_out=True).partitions) == ["a", "b"]
