"""Each data set is read from fabricated files in its own format."""

import io
import pickle
import re

import numpy as np
import pytest
import torch

import fabricated
from fabricated import color, fabricate, unchecked
from studies import sets
from studies.sets import readers

KINDS = {*fabricated.OFFICE, *fabricated.TEN}
PALETTE = torch.tensor([color(number) for number in range(216)]).float()


@pytest.fixture(autouse=True)
def _unchecked():
    with unchecked():
        yield


def seen(pixels):
    """Return the numbers of the colors of the left and right parts of RGB images."""
    width = pixels.shape[-1]
    parts = pixels[..., : width // 3], pixels[..., -(width // 3) :]
    means = [part.float().mean((-2, -1)) for part in parts]
    distances = [torch.cdist(mean, PALETTE) for mean in means]
    assert all(distance.amin(1).max() < 10 for distance in distances)
    return [distance.argmin(1) for distance in distances]


def loaded(name, root, **values):
    fabricate(name, root, **values)
    return sets.load(name, root, size=16)


CASES = {
    # images in training and in testing, side, classes, a class and its name
    "cifar10": (20, 10, 32, 10, (3, "kind 3")),
    "cifar100": (200, 100, 32, 100, (40, "kind 40")),
    "svhn": (20, 10, 32, 10, (0, "0")),
    "flowers102": (204, 102, 16, 102, (59, "pink-yellow dahlia")),
    "tiny-imagenet": (10, 5, 64, 5, (3, "thing 3")),
    "domainnet": (120, 60, 16, 10, (3, "ice cream")),
    **dict.fromkeys(
        (*fabricated.COOP, "aircraft-coop", "imagenet-coop"), (10, 5, 16, 5, (1, "kind 001"))
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_labels_domains_and_splits(name, tmp_path):
    task = loaded(name, tmp_path)
    train, test, side, classes, (label, word) = CASES[name]
    for split, images, count in (("train", task.train, train), ("test", task.test, test)):
        assert images.pixels.shape == (count, 3, side, side)
        assert images.pixels.dtype == torch.uint8
        assert images.labels.bincount().tolist() == [count // classes] * classes
        left, right = seen(images.pixels)
        assert left.tolist() == images.labels.tolist()
        assert right.tolist() == [fabricated.mark(split, k) for k in images.domains]
    assert task.name == name
    assert len(task.class_names) == classes
    assert task.class_names[label] == word
    assert "{}" in task.template


def test_domains_of_domainnet(tmp_path):
    task = loaded("domainnet", tmp_path)
    assert task.domain_names == fabricated.DOMAINS["domainnet"]
    assert task.train.domains.bincount().tolist() == [20] * 6


def test_office_is_split_in_each_class_of_each_domain(tmp_path):
    task = loaded("office-caltech10", tmp_path)
    for images, count in ((task.train, 4), (task.test, 1)):
        left, right = seen(images.pixels)
        assert left.tolist() == images.labels.tolist()
        assert right.tolist() == images.domains.tolist()
        cells = (images.domains * 10 + images.labels).bincount().view(4, 10)
        assert cells.tolist() == [[count * factor] * 10 for factor in (1, 2, 1, 1)]
    assert task.class_names[:2] == ("backpack", "bike")


@pytest.mark.parametrize("name", fabricated.DOMAINS)
def test_lists_of_fedbn_divide_the_images(name, tmp_path):
    """Each domain trains on two images of each class and is tested on one."""
    fabricate(name, tmp_path)
    base = {"office-caltech10": "office_caltech_10"}.get(name, name)
    own = sets.load(name, tmp_path, size=16)  # its cached pixels must not be used
    for domain in fabricated.DOMAINS[name]:
        kinds = [
            kind for kind in sorted((tmp_path / base / domain).iterdir()) if kind.name in KINDS
        ]
        files = [sorted(kind.iterdir())[:3] for kind in kinds]
        places = [[str(file.relative_to(tmp_path / base)) for file in three] for three in files]
        split = {f"{domain}_train": [a for one in places for a in (one[2], one[0])]}
        split |= {f"{domain}_test": [one[1] for one in places]}
        fabricated.fedbn_lists(tmp_path, base, "Elsewhere", split)
    listed = sets.load(name, tmp_path, size=16)
    assert len(listed.train.labels) == 2 * 10 * len(fabricated.DOMAINS[name])
    assert listed.test.labels.tolist() == [*range(10)] * len(fabricated.DOMAINS[name])
    left, right = seen(listed.train.pixels)
    assert left.tolist() == listed.train.labels.tolist()
    assert (right % 7).tolist() == listed.train.domains.tolist()
    assert listed.class_names == own.class_names
    next((tmp_path / base).glob("*_test.pkl")).unlink()
    with pytest.raises(FileNotFoundError, match="FedBN's lists of all domains"):
        sets.load(name, tmp_path, size=16)


class Hostile:
    """Writes a file when it is unpickled."""

    def __reduce__(self):
        return eval, ("open('hostile', 'w')",)


def test_a_hostile_list_of_images_runs_no_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for content in ([Hostile()], np.array([Hostile()], dtype=object)):
        with pytest.raises(
            pickle.UnpicklingError, match=r"arrays and strings only; got builtins\."
        ):
            readers.ArrayUnpickler(io.BytesIO(pickle.dumps(content))).load()
    assert not (tmp_path / "hostile").exists()


MISSING = {
    "cifar10": ("data_batch_3", "CIFAR10"),
    "cifar100": ("train", "CIFAR100"),
    "svhn": ("test_32x32.mat", "SVHN"),
    "flowers102": ("setid.mat", "Flowers102"),
    "tiny-imagenet": ("val_annotations.txt", "tiny-imagenet-200.zip"),
    "five-dataset": ("notMNIST_small", "notMNIST_small.tar.gz"),
    "office-caltech10": ("webcam", "FedBN"),
    "domainnet": ("sketch_test.txt", "M3SDA"),
    **dict.fromkeys(fabricated.COOP, ("split_zhou_*.json", "CoOp")),
    "aircraft-coop": ("variants.txt", "CoOp"),
    "imagenet-coop": ("classnames.txt", "CoOp"),
}


@pytest.mark.parametrize("name", MISSING)
def test_missing_file(name, tmp_path):
    file, source = MISSING[name]
    fabricate(name, tmp_path)
    (found,) = (path for path in tmp_path.rglob(file))
    found.rename(tmp_path / "hidden")
    with pytest.raises(FileNotFoundError) as error:
        sets.load(name, tmp_path)
    assert str(found) in str(error.value)
    assert source in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_a_missing_split_is_named_in_the_call_that_downloads_it(tmp_path):
    fabricate("svhn", tmp_path)
    (tmp_path / "test_32x32.mat").unlink()
    call = f"torchvision.datasets.SVHN({str(tmp_path)!r}, split='test', download=True)"
    with pytest.raises(FileNotFoundError, match=re.escape(call)):
        sets.load("svhn", tmp_path)


def test_every_data_set_on_disk_has_a_test_of_its_missing_file():
    assert set(MISSING) == set(fabricated.WRITERS) == set(sets.SETS)


def test_corrupt_file_is_refused_by_torchvision(tmp_path):
    fabricate("cifar10", tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.undo()
        from torchvision.datasets.utils import calculate_md5

        patch.setattr(
            "torchvision.datasets.cifar.check_integrity",
            lambda path, md5=None: calculate_md5(path) == md5,
        )
        with pytest.raises(RuntimeError, match="corrupted"):
            sets.load("cifar10", tmp_path)


def test_images_are_decoded_once(tmp_path, monkeypatch):
    first = loaded("dtd-coop", tmp_path)
    monkeypatch.setattr("fedprompt.compare.images.opened", None)
    second = sets.load("dtd-coop", tmp_path, size=16)
    assert torch.equal(first.train.pixels, second.train.pixels)
    assert torch.equal(first.train.labels, second.train.labels)
    assert len(list((tmp_path / "dtd").glob("*.images"))) == 2


def test_classes_of_all_domains_must_agree(tmp_path):
    fabricate("office-caltech10", tmp_path)
    folder = tmp_path / "office_caltech_10" / "webcam"
    (folder / "mug").rename(folder / "other")
    with pytest.raises(ValueError, match=r"only the others have \['(mug|other)'\]"):
        sets.load("office-caltech10", tmp_path)


def test_five_data_sets_keep_their_classes_apart(tmp_path):
    task = loaded("five-dataset", tmp_path)
    assert task.train.pixels.shape == (200, 3, 32, 32)
    assert task.train.labels.bincount().tolist() == [4] * 50
    assert torch.equal(task.train.domains, task.train.labels // 10)
    # Fashion-MNIST's images are gray, 20 levels a class.
    own = task.train.labels // 10 == 3
    levels = (20 * (task.train.labels[own] - 30)).byte()[:, None].expand(-1, 3)
    assert torch.equal(task.train.pixels[own][:, :, 5, 5], levels)
    assert task.class_names[39] == "Ankle boot"
