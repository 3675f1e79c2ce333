"""Blobs in files."""

import hashlib
import os
import resource
import tracemalloc

import pytest
import safetensors
import safetensors.torch
import torch.nn as nn

from blobs import unsigned
from fedprompt import collect, load_values, snapshot
from fedprompt.wire import Expected, Header, open_payload, save_payload
from refusals import check_refused, refusals
from same import assert_identical
from wired import HEADER, MESSAGE, PARTS

EXPECT = Expected(MESSAGE)


def test_every_reader_of_safetensors_opens_a_broadcast_and_its_header(tmp_path):
    model, path = nn.Linear(2, 3), tmp_path / "round.safetensors"
    save_payload(snapshot(model), path, header=HEADER)
    assert_identical(safetensors.torch.load_file(path), snapshot(model))
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert metadata.pop("sha256") == hashlib.sha256(unsigned(path.read_bytes())).hexdigest()
    assert metadata == {
        **{"format": "fedprompt-2", "server_round": "3", "client_id": "client ü 7"},
        **{"fingerprint:backbone": "vit", "fingerprint:classes": "cat, dog"},
        **{"fingerprint:own": "x", "meta:loss": '0.5, "quoted"', "meta:note": ""},
    }


def test_a_payload_in_a_file_restores_the_model_of_the_client(tmp_path):
    client, server, path = nn.Linear(2, 3), nn.Linear(2, 3), tmp_path / "upload"
    path.write_text("old")
    save_payload(collect(client, weight=9), path, header=Header(PARTS, 4))
    message, header = open_payload(path, expect=Expected(collect(server, weight=0), PARTS))
    load_values(server, message)
    assert_identical(snapshot(server), snapshot(client))
    assert header == Header(PARTS, 4)
    assert message["bias"].weight.item() == 9.0


@pytest.mark.parametrize(
    ("limit", "rule"), [({"max_bytes": 2000}, "2000 bytes long; got 2001"), ({}, r"1\d{4} bytes")]
)
def test_a_long_file_is_read_up_to_the_limit(tmp_path, limit, rule):
    path = tmp_path / "long"
    with open(path, "wb") as file:
        file.truncate(2**33)  # 8 GiB, sparse on the disk
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=f"`blob` must be at most {rule}"):
            open_payload(path, expect=EXPECT, **limit)
        assert tracemalloc.get_traced_memory()[1] < 500_000
    finally:
        tracemalloc.stop()


def test_a_full_disk_leaves_the_old_file(tmp_path):
    path, limits = tmp_path / "kept", resource.getrlimit(resource.RLIMIT_FSIZE)
    save_payload(MESSAGE, path, header=HEADER)
    before = path.read_bytes()
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, limits[1]))  # the message needs more
    try:
        with pytest.raises(OSError, match="too large"):
            save_payload(MESSAGE, path, header=HEADER)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert list(tmp_path.glob("[!.]*")) == [path]


def test_a_link_stays_and_its_file_is_replaced(tmp_path):
    path, link = tmp_path / "file", tmp_path / "link"
    link.symlink_to(path)
    for _ in range(2):
        save_payload(MESSAGE, link, header=HEADER)
    assert link.is_symlink()
    assert open_payload(path, expect=EXPECT)[1] == HEADER


REFUSED = """
b'file' -> TypeError: `path` must be a path (a string or a pathlib.Path); got b'file' (bytes)
'' -> ValueError: `path` must be the path of a file; got an empty path
'.' -> ValueError: `path` must be the path of a file; got a directory
'/dev/null' -> ValueError: `path` must be the path of a file; got a pipe or a device
'pipe' -> ValueError: `path` must be the path of a file; got a pipe or a device
"""


@pytest.mark.bad_input
@pytest.mark.parametrize(("path", "error", "message"), refusals(REFUSED))
def test_only_paths_of_files_are_written_and_read(tmp_path, monkeypatch, path, error, message):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    for call in ("save_payload(MESSAGE, {}, header=HEADER)", "open_payload({}, expect=EXPECT)"):
        check_refused(call.format(path), error, message, globals())
