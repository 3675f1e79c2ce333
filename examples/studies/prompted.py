"""Prompts and a linear head on a frozen transformer that all clients share."""

from argparse import Namespace

import torch
import torch.nn as nn
from torch import Tensor

import fedprompt as fp
from embedded.tasks import Backbone


def new_model(backbone: Backbone, num_classes: int, args: Namespace) -> nn.ModuleDict:
    """Make deep prompts and a head from the seed of the run."""
    torch.manual_seed(args.seed)
    prompts = fp.DeepPrompts(
        args.num_prompts, backbone.dim, backbone.encoder.depth, patch_size=backbone.patch_size
    )
    head = nn.Linear(backbone.dim, num_classes)
    return nn.ModuleDict({"prompts": prompts, "head": head}).to(args.device)


def logits(model: nn.Module, backbone: Backbone, images: Tensor) -> Tensor:
    """Classify images."""
    return model["head"](fp.encode_prompted(backbone.encoder, images, model["prompts"]()).pooled)
