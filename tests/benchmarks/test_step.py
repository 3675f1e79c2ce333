"""Cost of a whole FedOTP step, forward and backward.

The published step is compared with a step of the library that uses cached image tokens. The
published step has sentences of 77 tokens, runs the image tower, and solves transport by a loop with
a stopping rule.

The CLIP model has random weights, the widths of ViT-B-16, and one layer in each tower instead of
twelve. There are 100 classes, two contexts of 16 tokens, and 32 images of 196 patches. With twelve
layers, the towers take a larger part of the time, and transport a smaller part.
"""

import open_clip
import pytest
import torch
import torch.nn.functional as F

from fedprompt import ContextPrompts, TextTower, image_tokens, prompted_text, transport_logits
from references.published_step import published_logits, whole_sentences

pytestmark = pytest.mark.benchmark
NAMES = [
    f"{color} {number}"
    for color in ("red", "blue", "green", "black", "white")
    for number in range(20)
]


def test_whole_step(meter):
    torch.manual_seed(0)
    vision = {"layers": 1, "width": 768, "head_width": 64, "patch_size": 16, "image_size": 224}
    text = {"context_length": 77, "vocab_size": 49408, "width": 512, "heads": 8, "layers": 1}
    model = open_clip.model.CLIP(512, vision, text)
    tower = TextTower(model, open_clip.tokenizer.SimpleTokenizer())
    names = tower.class_names(NAMES)
    prompts = ContextPrompts(tower.dim, num_contexts=2, generator=torch.Generator().manual_seed(0))
    context = prompts().detach().requires_grad_()
    images = torch.randn(32, 3, 224, 224)
    labels = torch.arange(32)
    with torch.no_grad():
        cached = image_tokens(model, images)[1]

    def gradient(logits):
        return torch.autograd.grad(F.cross_entropy(logits, labels), context)[0]

    def published(threshold=1e-3):
        with torch.no_grad():
            patches = image_tokens(model, images)[1]
        return gradient(
            published_logits(
                patches, whole_sentences(tower, names, context), scale=100.0, threshold=threshold
            )
        )

    def library():
        return gradient(transport_logits(cached, tower(prompted_text(context, names)), scale=100.0))

    expected = published(threshold=1e-6)
    torch.testing.assert_close(library(), expected, rtol=0, atol=1e-3 * expected.abs().max().item())
    seconds = meter.seconds(published=published, library=library)
    meter.report(
        "step of 32 images, 100 classes, one layer: published / library",
        seconds["published"] / seconds["library"],
        at_least=15.0,
    )
    meter.report("step of 32 images, seconds of the library", seconds["library"])
