"""FedOTP's study: private contexts stay on the clients, and the server averages correctly.

The study also runs from its command line.
"""

import copy
import csv
import re
from argparse import Namespace
from functools import cache
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image

import fedprompt as fp
from colors import write_images
from embedded.clip_tasks import Part, load_task
from printed import rows
from studies import fedotp, fedotp_report

METHODS = ["zero-shot", "local CoOp", "PromptFL", "FedOTP"]
SENDING = [name for name, (num_shared, _, _) in fedotp.ROWS.items() if num_shared]
PERSONAL = [
    name for name, (num_shared, num_private, _) in fedotp.ROWS.items() if num_shared and num_private
]


def arguments(*given: str) -> Namespace:
    parser = fedotp_report.flags("test")
    parser.set_defaults(
        epsilon=0.1, mass=0.8, rounds=2, steps=2, batch_size=16, every=2, device="cpu"
    )
    return parser.parse_args(given)


@pytest.fixture(scope="module")
def task():
    """Return a task of few cluttered digits."""
    whole = load_task(arguments())
    return whole._replace(train=whole.train.first(120), test=whole.test.first(60))


@pytest.fixture(scope="module")
def mixed():
    """Return a task of digits in three domains."""
    return load_task(arguments("--domains", "plain,inverted,noisy"))


@pytest.fixture
def shards():
    """Split images over clients of different sizes, so that an unweighted mean is detected."""
    return list(np.split(np.arange(120), [20, 70]))


@pytest.fixture
def clients(monkeypatch):
    """Return a list to which `federate` appends the clients that it creates."""
    made, make = [], fedotp.new_client
    monkeypatch.setattr(fedotp, "new_client", lambda *given: made.append(make(*given)) or made[-1])
    return made


def private_tokens(clients) -> set[bytes]:
    """Return every token of every private context as bytes."""
    return {
        row.numpy().tobytes()
        for client in clients
        for row in client["private"].context.detach().flatten(0, -2)
    }


def tokens_of(message) -> set[bytes]:
    values = [
        entry.value if isinstance(entry, fp.Weighted) else entry for entry in message.values()
    ]
    return {row.numpy().tobytes() for value in values for row in value.flatten(0, -2)}


@pytest.mark.parametrize("name", PERSONAL)
def test_no_private_token_is_in_any_message(name, task, shards, clients, monkeypatch):
    record, seen = fp.Ledger.record, []

    def watched(self, message, **where):
        assert list(message) == ["context"]
        assert not tokens_of(message) & private_tokens(clients)
        seen.append(where["direction"])
        record(self, message, **where)

    monkeypatch.setattr(fp.Ledger, "record", watched)
    _, _, ledger = fedotp.federate(name, task, shards, arguments())
    assert sorted(seen) == ["down"] * 6 + ["up"] * 6  # three clients, two rounds
    # Each message is one context of 16 tokens of 64 floats. A payload also contains its weight.
    assert {entry.num_bytes for entry in ledger.entries} == {16 * 64 * 4, 16 * 64 * 4 + 4}
    assert {entry.name for entry in ledger.entries} == {"context"}


@pytest.mark.parametrize("name", PERSONAL)
def test_payloads_do_not_depend_on_the_private_context(name, task, shards, clients, monkeypatch):
    collect, compared = fp.collect, []

    def watched(module, **options):
        payload = collect(module, **options)
        before = [copy.deepcopy(client["private"].state_dict()) for client in clients]
        with torch.no_grad():
            for client in clients:
                client["private"].context.normal_()
        again = collect(module, **options)
        for client, state in zip(clients, before, strict=True):
            client["private"].load_state_dict(state)
        assert list(payload) == list(again)
        for entry, other in zip(payload.values(), again.values(), strict=True):
            assert entry.value.numpy().tobytes() == other.value.numpy().tobytes()
            assert entry.weight.numpy().tobytes() == other.weight.numpy().tobytes()
        compared.append(payload)
        return payload

    monkeypatch.setattr(fp, "collect", watched)
    fedotp.federate(name, task, shards, arguments())
    assert len(compared) == 6


@pytest.mark.parametrize("name", SENDING)
def test_the_server_averages_only_shared_contexts_by_size(name, task, shards, clients, monkeypatch):
    collect, sent, kept = fp.collect, [], []

    def watched(module, **options):
        sent.append((module.context.detach().clone(), options["weight"]))
        (owner,) = [client for client in clients if client["shared"] is module]
        kept.append(owner["private"].context.detach().clone() if "private" in owner else None)
        return collect(module, **options)

    monkeypatch.setattr(fp, "collect", watched)
    fedotp.federate(name, task, shards, arguments())
    assert [weight for _, weight in sent] == [20, 50, 50] * 2
    mean = sum(value.double() * weight for value, weight in sent[3:]) / 120
    for client, private in zip(clients, kept[3:], strict=True):
        torch.testing.assert_close(
            client["shared"].context.detach().double(), mean, rtol=1e-6, atol=1e-8
        )
        assert torch.equal(client["shared"].context, clients[0]["shared"].context)
        if private is not None:
            assert torch.equal(client["private"].context, private)
    values = [value for value, _ in sent[3:]]
    assert not torch.equal(values[0], values[1])  # the shared contexts differ
    if kept[0] is not None:
        assert not torch.equal(kept[3], kept[4])  # the private contexts differ


def test_with_one_client_averaging_changes_nothing(task, clients, monkeypatch):
    collect, sent = fp.collect, []

    def watched(module, **options):
        sent.append(module.context.detach().clone())
        return collect(module, **options)

    monkeypatch.setattr(fp, "collect", watched)
    fedotp.federate("FedOTP", task, [np.arange(120)], arguments())
    assert torch.equal(clients[0]["shared"].context, sent[-1])


def test_local_rows_and_zero_shot_send_nothing(task, shards):
    for name in set(fedotp.ROWS) - set(SENDING):
        clients, _, ledger = fedotp.federate(name, task, shards, arguments())
        assert not ledger.entries
        assert all(list(client) == ["private"] for client in clients)
        if name == "zero-shot":  # its contexts do not change
            assert all(
                torch.equal(client["private"].context[0], task.tower.words("a photo of a"))
                for client in clients
            )


def test_all_clients_start_with_equal_contexts_and_shared_differ_from_private_ones(task):
    first, second = (fedotp.new_client(task, 1, 1, arguments()) for _ in range(2))
    assert torch.equal(first["shared"].context, second["shared"].context)
    assert torch.equal(first["private"].context, second["private"].context)
    assert not torch.equal(first["shared"].context, first["private"].context)


def test_each_row_matches_images_by_its_rule(task):
    # The reference loops over one image, one class and one prompt at a time.
    tokens, text = (
        task.test.tokens[:3],
        torch.randn(2, 10, 64, generator=torch.Generator().manual_seed(0)),
    )
    # Shape (images, tokens, prompts, classes).
    cosine = torch.cosine_similarity(tokens[:, :, None, None], text, dim=-1)
    logits = {
        kind: fedotp.matcher(kind, 10.0, arguments())(tokens, text)
        for kind in ("class token", "averaging", "classical", "partial")
    }
    torch.testing.assert_close(logits["class token"], 10 * cosine[:, 0].mean(1))
    torch.testing.assert_close(logits["averaging"], 10 * cosine[:, 1:].mean((1, 2)))
    for kind, mass in (("classical", 1.0), ("partial", 0.8)):
        a, b = torch.full((64,), 1 / 64), torch.full((2,), mass / 2)
        for image in range(3):
            for label in range(10):
                similarity = cosine[image, 1:, :, label]
                plan = fp.transport.dykstra(1 - similarity, a, b, max_iterations=20_000).plan
                torch.testing.assert_close(
                    logits[kind][image, label], 10 * (plan * similarity).sum(), rtol=0, atol=1e-3
                )


@pytest.mark.slow
def test_zero_shot_beats_chance_clearly():
    # The chance level of ten classes is 10 %. Its standard deviation on 597 images is 1.2 points.
    for flags, at_least in ((("--smallest", "32", "--largest", "32"), 0.35), ((), 0.2)):
        whole = load_task(arguments(*flags))
        _, history, _ = fedotp.federate(
            "zero-shot", whole, [np.arange(10)], arguments("--rounds", "1")
        )
        share = whole.counts(whole.test) / len(whole.test.labels)
        assert float(history[1][0] @ share) > at_least


def test_splits_are_by_label_by_domain_or_by_both(mixed):
    labels, domains = mixed.train.labels.numpy(), mixed.train.domains.numpy()

    def split(*flags):
        shards = mixed.shards(arguments(*flags))
        assert sorted(np.concatenate(shards).tolist()) == list(range(1200))
        return [(set(labels[shard].tolist()), set(domains[shard].tolist())) for shard in shards]

    assert [len(classes) for classes, _ in split("--partition", "pathological")] == [2] * 5
    assert [owned for _, owned in split("--partition", "domain")] == [{0}, {1}, {2}]
    assert [owned for _, owned in split("--partition", "both")] == [{0}, {0}, {1}, {1}, {2}, {2}]
    assert len(split("--partition", "dirichlet")) == 5
    halves = mixed.shards(arguments("--partition", "both", "--alpha", "0.1"))[:2]
    counts = np.stack([np.bincount(labels[half], minlength=10) for half in halves])
    assert (
        counts.max(0) > 4 * counts.min(0)
    ).sum() > 5  # Most classes belong mainly to one of the two.


@pytest.mark.parametrize(("steps", "sizes"), [(None, [4, 4, 2] * 5), (4, [4, 4, 2, 4]), (0, [])])
def test_clients_train_for_whole_epochs_or_for_a_number_of_steps(steps, sizes):
    part = Part(torch.zeros(20, 1, 1), torch.arange(20), torch.zeros(20, dtype=torch.long))
    owned, generator = np.arange(5, 15), torch.Generator().manual_seed(0)
    batches = [
        labels
        for _, labels in part.training(
            owned, "cpu", size=4, steps=steps, epochs=5, generator=generator
        )
    ]
    assert [len(labels) for labels in batches] == sizes
    for epoch in range(len(sizes) // 3):
        assert sorted(torch.cat(batches[3 * epoch : 3 * epoch + 3]).tolist()) == owned.tolist()
    # Each epoch has a separate order.
    assert len(sizes) < 15 or not torch.equal(batches[0], batches[3])


def test_accuracy_is_that_of_each_domain_and_class(mixed):
    labels, domains = torch.tensor([0, 0, 1, 1, 1]), torch.tensor([0, 0, 0, 1, 1])
    part = Part(torch.eye(10)[[0, 1, 1, 1, 0]], labels, domains)
    accuracy = mixed._replace(test=part).accuracy(lambda tokens: tokens, "cpu")
    assert accuracy.tolist() == [0.5, 1] + [0] * 9 + [0.5] + [0] * 18


def run(monkeypatch, capsys, out: Path, *given: str) -> str:
    monkeypatch.setattr("sys.argv", ["fedotp.py", "--quick", "--out", str(out), *given])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    fedotp.main()
    return capsys.readouterr().out


@pytest.mark.slow
def test_the_default_run_reports_its_rows_and_writes_pictures_and_ledgers(
    monkeypatch, capsys, tmp_path
):
    figures = rows(run(monkeypatch, capsys, tmp_path))
    assert list(figures) == METHODS
    for lowest, average, highest, own in figures.values():
        assert 0 < lowest <= average <= highest < 100
        assert 0 < own < 100
    for picture in ("fedotp.png", "fedotp_plans.png"):
        assert (tmp_path / picture).stat().st_size > 10_000
    entries = list(csv.DictReader((tmp_path / "fedotp.csv").read_text().splitlines()))
    assert {int(entry["num_bytes"]) for entry in entries if entry["direction"] == "up"} == {
        16 * 64 * 4 + 4
    }


@pytest.mark.slow  # the killed runs of test_resume.py also show that runs are reproducible
def test_the_same_seed_gives_the_same_figures_and_another_seed_others(
    monkeypatch, capsys, tmp_path
):
    first, again, other = (
        rows(run(monkeypatch, capsys, tmp_path, "--seed", seed)) for seed in ("1", "1", "2")
    )
    assert first == again
    assert first != other


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """Write two domains of three classes of noisy images, with one color for each class.

    The second domain is darker.
    """
    root = tmp_path_factory.mktemp("images")
    write_images(root, "bright", train=6, test=2)
    write_images(root, "dark", light=60, train=6, test=2)
    return root


@pytest.mark.slow
def test_paper_setting_on_folders_with_random_weights(monkeypatch, capsys, tmp_path, folders):
    given = (
        "--model",
        "ViT-B-16",
        "--dataset",
        "bright,dark",
        "--root",
        str(folders),
        "--image-size",
        "32",
        "--partition",
        "domain",
    )
    printed = run(monkeypatch, capsys, tmp_path, *given)
    assert list(rows(printed)) == METHODS
    entries = list(csv.DictReader((tmp_path / "fedotp.csv").read_text().splitlines()))
    assert {entry["client"] for entry in entries} == {"0", "1"}  # one for each domain
    assert {int(entry["num_bytes"]) for entry in entries if entry["direction"] == "up"} == {
        16 * 512 * 4 + 4
    }


CREATE = open_clip.create_model_and_transforms


@cache
def small_model():
    """Return a small model in place of those of the paper, which take seconds to draw."""
    return CREATE("ViT-S-32-alt", None, force_image_size=32)


@pytest.mark.parametrize(
    ("pretrained", "quick_gelu"), [("openai", True), ("laion2b_s34b_b88k", False), (None, False)]
)
def test_weights_get_the_activation_that_they_were_trained_with(
    monkeypatch, folders, pretrained, quick_gelu
):
    # open_clip only warns about a mismatch. The model is created without weights, so that the test
    # needs no download.
    def without_weights(name, tag, **options):
        assert (name, tag, options["force_quick_gelu"]) == ("ViT-B-16", pretrained, quick_gelu)
        return copy.deepcopy(small_model())

    monkeypatch.setattr(open_clip, "create_model_and_transforms", without_weights)
    given = ("--model", "ViT-B-16", "--dataset", "bright", "--root", str(folders))
    assert (
        len(
            load_task(
                arguments(*given, *(("--pretrained", pretrained) if pretrained else ()))
            ).test.labels
        )
        == 6
    )


def test_domains_must_have_the_same_classes(tmp_path, folders, monkeypatch):
    monkeypatch.setattr(
        open_clip, "create_model_and_transforms", lambda *_, **__: copy.deepcopy(small_model())
    )
    (tmp_path / "other" / "train" / "lone").mkdir(parents=True)
    (tmp_path / "other" / "test" / "lone").mkdir(parents=True)
    for part in ("train", "test"):
        Image.new("RGB", (8, 8)).save(tmp_path / "other" / part / "lone" / "0.png")
    (tmp_path / "bright").symlink_to(folders / "bright")
    with pytest.raises(
        ValueError, match=r"`--dataset` must name domains of the classes \['color_0'.*got .*lone"
    ):
        load_task(
            arguments(
                "--dataset",
                "bright,other",
                "--root",
                str(tmp_path),
                "--model",
                "ViT-B-16",
                "--image-size",
                "32",
            )
        )


@pytest.mark.slow
def test_full_tables_have_a_line_for_every_size_setting_and_method(monkeypatch, capsys, tmp_path):
    tables = [
        table.splitlines()
        for table in run(monkeypatch, capsys, tmp_path, "--full").strip().split("\n\n")
    ]
    assert [len(table) for table in tables] == [2 + 3, 2 + 5 * len(fedotp.ROWS)]
    assert all(re.search(r"\d ± \d", line) for table in tables for line in table[2:])


def test_gains_over_a_baseline_are_differences_with_the_same_seed():
    def measured(full, own):
        # One client holds the first of two cells, which have equal numbers of test images.
        accuracy = torch.tensor([[[own, 2 * full - own]]])
        return fedotp_report.Run(
            [],
            [1],
            fedotp_report.Result(np.array([[4, 0]]), torch.tensor([5, 5]), accuracy, fp.Ledger()),
        )

    seeds = [
        {"a": measured(0.5, 0.6), "b": measured(0.7, 0.5)},
        {"a": measured(0.6, 0.8), "b": measured(0.8, 0.9)},
    ]
    assert fedotp_report.against(seeds, "a") == [
        ["a", "55.0 ± 7.1", "70.0 ± 14.1", "", ""],
        ["b", "75.0 ± 7.1", "70.0 ± 28.3", "20.0 ± 0.0", "0.0 ± 14.1"],
    ]
