"""Messages as bytes: one safetensors blob each, and nothing that arrives is trusted."""

import os
from collections.abc import Mapping
from functools import partial
from os import PathLike

import torch
from torch import Tensor

from fedprompt._checks import (
    check_count,
    check_finite,
    check_number,
    check_upload,
    kind,
    wrong_type,
    wrong_value,
)
from fedprompt.interfaces import Message, Weighted
from fedprompt.wire.decode import (
    check_origin,
    check_whole,
    claimed_slots,
    parse_metadata,
    pieces,
    read_entry,
    read_header,
    refuse,
)
from fedprompt.wire.format import (
    Expected,
    Header,
    Slot,
    check_header,
    check_texts,
    digest_of,
    header_text,
    offsets,
    slots,
    value_key,
    weight_key,
)


def encode_payload(message: Message, *, header: Header) -> bytes:
    r"""Write a message as one safetensors blob.

    Weights travel in full, of values only the rows of weight above 0: behind the header stand exactly ``num_bytes(message)`` bytes. A
    plain tensor keeps its name, so that any reader of safetensors can open a broadcast; a :class:`Weighted` becomes ``name:value``
    (known rows, \*event) and ``name:weight``. Equal messages give equal bytes, whatever the order of their names.

    Args:
        message: Tensors or :class:`Weighted` by name, on any device.
        header: What travels beside them.

    Returns:
        The blob. Weight 0 is not privacy, and nothing is encrypted.

    Raises:
        TypeError: If `message` or `header` is of the wrong kind, or a dtype is complex or narrower than 8 bits.
        ValueError: If `message` is empty or has a reserved name, a value is NaN or infinite, a weight negative, or `header` is longer than
            16 KiB.

    Example:
        >>> message = {"head": Weighted(torch.zeros(3, 4), torch.tensor([2.0, 0.0, 1.0]))}
        >>> blob = encode_payload(message, header=Header(client_id="7"))
        >>> len(blob) - 8 - int.from_bytes(blob[:8], "little") == num_bytes(message)
        True

    References:
        The format is that of https://github.com/huggingface/safetensors.
    """
    check_header(header)
    laid, tensors = slots("message", message), dict[str, Tensor]()
    for name, entry in message.items():
        argument = f"message[{name!r}]"
        if isinstance(entry, Weighted):
            check_upload(argument, entry)
            value, weight = entry
            rows = value.detach().reshape(laid[value_key(name)].shape)[weight.flatten() > 0]
            tensors |= {value_key(name): rows, weight_key(name): weight.detach()}
        else:
            check_finite(argument, entry)
            tensors[name] = entry.detach()
    sent = {key: laid[key]._replace(shape=tuple(tensor.shape)) for key, tensor in tensors.items()}
    content = [_bytes(tensors[key]) for key in offsets(sent)]
    text = header_text(header, sent, digest_of(header, sent, content)).encode()
    return b"".join([len(text).to_bytes(8, "little"), text, *content])


def decode_payload(
    blob: bytes, *, expect: Expected, max_bytes: int
) -> tuple[dict[str, Tensor | Weighted], Header]:
    """Read a blob, all of it or nothing; what arrives is data, and no code can come of it.

    Only what :func:`encode_payload` writes for a message of the expected form is read: everything else is refused, by a reason, before
    memory is taken for it. So a blob has one reading, and encoding that gives the blob again. A digest tells a damaged blob, be it by a
    single bit; it is no signature, as whoever writes a blob can write its digest.

    Args:
        blob: What arrived.
        expect: Form and fingerprint of what should arrive; the round and the sender, where they are known.
        max_bytes: Maximum size in bytes of the blob, and of the message that it unfolds into. The
            tensors take at most twice that. Parsing the header takes at most 50 times its length,
            which is bounded by that of the header of `expect` plus 16 KiB.

    Returns:
        The message, on the CPU, in the order of names that is expected, with rows of weight 0 as zeros; and its header.

    Raises:
        TypeError: If an argument is of the wrong kind; never for what `blob` holds.
        ValueError: If the blob is too long, truncated, damaged, malformed, holds NaN, infinity, a
            number beyond `expect.max_abs` or negative weights, or is of another
            format, form, fingerprint, round or sender; the text says which part differs. If `expect` alone needs more than `max_bytes`.

    Example:
        >>> model = nn.Linear(4, 2)
        >>> blob = encode_payload(collect(model, weight=30), header=Header({"backbone": "vit_tiny"}, server_round=3))
        >>> expect = Expected(collect(model, weight=0), {"backbone": "vit_tiny"}, server_round=3)
        >>> message, header = decode_payload(blob, expect=expect, max_bytes=10_000)
        >>> torch.equal(message["bias"].value, model.bias), header.server_round
        (True, 3)
        >>> decode_payload(blob, expect=expect._replace(server_round=4), max_bytes=10_000)
        Traceback (most recent call last):
        ValueError: `blob` must have the server_round 4; got 3.
        >>> decode_payload(blob, expect=expect._replace(fingerprint={"backbone": "vit_small"}), max_bytes=10_000)
        Traceback (most recent call last):
        ValueError: `blob` must come from the same backbone, {'backbone': 'vit_small'}; got {'backbone': 'vit_tiny'}.
    """
    return read_blob(blob, expect, check_expected(expect, max_bytes), max_bytes)


def check_expected(expect: object, max_bytes: int) -> dict[str, Slot]:
    """Require a receiver that knows what it asks for, and lay out the message that it expects."""
    if not isinstance(expect, Expected):
        raise wrong_type("expect", "be Expected(message, ...)", kind(expect))
    check_texts("expect.fingerprint", expect.fingerprint)
    if expect.server_round is not None:
        check_count("expect.server_round", expect.server_round, at_least=0)
    if not isinstance(expect.client_id, str | None):
        raise wrong_type("expect.client_id", "be a string or None", kind(expect.client_id))
    if expect.max_abs is not None:
        check_number("expect.max_abs", expect.max_abs, above=0)
    check_count("max_bytes", max_bytes)
    expected = slots("expect.message", expect.message)
    if (most := sum(slot.num_bytes for slot in expected.values())) > max_bytes:
        raise wrong_value(
            "max_bytes", f"leave room for the {most} bytes of `expect.message`", max_bytes
        )
    return expected


def read_blob(
    blob: bytes, expect: Expected, expected: Mapping[str, Slot], max_bytes: int
) -> tuple[dict[str, Tensor | Weighted], Header]:
    """Read a blob for a receiver that was checked: whatever is wrong from here on is the sender's fault, and a ValueError."""
    if not isinstance(blob, bytes):
        raise wrong_type("blob", "be bytes", type(blob).__name__)
    if len(blob) > max_bytes:
        refuse(f"be at most {max_bytes} bytes long", len(blob))
    entries, text = read_header(blob, expected)
    header, digest = parse_metadata(entries.get("__metadata__"))
    check_origin(header, expect)
    claimed = claimed_slots(entries, expected, expect.message)
    tensors = memoryview(blob)[8 + int.from_bytes(blob[:8], "little") :]
    check_whole(text, digest, header, claimed, tensors)
    raw = pieces(tensors, claimed)
    read = partial(read_entry, raw, claimed=claimed, max_abs=expect.max_abs)
    return {name: read(name, entry) for name, entry in expect.message.items()}, header


def save_payload(message: Message, path: str | PathLike[str], *, header: Header) -> None:
    """Write a message to a file; see :func:`encode_payload`.

    Args:
        message: Tensors or :class:`Weighted` by name.
        path: Where to; an existing file is replaced.
        header: What is kept beside them.

    Raises:
        TypeError: As :func:`encode_payload`; the file is left as it was.
        ValueError: The same.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     save_payload({"scale": torch.tensor(4.5)}, f"{folder}/scale.safetensors", header=Header())
        ...     open_payload(f"{folder}/scale.safetensors", expect=Expected({"scale": torch.tensor(0.0)}))[0]
        {'scale': tensor(4.5000)}
    """
    blob = encode_payload(message, header=header)
    with open(path, "wb") as file:
        file.write(blob)


def open_payload(
    path: str | PathLike[str], *, expect: Expected, max_bytes: int = 2**30
) -> tuple[dict[str, Tensor | Weighted], Header]:
    """Read a message from a file; see :func:`decode_payload`.

    Args:
        path: A file of :func:`save_payload`; never more than `max_bytes` + 1 bytes of it are read.
        expect: Form and fingerprint of what should be in it.
        max_bytes: At most so many bytes for the file, and for the message; a gibibyte unless told.

    Returns:
        The message and its header.

    Raises:
        TypeError: As :func:`decode_payload`.
        ValueError: As :func:`decode_payload`.

    Example:
        See :func:`save_payload`; a file of something else is refused:

        >>> import os
        >>> open_payload(os.devnull, expect=Expected({"scale": torch.tensor(0.0)}))
        Traceback (most recent call last):
        ValueError: `blob` must start with the length of its header in 8 bytes; got 0 bytes.
    """
    check_count("max_bytes", max_bytes)
    with open(path, "rb") as file:
        blob = file.read(min(os.fstat(file.fileno()).st_size, max_bytes) + 1)
    return decode_payload(blob, expect=expect, max_bytes=max_bytes)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
