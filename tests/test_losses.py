"""Arguments of class means and of losses are refused by name, and their edges are taken."""

import math
from functools import partial

import torch.nn as nn
from torch import eye, full, nan, ones, tensor, zeros

from fedprompt import Weighted, class_means, distillation_loss, mutual_loss, proximal_loss
from refusals import number, refused_and_taken

LABELS = [tensor([0, 3]), tensor([-1, 0]), tensor([0]), zeros(2), [0, 1], zeros(2, 1).long()], [
    tensor([2, 0]), tensor([0, 0]).byte()]  # fmt: skip
LOGITS = (
    [None, zeros(3), zeros(2, 3).long(), zeros(2, 3).to_sparse()],
    [full((2, 3), 9.0).bfloat16()],
)
TEACHERS = [eye(3), Weighted(1, 1), Weighted(zeros(3, 4), ones(3)), Weighted(eye(3), tensor(1.0)),
            Weighted(eye(3), tensor([1.0, -1.0, 1.0])), Weighted(eye(3) * nan, ones(3))], [
    Weighted(eye(3) * nan, zeros(3))]  # fmt: skip
ABOVE_0 = [0, -1.0, nan, math.inf, "1", 1e-320], [1.2e-38]
MEANS = {"values": zeros(2, 3), "labels": tensor([0, 2]), "num_classes": 3}
DISTILLED = {"logits": zeros(2, 3), "labels": tensor([0, 2]), "teacher": Weighted(eye(3), ones(3))}
LINEAR = nn.Linear(2, 1)
test_wrong_arguments_are_refused_by_name_and_edges_are_taken = refused_and_taken([
    (class_means, MEANS, {
        "labels": LABELS, "num_classes": (number(1)[0], [3]),
        "values": ([None, zeros(2, 3).long(), tensor(1.0), ones(2, 3) * nan], [
            zeros(2), ones(2, 1, 1)]),
        "keep": ([ones(2), tensor([True]), [True, False]], [None, tensor([False, False])])}),
    (distillation_loss, DISTILLED, {
        "logits": LOGITS, "labels": LABELS, "teacher": TEACHERS, "temperature": ABOVE_0}),
    (mutual_loss, {"logits": zeros(2, 3), "other": zeros(2, 3), "temperature": 1.0}, {
        "logits": LOGITS, "other": ([*LOGITS[0], zeros(1, 3)], LOGITS[1]), "temperature": ABOVE_0}),
    (partial(proximal_loss, values={"bias": zeros(1)}), {}, {
        "module": (["model", nn.Linear], [LINEAR])}),
    (partial(proximal_loss, LINEAR), {}, {"values": (
        [2, {}, {"head.bias": zeros(1)}, {"weight": zeros(2)}, {"bias": 0.0},
         {"bias": tensor([nan])}], [{"bias": zeros(1).double()}])}),
])  # fmt: skip
