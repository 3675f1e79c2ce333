"""Messages in the records of Flower."""

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.app import Message as Envelope
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

import fedprompt as fp
from fedprompt import flower
from flower_runs import assert_equal, blob_record

pytestmark = pytest.mark.flower


MIXED = {
    "half": torch.tensor([1.5, -0.0], dtype=torch.bfloat16),
    "counts": torch.tensor([2**62 + 1]),
    "seen": torch.tensor([[True], [False]]),
    "rows": fp.Weighted(torch.tensor([[1.0], [float("nan")]]), torch.tensor([2.0, 0.0])),
}


def test_packing_keeps_every_dtype_and_hides_unknown_rows():
    header = fp.wire.Header({"backbone": "x"}, 3, "7", {"note": "ü"})
    records = flower.pack(MIXED, header=header)
    message, arrived = flower.unpack(
        records, expect=fp.wire.Expected(MIXED, {"backbone": "x"}), max_bytes=1000
    )
    known = fp.Weighted(torch.tensor([[1.0], [0.0]]), torch.tensor([2.0, 0.0]))
    assert_equal(message, {**MIXED, "rows": known})
    assert arrived == header
    assert records["fedprompt"]["blob"].data == fp.wire.encode_payload(MIXED, header=header)


def test_large_messages_are_sent_in_chunks():
    blob = {"large": torch.arange(3 * 2**20, dtype=torch.int32)}
    sizes = [
        len(each.deflate())
        for each in get_all_nested_objects(flower.pack(blob, header=fp.wire.Header())).values()
    ]
    assert max(sizes) < 2**23
    assert sum(size > 2**20 for size in sizes) == 3  # 12 MiB in chunks of 5


def test_the_strategies_of_flower_refuse_to_average_messages():
    records = flower.pack(MIXED, header=fp.wire.Header())
    replies = []
    for node in (1, 2):
        question = Envelope(RecordDict(), node, "train")
        replies.append(
            Envelope(
                RecordDict({**records, "metrics": MetricRecord({"num-examples": 1})}),
                reply_to=question,
            )
        )
    with pytest.raises(TypeError, match="safetensors"):
        FedAvg().aggregate_train(1, replies)


STRANGE = {
    "nothing": RecordDict(),
    "another name": RecordDict({"arrays": blob_record(b"")}),
    "more": RecordDict({"fedprompt": blob_record(b""), "metrics": MetricRecord({"loss": 1.0})}),
    "a configuration": RecordDict({"fedprompt": ConfigRecord({"blob": b""})}),
    "no array": RecordDict({"fedprompt": ArrayRecord()}),
    "another key": RecordDict({"fedprompt": blob_record(b"", key="weights")}),
    "two arrays": RecordDict(
        {"fedprompt": ArrayRecord({**blob_record(b""), **blob_record(b"", key="more")})}
    ),
    "numpy": RecordDict({"fedprompt": blob_record(b"", stype="numpy.ndarray")}),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("content", STRANGE)
def test_foreign_records_are_refused(content):
    with pytest.raises(
        ValueError,
        match=r"^`records` must contain one blob under 'fedprompt', and nothing else; got \[",
    ):
        flower.unpack(STRANGE[content], expect=fp.wire.Expected(MIXED), max_bytes=1000)


@pytest.mark.bad_input
def test_messages_that_cannot_be_decoded_are_refused():
    records = flower.pack(MIXED, header=fp.wire.Header({"backbone": "x"}))
    with pytest.raises(ValueError, match="same backbone"):
        flower.unpack(records, expect=fp.wire.Expected(MIXED, {"backbone": "y"}), max_bytes=1000)
    with pytest.raises(ValueError, match="at most 300 bytes long"):
        flower.unpack(records, expect=fp.wire.Expected(MIXED), max_bytes=300)
    with pytest.raises(ValueError, match="finite"):
        flower.pack({"scale": torch.tensor(float("nan"))}, header=fp.wire.Header())
