"""Text contexts of low rank, for the private part of a client."""

import torch
import torch.nn as nn
from jaxtyping import Float
from torch import Tensor

import fedprompt._refusals as check
from fedprompt.prompts._streams import normal_values


class LowRankContext(nn.Module):
    r"""Learnable contexts of low rank, which are zero at the start (FedPGP, DP-FPL).

    .. math:: \Delta_k = L_k R_k, \qquad L_k \in \mathbb R^{n \times r},\;
        R_k \in \mathbb R^{r \times d}

    A client adds its private low-rank context to the shared one: ``shared() + private()``. The left
    factors are drawn from :math:`N(0, 1/r)` and the right factors are zero. On average, the first
    step of SGD then equals the step of a full-rank context.

    Args:
        dim: Width of a token, ``tower.dim``.
        length: Number of tokens n of each context.
        rank: Largest rank r of each context (at least 1).
        num_contexts: Number of contexts k.
        generator: Generator of the left factors. If None, torch's global generator is used.

    Attributes:
        left: Parameter (contexts, length, rank).
        right: Parameter (contexts, rank, dim).

    Raises:
        ValueError: If a number is out of range.

    Example:
        >>> private = LowRankContext(8, length=4, rank=2)
        >>> private().shape, bool(private().any())
        (torch.Size([1, 4, 8]), False)
        >>> sum(parameter.numel() for parameter in private.parameters())  # 32 for full rank
        24

    References:
        Cui et al., "Harmonizing Generalization and Personalization in Federated Prompt Learning"
        (FedPGP), ICML 2024. Tran et al., "Privacy-Preserving Personalized Federated Prompt Learning
        for Multimodal Large Language Models" (DP-FPL), ICLR 2025.
    """

    left: nn.Parameter
    right: nn.Parameter

    def __init__(
        self,
        dim: int,
        *,
        length: int,
        rank: int,
        num_contexts: int = 1,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        check.count("dim", dim)
        check.count("length", length, at_least=0)
        check.count("rank", rank)
        check.count("num_contexts", num_contexts)
        left = normal_values((num_contexts, length, rank), rank**-0.5, generator)
        self.left = nn.Parameter(left)
        self.right = nn.Parameter(torch.zeros(num_contexts, rank, dim, device=left.device))

    def forward(self) -> Float[Tensor, "contexts length dim"]:
        """Return the contexts."""
        return self.left @ self.right

    def extra_repr(self) -> str:
        """Show the sizes."""
        num_contexts, length, rank = self.left.shape
        return f"{self.right.shape[-1]}, length={length}, rank={rank}, num_contexts={num_contexts}"
