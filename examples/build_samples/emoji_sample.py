"""Write the emoji of `fedprompt.samples`, and a contact sheet of its styles for the documentation.

    python examples/build_samples/emoji_sample.py emoji.npz --out out

Only styles with `sample` in `emoji.py` are written: their licenses permit it without share-alike.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from build_samples.emoji import STYLES, Emoji, load
from build_samples.emoji_clip import shrunk
from build_samples.emoji_division import PRETRAINING, TEST, division

COLORS = 16  # of an image, so that it takes few bytes
CELL, TOP, LEFT = 36, 118, 150  # pixels of the contact sheet
SAMPLED = [number for number, style in enumerate(STYLES.values()) if style.sample]


def sample(emoji: Emoji) -> dict[str, np.ndarray]:
    """Return held-out emoji of all classes at 32 pixels, in a random order."""
    part, label = division().part(emoji.table, 0), division().labels(emoji.table)
    wanted = (label >= 0) & (part != PRETRAINING)
    where = np.flatnonzero(wanted[emoji.concept] & np.isin(emoji.style, SAMPLED))
    where = np.random.default_rng(0).permutation(where)
    concept = emoji.concept[where]
    pixels = (shrunk(emoji.images[where]) * 255).round().byte().movedim(1, 3).numpy()
    indexed = [
        Image.fromarray(image).quantize(COLORS, dither=Image.Dither.NONE) for image in pixels
    ]
    palettes = np.zeros((len(where), COLORS, 3), np.uint8)
    for palette, image in zip(palettes, indexed, strict=True):
        colors = np.array(image.getpalette(), np.uint8).reshape(-1, 3)[:COLORS]
        palette[: len(colors)] = colors
    known = np.unique(concept)
    return {
        "pixels": np.stack([np.asarray(image) for image in indexed]),
        "palettes": palettes,
        "labels": label[concept].astype(np.uint8),
        "styles": np.searchsorted(SAMPLED, emoji.style[where]).astype(np.uint8),
        "test": part[concept] == TEST,
        "concepts": np.searchsorted(known, concept).astype(np.uint16),
        "names": np.array(json.dumps([emoji.table[number].name for number in known])),
    }


def sheet(emoji: Emoji) -> Image.Image:
    """Draw one concept of each class in each style that is sampled."""
    label, classes = division().labels(emoji.table), list(division().classes)
    images = dict(zip(zip(emoji.concept, emoji.style, strict=True), emoji.images, strict=True))
    complete = np.array(
        [all((concept, style) in images for style in SAMPLED) for concept in range(len(label))]
    )
    draw, font = np.random.default_rng(4), ImageFont.load_default(12)
    picture = Image.new("RGB", (LEFT + CELL * len(classes), TOP + CELL * len(SAMPLED)), "white")
    for column, name in enumerate(classes):
        text = Image.new("RGB", (TOP - 6, 16), "white")
        ImageDraw.Draw(text).text((0, 0), name, fill="black", font=font)
        picture.paste(text.rotate(90, expand=True), (LEFT + CELL * column + 10, 4))
        concept = draw.choice(np.flatnonzero((label == column) & complete))
        for row, style in enumerate(SAMPLED):
            small = Image.fromarray(images[concept, style]).resize((CELL - 4, CELL - 4))
            picture.paste(small, (LEFT + CELL * column, TOP + CELL * row))
    for row, style in enumerate(SAMPLED):
        title = list(STYLES)[style].replace("high-contrast", "hc")
        ImageDraw.Draw(picture).text((4, TOP + CELL * row + 8), title, fill="black", font=font)
    return picture.quantize(128, dither=Image.Dither.NONE)


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="file of emoji.py")
    parser.add_argument("--out", type=Path, default=Path("out"))
    arguments = parser.parse_args()
    emoji = load(arguments.file)
    arguments.out.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(arguments.out / "emoji.npz", **sample(emoji))
    sheet(emoji).save(arguments.out / "emoji.png", optimize=True)


if __name__ == "__main__":
    main()
