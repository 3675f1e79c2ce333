"""Source data: printed characters, drawn with Pillow's built-in font.

They are reduced to 8 x 8 pixels in the same way as scikit-learn's digits.
"""

import numpy as np
import torch
from jaxtyping import Float, Int
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from fedprompt.samples._pixels import enlarge, warp

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

# Lower case is included only where it differs in shape from upper case.
CLASSES = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabdefghnqrt"
FONT_SIZES = (38, 44, 50)
CANVAS = 128  # pixels; enough for the widest glyph at any slant
HEIGHT = 32  # of every glyph, before 4 x 4 blocks are averaged


def render(
    num_per_class: int, generator: np.random.Generator
) -> tuple[Float[Tensor, "batch 1 16 16"], Int[Tensor, "batch"]]:
    """Draw every class `num_per_class` times with random sizes, strokes, slants and widths.

    Args:
        num_per_class: Number of images of each class, at least 1.
        generator: Generator of the images. They are reproducible with the same version of Pillow.

    Returns:
        Images in [0, 1] ordered by class, with ink on a background of 0, and their labels. A label
        is an index into `CLASSES`.
    """
    fonts = [ImageFont.load_default(size) for size in FONT_SIZES]
    ink = [
        _reduced(_slanted(_drawn(name, fonts, generator), generator))
        for name in CLASSES
        for _ in range(num_per_class)
    ]
    labels = torch.arange(len(CLASSES)).repeat_interleave(num_per_class)
    return enlarge(torch.from_numpy(np.stack(ink))), labels


def augment(
    images: Float[Tensor, "batch 1 height width"], generator: torch.Generator
) -> Float[Tensor, "batch 1 height width"]:
    """Augment images for pretraining: warp them, change their contrast and add noise.

    Args:
        images: Glyphs from `render`.
        generator: Generator on the device of `images`.
    """
    warped = warp(images, generator, rotation=0.12, scale=0.1, shear=0.12, shift=0.06, elastic=0.06)
    contrast, noise = torch.rand(
        2, len(images), 1, 1, 1, generator=generator, device=images.device
    ).unbind()
    drawn = torch.randn(warped.shape, generator=generator, device=images.device)
    return (warped * (0.7 + 0.8 * contrast)).clamp(0, 1) + 0.1 * noise * drawn


def _drawn(name: str, fonts: list[Font], generator: np.random.Generator) -> Image.Image:
    """Draw a character in the middle of a black canvas, in a random size and stroke."""
    canvas = Image.new("L", (CANVAS, CANVAS))
    font, stroke = fonts[generator.integers(len(fonts))], int(generator.integers(4))
    ImageDraw.Draw(canvas).text(
        (CANVAS / 2, CANVAS / 2), name, fill=255, font=font, anchor="mm", stroke_width=stroke
    )
    return canvas


def _slanted(canvas: Image.Image, generator: np.random.Generator) -> Image.Image:
    """Rotate, shear and widen a canvas about its center."""
    angle, shear = generator.normal(0, [0.15, 0.25])
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    inverse = np.linalg.inv(turn @ np.array([[generator.uniform(0.7, 1.35), shear], [0.0, 1.0]]))
    offset = CANVAS / 2 * (1 - inverse.sum(1))  # keeps the center in place
    matrix = np.column_stack([inverse, offset]).ravel().tolist()
    return canvas.transform(
        canvas.size, Image.Transform.AFFINE, matrix, resample=Image.Resampling.BILINEAR
    )


def _reduced(canvas: Image.Image) -> Float[np.ndarray, "8 8"]:
    """Crop a canvas to its ink and reduce it to 8 x 8 pixels.

    The ink is scaled to full height in the middle of a square. Then blocks of 4 x 4 pixels are
    averaged.
    """
    glyph = canvas.crop(canvas.getbbox())
    width = min(HEIGHT, max(1, round(HEIGHT * glyph.width / glyph.height)))
    square = Image.new("L", (HEIGHT, HEIGHT))
    square.paste(glyph.resize((width, HEIGHT)), ((HEIGHT - width) // 2, 0))
    return np.asarray(square.resize((8, 8), Image.Resampling.BOX), dtype=np.float32)
