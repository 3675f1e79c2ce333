"""Messages for the tests of the wire format, and blobs with damage made on purpose."""

import json
import struct

import torch
from hypothesis import strategies as st

from blobs import content, mended, overwritten
from fedprompt import Weighted
from fedprompt.wire import Expected, Header, decode_payload, encode_payload
from known import known

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


OTHERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


PARTS = {"backbone": "vit", "classes": "cat, dog"}


HEADER = Header(PARTS | {"own": "x"}, 3, "client ü 7", {"loss": '0.5, "quoted"', "note": ""})


# All of Unicode but the surrogates; the own strategy of Hypothesis first makes a table of it.
CHARACTERS = st.integers(0, 0x10FFFF - 0x800).map(lambda n: chr(n if n < 0xD800 else n + 0x800))


def as_received(entry):
    """Replace rows of weight 0 by zeros, as decoding does."""
    return (
        entry._replace(value=torch.where(known(entry), entry.value, 0.0))
        if isinstance(entry, Weighted)
        else entry
    )


def form_of(entry):
    """Make an entry of the same form without numbers."""
    if isinstance(entry, Weighted):
        return Weighted(*(torch.empty_like(tensor, device="meta") for tensor in entry))
    return torch.empty_like(entry, device="meta")


def form(message):
    return {name: form_of(entry) for name, entry in message.items()}


def decode(blob, message, *, parts=PARTS, max_bytes=2**20):
    return decode_payload(blob, expect=Expected(form(message), parts), max_bytes=max_bytes)


@st.composite
def messages(draw):
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    sizes = st.lists(st.integers(0, 3), max_size=2).map(tuple)
    message = {}
    for name in draw(
        st.lists(
            st.text(CHARACTERS, max_size=5).filter(lambda name: name != "__metadata__"),
            min_size=1,
            max_size=4,
            unique=True,
        )
    ):
        rows, event, dtype = draw(sizes), draw(sizes), draw(st.sampled_from(FLOATS))
        value = torch.randn((*rows, *event), generator=generator).to(dtype)
        if draw(st.booleans()):
            weight = (
                torch.rand(rows, generator=generator)
                .sub(0.4)
                .clamp(min=0)
                .to(draw(st.sampled_from(FLOATS)))
            )
            value = torch.where(known(Weighted(value, weight)), value, torch.nan)
            message[name] = Weighted(value, weight)
        else:
            message[name] = (10 * value).to(draw(st.sampled_from([*FLOATS, *OTHERS])))
    return message


MESSAGE = {
    "keys": Weighted(torch.arange(6.0).reshape(3, 2) + 1, torch.tensor([2.0, 0.0, 1.0])),
    "scale": torch.tensor(4.5),
    "steps": torch.tensor([3, 4]),
    "seen": torch.tensor([True, False]),
}


BLOB = encode_payload(MESSAGE, header=HEADER)


def forged(change, *, data=None):
    """Change the entries of the header of `BLOB`; lengths and digest are corrected."""
    entries = json.loads(BLOB[8 : content(BLOB)])
    text = change(entries)
    text = (
        json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
        if text is None
        else text.encode()
    )
    text += b" " * (-len(text) % 8)
    return mended(
        struct.pack("<Q", len(text)) + text + (BLOB[content(BLOB) :] if data is None else data)
    )


def edit(key, field, value):
    return forged(lambda entries: entries[key].update({field: value}))


def with_number(number, place, code="<f"):
    """Replace a number of `BLOB`.

    The tensors start at: steps 0, keys:value 16, keys:weight 32, scale 44, seen 48.
    """
    return overwritten(BLOB, place, struct.pack(code, number))


HEADER_TEXT = BLOB[8 : content(BLOB)].decode()


def attempt(blob, max_bytes=2000):
    return decode(blob, MESSAGE, max_bytes=max_bytes)


ENTRY_ROWS = {
    "spread": Weighted(torch.ones(2), torch.tensor([0.0, 0.0])),
    "one": Weighted(torch.tensor(1.0), torch.tensor(2.0)),
}
