"""Doubts about folders: each planted fault has its doubt alone, and honest folders have none."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedprompt import data
from fedprompt.data import examine, few_shot, leave_one_out, read_folder
from fedprompt.data.doubts import DOUBTS
from refusals import refused

CLASSES = (
    "cat",
    "alarm clock",
    "Airplane",
    "t-shirt",
    "e4 visa",
    "boeing 747-200",
    "tv",
    "caf\xe9",
)
DOMAINS = ("art", "photo", "site 1", "site 12")


def photo(path: Path, seed: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def made(root: Path, *folders: str, each: int = 3) -> Path:
    for number, folder in enumerate(folders):
        for index in range(each):
            photo(root / folder / f"{index}.png", 100 * number + index)
    return root


def names(reading):
    return [doubt.name for doubt in reading.doubts]


@pytest.mark.parametrize("seed", range(40))
def test_honest_folders_and_their_splits_meet_no_doubt(seed, tmp_path):
    draw = np.random.default_rng(seed)
    classes = draw.permutation(CLASSES)[: draw.integers(2, 6)]
    layout = ("class", "split/class", "domain/class", "domain/split/class")[seed % 4]
    heads = {"split": ("train", "test"), "domain": draw.permutation(DOMAINS)[:3]}
    folders = [""]
    for level in layout.split("/"):
        folders = [f"{above}/{name}" for above in folders for name in heads.get(level, classes)]
    made(tmp_path, *(folder[1:] for folder in folders), each=int(draw.integers(3, 6)))
    folder = read_folder(tmp_path, layout=layout)
    if layout in ("class", "domain/class"):
        tested = draw.random(len(folder)) < 0.3
        folder = replace(folder, split=np.where(tested, "test", "train"))
    apart = "domain" in layout
    assert names(examine(folder, words=bool(seed % 3), leave_one_out=apart, shots=2)) == []
    shown = np.flatnonzero(folder.split == "train")
    few = shown[few_shot(folder.labels[shown], shots=1, generator=draw)]
    rest = np.flatnonzero(folder.split != "train")
    assert names(examine(folder.at(np.concatenate([few, rest])))) == []
    if apart:
        train, held = leave_one_out(folder.domains)[0]
        seen, unseen = folder.at(train), folder.at(held)
        assert names(examine(seen, test=unseen)) == []


def link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    os.symlink(source, target)


def copy(source: Path, target: Path) -> None:
    target.write_bytes(source.read_bytes())


SPLIT = ("train/cat", "train/dog", "test/cat", "test/dog")
PLANTED = {
    # folders, function that plants a fault, layout, doubt, example
    "a copy in the tests": (
        SPLIT,
        lambda root: copy(root / "train/cat/1.png", root / "test/cat/x.png"),
        None,
        "train-and-test",
        "`test/cat/x.png` and `train/cat/1.png`",
    ),
    "a link in the tests": (
        SPLIT,
        lambda root: link(root / "train/dog/0.png", root / "test/dog/x.png"),
        None,
        "train-and-test",
        "`test/dog/x.png` and `train/dog/0.png`",
    ),
    "a copy in another class": (
        ("cat", "dog"),
        lambda root: copy(root / "cat/1.png", root / "dog/9.png"),
        None,
        "two-classes",
        "`cat/1.png` and `dog/9.png`",
    ),
    "case": (
        ("art/Cat", "art/dog", "photo/cat"),
        None,
        "domain/class",
        "similar-names",
        "`Cat` and `cat`",
    ),
    "numbers with a point": (("1", "1.0", "2"), None, None, "similar-names", "`1` and `1.0`"),
    "blanks": (("cat", "cat ", "dog"), None, None, "similar-names", "`cat` and `cat `"),
    "underscores": (
        ("alarm clock", "alarm_clock"),
        None,
        None,
        "similar-names",
        "`alarm clock` and",
    ),
    "zeros": (("class 01", "class 1"), None, None, "similar-names", "`class 01` and `class 1`"),
    "accents": (
        ("caf\xe9", "caf\xc3\xa9"),
        None,
        None,
        "similar-names",
        "`caf\xc3\xa9` and `caf\xe9`",
    ),
    "bytes of accents": (
        ("caf\xe9", "caf\udce9"),
        None,
        None,
        "similar-names",
        "`caf\\xe9` and `caf\xe9`",
    ),
    "clients": (("A/cat", "a/dog"), None, "client/class", "similar-names", "`A` and `a`"),
    "masks": (("images", "Masks"), None, None, "part-names", "`Masks`; `images`"),
    "parts": (
        ("x/cat/part1", "x/cat/part2"),
        None,
        "_/domain/class",
        "part-names",
        "`part1`; `part2`",
    ),
    "thumbnails": (("cat", "dog", "dog/@eaDir"), None, "class", "machine-folders", "`@eaDir`"),
    "trash": (
        ("cat", "lost+found", "Trash-1000"),
        None,
        None,
        "machine-folders",
        "`Trash-1000`; `lost",
    ),
    "damaged": (
        ("cat", "dog"),
        lambda root: [path.write_bytes(b"%!PS") for path in (root / "dog").iterdir()],
        None,
        "unreadable-class",
        "`dog`: ",
    ),
    "wordnet": (("n01440764", "goldfish"), None, None, "no-words", "`n01440764`"),
    "digits": (("0", "1"), None, None, "no-words", "`0`; `1`"),
    "numbered": (
        ("001.Laysan_Albatross", "002.Ani"),
        None,
        None,
        "no-words",
        "`001.Laysan_Albatross`; `002.Ani`",
    ),
    "numbers of classes": (("class_3", "dog"), None, None, "no-words", "`class_3`"),
    "codes": (("bcc", "bkl", "df", "mel"), None, None, "no-words", "`bcc`; `bkl`; `df`"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_doubted_with_an_example_and_a_remedy(fault, tmp_path):
    folders, plant, layout, doubt, example = PLANTED[fault]
    made(tmp_path, *folders)
    if plant:
        plant(tmp_path)
    reading = examine(read_folder(tmp_path, layout=layout), words=doubt == "no-words")
    assert names(reading) == [doubt] or {*names(reading)} == {doubt, "two-classes"}
    text = str(next(each for each in reading.doubts if each.name == doubt))
    assert example in text
    assert text.endswith(f"{DOUBTS[doubt][1]}.")
    with pytest.raises(ValueError, match=f"doubted: .*{doubt}: .* by `allow='"):
        reading.check()
    reading.check(allow={doubt, "two-classes"})


def test_a_class_of_images_that_are_all_too_large_is_doubted(tmp_path):
    folder = read_folder(made(tmp_path, "cat", "dog"))
    assert names(examine(folder, max_pixels=16)) == []
    assert names(examine(folder, max_pixels=15)) == ["unreadable-class"]


def test_doubts_of_names_are_printed_with_the_folder(tmp_path):
    folder = read_folder(made(tmp_path, "images", "Images"))
    assert "\n  doubt similar-names: names differ only in case, " in str(folder)
    assert "\n  doubt part-names: " in str(folder)
    assert names(examine(folder)) == ["similar-names", "part-names"]


def test_more_than_three_examples_are_counted(tmp_path):
    folder = read_folder(made(tmp_path, "0", "1", "2", "3"))
    (doubt,) = examine(folder, words=True).doubts
    assert str(doubt).startswith(
        "no-words: class names are not words, and a CLIP reads them (4 times): `0`; `1`; `2`. "
    )


def test_images_of_further_tests_and_of_a_domain_that_is_left_out_are_not_in_training(tmp_path):
    folder = read_folder(
        made(tmp_path / "a", "art/cat", "art/dog", "web/cat", "web/dog"), layout="domain/class"
    )
    copy(tmp_path / "a/art/cat/1.png", tmp_path / "a/web/cat/1.png")
    assert names(examine(folder)) == []
    assert examine(folder).notes == ("images that occur twice in their class: 1",)
    assert names(examine(folder, leave_one_out=True)) == ["train-and-test"]
    made(tmp_path / "b", "fox", "owl", each=1)  # its fox is the cat 0 of art
    copy(tmp_path / "a/web/dog/0.png", tmp_path / "b/owl/0.png")
    other = read_folder(tmp_path / "b")
    assert len(examine(folder, test=other).doubts[0].examples) == 2
    part = replace(other, split=np.array(["test", "train"]))  # only its tests count
    assert len(examine(folder, test=part).doubts[0].examples) == 1


def test_notes_have_classes_with_few_images_and_those_of_one_side(tmp_path):
    made(tmp_path, "train/cat", "train/dog", "train/fox", "test/cat", "test/dog", "test/owl")
    photo(tmp_path / "train/gnu/1.png", 999)
    assert examine(read_folder(tmp_path), shots=2).notes == (
        "classes with one image: gnu",
        "classes without training images: owl",
        "classes without tests: fox, gnu",
        "classes with fewer than 2 training images: gnu",
    )


def test_notes_of_a_list_have_the_gaps_of_its_labels(tmp_path):
    sides = {
        "train": [[f"{k}.png", 7 * k, name] for k, name in enumerate(("ant", "bee"))],
        "test": [],
    }
    made(tmp_path, "images")
    (tmp_path / "split_zhou_x.json").write_text(json.dumps(sides))
    assert examine(read_folder(tmp_path)).notes[0].startswith("2 labels from 0 to 7 have gaps")


def test_labels_of_missing_values_are_noted_and_tables_of_spreadsheets_are_read(tmp_path):
    made(tmp_path, "i", each=3)
    text = "path\tlabel\ni/0.png\tnan\ni/1.png\tcat\ni/2.png\tcat\n"
    (tmp_path / "list.csv").write_text(text, encoding="utf-16")
    folder = read_folder(tmp_path / "list.csv")
    assert folder.class_names == ("cat", "nan")
    assert examine(folder).notes[0] == "a class is named nan"


def test_the_digest_has_names_and_bytes_and_not_the_place(tmp_path):
    folders = [read_folder(made(tmp_path / name, "cat", "dog")) for name in ("a", "b")]
    first, second = (examine(folder).digest for folder in folders)
    assert first == second
    os.utime(tmp_path / "b/cat/1.png", (1, 1))
    assert examine(folders[1]).digest == first
    assert examine(folders[1].at(range(5))).digest != first
    assert examine(folders[0], test=folders[1].at([0])).digest != first
    status = (tmp_path / "b/cat/1.png").stat()
    content = (tmp_path / "b/cat/1.png").read_bytes()
    (tmp_path / "b/cat/1.png").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(tmp_path / "b/cat/1.png", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert examine(folders[1]).digest != first


def test_every_file_is_read_once_and_a_bar_sees_them_all(tmp_path):
    folder = read_folder(made(tmp_path, "cat", "dog"))
    seen = []
    examine(folder, bar=lambda paths: [seen.append(path) or path for path in paths])
    assert seen == list(folder.paths)


def test_the_page_has_every_doubt_and_its_remedy():
    page = (Path(data.__file__).parents[2] / "docs" / "how-to" / "your-folder.md").read_text()
    assert [name for name in DOUBTS if f"| `{name}` |" not in page] == []


REFUSED = """
data.examine(3) -> TypeError: `folder` must be a folder of read_folder; got 3 (int)
examine(own(), test=3) -> TypeError: `test` must be a folder of read_folder; got 3 (int)
examine(own(), words=1) -> TypeError: `words` must be True or False; got 1 (int)
examine(own(), leave_one_out=1) -> TypeError: `leave_one_out` must be True or False; got 1 (int)
examine(own(), shots=0) -> ValueError: `shots` must be at least 1; got 0
examine(own(), max_pixels=0) -> ValueError: `max_pixels` must be at least 1; got 0
data.Reading((), (), "").check(["x"]) -> ValueError: `allow` must have names of doubts: train-and-
"""


def own():
    none = np.array([], dtype=np.int64)
    return data.Folder(Path("."), "own", (), none, none, none.astype(str), ("a", "b"))


test_refusals = refused(globals())(REFUSED)
