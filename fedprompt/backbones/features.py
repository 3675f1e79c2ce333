"""Features of a frozen model, computed once for all rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Shaped
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

import fedprompt._refusals as check
from fedprompt.interfaces import Weighted


@runtime_checkable
class _MapStyle(Protocol):
    """Data set that is read by index, such as a map-style ``torch.utils.data.Dataset``."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, index: int, /) -> Any:
        """Return a sample: an image, a tuple that starts with one, or a dict with one."""


def precompute(
    encode: Callable[[Tensor], Tensor],
    dataset: _MapStyle | Tensor,
    *,
    batch_size: int,
    dtype: torch.dtype | None = None,
    views: int | None = None,
    key: str | None = None,
) -> Shaped[Tensor, num * event]:
    r"""Encode every image of a data set once, with a frozen model.

    Images are read by ``dataset[index]`` in this process and encoded in batches, without gradients
    and without random numbers.

    Every image is read once. So the transform of `dataset` must be deterministic, or features are
    those of one random view. For random augmentation pass `views`.

    The result takes ``num * views * event * itemsize`` bytes, allocated once. For example, 50,000
    images of 197 tokens with 768 float16 numbers take 15 GB, their class tokens alone 77 MB.

    Args:
        encode: Maps images (batch, \*image) to a tensor (batch, \*event). It receives images as
            `dataset` returns them, and moves them to the model's device. Put the model into eval
            mode first, see :func:`freeze`: dropout and batch norms in train mode are an error if
            `encode` is a module or a method of one, and are not noticed inside a function.
        dataset: Map-style data set of image tensors of one shape, of tuples that start with one,
            or of dicts with one under `key`; or a tensor (num, \*image).
        batch_size: Images in each call of `encode`, at least 1. The last batch may be smaller.
        dtype: Dtype of the result. If None, the dtype that `encode` returns. The largest float16
            is 65504.
        views: Number of times that every image is read and encoded, each time anew. If None,
            images are read once and the result has no axis of views.
        key: Name of the image in samples that are dicts, as in data sets of Hugging Face:
            ``"image"`` or ``"pixel_values"``. None for other samples.

    Returns:
        Features (num, \*event), or (num, views, \*event) if `views` is given, in the order of
        `dataset`, without gradients, on the device of `encode`'s result.

    Raises:
        ValueError: If a module is in train mode, or images or features differ in shape.

    Example:
        >>> images = torch.arange(12.0).reshape(3, 1, 2, 2)
        >>> precompute(lambda batch: batch.flatten(1).amax(1), images, batch_size=2)
        tensor([ 3.,  7., 11.])
        >>> precompute(lambda batch: batch.mean((1, 2, 3)), images, batch_size=2, views=2).shape
        torch.Size([3, 2])
        >>> samples = [{"image": image, "label": 0} for image in images]
        >>> precompute(lambda batch: batch.mean((1, 2, 3)), samples, batch_size=2, key="image")
        tensor([1.5000, 5.5000, 9.5000])
    """
    _check_arguments(encode, dataset, batch_size, dtype, views, key)
    features: Tensor | None = None
    with torch.no_grad():
        for start, view in product(range(0, len(dataset), int(batch_size)), range(views or 1)):
            images = _images(dataset, range(start, min(start + int(batch_size), len(dataset))), key)
            rows = encode(images)
            check.instance("encode", rows, Tensor, "return one tensor")
            if features is None:
                features = rows.new_empty((len(dataset), views or 1, *rows.shape[1:]), dtype=dtype)
            wanted = (len(images), *features.shape[2:])
            check.require(rows.shape == wanted, "encode", f"return rows of shape {wanted}", rows)
            features[start : start + len(rows), view] = rows
    assert features is not None  # there is at least one image
    return features if views is not None else features.squeeze(1)


def _images(dataset: _MapStyle | Tensor, indices: range, key: str | None) -> Tensor:
    if isinstance(dataset, Tensor):
        return dataset[indices.start : indices.stop]
    images = [_image(dataset[index], index, key) for index in indices]
    for index, image in zip(indices, images, strict=True):
        if image.shape != images[0].shape or image.dtype != images[0].dtype:
            rule = f"return images of one shape and dtype, at first {check.kind(images[0])}"
            raise check.wrong("dataset", rule, f"{check.kind(image)} at {index}")
    return torch.stack(images)


def _image(sample: Any, index: int, key: str | None) -> Tensor:
    if key is not None:
        fits = isinstance(sample, Mapping) and key in sample
        got = ", ".join(map(str, sample)) if isinstance(sample, Mapping) else check.kind(sample)
        check.require(fits, "key", "name an entry of each sample", f"{key!r} for {got}")
        sample = sample[key]
    image = sample[0] if isinstance(sample, tuple | list) and sample else sample
    if not isinstance(image, Tensor):
        rule = "return image tensors, tuples that start with one (is `ToTensor` missing?), or dicts"
        raise check.wrong_type(
            "dataset", f"{rule} with `key`", f"a {type(image).__name__} at {index}"
        )
    return image


def _check_arguments(
    encode: object, dataset: object, batch_size: object, dtype: Any, views: object, key: object
) -> None:
    check.function("encode", encode, "be callable")
    model = getattr(encode, "__self__", encode)
    for name, module in model.named_modules() if isinstance(model, nn.Module) else ():
        if module.training and isinstance(module, _BatchNorm | _DropoutNd):
            got = f"{type(module).__name__} {name!r} in train mode"
            raise check.wrong("encode", "be in eval mode; use `freeze`", got)
    check.instance("key", key, str | None, "be a string or None")
    check.count("batch_size", batch_size)
    check.optional(check.count, "views", views)
    check.instance("dtype", dtype, torch.dtype | None, "be a torch.dtype or None")
    rule = "be one of floating-point numbers"
    check.require(dtype is None or dtype.is_floating_point, "dtype", rule, dtype)
    rule = "be a tensor (num, *image) or a data set with a length and samples by index"
    fits = isinstance(dataset, _MapStyle) and not isinstance(dataset, Weighted | Mapping)
    if not fits or (isinstance(dataset, Tensor) and dataset.ndim == 0):
        raise check.wrong_type("dataset", rule, f"a {type(dataset).__name__}")
    if isinstance(dataset, Tensor):
        check.dense("dataset", dataset)
        check.require(key is None, "key", "be None for a tensor", repr(key))
    check.some("dataset", len(dataset), "contain at least one image")  # type: ignore[arg-type]
