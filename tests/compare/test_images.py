"""Images as a viewer shows them, the path in every error, and files that are decoded once."""

import os
import struct
import zlib
from collections import defaultdict

import numpy as np
import pytest
import torch
from PIL import Image

from fedprompt.compare import images
from fedprompt.compare.images import decoded, opened, squared
from fedprompt.data import read_folder

RAMP = np.tile(np.linspace(0, 1, 32), (32, 1))
DEEP = np.linspace(0, 65535, 16).astype(np.uint16).reshape(4, 4)
RGBA = np.random.default_rng(0).integers(0, 256, (5, 4, 4), dtype=np.uint8)


def save(folder, name, image, **more):
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(
        folder / name, **more
    )
    return folder / name


def palette():
    image = Image.fromarray(RGBA[..., :3]).quantize(8)
    return image, {"transparency": bytes(range(8))}


READ = {
    # file, image, and its gray levels or RGB pixels
    "12 bits in 16": (
        "a.png",
        (RAMP * 4095).astype(np.uint16),
        np.floor(RAMP * 4095) // 16.0588235,
    ),
    "16 bits": ("a.tiff", DEEP, DEEP // 257),
    "8 bits in 32": ("a.tif", np.full((2, 2), 200, np.int32), np.full((2, 2), 200)),
    "floats": ("a.tiff", RAMP.astype(np.float32), (255 * RAMP).round()),
    "alpha": ("a.png", RGBA, RGBA[..., :3]),
    "gray and alpha": (
        "a.png",
        Image.merge("LA", [Image.fromarray(RGBA[..., k]) for k in (0, 3)]),
        RGBA[..., 0],
    ),
    "palette": ("a.png", palette()[0], np.asarray(palette()[0].convert("RGB"))),
    "one bit": ("a.png", Image.fromarray(RAMP > 0.5), 255 * (RAMP > 0.5)),
    "CMYK": (
        "a.tiff",
        Image.new("CMYK", (2, 2), (255, 0, 0, 0)),
        np.full((2, 2, 3), [0, 255, 255]),
    ),
}


@pytest.mark.parametrize("name", READ)
def test_images_are_read_as_a_viewer_shows_them(name, tmp_path):
    file, image, expected = READ[name]
    more = palette()[1] if name == "palette" else {}
    found = np.asarray(opened(save(tmp_path, file, image, **more)))
    expected = expected if expected.ndim == 3 else expected[..., None]
    assert (found == expected).all()
    if name == "12 bits in 16":
        assert len(np.unique(found)) == 32  # of 32 columns


TURNED = {2: lambda x: x[:, ::-1], 3: lambda x: x[::-1, ::-1], 4: lambda x: x[::-1]}
TURNED |= {5: lambda x: x.swapaxes(0, 1), 6: lambda x: np.rot90(x, -1), 8: np.rot90}
TURNED |= {7: lambda x: x[::-1, ::-1].swapaxes(0, 1)}


@pytest.mark.parametrize("orientation", TURNED)
def test_photos_of_a_phone_are_upright(orientation, tmp_path):
    image = Image.fromarray(RGBA[..., :3])
    exif = image.getexif()
    exif[274] = orientation
    found = opened(save(tmp_path, "a.png", image, exif=exif))
    assert (np.asarray(found) == TURNED[orientation](RGBA[..., :3])).all()


def deep_png(path, pixels):
    """Write a PNG of 16 bits a channel, which Pillow cannot write."""

    def part(kind, content):
        check = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + check

    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    header = part(b"IHDR", struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0))
    body = part(b"IDAT", zlib.compress(rows)) + part(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + header + body)
    return path


def test_colors_of_16_bits_are_read_and_of_12_bits_in_16_are_refused(tmp_path):
    colors = np.arange(48).reshape(4, 4, 3)
    found = np.asarray(opened(deep_png(tmp_path / "a.png", colors * 1365)))
    assert (found == colors * 1365 // 256).all()
    for few in (colors * 85, colors // 47 * 16383):  # 12 and 14 bits
        with pytest.raises(OSError, match=r"b\.png cannot .*: it has colors of less than 16 bits"):
            opened(deep_png(tmp_path / "b.png", few))
    assert np.asarray(opened(deep_png(tmp_path / "a.png", colors // 47 * 16384))).max() == 64


def test_a_bit_depth_is_the_smallest_that_has_the_level_and_higher_levels_are_white(tmp_path):
    levels = {0: 8, 255: 8, 256: 10, 1023: 10, 1024: 12, 4095: 12, 4096: 14, 16384: 16, 65535: 16}
    assert {level: images.depth(level) for level in levels} == levels
    path = save(tmp_path, "a.png", np.uint16([[0, 2048, 4095, 4000, 65535]]))
    found = [np.asarray(opened(path, bits=bits))[0, :, 0].tolist() for bits in (None, 12, 10)]
    assert found == [[0, 7, 15, 15, 255], [0, 127, 255, 249, 255], [0, 255, 255, 255, 255]]


def wrong(folder, name):
    """Write one of the files that cannot be read."""
    path, whole = folder / name, save(folder, "whole.jpg", RGBA.repeat(20, 0)[..., :3])
    if name == "cut.jpg":
        path.write_bytes(whole.read_bytes()[:-200])
    elif name in ("empty.png", "text.png"):
        path.write_text(name[:-4] * (name == "text.png"))
    elif name == "folder.png":
        path.mkdir()
    elif name == "broken.png":
        path.write_bytes(save(folder, "whole.png", RGBA).read_bytes()[:-30] + b"\0" * 30)
    else:
        levels = {"negative": np.int32([[-1, 3]]), "high": np.int32([[0, 70000]])}
        levels |= {"bright": np.float32([[0, 1.5]]), "nan": np.float32([[0, np.nan]])}
        save(folder, name, levels[name[:-5]])
    return path


WRONG = {
    **{"cut.jpg": "truncated", "empty.png": "cannot identify", "text.png": "cannot identify"},
    **{"folder.png": "Is a directory", "broken.png": "", "gone.png": "No such file"},
    **{"negative.tiff": r"must lie in \[0, 65535\]; got from -1 to 3", "high.tiff": "to 70000"},
    **{"bright.tiff": r"must lie in \[0, 1\]; got from 0.0 to 1.5", "nan.tiff": "from nan to nan"},
}


@pytest.mark.parametrize("name", WRONG)
def test_every_error_has_the_path(name, tmp_path):
    path = tmp_path / name if name == "gone.png" else wrong(tmp_path, name)
    with pytest.raises(OSError, match=rf"{path} cannot be read as an image: .*{WRONG[name]}"):
        opened(path)


def test_a_very_large_image_is_refused_with_its_path(tmp_path, monkeypatch):
    path = save(tmp_path, "large.png", RAMP > 0)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)
    with pytest.raises(OSError, match=r"large\.png cannot .* \(1024 pixels\) exceeds limit"):
        opened(path)


@pytest.mark.parametrize(
    "sides", [(32, 32), (10, 40), (61, 17), (3, 190), (33, 100), (2, 192), (192, 2)]
)
@pytest.mark.parametrize("size", [10, 32, 33])
def test_the_short_side_is_resized_by_pillow_and_the_middle_is_cut_out(sides, size):
    pixels = np.random.default_rng(0).integers(0, 256, (*sides, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    height, width = (int(size * side / min(sides)) for side in sides)
    whole = np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))
    top, left = round((height - size) / 2), round((width - size) / 2)
    expected = whole[top : top + size, left : left + size]
    assert np.array_equal(squared(image, size=size).permute(1, 2, 0), expected)


def test_the_middle_of_a_very_long_image_is_read_without_resizing_it_as_a_whole(monkeypatch):
    """At 64 pixels, the whole would have 64 by 4,096,000 pixels."""
    line, resize = np.zeros((1, 64000), np.uint8), Image.Image.resize
    line[:, 31900:32100] = 200

    def limited(image, sides, how):
        assert max(sides) <= 64 * images.WIDEST
        return resize(image, sides, how)

    monkeypatch.setattr(Image.Image, "resize", limited)
    assert (squared(Image.fromarray(line), size=64) == 200).all()


def folder_of(root, count=5):
    for label, name in enumerate("ab"):
        (root / name).mkdir(parents=True)
        for place in range(count):
            save(root / name, f"{place}.png", Image.new("RGB", (9, 8), (100 * label, place, 0)))
    return read_folder(root)


def read(folder, size=4):
    return torch.stack([squared(opened(path), size=size) for path in folder.paths])


@pytest.mark.parametrize("suffix", [".png", ".TIF", ".tiff", ".pgm"])
def test_gray_images_of_one_folder_have_one_scale(suffix, tmp_path):
    """A dark image must not become as bright as a bright one."""
    types = defaultdict(lambda: np.uint16, {".pgm": np.int32})  # as Pillow writes it
    for name, level in {"a": 4000, "b": 1000, "c": 300}.items():
        (tmp_path / "photos" / name).mkdir(parents=True)
        pixels = np.full((2, 2), level, np.uint16)
        pixels[1, 1] = 0
        kind = suffix if name == "a" else ".png"
        save(tmp_path / "photos" / name, f"1{kind}", pixels.astype(types[kind]))
    folder = read_folder(tmp_path / "photos", layout="class")
    found, _ = decoded(folder, tmp_path / "cache", size=2)
    assert found[:, 0, 0, 0].tolist() == [249, 62, 18]  # of 4095
    assert read(folder, 2)[1, 0, 0, 0] == 249  # alone, of 1023


def test_levels_of_8_bits_keep_their_values_and_levels_above_16_bits_are_left_out(tmp_path):
    root = tmp_path / "photos"
    for name, level in {"a": 200, "b": 255}.items():
        (root / name).mkdir(parents=True)
        save(root / name, "1.png", np.full((2, 2), level, np.uint16))
    cache = tmp_path / "cache"
    pixels, _ = decoded(read_folder(root, layout="class"), cache, size=2)
    assert pixels[:, 0, 0, 0].tolist() == [200, 255]
    save(root / "a", "2.tif", np.full((2, 2), 70000, np.int32))
    pixels, kept = decoded(read_folder(root, layout="class"), cache, size=2, skip=True)
    assert (len(kept), pixels[:, 0, 0, 0].tolist()) == (2, [0, 0])  # of 65535


def test_images_are_decoded_once_into_a_file_next_to_the_output(tmp_path, monkeypatch):
    folder, cache = folder_of(tmp_path / "photos"), tmp_path / "out" / "cache"
    before = sorted(tmp_path.rglob("*"))
    pixels, same = decoded(folder, cache, size=4)
    assert same is folder
    assert torch.equal(pixels, read(folder))
    (file,) = cache.iterdir()
    assert sorted(tmp_path.rglob("*")) == sorted([*before, cache.parent, cache, file])
    (cache / f"{file.name}.123.part").write_bytes(b"half of another process")
    monkeypatch.setattr(images, "opened", None)
    again, _ = decoded(folder, cache, size=4)
    assert torch.equal(again, pixels)
    again.zero_()  # is not written
    assert torch.equal(decoded(folder, cache, size=4)[0], pixels)


def test_changed_images_are_decoded_again(tmp_path):
    folder, cache = folder_of(tmp_path / "photos"), tmp_path / "cache"
    decoded(folder, cache, size=4)
    save(tmp_path / "photos" / "a", "3.png", Image.new("RGB", (9, 8), (7, 7, 7)))
    pixels, _ = decoded(folder, cache, size=4)
    assert pixels[3, :, 0, 0].tolist() == [7, 7, 7]
    os.utime(folder.paths[0], (1, 1))  # another one may have as many bytes
    decoded(folder, cache, size=4)
    assert len(list(cache.iterdir())) == 3
    moved = (tmp_path / "photos").rename(tmp_path / "moved")  # names count from the root on
    decoded(read_folder(moved), cache, size=4)
    assert len(list(cache.iterdir())) == 3
    (moved / "a" / "3.png").rename(moved / "a" / "33.png")
    decoded(read_folder(moved), cache, size=4)
    assert len(list(cache.iterdir())) == 4


def test_a_damaged_image_is_named_or_left_out_and_counted(tmp_path):
    folder, cache = folder_of(tmp_path / "photos"), tmp_path / "cache"
    broken = folder.paths[3]
    broken.write_bytes(broken.read_bytes()[:40])
    with pytest.raises(ValueError, match=r"a/3\.png cannot be read .* by `skip=True`\.") as error:
        decoded(folder, cache, size=4)
    assert str(error.value).count("\n") == 0
    assert list(cache.iterdir()) == []
    for _ in range(2):  # decoded, and mapped
        pixels, kept = decoded(folder, cache, size=4, skip=True)
        assert kept.skipped == {"cannot be read": (broken,)}
        assert kept.labels.tolist() == [0] * 4 + [1] * 5
        assert torch.equal(pixels, read(kept))
    told = r"1 of 10 images cannot be read, such as .*a/3\.png\. .* by `skip=True`\."
    with pytest.raises(ValueError, match=told):
        decoded(folder, cache, size=4)


def test_a_folder_without_readable_images_is_refused(tmp_path):
    folder, cache = folder_of(tmp_path / "photos", count=2), tmp_path / "cache"
    for path in folder.paths:
        path.write_text("no image")
    with pytest.raises(ValueError, match="None of 4 images can be read"):
        decoded(folder, cache, size=4, skip=True)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(
    "bytes_of", [lambda whole: whole[:-1], lambda whole: 2 * whole, lambda _: b""]
)
def test_a_damaged_file_of_decoded_images_is_refused(bytes_of, tmp_path, monkeypatch):
    folder, cache = folder_of(tmp_path / "photos"), tmp_path / "cache"
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 50)  # Pillow warns of more, not of twice as many
    decoded(folder, cache, size=4)
    (file,) = cache.iterdir()
    file.write_bytes(bytes_of(file.read_bytes()))
    with pytest.raises(ValueError, match=rf"{file} must have 56 bytes .* 10 images. Delete it"):
        decoded(folder, cache, size=4)


def test_progress_is_the_users(tmp_path):
    seen = []

    def bar(chunks):
        for chunk in chunks:
            yield chunk
            seen.append(len(chunk))

    decoded(folder_of(tmp_path / "photos", count=150), tmp_path / "cache", size=2, bar=bar)
    assert seen == [256, 44]
