"""A federation takes tensors, arrays and data sets, and refuses others."""

import numpy as np
import pytest
import torch

import fedprompt as fp
import tiny_federations as tiny
from fedprompt import methods
from fedprompt.methods import METHODS, ClientData, Federation, Setting
from fedprompt.methods.models import tuned_trunk
from fedprompt.tuning import norms
from refusals import check_refused, refusals

LABELS = torch.tensor([0, 1, 2, 1])
SHARDS = {0: np.array([0, 2]), 3: np.array([1, 3])}
BUDGET = {"rounds": 1, "steps": 2, "cohort_size": 1, "batch_size": 4, "seed": 0}


def setting(**changes):
    values = {"clients": [0, 3], "num_classes": 3, "public": torch.empty(0), **BUDGET}
    return Setting(**values | changes)


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


@pytest.mark.parametrize("dtype", [np.uint8, np.int64])
def test_positions_of_any_integer_dtype_are_copied_and_are_no_mask(dtype):
    positions = np.array([2, 1], dtype=dtype)
    data = call(shards={0: positions}).data(0, 0)
    positions[:] = 0
    assert data.own()[0].flatten().tolist() == [4, 1]
    among = torch.tensor([1, 1], dtype=torch.uint8)
    assert all(inputs.unique().tolist() == [1] for inputs, _ in data.batches(among=among))


def test_labels_of_any_integer_dtype_train():
    whole = tiny.vit_federation()
    small = tiny.vit_federation(labels=whole.labels.int())
    for made in (whole, small):
        assert made.data(0, 0).labels.dtype == torch.int64
    assert torch.equal(*(tiny.last(methods.local, made).of(0).head.bias for made in (whole, small)))


def call(of=None, inputs=None, labels=LABELS, shards=SHARDS):
    inputs = Squares() if inputs is None else inputs
    return Federation(setting() if of is None else of, inputs, labels, shards)


LAYER = torch.nn.Linear(2, 2)  # with a `model`, as a trunk of one's own has
LAYER.model = torch.nn.Identity()


def trained():
    return tuned_trunk(tiny.trunk(8), norms)


def itself(model):
    return model, []


@pytest.mark.parametrize("name", ["scaffold", "perfedavg"])
def test_trained_parameters_that_have_no_gradient_stay_as_they_are(name):
    def prompts(trunk):
        made = fp.DeepPrompts(2, trunk)
        made.unused = torch.nn.Parameter(torch.ones(2))
        return made

    found = tiny.parameters(tiny.last(METHODS[name].make, tiny.vit_federation(prompts=prompts)), 0)
    assert found.pop("prompts.unused").tolist() == [1, 1]
    assert all(value.isfinite().all() for value in found.values())


REFUSED = """
call({}) -> TypeError: `setting` must be a Setting, such as VitSetting
call(inputs=4) -> TypeError: `inputs` must be a tensor, or return batches by positions
call(inputs=[[0.0], [1.0], [2.0], [3.0]]) -> TypeError: got a list of length 4
call(labels=LABELS + 1) -> ValueError: `labels` must lie in [0, 3)
call(labels=[0, 1, 2, 1]) -> TypeError: `labels` must be a tensor of integers
call(labels=LABELS.to(torch.uint16)) -> TypeError: `labels` must be integers
call(labels=LABELS[:3]) -> ValueError: `labels` must have one entry for each of 4 inputs
call(shards=[[0], [1]]) -> TypeError: `shards` must map ids of clients to positions
call(shards={0: tensor([4])}) -> ValueError: `shards[0]` must lie in [0, 4)
call(shards={0: tensor([0.5])}) -> TypeError: `shards[0]` must be integers
call(shards={0: torch.arange(0)}) -> ValueError: `shards[0]` must have at least one position
call(shards={'0': torch.arange(2)}) -> TypeError: `key of shards` must be an integer
setting(clients=[0, 1, 0]) -> ValueError: `clients` must have each id once; got a list of length 3
setting(batch_size=0) -> ValueError: `batch_size` must be at least 1; got 0
setting(steps=-1) -> ValueError: `steps` must be at least 0; got -1
tiny.clip_federation(batch_size=0) -> ValueError: `batch_size` must be at least 1; got 0
tiny.clip_federation(num_classes=2) -> ValueError: `class_names` must have a name for each of 2
setting(seed='a') -> TypeError: `seed` must be an integer; got 'a' (str)
setting(seed=2**70) -> ValueError: `seed` must be below 2**63
setting(device='cdua') -> ValueError: `device` must name a device of PyTorch; got 'cdua'
setting(autocast=torch.float16) -> ValueError: `autocast` must be torch.bfloat16 or None
methods.fedprox(setting(), learning_rate='x') -> TypeError: `learning_rate` must be a number
setting(rounds=2.5) -> TypeError: `rounds` must be an integer; got 2.5
tiny.vit_federation(num_features=0) -> ValueError: `num_features` must be at least 1; got 0
tiny.vit_federation(trunks=[]) -> ValueError: `trunks` must have at least one trunk; got none
tiny.vit_federation(trunks=[trained()]) -> ValueError: `trunks` must be frozen, because `tune` says
tiny.vit_federation(tune=3) -> TypeError: `tune` must be a function; got 3
tiny.vit_federation(tune=itself).new_model() -> ValueError: `tune` must return a copy of the model
tuned_trunk(LAYER, itself) -> TypeError: `trunks` must be made by vit_trunk to be tuned; got a Lin
tiny.vit_federation(trunks=tiny.trunk(8)) -> TypeError: `trunks` must be a sequence of trunks; got a
methods.fedmd(tiny.mixed_federation(public=torch.empty(0))) -> ValueError: `public` must have at
"""


@pytest.mark.bad_input
@pytest.mark.parametrize(("call", "error", "message"), refusals(REFUSED))
def test_wrong_calls_are_refused_by_name(call, error, message):
    check_refused(call, error, message, globals())
