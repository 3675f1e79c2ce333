"""Files of trained prompts, which are loaded into the models of all methods."""

from dataclasses import fields
from hashlib import sha256
from types import SimpleNamespace

import pytest
import torch

import fedprompt as fp
from fedprompt.compare import prompts, ranks
from fedprompt.methods import METHODS, ClipSetting, VitSetting
from method_runs import RUNS
from refusals import refused
from tiny_federations import federation_of, vit_federation

CASES = [pair for pair in RUNS if pair[1] != "mixed models" and pair[0] != "zero_shot"]


@pytest.mark.unhooked  # methods of CLIP take a setting that their annotations do not name
@pytest.mark.parametrize(("name", "family"), CASES)
def test_a_file_makes_the_model_that_was_saved(name, family, tmp_path):
    entry = METHODS[name]
    federation = federation_of(
        entry, family, rounds=1, steps=1, clients=[0, 1], cohort_size=2, seed=3
    )
    method, shared = entry.make(federation), "personalized" not in entry.traits
    *_, now = fp.run_rounds(method, federation.data, federation.cohorts())
    trial = SimpleNamespace(setting=federation, federation=federation, names=())
    path = prompts.save(tmp_path, "mine", shared, trial, method, now)[-1]
    trained = now.model(method, federation.data(0 if shared else 1, now.server_round)).eval()
    kind, images = ClipSetting if family == "CLIP" else VitSetting, federation.inputs[:3]
    own = {field.name for field in fields(kind) if field.init} - {"seed", "cohort_size"}
    setting = kind(**{name: getattr(federation, name) for name in own})
    model = prompts.load(path, name, setting, images, seed=3, client=0 if shared else 1)
    with torch.no_grad():
        assert torch.equal(model(images), trained(images))


@pytest.mark.unhooked  # parts of a trial are enough
@pytest.mark.parametrize(
    ("shared", "rank", "world", "names", "expected"),
    [
        (False, 0, 1, (), ["-0", "-1", "-2", "-3"]),
        (False, 1, 2, (), ["-1", "-3"]),
        (False, 1, 2, ("a", "b", "c", "d e"), ["-b", "-d e"]),
        (True, 0, 2, ("a", "b", "c", "d"), [""]),
        (True, 1, 2, (), []),
    ],
)
def test_each_rank_saves_its_clients_and_the_first_one_a_shared_model(
    shared, rank, world, names, expected, tmp_path, monkeypatch
):
    monkeypatch.setattr(ranks, "rank", lambda: rank)
    monkeypatch.setattr(ranks, "world", lambda: world)
    made = vit_federation(clients=[0, 1, 2, 3])
    trial = SimpleNamespace(setting=made, federation=made, names=names)
    method = METHODS["local"].make(made)
    start = fp.Round(0, method.server.state, {})
    args = tmp_path / "new", "mine", shared, trial
    found = prompts.save(*args, method, start)
    assert found == [tmp_path / "new" / f"mine{end}.safetensors" for end in expected]
    assert all(path.exists() for path in found)
    for without in (torch.sign, torch.nn.Identity()):
        none = method._replace(predict=lambda *_, model=without: model)
        assert prompts.save(tmp_path / "none", *args[1:], none, start) == []
    assert not (tmp_path / "none").exists()


def test_names_make_files_of_one_folder_and_are_changed_only_if_they_must_be():
    names = "a/b", "a:b", "..", "c d é", "x" * 41, "x" * 42, "x" * 40
    files = [prompts.file_name(name) for name in names]
    assert len({*files}) == len(names)
    assert [file for file, name in zip(files, names, strict=True) if file == name] == [
        "..",
        "c d é",
        "x" * 40,
    ]
    assert files[0] == f"a_b-{sha256(b'a/b').hexdigest()[:4]}"
    assert files[4][:41] == "x" * 40 + "-"
    record, end = {"row": "Fed-X (2) ", "seed": 3}, sha256(b"key").hexdigest()[:8]
    for partition, start in (("", ""), ("photo été", "photo été-"), ("a/b", f"{files[0]}-")):
        found = prompts.stem(record | {"partition": partition}, "key")
        assert found == f"{start}fed-x-2-seed3-{end}"


def predicts_by_a_function(setting):
    return fp.Method(lambda *_: ({}, {}), fp.averaging_server({}), lambda *_: torch.sign)


def load(method="fedprox", inputs=None):
    made = vit_federation()
    inputs = made.inputs[:1] if inputs is None else inputs
    return prompts.load("none.safetensors", method, made, inputs, seed=0)


test_wrong_calls_are_refused_by_name = refused(globals())("""
load(predicts_by_a_function) -> TypeError: `method` must predict with a module, which has a file;
load(inputs=[1]) -> TypeError: `inputs` must be inputs of the network; got a list of length 1.
""")
