"""A trunk written by hand, and trunks with one mistake each."""

import copy

import torch
import torch.nn as nn

from fedprompt import freeze


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 16), nn.GELU(), nn.Linear(16, dim))

    def forward(self, tokens, mask):
        normed = self.norm1(tokens)
        tokens = tokens + self.attention(normed, normed, normed, attn_mask=mask)[0]
        return tokens + self.mlp(self.norm2(tokens))


class PlainTrunk:
    """Trunk of a plain transformer with a class token, a mask and a batch norm in front."""

    def __init__(self, dim=8, depth=2, patch=4, patches=16):
        self.prefix, self.dim, self.depth = 1, dim, depth
        self.num_features, self.patch_size = dim, patch
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = freeze(nn.Module())
            self.model.norm_images = nn.BatchNorm2d(3)
            self.model.embedding = nn.Conv2d(3, dim, patch, patch)
            self.model.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
            self.model.norm = nn.LayerNorm(dim)
            self.model.class_token = nn.Parameter(torch.randn(1, 1, dim))
            self.model.positions = nn.Parameter(torch.randn(1, patches, dim))
            self.mask = torch.randn(patches + 1, patches + 1)
        freeze(self.model)

    def __deepcopy__(self, memo):
        return self

    def embed(self, images):
        patches = self.model.embedding(self.model.norm_images(images)).flatten(2).mT
        first = self.model.class_token.expand(len(images), -1, -1)
        return torch.cat([first, patches + self.model.positions], 1), self.mask

    def padded(self, mask, num_prompts):
        size = len(mask) + num_prompts
        kept = [0, *range(1 + num_prompts, size)]
        padded = torch.zeros(size, size, dtype=mask.dtype)
        padded[torch.tensor(kept)[:, None], torch.tensor(kept)] = mask
        return padded

    def block(self, layer, tokens, context, num_prompts):
        return self.model.blocks[layer](tokens, self.padded(context, num_prompts))

    def normalize(self, tokens):
        return self.model.norm(tokens)

    def pool(self, tokens):
        return self.model.norm(tokens)[:, 0]

    def forward(self, images):
        """Run the model without prompts."""
        tokens, mask = PlainTrunk.embed(self, images)
        for block in self.model.blocks:
            tokens = block(tokens, mask)
        return self.model.norm(tokens)[:, 0]


class PromptsBeforeTheClassToken(PlainTrunk):
    """Blocks put the class token behind the prompts."""

    def block(self, layer, tokens, context, num_prompts):
        tokens = super().block(layer, tokens, context, num_prompts)
        order = [*range(1, 1 + num_prompts), 0, *range(1 + num_prompts, tokens.shape[1])]
        return tokens[:, order]


class CachedMask(PlainTrunk):
    """The mask of the first call is used for any number of prompts."""

    cached = None

    def padded(self, mask, num_prompts):
        if self.cached is None:
            self.cached = super().padded(mask, num_prompts)
        return self.cached


class CachedMaskWithPrompts(CachedMask):
    """The first mask with prompts is used whenever its size fits."""

    def padded(self, mask, num_prompts):
        if not num_prompts:
            return PlainTrunk.padded(self, mask, 0)
        if self.cached is not None and len(self.cached) == len(mask) + num_prompts:
            self.cached = self.cached * 1.5  # drifts
            return self.cached
        self.cached = PlainTrunk.padded(self, mask, num_prompts)
        return self.cached


class CachedBatch(PlainTrunk):
    """The class tokens of the first batch are used for any other."""

    first = None

    def embed(self, images):
        tokens, mask = super().embed(images)
        self.first = tokens[:, :1] if self.first is None else self.first
        return torch.cat([self.first, tokens[:, 1:]], 1), mask


class PaddedImages(PlainTrunk):
    """Images are padded to whole patches."""

    def embed(self, images):
        height, width = images.shape[2:]
        return super().embed(nn.functional.pad(images, (0, -width % 4, 0, -height % 4)))


class MaskPaddedAtTheEnd(PlainTrunk):
    def padded(self, mask, num_prompts):
        return nn.functional.pad(mask, (0, num_prompts, 0, num_prompts))


class PositionsForPrompts(PlainTrunk):
    def block(self, layer, tokens, context, num_prompts):
        shift = torch.zeros_like(tokens)
        shift[:, 1 : 1 + num_prompts, 0] = torch.arange(num_prompts) / 10
        return super().block(layer, tokens + shift, context, num_prompts) - shift


class MixedSamples(PlainTrunk):
    def pool(self, tokens):
        pooled = super().pool(tokens)
        return pooled - 0.1 * pooled.mean(0)


class WithoutGradients(PlainTrunk):
    def block(self, layer, tokens, context, num_prompts):
        if layer == 0:
            return super().block(layer, tokens, context, num_prompts).detach()
        return super().block(layer, tokens, context, num_prompts)


class Detached(nn.Identity):
    def forward(self, tokens):
        return tokens.detach()


class WithoutGradientsOfAPart(PlainTrunk):
    """A module in a block has no backward pass; gradients pass beside it."""

    def __init__(self):
        super().__init__()
        self.model.blocks[0].mlp.append(Detached().eval())


class ReadsOnePrompt(PlainTrunk):
    """Only the first prompt of the first layer has gradients."""

    def block(self, layer, tokens, context, num_prompts):
        if layer == 0:
            first, others, rest = tokens.split(
                [2, num_prompts, tokens.shape[1] - 2 - num_prompts], 1
            )
            tokens = torch.cat([first, others.detach(), rest], 1)
        return super().block(layer, tokens, context, num_prompts)


class OneGradientIsNaN(PlainTrunk):
    """The gradient of one prompt of the first layer is NaN."""

    def block(self, layer, tokens, context, num_prompts):
        nothing = (0 * tokens[:, 1]).sum().sqrt() if layer == 0 else 0
        return super().block(layer, tokens, context, num_prompts) + nothing


class WritesIntoTheModel(PlainTrunk):
    def __init__(self):
        super().__init__()
        self.model.register_buffer("seen", torch.zeros(()))

    def embed(self, images):
        self.model.seen += len(images)
        return super().embed(images)


class WritesIntoTheImages(PlainTrunk):
    def embed(self, images):
        tokens = super().embed(images)
        images.zero_()
        return tokens


class NotShared(PlainTrunk):
    def __deepcopy__(self, memo):
        return copy.copy(self)


class AnotherModel(PlainTrunk):
    def pool(self, tokens):
        return tokens[:, 0]


class NormalizeIsTheIdentity(PlainTrunk):
    def normalize(self, tokens):
        return tokens


def changed(**parts):
    """Return a maker of a right trunk with other attributes; None deletes one."""

    def make():
        trunk = PlainTrunk()
        for name, value in parts.items():
            setattr(trunk, name, value) if value is not None else delattr(trunk, name)
        return trunk

    return make


def in_training():
    trunk = PlainTrunk()
    trunk.model.norm_images.train()
    return trunk


def left_trainable():
    trunk = PlainTrunk()
    trunk.model.norm.requires_grad_(True)
    return trunk


# Mistakes, and the errors that name them.
WRONG = {
    "batch norm in training": (in_training, "be frozen; call freeze(model) first; got in train mo"),
    "prompts before the class token": (PromptsBeforeTheClassToken, "give prompts no positions"),
    "a prefix of 0": (changed(prefix=0), "`trunk.prefix` must be such that patches of 4 pixels"),
    "a cached mask": (CachedMask, "shape"),
    "a cached mask with prompts": (CachedMaskWithPrompts, "not depend on earlier calls"),
    "a mask that is padded at the end": (MaskPaddedAtTheEnd, "give prompts no positions"),
    "positions for prompts": (PositionsForPrompts, "give prompts no positions"),
    "mixed samples": (MixedSamples, "keep samples apart"),
    "a cached batch": (CachedBatch, "Sizes of tensors must match"),
    "no gradients": (WithoutGradients, "got no gradient of prompts at layer 0"),
    "no gradients of a part": (WithoutGradientsOfAPart, "got none in blocks.0.mlp.3"),
    "no gradients of other prompts": (ReadsOnePrompt, "got no gradient of prompts at layer 0"),
    "a gradient that is NaN": (OneGradientIsNaN, "a gradient of NaN for prompts at layer 0"),
    "left trainable": (left_trainable, "got in train mode or trainable: norm.weight, norm.bias"),
    "writes into the model": (WritesIntoTheModel, "into weights, buffers and inputs; make new"),
    "writes into the images": (WritesIntoTheImages, "got changes of inputs"),
    "not shared": (NotShared, "be shared by clients"),
    "normalizing is the identity": (NormalizeIsTheIdentity, "`trunk.normalize` must apply the no"),
    "a layer less": (changed(depth=1), "`trunk.depth` must be the number of blocks, and block 1"),
    "another dim": (changed(dim=9), "`trunk.dim` must be the width of tokens, 8; got 9"),
    "another number of features": (changed(num_features=9), "`trunk.num_features` must be the wi"),
    "another patch size": (changed(patch_size=16), "`trunk.prefix` must be such that patches of 1"),
    "no patch size": (changed(patch_size=None), "got one without patch_size"),
}
