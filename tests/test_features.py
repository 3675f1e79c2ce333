"""Features of a frozen model, computed once."""

from collections import UserDict
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import IterableDataset

import fedprompt as fp
from fedprompt import precompute
from refusals import refused

IMAGES = torch.randn(11, 3, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
WEIGHT = torch.randn(48, 3, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Noisy:
    """Images with labels, read through a random transform; one stream draws in order of reading."""

    def __init__(self, seed: int, wrap: Callable[[Tensor, int], object]) -> None:
        self.draw, self.wrap = torch.Generator().manual_seed(seed), wrap

    def __len__(self) -> int:
        return len(IMAGES)

    def __getitem__(self, index: int) -> object:
        noise = torch.randn(3, 4, 4, generator=self.draw, dtype=torch.float64)
        return self.wrap(IMAGES[index] + noise, index)


WRAPS = {
    None: [lambda image, index: image, lambda image, index: (image, index), lambda *pair: [*pair]],
    "image": [lambda image, index: {"label": index, "image": image, "mask": image + 1}],
    "pixel_values": [lambda image, index: UserDict({"pixel_values": (image, 0), "label": index})],
}


@pytest.mark.parametrize(("key", "wrap"), [(key, wrap) for key in WRAPS for wrap in WRAPS[key]])
@pytest.mark.parametrize("views", [None, 1, 3])
def test_each_image_is_read_once_for_each_view_in_the_documented_order(key, wrap, views) -> None:
    seen = []

    def encode(images):
        seen.append(len(images))
        return torch.tensordot(images.flatten(1), WEIGHT, 1)

    features = precompute(encode, Noisy(5, wrap), batch_size=4, views=views, key=key)
    assert features.shape == (11, 3, 2) if views is None else (11, views, 3, 2)
    assert seen == [4] * 2 * (views or 1) + [3] * (views or 1)
    again = Noisy(5, lambda image, index: image)
    for batch in ([0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]):
        for view in range(views or 1):
            for index in batch:
                expected = torch.tensordot(again[index].flatten(), WEIGHT, 1)
                found = features[index] if views is None else features[index, view]
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 11), st.integers(1, 14), st.sampled_from([(), (2,), (3, 2)]))
def test_features_are_those_of_all_images_in_one_batch(num: int, size: int, event: tuple) -> None:
    def encode(images: Tensor) -> Tensor:
        return images.mean((1, 2, 3)).reshape(-1, *(1 for _ in event)).expand(-1, *event)

    assert torch.equal(precompute(encode, IMAGES[:num], batch_size=size), encode(IMAGES[:num]))


@pytest.mark.bad_input  # against the annotation, but right
def test_a_narrow_batch_size_reaches_the_last_image() -> None:
    images = torch.arange(300.0)[:, None]
    assert torch.equal(precompute(lambda batch: batch, images, batch_size=np.int8(100)), images)


@pytest.mark.parametrize("layer", [nn.BatchNorm2d(3), nn.Dropout()])
def test_a_model_in_train_mode_is_refused(layer: nn.Module) -> None:
    network = nn.Sequential(nn.Conv2d(3, 3, 3), layer.train(), nn.Flatten()).double()
    for encode in (network, network.forward):
        with pytest.raises(ValueError, match=r"`encode` must be in eval mode; .* '1' in train"):
            precompute(encode, IMAGES, batch_size=4)
    assert not precompute(fp.freeze(network), IMAGES, batch_size=4).requires_grad


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16, torch.float32])
def test_dtype_and_device_are_those_of_encode_unless_given(dtype: torch.dtype | None) -> None:
    scale = torch.ones((), requires_grad=True)
    features = precompute(lambda images: images * scale, IMAGES, batch_size=4, dtype=dtype)
    assert torch.equal(features, IMAGES.to(dtype or torch.float64))
    assert (features.dtype, features.requires_grad) == (dtype or torch.float64, False)
    elsewhere = precompute(lambda images: images.to("meta"), IMAGES, batch_size=4, dtype=dtype)
    assert (elsewhere.device.type, elsewhere.shape) == ("meta", IMAGES.shape)


class Endless(IterableDataset):
    def __iter__(self):
        return iter(IMAGES)


def features(dataset=IMAGES, encode=lambda images: images, **options):
    return precompute(encode, dataset, **{"batch_size": 4} | options)


LABELED = [{"image": IMAGES[0], "label": 1}]
test_wrong_calls_are_refused_by_name = refused(globals())("""
features([]) -> ValueError: `dataset` must contain at least one image; got none
features(Endless()) -> TypeError: got a Endless
features(IMAGES.to_sparse()) -> TypeError: `dataset` must be a dense tensor with numbers; got
features(tensor(1.0)) -> TypeError: got a Tensor
features([(np.zeros(3), 1)]) -> TypeError: `dataset` must return image tensors
features([()]) -> TypeError: got a tuple at 0
features([zeros(2), zeros(3)]) -> ValueError: `dataset` must return
features([zeros(2), zeros(2).double()]) -> ValueError: `dataset` must return images of one shape and
features(dict(enumerate(IMAGES))) -> TypeError: `dataset` must be a tensor (num, *ima
features(fp.Weighted(IMAGES, tensor(1.0))) -> TypeError: `dataset` must be a tensor (num, *ima
features(LABELED) -> TypeError: `dataset` must return image tensors
features(LABELED, key='img') -> ValueError: `key` must name an entry of each sample
features([{'image': 'a.png'}], key='image') -> TypeError: `dataset` must return
features([IMAGES[0]], key='image') -> ValueError: `key` must name an entry
features(key='image') -> ValueError: `key` must be None for a tensor; got 'image'.
features(key=0) -> TypeError: `key` must be a string or None; got 0 (int).
features(encode=None) -> TypeError: `encode` must be callable; got None (NoneType)
features(batch_size=0) -> ValueError: `batch_size` must be at least 1; got 0
features(batch_size=2.0) -> TypeError: `batch_size` must be an integer; got 2.0
features(views=0) -> ValueError: `views` must be at least 1; got 0
features(views='3') -> TypeError: `views` must be an integer; got '3'
features(dtype=torch.int64) -> ValueError: `dtype` must be one of floating-point numbers; got
features(dtype='float16') -> TypeError: `dtype` must be a torch.dtype or None; got 'float16'
features(encode=lambda images: (images, images)) -> TypeError: `encode` must return one
features(encode=lambda images: images.mean()) -> ValueError: `encode` must return rows of
features(encode=lambda images: images[:3]) -> ValueError: `encode` must return rows of shape
features(encode=lambda images: images[:, : len(images) - 1]) -> ValueError: `encode` must
""")
