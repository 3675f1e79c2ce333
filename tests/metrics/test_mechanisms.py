"""Measures of mechanisms, against loops over samples."""

import math

import torch

from fedprompt import Weighted
from fedprompt.metrics import congruence, distillation_terms
from refusals import refused

TEACHER = Weighted(torch.randn(3, 3, generator=torch.Generator().manual_seed(0)), torch.ones(3))
LOGITS = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
LABELS = torch.tensor([0, 1, 1, 2, 0])


def probability(logits, label, temperature):
    powers = [math.exp(float(logit) / temperature) for logit in logits]
    return powers[label] / sum(powers)


def test_terms_of_equation_34_are_means_over_samples_of_known_classes():
    teacher = TEACHER._replace(weight=torch.tensor([1.0, 2.0, 0.0]))
    known = [(z, int(y)) for z, y in zip(LOGITS, LABELS, strict=True) if y < 2]
    taught = sum(probability(TEACHER.value[y], y, 4.5) for _, y in known) / len(known)
    own = sum(probability(z, y, 4.5) for z, y in known) / len(known)
    found = distillation_terms(LOGITS, LABELS, teacher, temperature=4.5)
    assert math.isclose(found.aggregation_error, 2 - 2 * taught, rel_tol=1e-6)
    assert math.isclose(found.similarity, 2 * abs(taught - own), rel_tol=1e-5)


def test_congruence_is_the_agreement_of_groups_over_that_of_clusters():
    groups, clusters = torch.tensor([0, 0, 2, 2, 2, 1]), torch.tensor([0, 0, 0, 1, 1, 1])
    classes = torch.tensor([0, 0, 1, 1, 1, 2])
    # Clusters: 2 of 3 in group 0, and 2 of 3 in group 2. Classes: 2 of 2, 2 of 3 and 1 of 1.
    assert math.isclose(congruence(groups, clusters, classes), (4 / 6) / (5 / 6))


test_wrong_values_are_refused = refused(globals())("""
distillation_terms(LOGITS, LABELS, TEACHER, temperature=0.0) -> ValueError: `temperature` must be
distillation_terms(LOGITS, LABELS[1:], TEACHER, temperature=1.0) -> ValueError: `labels` must
distillation_terms(LOGITS[:, :2], LABELS % 2, TEACHER, temperature=1.0) -> ValueError: `teacher.val
distillation_terms(LOGITS, LABELS, UNKNOWN, temperature=1.0) -> ValueError: `labels` must have a
congruence(LABELS, LABELS[1:], LABELS) -> ValueError: `clusters` must have shape (5,)
congruence(LABELS[:0], LABELS[:0], LABELS[:0]) -> ValueError: `labels` must have at least one sample
""")
UNKNOWN = TEACHER._replace(weight=torch.zeros(3))
