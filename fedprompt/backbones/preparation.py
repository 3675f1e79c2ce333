"""Preparation of images as a network wants them: resize, crop, levels and normalization."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import floor
from os import PathLike
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
from jaxtyping import Float, Shaped
from PIL import Image
from torch import Tensor

import fedprompt._refusals as check
from fedprompt._conversions import height_and_width
from fedprompt.data.opening import MAX_PIXELS, eight_bits, opened

WIDEST = 64
"""Longest resized side, in sides of `resized`. Of longer images, only the middle is resized."""

Resize = Literal["shortest", "longest", "squash"]
Kernel = Literal["pil", "uint8", "float"]
Size = tuple[int, int]


@dataclass(frozen=True)
class Preparation:
    """Steps from an image to the input of a network, as the library of the network makes it.

    It is plain data: ``Preparation(**json.loads(json.dumps(asdict(preparation))))`` is equal to it.

    Attributes:
        size: Height and width of an input in pixels, or one number for both.
        mean: Mean of each channel, for values in [0, 1]. With one channel, images are gray.
        std: Standard deviation of each channel.
        resize: "shortest" keeps the ratio of the sides and covers `resized`, "longest" keeps the
            ratio and fits into it, "squash" does not keep the ratio.
        resized: Height and width before the middle is cut out. If None, `size`.
        interpolation: Filter of Pillow, such as "bicubic".
        fill: Levels of the channels where an image is smaller than `size`. If None, 0.
        kernel: What is resized: an image by Pillow ("pil"), or, as in transformers, a tensor of
            8-bit levels ("uint8") or of floats ("float").
        bits: Bit depth of gray images with levels above 255. If None, each image has its own.

    Example:
        >>> preparation = Preparation(32, (0.5,) * 3, (0.5,) * 3, resized=36)
        >>> print(preparation)
        The shorter side is resized to 36 pixels (bicubic). The middle, 32 x 32, is kept.
        >>> preparation(Image.new("RGB", (64, 48), "white")).shape
        torch.Size([3, 32, 32])
    """

    size: Size
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resize: Resize = "shortest"
    resized: Size = None  # type: ignore[assignment]
    interpolation: str = "bicubic"
    fill: tuple[int, ...] = None  # type: ignore[assignment]
    kernel: Kernel = "pil"
    bits: int | None = None

    def __post_init__(self) -> None:
        check.sequence("mean", self.mean, "numbers of channels")
        defaults = {"resized": self.size, "fill": (0,) * len(self.mean)}
        for name in ("size", "resized", "mean", "std", "fill"):
            value = getattr(self, name)
            value = defaults[name] if value is None and name in defaults else value
            if name in ("size", "resized"):
                value = height_and_width(name, value)
            else:
                check.sequence(name, value, "numbers of channels")
                fits = len(value) == len(self.mean) and len(value) in (1, 3)
                check.require(fits, name, "have a number for each of 1 or 3 channels", value)
            object.__setattr__(self, name, tuple(value))
        check.require(all(each > 0 for each in self.std), "std", "be above 0", self.std)
        check.optional(check.count, "bits", self.bits)
        filters = [each.name.lower() for each in Image.Resampling]
        known = {"resize": get_args(Resize), "kernel": get_args(Kernel), "interpolation": filters}
        for name, names in known.items():
            given = getattr(self, name)
            check.require(given in names, name, f"be one of {', '.join(names)}", repr(given))

    def __str__(self) -> str:
        sides = {"shortest": "The shorter side is", "longest": "The longer side is"}
        pixels = f"{self.resized[0]}" if self.resized[0] == self.resized[1] else _text(self.resized)
        how = f"{sides.get(self.resize, 'Both sides are')} resized to {pixels} pixels"
        kept = f"The middle, {_text(self.size)}, is kept."
        if self.resize == "longest":
            kept = "The rest is filled." if self.resized == self.size else f"{kept[:-1]} or filled."
        same = self.resize == "squash" and self.resized == self.size
        return f"{how} ({self.interpolation}).{'' if same else f' {kept}'}"

    def __call__(
        self, image: Image.Image | str | PathLike[str], *, max_pixels: int = MAX_PIXELS
    ) -> Float[Tensor, "channels height width"]:
        """Prepare an image, or a file of one with at most `max_pixels` pixels.

        Raises:
            OSError: If a file cannot be read. The text has its path.
        """
        if isinstance(image, Image.Image):
            return self.normalized(self.levels(image))
        how: Any = {"bits": self.bits, "max_pixels": max_pixels}
        return self.normalized(opened(image, then=self.levels, **how))

    def levels(self, image: Image.Image) -> Shaped[Tensor, "channels height width"]:
        """Resize and crop an image to levels from 0 to 255, which can be normalized later.

        They are uint8, or float32 for the kernel "float".
        """
        if image.mode == "F" or image.mode.startswith("I"):
            image = Image.fromarray(eight_bits(np.asarray(image), self.bits))
        image = image.convert("RGB" if len(self.mean) == 3 else "L")
        target = self._target(image.height, image.width)
        shown = [min(pair) for pair in zip(target, self.size, strict=True)]
        top, left = (self._middle(*pair) for pair in zip(target, shown, strict=True))
        height, width = shown
        how = Image.Resampling[self.interpolation.upper()]
        if max(target) > WIDEST * max(self.resized):  # the whole would not fit into the memory
            x, y = image.width / target[1], image.height / target[0]
            box = left * x, top * y, (left + width) * x, (top + height) * y
            found = _tensor(image.resize((width, height), how, box=box))
        else:
            if self.kernel == "pil":
                whole = _tensor(image.resize(target[::-1], how))
            else:
                whole = self._by_torch(_tensor(image), target)
            found = whole[:, top : top + height, left : left + width]
        if tuple(shown) != self.size:
            top, left = ((size - side) // 2 for size, side in zip(self.size, shown, strict=True))
            fill = torch.tensor(self.fill, dtype=found.dtype)[:, None, None]
            part, found = found, fill.expand(-1, *self.size).clone()
            found[:, top : top + height, left : left + width] = part
        return found.float() if self.kernel == "float" else found.contiguous()

    def normalized(
        self, levels: Shaped[Tensor, "*batch channels height width"]
    ) -> Float[Tensor, "*batch channels height width"]:
        """Normalize levels from 0 to 255 on their device, in float32."""
        mean, std = (
            torch.tensor(part, device=levels.device)[:, None, None]
            for part in (self.mean, self.std)
        )
        return (levels.float() / 255 - mean) / std

    def _target(self, height: int, width: int) -> Size:
        """Return the height and width to which an image is resized, rounded as in its library."""
        if self.resize == "squash":
            return self.resized
        if self.resize == "shortest" and self.resized[0] == self.resized[1]:
            side = self.resized[0]
            long = int(side * max(height, width) / min(height, width))
            return (side, long) if height <= width else (long, side)
        ratios = height / self.resized[0], width / self.resized[1]
        ratio = max(ratios) if self.resize == "longest" else min(ratios)
        return max(1, round(height / ratio)), max(1, round(width / ratio))

    def _middle(self, side: int, kept: int) -> int:
        """Return where the middle of a side begins: transformers rounds down."""
        return round((side - kept) / 2) if self.kernel == "pil" else (side - kept) // 2

    def _by_torch(self, levels: Tensor, target: Size) -> Tensor:
        from torchvision.transforms.v2 import InterpolationMode  # takes seconds
        from torchvision.transforms.v2.functional import resize

        name = "nearest-exact" if self.interpolation == "nearest" else self.interpolation
        given = levels.float() if self.kernel == "float" else levels
        how = InterpolationMode(name)
        found: Tensor = resize(given, list(target), interpolation=how, antialias=True)
        return found


def _text(size: Size) -> str:
    return f"{size[0]} x {size[1]}"


def _tensor(image: Image.Image) -> Shaped[Tensor, "channels height width"]:
    levels = np.asarray(image)
    axes = (2, 0, 1) if levels.ndim == 3 else (0, 1)
    moved = np.array(levels.transpose(axes), order="C")  # torch would start threads in each thread
    return torch.from_numpy(moved if moved.ndim == 3 else moved[None])


def of_timm(
    config: Mapping[str, Any], size: int | Size | None = None, channels: int = 3
) -> Preparation:
    """Return the preparation of a network of timm.

    Args:
        config: Its `pretrained_cfg`.
        size: Height and width of inputs. If None, those of `config`.
        channels: Number of channels of the network. One channel has the mean of the three.
    """
    from timm.data.config import resolve_data_config

    resolve: Any = resolve_data_config
    made = resolve({}, pretrained_cfg=dict(config))
    size = height_and_width("size", made["input_size"][1:] if size is None else size)
    scaled = floor(size[0] / made["crop_pct"]), floor(size[1] / made["crop_pct"])
    resizes: dict[str, Resize] = {"squash": "squash", "border": "longest"}
    resize = resizes.get(made["crop_mode"], "shortest")
    mean, std = (
        tuple(values) if len(values) == channels else (sum(values) / len(values),) * channels
        for values in (made["mean"], made["std"])
    )
    fill = [round(255 * value) if resize == "longest" else 0 for value in mean]
    return Preparation(size, mean, std, resize, scaled, made["interpolation"], tuple(fill))


def of_open_clip(config: Mapping[str, Any], size: int | Size | None = None) -> Preparation:
    """Return the preparation of a CLIP of open_clip.

    Args:
        config: `preprocess_cfg` of its image tower; what it lacks is that of OpenAI.
        size: Height and width of inputs. If None, those of `config`.
    """
    from open_clip.transform import PreprocessCfg, merge_preprocess_dict

    made = PreprocessCfg(**merge_preprocess_dict(PreprocessCfg(), dict(config)))
    sides = height_and_width("size", made.size if size is None else size)
    mean, std = (
        (value,) * 3 if isinstance(value, float | int) else value for value in (made.mean, made.std)
    )
    shortest = made.resize_mode == "shortest" and sides[0] != sides[1]
    how = "bilinear" if made.interpolation == "bilinear" and not shortest else "bicubic"
    fill = (made.fill_color if made.resize_mode == "longest" else 0,) * 3
    return Preparation(sides, mean, std, cast(Resize, made.resize_mode), sides, how, fill)


def of_transformers(processor: Any) -> Preparation:
    """Return the preparation of an image processor of transformers.

    Raises:
        ValueError: If the processor has steps that are not a resize, a crop and a normalization.
    """
    size, crop = processor.size, processor.crop_size if processor.do_center_crop else None
    named = {name for name, value in dict(size or {}).items() if value}
    steps = type(processor)._preprocess.__qualname__.partition(".")[0]
    kernels: dict[str, Kernel] = {"TorchvisionBackend": "uint8", "DINOv3ViTImageProcessor": "float"}
    fits = steps in kernels and processor.do_resize and not getattr(processor, "do_pad", None)
    fits = fits and (named == {"height", "width"} or (crop and named == {"shortest_edge"}))
    rule = "be resized to one size, cropped and normalized by its processor, and not otherwise"
    check.require(fits, "image", rule, f"a {type(processor).__name__} with size {dict(size or {})}")
    squash = named == {"height", "width"}
    resized = (size.height, size.width) if squash else (size.shortest_edge,) * 2
    factor = 255 * (processor.rescale_factor if processor.do_rescale else 1)
    mean = processor.image_mean if processor.do_normalize else (0.0,) * 3
    std = processor.image_std if processor.do_normalize else (1.0,) * 3
    return Preparation(
        (crop.height, crop.width) if crop else resized,
        tuple(value / factor for value in mean),
        tuple(value / factor for value in std),
        "squash" if squash else "shortest",
        resized,
        Image.Resampling(processor.resample).name.lower(),
        kernel=kernels[steps],
    )
