"""Accuracy of each class, and means over classes."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from jaxtyping import Float, Int, Integer, Real
from torch import Tensor

import fedprompt._conversions as convert
import fedprompt._refusals as check
from fedprompt.interfaces import Weighted


def harmonic_mean(*accuracies: float) -> float:
    r"""Average accuracies so that a low one counts most: :math:`n \big/ \sum_i 1/a_i`.

    CoCoOp reports it of the accuracies on base and on new classes.

    Args:
        accuracies: At least one number of at least 0, such as two accuracies in [0, 1] or in %.

    Returns:
        Harmonic mean, in the unit of the accuracies. It is 0 if one of them is 0.

    Example:
        >>> round(harmonic_mean(0.9, 0.6), 3)
        0.72

    References:
        Zhou et al., "Conditional Prompt Learning for Vision-Language Models" (CoCoOp), CVPR 2022,
        Sec. 4.1.
    """
    check.some("accuracies", accuracies, "contain at least one number")
    for position, accuracy in enumerate(accuracies):
        check.number(f"accuracies[{position}]", accuracy, at_least=0)
    if 0 in accuracies:
        return 0.0
    smallest = float(min(accuracies))  # in units of it, no quotient overflows
    return len(accuracies) * smallest / math.fsum(smallest / float(number) for number in accuracies)


@torch.no_grad()
def class_accuracy(
    predict: Callable[[Any], Float[Tensor, "batch classes"]],
    batches: Iterable[Any],
    *,
    num_classes: int,
) -> Weighted:
    """Compute the accuracy of each class, with the number of its samples as weight.

    The result is an entry, so :func:`weighted_mean` of clients gives the accuracy on all samples
    together. A class without samples has weight 0 and accuracy 0.

    Args:
        predict: Maps the inputs of a batch to logits. Put modules into eval mode first. A sample
            whose logits contain NaN counts as an error.
        batches: Pairs (inputs, labels), such as a ``DataLoader``. Labels are integers in
            [0, num_classes).
        num_classes: Number of classes, at least 1.

    Returns:
        Accuracies in [0, 1] and numbers of samples, both ``(num_classes,)``, float64, on the CPU.

    Raises:
        ValueError: If a label lies outside its range, or logits do not have the shape
            (labels, num_classes).

    Example:
        >>> inputs, labels = torch.eye(3), torch.tensor([0, 1, 0])
        >>> entry = class_accuracy(lambda logits: logits, [(inputs, labels)], num_classes=3)
        >>> entry.value.tolist(), entry.weight.tolist()
        ([0.5, 1.0, 0.0], [2.0, 1.0, 0.0])
        >>> float(entry.value @ entry.weight / entry.weight.sum())  # accuracy of all samples
        0.6666666666666666
    """
    check.count("num_classes", num_classes)
    check.function("predict", predict)
    check.iterable("batches", batches, "pairs (inputs, labels)")
    correct, total = torch.zeros(2, num_classes, dtype=torch.float64)
    for position, batch in enumerate(batches):
        place = f"batches[{position}]"
        check.pair(place, batch, "be a pair (inputs, labels)")
        inputs, labels = batch
        check.labels(f"{place}[1]", labels, num_classes)
        logits = predict(inputs)
        check.number_tensor("predict", logits, "return floating-point logits")
        check.shape("predict(inputs)", logits, (len(labels), num_classes))
        found, labels = logits.argmax(1).cpu(), labels.cpu().long()
        hit = (found == labels) & ~logits.isnan().any(1).cpu()
        correct += labels[hit].bincount(minlength=num_classes)
        total += labels.bincount(minlength=num_classes)
    return Weighted(correct / total.clamp(min=1), total)


def contingency_table(
    indices: Integer[Tensor, " batch"],
    labels: Integer[Tensor, " batch"],
    num_groups: int,
    num_classes: int,
) -> Int[Tensor, "groups classes"]:
    """Count the samples of each class in each group.

    Tables of several batches or clients can be added. The table of a client reveals its class
    distribution, so keep it on the client unless sharing is agreed.

    Args:
        indices: Group of each sample.
        labels: Class of each sample.
        num_groups: Number of rows of the table.
        num_classes: Number of columns of the table.

    Returns:
        Counts, int64.

    Raises:
        ValueError: If `indices` and `labels` differ in length, or an entry lies outside its range.

    Example:
        >>> indices, labels = torch.tensor([0, 0, 1]), torch.tensor([2, 2, 0])
        >>> contingency_table(indices, labels, num_groups=2, num_classes=3)
        tensor([[0, 0, 2],
                [1, 0, 0]])
    """
    check.count("num_groups", num_groups)
    check.count("num_classes", num_classes)
    check.labels("indices", indices, num_groups)
    check.labels("labels", labels, num_classes, size=len(indices), of="`indices`")
    cells = indices.long() * num_classes + labels.long()
    counts = torch.bincount(cells, minlength=num_groups * num_classes)
    return counts.reshape(num_groups, num_classes)


def balanced_accuracy(table: Real[Tensor, "predicted classes"]) -> float:
    r"""Average the accuracy of each class over classes, whatever their sizes.

    .. math:: \frac{1}{|C|} \sum_{c \in C} n_{cc} \,\Big/\, \sum_p n_{pc}, \qquad
              C = \{ c : \textstyle\sum_p n_{pc} > 0 \}

    Args:
        table: Counts n. Entry (p, c) is the number of samples of class c for which class p was
            predicted, as from ``contingency_table(predicted, labels, classes, classes)``. This is
            the transpose of scikit-learn's confusion matrix. Tables of clients can be added.

    Returns:
        Mean recall in [0, 1] over the classes that have samples.

    Raises:
        ValueError: If `table` is not square, all 0, negative or not finite.

    Example:
        Both samples of class 0 and two of four samples of class 1 are recognized.

        >>> balanced_accuracy(torch.tensor([[2, 2], [0, 2]]))
        0.75
    """
    counts = _square(table)
    total = counts.sum(0)
    present = total > 0
    return (counts.diagonal()[present] / total[present]).mean().item()


def balanced_weights(
    weights: Real[Tensor, "*clients tests"], labels: Integer[Tensor, " tests"]
) -> Float[Tensor, "*clients tests"]:
    """Weigh the tests of clients so that all classes of a client count the same.

    ``(balanced_weights(weights, labels) * right).sum(-1)`` is the balanced accuracy of each client
    on its own tests, if `right` is 1 for each correct prediction and 0 elsewhere.

    Args:
        weights: Weight of each test input for each client, at least 0: 1 for its own tests and 0
            elsewhere, or the share of its domain and class in the client's images.
        labels: Class of each test input.

    Returns:
        Weights in float64, on the CPU. The sum of each client is 1, or 0 if it has no tests.

    Raises:
        ValueError: If lengths differ, or a weight is negative or not finite.

    Example:
        The second client has one input of class 1 and two inputs of class 0.

        >>> weights, labels = torch.tensor([[1, 1, 0], [1, 1, 1]]), torch.tensor([0, 0, 1])
        >>> balanced_weights(weights, labels)
        tensor([[0.5000, 0.5000, 0.0000],
                [0.2500, 0.2500, 0.5000]], dtype=torch.float64)
    """
    numbers = convert.counts("weights", weights, "(..., tests)", ndims=range(1, 10))
    check.labels("labels", labels, sys.maxsize, size=numbers.shape[-1], of="tests of `weights`")
    found: Any = torch.unique(labels.cpu(), return_inverse=True)
    classes: Tensor = found[1]
    shape = (*numbers.shape[:-1], int(classes.max()) + 1)
    totals = numbers.new_zeros(shape).index_add(-1, classes, numbers)
    present = (totals > 0).sum(-1, keepdim=True).clamp(min=1)
    return numbers / torch.where(totals > 0, totals, 1.0)[..., classes] / present


def most_frequent_class(
    counts: Real[Tensor, "*clients classes"], labels: Integer[Tensor, " tests"]
) -> Float[Tensor, "*clients tests"]:
    """Compute which tests are right if the most frequent training class is always predicted.

    Every accuracy should be compared with this constant, since it is high where one class is
    frequent. Its balanced accuracy is 1 divided by the number of classes.

    Args:
        counts: Number of training inputs of each class: of a client for its own tests, of all
            clients for all tests.
        labels: Class of each test input.

    Returns:
        1 where the constant is right and 0 elsewhere, in float64, on the CPU. The lowest of equally
        frequent classes is predicted. Without training inputs, as for new classes, every class is
        a guess, and all tests are right with probability 1 / classes.

    Raises:
        ValueError: If a count is negative or not finite, or a label lies outside its range.

    Example:
        >>> most_frequent_class(torch.tensor([[3, 2], [0, 0]]), torch.tensor([0, 1, 1]))
        tensor([[1.0000, 0.0000, 0.0000],
                [0.5000, 0.5000, 0.5000]], dtype=torch.float64)
    """
    numbers = convert.counts("counts", counts, "(..., classes)", ndims=range(1, 10))
    check.labels("labels", labels, numbers.shape[-1])
    right = (numbers.argmax(-1, keepdim=True) == labels.cpu()).double()
    return torch.where(numbers.any(-1, keepdim=True), right, 1 / numbers.shape[-1])


def macro_f1(table: Real[Tensor, "predicted classes"]) -> float:
    r"""Average the F1 score of each class over classes, whatever their sizes.

    .. math:: \frac{1}{|C|} \sum_{c \in C}
              \frac{2 n_{cc}}{\sum_p n_{pc} + \sum_{c'} n_{cc'}}, \qquad
              C = \{ c : \textstyle\sum_p n_{pc} + \sum_{c'} n_{cc'} > 0 \}

    Args:
        table: Counts n, (predicted, classes), as for :func:`balanced_accuracy`.

    Returns:
        Mean F1 in [0, 1] over the classes that have samples or were predicted.

    Raises:
        ValueError: If `table` is not square, all 0, negative or not finite.

    Example:
        The F1 scores are 4/6 and 4/6.

        >>> round(macro_f1(torch.tensor([[2, 2], [0, 2]])), 3)
        0.667
    """
    counts = _square(table)
    total = counts.sum(0) + counts.sum(1)
    present = total > 0
    return (2 * counts.diagonal()[present] / total[present]).mean().item()


def attack_success(table: Real[Tensor, "predicted classes"], *, target: int) -> float:
    r"""Compute the share of triggered samples of other classes that are taken for the target class.

    .. math:: \sum_{c \ne t} n_{tc} \Big/ \sum_p \sum_{c \ne t} n_{pc}

    Samples of the target class do not count, because they need no trigger.

    Args:
        table: Counts n, (predicted, classes), as of :func:`contingency_table`, of inputs with the
            trigger and their true labels. Tables of clients can be added.
        target: Class t of the attack.

    Returns:
        Success in [0, 1].

    Raises:
        ValueError: If `table` is not square, has no sample of another class, or is negative or not
            finite.

    Example:
        Three of four samples of the classes 1 and 2 are taken for class 0.

        >>> predicted, labels = torch.tensor([0, 0, 0, 0, 1]), torch.tensor([0, 1, 2, 2, 1])
        >>> attack_success(contingency_table(predicted, labels, 3, 3), target=0)
        0.75

    References:
        Zhang et al., "BadPromptFL: A Novel Backdoor Threat to Prompt-based Federated Learning in
        Multimodal Models", 2025 (arXiv:2508.08040), of which the abstract and the overview were
        read.
    """
    counts = _square(table)
    check.count("target", target, at_least=0)
    check.require(target < len(counts), "target", f"lie in [0, {len(counts)})", target)
    others = torch.arange(len(counts)) != target
    check.some("table", bool(counts[:, others].any()), "count a sample of another class")
    return (counts[target, others].sum() / counts[:, others].sum()).item()


def _square(table: Any) -> Float[Tensor, "classes classes"]:
    counts = convert.counts("table", table, "(predicted, classes)")
    rule = "have a row and a column for each class"
    check.require(counts.shape[0] == counts.shape[1], "table", rule, counts)
    check.some("table", bool(counts.any()), "count at least one sample")
    return counts
