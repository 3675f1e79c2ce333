"""Folders of images whose class is a color under noise, so that training takes seconds."""

from pathlib import Path

import numpy as np
from PIL import Image


def write_images(
    root: Path, domain: str, *, light: int = 120, train: int = 10, test: int = 4
) -> None:
    """Write three classes, ``color_0`` to ``color_2``, of noisy images in two folders.

    The folders are ``root/domain/train`` and ``root/domain/test``. More light makes the classes
    easier to tell apart.
    """
    generator = np.random.default_rng(light)
    for part, count in (("train", train), ("test", test)):
        for label in range(3):
            directory = root / domain / part / f"color_{label}"
            directory.mkdir(parents=True)
            for index in range(count):
                pixels = generator.integers(0, 100, (40, 40, 3), dtype=np.uint8)
                pixels[..., label] += light
                Image.fromarray(pixels).save(directory / f"{index}.png")
