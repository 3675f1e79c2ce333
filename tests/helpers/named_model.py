"""A small module with parameters and buffers of many kinds."""

import torch
import torch.nn as nn


class Model(nn.Module):
    """Module with frozen, trainable, tied and 0-dim parameters, and buffers of two dtypes."""

    def __init__(self, seed=0, dtype=torch.float32):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.keys = nn.Parameter(torch.randn(3, 2))
            self.scale = nn.Parameter(torch.randn(()))
            self.head, self.header = nn.Linear(2, 4), nn.Linear(2, 1, bias=False)
            self.encode, self.decode = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
            self.decode.weight = self.encode.weight
            self.norm = nn.BatchNorm1d(2)
            self.norm.running_mean.normal_()
        self.header.requires_grad_(False)
        self.to(dtype)


NAMES = [
    "keys", "scale", "head.weight", "head.bias", "header.weight", "encode.weight", "norm.weight",
    "norm.bias",
]  # fmt: skip


def tensors_of(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}
