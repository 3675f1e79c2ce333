"""Blobs in files."""

from __future__ import annotations

from os import PathLike

from torch import Tensor

from fedprompt._files import file_of, replace_file
from fedprompt.interfaces import Message, Weighted
from fedprompt.wire._decode import read_blob
from fedprompt.wire._format import Expected, Header, check_expected, longest_header
from fedprompt.wire.encode import encode_payload


def save_payload(message: Message, path: str | PathLike[str], *, header: Header) -> None:
    """Write a message to a file, as :func:`encode_payload` encodes it.

    The message is written to a new file next to it, which is renamed when all bytes are on the
    disk. So a full disk or a kill leaves an existing file as it was. The disk needs space for both.
    One process at a time writes a file: a second one waits for 30 seconds.

    Args:
        message: Tensors or :class:`Weighted` by name.
        path: Path of the file. An existing file is replaced, unless the message is refused. It
            cannot be a pipe or a device.
        header: Header of the blob.

    Raises:
        ValueError: If the message is refused.
        TimeoutError: If another process still writes after 30 seconds.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> expect = Expected({"scale": torch.tensor(0.0)})
        >>> with TemporaryDirectory() as folder:
        ...     path = f"{folder}/scale.safetensors"
        ...     save_payload({"scale": torch.tensor(4.5)}, path, header=Header())
        ...     open_payload(path, expect=expect)[0]
        {'scale': tensor(4.5000)}
    """
    replace_file(file_of(path), encode_payload(message, header=header))


def open_payload(
    path: str | PathLike[str], *, expect: Expected, max_bytes: int = 2**30
) -> tuple[dict[str, Tensor | Weighted], Header]:
    """Read a message from a file, as :func:`decode_payload` decodes it.

    Args:
        path: Path of a file of :func:`save_payload`. A file that is longer than any message of the
            expected form is refused, and only the permitted length is read.
        expect: Form and fingerprint that the message must have.
        max_bytes: Maximum size in bytes of the file, and of the message that it unfolds into.

    Returns:
        The message and its header.

    Raises:
        ValueError: If :func:`decode_payload` refuses the content, or `path` is a pipe or a device.

    Example:
        See :func:`save_payload`. Files with other content are refused.

        >>> from tempfile import NamedTemporaryFile
        >>> with NamedTemporaryFile() as file:
        ...     open_payload(file.name, expect=Expected({"scale": torch.tensor(0.0)}))
        Traceback (most recent call last):
        ValueError: `blob` must start with the length of its header in 8 bytes; got 0 bytes.
    """
    file = file_of(path)
    expected = check_expected(expect, max_bytes)
    longest = 8 + longest_header(expected) + sum(slot.num_bytes for slot in expected.values())
    longest = min(longest, max_bytes)
    with file.open("rb") as stream:
        blob = stream.read(min(file.stat().st_size, longest) + 1)
    return read_blob(blob, expect, expected, longest)
