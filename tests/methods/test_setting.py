"""A federation takes tensors, arrays and data sets, and refuses others."""

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch

import fedprompt as fp
import tiny_federations as tiny
from fedprompt import methods
from fedprompt.methods import METHODS, ClientData, ClipSetting, Federation, Setting, VitSetting
from fedprompt.methods.models import tuned_trunk
from fedprompt.tuning import norms
from refusals import refused
from same import assert_same

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
    federation = Federation(Squares(), LABELS, SHARDS)
    data = federation.data(setting(), 3, 0)
    assert isinstance(data, ClientData)
    assert data.class_counts.tolist() == [0, 2, 0]
    inputs, labels = data.own()
    assert (inputs.flatten().tolist(), labels.tolist()) == ([1, 9], [1, 1])
    for inputs, labels in federation.data(setting(), 0, 5).batches():
        assert sorted(zip(inputs.flatten().tolist(), labels.tolist(), strict=True)) == [
            (0, 0),
            (4, 2),
        ]


@pytest.mark.parametrize("dtype", [np.uint8, np.int64])
def test_positions_of_any_integer_dtype_are_copied_and_are_no_mask(dtype):
    positions = np.array([2, 1], dtype=dtype)
    data = call(shards={0: positions}).data(setting(), 0, 0)
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


def test_a_short_call_has_the_bits_of_a_long_one_and_its_rounds_are_epochs(new_models):
    """All inputs and clients are those of the federation."""
    tower = tiny.clip_federation().tower
    torch.nn.init.constant_(tower.model.logit_scale, 3.0)
    short = ClipSetting(tower=tower, class_names=tiny.NAMES[:3], rounds=2)
    model = {"clip": tower.model, "tower": tower, "scale": torch.tensor(3.0).exp().item()}
    text = {"class_names": tiny.NAMES[:3], "num_classes": 3, "template": "a photo of a {}."}
    whole = {"clients": range(6), "cohort_size": 6, "batch_size": 32, "public": torch.empty(0)}
    long = ClipSetting(**model, **text, **whole, rounds=2, steps=1, seed=0)
    given = tiny.clip_federation()
    federation = Federation(given.inputs, given.labels, given.shards)
    rounds = [[*fp.run_rounds(methods.kgcoop(made), federation)] for made in (short, long)]
    assert_same(rounds[0], rounds[1])


def test_clients_that_have_networks_in_turn_are_named_unless_they_are_numbered():
    made = tiny.mixed_federation(clients=(), rounds=1, cohort_size=1, steps=1)
    method = METHODS["fedproto"].make(made)
    numbered, others = (
        Federation(made.inputs, made.labels, {k: made.shards[k] for k in ids})
        for ids in ((0, 1, 2), (0, 3))
    )
    assert len([*fp.run_rounds(method, numbered)]) == 1
    with pytest.raises(ValueError, match=r"`method\.setting\.clients` must name the clients"):
        next(fp.run_rounds(method, others))


def test_in_a_round_without_steps_each_input_is_in_one_batch():
    """Five inputs in batches of two, and a new order in each round and for each purpose."""
    among, orders = torch.tensor([0, 1, 3, 4, 5]), set()
    made, all_of_them = setting(steps=None, batch_size=2), {7: torch.arange(6)}
    federation = Federation(torch.arange(6), LABELS[[0] * 6], all_of_them)
    for data in (federation.data(made, 7, 0), federation.data(made, 7, 1)):
        assert (data.steps, [len(labels) for _, labels in data.batches()]) == (3, [2, 2, 2])
        parts = [inputs.tolist() for inputs, _ in data.batches(among=among, purpose="quiz")]
        assert ([*map(len, parts)], sorted(chain(*parts))) == ([2, 2, 1], among.tolist())
        orders.add(str(parts))
    assert len(orders) == 2


def test_a_setting_has_one_trunk_or_several_and_can_be_replaced():
    one, two = tiny.trunk(8), tiny.trunk(12)
    first = VitSetting(trunk=one, num_classes=3, rounds=1)
    several = replace(replace(first, seed=1), trunks=[one, two])
    assert (first.trunk, first.trunks, several.trunks) == (one, [one], [one, two])
    assert replace(several, rounds=2).trunk_of(3) is two
    assert replace(first, seed=1).model(0, {}) is not first.model(0, {})
    assert "_models" not in repr(first)


def test_numbers_that_are_not_given_are_the_documented_ones():
    text, images = clip(class_names=["cat"], clients=[0]), vit(trunk=TRUNK)
    assert (text.batch_size, text.seed, text.length, images.num_prompts) == (32, 0, 8, 8)
    assert len(text.drawn_contexts("x")()) == 1
    falling = setting(schedule=lambda share: 1 - share, rounds=2)
    rates = [group["lr"] for group in falling.optimizer(LAYER, 0.5).param_groups]
    assert [falling.learning_rate(0.5), *rates] == [0.5, 0.5]


def test_a_setting_that_has_warned_equals_one_that_has_not():
    first = setting(schedule=lambda share: 1.0)
    second = replace(first)
    with pytest.warns(UserWarning, match="is after the 1 rounds"):
        first.learning_rate(0.1, 1)
    assert first == second != replace(first, steps=3)


def test_the_smallest_settings_have_no_rounds_no_steps_and_batches_of_one():
    assert [*setting(rounds=0).cohorts()] == []
    for steps, sizes in [(0, []), (None, [1, 1])]:
        data = call().data(setting(steps=steps, batch_size=1), 3, 0)
        assert [len(labels) for _, labels in data.batches()] == sizes


def test_phases_share_the_batches_and_parts_have_less_than_twice_their_size():
    data = call().data(setting(steps=5), 3, 0)
    assert [len([*batches]) for batches in data.phases(2)] == [2, 3]
    for count, sizes in [(127, [127]), (255, [255]), (256, [128, 128]), (257, [129, 128])]:
        labels = torch.zeros(count, dtype=torch.int64)
        parts = ClientData(setting(), 0, 0, labels, lambda chosen: chosen).parts()
        assert [len(inputs) for inputs, _ in parts] == sizes


def call(inputs=None, labels=LABELS, shards=SHARDS):
    return Federation(Squares() if inputs is None else inputs, labels, shards)


LAYER = torch.nn.Linear(2, 2)  # with a `model`, as a trunk of one's own has
LAYER.model = torch.nn.Identity()


TRUNK = tiny.trunk(8)
TOWER = tiny.clip_federation().tower


def vit(**changes):
    return VitSetting(**{"num_classes": 3, "rounds": 1} | changes)


def clip(**changes):
    return ClipSetting(**{"tower": TOWER, "rounds": 1, "class_names": ["a"]} | changes)


def pair(*lengths):
    contexts = [fp.ContextPrompts(8, length=length) for length in lengths]
    return torch.nn.ModuleDict(dict(zip("ab", contexts, strict=True)))


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


test_wrong_calls_are_refused_by_name = refused(globals())("""
call().data({}, 0, 0) -> TypeError: `setting` must be a Setting, such as VitSetting
call().data(setting(num_classes=2), 0, 0) -> ValueError: `setting.num_classes` must be at least 3
call(inputs=4) -> TypeError: `inputs` must be a tensor, or return batches by positions
call(inputs=[[0.0], [1.0], [2.0], [3.0]]) -> TypeError: got a list of length 4
call(labels=LABELS - 1) -> ValueError: `labels` must lie in [0,
call(labels=[0, 1, 2, 1]) -> TypeError: `labels` must be a tensor of integers
call(labels=LABELS.to(torch.uint16)) -> TypeError: `labels` must be integers
call(labels=LABELS[:3]) -> ValueError: `labels` must have one entry for each of 4 inputs
call(shards=[[0], [1]]) -> TypeError: `shards` must map ids of clients to positions
call(shards={0: tensor([4])}) -> ValueError: `shards[0]` must lie in [0, 4)
call(shards={0: tensor([0.5])}) -> TypeError: `shards[0]` must be integers
call(shards={0: torch.arange(0)}) -> ValueError: `shards[0]` must have at least one position
call(shards={'0': torch.arange(2)}) -> TypeError: `key of shards` must be an integer
setting(clients=3) -> TypeError: `clients` must be an iterable of ids, such as range(100); got 3
setting(schedule=0.5) -> TypeError: `schedule` must be a function; got 0.5
setting(make_optimizer='SGD') -> TypeError: `make_optimizer` must make an optimizer; got 'SGD'
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
tuned_trunk(LAYER, itself) -> TypeError: `trunks` must have their network as `model`, and no other
tiny.vit_federation(trunks=tiny.trunk(8)) -> TypeError: `trunks` must be a sequence of trunks; got a
setting(num_classes=0) -> ValueError: `num_classes` must be at least 1; got 0
methods.fedamp(vit(trunk=TRUNK)) -> ValueError: `setting.clients` must name the clients, such as ra
vit(trunk=TRUNK).cohorts() -> ValueError: `setting.clients` must name the clients
vit(trunk=TRUNK, trunks=[TRUNK]) -> ValueError: `trunk` must be None if `trunks` is given
vit(clients=[0]) -> ValueError: `trunks` must have at least one trunk; got none
vit(trunks=[TRUNK] * 2).trunk -> ValueError: `trunks` must have one trunk, for a model that all
vit(trunk=TRUNK, prompts=3) -> TypeError: `prompts` must be a function; got 3
vit(trunk=TRUNK, prompts=LAYER) -> TypeError: `prompts` must make a module from a trunk
vit(trunk=TRUNK, prompts=id).new_model() -> TypeError: `prompts(trunk)` must be an nn.Module; got
vit(trunk=TRUNK, tune=itself).new_model(tune=norms) -> ValueError: `tune` must be None for a method
vit(trunk=TRUNK, tune=itself).new_model(prompts=id) -> ValueError: `tune` must be None for a method
clip(class_names=3) -> TypeError: `class_names` must be a sequence of names; got 3
clip(class_names=['a'], attributes=3) -> TypeError: `attributes` must be a sequence of sequences of
clip(class_names=['a'], attributes=[['x']] * 2) -> ValueError: `attributes` must have sentences for
clip(class_names=['a'], attributes=[['x']]).renamed(['b']) -> ValueError: `class_names` must be
methods.models.check_sequences(layers=3) -> TypeError: `layers` must be a sequence of values; got 3
methods.models.check_logits('guide', 3, 2, 3) -> TypeError: `guide` must return logits; got 3
methods.models.check_logits('guide', LABELS, 2, 3) -> ValueError: logits (batch, classes) = (2, 3)
methods.models.replace_contexts(LAYER, part=3) -> TypeError: `part` must be an nn.Module; got 3
methods.models.replace_contexts(pair(2, 3), a=None, b=None) -> ValueError: each context (2, 8)
clip(clip=LAYER) -> ValueError: `scale` must be given for a model without `logit_scale`; got a Lin
clip(tower=LAYER) -> TypeError: `tower` must be a TextTower
clip(template='a cat') -> ValueError: `template` must be a sentence with {}
clip(class_names=[]) -> ValueError: `class_names` must name the classes
methods.pfedpt(vit(trunk=TRUNK, clients=[0])) -> ValueError: `public` must have the shape of images
methods.dpfpl(clip(class_names=['a'], clients=[0])) -> ValueError: `steps` must be at least 1 for DP
methods.fedmd(tiny.mixed_federation(public=torch.empty(0))) -> ValueError: `public` must have at
""")
