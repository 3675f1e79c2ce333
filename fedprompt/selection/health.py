"""Whether keys are used, whether groups mean something, and what to do about keys that nobody chooses."""

import math

import torch
from jaxtyping import Float, Int, Integer, Real
from torch import Tensor

from fedprompt._checks import check_count, check_labels, kind, wrong_type, wrong_value
from fedprompt.selection._cosine import check_counts, check_pair, cosines, unit


def contingency_table(
    indices: Integer[Tensor, " batch"],
    labels: Integer[Tensor, " batch"],
    num_groups: int,
    num_classes: int,
) -> Int[Tensor, "groups classes"]:
    """Count how many samples of each class each group holds.

    Tables of batches and of clients add up. A client's table shows which classes it holds: that is for its own eyes, unless it agrees
    otherwise.

    Args:
        indices: The group of each sample.
        labels: The class of each sample.
        num_groups: Number of rows.
        num_classes: Number of columns.

    Returns:
        The counts, int64.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If batches differ in length, or an entry lies outside its range.

    Example:
        >>> contingency_table(torch.tensor([0, 0, 1]), torch.tensor([2, 2, 0]), num_groups=2, num_classes=3)
        tensor([[0, 0, 2],
                [1, 0, 0]])
    """
    check_count("num_groups", num_groups)
    check_count("num_classes", num_classes)
    check_labels("indices", indices, num_groups)
    check_labels("labels", labels, num_classes)
    if len(labels) != len(indices):
        raise wrong_value(
            "labels", f"have one entry for each of {len(indices)} `indices`", len(labels)
        )
    cells = torch.bincount(
        indices.long() * num_classes + labels.long(), minlength=num_groups * num_classes
    )
    return cells.reshape(num_groups, num_classes)


def selection_health(counts: Real[Tensor, "groups *classes"]) -> dict[str, float]:
    r"""Say in numbers whether keys have collapsed: a plain dict that any logger takes.

    Watch ``dead_groups`` and ``effective_groups``: a collapse shows there long before it shows in the accuracy.

    Args:
        counts: How often each group was chosen, such as ``selector.counts``, or a :func:`contingency_table`.

    Returns:
        - ``count/0``, ``count/1``, and so on, what each group holds;
        - ``dead_groups``, how many hold nothing;
        - ``largest_share``, in [0, 1], what the largest group holds of all;
        - ``entropy`` of the groups' shares in nats, and ``effective_groups``, its exponential, which is the number of groups
          when all hold the same and 1 when one holds all;
        - for a table also ``purity``, the share of samples whose class is the most frequent of their group, and ``label_overlap``, the
          mutual information of group and class divided by the mean of their entropies, 0 for independent and 1 for identical ones. Purity
          rises with the number of groups, the overlap need not.

        Before anything is counted, all but the dead groups are 0. Whatever is 0 by 0 is 0.

    Raises:
        TypeError: If `counts` is no tensor of numbers.
        ValueError: If it has no group, more than two axes, or an entry that is negative or not finite.

    Example:
        Four groups, of which one is dead and one holds half.

        >>> health = selection_health(torch.tensor([50, 25, 25, 0]))
        >>> health["dead_groups"], health["largest_share"], round(health["effective_groups"], 2)
        (1.0, 0.5, 2.83)
    """
    table = _checked_table(counts)
    sizes = table.sum(1)
    total = float(table.sum()) or 1.0
    entropy = _entropy(sizes / total)
    health = {f"count/{group}": size for group, size in enumerate(sizes.tolist())}
    health |= {
        "dead_groups": float((sizes == 0).sum()),
        "largest_share": float(sizes.max()) / total,
        "entropy": entropy,
        "effective_groups": math.exp(entropy) if sizes.any() else 0.0,
    }
    if counts.ndim == 2:
        classes = _entropy(table.sum(0) / total)
        shared = max(0.0, entropy + classes - _entropy(table / total))
        health |= {
            "purity": float(table.amax(1).sum()) / total,
            "label_overlap": 2 * shared / ((entropy + classes) or 1.0),
        }
    return health


@torch.no_grad()
def revive_keys(
    query: Float[Tensor, "batch dim"],
    keys: Float[Tensor, "groups dim"],
    *,
    usage: Real[Tensor, " groups"],
) -> Float[Tensor, "groups dim"]:
    """Put keys that nobody chooses where queries lie that no key serves well.

    Each dead key in turn becomes the query, at length 1, whose nearest key is farthest away; keys revived before it count as near. Nothing
    is drawn, and keys in use come back to the bit. Load the result on a client before it selects: a revived key then travels like any
    other, with the number of samples that chose it. It starts as one sample's query, so let it learn before it leaves the client.

    Args:
        query: Samples' queries, of one client or of public data.
        keys: One for each group.
        usage: How often each group was chosen in whatever period you mean; 0 is dead. Totals since the first round never fall back to 0.

    Returns:
        New keys in the dtype of `keys`.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If shapes or devices disagree, values are out of range, or there are fewer queries than dead keys.

    Example:
        >>> keys, query = torch.tensor([[1.0, 0.0], [0.0, -1.0]]), torch.tensor([[5.0, 0.1], [0.0, 2.0]])
        >>> revive_keys(query, keys, usage=torch.tensor([9, 0]))
        tensor([[1., 0.],
                [0., 1.]])
    """
    check_pair(query, keys)
    check_counts("usage", usage, len(keys), sync=True)
    dead = torch.nonzero(usage == 0).flatten().tolist()
    if len(query) < len(dead):
        raise wrong_value(
            "query", f"hold at least one sample for each of {len(dead)} dead keys", len(query)
        )
    new, directions = keys.detach().clone(), unit(query)
    similarity = cosines(query, keys)
    similarity[:, dead] = -torch.inf
    for group in dead:
        farthest = similarity.amax(1).argmin()
        new[group] = directions[farthest].to(keys.dtype)
        similarity[:, group] = directions @ directions[farthest]
    return new


def _entropy(shares: Tensor) -> float:
    return float(torch.special.entr(shares).sum())


def _checked_table(counts: Tensor) -> Tensor:
    if not isinstance(counts, Tensor) or counts.is_complex() or counts.dtype == torch.bool:
        raise wrong_type("counts", "be a tensor of counts", kind(counts))
    if counts.ndim not in (1, 2) or 0 in counts.shape:
        raise wrong_value(
            "counts",
            "have shape (groups,) or (groups, classes) without an empty axis",
            tuple(counts.shape),
        )
    table = counts.detach().cpu().double().reshape(len(counts), -1)
    check_counts("counts", table.flatten(), table.numel(), sync=True)
    return table
