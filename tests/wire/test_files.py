"""Blobs in files."""

import hashlib
import tracemalloc

import pytest
import safetensors
import safetensors.torch
import torch.nn as nn

from blobs import unsigned
from fedprompt import collect, load_values, snapshot
from fedprompt.wire import (
    Expected,
    Header,
    open_payload,
    save_payload,
)
from same import assert_identical
from wired import HEADER, MESSAGE, PARTS


def test_every_reader_of_safetensors_opens_a_broadcast_and_its_header(tmp_path):
    model, path = nn.Linear(2, 3), tmp_path / "round.safetensors"
    save_payload(snapshot(model), path, header=HEADER)
    assert_identical(safetensors.torch.load_file(path), snapshot(model))
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert metadata == {
        "format": "fedprompt-2",
        "server_round": "3",
        "sha256": hashlib.sha256(unsigned(path.read_bytes())).hexdigest(),
        "client_id": "client ü 7",
        "fingerprint:backbone": "vit",
        "fingerprint:classes": "cat, dog",
        "fingerprint:own": "x",
        "meta:loss": '0.5, "quoted"',
        "meta:note": "",
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


def test_a_long_file_is_read_up_to_the_limit(tmp_path):
    path = tmp_path / "long"
    with open(path, "wb") as file:
        file.truncate(2**33)  # 8 GiB, sparse on the disk
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="`blob` must be at most 2000 bytes long; got 2001"):
            open_payload(path, expect=Expected(MESSAGE), max_bytes=2000)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_a_short_file_takes_little_memory_under_a_large_limit(tmp_path):
    save_payload(MESSAGE, tmp_path / "short", header=HEADER)
    tracemalloc.start()
    try:
        open_payload(tmp_path / "short", expect=Expected(MESSAGE))
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
