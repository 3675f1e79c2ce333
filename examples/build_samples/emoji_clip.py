"""Train the small CLIP of the wheel on emoji and their names.

    python examples/build_samples/emoji_clip.py emoji.npz --weights DINOV2.safetensors

A text tower learns from DINOv2's features of images and from captions, in the styles that are
`seen` and with the concepts of the part `PRETRAINING`. Captions have names and keywords of Unicode
CLDR. None is made from a class of `emoji.toml`. The dictionary (a name against its keywords, text
alone) has all concepts. A small image tower then learns from DINOv2's.
"""

import argparse
import json
import sys
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import open_clip
import torch
import torch.nn as nn
import torch.nn.functional as F
from jaxtyping import Bool, Float
from safetensors.torch import load_file
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import Tensor

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import fedprompt as fp
from build_samples.build import new_model, save, take_steps
from build_samples.emoji import SIDE, STYLES, Emoji, load
from build_samples.emoji_division import PRETRAINING, division
from fedprompt.samples._words import END, WordPieces, words_of

RECIPE = "1"
BATCH = 128
LENGTH = 24  # ids of a text
SMALL = 32  # pixels of the small network
INK = 0.03  # a patch that is darker than this belongs to the emoji
FORMS = ("an emoji of {}.", "{}.", "a picture of {}.", "a drawing of {}.", "an icon of {}.")
LOOKS = {name: style.look for name, style in STYLES.items() if style.seen}
"""A word for each style that is seen, for one caption in four."""


class Sizes(NamedTuple):
    """Sizes of a text tower, and its number of steps."""

    dim: int
    width: int
    layers: int
    merges: int
    steps: int

    def text(self, vocabulary: int) -> dict[str, int]:
        """Return the text configuration of open_clip."""
        sizes = {"width": self.width, "heads": 4, "layers": self.layers}
        return {"context_length": LENGTH, "vocab_size": vocabulary, **sizes}

    def architecture(self, vocabulary: int, **vision: Any) -> dict[str, Any]:
        """Return the configuration of open_clip."""
        return {"embed_dim": self.dim, **vision, "text_cfg": self.text(vocabulary)}


TINY = Sizes(dim=96, width=96, layers=2, merges=1400, steps=500)
TINY_VISION = {"layers": 4, "width": 96, "head_width": 24, "patch_size": 4, "image_size": SMALL}
TINY_STEPS = 600


class Encoded(NamedTuple):
    """Tokens of DINOv2 for each image, and its patches that show the emoji."""

    tokens: Tensor
    ink: Bool[Tensor, "images patches"]

    def foreground(self) -> Tensor:
        """Return the mean of the patches that show the emoji."""
        means = zip(shares(self.ink).split(512), self.tokens[:, 1:].split(512), strict=True)
        return torch.cat(
            [torch.einsum("bp,bpd->bd", weight, some.float()) for weight, some in means]
        )


class Texts:
    """Names and keywords of the concepts.

    Captions of images leave out keywords that are the name of a held-out concept.
    """

    def __init__(self, emoji: Emoji, part: np.ndarray) -> None:
        self.names = [" ".join(words_of(concept.name)) for concept in emoji.table]
        held = {name for name, where in zip(self.names, part, strict=True) if where != PRETRAINING}
        self.keywords = [
            [word for word in dict.fromkeys(" ".join(words_of(tag)) for tag in concept.keywords)
             if word and word != name]
            for concept, name in zip(emoji.table, self.names, strict=True)
        ]  # fmt: skip
        self.shown = [[word for word in words if word not in held] for words in self.keywords]
        self.fitting = [
            {name, *words} for name, words in zip(self.names, self.keywords, strict=True)
        ]

    def caption(self, concept: int, style: str, draw: np.random.Generator) -> tuple[str, str]:
        """Return a caption of an image, and the name or keyword that it has."""
        name, words, chance = self.names[concept], self.shown[concept], draw.random()
        if chance < 0.25:
            return f"a {LOOKS[style]} emoji of {name}.", name
        if words and chance < 0.55:
            word = words[draw.integers(len(words))]
            word = f"{name} {word}" if chance < 0.35 else word
            return self.form(word, draw), word
        return self.form(name, draw), name

    def entry(self, concept: int, draw: np.random.Generator) -> tuple[str, str]:
        """Return an entry of the dictionary: a name, and one of its keywords if it has any."""
        words = self.keywords[concept] or [self.names[concept]]
        return self.names[concept], words[draw.integers(len(words))]

    @staticmethod
    def form(word: str, draw: np.random.Generator) -> str:
        """Put a word into a sentence."""
        return FORMS[draw.integers(len(FORMS))].format(word)

    def fits(self, concepts: np.ndarray, words: list[str]) -> Float[Tensor, "concepts words"]:
        """Return 1 where a word is a name or a keyword of a concept, and on the diagonal."""
        found = [[word in self.fitting[concept] for word in words] for concept in concepts]
        return torch.tensor(found).float().fill_diagonal_(1.0)


@cache
def learn_merges(texts: tuple[str, ...], count: int) -> tuple[str, ...]:
    """Learn byte pair encoding: join the most frequent pair of pieces, `count` times."""
    words = Counter(word for text in texts for word in words_of(text) if word != ".")
    pieces = {word: [*word[:-1], word[-1] + END] for word in words}
    merges: list[str] = []
    while len(merges) < count:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, parts in pieces.items():
            for pair in pairwise(parts):
                pairs[pair] += words[word]
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(" ".join(best))
        for parts in pieces.values():
            for at in range(len(parts) - 2, -1, -1):
                if tuple(parts[at : at + 2]) == best:
                    parts[at : at + 2] = ["".join(best)]
    return tuple(merges)


def tokenizer(emoji: Emoji, sizes: Sizes) -> tuple[WordPieces, tuple[str, ...]]:
    """Learn a tokenizer from names and keywords."""
    texts = [text for concept in emoji.table for text in (concept.name, *concept.keywords)]
    merges = learn_merges((*texts, *FORMS * 40, *LOOKS.values()), sizes.merges)
    return WordPieces(merges), merges


def dino(sizes: Sizes, vocabulary: int, weights: Path, seed: int = 0) -> open_clip.model.CLIP:
    """Make a CLIP of a frozen DINOv2 and an untrained text tower."""
    vision = {
        "timm_model_name": "vit_small_patch14_dinov2",
        "timm_model_pretrained": False,
        "timm_pool": "token",
        "timm_proj": "linear",
        "timm_proj_bias": True,
        "image_size": SIDE,
    }
    architecture = sizes.architecture(vocabulary, vision_cfg=vision)
    model = new_model(open_clip.model.CLIP, architecture, seed).eval()
    trunk = model.visual.trunk
    trunk.set_input_size(img_size=SIDE)  # open_clip leaves 518
    state = {name: value.float() for name, value in load_file(weights).items()}
    trunk.load_state_dict(checkpoint_filter_fn(state, trunk), strict=False)
    model.visual.image_size = (SIDE, SIDE)
    return model


@torch.inference_mode()
def encode(trunk: nn.Module, images: np.ndarray) -> Encoded:
    """Encode images with DINOv2: the class token and 36 patches, in half precision."""
    mean, std = (
        torch.tensor(v)[:, None, None] for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    )
    tokens, ink = [], []
    for batch in np.array_split(images, -(-len(images) // 64)):
        pixels = torch.tensor(batch).movedim(3, 1).float() / 255
        tokens.append(trunk.forward_features((pixels - mean) / std).half())
        ink.append(inked(pixels, SIDE // 6))
    return Encoded(torch.cat(tokens), torch.cat(ink))


def inked(pixels: Float[Tensor, "batch 3 side side"], patch: int) -> Bool[Tensor, "batch patches"]:
    """Return the patches that are not white."""
    return F.avg_pool2d((1 - pixels).mean(1, keepdim=True), patch).flatten(1) > INK


def shares(ink: Bool[Tensor, "batch patches"]) -> Float[Tensor, "batch patches"]:
    """Return equal weights of the patches that show the emoji."""
    return ink.float() / ink.sum(1, keepdim=True).clamp(min=1)


def two_sided(logits: Tensor, fits: Tensor) -> Tensor:
    """Return the contrastive loss with all fitting pairs as targets."""
    rows = F.cross_entropy(logits, fits / fits.sum(1, keepdim=True))
    return (rows + F.cross_entropy(logits.T, (fits / fits.sum(0)).T)) / 2


class World(NamedTuple):
    """Emoji, one split of their concepts, and DINOv2's tokens."""

    emoji: Emoji
    part: np.ndarray
    encoded: Encoded

    def images(self, *, held: bool, seen: bool) -> np.ndarray:
        """Return the positions of images, by whether concept and style are held out."""
        styles = np.array([style.seen for style in STYLES.values()])
        return np.flatnonzero(
            ((self.part[self.emoji.concept] != PRETRAINING) == held)
            & (styles[self.emoji.style] == seen)
        )


class Pairs:
    """Batches of images, as features of DINOv2, and captions.

    Args:
        world: Emoji of the seen styles and of the concepts that are not held out are drawn.
        seed: Seed of the batches, the noise and the words.
    """

    def __init__(self, world: World, seed: int) -> None:
        emoji, where = world.emoji, world.images(held=False, seen=True)
        self.texts = Texts(emoji, world.part)
        self.draw, self.noise = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
        self.pooled = world.encoded.tokens[:, 0].float()
        self.patches = world.encoded.foreground()
        self.mean = self.pooled[where].mean(0)
        self.spread = (self.pooled[where] - self.mean).std()
        self.style = [list(STYLES)[number] for number in emoji.style]
        known = np.unique(emoji.concept[where])
        self.owned = {concept: where[emoji.concept[where] == concept] for concept in known}

    def batch(self) -> tuple[Tensor, list[str], Tensor]:
        """Return features with noise, captions, and which of them fit.

        For three images in ten the mean of the patches takes the place of the pooled token, so that
        patches are in the space of the texts.
        """
        shown = self.draw.choice(list(self.owned), BATCH, replace=False)
        images = np.array([self.draw.choice(self.owned[concept]) for concept in shown])
        written = [
            self.texts.caption(concept, self.style[image], self.draw)
            for concept, image in zip(shown, images, strict=True)
        ]
        parts = torch.rand(BATCH, 1, generator=self.noise) < 0.3
        x = torch.where(parts, self.patches[images], self.pooled[images]) - self.mean
        x = x + 0.3 * self.spread * torch.randn(x.shape, generator=self.noise)
        x = x * (torch.rand(x.shape, generator=self.noise) > 0.1) / 0.9
        captions, words = (list(side) for side in zip(*written, strict=True))
        return x, captions, self.texts.fits(shown, words)


def train_text(
    model: open_clip.model.CLIP, tokenize: WordPieces, world: World, steps: int, seed: int = 0
) -> None:
    """Train the text tower and the projection of the images in place."""
    pairs, project = Pairs(world, seed), model.visual.head.proj
    nn.init.normal_(project.weight, std=0.05, generator=pairs.noise)

    def loss(step: int) -> Tensor:
        features, captions, fits = pairs.batch()
        image = F.normalize(features @ project.weight.T, dim=-1)
        text = F.normalize(_text(model, tokenize, captions), dim=-1)
        scale = model.logit_scale.exp().clamp(max=100)
        matched = two_sided(scale * image @ text.T, fits)
        if step % 2:
            return matched
        return matched + 0.5 * dictionary_loss(model, tokenize, pairs.texts, pairs.draw)

    take_steps(_groups(model, project), loss, steps, learning_rate=1e-3, warm_up=0.3)
    with torch.no_grad():
        project.bias.copy_(-project.weight @ pairs.mean)


def dictionary_loss(
    model: open_clip.model.CLIP, tokenize: WordPieces, texts: Texts, draw: np.random.Generator
) -> Tensor:
    """Match names with keywords, over all concepts and without images."""
    drawn = draw.choice(len(texts.names), BATCH, replace=False)
    entries = [texts.entry(concept, draw) for concept in drawn]
    written = [texts.form(word, draw) for side in zip(*entries, strict=True) for word in side]
    names, words = F.normalize(_text(model, tokenize, written), dim=-1).split(BATCH)
    return two_sided(20 * names @ words.T, texts.fits(drawn, [word for _, word in entries]))


def _text(model: open_clip.model.CLIP, tokenize: WordPieces, texts: list[str]) -> Tensor:
    """Encode texts in their length, in less time than `model.encode_text` in the full length."""
    tokens = tokenize(texts, LENGTH)
    tokens = tokens[:, : (length := int((tokens != 0).sum(1).max()))]
    embedded = model.token_embedding(tokens) + model.positional_embedding[:length]
    mask = model.attn_mask[:length, :length]
    hidden = model.ln_final(model.transformer(embedded, attn_mask=mask))
    return hidden[torch.arange(len(tokens)), tokens.argmax(1)] @ model.text_projection


def _groups(model: open_clip.model.CLIP, project: nn.Linear) -> list[dict[str, Any]]:
    """Decay the projection most, word embeddings least, and the scale not at all."""
    text = {name: p for name, p in model.named_parameters() if not name.startswith("visual.")}
    scale, words = text.pop("logit_scale"), text.pop("token_embedding.weight")
    return [
        {"params": list(text.values()), "weight_decay": 0.05},
        {"params": [words], "weight_decay": 0.02},
        {"params": [scale], "weight_decay": 0.0},
        {"params": [project.weight], "weight_decay": 0.1},
    ]


def shrunk(images: np.ndarray) -> Float[Tensor, "images 3 32 32"]:
    """Return images of the small network, in [0, 1]."""
    parts = np.array_split(images, -(-len(images) // 256))
    pixels = (torch.tensor(part).movedim(3, 1).float() / 255 for part in parts)
    size = {"size": (SMALL, SMALL), "mode": "bilinear", "antialias": True}
    return torch.cat([F.interpolate(part, **size).clamp(0, 1) for part in pixels])


def changed(images: Tensor, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Turn, scale, mirror, shift and recolor images; return them and their affine maps."""
    count = len(images)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(count, *shape, generator=draw)

    angle, scale = uniform(-0.25, 0.25), uniform(0.85, 1.35)
    mirror = torch.where(uniform(0, 1) < 0.5, -1.0, 1.0)
    affine = torch.stack(
        [angle.cos() * scale * mirror, -angle.sin() * scale, uniform(-0.15, 0.15),
         angle.sin() * scale * mirror, angle.cos() * scale, uniform(-0.15, 0.15)], -1
    ).view(count, 2, 3)  # fmt: skip
    grid = F.affine_grid(affine, list(images.shape), align_corners=False)
    turned = 1 - F.grid_sample(1 - images, grid, align_corners=False)  # outside is white
    gray, color = turned.mean(1, keepdim=True), uniform(0, 1.4, 1, 1, 1)
    color = color * (uniform(0, 1, 1, 1, 1) > 0.2)
    turned = gray + (turned - gray) * color
    if torch.rand((), generator=draw) < 0.15:
        turned = turned[:, torch.randperm(3, generator=draw)]
    return (turned * uniform(0.8, 1.2, 1, 1, 1)).clamp(0, 1), affine


class Targets(NamedTuple):
    """Unit features of the teacher: images, their patches, and the names of their concepts."""

    images: Float[Tensor, "images dim"]
    patches: Float[Tensor, "images dim 6 6"]
    names: Float[Tensor, "images dim"]


@torch.no_grad()
def targets(
    teacher: open_clip.model.CLIP, tokenize: WordPieces, world: World, where: np.ndarray
) -> Targets:
    """Compute the features that the small image tower learns."""
    texts = Texts(world.emoji, world.part).names
    forms = [_text(teacher, tokenize, [form.format(name) for name in texts]) for form in FORMS]
    names = F.normalize(sum(F.normalize(form, dim=-1) for form in forms), dim=-1)
    project = teacher.visual.head.proj
    features = [
        F.normalize(project(part.float()), dim=-1)
        for part in world.encoded.tokens[where].split(512)
    ]
    tokens = torch.cat(features)
    patches = tokens[:, 1:].movedim(2, 1).unflatten(2, (6, 6))
    return Targets(tokens[:, 0], patches, names[world.emoji.concept[where]])


def distill(
    model: open_clip.model.CLIP,
    images: Tensor,
    concepts: Tensor,
    goal: Targets,
    steps: int,
    seed: int = 0,
) -> None:
    """Train a small image tower in place: its pooled token and its patches follow the teacher's."""
    draw = torch.Generator().manual_seed(seed)

    def loss(step: int) -> Tensor:
        batch = torch.randint(len(images), (BATCH,), generator=draw)
        pixels, affine = changed(images[batch], draw)
        pooled, patches = (F.normalize(x, dim=-1) for x in fp.image_tokens(model, pixels - 0.5))
        share = shares(inked(pixels, 4))
        shown = F.normalize(torch.einsum("bp,bpd->bd", share, patches), dim=-1)
        fits = (concepts[batch][:, None] == concepts[batch]).float()
        fits = fits / fits.sum(1, keepdim=True)
        found = torch.zeros(())
        for feature in (pooled, shown):
            found = found + F.cross_entropy(20 * feature @ goal.names[batch].T, fits)
            found = found + F.cross_entropy(20 * feature @ goal.images[batch].T, fits)
        found = found + 5 * (1 - (pooled * goal.images[batch]).sum(1)).mean()
        grid = F.affine_grid(affine, [BATCH, 1, 8, 8], align_corners=False)
        moved = F.grid_sample(goal.patches[batch], grid, padding_mode="border", align_corners=False)
        same = F.cosine_similarity(patches, moved.flatten(2).mT, dim=-1)
        return found + 2 * (share * (1 - same)).sum(1).mean()

    take_steps([*model.visual.parameters()], loss, steps, learning_rate=1.5e-3, warm_up=0.1)


@torch.no_grad()
def zero_shot(
    model: open_clip.model.CLIP,
    tokenize: WordPieces,
    features: Tensor,
    world: World,
    where: np.ndarray,
) -> float:
    """Return the balanced zero-shot accuracy over the classes, in percent."""
    found = division()
    label = found.labels(world.emoji.table)[world.emoji.concept[where]]
    written = [FORMS[0].format(f"a {name}") for name in found.classes]
    text = F.normalize(_text(model, tokenize, written), dim=-1)
    right = (F.normalize(features[where], dim=-1) @ text.T).argmax(1).numpy() == label
    return 100 * float(np.mean([right[label == k].mean() for k in range(len(found.classes))]))


def build(
    world: World, weights: Path
) -> tuple[open_clip.model.CLIP, dict[str, Any], tuple[str, ...], float]:
    """Train a text tower on DINOv2, distill the small image tower, and measure it."""
    tokenize, merges = tokenizer(world.emoji, TINY)
    teacher = dino(TINY, tokenize.size, weights)
    train_text(teacher, tokenize, world, TINY.steps)
    architecture = TINY.architecture(tokenize.size, vision_cfg=TINY_VISION)
    model = new_model(open_clip.model.CLIP, architecture, 0).eval()
    state = teacher.state_dict()
    text = {name: state[name] for name in state if not name.startswith("visual.")}
    model.load_state_dict(text, strict=False)
    images, where = shrunk(world.emoji.images), world.images(held=False, seen=True)
    concepts = torch.tensor(world.emoji.concept[where])
    distill(model, images[where], concepts, targets(teacher, tokenize, world, where), TINY_STEPS)
    with torch.no_grad():
        pooled = torch.cat([fp.image_tokens(model, part - 0.5)[0] for part in images.split(256)])
    tested = world.images(held=True, seen=True)
    return model, architecture, merges, zero_shot(model, tokenize, pooled, world, tested)


def main() -> None:
    """Train the network, and write it."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="file of emoji.py")
    parser.add_argument("--weights", type=Path, required=True, help="vit_small_patch14_dinov2")
    parser.add_argument("--out", type=Path, default=Path("out"))
    arguments = parser.parse_args()
    emoji = load(arguments.file)
    trunk = dino(TINY, 100, arguments.weights).visual.trunk
    world = World(emoji, division().part(emoji.table, 0), encode(trunk, emoji.images))
    model, architecture, merges, found = build(world, arguments.weights)
    path = arguments.out / "clip.safetensors"
    save(model, path, architecture, found / 100, merges=json.dumps(merges), recipe=RECIPE)


if __name__ == "__main__":
    main()
