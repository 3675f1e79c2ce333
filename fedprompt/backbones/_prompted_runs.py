"""Runs of a trunk with prompts at every layer, written out for the check of a trunk."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedprompt.interfaces import Trunk


class PromptedRuns:
    """Runs of one trunk, with prompts that are the same in all of them."""

    def __init__(self, trunk: Trunk, images: Tensor) -> None:
        self.trunk, self.images = trunk, images

    def features(self, num_prompts: int = 0, *, images: Tensor | None = None) -> Tensor:
        """Return the features of images, with `num_prompts` prompts before each block."""
        images = self.images if images is None else images
        return self.run(images, self.prompts(num_prompts) if num_prompts else [])

    def run(self, images: Tensor, prompts: Sequence[Tensor]) -> Tensor:
        """Run the trunk with the prompts of each layer in place of those before, or without any."""
        trunk = self.trunk
        inside = 0
        tokens, context = trunk.embed(images)
        for layer in range(trunk.depth):
            if prompts:
                tokens = inserted(tokens, prompts[layer], trunk.prefix, inside)
                inside = prompts[layer].shape[0]
            tokens = trunk.block(layer, tokens, context, inside)
        rest = tokens[:, trunk.prefix + inside :]
        return trunk.pool(torch.cat([tokens[:, : trunk.prefix], rest], 1))

    def prompts(self, count: int, tokens: Tensor | None = None) -> list[Tensor]:
        """Draw the same prompts in every call, as large as the tokens of the images."""
        if tokens is None:
            with torch.no_grad():
                tokens, _ = self.trunk.embed(self.images)
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randn(self.trunk.depth, count, self.trunk.dim, generator=generator)
        return list((drawn.to(tokens) * tokens.std()).detach())


def inserted(tokens: Tensor, prompts: Tensor, prefix: int, inside: int) -> Tensor:
    """Put prompts (prompts, dim) right after the prefix, in place of the `inside` ones there."""
    new = prompts.expand(tokens.shape[0], -1, -1)
    return torch.cat([tokens[:, :prefix], new, tokens[:, prefix + inside :]], 1)
