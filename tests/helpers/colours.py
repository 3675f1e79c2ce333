"""Folders of images that are learned in no time: a class is a colour, under noise."""

from pathlib import Path

import numpy as np
from PIL import Image


def write_images(
    root: Path, domain: str, *, light: int = 120, train: int = 10, test: int = 4
) -> None:
    """Write three classes of so many images each to ``root/domain/train/colour_*`` and ``.../test/colour_*``; more light is easier."""
    generator = np.random.default_rng(light)
    for part, count in (("train", train), ("test", test)):
        for label in range(3):
            directory = root / domain / part / f"colour_{label}"
            directory.mkdir(parents=True)
            for index in range(count):
                pixels = generator.integers(0, 100, (40, 40, 3), dtype=np.uint8)
                pixels[..., label] += light
                Image.fromarray(pixels).save(directory / f"{index}.png")
