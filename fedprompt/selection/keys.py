"""Learnable keys: their initial values, their loss, and the module that counts selections."""

from __future__ import annotations

import inspect

import torch
import torch.nn as nn
from jaxtyping import Float, Integer, Real
from torch import Tensor

import fedprompt._refusals as check
from fedprompt._cosine import unit
from fedprompt._random_streams import device_of
from fedprompt.interfaces import PromptSelector, Selection
from fedprompt.selection._inputs import check_counts, check_pair
from fedprompt.selection.nearest import select_nearest


def key_loss(
    query: Float[Tensor, "batch dim"],
    keys: Float[Tensor, "groups dim"],
    indices: Integer[Tensor, " batch"],
) -> Float[Tensor, ""]:
    r"""Compute the negative mean cosine between queries and their keys.

    .. math:: -\tfrac 1B \sum_i \cos(h_i, k_{g_i})

    Gradients flow into the selected keys only, not into the queries. The gradient of a key is
    orthogonal to it, because the cosine ignores its length.

    Args:
        query: Features of the unprompted backbone.
        keys: Keys, one for each group.
        indices: Key of each query, in [0, groups). The range is checked on CPU tensors only, to
            avoid a GPU synchronization.

    Returns:
        Scalar loss, in float32 at least; 0 for an empty batch. SGPT adds it to the cross-entropy
        with factor 1.

    Raises:
        ValueError: If shapes or devices disagree. On a CPU, also if an index lies outside its range
            or an entry is NaN or infinite.

    Example:
        >>> key_loss(torch.tensor([[3.0, 0.0], [0.0, 1.0]]), torch.eye(2), torch.tensor([0, 0]))
        tensor(-0.5000)

    References:
        Deng et al., "Unlocking the Potential of Prompt-Tuning in Bridging Generalized and
        Personalized Federated Learning" (SGPT), CVPR 2024, Eq. 11.
    """
    check_pair(query, keys)
    check.labels("indices", indices, len(keys), size=len(query), of="queries", sync=False)
    check.same_device("indices", indices, keys.device, or_cpu=True)
    cosine = (unit(query.detach()) * unit(keys[indices.long()])).sum(1)
    return -(cosine.mean() if len(cosine) else cosine.sum())


def orthogonal_keys(
    num_groups: int, dim: int, *, generator: torch.Generator | None = None
) -> Float[Tensor, "groups dim"]:
    """Draw keys of length 1 that are orthogonal to one another.

    Args:
        num_groups: Number of keys, at least 1 and at most `dim`.
        dim: Width of a query, at least 1.
        generator: Source of randomness. If None, torch's global generator is used.

    Returns:
        Keys from the uniform distribution over such sets.

    Example:
        >>> keys = orthogonal_keys(3, 8)
        >>> torch.allclose(keys @ keys.T, torch.eye(3), atol=1e-6)
        True
    """
    check.count("dim", dim)
    of = "`dim`, because more keys cannot be orthogonal"
    check.count("num_groups", num_groups, at_most=dim, of=of)
    device = device_of(generator)
    return nn.init.orthogonal_(torch.empty(num_groups, dim, device=device), generator=generator)


class SelectionKeys(nn.Module):
    """Learnable keys, with counts of how often each key was chosen.

    In training mode a call selects by the sum of two counts: the server's at the start of the
    round, and, with `live`, the client's since then. It then counts its choices. In eval mode a
    call is :func:`select_nearest` without counts, and counts nothing. Choices of other clients in
    the same round have no influence.

    In each round a client loads the keys, calls ``start_round`` with the server's counts, trains,
    and sends ``collect(model, weight=..., rows={"selector.keys": selector.counts})``. The server
    adds the weights of the mean to its counts.

    Args:
        num_groups: Number of keys; at most `dim`.
        dim: Width of a query, ``trunk.dim``.
        selector: Selection rule in training mode, with its options bound, such as
            ``partial(select_balanced, solver=exact)``. If None, :func:`select_nearest`.
        live: Whether a client's choices of this round count in its next choice. If not, counts
            change between rounds only.
        generator: Source of the initial values, which :func:`~fedprompt.selection.orthogonal_keys`
            draws. If None, torch's global generator is used.

    Attributes:
        keys: Parameter (groups, dim).
        usage: Buffer (groups,), the server's counts at the start of the round.
        counts: Buffer (groups,), int64, the choices of this module since then. ``collect`` sends
            no buffers, so pass the counts in `rows`.

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
        selector: PromptSelector | None = None,
        live: bool = True,
        generator: torch.Generator | None = None,
    ) -> None:
        selector = select_nearest if selector is None else selector
        _check_selector(selector)
        check.flag("live", live)
        super().__init__()
        self.keys = nn.Parameter(orthogonal_keys(num_groups, dim, generator=generator))
        self.selector, self.live = selector, live
        unused = torch.zeros(num_groups, device=self.keys.device)
        self.register_buffer("usage", unused)
        self.register_buffer("counts", unused.long())

    @torch.no_grad()
    def start_round(self, usage: Real[Tensor, " groups"]) -> None:
        """Store the server's counts and reset this module's counts to 0.

        Args:
            usage: Number of previous selections of each group by all clients, in samples.

        Raises:
            ValueError: If there is not one finite count of at least 0 for each group. The module
                is then unchanged.
        """
        check_counts("usage", usage, len(self.keys), sync=True)
        self.usage.copy_(usage)
        self.counts.zero_()

    def forward(self, query: Float[Tensor, "batch dim"]) -> Selection:
        """Select a key for each query. In training mode, count the selections."""
        keys = self.keys.detach()
        if not self.training:
            return select_nearest(query, keys)
        usage = self.usage + self.counts if self.live else self.usage
        selection = self.selector(query, keys, usage=usage)
        check.instance("selector", selection, Selection, "return a Selection")
        self.counts.index_add_(0, selection.indices, torch.ones_like(selection.indices))
        return selection

    def extra_repr(self) -> str:
        """Show the number of groups and the width."""
        num_groups, dim = self.keys.shape
        return f"{num_groups}, {dim}"


def _check_selector(selector: PromptSelector) -> None:
    """Require a callable that needs only queries, keys and counts."""
    rule = "take (query, keys, usage=...), with all other options bound"
    check.function("selector", selector, rule)
    try:
        inspect.signature(selector).bind(None, None, usage=None)
    except ValueError:  # some built-in functions have no signature
        return
    except TypeError as error:
        name = getattr(selector, "__name__", type(selector).__name__)
        raise check.wrong_type("selector", rule, f"{name}: {error}") from None
