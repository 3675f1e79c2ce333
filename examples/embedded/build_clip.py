"""Pretrain the tiny CLIP on printed glyphs on cluttered canvases and write its weights: `python examples/embedded/build_clip.py`."""

import argparse
import sys
from pathlib import Path
from time import process_time

import numpy as np
import open_clip
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from embedded.build import NUM_HELD_OUT, NUM_PER_CLASS
from embedded.canvas import SIDE, SMALLEST, cluttered
from embedded.clip import (
    FOLDER,
    NAMES,
    STYLES,
    TEMPLATES,
    new_clip,
    preprocess,
    save_clip,
    tokenize,
    weights_path,
)
from embedded.data import DOMAINS
from embedded.glyphs import augment, render
from fedprompt import cosine_logits, image_tokens

RECIPE = "1"
STEPS = 4500
BACKGROUND_STEPS = 500  # in the end, with patches of clutter held away from all captions
BATCH = 64
PATCH_WEIGHT = 0.5


def encode_text(
    model: open_clip.model.CLIP, tokens: Int[Tensor, "texts length"]
) -> Float[Tensor, "texts dim"]:
    """Encode texts of any length, short ones in less time than `model.encode_text`, which takes its full length alone."""
    length = tokens.shape[1]
    embedded = model.token_embedding(tokens) + model.positional_embedding[:length]
    hidden = model.ln_final(
        model.transformer(embedded, attn_mask=model.attn_mask[:length, :length])
    )
    return hidden[torch.arange(len(tokens)), tokens.argmax(1)] @ model.text_projection


class Captions:
    """Two captions of every class, drawn anew for each batch: one that names no style, and one that names some style."""

    def __init__(self) -> None:
        texts = [
            [tokenize([form.format(name) for name in NAMES], 12) for form in forms]
            for forms in TEMPLATES.values()
        ]
        self.tokens = torch.stack(
            [torch.stack(forms) for forms in texts]
        )  # (1 + styles, forms, classes, length)

    def draw(
        self, labels: Int[Tensor, "batch"], styles: Int[Tensor, "batch"], generator: torch.Generator
    ) -> tuple[Int[Tensor, "texts length"], Float[Tensor, "batch texts"]]:
        """Return the captions, and for each image the equal weights of those that fit it."""
        classes, num_forms = torch.arange(len(NAMES)), self.tokens.shape[1]
        forms = torch.randint(num_forms, (2, len(NAMES)), generator=generator)
        named = torch.randint(len(STYLES), (len(NAMES),), generator=generator)
        tokens = torch.cat(
            [self.tokens[0, forms[0], classes], self.tokens[1 + named, forms[1], classes]]
        )
        right = labels[:, None] == classes
        fits = torch.cat([right, right & (named == styles[:, None])], 1).float()
        return tokens, fits / fits.sum(1, keepdim=True)


def difficulty(progress: float) -> tuple[float, float]:
    """Begin with plain glyphs that fill the canvas; from 8 to 58 % of all steps, let them shrink, and other styles come in twice as fast.

    Args:
        progress: The share of steps that are over.

    Returns:
        The side of the smallest glyph in pixels, and the share of images whose style is drawn.
    """
    ramp = min(1.0, max(0.0, (progress - 0.08) / 0.5))
    return SIDE - (SIDE - SMALLEST) * ramp, min(1.0, 2 * ramp)


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
        The contrastive loss, of the pooled token and of the mean over the patches that a glyph touches; and how close the other patches
        come to any caption.
    """
    smallest, share = difficulty(progress)
    squares = []

    def place(ink: Tensor) -> Tensor:
        canvases, square = cluttered(ink, generator, smallest=smallest)
        squares.append(square)
        return canvases

    canvases = augment(glyphs, generator, place=place)
    styles = torch.randint(len(STYLES), (len(labels),), generator=generator) * (
        torch.rand(len(labels), generator=generator) < share
    )
    for index, style in enumerate(STYLES):
        canvases[styles == index] = DOMAINS[style](canvases[styles == index], generator)
    pooled, patches = image_tokens(model, preprocess(canvases))
    tokens, fits = captions.draw(labels, styles, generator)
    text, scale = encode_text(model, tokens), model.logit_scale.exp().clamp(max=100)
    similarity = F.normalize(patches, dim=-1) @ F.normalize(text, dim=-1).T
    touched = F.avg_pool2d(squares[0], 4).flatten(1)
    glyph = torch.einsum("bv,bvt->bt", touched / touched.sum(1, keepdim=True), similarity)
    contrastive = F.cross_entropy(
        cosine_logits(pooled, text, scale=scale), fits
    ) + PATCH_WEIGHT * F.cross_entropy(scale * glyph, fits)
    return contrastive, similarity.amax(2).relu()[touched == 0].sum() / (touched == 0).sum().clamp(
        min=1
    )


def pretrain(
    model: open_clip.model.CLIP,
    images: Tensor,
    labels: Tensor,
    generator: torch.Generator,
    *,
    steps: int = STEPS,
    background: bool = False,
) -> None:
    """Train every weight of a model to tell the captions that fit a glyph from all others, in place.

    Args:
        model: From `new_clip`; nothing in it depends on train mode.
        images: From `render`.
        labels: Classes of `images`.
        generator: Of the batches, their canvases and captions.
        steps: At least 20, because the first tenth warms up.
        background: Go on with a trained model at half the learning rate, now with clutter held away from all captions.
    """
    captions, rate = Captions(), 7e-4 if background else 1.5e-3
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=rate, total_steps=steps, pct_start=0.1
    )
    for step in (progress := tqdm(range(steps))):
        batch = torch.randint(len(labels), (BATCH,), generator=generator)
        loss, closeness = batch_loss(
            model,
            images[batch],
            labels[batch],
            captions,
            generator,
            1.0 if background else step / steps,
        )
        if background:
            loss = loss + closeness
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)


@torch.inference_mode()
def accuracy(
    model: open_clip.model.CLIP, images: Tensor, labels: Tensor, generator: torch.Generator
) -> float:
    """Return the share of plain glyphs, of all sizes on cluttered canvases, that "a photo of a ..." names rightly."""
    text = model.encode_text(tokenize([f"a photo of a {name}." for name in NAMES]))
    pooled, _ = image_tokens(model, preprocess(cluttered(images, generator)[0]))
    return float((cosine_logits(pooled, text, scale=1.0).argmax(1) == labels).float().mean())


def main() -> None:
    """Run the whole recipe and write one file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=FOLDER)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    train, held_out = np.random.default_rng(arguments.seed).spawn(2)
    model, generator = new_clip(seed=arguments.seed), torch.Generator().manual_seed(arguments.seed)
    started = process_time()
    glyphs = render(NUM_PER_CLASS, train)
    pretrain(model, *glyphs, generator, steps=arguments.steps)
    pretrain(model, *glyphs, generator, steps=BACKGROUND_STEPS, background=True)
    seconds = process_time() - started
    source_accuracy = accuracy(model, *render(NUM_HELD_OUT, held_out), generator)
    path = weights_path(arguments.out)
    save_clip(model, path, recipe=RECIPE, source_accuracy=f"{source_accuracy:.4f}")
    print(
        f"{path}: {path.stat().st_size / 1024:.0f} KiB, {source_accuracy:.1%} of held-out glyphs, {seconds:.0f} CPU seconds"
    )


if __name__ == "__main__":
    main()
