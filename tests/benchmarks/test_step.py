"""Cost of a whole FedOTP step, forward and backward.

The published step is compared with a step of the library that uses cached image tokens. The
published step has sentences of 77 tokens, runs the image tower, and solves transport by a loop with
a stopping rule.

The CLIP model has random weights and the sizes of ViT-B-16. With ``--check``, there are 12 layers
in each tower, 32 images of 196 patches, and the first 100 names of ImageNet. Otherwise, there are
one layer, 8 images and 20 names.
"""

import open_clip
import pytest
import torch
import torch.nn.functional as F

from fedprompt import ContextPrompts, TextTower, image_tokens, prompted_text, transport_logits
from references.published_step import published_logits, whole_sentences

pytestmark = pytest.mark.benchmark


def test_whole_step(meter):
    layers, num_images, num_classes = (12, 32, 100) if meter.check else (1, 8, 20)
    torch.manual_seed(0)
    vision = {"layers": layers, "width": 768, "head_width": 64, "patch_size": 16, "image_size": 224}
    text = {"context_length": 77, "vocab_size": 49408, "width": 512, "heads": 8, "layers": layers}
    model = open_clip.model.CLIP(512, vision, text)
    tower = TextTower(model, open_clip.tokenizer.SimpleTokenizer())
    names = tower.class_names(open_clip.IMAGENET_CLASSNAMES[:num_classes])
    prompts = ContextPrompts(tower.dim, num_contexts=2, generator=torch.Generator().manual_seed(0))
    context = prompts().detach().requires_grad_()
    images = torch.randn(num_images, 3, 224, 224)
    labels = torch.arange(num_images) % num_classes
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

    if not meter.check:  # the same code, in the time of one more step
        expected = published(threshold=1e-6)
        bound = 1e-3 * expected.abs().max().item()
        torch.testing.assert_close(library(), expected, rtol=0, atol=bound)
    title, ratio = f"step of {num_images} images", "published / library, time >= 20.0"
    found = meter.compare(title, ratio, rounds=3, published=published, library=library)
    meter.report(f"{title}, seconds of the library", found["time"]["library"])
