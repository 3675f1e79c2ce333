"""A folder of images: its protocols, the families of a CLIP, and files that are made once."""

import time
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pytest
import torch
from filelock import FileLock

from comparisons import CLASSES, digits, folder, tiny_vit, trial_of
from fedprompt import TextTower, compare, samples
from fedprompt.compare import images, rows, tokens
from fedprompt.compare.trials import CompareError
from fedprompt.data import divisions, read_folder
from fedprompt.methods import METHODS
from refusals import refused

LAYOUT = {"layout": "domain/class", "rounds": 1, "steps": 1}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return folder(tmp_path_factory.mktemp("images"), "{domain}/{name}")


def clip():
    return TextTower(samples.clip(), samples.tokenize)


def rows_of(results):
    return {record["row"] for record in results.found}


def test_methods_of_the_image_tower_of_a_clip_are_in_its_table(root):
    problem = compare.folder(root, clip=clip(), **LAYOUT)
    results = compare.run(problem, ["zero_shot", "promptfl", "head_tuning"], seeds=1)
    alone = rows.ALONE.title
    assert rows_of(results) == {
        *("Zero-shot CLIP", "PromptFL", "Head tuning", rows.CONSTANT, alone, f"{alone}{rows.TOWER}")
    }
    towers = {record["row"] for record in results.found if record.get("tower")}
    assert towers == {"Head tuning", f"{alone}{rows.TOWER}"}
    (view,) = results.views().values()
    assert view.reference_of("Head tuning", "training alone") == f"{alone}{rows.TOWER}"
    assert view.reference_of("PromptFL", "training alone") == alone


def test_base_to_new_has_h_of_both_accuracies_and_chance_for_new_classes(root):
    problem = compare.folder(root, clip=clip(), base_to_new=True, **LAYOUT)
    found = compare.run(problem, ["promptfl"], seeds=1).found
    for record in found:
        for end, base in {"": "full", "_balanced": "balanced"}.items():
            pair = record[base], record[f"new{end}"]
            expected = 2 * pair[0] * pair[1] / max(sum(pair), 1e-12)
            assert record[f"h{end}"] == pytest.approx(expected, rel=1e-4)
    (constant,) = [each for each in found if each["row"] == rows.CONSTANT]
    assert constant["new"] == constant["new_balanced"] == 0.5  # of two classes


def test_an_unseen_domain_is_tested_with_all_its_images(root):
    problem = compare.folder(root, vit=tiny_vit(), leave_one_out=True, **LAYOUT)
    assert [*problem.partitions] == ["art", "photo"]
    trial = trial_of(problem, "art")
    assert len(trial.further["unseen"].labels) == 24
    assert trial.names == ("photo",)
    results = compare.run(problem, ["head_tuning"], seeds=1)
    means = [each for each in results.views()[""].found if each["row"] == "Head tuning"]
    of = [each["unseen"] for each in results.found if each["row"] == "Head tuning"]
    assert means[0]["unseen"] == pytest.approx(np.mean(of))


def test_another_folder_has_its_own_classes_for_a_clip_alone(root, tmp_path):
    other = folder(tmp_path / "a", "{name}", count=3)
    for place in (*other.iterdir(),):
        place.rename(place.with_name(f"{place.name} drawn"))
    allow = {"allow": ["train-and-test"]}
    problem = compare.folder(root, clip=clip(), test=other, **LAYOUT, **allow)
    found = compare.run(problem, ["promptfl", "head_tuning"], seeds=1).found
    scores = {record["row"]: record.get("transfer") for record in found}
    assert scores["Head tuning"] is None  # it learned something for each class
    assert scores["PromptFL"] is not None
    assert scores[rows.CONSTANT] == 0.25
    with pytest.raises(CompareError, match="`test` must have classes of the folder"):
        compare.folder(root, vit=tiny_vit(), test=other, **LAYOUT, **allow)


def test_new_clients_never_train_and_are_tested(root):
    problem = compare.folder(root, vit=tiny_vit(), clients="iid:3", newcomers=1, **LAYOUT)
    results = compare.run(problem, ["head_tuning"], seeds=1)
    found = next(each for each in results.found if each["row"] == "Head tuning")
    assert {"received", "after"} <= found.keys()
    assert {*found["clients"]} == {"0", "1", "2"}
    assert "own" not in found["clients"]["2"]


def test_few_shots_are_of_all_clients_together(root):
    problem = compare.folder(root, vit=tiny_vit(), shots=2, **LAYOUT)
    trial = trial_of(problem)
    assert sum(len(part) for part in trial.federation.shards.values()) == 2 * len(CLASSES)


def test_a_tuning_trial_sees_no_test_image_and_half_of_the_rounds(root):
    problem = compare.folder(root, vit=tiny_vit(), **{**LAYOUT, "rounds": 3})
    whole, tried = (trial_of(problem, validate=each) for each in (False, True))
    assert (whole.setting.rounds, tried.setting.rounds) == (3, 2)
    for client, part in whole.federation.shards.items():
        places = tried.places[tried.tests.own[client]]
        assert {*places.tolist()} | {*tried.federation.shards[client].tolist()} == {*part.tolist()}


def test_shrunk_trials_keep_their_clients():
    small = trial_of(digits(rounds=10, steps=10)).shrunk(0.25)
    assert (small.setting.rounds, small.setting.steps) == (3, 3)
    assert [len(part) for part in small.federation.shards.values()] == [20, 20, 20]
    assert len(small.tests.labels) == len(small.places) == 60
    whole = trial_of(digits(rounds=1, steps=1)).shrunk(1)
    assert (whole.setting.rounds, whole.setting.steps) == (1, 1)  # at least 2 only if shrunk


def test_levels_are_decoded_once_and_a_damaged_file_of_them_again(root, tmp_path):
    from fedprompt.backbones.preparation import Preparation

    found = read_folder(root, layout="domain/class")
    how = {"content": "x", "preparation": Preparation(32, (0.5,) * 3, (0.5,) * 3)}
    first, _ = images.decoded(found, tmp_path, **how)
    (path,) = tmp_path.glob("*.images")
    before = path.stat().st_mtime_ns
    again, _ = images.decoded(found, tmp_path, **how)
    every = torch.arange(len(found))
    assert torch.equal(first[every], again[every])
    assert path.stat().st_mtime_ns == before
    expected = [how["preparation"].levels(images.opened(each)) for each in found.paths]
    assert torch.equal(first[every], torch.stack(expected))
    content = bytearray(path.read_bytes())
    content[300] ^= 1
    path.write_bytes(content)
    assert torch.equal(images.decoded(found, tmp_path, **how)[0][every], torch.stack(expected))
    assert len([*tmp_path.glob("*.images")]) == 1


def test_damaged_and_large_images_are_refused_or_left_out(tmp_path, capsys):
    root = folder(tmp_path / "images")
    (root / "cat" / "bad.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    given = {"vit": tiny_vit(), "clients": "iid:2", "rounds": 1}
    with pytest.raises(ValueError, match=r"^1 of 25 .* cannot be read, such as .*bad\.png \(.+\)"):
        compare.run(compare.folder(root, **given), ["head_tuning"], seeds=1, out=tmp_path / "out")
    said = []
    problem = compare.folder(root, **given, skip=True, say=said.append)
    assert any("Left out, because they cannot be read: 1." in text for text in said)
    compare.run(problem, ["head_tuning"], seeds=1, out=tmp_path / "out")  # nothing had finished
    said = capsys.readouterr().err
    assert "Reading 25 images.\nDecoding 25 images.\n" in said
    with pytest.raises(ValueError, match=r"at most 1,023 pixels; got 32 x 32 \(`max_pixels`"):
        compare.folder(root, **given, max_pixels=1023)


def test_tokens_are_of_the_needed_images_and_damaged_ones_are_made_again(tmp_path):
    asked = []

    def encode(positions):
        asked.append(positions.tolist())
        return positions.float()[:, None, None].expand(-1, 2, 3)

    made = tokens.Tokens(tmp_path / "t", 200, encode)
    first = made[torch.tensor([5, 199, 5])]
    assert torch.equal(first[:, 0, 0], torch.tensor([5.0, 199.0, 5.0]))
    assert {place for each in asked for place in each} == {0, 5, 199}
    assert {len(each) for each in asked} == {tokens.BATCH}
    asked.clear()
    other = tokens.Tokens(tmp_path / "t", 200, encode)
    assert torch.equal(other[torch.tensor([199])], first[1:2])
    assert not asked
    values = np.load(tmp_path / "t" / "tokens.npy", mmap_mode="r+")
    values[5] = 7
    values.flush()
    again = tokens.Tokens(tmp_path / "t", 200, encode)
    assert torch.equal(again[torch.tensor([5])], first[:1])
    assert [5] * tokens.BATCH in asked


def test_a_process_waits_for_another_one_that_encodes_for_long(tmp_path, monkeypatch):
    monkeypatch.setattr("fedprompt._files.WAIT", 0.01)
    made = tokens.Tokens(tmp_path / "t", 9, lambda at: at.float()[:, None, None].expand(-1, 1, 2))
    (tmp_path / "t").mkdir()
    held = Event()

    def hold():
        with FileLock(tmp_path / "t" / ".lock"):
            held.set()
            time.sleep(0.2)

    Thread(target=hold).start()
    held.wait()
    assert made[torch.tensor([3])].flatten().tolist() == [3, 3]


def test_a_folder_without_domains_is_divided_by_dirichlet_shares(tmp_path):
    said = []
    root = folder(tmp_path / "a", count=15)
    compare.folder(root, vit=tiny_vit(), rounds=1, say=said.append)
    assert "clients dirichlet:0.3:2, seed 0" in "\n".join(said)
    tested = divisions.sides(read_folder(root))[1]
    assert len(tested) == 0  # a share is drawn


def made(path="missing", **options):
    return compare.folder(Path(path), **options)


TINY = tiny_vit()

test_refusals = refused(globals())("""
made() -> CompareError: Give one network: `vit` or `clip`
made(vit="a", clip="b") -> CompareError: Give one network
made(vit="a", rounds=0) -> ValueError: `rounds` must be at least 1; got 0.
made(vit="a", steps=1, epochs=1) -> ValueError: `epochs` must be None if `steps` is given; got 1.
made(vit="a", newcomers=-1) -> ValueError: `newcomers` must be at least 0; got -1.
made(vit="a", max_pixels=0) -> ValueError: `max_pixels` must be at least 1; got 0.
made(vit="a", shots=0) -> ValueError: `shots` must be at least 1; got 0.
made(vit="a", clients="") -> ValueError: `clients` must not be empty
made(vit="a", cohort=2) -> TypeError: `cohort` must be an argument
made(vit="a", template="a photo") -> ValueError: `template` must have one {} for the name of a class
made(vit="a", base_to_new=True) -> CompareError: `base_to_new` needs `clip`
made(clip="a", base_to_new=True, leave_one_out=True) -> CompareError: and no `leave_one_out`
made(vit="a", cache="") -> ValueError: `cache` must be the path of a folder
made(vit=TINY) -> FileNotFoundError: `root` must be a folder or a list of images; missing
compare.problem(1, 2, 3, 4, setting=5) -> TypeError: `setting` must be a Setting
digits(newcomers=3) -> ValueError: `newcomers` must be below 3, the clients; got 3.
digits(cohort_size=4) -> ValueError: `cohort_size` must be at most 3, the clients that train; got 4.
""")


FEW = {
    "one model": ["fedproto", "pfedpt", "fedlora:sizes={1: 1}"],
    "CLIP": ["pfedmoap", "promptfl:sizes={0: 3}"],
}
FITTING = {
    family: [name for name, entry in METHODS.items() if rows.fits(entry, family)] for family in FEW
}
LOADED = [(*each, 1) for each in FEW.items()]
LOADED += [pytest.param(*each, 2, marks=pytest.mark.slow) for each in FITTING.items()]


@pytest.mark.parametrize(("family", "methods", "seeds"), LOADED)
def test_accuracies_of_loaded_classifiers_are_those_of_the_records(
    family, methods, seeds, tmp_path
):
    root = folder(tmp_path / "images", "{split}/{domain}/{name}")
    network = {"clip": "emoji"} if family == "CLIP" else {"vit": "digits-B"}
    given = {**network, "layout": "split/domain/class", "rounds": 2, "steps": 2}
    problem = compare.folder(root, **given)
    chosen = [name for name in methods if name != rows.usual(family)]
    results = compare.run(problem, chosen, seeds=seeds, out=tmp_path / "out")
    found = read_folder(root, layout="split/domain/class")
    tested = np.flatnonzero(found.split == "test")
    assert not results.failures()
    assert len(rows_of(results)) >= len(chosen) + 2
    for record in results.found:
        for client in ("art", "photo") if record["row"] != rows.CONSTANT else ():
            model = results.classifier(record["row"], client=client, seed=record["seed"])
            own = tested[found.domains[tested] == found.domain_names.index(client)]
            names, _ = model.predict([found.paths[place] for place in own])
            right = np.array(found.class_names)[found.labels[own]] == names
            expected = record["clients"][client]["own"]
            assert np.mean(right) == pytest.approx(expected, abs=1e-6), record["row"]
            assert model.class_names == list(found.class_names)
