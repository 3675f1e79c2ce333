"""Errors of encode_prompted."""

import pytest
import torch

from errors import raises
from fedprompt import DeepPrompts, GroupPrompts, PromptStream, ShallowPrompts, encode_prompted

DIM, DEPTH = 12, 3


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("layers", "error", "message"),
    [
        ({3: torch.zeros(1, DIM)}, ValueError, "`streams[1].layers` must be among the 3 blocks"),
        ({-1: torch.zeros(1, DIM)}, ValueError, "`streams[1].layers` must be among the 3 blocks"),
        ({0.5: torch.zeros(1, DIM)}, ValueError, "`streams[1].layers` must be among the 3"),
        (
            {1: torch.zeros(2, 11)},
            ValueError,
            "(prompts, 12) or (batch, prompts, 12); got (2, 11).",
        ),
        (
            {1: torch.zeros(DIM)},
            ValueError,
            "`streams[1].layers[1]` must have shape (prompts, 12) or (batch, prompts, 12)",
        ),
        (
            {0: torch.zeros(())},
            ValueError,
            "`streams[1].layers[0]` must have shape (prompts, 12) or (batch, prompts, 12); got ().",
        ),
        ({0: torch.zeros(3, 1, 2, DIM)}, ValueError, "(prompts, 12) or (batch, prompts, 12);"),
        ({2: torch.zeros(1, 2, DIM)}, ValueError, "`streams[1].layers[2]` must have the batch"),
        ({0: torch.zeros(2, DIM, device="meta")}, ValueError, "`streams[1].layers[0]` must be"),
        ({0: torch.zeros(2, DIM, dtype=torch.int64)}, TypeError, "`streams[1].layers[0]` must"),
        ({0: None}, TypeError, "`streams[1].layers[0]` must be a floating-point tensor; got"),
    ],
)
def test_encode_prompted_refuses_tokens_that_do_not_fit(layers, error, message, trunk, images):
    with raises(error, message):
        encode_prompted(trunk, images, PromptStream({0: torch.zeros(1, DIM)}), PromptStream(layers))


@pytest.mark.bad_input
def test_encode_prompted_refuses_a_layer_that_does_not_run(trunk, images):
    with raises(ValueError, "`streams[0].layers` must be among the 2 blocks 0 to 1; got 2."):
        encode_prompted(trunk, images, DeepPrompts(1, DIM, DEPTH)(), depth=2)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("depth", "error", "message"),
    [
        (0, ValueError, "`depth` must be at least 1; got 0."),
        (4, ValueError, "`depth` must be at most the trunk's 3 blocks; got 4."),
        (2.0, TypeError, "`depth` must be an integer; got 2.0 (float)."),
    ],
)
def test_encode_prompted_refuses_a_wrong_depth(depth, error, message, trunk, images):
    with raises(error, message):
        encode_prompted(trunk, images, depth=depth)


@pytest.mark.bad_input
@pytest.mark.parametrize("dtype", [torch.int64, "float32"])
def test_encode_prompted_refuses_a_dtype_without_fractions(dtype, trunk, images):
    with raises(TypeError, "`dtype` must be a floating-point torch.dtype or None; got "):
        encode_prompted(trunk, images, dtype=dtype)


@pytest.mark.bad_input
def test_encode_prompted_refuses_other_types(model, trunk, images):
    with raises(
        TypeError, "`trunk` must be a Trunk, such as vit_trunk(model); got VisionTransformer."
    ):
        encode_prompted(model, images)
    with raises(
        TypeError,
        "`streams[0]` must be a PromptStream; call the prompt module; got ShallowPrompts(1, 12,",
    ):
        encode_prompted(trunk, images, ShallowPrompts(1, DIM))
    for wrong, got in (
        (images[0], "float64 tensor of shape (3, 16, 16)"),
        (images.byte(), "uint8 tensor of shape (3, 3, 16, 16)"),
    ):
        with raises(
            TypeError, f"be floating-point of shape (batch, channels, height, width); got a {got}."
        ):
            encode_prompted(trunk, wrong)


@pytest.mark.bad_input
def test_a_batch_of_groups_must_be_the_batch_of_images(trunk, images):
    groups = GroupPrompts(4, 1, DIM, layers=(1,)).double()
    with raises(
        ValueError, "`streams[0].layers[1]` must have the batch of 3 images; got (2, 1, 12)."
    ):
        encode_prompted(trunk, images, groups(torch.tensor([0, 1])))
    with raises(ValueError, "`streams[0].layers` must be among the 3 blocks 0 to 2; got 3."):
        encode_prompted(
            trunk, images, GroupPrompts(4, 1, DIM, layers=(3,)).double()(torch.tensor([0, 1, 1]))
        )


@pytest.mark.bad_input
def test_replace_must_be_a_bool(trunk, images):
    with raises(TypeError, "`streams[0].replace` must be True or False; got 'x' (str)."):
        encode_prompted(trunk, images, PromptStream({0: torch.zeros(1, DIM)}, "x"))
