"""A federation takes tensors, arrays and data sets, and refuses others."""

import numpy as np
import pytest
import torch

from fedprompt.methods import ClientData, Federation, Setting

LABELS = torch.tensor([0, 1, 2, 1])
SHARDS = {0: np.array([0, 2]), 3: np.array([1, 3])}
BUDGET = {"rounds": 1, "steps": 2, "cohort_size": 1, "batch_size": 4, "seed": 0}


def setting():
    return Setting(clients=[0, 3], num_classes=3, public=torch.empty(0), **BUDGET)


class Squares:
    """Inputs that are computed when they are needed."""

    def __len__(self):
        return 4

    def __getitem__(self, positions):
        return positions.float()[:, None] ** 2


def test_positions_may_be_arrays_and_inputs_may_be_read_when_needed():
    federation = Federation(setting(), Squares(), LABELS, SHARDS)
    data = federation.data(3, 0)
    assert isinstance(data, ClientData)
    assert data.class_counts.tolist() == [0, 2, 0]
    inputs, labels = data.own()
    assert (inputs.flatten().tolist(), labels.tolist()) == ([1, 9], [1, 1])
    for inputs, labels in federation.data(0, 5).batches():
        assert sorted(zip(inputs.flatten().tolist(), labels.tolist(), strict=True)) == [
            (0, 0),
            (4, 2),
        ]


REFUSED = {
    "`setting` must be a Setting, such as VitSetting": lambda call: call(setting={}),
    "`inputs` must be a tensor, or return batches by positions": lambda call: call(inputs=4),
    "got a list of length 4": lambda call: call(inputs=[[0.0], [1.0], [2.0], [3.0]]),
    "`labels` must lie in [0, 3)": lambda call: call(labels=LABELS + 1),
    "`labels` must be integers": lambda call: call(labels=[0, 1, 2, 1]),
    "`labels` must have one entry for each of 4 inputs": lambda call: call(labels=LABELS[:3]),
    "`shards` must map ids of clients to positions": lambda call: call(shards=[[0], [1]]),
    "`shards[0]` must lie in [0, 4)": lambda call: call(shards={0: torch.tensor([4])}),
    "`shards[0]` must be integers": lambda call: call(shards={0: torch.tensor([0.5])}),
    "`shards[0]` must have at least one position": (lambda call: call(shards={0: torch.arange(0)})),
    "`key of shards` must be an integer": lambda call: call(shards={"0": torch.arange(2)}),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("message", REFUSED)
def test_refused(message):
    def call(**changes):
        good = {"setting": setting(), "inputs": Squares(), "labels": LABELS, "shards": SHARDS}
        return Federation(**good | changes)

    with pytest.raises((TypeError, ValueError)) as error:
        REFUSED[message](call)
    assert message in str(error.value)
