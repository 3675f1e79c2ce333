"""Levels of image files as a network wants them, decoded once into a file that is mapped."""

import hashlib
import io
import secrets
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from jaxtyping import Int, Shaped
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from fedprompt._files import locked
from fedprompt.backbones.preparation import Preparation
from fedprompt.compare import stamps
from fedprompt.compare.trials import CompareError, cores
from fedprompt.data import Folder
from fedprompt.data.opening import MAX_PIXELS, opened
from fedprompt.data.wording import named

T = TypeVar("T")
AHEAD = 4
"""Number of images for each thread that are decoded before they are written."""
HEAD = 128
"""Bytes of the head of a file of levels."""
UNREADABLE = "cannot be read"
"""Reason of images that are left out."""
REMEDY = "Correct it, or leave such files out by `skip=True`."

Levels = Shaped[Tensor, "images channels height width"]
Bar = Callable[[Sequence[Any]], Iterable[Any]]


def shown(title: str, *, hidden: bool = False) -> Bar:
    """Return a function that shows a bar of images on a terminal, and a line in a log."""

    def bar(images: Sequence[Any]) -> Iterable[Any]:
        if not (hidden or sys.stderr.isatty()):
            print(f"{title} {len(images):,} images.", file=sys.stderr, flush=True)
        wrapped: Any = tqdm(images, desc=title, unit="image", disable=True if hidden else None)
        return cast(Iterable[Any], wrapped)

    return bar


@dataclass(frozen=True)
class Mapped:
    """Levels in a file, which is mapped anew for each batch.

    So the pages of earlier batches do not count as memory of the process.
    """

    path: Path
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, positions: Int[Tensor, "chosen"]) -> Levels:
        """Return a batch."""
        return torch.from_numpy(np.load(self.path, mmap_mode="r")[positions.cpu().numpy()])


def decoded(
    folder: Folder,
    cache: Path,
    *,
    content: str,
    preparation: Preparation,
    max_pixels: int = MAX_PIXELS,
    skip: bool = False,
    bar: Bar = iter,
) -> tuple[Mapped, Folder]:
    """Decode the images of a folder once, and find the resulting file in every later call.

    The file is named by the stamp of the images and of the preparation, with the digest of what it
    contains: the levels of the images that can be read, and their positions. A process that is
    killed can leave a file that ends in ``.part``, which is never read.

    Args:
        folder: Image files.
        cache: Folder of the file, which is made if it does not exist.
        content: Digest of the files.
        preparation: Size, resize, crop and bit depth of the images.
        max_pixels: Largest number of pixels of an image.
        skip: Whether to leave out images that cannot be read.
        bar: Function that wraps the positions of images in a progress bar.

    Returns:
        Levels, and the folder without the images that were left out.

    Raises:
        CompareError: If an image cannot be read.
    """
    how = asdict(preparation), max_pixels, len(folder)
    made = stamps.digest(stamps.of_preparing(), content, how)
    cache.mkdir(parents=True, exist_ok=True)
    with locked(cache / made, wait=-1):  # until another process has decoded them
        path = _whole(cache, made)
        if path is None:
            for part in cache.glob(f"{made}.*.part"):
                part.unlink()  # of a process that was killed
            path = _write(folder.paths, preparation, max_pixels, cache / made, bar)
    places = _places(path)
    if len(places) < len(folder):
        lost = folder.at(np.setdiff1d(np.arange(len(folder)), places)).paths
        if not skip:
            few = f"{len(lost)} of {len(folder)} images"
            why = _fault(lost[0], preparation, max_pixels)
            raise CompareError(f"{few} {UNREADABLE}, such as {named(lost[0])}{why}. {REMEDY}")
        skipped = {**folder.skipped, UNREADABLE: tuple(lost)}
        folder = replace(folder.at(places), skipped=skipped)
    return Mapped(path, len(places)), folder


def _fault(path: Path, preparation: Preparation, max_pixels: int) -> str:
    """Return why an image cannot be read, in parentheses."""
    try:
        opened(path, bits=preparation.bits, max_pixels=max_pixels, then=preparation.levels)
    except OSError as error:
        return f" ({str(error).partition(': ')[2].rstrip('.')})"
    return ""


def _places(path: Path) -> np.ndarray:
    """Read the positions of images, which stand behind their levels."""
    with path.open("rb") as file:
        file.seek(-8, 2)
        file.seek(int.from_bytes(file.read(8), "little"))
        found: np.ndarray = np.load(file)
    return found


def _whole(cache: Path, made: str) -> Path | None:
    """Return the file whose content has the digest in its name. The head comes last there."""
    for path in cache.glob(f"{made}-*.images"):
        with path.open("rb") as file:
            head = file.read(HEAD)
            total = hashlib.file_digest(file, "sha256")
        total.update(head)
        if total.hexdigest()[: stamps.LENGTH] == path.stem.partition("-")[2]:
            return path
        path.unlink(missing_ok=True)
    return None


def _write(
    files: Sequence[Path], preparation: Preparation, max_pixels: int, made: Path, bar: Bar
) -> Path:
    """Write the levels of all images that can be read, then their positions."""
    how: dict[str, Any] = {"bits": preparation.bits, "max_pixels": max_pixels}

    def read(place: int) -> tuple[Tensor, int] | None:
        try:
            return opened(files[place], then=preparation.levels, **how), place
        except OSError:
            return None

    part, places = made.with_name(f"{made.name}.{secrets.token_hex(8)}.part"), list[int]()
    shape = len(preparation.mean), *preparation.size
    kind = np.dtype(np.float32 if preparation.kernel == "float" else np.uint8)
    total = hashlib.sha256()
    try:
        with part.open("wb") as file:
            file.write(_head(len(files), shape, kind))
            for levels, place in filter(None, in_order(read, bar(range(len(files))))):
                content = levels.contiguous().numpy().data
                file.write(content)
                total.update(content)
                places.append(place)
            if not places:
                raise CompareError(f"None of {len(files)} images can be read for {made.parent}.")
            end = io.BytesIO()
            np.save(end, np.array(places, dtype=np.int64))
            end.write(file.tell().to_bytes(8, "little"))
            head = _head(len(places), shape, kind)
            file.write(end.getvalue())
            file.seek(0)
            file.write(head)
        total.update(end.getvalue() + head)
        digest = total.hexdigest()[: stamps.LENGTH]
        return part.replace(made.with_name(f"{made.name}-{digest}.images"))
    finally:
        part.unlink(missing_ok=True)


def in_order(read: Callable[[int], T], places: Iterable[int]) -> Iterator[T]:
    """Call a function in threads, a few positions ahead of the results, which keep their order."""
    threads, waiting = cores(), deque[Future[T]]()
    with ThreadPoolExecutor(threads) as pool:
        for place in places:
            waiting.append(pool.submit(read, place))
            if len(waiting) > AHEAD * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _head(count: int, shape: tuple[int, ...], kind: np.dtype[Any]) -> bytes:
    """Return the head of an array, of a length that does not depend on the number of images."""
    file, descr = io.BytesIO(), np.lib.format.dtype_to_descr(kind)
    head = {"descr": descr, "fortran_order": False, "shape": (count, *shape)}
    np.lib.format.write_array_header_1_0(file, head)
    assert file.tell() == HEAD
    return file.getvalue()
