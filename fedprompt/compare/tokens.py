"""Tokens of a frozen image tower in a file, computed for the images that a run needs."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from fedprompt._files import locked
from fedprompt.compare import stamps

BATCH = 64
"""Number of images that are encoded at a time. The last ones are repeated, because another number
can round differently."""

Encode = Callable[[Int[Tensor, "chosen"]], Float[Tensor, "chosen tokens dim"]]


@dataclass(eq=False)
class Tokens:
    """Tokens of images by position.

    A folder has the tokens, in a sparse file, and the digest of the tokens of each image that was
    encoded. Another digest, as of a damaged file, is encoded again.

    Args:
        folder: Folder, named by the stamp of images, network and preparation.
        count: Number of images.
        encode: Function from positions to tokens.
    """

    folder: Path
    count: int
    encode: Encode
    known: Any = field(init=False)

    def __post_init__(self) -> None:
        self.known = np.zeros(self.count, dtype=bool)  # whose digests were compared here

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, positions: Int[Tensor, "chosen"]) -> Float[Tensor, "chosen tokens dim"]:
        """Return tokens, which are encoded first if they are not in the file."""
        self.need(positions)
        return torch.from_numpy(self._files("r")[0][positions.numpy()])

    def need(self, positions: Int[Tensor, "chosen"]) -> None:
        """Encode the images at some positions, unless the file has them."""
        missing = np.unique(positions.numpy())
        missing = missing[~self.known[missing]]
        if not len(missing):
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        for start in range(0, len(missing), BATCH):
            with locked(self.folder, wait=-1):
                self._encode(missing[start : start + BATCH])
        self.known[missing] = True

    def _encode(self, chosen: np.ndarray) -> None:
        """Encode a batch, in files that are mapped anew, so that only their pages are in memory."""
        tokens, digests = self._files("r+")
        wrong = [place for place in chosen.tolist() if digests[place] != _digest(tokens[place])]
        if wrong:
            found = self._padded(wrong)
            tokens[wrong] = found
            tokens.flush()
            digests[wrong] = [_digest(one) for one in found]
            digests.flush()

    def _padded(self, chosen: list[int]) -> np.ndarray:
        full = [*chosen, *chosen[-1:] * (BATCH - len(chosen))]
        return self.encode(torch.tensor(full))[: len(chosen)].numpy()

    def _files(self, mode: Any) -> tuple[Any, Any]:
        """Map the two files, which are made first if they do not exist."""
        paths = [self.folder / name for name in ("tokens.npy", "digests.npy")]
        if not all(path.exists() for path in paths):
            one = self._padded([0])
            shapes = {paths[0]: (self.count, *one.shape[1:]), paths[1]: (self.count,)}
            for path, shape in shapes.items():
                kind = one.dtype if path == paths[0] else np.dtype("S16")
                part = path.with_suffix(".part")
                np.lib.format.open_memmap(part, "w+", kind, shape).flush()
                part.replace(path)  # a process that is killed leaves no file of another length
        return tuple(np.load(path, mmap_mode=mode) for path in paths)


def _digest(tokens: np.ndarray) -> bytes:
    return stamps.hashed(np.ascontiguousarray(tokens).view(np.uint8).data).encode()
