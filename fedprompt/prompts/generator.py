"""Prompts that are generated from keys, such as class names or the description of a client."""

import torch
import torch.nn as nn
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

import fedprompt._checks as check
from fedprompt.prompts._arguments import normal_values


class PromptGenerator(nn.Module):
    r"""Cross-attention from learned queries to keys, which gives prompts for each sample.

    .. math:: P = Q + \mathrm{softmax}\bigl(Q W_q (K W_k)^\top / \sqrt{d_h}\bigr)\, K W_v W_o

    The softmax is computed in each head of width :math:`d_h`. The queries Q are common to all
    samples, and the keys K differ; their order does not matter. FedTPG attends to class names,
    FedMVP to image tokens and attributes. FedTPG adds layer norms and a feed-forward layer, and
    omits the sum with Q. In pFedPG, a description of the client is the query.

    The result has shape (batch, prompts, dim). In a vision transformer it enters as
    ``PromptStream({0: result})``. :func:`prompted_text` accepts a result of batch 1 as one context,
    and ``result[:, None]`` with ``per_sample=True``.

    Args:
        num_prompts: Number of prompts for each sample.
        dim: Width of a prompt, ``trunk.dim`` or ``tower.dim``.
        key_dim: Width of a key.
        num_heads: Number of heads; divides `dim`.
        generator: Generator of the initial values. If None, torch's global generator is used.

    Attributes:
        queries: Parameter (prompts, dim), from :math:`N(0, 0.02^2)`.
        query, key, value, output: Linear maps without bias, from Xavier's uniform distribution.

    Raises:
        ValueError: If a number is out of range, or `num_heads` does not divide `dim`.

    Example:
        Each of five samples has three keys of width 6.

        >>> prompts = PromptGenerator(4, 8, key_dim=6)
        >>> prompts(torch.randn(5, 3, 6)).shape
        torch.Size([5, 4, 8])

    References:
        Qiu et al., "Federated Text-driven Prompt Generation for Vision-Language Models" (FedTPG),
        ICLR 2024. Yang et al., "Efficient Model Personalization in Federated Learning via
        Client-Specific Prompt Generation" (pFedPG), ICCV 2023.
    """

    queries: nn.Parameter

    def __init__(
        self,
        num_prompts: int,
        dim: int,
        *,
        key_dim: int,
        num_heads: int = 4,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        check.count("num_prompts", num_prompts, at_least=0)
        check.count("dim", dim)
        check.count("key_dim", key_dim)
        check.count("num_heads", num_heads)
        if dim % num_heads:
            raise check.wrong("num_heads", f"divide `dim` {dim}", num_heads)
        self.queries = nn.Parameter(normal_values((num_prompts, dim), 0.02, generator))
        self.num_heads = num_heads
        self.query = _linear(dim, dim, generator)
        self.key = _linear(key_dim, dim, generator)
        self.value = _linear(key_dim, dim, generator)
        self.output = _linear(dim, dim, generator)

    def forward(
        self, keys: Float[Tensor, "batch keys key_dim"]
    ) -> Float[Tensor, "batch prompts dim"]:
        """Return the prompts of each sample.

        Args:
            keys: Keys of each sample (at least one). They are cast to the dtype of the parameters.
        """
        keys = self._checked(keys)
        query = rearrange(self.query(self.queries), "p (h d) -> h p d", h=self.num_heads)
        key, value = (
            rearrange(project(keys), "b k (h d) -> b h k d", h=self.num_heads)
            for project in (self.key, self.value)
        )
        attention = (query @ key.mT * query.shape[-1] ** -0.5).softmax(-1)
        mixed: Tensor = self.output(rearrange(attention @ value, "b h p d -> b p (h d)"))
        return self.queries + mixed

    def _checked(self, keys: object) -> Tensor:
        key_dim = self.key.in_features
        shape = f"(batch, keys, {key_dim})"
        if not isinstance(keys, Tensor) or not keys.is_floating_point():
            raise check.wrong_type("keys", f"be floating-point of shape {shape}", check.kind(keys))
        if keys.ndim != 3 or keys.shape[2] != key_dim or keys.shape[1] == 0:
            raise check.wrong("keys", f"have shape {shape}, at least one key", tuple(keys.shape))
        return keys.to(self.queries.dtype)

    def extra_repr(self) -> str:
        """Show the sizes."""
        num_prompts, dim = self.queries.shape
        return f"{num_prompts}, {dim}, key_dim={self.key.in_features}, num_heads={self.num_heads}"


def _linear(width: int, dim: int, generator: torch.Generator | None) -> nn.Linear:
    """Make a linear map without bias; torch's global generator is not used if one is given."""
    device = torch.get_default_device() if generator is None else generator.device
    made = nn.Linear(width, dim, bias=False, device="meta").to_empty(device=device)
    nn.init.xavier_uniform_(made.weight, generator=generator)
    return made
