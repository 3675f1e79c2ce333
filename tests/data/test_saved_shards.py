"""Divisions in files, and data sets that are not those of the file."""

import hashlib
import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedprompt.data import dirichlet, load_shards, read_folder, save_shards
from refusals import check_refused, refusals

LABELS = np.arange(60) % 4


@pytest.mark.parametrize("of", [LABELS, torch.tensor(LABELS), [f"{k} é.png" for k in range(60)]])
def test_a_division_is_loaded_as_it_was_saved(of, tmp_path):
    shards = dirichlet(LABELS, 5, alpha=0.5, min_size=2, generator=np.random.default_rng(0))
    save_shards(tmp_path / "shards.json", shards, of=of)
    found = load_shards(tmp_path / "shards.json", of=of)
    assert all(a.dtype == np.int64 and (a == b).all() for a, b in zip(found, shards, strict=True))
    by_id = {9: shards[1], 3: torch.tensor([5, 2])}
    save_shards(tmp_path / "shards.json", by_id, of=of)
    found = load_shards(tmp_path / "shards.json", of=of)
    assert [*found] == [9, 3]
    assert found[3].tolist() == [5, 2]


def test_a_division_of_a_folder_belongs_to_its_files_and_classes(tmp_path):
    for root in ("here", "there/é", "other"):
        for name in ("cat/1.png", "cat/2.png", "dog/1.png"):
            path = tmp_path / root / name.replace("dog", "fox" if root == "other" else "dog")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"an image")
    here, there, other = (read_folder(tmp_path / r) for r in ("here", "there/é", "other"))
    file = tmp_path / "shards.json"
    save_shards(file, [[0, 2], [1]], of=here)
    assert [part.tolist() for part in load_shards(file, of=there)] == [[0, 2], [1]]
    named = replace(here, class_names=("dog", "cat"))
    for wrong in (
        named,
        other,
        here.at([0, 1]),
        here.at([1, 0, 2]),
        here.labels,
        [str(p) for p in here.paths],
    ):
        with pytest.raises(ValueError, match="`of` must be the data set of the file, 3 files of a"):
            load_shards(file, of=wrong)


REFUSED = """
save_shards("a", [[0]], of=[]) -> ValueError: `of` must have at least one sample; got none
save_shards("a", [[0]], of=[0.5]) -> TypeError: `of[0]` must be an integer; got 0.5
save_shards("a", [], of=[1]) -> ValueError: `shards` must have at least one client; got none
save_shards("a", [[0], [1]], of=[5]) -> ValueError: `shards[1]` must lie in [0, 1), the positions
save_shards("a", {-1: [0]}, of=[5]) -> ValueError: `key of shards` must be at least 0; got -1
save_shards("a", 3, of=[5]) -> TypeError: `shards` must list the positions of each client; got 3
save_shards("", [[0]], of=[5]) -> ValueError: `path` must be the path of a file; got an empty
load_shards("labels", of=[3, 5]) -> ValueError: `of` must be the data set of the file, 2 labels with
load_shards("labels", of=[5, 3, 5]) -> ValueError: `of` must be the data set of the file, 2 labels
load_shards("none", of=[5]) -> FileNotFoundError: none
load_shards("text", of=[5]) -> ValueError: text must be a file of `save_shards`
load_shards("list", of=[5]) -> ValueError: list must be a file of `save_shards`
load_shards("newer", of=[5]) -> ValueError: newer must be a file of `save_shards`: `path` must be a
load_shards("changed", of=[5, 3]) -> ValueError: changed must be a file of `save_shards`: `shards[0
"""

CHANGED = """
shards=[[1], [0]] -> `shards` must be those that were saved; got others: the file was changed
shards=[[0], [1, 1]] -> `shards` must be those that were saved
shards=[[0], [0]] -> `shards` must be those that were saved
clients=[2, 1] -> `shards` must be those that were saved
clients=[1, 1] -> `clients` must have 2 ids, each once; got ['1', '1']
clients=[1] -> `clients` must have 2 ids, each once
clients=["a", "b"] -> `clients[0]` must be an integer
clients=[-1, 2] -> `clients` must be at least 0
clients={"1": 1} -> `clients` must be an array, a tensor or a sequence
shards=[] -> `shards` must have at least one client
shards=None -> `shards` must list the positions of each client
shards=[[0], ["1"]] -> `shards[1][0]` must be an integer
samples="x" -> `samples` must be an integer
"""


@pytest.mark.parametrize("row", CHANGED.strip().splitlines())
def test_a_file_that_was_changed_is_refused(row, tmp_path):
    change, message = row.split(" -> ")
    path = tmp_path / "shards.json"
    save_shards(path, {1: [0], 2: [1]}, of=[5, 3])
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | eval(f"dict({change})")))
    with pytest.raises(ValueError, match=re.escape(message)):
        load_shards(path, of=[5, 3])


def test_the_digest_of_names_is_that_of_their_list_as_json_in_utf_8(tmp_path):
    """A file is read by later versions, too."""
    save_shards(tmp_path / "shards.json", [[0], [1]], of=["é.png", "b.png"])
    found = json.loads((tmp_path / "shards.json").read_text())["digest"]
    assert found == hashlib.sha256('["é.png", "b.png"]'.encode()).hexdigest()


def test_a_file_without_a_digest_of_its_positions_is_loaded(tmp_path):
    path = tmp_path / "shards.json"
    save_shards(path, [[0], [1]], of=[5, 3])
    content = json.loads(path.read_text())
    del content["division"]
    path.write_text(json.dumps(content))
    assert [part.tolist() for part in load_shards(path, of=[5, 3])] == [[0], [1]]


@pytest.mark.bad_input
@pytest.mark.parametrize(("call", "error", "message"), refusals(REFUSED))
def test_refusals(call, error, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_shards("labels", [[0]], of=[5, 3])
    content = json.loads((tmp_path / "labels").read_text())
    (tmp_path / "changed").write_text(json.dumps(content | {"shards": [[2]]}))
    (tmp_path / "newer").write_text(json.dumps(content | {"format": "fedprompt-shards-2"}))
    (tmp_path / "text").write_text("no JSON")
    (tmp_path / "list").write_text("[]")
    check_refused(call, error, message, {})
