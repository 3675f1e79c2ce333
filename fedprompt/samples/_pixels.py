"""Processing common to printed glyphs and handwritten digits.

Images of 8 x 8 pixels are enlarged to 16 x 16 and augmented by random warps.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

IMAGE_SIZE = 16

Images = Float[Tensor, "batch 1 height width"]


def enlarge(ink: Float[Tensor, "batch 8 8"]) -> Float[Tensor, "batch 1 16 16"]:
    """Scale each image to a maximum of 1 and enlarge it bilinearly.

    Args:
        ink: Non-negative values on a background of 0, with a positive value in every image.
    """
    normalized = ink / ink.amax((1, 2), keepdim=True)
    return F.interpolate(normalized[:, None], size=(IMAGE_SIZE, IMAGE_SIZE), mode="bilinear")


def warp(
    images: Float[Tensor, "batch channels height width"],
    generator: torch.Generator,
    *,
    rotation: float,
    scale: float,
    shear: float,
    shift: float,
    elastic: float = 0.0,
) -> Float[Tensor, "batch channels height width"]:
    """Warp every image by its own random affine map and elastic field.

    Pixels from outside an image repeat its border.

    Args:
        images: Images of any value range. Interpolation does not exceed this range.
        generator: Generator on the device of `images`.
        rotation: Standard deviation in radians.
        scale: Standard deviation of the relative size, independent for each axis.
        shear: Standard deviation of the horizontal slant.
        shift: Standard deviation in half image sides.
        elastic: Standard deviation of a 4 x 4 grid of displacements, in half image sides. Between
            the points of the grid, displacements are interpolated.
    """
    batch, _, height, width = images.shape

    def normal(*shape: int) -> Tensor:
        return torch.randn(batch, *shape, generator=generator, device=images.device)

    angle = rotation * normal()
    turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], -1).view(batch, 2, 2)
    stretch = torch.diag_embed(1 + scale * normal(2))
    stretch[:, 0, 1] = shear * normal()
    affine = torch.cat([turn @ stretch, shift * normal(2, 1)], -1)
    grid = F.affine_grid(affine, [batch, 1, height, width], align_corners=False)
    field = F.interpolate(
        elastic * normal(2, 4, 4), size=(height, width), mode="bilinear", align_corners=True
    )
    return F.grid_sample(
        images, grid + field.movedim(1, -1), padding_mode="border", align_corners=False
    )
