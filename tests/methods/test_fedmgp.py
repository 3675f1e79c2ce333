"""FedMGP: groups are sampled by their likeness to the global ones, and only these are shared."""

import pytest
import torch
import torch.nn.functional as F

import fedprompt as fp
from fedprompt.methods.fedmgp import _Groups, _sample, fedmgp
from sent_messages import sent_by
from tiny_federations import clip_image_federation, last


def test_sampling_follows_the_softmax_of_the_largest_cosine():
    own = torch.eye(4)[:, None]
    common = torch.stack([2 * own[1], 0.5 * own[3]])
    rng = torch.Generator().manual_seed(0)
    first = torch.stack([_sample(own, common, 1.0, rng)[0] for _ in range(4000)])
    shares = first.bincount(minlength=4) / 4000
    torch.testing.assert_close(shares, torch.tensor([0.0, 1, 0, 1]).softmax(0), rtol=0, atol=0.03)
    assert all(len(set(_sample(own, common, 1.0, rng).tolist())) == 2 for _ in range(20))
    assert set(_sample(own, common, 100.0, rng).tolist()) == {1, 3}


def test_the_first_draw_is_uniform_and_later_ones_follow_the_likeness(monkeypatch):
    found = []

    def sample(groups, common, sharpness, draw):
        found.append(sharpness)
        return _sample(groups, common, sharpness, draw)

    monkeypatch.setitem(_sample.__globals__, "_sample", sample)
    last(fedmgp, clip_image_federation(clients=[0], cohort_size=1))
    assert found == [0.0, 0.0, 1.0, 1.0]  # texts and images of two rounds


def test_each_group_classifies_with_its_own_pair_of_prompts():
    federation = clip_image_federation()
    model = _Groups(federation, 3)
    images = federation.inputs[:4]
    alone = []
    for group in range(3):
        single = _Groups(federation, 1)
        single.text.context.data = model.text.context.data[group, None]
        single.visual.tokens.data = model.visual.tokens.data[group, None]
        alone.append(single(images))
    assert not torch.allclose(alone[0], alone[1])
    torch.testing.assert_close(model.logits(*model.features(images)), torch.stack(alone))
    torch.testing.assert_close(model(images), torch.stack(alone).mean(0))


def test_the_text_and_the_visual_half_of_a_group_are_drawn_together():
    """In the first round all groups are equally likely, so both halves have the same ranks."""
    federation = clip_image_federation(clients=[0, 1, 2], cohort_size=3, rounds=1)
    messages, uploads = sent_by(federation), []
    last(fedmgp, federation, learning_rate=0.0)
    start = fp.snapshot(_Groups(federation))
    for _, _, message in messages.of("up"):
        slots = [
            [int((start[name] == row).flatten(1).all(1).nonzero()) for row in message[name]]
            for name in start
        ]
        assert slots[0] == slots[1]
        uploads.append(slots[0])
    assert len({tuple(each) for each in uploads}) > 1


def test_visual_prompts_pass_the_first_norm_of_clip_with_the_embeddings(new_models):
    federation = clip_image_federation()
    model, images, visual = _Groups(federation, 1), federation.inputs[:4], federation.clip.visual
    visual.ln_pre.weight.data = torch.linspace(0.5, 2, 16)
    patches = visual.conv1(images).flatten(2).mT
    tokens = torch.cat([visual.class_embedding.expand(4, 1, -1), patches], 1)
    tokens = tokens + visual.positional_embedding
    prompts = model.visual.tokens[0].reshape(1, -1, 16).expand(4, -1, -1)
    tokens = visual.transformer(visual.ln_pre(torch.cat([tokens, prompts], 1)))
    expected = F.normalize(visual.ln_post(tokens[:, 0]) @ visual.proj, dim=1)
    torch.testing.assert_close(model.features(images)[0][0], expected)


@pytest.mark.usefixtures("float64")
def test_a_step_descends_the_stated_objective():
    changes = {"rounds": 1, "steps": 1, "clients": [0], "cohort_size": 1}
    federation = clip_image_federation(make_optimizer=torch.optim.SGD, **changes)
    found = last(fedmgp, federation, learning_rate=0.5, diversity=3.0).of(0)
    model = _Groups(federation)
    images, labels = next(federation.batches(0, 0))
    image, text = model.features(images)
    objective = 0.0
    for i in range(5):
        objective = objective + F.cross_entropy(10 * image[i] @ text[i].T, labels) / 5
        for j in range(i):
            for each in (image, text):
                objective = objective - 1.5 * (each[i] - each[j]).abs().mean() / 10
    gradient = torch.autograd.grad(objective, model.text.context)[0]
    expected = model.text.context.detach() - 0.5 * gradient
    torch.testing.assert_close(found.text.context.detach(), expected)
