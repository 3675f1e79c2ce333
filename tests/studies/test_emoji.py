"""The study of emoji: who has which images, and what nobody trains on."""

import pytest
import torch

from fedprompt import samples
from studies import emoji
from studies.core import Machine, Row


@pytest.fixture(autouse=True)
def cheap(monkeypatch):
    """Let the pixels of an emoji stand for its tokens."""
    monkeypatch.setattr(emoji, "encoded", lambda images, inputs: images.flatten(1))
    emoji.sides.cache_clear()
    yield
    emoji.sides.cache_clear()


def made(partition):
    return emoji.make(partition, Row.of("promptfl"), seed=0, machine=Machine())


def mixes_of(trial):
    return torch.stack([trial.tests.mixes[client] for client in sorted(trial.tests.mixes)])


@pytest.mark.parametrize(("left", "count"), [("fluent", 4), ("noto", 2), ("", 0)])
def test_clients_of_a_style_that_is_left_out_never_train(left, count):
    trial = made(f"without-{left}" if left else "styles")
    held = [k for k, style in enumerate(samples.STYLES) if style in emoji.FAMILIES.get(left, ())]
    mixes = mixes_of(trial).view(10, len(samples.STYLES), 24).sum(2)
    assert (mixes > 0).sum(1).tolist() == [1] * 10  # one style for each client
    new = mixes.argmax(1).apply_(lambda style: style in held).bool()
    assert new.nonzero()[:, 0].tolist() == list(trial.newcomers) == list(range(10 - count, 10))
    assert list(trial.setting.clients) == list(range(10 - count))


def test_two_classes_a_client():
    pairs = mixes_of(made("pairs")).view(12, len(samples.STYLES), 24).sum(1)
    assert ((pairs > 0).sum(1) == 2).all()


@pytest.mark.parametrize("shots", [4, 16])
def test_shots_are_images_of_a_class_of_all_clients_together(shots):
    trial = made(f"{shots}-shots")
    assert mixes_of(trial).view(10, -1, 24).sum((0, 1)).tolist() == [shots] * 24


def test_new_classes_are_tests_only():
    assert not {row.method for row in emoji.rows("base-to-new")} & {*emoji.OF_CLASSES}
    trial = made("base-to-new")
    inputs, labels, names, _ = trial.further["new"]
    assert [*trial.setting.class_names, *names] == list(samples.CLASS_NAMES)
    _, test = samples.emoji()
    assert torch.equal(inputs, test.images[test.labels >= 12].flatten(1))
    assert torch.equal(labels, test.labels[test.labels >= 12] - 12)
    assert len(trial.tests.labels) == int((test.labels < 12).sum())


def test_cluttered_emoji_are_small_among_others():
    _, test = samples.emoji()
    images = test.images[:250]
    alone = torch.ones_like(images)  # fragments of nothing
    drawn = emoji.cluttered(images, torch.Generator().manual_seed(0))
    assert torch.equal(emoji.cluttered(alone, torch.Generator().manual_seed(0)), alone)
    corners = [(side[:, :, :4, :4] < 0.9).flatten(1).any(1) for side in (images, drawn)]
    before, after = (corner.float().mean() for corner in corners)
    assert after > 1.5 * before  # fragments are everywhere
