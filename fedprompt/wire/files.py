"""Blobs in files."""

import os
from os import PathLike

from torch import Tensor

from fedprompt._checks import check_count
from fedprompt.interfaces import Message, Weighted
from fedprompt.wire.decode import decode_payload
from fedprompt.wire.encode import encode_payload
from fedprompt.wire.format import Expected, Header


def save_payload(message: Message, path: str | PathLike[str], *, header: Header) -> None:
    """Write a message to a file, as :func:`encode_payload` encodes it.

    Args:
        message: Tensors or :class:`Weighted` by name.
        path: Path of the file. An existing file is replaced, unless the message is refused.
        header: Header of the blob.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> expect = Expected({"scale": torch.tensor(0.0)})
        >>> with TemporaryDirectory() as folder:
        ...     path = f"{folder}/scale.safetensors"
        ...     save_payload({"scale": torch.tensor(4.5)}, path, header=Header())
        ...     open_payload(path, expect=expect)[0]
        {'scale': tensor(4.5000)}
    """
    blob = encode_payload(message, header=header)
    with open(path, "wb") as file:
        file.write(blob)


def open_payload(
    path: str | PathLike[str], *, expect: Expected, max_bytes: int = 2**30
) -> tuple[dict[str, Tensor | Weighted], Header]:
    """Read a message from a file, as :func:`decode_payload` decodes it.

    Args:
        path: Path of a file of :func:`save_payload`. At most `max_bytes` + 1 bytes are read.
        expect: Form and fingerprint that the message must have.
        max_bytes: Maximum size in bytes of the file, and of the message that it unfolds into.

    Returns:
        The message and its header.

    Raises:
        ValueError: If :func:`decode_payload` refuses the content.

    Example:
        See :func:`save_payload`. Files with other content are refused.

        >>> import os
        >>> open_payload(os.devnull, expect=Expected({"scale": torch.tensor(0.0)}))
        Traceback (most recent call last):
        ValueError: `blob` must start with the length of its header in 8 bytes; got 0 bytes.
    """
    check_count("max_bytes", max_bytes)
    with open(path, "rb") as file:
        blob = file.read(min(os.fstat(file.fileno()).st_size, max_bytes) + 1)
    return decode_payload(blob, expect=expect, max_bytes=max_bytes)
