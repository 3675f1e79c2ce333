"""Messages in the records of Flower."""

from functools import partial

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
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


other = partial(blob_record, b"")
STRANGE = [
    {},
    {"arrays": other()},
    {"fedprompt": other(), "metrics": MetricRecord({"loss": 1.0})},
    {"fedprompt": ConfigRecord({"blob": b""})},
    {"fedprompt": ArrayRecord()},
    {"fedprompt": other(key="weights")},
    {"fedprompt": ArrayRecord({**other(), **other(key="more")})},
    {"fedprompt": other(stype="numpy.ndarray")},
]


@pytest.mark.bad_input
def test_foreign_records_and_messages_that_cannot_be_decoded_are_refused():
    one = r"^`records` must contain one blob under 'fedprompt', and nothing else; got \["
    for content in STRANGE:
        with pytest.raises(ValueError, match=one):
            flower.unpack(RecordDict(content), expect=fp.wire.Expected(MIXED), max_bytes=1000)
    records = flower.pack(MIXED, header=fp.wire.Header({"backbone": "x"}))
    with pytest.raises(ValueError, match="same backbone"):
        flower.unpack(records, expect=fp.wire.Expected(MIXED, {"backbone": "y"}), max_bytes=1000)
    with pytest.raises(ValueError, match="at most 300 bytes long"):
        flower.unpack(records, expect=fp.wire.Expected(MIXED), max_bytes=300)
    with pytest.raises(ValueError, match="finite"):
        flower.pack({"scale": torch.tensor(float("nan"))}, header=fp.wire.Header())
