"""A folder of images, from its files to figures that are computed again from the saved prompts."""

import csv
import json
import os
import pickle
import re
import shlex
import sys
from argparse import Namespace
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

import fedprompt as fp
from fedprompt import compare, data, methods, samples
from fedprompt.compare import cells, command, measure, records, results, rows
from fedprompt.compare.cells import Cell
from fedprompt.compare.trials import CompareError, Machine
from fedprompt.methods import METHODS
from refusals import refused

CLASSES, DOMAINS = ("chat noir", "ö été", "zebra", "hund"), ("art", "photo été", "sketch")
SIZE = 32
FEW = ["--size", str(SIZE), "--rounds", "1", "--steps", "1", "--seeds", "1", "--workers", "1"]


def write(root, layout, count, classes=CLASSES):
    """Write images whose color says the class, and whose brightness the domain."""
    draw = np.random.default_rng(0)
    for domain, place in enumerate(DOMAINS):
        for label, name in enumerate(classes):
            for number in range(count):
                color = np.eye(4)[label][:3] * 120 + 20 * domain
                pixels = (color + draw.normal(60, 15, (SIZE, SIZE, 3))).clip(0, 255)
                split = "test" if number % 3 == 0 else "train"
                path = root / layout.format(domain=place, split=split, name=name)
                path.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels.astype(np.uint8)).save(path / f"{domain} {number}.png")
    return root


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return write(tmp_path_factory.mktemp("images") / "été", "{domain}/{split}/{name}", 9)


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    return write(tmp_path_factory.mktemp("few"), "{domain}/{split}/{name}", 3)


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "vit.safetensors"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = timm.create_model("test_vit", num_classes=0, img_size=SIZE)
    save_file(model.state_dict(), path)
    return f"test_vit={path}"


def pixels_of(found, places):
    """Read images as the network takes them: of its size, with its mean and deviation."""
    images = [np.array(Image.open(found.paths[place])) for place in places]
    stack = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2) / 255
    return (stack - 0.5) / 0.5


def test_figures_of_a_command_are_those_of_the_saved_prompts(images, vit, tmp_path, capsys):
    flags = [str(images), "--vit", vit, "--methods", "fedprox,ditto", "--out", str(tmp_path)]
    command.main([*flags, *FEW])
    said = capsys.readouterr().out
    assert "layout domain/split/class, 108 images, 4 classes, 3 domains" in said
    assert "photo été: train 24, test 12" in said
    model = timm.create_model("test_vit", num_classes=0, img_size=SIZE)
    model.load_state_dict(fp.freeze(model).state_dict() | weights_of(vit))
    trunk, found = fp.vit_trunk(fp.freeze(model)), data.read_folder(images)
    setting = methods.VitSetting(trunk=trunk, num_classes=4, rounds=1)
    with (tmp_path / "clients.csv").open() as file:
        listed = list(csv.DictReader(file))
    for row, domain in [("FedProx", 0), ("Ditto", 0), ("Ditto", 2)]:
        end = "" if row == "FedProx" else f"-{DOMAINS[domain]}"
        mine = setting.new_model()
        (path,) = (tmp_path / "prompts").glob(f"{row.lower()}-seed0-????????{end}.safetensors")
        fp.load_prompts(mine, path, trunk=trunk)
        tests = np.flatnonzero(found.split == "test")
        right = mine(pixels_of(found, tests)).argmax(1).numpy() == found.labels[tests]
        own = right[found.domains[tests] == domain].mean()
        (line,) = (
            each for each in listed if (each["method"], each["client"]) == (row, DOMAINS[domain])
        )
        assert (float(line["own"]), float(line["full"])) == pytest.approx(
            (own, right.mean()), abs=1e-5
        )
    assert {"table.md", "table.csv", "seeds.csv", "bars.png", "records.jsonl"} <= {
        p.name for p in tmp_path.iterdir()
    }
    assert "fedprompt compare " in (tmp_path / "table.md").read_text()


def weights_of(vit):
    from safetensors.torch import load_file

    return load_file(vit.partition("=")[2])


def test_a_problem_of_another_process_and_a_continued_run_have_the_same_figures(
    images, vit, tmp_path
):
    problem = compare.folder(images, vit=vit, size=SIZE, rounds=1, steps=1)
    sent = pickle.loads(pickle.dumps(problem))  # as a worker gets it
    for each, name in ((problem, "one"), (sent, "two")):
        compare.run(each, ["fedprox"], seeds=1, out=tmp_path / name)
    path, other = (tmp_path / name / "records.jsonl" for name in ("one", "two"))
    text = path.read_text()
    assert text == other.read_text()
    path.write_text(text[: text.rfind("\n", 0, -1) + 9])  # a kill lost the last run
    compare.run(problem, ["fedprox"], seeds=1, out=tmp_path / "one")
    assert path.read_text() == text


def test_images_with_other_labels_are_another_problem(images, vit, tmp_path):
    """Records of one are not those of the other."""
    files, found = sorted(images.rglob("*.png"))[::4], []
    for shift in (0, 0, 1):
        rows = [f"{path},{'abc'[(number + shift) % 3]}" for number, path in enumerate(files)]
        (tmp_path / "list.csv").write_text("\n".join(["path,label", *rows]))
        problem = compare.folder(tmp_path / "list.csv", vit=vit, size=SIZE, clients="iid:2")
        found.append(problem.inputs("", Machine()))
    assert found[0] == found[1] != found[2]


@pytest.mark.unhooked  # parts of a trial are enough
def test_a_client_belongs_to_the_domain_with_most_of_its_inputs():
    mixes = torch.tensor([[5, 0, 1, 1], [0, 1, 1, 2], [3, 3, 4, 1]])  # two domains of two classes
    trial = SimpleNamespace(domain_names=("art", "photo"), tested=[0, 1, 2], mixes=mixes)
    assert measure.clients_by_domain(trial) == {"art": [0, 2], "photo": [1]}
    trial.domain_names = ("",)
    assert measure.clients_by_domain(trial) == {}


def test_all_images_of_another_folder_without_a_split_are_tests(images, vit, tmp_path):
    other = write(tmp_path, "{name}", 1)
    problem = compare.folder(images, vit=vit, size=SIZE, rounds=1, test=other)
    (row,) = (row for row in problem.rows("") if row.method == "fedprox")
    trial = problem.make("", row, seed=0, machine=Machine(), validate=False)
    assert len(trial.further["transfer"].labels) == len(data.read_folder(other)) == 12


@pytest.mark.unhooked  # parts of a store are enough
def test_classes_of_another_folder_may_be_fewer_and_with_a_clip_others(tmp_path):
    def other(name, words, tower):
        root = write(tmp_path / name, "{split}/{name}", 2, words)
        network = SimpleNamespace(tower=tower)
        return SimpleNamespace(folder=data.read_folder(root), network=network)

    whole = data.read_folder(write(tmp_path / "whole", "{name}", 1, ("five", "four", "one")))
    few, transferred = ("four", "one"), import_module("fedprompt.compare.folder").transferred
    for tower, labels, names in ((None, [1, 2], None), ("a tower", [0, 1], few)):
        _, _, found, told = transferred(other(f"few {names}", few, tower), whole)
        assert (np.unique(found).tolist(), told and tuple(told)) == (labels, names)
    with pytest.raises(CompareError, match="have classes of the folder, without a CLIP; got"):
        transferred(other("others", ("nine", "one"), None), whole)


def test_further_tests_with_two_readings_are_read_like_the_folder(vit, tmp_path):
    images, said = write(tmp_path / "images", "{name}", 2), []
    other = write(tmp_path / "other", "{name}/small", 1)
    with pytest.raises(ValueError, match="must be read in one way"):
        data.read_folder(write(other, "{name}", 1))
    compare.folder(images, vit=vit, size=SIZE, test=other, say=said.append)
    assert f"{other}: layout class, 24 images, 4 classes" in said[0]
    with pytest.raises(CompareError, match=r"`test` must be a folder or a list .*none is missing"):
        compare.folder(images, vit=vit, size=SIZE, test="none")


def test_images_that_cannot_be_read_are_counted_and_named(images, vit, tmp_path):
    folder, said = write(tmp_path / "images", "{name}", 2), []
    path = folder / "hund" / "0 0.png"
    path.write_bytes(path.read_bytes()[:60])
    where = {"vit": vit, "size": SIZE, "cache": tmp_path / "cache"}
    compare.folder(folder, **where, skip=True, say=said.append)
    assert "Left out, because they cannot be read: 1." in said[1]
    assert "layout class, 23 images, 4 classes" in said[1]
    assert "classes: chat noir 6, hund 5, zebra 6, ö été 6" in said[1]
    with pytest.raises(ValueError, match=rf"such as {path}\. Correct it"):
        compare.folder(folder, **where)


@pytest.mark.parametrize(
    ("labels", "splits", "message"),
    [
        ("aabb", "test test test test", "must have training and test images .*; got 0 and 4"),
        ("abcd", "train train train train", "must have training and test images .*; got 4 and 0"),
        (
            "aab",
            "train test train",
            r"Without `clients`, .*list\.csv is divided by dirichlet:0\.3:2\.",
        ),
        (["a b", "a_b"] * 2, "train train test test", "must differ with a space for _; got 'a b'"),
    ],
)
def test_an_error_is_about_what_was_given(labels, splits, message, images, vit, tmp_path):
    lines = zip(sorted(images.rglob("*.png")), labels, splits.split(), strict=False)
    text = "\n".join(["path,label,split", *(",".join(map(str, line)) for line in lines)])
    (tmp_path / "list.csv").write_text(text)
    tower = fp.TextTower(samples.clip(), samples.tokenize)
    network = {"clip": tower, "clients": "iid:2"} if "a_b" in labels else {"vit": vit, "size": SIZE}
    with pytest.raises(CompareError, match=message):
        compare.folder(tmp_path / "list.csv", **network)


@pytest.mark.unhooked
def test_a_damaged_file_of_tokens_is_made_again(images, tmp_path):
    tower = fp.TextTower(samples.clip(), samples.tokenize)
    problem = compare.folder(images, clip=tower, rounds=1, steps=1, cache=tmp_path)
    first = compare.run(problem, ["promptfl"], seeds=1).found
    (path,) = tmp_path.glob("*.npy")
    for size in (0, 200):
        path.write_bytes(path.read_bytes()[:size])
        assert compare.run(problem, ["promptfl"], seeds=1).found == first


def test_a_changed_file_of_a_method_is_another_run(images, vit, tmp_path):
    problem = compare.folder(images, vit=vit, size=SIZE, rounds=1)
    found = []
    text = (
        "from fedprompt.methods import fedprox\ndef mine(setting):\n    return fedprox(setting{})"
    )
    for place, more in (("a", ""), ("b", ", proximal_weight=1.0"), ("a", ", learning_rate=1.0")):
        file = tmp_path / place / "timm.py"  # a file may have the name of a package
        file.parent.mkdir(exist_ok=True)
        file.write_text(text.format(more))
        (row,) = rows.chosen([f"{file}:mine"], "one model")
        found.append(Cell(problem, "", row, 0, None, Machine()))
    sent = [pickle.dumps(cell.row) for cell in found]
    first, *others = (cell.named() for cell in found)
    for told in (cells.key, cells.chosen):  # a version that diverged does not leave out the next
        assert told(first, problem) not in [told(other, problem) for other in others]
    assert "vision_transformer" in dir(timm.models)
    rows.SOURCES.clear()  # another process imports the text that was read
    assert [rows.code(pickle.loads(each)) for each in sent] == [
        each["code"] for each in (first, *others)
    ]
    assert "mine" not in METHODS


def test_a_batch_has_a_quarter_of_a_client_and_a_round_an_epoch_if_they_are_not_given(images, vit):
    for given, size, steps, own in ((None, 6, None, 4), (5, 5, None, 5), (5, 5, 2, 2)):
        budget = {"rounds": 1, "batch_size": given, "steps": steps}
        problem = compare.folder(images, vit=vit, size=SIZE, **budget)  # 72 images, three domains
        row = rows.chosen(["fedprox"], "one model")[0]
        trial = problem.make("", row, seed=0, machine=Machine(), validate=False)
        assert (trial.setting.batch_size, trial.setting.steps) == (size, own)


def test_a_new_client_without_tests_is_not_measured(images, vit):
    problem = compare.folder(images, vit=vit, size=SIZE, rounds=1, steps=1, newcomers=1)
    row = rows.chosen(["fedprox"], "one model")[0]
    trial = problem.make("", row, seed=0, machine=Machine(), validate=False)
    for own in (trial.own, [*trial.own[:2], trial.own[2][:0]]):
        changed = trial._replace(own=own)
        found = measure.run(problem.method(row, changed), changed, shared=True)
        assert ("received" in found) == bool(len(own[2]))


@pytest.mark.unhooked  # methods of CLIP take a setting that their annotations do not name
def test_base_to_new_tests_each_side_among_its_own_classes(tmp_path):
    images = write(tmp_path / "all", "{split}/{name}", 9, ("five", "four", "nine", "one"))
    tower = fp.TextTower(samples.clip(), samples.tokenize)
    more = {"base_to_new": True, "test": images, "steps": 1}
    problem = compare.folder(images, clip=tower, clients="iid:2", rounds=1, **more)
    results = compare.run(problem, ["zero_shot"], seeds=1)
    (found,) = (each for each in results.seeds if each["method"] != "Training alone")
    every, clip = data.read_folder(images), samples.clip()
    for name, chosen in (("full", (0, 1)), ("new", (2, 3)), ("transfer", (0, 1, 2, 3))):
        words = [every.class_names[label] for label in chosen]
        heads = fp.zero_shot_classifier(tower, words, ["a photo of a {}."])
        tests = np.flatnonzero((every.split == "test") & np.isin(every.labels, chosen))
        inputs = normalized(every, tests, clip)
        right = (fp.image_tokens(clip, inputs)[0] @ heads.T).argmax(1).numpy() + chosen[0]
        assert found[name] == pytest.approx((right == every.labels[tests]).mean(), abs=1e-6)
    assert found["h"] == pytest.approx(2 / (1 / found["full"] + 1 / found["new"]), abs=1e-5)
    with pytest.raises(ValueError, match=r"do not fit. fedapt: .*learned something for each class"):
        compare.run(problem, ["fedapt", "zero_shot"], seeds=1)
    few = write(tmp_path / "few", "{split}/{name}", 3, ("five", "four", "nine"))
    with pytest.raises(ValueError, match="have at least 4 classes, 2 on each side; got 3"):
        compare.folder(few, clip=tower, base_to_new=True)


def normalized(found, places, clip):
    from fedprompt.backbones.pretrained import network

    made = network(fp.TextTower(clip, samples.tokenize), "clip")
    images = [np.array(Image.open(found.paths[place]).convert("RGB")) for place in places]
    stack = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2) / 255
    own = made.preparation
    mean, std = (torch.tensor(part)[:, None, None] for part in (own.mean, own.std))
    return (stack - mean) / std


def test_each_domain_is_left_out_in_turn_and_their_mean_is_the_first_table(images, vit):
    problem = compare.folder(
        images, vit=vit, size=SIZE, leave_one_out=True, rounds=1, steps=1, shots=4
    )
    found = compare.run(problem, ["fedprox"], seeds=2)
    assert list(found.views()) == ["", *DOMAINS]
    by_name = {(r["partition"], r["row"], r["seed"]): r["unseen"] for r in found.found}
    mean = np.mean([by_name[domain, "FedProx", seed] for domain in DOMAINS for seed in (0, 1)])
    assert re.search(rf"\| FedProx +\| +{100 * mean:.1f} \|", found.reports()[""])
    clients = {(r["partition"], r["client"]) for r in found.clients}
    assert clients == {(left, kept) for left in DOMAINS for kept in DOMAINS if left != kept}


OWN = """
from fedprompt import methods

def halfway(setting, *, learning_rate=0.02):
    return methods.fedprox(setting, learning_rate=learning_rate)
"""


def test_a_plain_function_of_a_file_takes_part_and_is_tuned(images, vit, tmp_path, capsys):
    (tmp_path / "halves.py").write_text(OWN)
    flags = [
        "--methods",
        f"{tmp_path}/halves.py:halfway",
        "--tune",
        "2",
        "--out",
        str(tmp_path / "o"),
    ]
    command.main([str(images), "--vit", vit, *flags, *FEW])
    assert "Best of 2 trials of each row:\n\n| row " in (tmp_path / "o" / "table.md").read_text()
    assert "| Halfway " in capsys.readouterr().out
    found = records.read(tmp_path / "o" / "records.jsonl")
    rates = {r["values"]["learning_rate"] for r in found if r["row"] == "Halfway"}
    assert sum(record["trial"] is not None for record in found) == 4
    assert 0.02 in rates
    assert len(rates) == 2


MISTAKES = """
--methods fedprx -> 'fedprx' is no method of the gallery; there are fedprox
--methods promptfl -> must be for one model; promptfl is for CLIP
--methods bad.py:f -> bad.py, line 1 cannot be imported: SyntaxError
--methods none.py:f -> must name an existing Python file; got none.py
--methods own.py -> `--methods` must be FILE:NAME for a file; got own.py: there are f, g
--methods own.py:f -> These methods do not fit. f: `f` must return a Method; got 3 (int)
--methods fedprox,own.py:g -> These methods do not fit. g: SystemExit: 3 (own.py, line 4)
--methods no.py:x -> 'x' is no method of no.py; no function of it begins with `setting`
--methods exit.py:x -> exit.py cannot be imported: SystemExit: 3
--device cdua -> `device` must be one of this machine; got cdua
--device mps -> `device` must be one of this machine; got mps:
--out /proc/x -> `out` must be a folder for files
--out bad.py -> `out` must be a folder for files
--out= -> argument --out: must not be empty
--clients iid -> `--clients` must be domains, folders, iid:N
--clients= -> argument --clients: must not be empty
--base-to-new -> `base_to_new` needs a CLIP
--vit none -> `--vit` must name a network
--seeds 0 -> argument --seeds: must be at least 1; got 0
--layout class/x -> `layout` must be one of
--newcomers 3 -> `newcomers` must be below 3, the clients; got 3
--cohort-size 4 -> `cohort_size` must be at most 3, the clients that tr
--template='{} {}' -> `template` must have one {} for the name of a class; got '{} {}'
"""


@pytest.mark.parametrize("mistake", MISTAKES.strip().splitlines())
def test_a_mistake_ends_with_one_line_before_anything_runs(
    mistake, few, vit, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    own = "import sys\ndef f(setting): return 3\ndef g(setting):\n    sys.exit(3)"
    files = {"bad": "def f(:", "own": own, "no": "def x(other): return 3", "exit": "exit(3)"}
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setattr(results.cells, "run_all", None)
    flags, message = mistake.split(" -> ")
    given = ["--vit", vit, "--methods", "fedprox", "--out", "out"]
    with pytest.raises(SystemExit) as error:
        command.main([str(few), *given, *shlex.split(flags)])  # the last of two flags counts
    assert error.value.code == 2
    said = capsys.readouterr().err
    assert re.match(f"fedprompt compare: .*{re.escape(message)}", said)
    assert said.count("\n") == 1


@pytest.mark.parametrize(("device", "workers", "expected"), [("cpu", 7, 7), ("cuda", 7, 1)])
def test_a_device_other_than_the_cpu_has_one_worker(device, workers, expected, monkeypatch):
    args = Namespace(seeds=1, out="", tune=0, device=device, shrink=1.0, workers=workers)
    monkeypatch.setattr(command, "run", lambda *_, workers, **how: sys.exit(workers))
    with pytest.raises(SystemExit) as end:
        command.compare(owned({0: torch.arange(2)}), [], args, "")
    assert end.value.code == expected


def owned(clients, labels=None, newcomers=0, **tests):
    images, every, test_images, test_labels = (part[:40] for part in samples.digits())
    setting = methods.VitSetting(trunk=fp.vit_trunk(samples.vit("S")), num_classes=10, rounds=1)
    given = images, every if labels is None else labels, clients
    held_out = methods.HeldOut(test_images, test_labels, **tests)
    return compare.problem(*given, held_out, setting=setting, newcomers=newcomers)


REFUSED = """
owned({0: [0, 1]}, labels=torch.zeros(40)) -> TypeError: `labels` must be integers of shape (batch,)
owned({0: [0, 1]}, labels=np.zeros(40, int)) -> TypeError: `labels` must be a tensor of integers of
owned({0: [0, 1]}, labels=samples.digits()[1]) -> ValueError: `labels` must have one entry for each
owned({0: [0, 1]}, labels=samples.digits()[1][:40] + 5) -> ValueError: `labels` must lie in [0, 10)
owned({}) -> ValueError: `clients` must have the ids 0, 1, 2 and so on; got [].
owned({1: [0, 1]}) -> ValueError: `clients` must have the ids 0, 1, 2 and so on; got [1].
owned(lambda generator: 3) -> TypeError: `clients` must map ids to positions of inputs; got 3 (int)
owned({0: []}) -> ValueError: `clients[0]` must have at least one position; got none
owned({0: [99]}) -> ValueError: `clients[0]` must lie in [0, 40)
owned({0: [0]}, own={7: torch.tensor([0])}) -> ValueError: `tests.own` must have ids of clien
owned({0: [0]}, newcomers=1) -> ValueError: `newcomers` must be below 1, the clients; got 1.
owned({0: [0]}, newcomers=-1) -> ValueError: `newcomers` must be at least 0; got -1.
owned({0: [0]}, mixes={0: torch.ones(10)}) -> ValueError: `tests` must have no cells or mixes
compare.folder('x', vit='y', clients='') -> ValueError: `clients` must not be empty; got ''.
compare.folder('x', vit='y', rounds=0) -> ValueError: `rounds` must be at least 1; got 0.
compare.folder('x', vit='y', steps=0) -> ValueError: `steps` must be at least 1; got 0.
compare.folder('x', vit='y', batch_size=0) -> ValueError: `batch_size` must be at least 1; got 0.
compare.folder('x', vit='y', newcomers='1') -> TypeError: `newcomers` must be an integer; got '1' (
compare.folder('x', vit='y', cache=3) -> TypeError: `cache` must be a path (a string or a pathlib.P
compare.folder('x', vit='y', test='') -> ValueError: `test` must be the path of a folder
compare.folder('x', vit='y', base_to_new=1) -> TypeError: `base_to_new` must be True or False; got 1
compare.folder('x', vit='y', clients=3) -> TypeError: `clients` must be a string; got 3 (int)
compare.run(owned({0: [0]}), ['local'], shrink=0) -> ValueError: `shrink` must be above 0; got 0.
compare.run(owned({0: [0]}), ['local'], shrink=5) -> ValueError: `shrink` must be at most 1; got 5.
compare.run(owned({0: [0]}), ['local'], device=3) -> TypeError: `device` must be a device, such as
compare.run(owned({0: [0]}), ['local'], out='') -> ValueError: `out` must be the path of a folder
compare.run('x', ['local']) -> TypeError: `problem` must be one of `compare.folder` or `compare.p
"""
test_wrong_problems_and_runs_are_refused = refused(globals())(REFUSED)


def test_without_matplotlib_a_run_ends_with_its_tables(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    monkeypatch.delitem(__import__("sys").modules, "fedprompt.compare.pictures", raising=False)
    problem = compare.Problem(title="a", partitions={"": "b"}, rows=lambda of: [], make=print)
    at = {"task": "own", "partition": "", "trial": None, "values": {}, "seed": 0, "backward": 1}
    found = [at | {"row": "A", "own": 0.5, "full": 0.5, "worst": 0.5}]
    said = compare.Results(problem, found).save(tmp_path)
    assert said.endswith("The picture needs matplotlib: pip install 'fedprompt[compare]'")
    assert (tmp_path / "table.md").exists()


def test_a_damaged_line_is_named_and_a_complete_last_line_counts(tmp_path):
    path = tmp_path / "r.jsonl"
    texts = dict.fromkeys(("task", "partition", "row"), "a")
    good = texts | {
        "seed": 0,
        "trial": None,
        "values": {},
        "own": 0.5,
        "clients": {"0": {"own": 1}},
    }
    line = json.dumps(good)
    path.write_text(f"{line}\n{line}")
    assert len(records.read(path)) == 2
    records.append(path, json.loads(line))
    assert len(records.read(path)) == 3
    wrong = {"values": None, "own": "x", "full": None, "clients": 3, "inputs": "x", "seed": "0"}
    wrong_records = [good | {name: value} for name, value in wrong.items()]
    wrong_records += [good | {"clients": {"0": of}} for of in (1, {"own": "x"})]
    wrong_records.append({name: value for name, value in good.items() if name != "own"})
    listed = ("", "{", '{"row": 1}', "\xe9\xff", *map(json.dumps, wrong_records))
    for bad in listed:
        path.write_text(f"{line}\n{bad}\n{line}\n", encoding="latin-1")
        with pytest.raises(CompareError, match=rf"Line 2 of {path} must be a record"):
            records.read(path)


def test_two_programs_append_to_one_file(tmp_path):
    path, size = tmp_path / "r.jsonl", 20
    record = {"task": "", "partition": "", "row": "x" * 9999, "trial": None, "values": {}, "own": 1}
    child = os.fork()
    for number in range(size):
        records.append(path, record | {"seed": number})
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert len(records.read(path)) == 2 * size


def test_a_method_that_fails_later_is_named_and_the_others_have_their_table():
    def breaks(setting, *, learning_rate=0.01):
        method = methods.fedprox(setting, learning_rate=learning_rate)

        def client(data, answer, state):
            if data.server_round:
                raise ArithmeticError("no second round")
            return method.client(data, answer, state)

        return method._replace(client=client)

    images, labels, tests, test_labels = samples.digits()
    setting = methods.VitSetting(trunk=fp.vit_trunk(samples.vit("S")), num_classes=10, rounds=2)
    clients = dict(enumerate(torch.arange(60).split(20)))
    held_out = methods.HeldOut(tests[:60], test_labels[:60])
    problem = compare.problem(images, labels, clients, held_out, setting=setting)
    names = ["head_tuning", "local", breaks]  # the second one is training alone
    found = compare.run(problem, names, seeds=1)
    assert "no second round" in found.failed["Breaks"]
    assert str(found).endswith(f"Breaks failed: {found.failed['Breaks']}")
    assert {record["row"] for record in found.found} == {"Head tuning", "Training alone"}
    assert all(record["worst"] <= record["own"] for record in found.found)


def test_a_table_names_the_prompts_of_its_own_budget(images, vit, tmp_path, monkeypatch):
    monkeypatch.setattr(compare.Results, "plot", lambda *_: None)
    named, bytes_of = [], []
    for rounds in (1, 2, 1):
        problem = compare.folder(images, vit=vit, size=SIZE, rounds=rounds, steps=1)
        found = compare.run(problem, ["fedprox"], seeds=1, out=tmp_path)
        said = found.save(tmp_path)
        lines = csv.DictReader((tmp_path / "clients.csv").read_text().splitlines())
        named.append([line["prompts"] for line in lines])
        bytes_of.append([(tmp_path / name).read_bytes() for name in named[-1]])
    assert named[0] == named[2]
    assert bytes_of[0] == bytes_of[2] != bytes_of[1]
    assert "missing" not in said
    for name in named[0]:
        (tmp_path / name).unlink(missing_ok=True)
    assert "Prompts of FedProx (seed 0), Training alone (seed 0) are missing." in found.save(
        tmp_path
    )
    assert ",\n" in (tmp_path / "clients.csv").read_text()


def test_if_all_runs_fail_the_command_ends_with_their_reason(
    images, vit, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(cells, "run", lambda cell, progress: 1 / 0)
    flags = ["--vit", vit, "--methods", "fedprox", "--out", str(tmp_path)]
    with pytest.raises(SystemExit) as error:
        command.main([str(images), *flags, *FEW])
    assert error.value.code == 1
    said = capsys.readouterr().out
    assert "FedProx failed: " in said
    assert said.endswith(f"No run finished, so {tmp_path} has no table.\n")
    assert not (tmp_path / "bars.png").exists()


def test_a_domain_may_have_any_name(images, vit, tmp_path):
    files, names = sorted(images.rglob("*.png")), ("all", "row", "a/b|")
    lines = [f"{path},{path.parent.name},{names[DOMAINS.index(path.parts[-4])]}" for path in files]
    (tmp_path / "list.csv").write_text("\n".join(["path,label,client", *lines]))
    more = {"leave_one_out": True, "rounds": 1, "steps": 1}
    problem = compare.folder(tmp_path / "list.csv", vit=vit, size=SIZE, **more)
    found = compare.run(problem, ["fedprox"], seeds=1, out=tmp_path / "out")
    assert not found.failed
    found.save(tmp_path / "out")
    assert len([*(tmp_path / "out").glob("table*.csv")]) == 4
    (mean, *_) = csv.DictReader((tmp_path / "out" / "table.csv").read_text().splitlines())
    unseen = {
        each["partition"]: each["unseen"] for each in found.seeds if each["method"] == mean["row"]
    }
    assert {name: mean[f"on {name}"] for name in names} == {
        n: f"{100 * unseen[n]:.1f}" for n in names
    }
    assert r"on a/b\|" in (tmp_path / "out" / "table.md").read_text()
