"""The study of photographs: late blocks as a trunk, splits by runs, domains, records."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import balanced_accuracy_score, f1_score
from timm.models.vision_transformer import VisionTransformer

import fedprompt as fp
import photographs
from fedprompt.compare import cells, measure
from fedprompt.compare.cells import Cell
from fedprompt.compare.trials import CompareError, Trial
from fedprompt.methods import Federation, Setting
from photographs import Photographs, as_domains, runs_of, split_by_runs
from studies import TASKS, networks, patches, photos, tuning
from studies.core import Machine
from studies.networks import TailTrunk, as_inputs

RANDOM = Machine(weights={photos.RANDOM: Path()}, shrink=0.01)


def made(task, partition, seed=0, validate=False):
    row = TASKS[task].rows(partition)[0]
    return photos.make(task, partition, row, seed=seed, machine=RANDOM, validate=validate)


@pytest.fixture(scope="module")
def _fabricated():
    """Small random images in place of those of the packages, which a network encodes once."""

    def images_of(task, shifted, count=None):
        rng = torch.Generator().manual_seed(0)
        count, size = 1000, photos.IMAGE_SIZE  # so many in all partitions
        images = torch.randint(256, (count, 1, size, size), generator=rng, dtype=torch.uint8)
        if task == "solar":
            domains = (torch.arange(count) >= count // 2).long()
            labels, own = torch.randint(4, (count,), generator=rng), runs_of(domains, 20)
            names = photographs.LEVELS, photographs.TYPES
            return Photographs(images, labels, domains, own, *names)
        domains = torch.arange(count) % 4 if shifted else torch.zeros(count, dtype=torch.long)
        names = photographs.DOMAINS if shifted else ("as it is",)
        labels, own = torch.randint(10, (count,), generator=rng), torch.arange(count)
        return Photographs(images, labels, domains, own, tuple("0123456789"), names)

    photos.front.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(photos, "images_of", images_of)
        yield
    photos.front.cache_clear()


def whole():
    torch.manual_seed(0)
    return fp.vit_trunk(VisionTransformer(16, 4, embed_dim=8, depth=4, num_heads=2, num_classes=0))


def tail(trunk, images, **changes):
    fields = {"start": 1, "end": 4, "image_size": 16}
    fields |= changes
    tokens = fp.encode_front(trunk, images, start=fields["start"])
    return TailTrunk(trunk, tokens, **fields)


# Networks


@pytest.mark.parametrize("end", [3, 4])
def test_late_blocks_over_stored_tokens_equal_the_whole_network_bitwise(end):
    trunk, images = whole(), torch.randn(6, 3, 16, 16)
    layers = range(1, end)
    late = fp.LayeredPrompts(2, trunk, layers=layers)
    chosen = torch.tensor([4, 0, 5])
    expected = fp.encode_prompted(trunk, images[chosen], late(), depth=end)
    expected.pooled.square().sum().backward()
    short = tail(trunk, images, end=end)
    prompts = fp.LayeredPrompts(2, short, layers=range(short.depth))
    fp.load_values(prompts, fp.snapshot(late))
    found = fp.encode_prompted(short, as_inputs(chosen), prompts())
    found.pooled.square().sum().backward()
    assert torch.equal(found.pooled, expected.pooled)
    assert torch.equal(found.streams[0], expected.streams[0])
    assert torch.equal(prompts.tokens.grad, late.tokens.grad)


def test_features_of_public_images_have_mean_zero_and_prompts_start_at_their_tokens():
    trunk, images = whole(), torch.randn(6, 3, 16, 16)
    plain, public = tail(trunk, images, with_patches=True), torch.tensor([1, 2, 5])
    adapted = plain.adapted(as_inputs(public))
    before, after = (
        fp.encode_prompted(each, as_inputs(public)).pooled for each in (plain, adapted)
    )
    assert before.shape == (3, 16)
    torch.testing.assert_close(after, before - before.mean(0))
    expected = fp.mean_patch_tokens(trunk, images[public]).value[1:]
    torch.testing.assert_close(adapted.start_tokens.value, expected)


@pytest.mark.usefixtures("_fabricated")
def test_clients_with_networks_of_three_kinds_have_their_own_widths_and_start():
    setting = made("solar", "depths").setting
    assert [trunk.num_features for trunk in setting.trunks] == [16, 32, 48]
    model = setting.new_model(3)
    assert model.trunk is setting.trunks[0]
    rng = torch.Generator().manual_seed(0)
    expected = fp.DeepPrompts(4, model.trunk)
    fp.initialize_at(expected, model.trunk.start_tokens, generator=rng)
    assert torch.equal(model.prompts.tokens, expected.tokens)
    first, second = (fp.snapshot(setting.new_model(2)) for _ in range(2))
    assert all(torch.equal(value, second[name]) for name, value in first.items())


@pytest.mark.usefixtures("_fabricated")
def test_heads_and_projections_have_a_rate_of_their_own():
    setting = made("mnist", "depths").setting
    model = setting.new_model(0)
    prompts, head = setting.optimizer(model, 0.03).param_groups
    assert (prompts["lr"], head["lr"]) == (0.03, 0.01)
    assert list(map(id, prompts["params"])) == [id(model.prompts.tokens)]
    others = {id(each) for part in (model.projection, model.head) for each in part.parameters()}
    assert {id(each) for each in head["params"]} == others
    (only,) = setting.optimizer(model.head, 0.03).param_groups
    assert only["lr"] == 0.01


# Data


def test_runs_are_neighboring_files_of_one_domain():
    domains = torch.tensor([0] * 60 + [1] * 300 + [0] * 48 + [1] * 95)
    found = runs_of(domains)
    assert (found.diff() >= 0).all()
    assert all(len(domains[found == run].unique()) == 1 for run in found.unique())
    assert found.bincount().tolist() == [60] * 6 + [48] + [48, 47]


@pytest.mark.parametrize("seed", range(5))
def test_no_run_is_in_both_parts_of_a_split(seed):
    domains = torch.tensor([0] * 240 + [1] * 420)
    own = runs_of(domains)
    data = Photographs(torch.zeros(660, 1, 1, 1), domains, domains, own, (), ())
    positions = torch.randperm(660, generator=torch.Generator().manual_seed(seed))[:600]
    rng = np.random.default_rng(seed)
    first, second = split_by_runs(data, positions, share=0.25, rng=rng)
    assert not set(own[first].tolist()) & set(own[second].tolist())
    assert torch.cat([first, second]).sort().values.equal(positions.sort().values)
    assert [len(own[second][domains[second] == each].unique()) for each in (0, 1)] == [1, 2]


def test_domains_of_digits_are_what_they_are_called():
    images = torch.zeros(8, 1, 28, 28, dtype=torch.uint8)
    images[:, :, 2, 3:20] = 255
    moved, domains = as_domains(images, np.random.default_rng(0))
    assert domains.tolist() == [0, 1, 2, 3] * 2
    assert moved[4].equal(images[4])
    assert moved[5].equal(255 - images[5])
    assert moved[6].equal(torch.from_numpy(np.rot90(images[6].numpy(), axes=(1, 2)).copy()))
    assert (moved[7][images[7] == 255] == 255).all()
    ground = moved[7][images[7] == 0]
    assert ground.max() <= 180
    assert ground.float().std() > 20
    assert not moved[3].equal(moved[7])  # each image has its own texture
    assert images[7].sum() == 17 * 255


@pytest.mark.usefixtures("_fabricated")
@pytest.mark.parametrize(
    ("task", "partition"),
    [("solar", "deep-domains"), ("mnist", "deep-domains"), ("mnist", "fedhpl"), ("mnist", "sgpt")],
)
@pytest.mark.parametrize("validate", [False, True])
def test_no_test_image_and_no_public_image_is_trained_on(task, partition, validate):
    trial, division = made(task, partition, 2, validate), photos.DIVISIONS[partition]
    sides = [trial.federation.inputs, trial.setting.public, trial.test]
    seen = [set(map(int, networks.positions_of(side))) for side in sides]
    assert not seen[0] & seen[1]
    assert not (seen[0] | seen[1]) & seen[2]
    used = torch.cat(list(trial.federation.shards.values()))
    assert len(used.unique()) == len(used)
    for seed in range(3):
        reported = photos.split(task, division, seed, False)[2]
        assert bool(seen[2] & set(reported.tolist())) != validate
    held = trial.mixes.reshape(len(trial.mixes), -1, trial.setting.num_classes)
    assert ((held.sum(2) > 0).sum(1) == 1).all()
    assert partition != "sgpt" or ((held.sum(1) > 0).sum(1) == 2).all()


def test_missing_weights_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no weights of vit_small_patch14_dinov2 at"):
        photographs.load_network(photos.DINO, tmp_path / "none.safetensors")
    rule = r"`--weights vit_small_patch14_dinov2=FILE` is missing; or add --pretrained\."
    with pytest.raises(CompareError, match=rule):
        photos.source_of(Machine(), photos.DINO)


# Runs


def fixed(everyone):
    """A trial of two clients with eight test images of three classes, and fixed predictions."""
    labels = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2])
    guesses = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 0], [0, 1, 1, 1, 1, 1, 0, 2]])
    inputs = as_inputs(torch.arange(8))
    budget = {"rounds": 7, "steps": 1, "cohort_size": 1, "batch_size": 2, "seed": 0}
    setting = Setting(clients=range(2), num_classes=3, public=inputs[:0], **budget)
    shards = {client: torch.arange(2) for client in range(2)}
    federation = Federation(setting, inputs, labels, shards)
    mixes = torch.ones(2, 3, dtype=torch.long)

    def predict(data, answer, state):
        row = guesses[0 if everyone else data.id]
        return lambda inputs: F.one_hot(row[networks.positions_of(inputs)], 3).float()

    method = fp.Method(lambda data, answer, state: ({}, {}), fp.averaging_server({}), predict)
    return method, Trial(setting, federation, inputs, labels, mixes), guesses[: 2 - everyone]


@pytest.mark.parametrize("everyone", [True, False])
def test_figures_of_skewed_classes_are_those_of_scikit_learn(everyone):
    method, trial, guesses = fixed(everyone)
    found = measure.run(method, trial, shared=everyone)
    labels, rows = trial.test_cells, guesses.tolist()
    expected = np.mean([balanced_accuracy_score(labels, row) for row in rows])
    assert found["balanced"] == pytest.approx(expected)
    expected = np.mean([f1_score(labels, row, average="macro") for row in rows])
    assert found["macro_f1"] == pytest.approx(expected)
    accuracy = (guesses == labels).float().mean().item()
    assert found["full"] == pytest.approx(accuracy)


def test_the_accuracy_is_that_of_the_last_rounds_on_average():
    """After round r of seven all images are said to have the class r % 3."""
    method, trial, _ = fixed(everyone=True)
    server = fp.Server(
        {"round": 0},
        answer=lambda client, state: {"class": torch.tensor(float(state["round"] % 3))},
        step=lambda server_round, payloads, state: {"round": server_round + 1},
    )

    def predict(data, answer, state):
        return lambda inputs: F.one_hot(answer["class"].long(), 3).float().expand(len(inputs), 3)

    method = method._replace(server=server, predict=predict)
    for last, right in ((1, 2), (3, 2 + 4 + 2)):  # of four, two and two images
        found = measure.run(method, trial, shared=True, last_rounds=last)
        assert found["full"] == pytest.approx(right / 8 / last)


@pytest.mark.usefixtures("_fabricated")
def test_a_head_keeps_features_log_probabilities_and_labels_for_its_backward_pass():
    (row,) = (each for each in TASKS["mnist"].rows("deep-domains") if each.method == "head_tuning")
    trial = photos.make("mnist", "deep-domains", row, seed=0, machine=RANDOM, validate=False)
    method = row.entry.make(trial.setting, **row.values)

    def predict(*args):
        model = method.predict(*args)
        model.register_forward_hook(lambda model, images, logits: logits.exp().sum() and None)
        return model

    for each in (method, method._replace(predict=predict)):  # the second forgets what it computes
        kept = photos.bytes_kept(trial, each, fp.Round(0, method.server.state, {}))["kept"]
        assert kept == 8 * (4 * 16 + 4 * 10 + 8) + 4  # 8 images, 16 features, 10 classes, a count


@pytest.mark.usefixtures("_fabricated")
def test_frozen_weights_do_not_count_as_kept_for_the_backward_pass():
    (row,) = (each for each in TASKS["mnist"].rows("deep-domains") if each.method == "fedvpt_d")
    trial = photos.make("mnist", "deep-domains", row, seed=0, machine=RANDOM, validate=False)
    found = []
    for size in (8, 16):
        setting = replace(trial.setting, batch_size=size)
        part = trial._replace(
            setting=setting, federation=replace(trial.federation, setting=setting)
        )
        values = {"learning_rate": 0.01}
        method = row.entry.make(setting, **values)
        found.append(photos.bytes_kept(part, method, fp.Round(0, method.server.state, {}))["kept"])
    assert found[1] / found[0] > 1.97  # with the weights, it is below


@pytest.mark.parametrize("name", ["digits", "networks"])
def test_clients_of_digits_train_heads_with_the_rate_of_the_row(name):
    row = TASKS[name].rows("few")[-1]
    row = replace(row, values={**row.values, "head_rate": 0.5})
    trial = TASKS[name].make("few", row, seed=0, machine=Machine(shrink=0.01), validate=False)
    rates = [
        each["lr"] for each in trial.setting.optimizer(trial.setting.new_model(0), 0.1).param_groups
    ]
    assert rates == [0.1, 0.5]


def test_rows_of_one_kind_of_parameters_share_one_grid_with_the_default_inside():
    task, found = TASKS["mnist"], {}
    for row in task.rows("deep-labels"):
        trials = task.trials("deep-labels", row)
        assert trials[0] == row.values
        found[row.title] = sorted({each["learning_rate"] for each in trials})
        assert len(found[row.title]) == 5
        assert found[row.title][0] < row.values["learning_rate"] < found[row.title][-1]
        heads = {each.get("head_rate") for each in trials}
        assert heads == ({None} if row.method in tuning.ONE_RATE else {0.003, 0.01, 0.03})
    assert found["FedVPT-D"] == found["pFedMe"] == found["SGPT"] == [0.001, 0.003, 0.01, 0.03, 0.1]
    assert found["LoRA, rank 1"] == found["LoRA, rank 4"] == [0.0003, 0.001, 0.003, 0.01, 0.03]
    fixed = [row for row in task.rows("depths") if task.trials("depths", row) == [row.values]]
    assert [row.title for row in fixed] == list(photos.DIVISIONS["depths"].fixed)


@pytest.mark.usefixtures("_fabricated")
def test_rows_without_prompts_train_the_late_blocks_in_float32_and_a_head(monkeypatch):
    half = photos.dino.__wrapped__(photos.RANDOM)
    half.model.bfloat16()
    monkeypatch.setattr(photos, "dino", lambda source: half)
    monkeypatch.setattr(photos, "front", cache(photos.front.__wrapped__))
    trial = made("mnist", "deep-domains")
    data = trial.federation.data
    rows = {row.method: row for row in photos.TUNED if row.method != "lora_thrice"}
    for row in rows.values():  # one rank, and once as long, of LoRA
        method = row.entry.make(trial.setting, **row.values)
        *_, now = fp.run_rounds(method, data, trial.setting.cohorts())
        values = now.server["values"] or next(iter(now.clients.values()))  # without messages
        assert {value.dtype for value in values.values()} == {torch.float32}, row
        blocks = {name.split(".")[2] for name in values if name.startswith("tuned")}
        assert blocks == {"1", "2"}, row  # of the three blocks, whose first one runs once
        first = fp.snapshot(method.predict(data(0, 0), {}, {}), buffers=True)
        assert not any(torch.equal(value, first[name]) for name, value in values.items()), row


@pytest.mark.usefixtures("_fabricated")
@pytest.mark.parametrize(
    ("partition", "method"),
    [("depths", "fedhpl_p"), pytest.param("networks", "fedl2g_f", marks=pytest.mark.slow)],
)
def test_clients_with_unlike_networks_run(partition, method):
    (row,) = (row for row in TASKS["solar"].rows(partition) if row.method == method)
    found = cells.run(Cell(TASKS["solar"], partition, row, 1, None, RANDOM))
    assert 0 <= found["macro_f1"] <= 1


# Patches


def test_a_digit_and_four_pieces_are_on_each_canvas(monkeypatch):
    digits = torch.zeros(1500, 1, 28, 28, dtype=torch.uint8)
    digits[:, :, 10:18, 10:18] = 200
    data = Photographs(digits, torch.arange(1500) % 10, *[torch.zeros(1500)] * 2, (), ())
    monkeypatch.setattr(photographs, "mnist", lambda: data)
    monkeypatch.setattr(patches, "NUM_TRAIN", 100)
    monkeypatch.setattr(patches, "NUM_TEST", 50)
    sheets, labels = patches.canvases.__wrapped__()
    assert sheets.shape == (150, 1, 98, 98)
    inked = (sheets > 100).float().sum((1, 2, 3))
    assert 11**2 <= inked.min() <= inked.max() <= 13**2 + 4 * 13**2  # a square is 12 pixels wide
    assert labels.equal(data.labels[:150])
    assert not sheets[0].equal(sheets[1])


def test_prototypes_without_transport_are_the_mean_cosine_of_the_tokens_that_are_read():
    torch.manual_seed(0)
    tokens = torch.randn(3, 5, 4)
    rows = {row.title: row for row in patches.ROWS}
    for title, read in (("Mean of patches", slice(1, None)), ("Class token", slice(1))):
        trial = Trial(
            Setting(
                clients=[0],
                num_classes=2,
                rounds=1,
                steps=1,
                cohort_size=1,
                batch_size=1,
                seed=0,
                public=tokens[:0],
            ),
            None,
            tokens,
            None,
            None,
        )
        method = patches.method(rows[title], trial)
        model = method.predict(None, method.server.answer(0, method.server.state), {})
        cosines = [
            F.cosine_similarity(tokens[:, read, None], part.weight[None, None], dim=-1).mean(1)
            for part in (model.shared, model.private)
        ]
        expected = 30 * sum(cosines) / 2
        torch.testing.assert_close(model(tokens), expected)


@pytest.mark.parametrize("validate", [False, True])
def test_a_federation_of_patches_has_a_few_shots_of_two_classes(validate, monkeypatch):
    tokens, labels = torch.randn(1500, 5, 4), torch.arange(1500) % 10
    monkeypatch.setattr(patches, "tokens", lambda source: tokens)
    monkeypatch.setattr(patches, "canvases", lambda: (None, labels))
    where = {"seed": 1, "machine": replace(RANDOM, shrink=1.0), "validate": validate}
    trial = patches.make("shots-4", patches.ROWS[0], **where)
    assert trial.mixes.sum(1).tolist() == [8] * 10
    assert (trial.mixes == 4).sum(1).tolist() == [2] * 10
    assert torch.equal(trial.test, tokens[1000:]) != validate
    short = replace(trial.setting, rounds=1, epochs=1)
    trial = trial._replace(setting=short, federation=replace(trial.federation, setting=short))
    for row in patches.ROWS[1:3] if validate else ():
        found = measure.run(patches.method(row, trial), trial, shared=False)
        assert found["bytes_up"] == 4 * 10 * 4 + 4
