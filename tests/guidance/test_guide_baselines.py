"""Table 3 of FedL2G, and the methods that it is compared with, made from the same functions."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from fedprompt import (
    Ledger,
    Weighted,
    class_means,
    collect,
    guided_loss,
    num_bytes,
    overwrite,
    snapshot,
    weighted_mean,
)


@pytest.mark.parametrize(("dim", "mebibytes"), [(100, 0.763), (512, 3.906)])
def test_bytes_down_of_table_3(dim, mebibytes):
    """L-l: 20 clients, 100 classes, float32. Table 3 prints 0.76 and 3.89 MiB."""
    ledger, guides = Ledger(), {"guides": torch.zeros(100, dim)}
    for client in range(20):
        ledger.record(guides, direction="down", client=client, server_round=0)
    assert ledger.total(direction="down") == 20 * 100 * dim * 4
    assert round(ledger.total(direction="down") / 2**20, 3) == mebibytes


@pytest.mark.parametrize(("dim", "mebibytes"), [(100, 0.34), (512, 1.75)])
def test_bytes_up_are_the_rows_of_the_study_batch(dim, mebibytes):
    """L-l: the bytes up that Table 3 prints are those of 45 rows for each of 20 clients."""
    for classes in (7, 45):
        entry = Weighted(torch.ones(100, dim), (torch.arange(100) < classes).float())
        assert num_bytes({"guides": entry}) == classes * dim * 4 + 100 * 4
    assert 20 * 45 * dim * 4 / 2**20 == pytest.approx(mebibytes, abs=0.01)


def test_fedproto_is_class_means_and_a_guided_loss(generator):
    """Prototypes of three clients by hand. Before the first round all have weight 0."""
    features = torch.randn(3, 6, 4, generator=generator, dtype=torch.float64)
    labels = torch.tensor([[0, 0, 1, 1, 1, 2], [1, 1, 1, 1, 1, 1], [2, 2, 0, 2, 2, 2]])
    entries = [
        class_means(own, label, num_classes=4) for own, label in zip(features, labels, strict=True)
    ]
    update = overwrite()
    start = torch.zeros(4, 4, dtype=torch.float64)
    prototypes, _ = update.step(start, weighted_mean(entries), update.init(start))
    pooled, owner = features.flatten(0, 1), labels.flatten()
    for label in range(3):
        torch.testing.assert_close(prototypes[label], pooled[owner == label].mean(0))
    assert not prototypes[3].any()
    logits = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    expected = (
        F.cross_entropy(logits, labels[0])
        + 0.1 * (features[0] - prototypes[labels[0]]).square().mean()
    )
    torch.testing.assert_close(
        guided_loss(features[0], logits, labels[0], prototypes, guide_weight=0.1), expected
    )
    unknown = Weighted(start, torch.zeros(4))
    torch.testing.assert_close(
        guided_loss(features[0], logits, labels[0], unknown), F.cross_entropy(logits, labels[0])
    )


def test_lg_fedavg_shares_the_heads_of_equal_width():
    """Clients share heads of equal shape, weighted by their samples. Bodies are not sent."""
    models = [
        nn.ModuleDict({"body": nn.Linear(width, 3), "head": nn.Linear(3, 2)}) for width in (5, 7, 5)
    ]
    payloads = [
        collect(model, weight=size, only=["head"])
        for model, size in zip(models, (1, 2, 5), strict=True)
    ]
    assert list(payloads[0]) == ["head.weight", "head.bias"]
    values, server = snapshot(models[0], only=["head"]), overwrite()
    new, _ = server.step(values, weighted_mean(payloads), server.init(values))
    expected = (
        sum(size * model["head"].weight for model, size in zip(models, (1, 2, 5), strict=True)) / 8
    )
    torch.testing.assert_close(new["head.weight"], expected.detach())
