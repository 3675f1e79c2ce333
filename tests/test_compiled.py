"""Every training step compiles in one graph, forward and backward (``pytest -m compiled``)."""

import pytest
import torch

import fedprompt as fp
from models import build, draw_images, row_named, tiny_vit
from tolerance import assert_near

pytestmark = pytest.mark.benchmark
ROWS = {"ViT": "vit_small_patch14_reg4_dinov2", "Eva": "vit_small_patch16_dinov3"}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def draw(*shape, seed=2):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_compiles(function, *inputs, learning, backend="aot_eager"):
    """Require one graph with the values and gradients of the uncompiled function."""
    results = []
    for call in (function, torch.compile(function, fullgraph=True, backend=backend)):
        outputs = call(*inputs)
        loss = sum(
            (draw(*output.shape, seed=number) * output).sum()
            for number, output in enumerate(outputs)
        )
        results.append((*outputs, *torch.autograd.grad(loss, learning)))
    for compiled, expected in zip(*reversed(results), strict=True):
        assert_near(compiled, expected)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("family", ROWS)
def test_encode_prompted_with_two_streams(family, backend):
    model = build(row_named(ROWS[family]))
    trunk, images = fp.vit_trunk(model), draw_images(model)

    def encode(images, deep, shared, groups):
        streams = (
            fp.PromptStream(dict(enumerate(deep)), True),
            fp.PromptStream({0: shared, 1: groups}),
        )
        pooled, outputs, _ = fp.encode_prompted(trunk, images, *streams)
        return pooled, *outputs

    learning = [
        draw(*shape, trunk.dim, seed=seed).requires_grad_()
        for seed, shape in enumerate(((3, 2), (2,), (2, 1)))
    ]
    assert_compiles(encode, images, *learning, learning=learning, backend=backend)


def test_encode_prompted_with_a_mask_and_fewer_blocks():
    model = tiny_vit()
    trunk, images = fp.vit_trunk(model, attention_mask=draw(6, 6)), draw_images(model)
    prompts = fp.ShallowPrompts(2, trunk.dim, generator=torch.Generator().manual_seed(0)).double()

    def encode(images):
        return (fp.encode_prompted(trunk, images, prompts(), depth=2).pooled,)

    assert_compiles(encode, images, learning=[prompts.tokens])


@pytest.mark.slow
def test_deep_prompts_through_inductor():
    """Use float32, because inductor of torch 2.11 fails on float64 attention."""
    model = tiny_vit(depth=2).float()
    trunk, images = fp.vit_trunk(model), draw_images(model).float()
    prompts = fp.DeepPrompts(2, trunk.dim, trunk.depth, generator=torch.Generator().manual_seed(0))

    def encode(images):
        return (fp.encode_prompted(trunk, images, prompts()).pooled,)

    assert_compiles(encode, images, learning=[prompts.tokens], backend="inductor")


def test_pad_prompts():
    pad = fp.PadPrompts((8, 10), generator=torch.Generator().manual_seed(0)).double()
    assert_compiles(
        lambda images: (pad(images),), draw(2, 3, 8, 10), learning=[pad.rows, pad.columns]
    )


def test_distillation_loss():
    labels = torch.tensor([0, 2, 1, 2, 0])
    teacher = fp.Weighted(draw(3, 3, seed=3), torch.tensor([2.0, 0.0, 1.0]))
    logits = draw(5, 3).requires_grad_()
    assert_compiles(
        lambda logits: (fp.distillation_loss(logits, labels, teacher),), logits, learning=[logits]
    )


def test_a_guided_step_of_prompts():
    model = tiny_vit()
    trunk, images, guides = fp.vit_trunk(model), draw_images(model, 3), draw(12, 12, seed=3)
    prompts = fp.DeepPrompts(
        2, trunk.dim, trunk.depth, generator=torch.Generator().manual_seed(0)
    ).double()

    def step(images, labels):
        logits = fp.encode_prompted(trunk, images, prompts()).pooled
        return (fp.guidance.guided_loss(logits, logits, labels, guides, guide_weight=0.7),)

    assert_compiles(step, images, torch.tensor([2, 0, 2]), learning=[prompts.tokens])
