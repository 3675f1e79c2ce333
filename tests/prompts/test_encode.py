"""Values and gradients of prompted forward passes, against a reference written token by token."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedprompt import (
    PromptStream,
    ShallowPrompts,
    encode_from,
    encode_front,
    encode_prompted,
    vit_trunk,
)
from models import draw_images, tiny_vit
from references.vpt import prompted_vit
from tolerance import assert_near

DIM, DEPTH, BATCH = 12, 3, 3
MODEL = tiny_vit()


def draw(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


SHAPES = {
    "shallow": [({0: (2,)}, False)],
    "deep": [({0: (2,), 1: (2,), 2: (2,)}, True)],
    "deep, but not everywhere": [({0: (2,), 2: (2,)}, True)],
    "lengths that differ, replaced": [({0: (3,), 1: (1,), 2: (2,)}, True)],
    "accumulated": [({0: (2,), 1: (1,), 2: (3,)}, False)],
    "late": [({2: (2,)}, False)],
    "one set for each sample": [({0: (BATCH, 2), 1: (BATCH, 1)}, False)],
    "deep, one set for each sample": [({0: (BATCH, 2), 1: (BATCH, 2)}, True)],
    "shared, then groups (SGPT)": [
        ({0: (2,), 1: (1,)}, False),
        ({1: (BATCH, 1), 2: (BATCH, 2)}, False),
    ],
    "groups first": [({1: (BATCH, 1), 2: (BATCH, 2)}, False), ({0: (2,), 1: (1,)}, False)],
    "one replaces, one is kept": [({0: (2,), 1: (1,), 2: (3,)}, True), ({0: (1,), 2: (2,)}, False)],
    "three": [({1: (1,)}, False), ({0: (2,), 1: (2,), 2: (2,)}, True), ({0: (1,), 2: (1,)}, False)],
}


def make_streams(spec, generator):
    return [
        PromptStream(
            {layer: draw(generator, *shape, DIM) for layer, shape in layers.items()}, replace
        )
        for layers, replace in spec
    ]


def assert_same_encoding(encoded, expected):
    pooled, streams = expected
    assert_near(encoded.pooled, pooled)
    assert len(encoded.streams) == len(streams)
    for actual, tokens in zip(encoded.streams, streams, strict=True):
        assert_near(actual, tokens)


POOLED = [*((name, "token") for name in SHAPES), ("deep", "avg"), ("three", "avg")]


@pytest.mark.parametrize(("name", "pool"), POOLED)
def test_features_and_tokens_of_each_stream_equal_the_reference(name, pool, generator):
    model, spec = tiny_vit(global_pool=pool), SHAPES[name]
    images, streams = draw_images(model, BATCH), make_streams(spec, generator)
    assert_same_encoding(
        encode_prompted(vit_trunk(model), images, *streams), prompted_vit(model, images, streams)
    )


@st.composite
def specs(draw_from):
    """Draw layers and lengths, 0 included, with and without a batch axis."""
    lengths = st.tuples(st.integers(0, 3)) | st.tuples(st.just(BATCH), st.integers(0, 3))
    return draw_from(
        st.lists(
            st.tuples(st.dictionaries(st.integers(0, DEPTH - 1), lengths), st.booleans()),
            max_size=3,
        )
    )


@settings(deadline=None, max_examples=15)
@given(spec=specs(), start=st.integers(1, DEPTH - 1), seed=st.integers(0, 2**31))
def test_any_streams_equal_the_reference_and_late_passes_are_bitwise_identical(spec, start, seed):
    model, trunk, images = MODEL, vit_trunk(MODEL), draw_images(MODEL, BATCH)
    streams = make_streams(spec, torch.Generator().manual_seed(seed))
    encoded = encode_prompted(trunk, images, *streams)
    assert_same_encoding(encoded, prompted_vit(model, images, streams))
    tokens = encode_front(trunk, images, *streams, start=start)
    late = encode_from(trunk, tokens, *streams, start=start)
    assert all(map(torch.equal, [late.pooled, *late.streams], [encoded.pooled, *encoded.streams]))


@pytest.mark.parametrize("depth", [1, 2])
def test_depth_runs_the_first_blocks_only(depth, model, trunk, images, generator):
    stream = PromptStream({0: draw(generator, 2, DIM)})
    encoded = encode_prompted(trunk, images, stream, depth=depth)
    assert_same_encoding(encoded, prompted_vit(model, images, [stream], depth=depth))
    assert_near(
        encode_prompted(trunk, images, depth=depth).pooled,
        prompted_vit(model, images, [], depth=depth)[0],
    )
    assert torch.equal(
        encode_prompted(trunk, images, depth=DEPTH).pooled, encode_prompted(trunk, images).pooled
    )


def test_gradients_equal_those_of_the_reference(model, trunk, images, generator):
    shared = draw(generator, 2, DIM).requires_grad_()
    groups = draw(generator, BATCH, 1, DIM).requires_grad_()
    streams = [PromptStream({0: shared, 1: shared}), PromptStream({1: groups}, True)]
    weights = [
        draw(generator, BATCH, tokens, DIM) for tokens in (1, 4, 1)
    ]  # pooled, 2 + 2 shared tokens, 1 group token

    def gradients(pooled, outputs):
        loss = sum(
            (weight * output).sum()
            for weight, output in zip(weights, (pooled[:, None], *outputs), strict=True)
        )
        return torch.autograd.grad(loss, [shared, groups])

    actual = gradients(*encode_prompted(trunk, images, *streams)[:2])
    expected = gradients(*prompted_vit(model, images, streams))
    for gradient, reference in zip(actual, expected, strict=True):
        assert_near(gradient, reference)


def test_patches_are_the_tokens_behind_the_prompts_after_the_last_norm(trunk, images, generator):
    tokens, context = trunk.embed(images)
    for layer in range(trunk.depth):
        tokens = trunk.block(layer, tokens, context, 0)
    plain = encode_prompted(trunk, images).patches
    assert torch.equal(plain, trunk.normalize(tokens[:, trunk.prefix :]))
    shared = PromptStream({0: draw(generator, 2, DIM)})
    assert encode_prompted(trunk, images, shared).patches.shape == plain.shape


class Recorder:
    """Trunk with one class token 0 and patches 1 and 2, whose blocks only record their input."""

    prefix, dim, depth, num_features, patch_size = 1, 1, 3, 3, 2

    def __init__(self):
        self.seen = []

    def embed(self, images):
        return torch.tensor([[[0.0], [1.0], [2.0]]]).expand(len(images), -1, -1), "context"

    def block(self, layer, tokens, context, num_prompts):
        assert context == "context"
        self.seen.append((layer, num_prompts, tokens[0, :, 0].tolist()))
        return tokens

    def normalize(self, tokens):
        return tokens + 100

    def pool(self, tokens):
        return tokens[:, :, 0]


def test_spans_are_in_the_order_of_streams_and_of_layers():
    trunk = Recorder()
    first = PromptStream({1: torch.tensor([[10.0]]), 0: torch.tensor([[11.0], [12.0]])})
    second = PromptStream({0: torch.tensor([[20.0]]), 2: torch.tensor([[21.0], [22.0]])}, True)
    third = PromptStream({2: torch.tensor([[30.0]])})
    images = torch.zeros(1, 3, 2, 2, dtype=torch.uint8)  # a trunk decides which dtypes it takes
    encoded = encode_prompted(trunk, images, first, second, third)
    assert trunk.seen == [
        (0, 3, [0, 11, 12, 20, 1, 2]),
        (1, 4, [0, 11, 12, 10, 20, 1, 2]),
        (2, 6, [0, 11, 12, 10, 21, 22, 30, 1, 2]),
    ]
    assert encoded.pooled.tolist() == [[0, 1, 2]]
    assert [tokens[0, :, 0].tolist() for tokens in encoded.streams] == [
        [111, 112, 110],
        [121, 122],
        [130],
    ]


def test_prompts_are_cast_to_the_backbone_and_get_gradients_in_their_own_dtype(images, generator):
    model = tiny_vit().float()
    prompts = ShallowPrompts(2, DIM, generator=generator).double()
    encoded = encode_prompted(vit_trunk(model), images.float(), prompts())
    encoded.pooled.sum().backward()
    assert encoded.pooled.dtype == encoded.streams[0].dtype == torch.float32
    assert prompts.tokens.grad.dtype == torch.float64


@pytest.mark.parametrize(
    ("trunk_dtype", "asked", "expected"),
    [
        (torch.bfloat16, None, torch.float32),
        (torch.float16, None, torch.float32),
        (torch.float32, None, torch.float32),
        (torch.float64, None, torch.float64),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float64, torch.float64),
    ],
)
def test_images_are_cast_to_the_backbone_and_features_have_the_stated_dtype(
    trunk_dtype, asked, expected, images, generator
):
    trunk = vit_trunk(tiny_vit().to(trunk_dtype))
    stream = ShallowPrompts(2, DIM, generator=generator)()
    encoded = encode_prompted(trunk, images, stream, dtype=asked)  # images are float64
    cast = encode_prompted(trunk, images.to(trunk_dtype), stream, dtype=asked)
    assert encoded.pooled.dtype == encoded.streams[0].dtype == expected
    assert torch.equal(encoded.pooled, cast.pooled)
    assert torch.equal(encoded.streams[0], cast.streams[0])
