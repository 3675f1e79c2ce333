"""FedKD: the bytes of an update follow from its rank, and clients keep up with the server."""

import torch

import fedprompt as fp
from fedprompt.methods.fedkd import compress, expand, fedkd
from methods import as_generator
from sent_messages import sent_by
from tiny_federations import last, mixed_federation


def test_a_matrix_of_rank_two_is_sent_exactly_in_two_columns():
    rng = torch.Generator().manual_seed(0)
    matrix = torch.randn(7, 2, generator=rng) @ torch.randn(2, 5, generator=rng)
    message = compress({"weight": matrix}, 1 - 1e-6)
    assert fp.num_bytes(message) == 4 * 2 * (7 + 5 + 1)
    torch.testing.assert_close(expand(message, {"weight": matrix})["weight"], matrix)


def test_the_kept_part_of_the_squares_is_the_smallest_above_the_energy():
    """Squares 16, 4 and 1 of 21: one keeps .76, two keep .95, three keep all."""
    update = {"weight": torch.diag(torch.tensor([4.0, 2.0, 1.0])), "bias": torch.ones(3)}
    for energy, rank in ((0.7, 1), (0.77, 2), (0.94, 2), (0.96, 3), (1.0, 3)):
        message = compress(update, energy)
        assert fp.num_bytes(message) == 4 * (rank * (3 + 3 + 1) + 3)
        lost = (expand(message, update)["weight"] - update["weight"]).square().sum() / 21
        assert lost <= 1 - energy + 1e-6


def test_an_update_without_change_is_sent_as_zeros():
    update = {"weight": torch.zeros(3, 2)}
    assert torch.equal(expand(compress(update, 0.9), update)["weight"], update["weight"])


def test_at_rank_one_a_client_sends_a_row_and_a_column_of_each_matrix():
    """Prompts (2 layers of 2, 8 wide), projection (6, 8) and head (3, 6), with their biases."""
    made = mixed_federation()
    last(fedkd, made, energies=(1e-6, 1e-6))
    numbers = (2 * 2 + 8 + 1) + (6 + 8 + 1) + 6 + (3 + 6 + 1) + 3
    assert made.ledger.total(direction="up") == 2 * 3 * 4 * numbers


def test_what_a_client_received_adds_up_to_the_mentee_of_the_server():
    """Client 0 misses rounds. The updates of all rounds are sent when it takes part again."""
    made = mixed_federation(rounds=5, cohort_size=2)
    messages, mentees, start = sent_by(made), [], fp.snapshot(made.new_model(0))
    for predictions in as_generator(fedkd, everyone=False)(made):
        mentees.append(fp.snapshot(predictions.received(5)))
    for client in made.clients:
        rounds = [number for number, each, _ in messages.of("up") if each == client]
        received = [message for _, each, message in messages.of("down") if each == client]
        missed = [(name, each) for each in received for name in {n.split(".")[0] for n in each}]
        assert len(missed) == (rounds or [0])[-1]
        values = dict(start)
        for number, message in sorted(missed, key=lambda each: int(each[0])):
            change = expand(fp.part(message, number), values)
            values = {name: values[name] + change[name] for name in values}
        if rounds and rounds[-1] > 0:
            torch.testing.assert_close(values, mentees[rounds[-1] - 1])
    assert len(messages.of("down")) > 4
