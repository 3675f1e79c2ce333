"""Measures of the mechanisms of FedHPL and SGPT, which their papers bound or plot."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

import fedprompt._refusals as check
from fedprompt.interfaces import Weighted
from fedprompt.metrics.classes import contingency_table


class DistillationTerms(NamedTuple):
    """The two terms of FedHPL's bound, each 0 at best.

    Attributes:
        aggregation_error: Error of the teacher, in [0, 2].
        similarity: Distance of the client from its teacher, in [0, 2].
    """

    aggregation_error: float
    similarity: float


@torch.no_grad()
def distillation_terms(
    logits: Float[Tensor, "batch classes"],
    labels: Int[Tensor, " batch"],
    teacher: "Weighted",
    *,
    temperature: float,
) -> "DistillationTerms":
    r"""Compute the two terms of FedHPL's bound on the errors of a client.

    .. math:: 2 - 2\, t, \qquad 2\, |t - s|, \qquad
        t = \tfrac 1B \sum_i \sigma(\tilde p_{y_i} / T)_{y_i}, \qquad
        s = \tfrac 1B \sum_i \sigma(z_i / T)_{y_i}

    A client whose teacher is right and that follows it has a small sum. Samples of classes that the
    teacher does not know are left out.

    Args:
        logits: Logits of the client.
        labels: Classes of the samples.
        teacher: Logits (classes, classes) of each class, with weight 0 for an unknown class.
        temperature: Softmax temperature, above 0.

    Raises:
        ValueError: If shapes disagree, or no sample is of a known class.

    Example:
        >>> teacher = Weighted(4 * torch.eye(2), torch.ones(2))
        >>> logits, labels = torch.tensor([[2.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1])
        >>> terms = distillation_terms(logits, labels, teacher, temperature=1.0)
        >>> f"{terms.aggregation_error:.3f} {terms.similarity:.3f}"
        '0.036 0.814'

    References:
        Ma et al., "FedHPL: Efficient Heterogeneous Federated Learning with Prompt Tuning and Logit
        Distillation", 2024, Eq. 34.
    """
    check.number("temperature", temperature, above=0)
    check.number_tensor("logits", logits, "be floating-point (batch, classes)", ndim=2)
    classes = logits.shape[1]
    check.labels("labels", labels, classes, size=len(logits), of="logits")
    check.shape("teacher.value", teacher.value, (classes, classes))
    known = teacher.weight[labels] > 0
    check.some("labels", known.any(), "have a sample of a class that `teacher` knows")
    right = labels[known]
    of_teacher, of_client = (
        (values / temperature).softmax(1).gather(1, right[:, None]).double().mean().item()
        for values in (teacher.value[right], logits[known])
    )
    return DistillationTerms(2 - 2 * of_teacher, 2 * abs(of_teacher - of_client))


def congruence(
    groups: Int[Tensor, " samples"],
    clusters: Int[Tensor, " samples"],
    labels: Int[Tensor, " samples"],
) -> float:
    """Compare the groups that clients learned with a clustering of all features in one place.

    It is the share of samples in the most frequent group of their cluster, divided by the share in
    the most frequent cluster of their class. So 1 means that groups agree with clusters as well as
    clusters with classes.

    Args:
        groups: Group of each sample, for example ``model.selector(model.query(images)).indices``.
        clusters: Cluster of each sample, for example of scikit-learn's ``KMeans``.
        labels: Class of each sample.

    Returns:
        Congruence, above 0.

    Raises:
        ValueError: If lengths differ, or there is no sample.

    Example:
        >>> labels, clusters = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 0, 0, 1])
        >>> round(congruence(torch.tensor([2, 2, 2, 1]), clusters, labels), 3)
        1.333

    References:
        Deng et al., "Unlocking the Potential of Prompt-Tuning in Bridging Generalized and
        Personalized Federated Learning" (SGPT), CVPR 2024, Fig. 5(a).
    """
    check.some("labels", len(labels), "have at least one sample")
    for name, values in {"groups": groups, "clusters": clusters}.items():
        check.shape(name, values, labels.shape)

    def agreement(kinds: Tensor, parts: Tensor) -> float:
        table = contingency_table(kinds, parts, int(kinds.max()) + 1, int(parts.max()) + 1)
        return int(table.max(0).values.sum()) / len(labels)

    return agreement(groups, clusters) / agreement(clusters, labels)
