"""The door to image files: formats by content, bounds of pixels and of memory."""

import os
import struct
import threading
import time
import zlib

import numpy as np
import pytest
from PIL import Image

from fedprompt.data.opening import opened

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n"


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "PPM"])
def test_content_decides_the_format_whatever_the_name_is(kind, tmp_path):
    Image.new("RGB", (8, 6), (200, 0, 0)).save(tmp_path / "a.png", format=kind)
    found = opened(tmp_path / "a.png")
    assert (found.mode, found.size) == ("RGB", (8, 6))
    assert abs(np.asarray(found).astype(int) - [200, 0, 0]).max() < 4


def test_no_program_is_started_by_a_file(tmp_path, monkeypatch):
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/called\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name, content in (("a.eps", EPS), ("a.png", EPS), ("b.png", b"\x00" * 40), ("c.png", b"P")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(OSError, match=f"{name} cannot be read as an image: "):
            opened(tmp_path / name)
    assert not (tmp_path / "called").exists()


def bomb(path, side):
    """Write a black PNG of many pixels and few bytes."""

    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    rows = zlib.compress(b"\0" * (side * (3 * side + 1)))
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", rows) + chunk(b"IEND", b""))
    return path


def test_an_image_has_at_most_so_many_pixels(tmp_path):
    path = bomb(tmp_path / "a.png", 100)
    assert opened(path, max_pixels=10_000).size == (100, 100)
    with pytest.raises(OSError, match=r"at most 9,999 pixels; got 100 x 100"):
        opened(path, max_pixels=9_999)
    with pytest.raises(OSError, match=r"at most 180,000,000 pixels; got 13417 x 13417"):
        opened(bomb(tmp_path / "b.png", 13_417))


def test_images_of_all_threads_have_at_most_as_many_pixels_as_one_may_have(tmp_path):
    path, held, most = bomb(tmp_path / "a.png", 10), [], []

    def hold(image):
        held.append(image)
        most.append(len(held))
        time.sleep(0.01)
        held.remove(image)

    for limit, together in ((199, 1), (200, 2), (10_000, 6)):
        most.clear()
        threads = [
            threading.Thread(
                target=opened, args=(path,), kwargs={"max_pixels": limit, "then": hold}
            )
            for _ in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(most) == 6
        assert max(most) <= together
        assert together == 1 or max(most) > 1
    assert opened(path, max_pixels=100).size == (10, 10)  # the room of a failed one is free, too
    with pytest.raises(OSError, match=r"a\.png cannot be read as an image: division by zero"):
        opened(path, then=lambda image: 1 / 0)
    assert opened(path, max_pixels=100).size == (10, 10)
