"""Pretrain the tiny CLIP on glyphs on cluttered canvases and write its weights.

Run it with `python examples/build_samples/build_clip.py`.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from build_samples.build import NUM_HELD_OUT, NUM_PER_CLASS, flags, new_model, save, take_steps
from build_samples.canvas import _SIDE, _SMALLEST, DOMAINS, _cluttered
from build_samples.digits_clip import CLASS_NAMES, TEMPLATES, preprocess, tokenize
from build_samples.glyphs import CLASSES, augment, render
from fedprompt import cosine_logits, image_tokens

RECIPE = "1"
STEPS = 4500
BACKGROUND_STEPS = 500  # final steps, which also push patches of clutter away from all captions
BATCH = 64
PATCH_WEIGHT = 0.5
NAMES = (
    *CLASS_NAMES,
    *(name if name.isupper() else f"small {name.upper()}" for name in CLASSES[10:]),
)
STYLES = tuple(DOMAINS)  # a caption names one of them or none
_SPOKEN = " ".join(
    [form.format(name) for forms in TEMPLATES.values() for form in forms for name in NAMES]
)
# The end token has the highest id, at which a CLIP pools.
WORDS = ("<pad>", "<start>", *sorted(set(re.findall(r"\w+|\.", _SPOKEN))), "<eot>")
ARCHITECTURE: dict[str, Any] = {
    "embed_dim": 64,
    "vision_cfg": {"layers": 3, "width": 64, "head_width": 16, "patch_size": 4, "image_size": 32},
    "text_cfg": {
        "context_length": 24,
        "vocab_size": len(WORDS),
        "width": 64,
        "heads": 4,
        "layers": 2,
    },
}


def encode_text(
    model: open_clip.model.CLIP, tokens: Int[Tensor, "texts length"]
) -> Float[Tensor, "texts dim"]:
    """Encode texts of any length.

    Short texts take less time than with `model.encode_text`, which requires the full length.
    """
    length = tokens.shape[1]
    embedded = model.token_embedding(tokens) + model.positional_embedding[:length]
    hidden = model.transformer(embedded, attn_mask=model.attn_mask[:length, :length])
    return (
        model.ln_final(hidden)[torch.arange(len(tokens)), tokens.argmax(1)] @ model.text_projection
    )


class Captions:
    """Two captions of every class, drawn again for each batch.

    The first caption names no style. The second names a random style.
    """

    def __init__(self) -> None:
        texts = [
            [tokenize([form.format(name) for name in NAMES], 12) for form in forms]
            for forms in TEMPLATES.values()
        ]
        # (1 + styles, forms, classes, length)
        self.tokens = torch.stack([torch.stack(forms) for forms in texts])

    def draw(
        self, labels: Int[Tensor, "batch"], styles: Int[Tensor, "batch"], generator: torch.Generator
    ) -> tuple[Int[Tensor, "texts length"], Float[Tensor, "batch texts"]]:
        """Return the captions, and for each image equal weights over the captions that fit it."""
        classes = torch.arange(len(NAMES))
        forms = torch.randint(self.tokens.shape[1], (2, len(NAMES)), generator=generator)
        named = torch.randint(len(STYLES), (len(NAMES),), generator=generator)
        plain, styled = self.tokens[0, forms[0], classes], self.tokens[1 + named, forms[1], classes]
        tokens = torch.cat([plain, styled])
        right = labels[:, None] == classes
        fits = torch.cat([right, right & (named == styles[:, None])], 1).float()
        return tokens, fits / fits.sum(1, keepdim=True)


def difficulty(progress: float) -> tuple[float, float]:
    """Return how small glyphs are and how often they have a style, at one moment of the training.

    Training begins with plain glyphs that fill the canvas. The glyphs shrink between 8 % and 58 %
    of all steps. Other styles are introduced twice as fast.

    Args:
        progress: Share of completed steps.

    Returns:
        The side of the smallest glyph in pixels, and the share of images whose style is drawn.
    """
    ramp = min(1.0, max(0.0, (progress - 0.08) / 0.5))
    return _SIDE - (_SIDE - _SMALLEST) * ramp, min(1.0, 2 * ramp)


def batch_loss(
    model: open_clip.model.CLIP,
    glyphs: Tensor,
    labels: Tensor,
    captions: Captions,
    generator: torch.Generator,
    progress: float,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Draw canvases, styles and captions for a batch of glyphs.

    Returns:
        The contrastive loss, and the mean similarity of background patches to their nearest
        caption. The loss is that of the pooled token plus that of the mean over the patches that
        the glyph touches.
    """
    smallest, share = difficulty(progress)
    squares = []

    def place(ink: Tensor) -> Tensor:
        canvases, square = _cluttered(ink, generator, smallest=smallest)
        squares.append(square)
        return canvases

    canvases = augment(glyphs, generator, place=place)
    styles = torch.randint(len(STYLES), (len(labels),), generator=generator)
    styles *= torch.rand(len(labels), generator=generator) < share
    for index, style in enumerate(STYLES):
        canvases[styles == index] = DOMAINS[style](canvases[styles == index], generator)
    pooled, patches = image_tokens(model, preprocess(canvases))
    tokens, fits = captions.draw(labels, styles, generator)
    text, scale = encode_text(model, tokens), model.logit_scale.exp().clamp(max=100)
    similarity = F.normalize(patches, dim=-1) @ F.normalize(text, dim=-1).T
    touched = F.avg_pool2d(squares[0], 4).flatten(1)
    glyph = torch.einsum("bv,bvt->bt", touched / touched.sum(1, keepdim=True), similarity)
    contrastive = F.cross_entropy(cosine_logits(pooled, text, scale=scale), fits)
    contrastive = contrastive + PATCH_WEIGHT * F.cross_entropy(scale * glyph, fits)
    clutter = touched == 0
    background = similarity.amax(2).relu()[clutter].sum() / clutter.sum().clamp(min=1)
    return contrastive, background


def pretrain(
    model: open_clip.model.CLIP,
    images: Tensor,
    labels: Tensor,
    generator: torch.Generator,
    *,
    steps: int = STEPS,
    background: bool = False,
) -> None:
    """Train all weights of a model in place to match glyphs with the captions that fit them.

    Args:
        model: Model from `new_model`; none of its layers depends on train mode.
        images: Glyphs from `render`.
        labels: Classes of `images`.
        generator: Generator of the batches, their canvases and captions.
        steps: Number of steps, at least 20, because the first tenth warms up.
        background: If true, a trained model is trained further, at half the learning rate, and
            patches of clutter are pushed away from all captions.
    """
    captions = Captions()

    def loss(step: int) -> Tensor:
        batch = torch.randint(len(labels), (BATCH,), generator=generator)
        progress = 1.0 if background else step / steps
        parts = batch_loss(model, images[batch], labels[batch], captions, generator, progress)
        return parts[0] + parts[1] if background else parts[0]

    take_steps(model, loss, steps, learning_rate=7e-4 if background else 1.5e-3)


@torch.inference_mode()
def accuracy(
    model: open_clip.model.CLIP, images: Tensor, labels: Tensor, generator: torch.Generator
) -> float:
    """Return the zero-shot accuracy on plain glyphs of all sizes on cluttered canvases.

    The captions are "a photo of a ...".
    """
    text = model.encode_text(tokenize([f"a photo of a {name}." for name in NAMES]))
    pooled, _ = image_tokens(model, preprocess(_cluttered(images, generator)[0]))
    return float((cosine_logits(pooled, text, scale=1.0).argmax(1) == labels).float().mean())


def main() -> None:
    """Run the whole recipe and write one file."""
    arguments = flags(__doc__, STEPS).parse_args()
    train, held_out = np.random.default_rng(arguments.seed).spawn(2)
    model = new_model(open_clip.model.CLIP, ARCHITECTURE, arguments.seed).eval()
    generator = torch.Generator().manual_seed(arguments.seed)
    glyphs = render(NUM_PER_CLASS, train)
    pretrain(model, *glyphs, generator, steps=arguments.steps)
    pretrain(model, *glyphs, generator, steps=BACKGROUND_STEPS, background=True)
    source_accuracy = accuracy(model, *render(NUM_HELD_OUT, held_out), generator)
    written = {"words": json.dumps(WORDS), "recipe": RECIPE}
    save(model, arguments.out / "digits_clip.safetensors", ARCHITECTURE, source_accuracy, **written)


if __name__ == "__main__":
    main()
