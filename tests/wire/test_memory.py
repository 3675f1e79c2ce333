"""Memory and time of decoding are bounded, for hostile blobs too."""

import json
import tracemalloc
from bisect import bisect

import pytest
import torch

from blobs import content
from fedprompt import Weighted
from fedprompt.wire import Expected, Header, decode_payload, encode_payload
from same import assert_identical
from wired import as_received, form

pytestmark = pytest.mark.unhooked  # the hook takes memory and time of its own


@pytest.mark.parametrize("weights", ["every row", "one row", "a weight for each entry", "plain"])
def test_the_largest_message_takes_at_most_twice_the_limit(weights):
    limit = 2**22
    rows = (limit - 60_000) // 1024
    weight = torch.ones(rows) if weights == "every row" else torch.zeros(rows)
    weight[3] = 1.0
    entry = Weighted(torch.ones(rows, 255), weight)
    if weights == "a weight for each entry":
        entry = Weighted(torch.ones(128 * rows), torch.arange(128.0 * rows) % 2)
    message = {"a": torch.ones(256 * rows) if weights == "plain" else entry}
    blob, expect = encode_payload(message, header=Header()), Expected(form(message))
    tensors = entry if weights != "plain" else [message["a"]]
    assert 0.9 * limit < sum(tensor.nbytes for tensor in tensors) <= limit
    tracemalloc.start()
    try:
        received, _ = decode_payload(blob, expect=expect, max_bytes=limit)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # All decoded tensors are in numpy's memory, which is traced.
    assert 0.9 * limit < most < 2 * limit
    assert_identical(received["a"], as_received(message["a"]))


DENSE = {"separators": (",", ":")}
HUNGRY = {
    "dicts of one": lambda count: "[" + '{"":0},' * count + "0]",
    "keys": lambda count: json.dumps({f"{number:x}": {} for number in range(count)}, **DENSE),
    "texts": lambda count: json.dumps(
        {"__metadata__": {f"{number:x}": f"{number:x}" for number in range(count)}}, **DENSE
    ),
    "lists in lists": lambda count: "[" + ("[" * 900 + "]" * 900 + ",") * (count // 900) + "0]",
}


@pytest.mark.parametrize("names", [1, 500])
@pytest.mark.parametrize("family", HUNGRY)
def test_a_hostile_header_takes_at_most_fifty_times_its_length(family, names):
    """The length is bounded by that of the expected header plus 16 KiB."""
    expect = Expected({f"layer.{number}.weight": torch.zeros(1) for number in range(names)})
    longest = content(encode_payload(expect.message, header=Header())) + 2**14
    count = bisect(range(longest), longest - 8, key=lambda count: len(HUNGRY[family](count))) - 1
    text = HUNGRY[family](count).encode()
    blob = len(text).to_bytes(8, "little") + text
    tracemalloc.start()
    try:
        rule = r"^`blob` must have (a JSON object|an entry|the format)"
        with pytest.raises(ValueError, match=rule):
            decode_payload(blob, expect=expect, max_bytes=len(blob) + 4 * names)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(text) > longest - 2000
    assert 10 * len(text) < most < 50 * len(text)
