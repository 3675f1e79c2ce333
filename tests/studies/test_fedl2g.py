"""FedL2G's study: training data of clients, contents of messages, and its command line."""

import csv
import re
from argparse import Namespace

import numpy as np
import pytest
import torch
import torch.nn as nn
from torch import Tensor

import fedprompt as fp
from embedded.tasks import load_task
from embedded.zoo import GROUPS, TINY, encoder
from studies import fedl2g
from studies import fedl2g_report as report


def arguments(*given: str) -> Namespace:
    parser = report.flags("test")
    parser.set_defaults(
        rounds=2,
        warm_up=1,
        learning_rate=0.01,
        group="tiny",
        image_size=16,
        device="cpu",
        weight=None,
        guide_learning_rate=None,
    )
    return parser.parse_args(given)


@pytest.fixture(scope="module")
def task():
    """Return a task of few digits."""
    whole = load_task("digits", root=".", seed=0, image_size=16)
    return whole._replace(train=whole.train.first(120), test=whole.test.first(60))


@pytest.fixture
def linear(monkeypatch):
    """Replace the deep networks by fast linear ones without batch normalization.

    Return the list of the clients that `federate` creates.
    """
    made, make = [], fedl2g.new_client
    monkeypatch.setattr(
        fedl2g,
        "encoder",
        lambda group, client, size: (nn.Sequential(nn.Flatten(), nn.Linear(256, 8)), 8),
    )
    monkeypatch.setattr(fedl2g, "new_client", lambda *given: made.append(make(*given)) or made[-1])
    return made


def own_shards(task, *sizes: int, quiz_size: int = 10) -> list[report.Shard]:
    generator, positions, shards = np.random.default_rng(0), iter(range(120)), []
    for size in sizes:
        own = np.array([next(positions) for _ in range(size)], dtype=np.int64)
        study, quiz = fp.data.study_quiz_split(
            task.train.labels[own], quiz_size=quiz_size, generator=generator
        )
        shards.append(report.Shard(own[study], own[quiz], np.arange(30)))
    return shards


def sent(run: report.Run, direction: str) -> dict[int, list[int]]:
    return {
        client: [
            entry.num_bytes
            for entry in run.ledger.entries
            if (entry.direction, entry.client) == (direction, client)
        ]
        for client in range(len(run.clients))
    }


@pytest.mark.parametrize("name", list(fedl2g.METHODS))
def test_a_client_without_study_samples_sends_nothing(name, task, linear):
    # The quiz takes all of 10 and of 4 samples, and leaves one of 11.
    shards = own_shards(task, 40, 10, 4, 0, 11)
    run = fedl2g.federate(name, task, shards, arguments())
    assert torch.isfinite(run.accuracy).all()
    assert torch.isfinite(run.losses).all()
    up = [client for client, messages in sent(run, "up").items() if messages]
    if fedl2g.METHODS[name].payload is fedl2g.own_gradient:
        assert up == [0]
        assert torch.isfinite(run.guides).all()
    elif fedl2g.METHODS[name].payload:
        assert up == [0, 1, 2, 4]  # other clients also learn from their quiz samples


@pytest.mark.parametrize(("name", "width"), [("FedL2G-l", 10), ("FedL2G-f", 32)])
def test_payloads_contain_rows_of_study_classes_and_broadcasts_the_whole_table(
    name, width, task, linear, monkeypatch
):
    batches, gradient = [], fp.guide_gradient
    monkeypatch.setattr(
        fp,
        "guide_gradient",
        lambda *given, **step: batches.append(given[2]) or gradient(*given, **step),
    )
    run = fedl2g.federate(name, task, own_shards(task, 40, 60), arguments())
    rows = [len(set(labels.tolist())) for _, labels in batches]
    assert len(set(rows)) > 1  # batches have different numbers of classes
    up = [entry.num_bytes for entry in run.ledger.entries if entry.direction == "up"]
    assert up == [4 * (number * width + 10) for number in rows]  # rows of floats, and ten flags
    # Table 3, in three rounds.
    assert all(messages == [4 * 10 * width] * 3 for messages in sent(run, "down").values())


def test_clients_train_on_their_study_samples_after_the_warm_up(task, linear, monkeypatch):
    shards, args = own_shards(task, 40, 60), arguments()
    weights: list[Tensor] = []
    gradient = fp.guide_gradient

    def spy(client, *given, **step):
        weights.append(client.head.weight.detach().clone())
        return gradient(client, *given, **step)

    seen, epoch = [], report.epoch
    monkeypatch.setattr(fp, "guide_gradient", spy)
    monkeypatch.setattr(
        report,
        "epoch",
        lambda task, indices, *given: seen.append(indices) or epoch(task, indices, *given),
    )
    fedl2g.federate("FedL2G-l", task, shards, args)
    first = [fedl2g.new_client(k, task, "logits", args).head.weight for k in range(2)]
    assert len(weights) == 6  # two clients, a round of warm-up and two more
    assert all(torch.equal(before, after) for before, after in zip(first, weights[:2], strict=True))
    assert not any(
        torch.equal(before, after) for before, after in zip(first, weights[2:4], strict=True)
    )
    for k, shard in enumerate(shards):
        assert all(np.array_equal(indices, shard.study) for indices in seen[k::2])


def test_lg_fedavg_averages_only_heads_by_size(task, linear):
    # Clients do not train, so the average of their initial heads is known.
    args = arguments("--learning-rate", "1e-9")
    args.rounds = 2
    shards = own_shards(task, 30, 90)
    fedl2g.federate("LG-FedAvg", task, shards, args)
    first, second = (client.head.weight.detach() for client in linear)
    start = [fedl2g.new_client(k, task, "logits", args) for k in range(2)]
    expected = (30 * start[0].head.weight + 90 * start[1].head.weight) / 120
    torch.testing.assert_close(first, expected.detach(), atol=1e-6, rtol=0)
    torch.testing.assert_close(second, expected.detach(), atol=1e-6, rtol=0)
    for client, before in zip(linear[:2], start, strict=True):
        torch.testing.assert_close(client.network[1].weight, before.network[1].weight)
    assert not torch.equal(start[0].network[1].weight, start[1].network[1].weight)


def test_prototypes_are_broadcast_after_a_client_has_sent_them(task, linear):
    run = fedl2g.federate("FedProto", task, own_shards(task, 60, 60), arguments())
    known = len(set(task.train.labels.tolist()))
    assert list(sent(run, "down").values()) == [[0, known * 32 * 4]] * 2


def test_half_of_the_clients_take_part_and_the_others_keep_their_networks(task, linear):
    args = arguments("--participation", "0.5")
    args.rounds = 1
    run = fedl2g.federate("FedDistill", task, own_shards(task, 30, 30, 30, 30), args)
    present = [client for client, messages in sent(run, "up").items() if messages]
    made = list(linear)
    start = [fedl2g.new_client(k, task, "logits", args).head.weight for k in range(4)]
    assert len(present) == 2
    assert [k for k in range(4) if not torch.equal(start[k], made[k].head.weight)] == present


@pytest.mark.parametrize("name", ["fixed random features", "fixed random logits"])
def test_fixed_guides_do_not_change_and_are_not_in_the_reported_loss(name, task, linear):
    losses = []
    for weight in ("0", "5"):
        args = arguments("--learning-rate", "1e-9")  # The networks hardly change.
        args.weight, args.guide_learning_rate = float(weight), 3.0
        run = fedl2g.federate(name, task, own_shards(task, 60, 60), args)
        draw = fp.stream_generator(0, server_round=0, purpose="guides")
        assert torch.equal(run.guides, torch.randn(*run.guides.shape, generator=draw))
        losses.append(run.losses)
    torch.testing.assert_close(*losses)


def test_flags_change_only_the_weight_and_the_learning_rate_of_guides():
    args = Namespace(weight=7.0, guide_learning_rate=5.0)
    assert [fedl2g.tuned(name, args)[1::2] for name in ("local only", "FedProto", "FedL2G-f")] == [
        (0.0, None),
        (7.0, None),
        (7.0, 5.0),
    ]


def test_accuracy_is_the_share_of_a_clients_own_test_images(task):
    client = fedl2g.Client(nn.Flatten(), 256, 10, guided="logits", args=arguments())
    nn.init.zeros_(client.head.weight)
    nn.init.zeros_(client.head.bias)
    with torch.no_grad():
        client.head.bias[3] = 1.0  # the prediction is always class 3
    threes = np.flatnonzero(task.test.labels == 3)
    others = np.flatnonzero(task.test.labels != 3)
    assert (
        report.accuracy(client, task.test, np.concatenate([threes[:1], others[:3]]), arguments())
        == 0.25
    )
    assert report.accuracy(client, task.test, np.arange(0), arguments()) == 0.0


@pytest.mark.parametrize("split", [(), ("--classes-per-client", "2")])
def test_clients_are_tested_on_their_own_mix_of_classes_and_share_no_image(task, split):
    shards = report.deal(task, arguments("--clients", "5", *split))
    own = np.concatenate([np.concatenate(shard[:2]) for shard in shards])
    assert sorted(own) == list(range(120))
    assert sorted(np.concatenate([shard.test for shard in shards])) == list(range(60))
    for shard in shards:
        assert len(shard.quiz) == min(10, len(shard.study) + len(shard.quiz))
        if split:
            classes = set(task.train.labels[np.concatenate(shard[:2])])
            assert len(classes) <= 2
            assert set(task.test.labels[shard.test]) <= classes


@pytest.mark.parametrize("name", list(TINY))
def test_tiny_networks_return_features_of_their_width_and_can_be_trained(name):
    network, width = encoder("tiny", list(TINY).index(name), 16)
    assert network.training
    assert network(torch.rand(2, 1, 16, 16)).shape == (2, width)
    assert 4_000 < sum(parameter.numel() for parameter in network.parameters()) < 150_000


@pytest.mark.parametrize(
    "name",
    [name if name == "tiny" else pytest.param(name, marks=pytest.mark.slow) for name in GROUPS],
)
def test_groups_are_named_after_their_number_of_networks(name):
    assert name == "tiny" or name.removeprefix("HtFE").removeprefix("HtM") == str(len(GROUPS[name]))
    with torch.device("meta"):  # no values are computed
        widths = [
            encoder(name, client, 16 if name == "tiny" else 32)[1]
            for client in range(len(GROUPS[name]))
        ]
    expected = {
        "cnn": 512,
        "resnet4": 64,
        "resnet8": 256,
        "resnet18": 512,
        "resnet152": 2048,
        "mobilenet_v2": 1280,
        "vit_b_32": 768,
    }
    for network, width in zip(GROUPS[name], widths, strict=True):
        assert name == "tiny" or width == expected.get(network, width)


@pytest.mark.slow
def test_the_default_run_prints_methods_and_the_formula_and_writes_a_picture_and_ledgers(
    monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr("sys.argv", ["fedl2g.py", "--quick", "--out", str(tmp_path)])
    fedl2g.main()
    printed = capsys.readouterr().out
    names = [line.split("|")[1].strip() for line in printed.splitlines() if line.startswith("|")]
    assert names[0] == "method"
    assert names[2:] == ["local only", "FedProto", "FedL2G-f"]
    assert "12.50 KiB down a round; formula 10 x 10 x 32 x 4 bytes = 12.50 KiB" in printed
    # 20 clients x 100 classes x 100 or 512 x 4 bytes, in units of 2**20.
    assert "0.763 and 3.906 MiB down" in printed
    assert (tmp_path / "fedl2g.png").stat().st_size > 10_000
    entries = list(csv.DictReader((tmp_path / "fedl2g-f.csv").read_text().splitlines()))
    assert (
        sum(int(entry["num_bytes"]) for entry in entries if entry["direction"] == "down")
        == 3 * 10 * 10 * 32 * 4
    )


@pytest.mark.slow
def test_the_full_table_has_a_line_for_every_setting_and_method(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("sys.argv", ["fedl2g.py", "--full", "--quick", "--out", str(tmp_path)])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    fedl2g.main()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 3 * len(fedl2g.METHODS)
    assert all(re.search(r"\d ± \d", line) for line in lines[2:])


def test_accuracy_is_over_all_images_and_effects_are_those_of_the_losses():
    shards = [report.Shard(np.arange(9), np.arange(1), np.arange(size)) for size in (1, 3)]
    accuracy, losses = (
        torch.tensor([[1.0, 0.0], [0.0, 1.0]]),
        torch.tensor([[1.0, 3.0], [2.0, 2.0]]),
    )
    run = report.Run([], torch.zeros(2, 2), accuracy, losses, fp.Ledger())
    summary = run.accuracies(shards)
    assert summary.last_mean == pytest.approx((1 / 4 + 3 / 4) / 2)
    assert summary.best == 3 / 4
    # The loss of one client rises by 1, and the mean is constant.
    assert report.line([run], [shards])[2:4] == [
        "0.500",
        "0.000",
    ]
