"""FedKD: the bytes of an update follow from its rank, and clients keep up with the server."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import fedprompt as fp
from fedprompt.methods.fedkd import _compress, _expand, fedkd
from sent_messages import sent_by
from tiny_federations import after_rounds, descend, last, mixed_federation


def test_a_matrix_of_rank_two_is_sent_exactly_in_two_rows():
    rng = torch.Generator().manual_seed(0)
    matrix = torch.randn(7, 2, generator=rng) @ torch.randn(2, 5, generator=rng)
    message = _compress({"weight": matrix, "bias": matrix[0]}, 1 - 1e-6)
    assert message.pop("bias").weight == 1
    assert fp.num_bytes(message) == 4 * (2 * (7 + 5) + 5)
    torch.testing.assert_close(_expand(message, {"weight": matrix})["weight"], matrix)


def test_the_kept_part_of_the_squares_is_the_smallest_above_the_energy():
    """Squares 16, 4 and 1 of 21: one keeps .76, two keep .95, three keep all."""
    update = {"weight": torch.diag(torch.tensor([4.0, 2.0, 1.0])), "bias": torch.ones(3)}
    for energy, rank in ((0.7, 1), (0.77, 2), (0.94, 2), (0.96, 3), (1.0, 3)):
        message = _compress(update, energy)
        assert fp.num_bytes(message) == 4 * (rank * (3 + 3) + 3 + 3 + 1)
        lost = (_expand(message, update)["weight"] - update["weight"]).square().sum() / 21
        assert lost <= 1 - energy + 1e-6


def test_of_an_update_without_change_no_row_is_sent():
    update = {"weight": torch.zeros(3, 2)}
    message = _compress(update, 0.9)
    assert fp.num_bytes(message) == 4 * 2
    assert torch.equal(_expand(message, update)["weight"], update["weight"])


def test_a_step_descends_the_losses_of_both_models_and_the_mutual_ones_over_them(float64):
    """In the first round, the first energy counts: 1 sends the whole update."""
    one = {"rounds": 1, "steps": 1, "clients": [1], "cohort_size": 1}
    made = mixed_federation(**one, make_optimizer=torch.optim.SGD)
    predictions = last(fedkd, made, learning_rate=0.1, energies=(1.0, 0.1))
    models, mapping = (made.new_model(1), made.new_model(0)), made.seeded(nn.Linear, 6, 6, False)
    images, labels = next(made.batches(1, 0))
    mentor, mentee = (model.features(images) for model in models)
    first, second = (model(images).log_softmax(1) for model in models)
    loss = F.nll_loss(first, labels) + F.nll_loss(second, labels)
    mutual = (mapping(mentee) - mentor).square().mean()
    for pupil, teacher in ((first, second.detach()), (second, first.detach())):
        mutual = mutual + (teacher.exp() * (teacher - pupil)).sum(1).mean()
    loss = loss + mutual / loss.detach()
    descend(loss, [parameter for model in models for parameter in model.parameters()], 0.1)
    found = fp.snapshot(predictions.of(1).own), fp.snapshot(predictions.received(5).shared)
    torch.testing.assert_close(found, tuple(map(fp.snapshot, models)))


def test_at_rank_one_a_client_sends_a_row_and_a_column_of_each_matrix():
    """Prompts (2 layers of 2, 8 wide), projection (6, 8) and head (3, 6), with their biases.

    The other singular values are sent as zeros, and each bias has a weight.
    """
    made = mixed_federation()
    last(fedkd, made, energies=(1e-6, 1e-6))
    numbers = (2 * 2 + 8 + 4) + (6 + 8 + 6) + (6 + 1) + (3 + 6 + 3) + (3 + 1)
    assert made.ledger.total(direction="up") == 2 * 3 * 4 * numbers


def test_the_energy_grows_from_round_to_round(monkeypatch):
    """With r/R in round r of R = 4, counted from 0."""
    found = []

    def compress(update, energy):
        found.append(energy)
        return _compress(update, 1.0)

    monkeypatch.setitem(_compress.__globals__, "_compress", compress)
    last(fedkd, mixed_federation(rounds=4, clients=[0], cohort_size=1), energies=(0.2, 1.0))
    # At the start, the server compresses no change. A round has one client and the server.
    assert found == [1.0, *(pytest.approx(0.2 + 0.8 * r / 4) for r in range(4) for _ in range(2))]


def test_a_client_of_the_last_round_receives_the_update_and_others_the_whole_mentee():
    made = mixed_federation(rounds=5, cohort_size=2)
    messages, mentees, start = sent_by(made), [], fp.snapshot(made.new_model(0))
    for predictions in after_rounds(fedkd, made):
        mentees.append(fp.snapshot(predictions.received(5).shared))
    cohorts, held, kinds = list(made.cohorts()), dict.fromkeys(made.clients, start), set()
    for number, client, message in messages.of("down"):
        near = number == 0 or client in cohorts[number - 1]
        full, change = fp.part(message, "mentee"), _expand(fp.part(message, "update"), start)
        assert all(bool(each.weight) != near for each in full.values())
        base = held[client] if near else {name: each.value for name, each in full.items()}
        held[client] = {name: base[name] + change[name] for name in base}
        torch.testing.assert_close(held[client], mentees[number - 1] if number else start)
        kinds.add((number > 0, near))
    assert kinds == {(False, True), (True, True), (True, False)}
