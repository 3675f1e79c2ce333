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
from torch.utils.data import Dataset, IterableDataset

import fedprompt as fp
from fedprompt import precompute
from refusals import refused

IMAGES = torch.randn(11, 3, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Transformed(Dataset):
    """Images with labels, read through a transform. Records the indices that are read."""

    def __init__(
        self, images: Tensor, transform: Callable[[Tensor], Tensor] = lambda image: image
    ) -> None:
        self.images, self.transform, self.read = images, transform, []

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.read.append(index)
        return self.transform(self.images[index]), index % 3


def noisy(seed: int) -> Callable[[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda image: image + torch.randn(image.shape, generator=generator, dtype=image.dtype)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 11), st.integers(1, 14), st.sampled_from([(), (2,), (3, 2)]))
def test_features_equal_those_of_single_images(
    num: int, batch_size: int, event: tuple[int, ...]
) -> None:
    weight = torch.randn(
        3 * 16, *event, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    features = precompute(
        lambda images: torch.tensordot(images.flatten(1), weight, 1),
        Transformed(IMAGES[:num]),
        batch_size=batch_size,
    )
    expected = torch.stack([torch.tensordot(image.flatten(), weight, 1) for image in IMAGES[:num]])
    torch.testing.assert_close(features, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("key", ["image", "pixel_values"])
@pytest.mark.parametrize("wrap", [dict, UserDict], ids=["dict", "UserDict"])
def test_samples_may_be_dicts_as_in_data_sets_of_hugging_face(wrap: type, key: str) -> None:
    dataset = [wrap({"label": 3, key: image, "mask": image + 1}) for image in IMAGES]
    expected = precompute(lambda images: images[:, 0], IMAGES, batch_size=4)
    features = precompute(lambda images: images[:, 0], dataset, batch_size=4, key=key)
    assert torch.equal(features, expected)
    views = precompute(lambda images: images[:, 0], dataset, batch_size=4, key=key, views=2)
    assert torch.equal(views, expected[:, None].expand(-1, 2, -1, -1))


def test_a_random_transform_of_dicts_is_refused() -> None:
    images = Transformed(IMAGES, noisy(0))

    class Dicts(Dataset):
        def __len__(self) -> int:
            return len(images)

        def __getitem__(self, index: int) -> dict[str, object]:
            image, label = images[index]
            return {"image": image, "label": label}

    with pytest.raises(ValueError, match="return the same image whenever it is read"):
        precompute(lambda images: images, Dicts(), batch_size=4, key="image")


def test_encode_gets_full_batches_in_order_and_a_smaller_last_one() -> None:
    seen = []
    precompute(lambda images: seen.append(images) or images, Transformed(IMAGES), batch_size=4)
    assert [len(batch) for batch in seen] == [4, 4, 3]
    assert torch.equal(torch.cat(seen), IMAGES)


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
    precompute(fp.freeze(network), IMAGES, batch_size=4)


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16, torch.float32])
def test_the_dtype_is_that_of_encode_unless_given(dtype: torch.dtype | None) -> None:
    features = precompute(lambda images: images, IMAGES, batch_size=4, dtype=dtype)
    assert torch.equal(features, IMAGES.to(dtype or torch.float64))
    assert features.dtype == (dtype or torch.float64)


def test_features_are_on_the_device_of_the_result_of_encode() -> None:
    features = precompute(
        lambda images: images.to("meta"), IMAGES, batch_size=4, dtype=torch.float16
    )
    assert (features.device.type, features.dtype, features.shape) == (
        "meta",
        torch.float16,
        IMAGES.shape,
    )


@pytest.mark.parametrize("views", [1, 3])
def test_each_view_reads_every_image_again(views: int) -> None:
    dataset = Transformed(IMAGES, noisy(5))
    features = precompute(lambda images: images[:, :, 0, 0], dataset, batch_size=4, views=views)
    assert features.shape == (11, views, 3)
    # Draw the noise again in the documented order, batch by batch and view by view.
    again = noisy(5)
    for batch in ([0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]):
        for view in range(views):
            for index in batch:
                assert torch.equal(features[index, view], again(IMAGES[index])[:, 0, 0])
    assert sorted(dataset.read) == sorted(list(range(11)) * views), "every reading is used"


def flip_at_random(image: Tensor, generator: torch.Generator) -> Tensor:
    return image.flip(-1) if torch.rand((), generator=generator) < 0.5 else image


@pytest.mark.parametrize("seed", range(20))
def test_a_random_flip_is_refused(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    dataset = Transformed(IMAGES, lambda image: flip_at_random(image, generator))
    with pytest.raises(ValueError, match=r"must return the same image .* two different images at"):
        precompute(lambda images: images, dataset, batch_size=4)


def test_randomness_in_the_last_images_only_is_refused() -> None:
    # 16 probes are spread over 40 images, so some are among the last ten.
    generator = torch.Generator().manual_seed(0)
    images = torch.arange(40.0).reshape(40, 1, 1, 1)
    dataset = Transformed(
        images, lambda image: image + torch.rand((), generator=generator) * (image >= 30)
    )
    with pytest.raises(ValueError, match="got two different images at 3"):
        precompute(lambda images: images, dataset, batch_size=4)


def test_no_random_number_is_drawn() -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()  # noqa: NPY002
    precompute(lambda images: images, Transformed(IMAGES), batch_size=4)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == np.random.get_state()[1].tolist()  # noqa: NPY002


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
features(dict(enumerate(IMAGES))) -> TypeError: `dataset` must be images by index; got
features(fp.Weighted(IMAGES, tensor(1.0))) -> TypeError: `dataset` must be images by index; got
features(LABELED) -> ValueError: `key` must be one of
features(LABELED, key='img') -> ValueError: `key` must
features([{'image': 'a.png'}], key='image') -> TypeError: `dataset` must return
features([IMAGES[0]], key='image') -> ValueError: `key` must be None for samples
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
features(encode=lambda images: images.mean()) -> ValueError: `encode` must return a row for
features(encode=lambda images: images[:3]) -> ValueError: `encode` must return a row for
features(encode=lambda images: images[:, : len(images) - 1]) -> ValueError: `encode` must
""")
