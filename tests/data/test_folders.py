"""Folders and lists of images: layouts that are told apart, and what is refused or left out."""

import json
import os
import re
from pathlib import Path
from unicodedata import normalize

import numpy as np
import pytest
from torchvision.datasets import ImageFolder

from fedprompt import data
from fedprompt.data import read_folder
from fedprompt.data.folders import READ, flags
from refusals import check_refused, refusals


def make(root: Path, *names: str) -> Path:
    """Write files; braces stand for several names, as in a shell."""
    for name in names:
        before, brace, rest = name.partition("{")
        inside, _, after = rest.partition("}")
        if brace:
            make(root, *(before + each + after for each in inside.split(",")))
            continue
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"an image")
    return root


LAYOUTS = {
    # files, domains, counts of training, validation and test images, whether it is read as it is
    "class": ("{cat,dog}/{1,2,3}.png", ("",), (6, 0, 0), True),
    "split/class": ("{training,valid,TEST}/{cat,dog}/{1,2}.JPG", ("",), (4, 4, 4), True),
    "class/split": ("{cat,dog}/{train,test}/{1,2}.ppm", ("",), (4, 0, 4), False),
    "domain/class": ("{art,photo}/{cat,dog}/{1,2}.jpeg", ("art", "photo"), (8, 0, 0), False),
    "domain/_/class": ("{art,photo}/images/{cat,dog}/1.png", ("art", "photo"), (4, 0, 0), False),
    "domain/split/class": ("{a,b}/{train,eval}/{cat,dog}/1.bmp", ("a", "b"), (4, 4, 0), False),
    "split/domain/class": (
        "{train,test}/{a,b,c}/{cat,dog}/1.webp",
        ("a", "b", "c"),
        (6, 0, 6),
        False,
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_depth_and_names_of_splits_decide_and_every_deeper_folder_needs_its_layout(
    layout, tmp_path
):
    files, domains, counts, decided = LAYOUTS[layout]
    make(tmp_path, files, "notes.txt", ".DS_Store", "x.\x1b[1m")
    if not decided:
        reading = re.escape(f"layout='{layout}' (")
        with pytest.raises(ValueError, match=f"read in one way.*{reading}.*Choose by `layout`"):
            read_folder(tmp_path)
    given = {} if decided else {"layout": layout.replace("domain", "client")}
    folder = read_folder(tmp_path, **given)
    assert folder.layout == layout
    assert (folder.class_names, folder.domain_names) == (("cat", "dog"), domains)
    assert tuple((folder.split == side).sum() for side in ("train", "val", "test")) == counts
    axes, words = layout.split("/"), {"training": "train", "valid": "val", "eval": "val"}
    for path, label, domain, split in zip(
        folder.paths, folder.labels, folder.domains, folder.split, strict=True
    ):
        names = dict(zip(axes, path.relative_to(tmp_path).parts, strict=False))
        side = names.get("split", "train").lower()
        assert folder.class_names[label] == names["class"]
        assert folder.domain_names[domain] == names.get("domain", "")
        assert split == words.get(side, side)
    assert read_folder(tmp_path, layout=layout).paths == folder.paths


def test_a_folder_of_classes_is_read_as_by_torchvision(tmp_path):
    make(tmp_path, "b c/{10,9,a b}.png", "a/{z,Z}.PNG", "10/1.jpg", "9/s/1.tif", "9/1.ppm")
    own, theirs = read_folder(tmp_path, layout="class"), ImageFolder(tmp_path)
    assert list(own.class_names) == theirs.classes
    assert [(str(p), k) for p, k in zip(own.paths, own.labels, strict=True)] == theirs.samples


def test_the_description_has_layout_classes_domains_and_numbers(tmp_path):
    make(tmp_path, "art/{cat,dog,owl}/{1,2}.png", "photo/{cat,dog}/1.png", "art/cat/._1.png")
    make(tmp_path, "__MACOSX/art/cat/1.png", "photo/.cache/{a,b}/1.png", "art/cat/9.gif")
    (tmp_path / "photo" / "owl").mkdir()
    assert str(read_folder(tmp_path, layout="domain/class")).splitlines() == [
        f"{tmp_path}: layout domain/class, 8 images, 3 classes, 2 domains",
        "  art: train 6",
        "  photo: train 2",
        "  classes: cat 3, dog 3, owl 2",
        f"  left out: 3 (hidden), such as {tmp_path}/__MACOSX",
        f"  left out: 1 (.gif is not read), such as {tmp_path}/art/cat/9.gif",
        f"  left out: 1 (a folder without images), such as {tmp_path}/photo/owl",
    ]
    make(tmp_path / "sides", "train/{a,b}/1.png", "test/{a,c}/1.png")
    assert "classes without training images: c" in str(read_folder(tmp_path / "sides"))
    letters = make(tmp_path / "letters", "{a,b,c,d,e,f,g,h,i,j,k,l}/1.png", "l/2.png")
    assert "j 1 and 2 more, from 1 to 2 images" in str(read_folder(letters))
    many = make(tmp_path / "many", "{a,b,c,d,e,f,g,h,i,j,k,l}/{val,train}/{x,y}/1.png")
    make(many, "l/val/x/2.png")
    text = str(read_folder(many, layout="client/split/class"))
    assert "  j: train 2, val 2\n  2 more domains: from 4 to 5 images" in text


AMBIGUOUS = {
    "{a,b}/1.png {a,b}/{x,y}/1.png": (
        "layout='class' (2 classes: a, b; 4 images in subfolders)",
        "layout='domain/class' (2 domains: a, b; 2 classes: x, y; 2 images outside of it)",
    ),
    "a/{x,y}/1.png b/{z,w}/1.png": (
        "layout='class' (2 classes: a, b; 4 images in subfolders)",
        "layout='domain/class' (2 domains: a, b; 4 classes: w, x, y, z)",
    ),
    "{car,train,plane}/1.png": (
        "layout='class' (3 classes: car, plane, train; `train` would be a class, and is the name "
        "of a split)",
    ),
    "{train,photo}/{cat,dog}/1.png": (
        "layout='domain/class' (2 domains: photo, train; `train` would be a domain, and is the "
        "name of a split; 2 classes: cat, dog)",
        "layout='class'",
        "layout='split/class' (2 classes: cat, dog; 2 images outside of it)",
    ),
    "{train,val}/{train,test}/{cat,dog}/1.png": ("layout='split/class'", "='split/domain/class'"),
    "{a,b}/{train,test}/1.png": ("layout='class/split' (2 classes: a, b)",),
    "train/{n1,n2}/images/1.png": ("layout='split/class' (2 classes: n1, n2; 2 images in",),
    "images/{cat,dog}/1.png": ("layout='_/class' (2 classes: cat, dog; folder `images` is passed",),
    "test/{a,b}/1.png": ("layout='split/class' (2 classes: a, b; no image is for training)",),
    "one/a/1.png": ("layout='_/class' (1 class: a; all images are in one class",),
}


@pytest.mark.parametrize("files", AMBIGUOUS)
def test_a_folder_with_two_readings_is_refused_with_both(files, tmp_path):
    make(tmp_path, *files.split())
    with pytest.raises(ValueError, match="must be read in one way") as error:
        read_folder(tmp_path)
    for reading in (*AMBIGUOUS[files], f"Choose by `layout`: {READ}."):
        assert reading in str(error.value)
    for layout in re.findall("layout='([^']+)'", str(error.value)):
        if "all images are in one class" not in str(error.value):
            assert read_folder(tmp_path, layout=layout, skip=True).layout == layout
    assert "--layout class" in flags("with layout='class'")


def test_pages_and_the_error_have_the_same_words():
    root = Path(data.__file__).parents[2]
    pages = [root / "README.md", root / "docs" / "how-to" / "your-folder.md"]
    for text in (READ, *(page.read_text() for page in pages)):
        for words in ("CLASS/*", "{train,val,test}/CLASS/*", "CSV", "very deeper folder needs its"):
            assert words in text


def test_the_user_decides_between_two_readings(tmp_path):
    make(tmp_path, "a/{x,y}/1.png", "b/{z,w}/1.png")
    assert read_folder(tmp_path, layout="class").class_names == ("a", "b")
    assert read_folder(tmp_path, layout="client/class").class_names == ("w", "x", "y", "z")


def test_a_list_and_folders_with_one_reading_are_refused(tmp_path):
    make(tmp_path, "{cat,dog}/1.png")
    (tmp_path / "all.csv").write_text("path,label\ncat/1.png,dog\ndog/1.png,cat\n")
    both = r"got layout='csv' \(all.csv\) and layout='class' \(2 classes: cat, dog\) in"
    with pytest.raises(ValueError, match=both):
        read_folder(tmp_path)
    assert read_folder(tmp_path, layout="csv").labels.tolist() == [1, 0]
    assert read_folder(tmp_path, layout="class").labels.tolist() == [0, 1]
    # Other tables, and a field that is too long for one.
    for text in ("method,figure\nlocal,0.5\n", "x" * 200_000):
        (tmp_path / "all.csv").write_text(text)
        assert read_folder(tmp_path).layout == "class"


def test_of_two_lists_one_must_be_passed(tmp_path):
    make(tmp_path, "split_zhou_Pets.json", "1.png")
    (tmp_path / "a.csv").write_text("path,label\n1.png,a\n")
    both = r"layout='coop' \(split_zhou_Pets.json\) and layout='csv' \(a.csv\) in .*`split`"
    with pytest.raises(ValueError, match=both):
        read_folder(tmp_path)


def test_a_table_has_paths_labels_clients_and_splits(tmp_path):
    make(tmp_path, "x/{1,2,3,4}.png")
    rows = "\ufeffSplit;Client;Path;label\ntrain;b;x/1.png;10\ntrain;a;x/2.png;9\n"
    rows += "validation;a;x/3.png;9\ntest;b;x/4.png;10\n"
    (tmp_path / "list.csv").write_text(rows, encoding="utf-8")
    for root in (tmp_path, tmp_path / "list.csv"):
        folder = read_folder(root)
        assert str(folder).startswith(f"{tmp_path}/list.csv: layout csv, 4 images")
        assert folder.class_names == ("9", "10")  # as numbers
        assert [path.name for path in folder.paths] == ["1.png", "2.png", "3.png", "4.png"]
        assert folder.labels.tolist() == [1, 0, 0, 1]
        assert folder.domain_names == ("a", "b")
        assert folder.domains.tolist() == [1, 0, 0, 1]
        assert folder.split.tolist() == ["train", "train", "val", "test"]


def coop(root: Path, **sides: list[list[object]]) -> Path:
    (root / "split_zhou_Pets.json").write_text(json.dumps(sides))
    return root


def test_a_list_of_coop_costs_its_content_and_finds_its_images(tmp_path):
    make(tmp_path, "deep/images/{1,2,3}.jpg", "other/1.jpg")
    far = 10**12
    train, test = [["2.jpg", far, "crane"], ["1.jpg", 0, "crane"]], [["3.jpg", far, "bird"]]
    folder = read_folder(coop(tmp_path, train=train, val=[], test=test), layout="coop")
    assert folder.class_names == ("crane", "bird")
    assert folder.labels.tolist() == [1, 0, 1]
    assert folder.notes == (f"2 labels from 0 to {far} have gaps, and are numbered in their order",)
    (doubt,) = folder.doubts
    assert doubt == (
        "label-names",
        (f"label {far}: `crane` and `bird`", f"`crane`: labels 0, {far}"),
    )
    assert (
        f"doubt label-names: one label has two names, or two labels have one name: label {far}"
        in str(folder)
    )
    assert folder.split.tolist() == ["train", "train", "test"]
    assert folder.paths[0] == tmp_path / "deep" / "images" / "2.jpg"


def test_a_list_of_coop_next_to_its_images_is_found(tmp_path):
    make(tmp_path, "2750/{a,b}/1.jpg")
    coop(tmp_path, train=[["a/1.jpg", 0, "A"], ["b/1.jpg", 1, "B"]], test=[])
    assert read_folder(tmp_path).layout == "coop"


def listed(text: str, encoding: str = "utf-8") -> Path:
    Path("list.csv").write_text(text, encoding)
    return Path("list.csv")


REFUSED = """
read_folder(3) -> TypeError: `root` must be a path
read_folder("") -> ValueError: `root` must be the path of a folder; got an empty path
read_folder("none") -> FileNotFoundError: `root` must be a folder or a list of images; none is
read_folder(".", layout="tree") -> ValueError: `layout` must be csv, coop, or levels of folders
read_folder(".", layout="domain") -> ValueError: `layout` must be csv, coop, or levels of folders
read_folder(".", layout="class/class") -> ValueError: `layout` must be csv, coop, or levels
read_folder(".", skip=1) -> TypeError: `skip` must be True or False; got 1 (int)
read_folder("one") -> ValueError: `root` must have training images of several classes; got all
read_folder("one", layout="class") -> ValueError: images of several classes; got all images are in
read_folder(".", layout="csv") -> ValueError: or a CSV with path and label; got . in .
read_folder(listed("path,label\\n1.png,a\\n")) -> ValueError: list.csv, line 2: 1.png is missing
read_folder(listed("path,label\\na\\\\o.png,a\\n")) -> ValueError: is missing. Correct it, or
read_folder(listed("path,label\\na\\\\o.png,a\\n")) -> ValueError: Write paths with / in place
read_folder(listed("path,label\\na\\0b.png,a\\n")) -> ValueError: list.csv
read_folder(listed("path,label\\nnone/a/1.png\\n")) -> ValueError: list.csv, line 2: must have one
read_folder(listed("path,label\\no.png,\xe9\\n", "latin-1")) -> ValueError: list.csv must be a table
read_folder(listed("path,label,label\\no.png,a,b\\n")) -> ValueError: two columns for label
read_folder(listed("path,label,client,domain\\no.png,a,b,c\\n")) -> ValueError: two columns for
read_folder(listed("path,label\\n")) -> ValueError: of several classes; got no image fits in list
read_folder(listed("path,label\\n,a\\n")) -> ValueError: list.csv, line 2: must have one
read_folder(listed("path,label\\nx,y,z\\n")) -> ValueError: list.csv, line 2: must have one
read_folder(listed("path,label,split\\nx,y,z\\n")) -> ValueError: list.csv, line 2: split must be
read_folder(listed("path,label\\no.png,b\\no.png,c")) -> ValueError: list.csv, line 3: o.png is
read_folder(listed("file,label\\na,b\\n")) -> ValueError: list.csv must have columns path and label
read_folder(make(Path("d"), "a.zip") / "a.zip") -> ValueError: Unpack a.zip first.
read_folder(make(Path("d"), "a.zip")) -> ValueError: got none, 1 (.zip is not read) in d. Unpack
read_folder(make(Path("g"), "train/{n1,n2}/1.png", "val/images/1.png")) -> ValueError: such as `imag
read_folder(coop(Path("."), train=[["x.png", 0, "a"]])) -> FileNotFoundError: split_zhou_Pets.json
read_folder(coop(Path("."), train=[["a\\\\x.png", 0, "a"]])) -> FileNotFoundError: Write paths with
read_folder(coop(Path("."), train=[["o.png", -1, "a"]])) -> ValueError: split_zhou_Pets.json must
read_folder(coop(Path("."), train=[["o.png", True, "a"]])) -> ValueError: split_zhou_Pets.json must
read_folder(coop(Path("."), train=[[1, 0, "a"]])) -> ValueError: split_zhou_Pets.json must
read_folder(coop(Path("."), train=[["x.png", 0]])) -> ValueError: split_zhou_Pets.json must have
read_folder(coop(Path("."), part=[["x.png", 0, "a"]])) -> ValueError: split_zhou_Pets.json must have
read_folder(nested()) -> ValueError: split_zhou_deep.json must have lists train, val and test
read_folder(worded("a ant\\n")) -> ValueError: classnames.txt must have a line `FOLDER NAME
"""


def nested() -> Path:
    Path("split_zhou_deep.json").write_text("[" * 100_000)
    return Path("split_zhou_deep.json")


def worded(text: str) -> Path:
    make(Path("words"), "{a,b}/1.png")
    Path("words/classnames.txt").write_text(text)
    return Path("words")


@pytest.mark.bad_input
@pytest.mark.parametrize(("call", "error", "message"), refusals(REFUSED))
def test_refusals(call, error, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make(tmp_path, "one/a/1.png", "o.png")
    namespace = {"Path": Path, "read_folder": read_folder, "make": make, "coop": coop}
    namespace |= {"listed": listed, "nested": nested, "worded": worded}
    check_refused(call, error, message, namespace)


def test_a_folder_without_images_of_classes_says_what_it_has(tmp_path):
    make(tmp_path, "{1,2}.png", "a/1.txt")
    told = r"got none, 2 \(outside of folders\), 1 \(\.txt is not read\), 1 \(a folder without"
    with pytest.raises(ValueError, match=told):
        read_folder(tmp_path)


def test_a_file_of_words_names_the_classes(tmp_path):
    make(tmp_path, "{n01440764,n01443537,n01484850}/1.png")
    lines = "n01440764 tench\nn01443537 goldfish\nn01484850 great white shark\nn09 other\n"
    (tmp_path / "classnames.txt").write_text(lines)
    folder = read_folder(tmp_path)
    assert folder.class_names == ("tench", "goldfish", "great white shark")
    assert folder.labels.tolist() == [0, 1, 2]
    (tmp_path / "classnames.txt").write_text(lines.replace("goldfish", "tench"))
    (doubt,) = read_folder(tmp_path).doubts
    assert doubt == ("label-names", ("`tench`: `n01440764` and `n01443537`",))


def test_odd_files_are_refused_by_name_or_left_out_and_counted(tmp_path):
    make(tmp_path, "{cat,dog}/{1,2}.png", "cover.png")
    (tmp_path / "cat" / "empty.png").touch()
    os.symlink(tmp_path / "gone.png", tmp_path / "dog" / "link.png")
    os.mkfifo(tmp_path / "dog" / "pipe.png")
    reasons = {"empty": "cat/empty.png", "missing": "dog/link.png", "not a file": "dog/pipe.png"}
    reasons["not in the folder of a class"] = "cover.png"
    found = read_folder(tmp_path, skip=True)
    assert found.labels.tolist() == [0, 0, 1, 1]
    assert found.skipped == {reason: (tmp_path / name,) for reason, name in reasons.items()}
    for reason, name in reasons.items():
        with pytest.raises(ValueError, match=f"{name} is {reason}. Correct it, or leave such"):
            read_folder(tmp_path)
        (tmp_path / name).unlink()
    assert len(read_folder(tmp_path)) == 4
    make(tmp_path, "dog/cover/1.png", "extra.png")
    with pytest.raises(ValueError, match=r"extra\.png is not in the folder"):
        read_folder(tmp_path, layout="class")


def test_a_folder_that_cannot_be_listed_is_refused_or_counted(tmp_path, monkeypatch):
    made = make(tmp_path, "{a,b}/1.png", "b/closed/2.png")
    listed = Path.iterdir

    def denied(folder):
        if folder.name == "closed":
            raise PermissionError(13, "Permission denied")
        return listed(folder)

    monkeypatch.setattr(Path, "iterdir", denied)
    with pytest.raises(ValueError, match=r"b/closed is unreadable \(Permission denied\)\. Corr"):
        read_folder(made)
    reason = "unreadable (Permission denied)"
    assert read_folder(made, skip=True).skipped == {reason: (made / "b" / "closed",)}


def test_images_outside_of_a_given_layout_are_refused_or_counted(tmp_path):
    make(tmp_path, "{train,test}/{cat,dog}/1.png", "extra/cat/1.png", "train/1.png")
    with pytest.raises(ValueError, match=r"extra/cat/1\.png is outside of the layout split/class"):
        read_folder(tmp_path, layout="split/class")
    found = read_folder(tmp_path, layout="split/class", skip=True)
    assert len(found) == 4
    assert len(found.skipped["outside of the layout split/class"]) == 2


@pytest.mark.parametrize("out", ["res", "cat/res", "a/b/c", ""])
def test_results_of_a_comparison_in_a_folder_are_not_its_images(out, tmp_path):
    before = read_folder(make(tmp_path, "{cat,dog}/{1,2}.png", "dog/bars.png"))
    make(tmp_path / out, "bars.png", "seeds.csv")
    after = read_folder(tmp_path)
    assert (after.paths, after.layout) == (before.paths, before.layout)
    assert after.skipped["results of fedprompt compare"] == (tmp_path / out / "bars.png",)


def test_a_folder_is_visited_once_however_it_is_linked(tmp_path):
    make(tmp_path, "photos/{cat,dog}/{1,2}.png", "elsewhere/{3,4}.png")
    root = tmp_path / "photos"
    for name, target in (("cat/up", root), ("dog/top", tmp_path), ("cat/me", root / "cat" / "me")):
        os.symlink(target, root / name)
    os.symlink(root / "dog", root / "ant")  # before its target in the order of names
    for name in ("fox", "gnu"):
        os.symlink(tmp_path / "elsewhere", root / name)
    found = read_folder(root)
    assert (found.class_names, len(found)) == (("cat", "dog", "fox"), 6)
    left = found.skipped["a link to a folder that is read already"]
    assert {path.name for path in left} == {"ant", "up", "top", "gnu"}


def test_names_of_a_stranger_are_printed_without_their_escape_codes(tmp_path):
    for name in ("ca\x1b[31mt", "do\ng", "\u202eowl", "\u0646\u200c\u0627"):
        make(tmp_path, f"{name}/1.png")
    folder = read_folder(tmp_path)
    names = {r"ca\x1b[31mt", r"do\ng", r"\u202eowl", "\u0646\u200c\u0627"}
    assert {*folder.class_names} == names
    assert str(folder).count("\n") == 2
    (tmp_path / "do\ng" / "\x1b]0;x\x07.png").touch()
    with pytest.raises(ValueError, match=r"do\\ng/\\x1b\]0;x\\x07\.png is empty"):
        read_folder(tmp_path)


def test_names_with_spaces_and_accents_have_one_order_and_one_form(tmp_path):
    """macOS writes accents as characters of their own."""
    eclair, ete = ("\N{LATIN SMALL LETTER E WITH ACUTE}" + end for end in ("clair", "t\u00e9 1"))
    for form, domain in (("NFC", "a b"), ("NFD", normalize("NFD", "caf\u00e9"))):
        make(
            tmp_path, *(normalize(form, f"{domain}/{kind}/1 \u00e9.JPG") for kind in (eclair, ete))
        )
    found = read_folder(tmp_path, layout="domain/class")
    assert found.class_names == (eclair, ete)
    assert found.domain_names == ("a b", "caf\u00e9")
    assert found.labels.tolist() == [0, 1, 0, 1]
    assert all(path.exists() for path in found.paths)


def test_names_that_are_not_in_utf_8_are_escaped(tmp_path):
    """Old archives have names in Latin-1."""
    for name in (b"caf\xe9/1.png", b"the/1.png", b"the/2\xe9.txt"):
        path = os.path.join(os.fsencode(tmp_path), name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(b"an image")
    folder = read_folder(tmp_path)
    assert folder.class_names == ("caf\\xe9", "the")
    assert all(path.exists() for path in folder.paths)
    assert r"the/2\xe9.txt" in str(folder).encode().decode()


def test_chosen_images_keep_the_numbers_of_their_classes(tmp_path):
    folder = read_folder(make(tmp_path, "{art,photo}/{cat,dog}/{1,2}.png"), layout="domain/class")
    for chosen in ([7, 1], np.arange(8) % 3 == 0, []):
        part = folder.at(chosen)
        positions = np.arange(8)[chosen]
        assert len(part) == len(positions)
        assert part.paths == tuple(folder.paths[i] for i in positions)
        assert part.labels.tolist() == folder.labels[positions].tolist()
        assert part.class_names == folder.class_names
