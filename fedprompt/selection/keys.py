"""The keys themselves: their initial values, their loss, and the module that owns and counts them."""

import inspect

import torch
import torch.nn as nn
from jaxtyping import Float, Integer, Real
from torch import Tensor

from fedprompt._checks import (
    check_count,
    check_generator,
    check_labels,
    kind,
    wrong_type,
    wrong_value,
)
from fedprompt.interfaces import PromptSelector, Selection
from fedprompt.selection._cosine import check_counts, check_pair, unit
from fedprompt.selection.nearest import select_nearest


def key_loss(
    query: Float[Tensor, "batch dim"],
    keys: Float[Tensor, "groups dim"],
    indices: Integer[Tensor, " batch"],
) -> Float[Tensor, ""]:
    r"""Pull each chosen key towards the queries that chose it: :math:`-\tfrac 1B \sum_i \cos(h_i, k_{g_i})`.

    No gradient flows into the queries, and only rows that were chosen get one; it is orthogonal to the key, because length does not matter.

    Args:
        query: Features of the unprompted backbone.
        keys: One for each group.
        indices: Which key each query chose; range looked at on a CPU only, because looking costs a sync on a GPU.

    Returns:
        The mean, in float32 at least; SGPT adds it to the cross-entropy with weight 1.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If shapes or devices disagree; on a CPU, also if an index lies outside the groups or an entry is NaN or infinite.

    Example:
        >>> key_loss(torch.tensor([[3.0, 0.0], [0.0, 1.0]]), torch.eye(2), torch.tensor([0, 0]))
        tensor(-0.5000)

    References:
        Deng et al., "Unlocking the Potential of Prompt-Tuning in Bridging Generalized and Personalized Federated Learning" (SGPT),
        CVPR 2024, Eq. 11.
    """
    check_pair(query, keys)
    check_labels("indices", indices, len(keys), sync=False)
    if len(indices) != len(query):
        raise wrong_value(
            "indices", f"have one entry for each of {len(query)} queries", len(indices)
        )
    return -(unit(query.detach()) * unit(keys[indices.long()])).sum(1).mean()


def orthogonal_keys(
    num_groups: int, dim: int, *, generator: torch.Generator | None = None
) -> Float[Tensor, "groups dim"]:
    """Draw keys of length 1 that are orthogonal to one another.

    Args:
        num_groups: How many; at most `dim`.
        dim: Width of a query.
        generator: None uses torch's global one.

    Returns:
        The keys, uniform among all such frames.

    Raises:
        TypeError: If a number is not an integer.
        ValueError: If a number is below 1, or there are more groups than dimensions.

    Example:
        >>> keys = orthogonal_keys(3, 8)
        >>> torch.allclose(keys @ keys.T, torch.eye(3), atol=1e-6)
        True
    """
    check_count("num_groups", num_groups)
    check_count("dim", dim)
    if generator is not None:
        check_generator(generator)
    if num_groups > dim:
        raise wrong_value(
            "num_groups",
            f"be at most `dim` {dim}, beyond which keys cannot be orthogonal",
            num_groups,
        )
    device = None if generator is None else generator.device
    return nn.init.orthogonal_(torch.empty(num_groups, dim, device=device), generator=generator)


class SelectionKeys(nn.Module):
    """Learnable keys, with counts of how often each key was chosen.

    In training mode a call selects by the sum of two counts: the server's at the start of the
    round, and the client's since then. It then counts its choices. In eval mode a call is
    :func:`select_nearest` without counts, and counts nothing. A client never sees the choices
    that other clients make in the same round, so the result does not depend on their order.

    In each round a client loads the keys, calls ``start_round`` with the server's counts, trains,
    and sends ``collect(model, weight=..., rows={"selector.keys": selector.counts})``. The server
    adds the weights of the mean to its counts.

    Args:
        num_groups: Number of keys; at most `dim`.
        dim: Width of a query, ``trunk.dim``.
        selector: Selects in training mode, with its options bound, such as
            ``partial(select_balanced, solver=exact)``.
        generator: For the initial values, :func:`orthogonal_keys`; None uses torch's global one.

    Attributes:
        keys: Parameter (groups, dim).
        usage: Buffer (groups,), the server's counts at the start of the round.
        counts: Buffer (groups,), int64, this module's own choices since then. ``collect`` never sends a buffer by itself.

    Raises:
        TypeError: If `selector` cannot be called with queries, keys and `usage` alone.
        ValueError: If there are more groups than dimensions.

    Example:
        >>> selector = SelectionKeys(2, 4)
        >>> selector.start_round(torch.tensor([0.0, 0.0]))
        >>> selector(selector.keys.detach()).indices, selector.counts
        (tensor([0, 1]), tensor([1, 1]))
    """

    keys: nn.Parameter
    usage: Tensor
    counts: Tensor

    def __init__(
        self,
        num_groups: int,
        dim: int,
        *,
        selector: PromptSelector = select_nearest,
        generator: torch.Generator | None = None,
    ) -> None:
        _check_selector(selector)
        super().__init__()
        self.keys = nn.Parameter(orthogonal_keys(num_groups, dim, generator=generator))
        self.selector = selector
        self.register_buffer("usage", torch.zeros(num_groups, device=self.keys.device))
        self.register_buffer(
            "counts", torch.zeros(num_groups, dtype=torch.int64, device=self.keys.device)
        )

    @torch.no_grad()
    def start_round(self, usage: Real[Tensor, " groups"]) -> None:
        """Take the server's counts and forget the own ones.

        Args:
            usage: How often each group was chosen so far, by all clients together, in the unit of `counts`.

        Raises:
            TypeError: If `usage` is no tensor of counts.
            ValueError: If it does not have one finite count of at least 0 for each group; nothing changes then.
        """
        check_counts("usage", usage, len(self.keys), sync=True)
        self.usage.copy_(usage)
        self.counts.zero_()

    def forward(self, query: Float[Tensor, "batch dim"]) -> Selection:
        """Choose for each query; in training mode, count."""
        keys = self.keys.detach()
        if not self.training:
            return select_nearest(query, keys)
        selection = self.selector(query, keys, usage=self.usage + self.counts)
        self.counts.index_add_(0, selection.indices, torch.ones_like(selection.indices))
        return selection

    def extra_repr(self) -> str:
        """Show sizes."""
        num_groups, dim = self.keys.shape
        return f"{num_groups}, {dim}"


def _check_selector(selector: object) -> None:
    """Require a callable that needs nothing but queries, keys and counts."""
    rule = "take (query, keys, usage=...), with all other options bound"
    if not callable(selector):
        raise wrong_type("selector", rule, kind(selector))
    try:
        inspect.signature(selector).bind(None, None, usage=None)
    except ValueError:  # a built-in function can lack a signature
        return
    except TypeError as error:
        name = getattr(selector, "__name__", type(selector).__name__)
        raise wrong_type("selector", rule, f"{name}: {error}") from None
