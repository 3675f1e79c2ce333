"""Batches of the papers' settings."""

import pytest
import torch

from studies.papers.federations import Epochs


def federation(sizes: list[int], **fields: object) -> Epochs:
    """Make a federation whose images are their numbers."""
    numbers = torch.arange(sum(sizes))
    return Epochs(
        inputs=numbers,
        labels=numbers,
        shards=dict(enumerate(numbers.split(sizes))),
        clients=range(len(sizes)),
        num_classes=1,
        rounds=1,
        cohort_size=len(sizes),
        batch_size=10,
        seed=0,
        public=numbers[:0],
        device=torch.device("cpu"),
        **fields,
    )


def batches_of(made: Epochs, client: int) -> list[torch.Tensor]:
    return [inputs for inputs, _ in made.batches(client, 0)]


def test_every_image_is_in_one_batch_of_each_epoch() -> None:
    made = federation([5, 31], epochs=2)
    batches = batches_of(made, 1)
    assert [len(batch) for batch in batches] == [10, 10, 10, 1] * 2
    for epoch in (batches[:4], batches[4:]):
        assert torch.equal(torch.cat(epoch).sort().values, made.shards[1])
    assert made.steps == 8


@pytest.mark.parametrize(
    ("size", "lengths"), [(31, [10] * 3), (30, [10] * 3), (7, [7]), (10, [10])]
)
def test_incomplete_batches_are_left_out_unless_they_are_the_only_one(
    size: int, lengths: list[int]
) -> None:
    made = federation([3, size], epochs=2, drop_last=True)
    assert [len(batch) for batch in batches_of(made, 1)] == lengths * 2
    assert made.steps == 2 * len(lengths)


def test_steps_are_those_of_the_client_that_receives_a_message() -> None:
    made = federation([5, 31], epochs=2)
    batches_of(made, 1)
    made.send_down(0, {})
    assert made.steps == 2


def test_images_that_are_left_out_differ_between_epochs() -> None:
    made = federation([19], epochs=2, drop_last=True)
    first, second = (set(batch.tolist()) for batch in batches_of(made, 0))
    assert first != second
