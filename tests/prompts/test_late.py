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


def assert_equal_encodings(encoded, expected):
    assert torch.equal(encoded.pooled, expected.pooled)
    assert len(encoded.streams) == len(expected.streams)
    for actual, tokens in zip(encoded.streams, expected.streams, strict=True):
        assert torch.equal(actual, tokens)


def test_gradients_equal_those_of_the_pass_from_images(trunk, images, generator):
    prompts = fp.LayeredPrompts(2, DIM, layers=(1, 2), generator=generator).double()
    weights = draw(generator, BATCH, DIM)
    tokens = fp.encode_front(trunk, images, start=1)
    late = fp.encode_from(trunk, tokens, prompts(), start=1).pooled
    whole = fp.encode_prompted(trunk, images, prompts()).pooled
    losses = ((weights * each).sum() for each in (late, whole))
    gradients = [torch.autograd.grad(loss, prompts.tokens)[0] for loss in losses]
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
    with raises(TypeError, "`trunk` must have the method `resume` of a ResumableTrunk, because"):
        fp.encode_from(Plain(), tokens, stream, start=1)


@pytest.mark.bad_input
def test_trainable_prompts_before_the_start_are_refused(trunk, images, generator):
    prompts = fp.DeepPrompts(1, DIM, DEPTH, generator=generator).double()
    tokens = fp.encode_front(trunk, images, prompts(), start=2).detach()
    with raises(ValueError, "`streams[0].layers[0]` must not require gradients, because block 0"):
        fp.encode_from(trunk, tokens, prompts(), start=2)
    with torch.no_grad():  # for evaluation
        late = fp.encode_from(trunk, tokens, prompts(), start=2)
        assert_equal_encodings(late, fp.encode_prompted(trunk, images, prompts()))


@pytest.mark.bad_input
def test_a_trunk_that_is_no_longer_frozen_is_refused(trunk, images):
    tokens = fp.encode_front(trunk, images, start=1)
    trunk.model.blocks[2].train()
    with raises(ValueError, "`trunk` must stay in eval mode"):
        fp.encode_from(trunk, tokens, start=1)
