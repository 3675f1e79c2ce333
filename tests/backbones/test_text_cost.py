"""Costs of the text tower that do not depend on the machine: tokens, and kinds of products."""

import open_clip
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from clips import NAMES, TOKENIZER, TOWERS, draw, make_clip
from fedprompt import TextTower, prompted_text

LONG = open_clip.tokenizer.SimpleTokenizer()  # 77 tokens


@pytest.fixture(scope="module")
def wide():
    """A tower with the width of ViT-B-16 on the meta device, where nothing is computed."""
    vision = {"layers": 1, "width": 8, "head_width": 8, "patch_size": 8, "image_size": 8}
    text = {"context_length": 77, "vocab_size": 49408, "width": 512, "heads": 8, "layers": 2}
    with torch.device("meta"):
        model = open_clip.model.CLIP(512, vision, text)
    return TextTower(model, LONG)


@pytest.fixture(scope="module")
def imagenet(wide):
    return wide.class_names(open_clip.IMAGENET_CLASSNAMES[:998])


def tokens_run(tower, text, *streams):
    """Return the number of tokens that enter the first block, in all runs together."""
    sizes = []
    first = tower.model.transformer.resblocks[0].ln_1
    hook = first.register_forward_pre_hook(lambda _, inputs: sizes.append(inputs[0].shape[:2]))
    tower(text, *streams)
    hook.remove()
    return sum(rows * length for rows, length in sizes)


def test_chunks_of_classes_add_few_tokens(wide, imagenet):
    with torch.device("meta"):
        context = torch.zeros(2, 16, 512)
    text = prompted_text(context, imagenet)
    chunked = TextTower(wide.model, LONG, class_chunk=100)
    assert tokens_run(chunked, text) <= 1.1 * tokens_run(wide, text)


def small_products(step):
    """Return the number of products of batches of small matrices, forward and backward."""
    with profile(activities=[ProfilerActivity.CPU]) as record:
        step()
    return sum(event.name == "aten::bmm" for event in record.events())


@pytest.mark.parametrize("kind", ["CLIP", "custom text, custom blocks", "both ways, last"])
def test_projections_are_single_products(kind):
    """Fused attention is one operator, so no product of batches is left."""
    model = make_clip(**TOWERS[kind]).float()
    tower = TextTower(model, TOKENIZER)
    names = tower.class_names(NAMES)
    context = draw(2, 5, tower.dim).float().requires_grad_()

    def step():
        tower(prompted_text(context, names)).square().sum().backward()

    assert small_products(step) == 0
