"""PromptSRC: four terms of the loss, and a Gaussian mean of the prompts of all rounds."""

import math

import pytest
import torch

import fedprompt as fp
from fedprompt.methods.promptsrc import _Regulated, promptsrc
from tiny_federations import after_rounds, clip_image_federation, last

pytestmark = pytest.mark.usefixtures("float64")


def test_a_step_descends_the_cross_entropy_the_distances_and_the_divergence():
    """With weights 25 and 10 of the mean absolute differences, and p log(p / q) / classes."""
    one = {"rounds": 1, "steps": 1, "cohort_size": 1, "clients": [2]}
    federation = clip_image_federation(**one, make_optimizer=torch.optim.SGD)
    found = last(promptsrc, federation, learning_rate=0.1).now.server["newest"]
    model, own_text = _Regulated(federation), federation.handwritten_text()
    ((images, labels),) = federation.batches(2, 0)
    image, text = model.features(images)
    own = federation.clip.encode_image(images, normalize=True)
    q, p = ((10.0 * a @ b.T).softmax(1) for a, b in ((image, text), (own, own_text)))
    loss = -q.log()[range(len(labels)), labels].mean()
    loss = loss + 25 * (text - own_text).abs().mean() + 10 * (image - own).abs().mean()
    loss = loss + (p * (p / q).log()).sum(1).mean() / 3
    start = fp.snapshot(model, only=["context", "prompts"])
    steps = torch.autograd.grad(loss, [model.get_parameter(name) for name in start])
    for (name, value), step in zip(start.items(), steps, strict=True):
        torch.testing.assert_close(found[name], value - 0.1 * step)


def test_predictions_use_a_gaussian_mean_of_the_rounds_at_three_quarters_of_the_run():
    federation = clip_image_federation(rounds=20, steps=1, cohort_size=1, clients=[0])
    rounds = list(after_rounds(promptsrc, federation))
    for count in (1, 20):
        weights = [math.exp(-((t - 15) ** 2) / 2) for t in range(1, count + 1)]
        newest = [each.now.server["newest"]["prompts.tokens"] for each in rounds[:count]]
        expected = sum(w * v for w, v in zip(weights, newest, strict=True)) / sum(weights)
        found = rounds[count - 1].of(0).prompts.tokens.detach()
        torch.testing.assert_close(found, expected)
