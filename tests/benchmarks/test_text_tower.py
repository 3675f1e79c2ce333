"""Costs of a text tower with two contexts of 16 tokens, for the class names of ImageNet.

Sentences of 77 tokens in open_clip's own tower are compared with the library, for a forward and a
backward pass. The tower has the sizes of ViT-B-16 and random weights. With ``--check``, it has all
twelve layers, otherwise one.
"""

from functools import partial

import open_clip
import pytest
import torch

from fedprompt import ContextPrompts, TextTower, prompted_text
from references.published_step import whole_sentences
from tolerance import assert_near

pytestmark = pytest.mark.benchmark
NAMES = open_clip.IMAGENET_CLASSNAMES[:998]
CHUNK = 100  # classes for which open_clip's tower fits into memory
GIB = 2**30


@pytest.fixture(scope="module")
def clip_model(request):
    layers = 12 if request.config.getoption("--check") else 1
    vision = {"layers": 1, "width": 8, "head_width": 8, "patch_size": 8, "image_size": 8}
    text = {"context_length": 77, "vocab_size": 49408, "width": 512, "heads": 8, "layers": layers}
    torch.manual_seed(0)
    return open_clip.model.CLIP(512, vision, text)


@pytest.fixture(scope="module")
def tower(clip_model):
    return TextTower(clip_model, open_clip.tokenizer.SimpleTokenizer())


@pytest.fixture(scope="module")
def names(tower):
    return tower.class_names(NAMES)


def shared(tower, names, context):
    return tower(prompted_text(context, names, class_specific=context.ndim == 4))


def truncated(tower, names, context):
    """Encode sentences that end at the end of text.

    The context is expanded to a class-specific one, so that no prefix is shared.
    """
    return shared(tower, names, context[:, None].expand(-1, len(names.names), -1, -1))


def drawn(tower, **sizes):
    generator = torch.Generator().manual_seed(0)
    return ContextPrompts(tower.dim, num_contexts=2, generator=generator, **sizes)()


def step(encode, tower, names, context):
    (gradient,) = torch.autograd.grad(encode(tower, names, context).square().sum(), context)
    return gradient


def test_text_tower(meter, tower, names):
    """Compare the gradients, the time and the memory."""
    context, results = drawn(tower), {}
    num_classes = meter.size(100, brief=20)
    some = names.select(range(num_classes))

    def run(encode):
        results[encode.__name__] = step(encode, tower, some, context)

    ways = (whole_sentences, truncated, shared) if meter.check else (whole_sentences, shared)
    calls = {encode.__name__: partial(run, encode) for encode in ways}
    ratios = "whole_sentences / shared, time >= 17.0"
    if meter.check:
        ratios += """
            whole_sentences / truncated, time >= 3.3
            whole_sentences / truncated, memory
            whole_sentences / shared, memory >= 9.0
        """
    title = f"text tower, {num_classes} classes, forward and backward"
    meter.compare(title, ratios, rounds=3, **calls)
    for way in results.keys() - {"whole_sentences"}:
        assert_near(results[way], results["whole_sentences"])


def test_text_tower_with_all_names(meter, tower, names):
    """Run the sentences of 77 tokens for three chunks of 100 classes, and scale their time."""
    if not meter.check:
        return  # minutes
    context = drawn(tower)
    chunks = [names.select(range(start, start + CHUNK)) for start in (0, 400, 898)]
    chunked = TextTower(tower.model, open_clip.tokenizer.SimpleTokenizer(), class_chunk=CHUNK)
    calls = {"all": partial(step, shared, tower, names, context)}
    calls |= {
        f"chunk {number}": partial(step, whole_sentences, tower, chunk, context)
        for number, chunk in enumerate(chunks)
    }
    calls["chunked"] = partial(step, shared, chunked, names, context)
    seconds = meter.seconds(rounds=1, **calls)
    whole = sum(seconds[f"chunk {number}"] for number in range(3)) * len(NAMES) / (3 * CHUNK)
    meter.report("998 classes: whole / shared, time", whole / seconds["all"], at_least=13.0)
    meter.report("998 classes: chunks of 100 / at once, time", seconds["chunked"] / seconds["all"])
    peak = meter.peak_bytes(all=calls["all"], chunked=calls["chunked"])
    for way, title in (("all", "at once"), ("chunked", "in chunks of 100")):
        meter.report(f"998 classes {title}, memory in GiB", peak[way] / GIB)


def test_class_chunks(meter, tower, names):
    """Chunks of classes need less memory, and a second forward pass."""
    if not meter.check:
        return  # the same ratios are those of the test above
    chunked = TextTower(tower.model, open_clip.tokenizer.SimpleTokenizer(), class_chunk=20)
    context = drawn(tower, num_classes=100)
    calls = {
        name: partial(step, shared, way, names.select(range(100)), context)
        for name, way in {"all": tower, "chunks": chunked}.items()
    }
    ratios = """
        all / chunks, memory >= 2.0
        chunks / all, time <= 1.8
    """
    meter.compare("class-specific contexts, chunks of a fifth", ratios, rounds=3, **calls)
