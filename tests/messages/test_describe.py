"""Parameters and bytes that are trained, frozen and sent."""

import torch
import torch.nn as nn

from fedprompt import Weighted, collect, describe, samples, snapshot, vit_trunk

MODEL = nn.ModuleDict({"prompts": nn.Linear(3, 4), "head": nn.Linear(4, 2)})  # 16 and 10 numbers
BACKBONE = nn.Linear(9, 10).requires_grad_(False)  # 100 numbers


def test_numbers_by_hand():
    payload = collect(MODEL, weight=5, only=["head"])  # 10 float32 numbers and 2 weights
    assert describe(MODEL, payload) == (26, 0, 10, 48)
    found = describe(MODEL, payload, trunk=BACKBONE)
    assert found == (26, 100, 10, 48)
    expected = "trained 26 of 126 parameters (20.63%), sent 10 (48 bytes a round)"
    assert str(found) == expected
    assert describe(MODEL, snapshot(BACKBONE)) == (26, 0, 100, 400)


def test_a_backbone_inside_the_model_counts_once_and_is_frozen():
    whole = nn.ModuleList([BACKBONE, MODEL["head"]])
    assert describe(whole, {}, trunk=BACKBONE) == (10, 100, 0, 0)


def test_a_trunk_counts_the_parameters_of_its_model():
    trunk = vit_trunk(samples.vit("S"))  # 88,895 numbers without the head of 47 classes
    assert describe(MODEL, {}, trunk=trunk).frozen == 88_895 - 47 * (48 + 1)


def test_rows_of_weight_zero_are_not_sent():
    rows = Weighted(torch.zeros(3, 4), torch.tensor([2.0, 0.0, 1.0]))
    assert describe(MODEL, {"logits": rows})[2:] == (8, 44)
