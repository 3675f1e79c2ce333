"""Late prompts: passes that go on from cached tokens equal passes from images, bitwise."""

from functools import partial

import pytest
import torch

import fedprompt as fp
from errors import raises
from fedprompt.interfaces import ResumableTrunk
from models import draw_images, tiny_vit
from tolerance import assert_near

DIM, DEPTH, BATCH = 12, 3, 3


def draw(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


STREAMS = {
    "none": [],
    "late": [({2: (2,)}, False)],
    "at the start and after it": [({1: (2,), 2: (3,)}, True)],
    "early ones are among the tokens": [({0: (2,), 1: (1,), 2: (3,)}, False)],
    "early ones that are replaced": [({0: (3,), 1: (1,), 2: (2,)}, True)],
    "groups of each sample": [({1: (BATCH, 1), 2: (BATCH, 2)}, False)],
    "shared, then groups (SGPT)": [
        ({0: (2,), 1: (1,)}, False),
        ({1: (BATCH, 1), 2: (BATCH, 2)}, False),
    ],
    "given in another order": [({2: (1,), 0: (3,), 1: (2,)}, True), ({1: (1,), 0: (2,)}, False)],
}


def make_streams(spec, generator):
    return [
        fp.PromptStream(
            {layer: draw(generator, *shape, DIM) for layer, shape in layers.items()}, kept
        )
        for layers, kept in spec
    ]


def assert_equal_encodings(encoded, expected):
    assert torch.equal(encoded.pooled, expected.pooled)
    assert len(encoded.streams) == len(expected.streams)
    for actual, tokens in zip(encoded.streams, expected.streams, strict=True):
        assert torch.equal(actual, tokens)


@pytest.mark.parametrize("start", [1, 2])
@pytest.mark.parametrize("spec", STREAMS.values(), ids=STREAMS)
def test_a_pass_from_cached_tokens_equals_the_pass_from_images(spec, start, trunk, generator):
    images, streams = draw_images(trunk.model, BATCH), make_streams(spec, generator)
    expected = fp.encode_prompted(trunk, images, *streams)
    tokens = fp.encode_front(trunk, images, *streams, start=start)
    late = fp.encode_from(trunk, tokens, *streams, start=start)
    assert_equal_encodings(late, expected)


def test_gradients_equal_those_of_the_pass_from_images(trunk, images, generator):
    prompts = fp.LayeredPrompts(2, DIM, layers=(1, 2), generator=generator).double()
    weights = draw(generator, BATCH, DIM)
    tokens = fp.encode_front(trunk, images, start=1)
    gradients = [
        torch.autograd.grad((weights * pooled).sum(), prompts.tokens)[0]
        for pooled in (
            fp.encode_from(trunk, tokens, prompts(), start=1).pooled,
            fp.encode_prompted(trunk, images, prompts()).pooled,
        )
    ]
    assert torch.equal(*gradients)
    assert gradients[0].abs().amax(2).min() > 1e-6


def test_front_tokens_run_the_first_blocks_and_no_others(trunk, images):
    # An independent run of the model's own blocks.
    model = trunk.model
    tokens = model.norm_pre(model._pos_embed(model.patch_embed(images)))
    for start in (1, 2, 3):
        tokens = model.blocks[start - 1](tokens)
        assert torch.equal(fp.encode_front(trunk, images, start=start), tokens)


def test_a_late_pass_does_not_run_the_front(trunk, images):
    ran = []
    for layer, block in enumerate(trunk.model.blocks):
        block.register_forward_pre_hook(lambda *_, layer=layer: ran.append(layer))
    trunk.model.patch_embed.register_forward_pre_hook(lambda *_: ran.append("embed"))
    tokens = fp.encode_front(trunk, images, start=2)
    assert ran == ["embed", 0, 1]
    fp.encode_from(trunk, tokens, start=2)
    assert ran == ["embed", 0, 1, 2]


def test_tokens_may_be_kept_in_bfloat16(generator):
    model = tiny_vit().float()
    trunk, images = fp.vit_trunk(model), draw_images(model, BATCH)
    stream = fp.PromptStream({2: draw(generator, 2, DIM)})
    front = partial(fp.encode_front, trunk, start=2)
    kept = fp.precompute(front, images, batch_size=2, dtype=torch.bfloat16)
    assert kept.element_size() * kept[0].numel() == 2 * 6 * DIM  # class token, register, patches
    late = fp.encode_from(trunk, kept, stream, start=2).pooled
    assert late.dtype == torch.float32
    assert_near(late, fp.encode_prompted(trunk, images, stream).pooled, dtype=torch.bfloat16)
    # The only loss is that of the cached tokens.
    exact = fp.encode_from(trunk, kept.float(), stream, start=2).pooled
    assert torch.equal(late, exact)


class Plain:
    """Trunk without tables and masks, whose front and end are linear maps."""

    prefix, dim, depth, num_features, patch_size = 1, 2, 3, 2, 2

    def embed(self, images):
        return images.flatten(2).mT[..., :2], None

    def block(self, layer, tokens, context, num_prompts):
        return tokens * (layer + 2) + tokens.mean(1, keepdim=True)

    def normalize(self, tokens):
        return tokens

    def pool(self, tokens):
        return tokens[:, 0]


class Resumable(Plain):
    def resume(self, tokens, *, start, image_size):
        return tokens, None


def test_a_trunk_of_your_own_needs_two_more_lines(generator):
    images, stream = draw(generator, 2, 3, 2, 2), fp.PromptStream({1: draw(generator, 1, 2)})
    expected = fp.encode_prompted(Plain(), images, stream)
    tokens = fp.encode_front(Plain(), images, start=1)
    assert_equal_encodings(fp.encode_from(Resumable(), tokens, stream, start=1), expected)
    assert isinstance(Resumable(), ResumableTrunk)
    with raises(
        TypeError,
        "`trunk` must have the method `resume` of a ResumableTrunk, because `start` is 1; "
        "got Plain.",
    ):
        fp.encode_from(Plain(), tokens, stream, start=1)


# --- Errors


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"start": 0}, ValueError, "`start` must be at least 1; got 0."),
        ({"start": 3}, ValueError, "`start` must be below the 3 blocks that run; got 3."),
        ({"start": 2, "depth": 2}, ValueError, "`start` must be below the 2 blocks that run;"),
        ({"start": 1.0}, TypeError, "`start` must be an integer; got 1.0 (float)."),
        ({"start": 1, "image_size": 0}, ValueError, "`image_size` must be at least 1; got 0."),
    ],
)
def test_a_wrong_start_is_refused(arguments, error, message, trunk, images):
    tokens = fp.encode_front(trunk, images, start=1)
    with raises(error, message):
        fp.encode_from(trunk, tokens, **arguments)


@pytest.mark.bad_input
def test_images_and_tokens_are_not_mistaken_for_each_other(trunk, images):
    tokens = fp.encode_front(trunk, images, start=2)
    rule = "`tokens` must be a floating-point tensor of shape (batch, seq, 12); got a "
    for wrong, got in (
        (images, "float64 tensor of shape (3, 3, 16, 16)"),
        (tokens[:, :, :8], "float64 tensor of shape (3, 6, 8)"),
        (tokens.int(), "int32 tensor of shape (3, 6, 12)"),
        (tokens.tolist(), "list"),
    ):
        with raises(TypeError, f"{rule}{got}"):
            fp.encode_from(trunk, wrong, start=2)
    with raises(TypeError, "`images` must be floating-point of shape (batch, channels, height"):
        fp.encode_prompted(trunk, tokens)


@pytest.mark.bad_input
def test_tokens_of_another_number_of_patches_are_refused(trunk, images):
    tokens = fp.encode_front(trunk, images, start=2)
    for size in (None, 16, (16, 16)):
        with raises(ValueError, "`tokens` must have 6 tokens without prompts, for 2 x 2 patches;"):
            fp.encode_from(trunk, tokens[:, :-1], start=2, image_size=size)


@pytest.mark.bad_input
def test_tokens_must_contain_the_early_prompts_of_the_streams(trunk, images, generator):
    tokens = fp.encode_front(trunk, images, start=1)
    stream = fp.PromptStream({0: draw(generator, 2, DIM)})
    with raises(ValueError, "`tokens` must have 6 tokens without prompts, for 2 x 2 patches;"):
        fp.encode_from(trunk, tokens, stream, start=1)  # the front ran without the prompts
    with raises(ValueError, "`tokens` must contain the 9 prompts before block 1; got 6 tokens."):
        fp.encode_from(trunk, tokens, fp.PromptStream({0: draw(generator, 9, DIM)}), start=1)


@pytest.mark.bad_input
def test_trainable_prompts_before_the_start_are_refused(trunk, images, generator):
    prompts = fp.DeepPrompts(1, DIM, DEPTH, generator=generator).double()
    tokens = fp.encode_front(trunk, images, prompts(), start=2).detach()
    with raises(
        ValueError,
        "`streams[0].layers[0]` must not require gradients, because block 0 is before `start`;",
    ):
        fp.encode_from(trunk, tokens, prompts(), start=2)
    with torch.no_grad():  # for evaluation
        late = fp.encode_from(trunk, tokens, prompts(), start=2)
        assert_equal_encodings(late, fp.encode_prompted(trunk, images, prompts()))


@pytest.mark.bad_input
def test_front_tokens_refuses_what_encode_prompted_refuses(trunk, images):
    with raises(TypeError, "`trunk` must be a Trunk, such as vit_trunk(model); got str."):
        fp.encode_front("vit", images, start=1)
    with raises(TypeError, "`images` must be floating-point of shape"):
        fp.encode_front(trunk, images.byte(), start=1)
    with raises(ValueError, "`start` must be at least 1; got 0."):
        fp.encode_front(trunk, images, start=0)
    with raises(ValueError, "`start` must be at most the trunk's 3 blocks; got 4."):
        fp.encode_front(trunk, images, start=4)
    with raises(ValueError, "`streams[0].layers` must be among the 3 blocks 0 to 2; got 3."):
        fp.encode_front(trunk, images, fp.PromptStream({3: torch.zeros(1, DIM)}), start=1)


@pytest.mark.bad_input
def test_tokens_on_another_device_are_refused(trunk, images):
    tokens = fp.encode_front(trunk, images, start=1).to("meta")
    with raises(ValueError, "`tokens` must be on the trunk's device cpu; got meta."):
        fp.encode_from(trunk, tokens, start=1)


@pytest.mark.bad_input
def test_a_trunk_that_is_no_longer_frozen_is_refused(trunk, images):
    tokens = fp.encode_front(trunk, images, start=1)
    trunk.model.blocks[2].train()
    with raises(ValueError, "`trunk` must stay in eval mode"):
        fp.encode_from(trunk, tokens, start=1)
