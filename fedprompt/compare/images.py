"""Levels of image files as a network wants them, decoded once into a file that is mapped."""

import copy
import secrets
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor

from fedprompt._files import locked
from fedprompt.backbones.preparation import Preparation
from fedprompt.compare import stamps
from fedprompt.compare.trials import CompareError
from fedprompt.data import Folder
from fedprompt.data.opening import opened
from fedprompt.interfaces import TrainableTrunk
from fedprompt.methods.models import tuned_trunk

CHUNK = 256
"""Number of images that are decoded at a time."""
UNREADABLE = "cannot be read"
"""Reason of images that are left out."""
REMEDY = "Correct it, or leave such files out by `skip=True`."

Levels = Shaped[Tensor, "images channels height width"]
Bar = Callable[[Sequence[range]], Iterable[range]]


def decoded(
    folder: Folder,
    cache: Path,
    *,
    content: str,
    preparation: Preparation,
    skip: bool = False,
    bar: Bar = iter,
) -> tuple[Levels, Folder]:
    """Decode the images of a folder once, and map the resulting file in every later call.

    The file is named by the stamp of the images and of the preparation, with the digest of what it
    contains: the levels of the images that can be read, and their positions. A process that is
    killed can leave a file that ends in ``.part``, which is never read.

    Args:
        folder: Image files.
        cache: Folder of the file, which is made if it does not exist.
        content: Digest of the files.
        preparation: Size, resize, crop and bit depth of the images.
        skip: Whether to leave out images that cannot be read.
        bar: Function that wraps the chunks of images in a progress bar.

    Returns:
        Levels, and the folder without the images that were left out.

    Raises:
        CompareError: If an image cannot be read.
    """
    made = stamps.digest(stamps.of_preparing(), content, asdict(preparation), len(folder))
    cache.mkdir(parents=True, exist_ok=True)
    with locked(cache / made):
        found = _whole(cache, made)
        if found is None:
            _write(folder.paths, preparation, cache, made, bar)
            found = _whole(cache, made)
    assert found is not None  # it was written under its digest
    levels, places = found
    if len(places) < len(folder):
        lost = folder.at(np.setdiff1d(np.arange(len(folder)), places)).paths
        if not skip:
            few = f"{len(lost)} of {len(folder)} images"
            raise CompareError(f"{few} {UNREADABLE}, such as {lost[0]}. {REMEDY}")
        skipped = {**folder.skipped, UNREADABLE: tuple(lost)}
        folder = replace(folder.at(places), skipped=skipped)
    return torch.from_numpy(levels), folder


def _whole(cache: Path, made: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Map the levels and read the positions, if a file has the digest in its name."""
    for path in cache.glob(f"{made}-*.images"):
        with path.open("rb") as file:
            if stamps.of_file(file) == path.stem.partition("-")[2]:
                file.seek(-8, 2)
                start = int.from_bytes(file.read(8), "little")
                file.seek(start)
                places = np.load(file)
                return np.load(path, mmap_mode="c"), places
        path.unlink(missing_ok=True)
    return None


def _write(
    files: Sequence[Path], preparation: Preparation, cache: Path, made: str, bar: Bar
) -> None:
    """Write the levels of all images that can be read, then their positions."""

    def read(place: int) -> tuple[Tensor, int] | None:
        try:
            return opened(files[place], bits=preparation.bits, then=preparation.levels), place
        except OSError:
            return None

    chunks = [range(at, min(at + CHUNK, len(files))) for at in range(0, len(files), CHUNK)]
    part, places = cache / f"{made}.{secrets.token_hex(8)}.part", list[int]()
    shape = len(preparation.mean), *preparation.size
    kind = np.dtype(np.float32 if preparation.kernel == "float" else np.uint8)
    try:
        with part.open("wb") as file, ThreadPoolExecutor() as pool:
            _head(file, (len(files), *shape), kind)
            for chunk in bar(chunks):
                for levels, place in filter(None, pool.map(read, chunk)):
                    file.write(levels.contiguous().numpy().data)
                    places.append(place)
            if not places:
                raise CompareError(f"None of {len(files)} images can be read for {cache}.")
            start = file.tell()
            np.save(file, np.array(places, dtype=np.int64))
            file.write(start.to_bytes(8, "little"))
            file.seek(0)
            _head(file, (len(places), *shape), kind)
        with part.open("rb") as whole:
            name = f"{made}-{stamps.of_file(whole)}.images"
        part.replace(cache / name)
    finally:
        part.unlink(missing_ok=True)


def _head(file: Any, shape: tuple[int, ...], kind: np.dtype[Any]) -> None:
    """Write the head of an array, of a length that does not depend on the number of images."""
    head = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, head)


def prepared_trunk(trunk: TrainableTrunk, prepare: Callable[[Tensor], Tensor]) -> TrainableTrunk:
    """Return a copy of a trunk that takes stored images; both have the same model.

    Args:
        trunk: Trunk of :func:`fedprompt.vit_trunk`.
        prepare: Function from stored images to inputs of the trunk.
    """
    ours: Any = copy.copy(trunk)
    ours.prepare, ours.embed = prepare, lambda images: trunk.embed(prepare(images))
    ours.tuned = lambda tune: prepared_trunk(tuned_trunk(trunk, tune), prepare)
    made: TrainableTrunk = ours
    return made
