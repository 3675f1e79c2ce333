"""What a whole FedOTP step costs, forward and backward: as published, against the library with cached image tokens.

A CLIP model with the widths of ViT-B-16, random weights and one layer in each tower instead of twelve: 100 classes, two prompts of 16
tokens, 32 images of 196 patches. As published means sentences of 77 tokens, the image tower at each step, and the loop that stops itself.
With twelve layers the towers weigh more, and with them what they gain; transport weighs less.
"""

import open_clip
import pytest
import torch
import torch.nn.functional as F

from fedprompt import ContextPrompts, TextTower, image_tokens, prompted_text, transport_logits
from references.published_step import published_logits, whole_sentences

pytestmark = pytest.mark.benchmark
NAMES = [
    f"{colour} {number}"
    for colour in ("red", "blue", "green", "black", "white")
    for number in range(20)
]


def test_whole_step(meter):
    torch.manual_seed(0)
    vision = {"layers": 1, "width": 768, "head_width": 64, "patch_size": 16, "image_size": 224}
    text = {"context_length": 77, "vocab_size": 49408, "width": 512, "heads": 8, "layers": 1}
    model = open_clip.model.CLIP(512, vision, text)
    tower = TextTower(model, open_clip.tokenizer.SimpleTokenizer())
    names, context = (
        tower.class_names(NAMES),
        ContextPrompts(tower.dim, num_contexts=2, generator=torch.Generator().manual_seed(0))(),
    )
    context = context.detach().requires_grad_()
    images, labels = torch.randn(32, 3, 224, 224), torch.arange(32)
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
    meter.report("the same, seconds of the library", seconds["library"])
