"""FedL2G: clients send the gradient of the quiz loss through one step, and never train on it."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

import fedprompt as fp
from fedprompt.methods.fedl2g import _Guided, _study_and_quiz, fedl2g_f, fedl2g_l
from fedprompt.methods.local import local
from sent_messages import sent_by
from tiny_federations import CLASSES, last, mixed_federation, parameters

METHODS = [(fedl2g_l, False, CLASSES), (fedl2g_f, True, 6)]


@pytest.mark.parametrize(("method", "by_features", "width"), METHODS)
def test_a_message_is_the_gradient_through_the_step_by_autograd(method, by_features, width):
    """The study batch has all study images, and the quiz has the others."""
    made = mixed_federation(rounds=1, steps=1, clients=[1], cohort_size=1, batch_size=9)
    messages = sent_by(made)
    trained = last(method, made, learning_rate=0.1, guide_weight=0.7).of(1)
    model = _Guided(trained, by_features=by_features)
    (_, _, sent), (_, _, received) = messages.of("up")[0], messages.of("down")[0]
    guides = received["guides"].clone().requires_grad_()
    quiz, study = split(made)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with sdpa_kernel(SDPBackend.MATH):
        guided, logits = model(made.inputs[study])
        labels = made.labels[study]
        loss = F.cross_entropy(logits, labels) + 0.7 * F.mse_loss(guided, guides[labels])
        gradients = torch.autograd.grad(loss, list(trained.values()), create_graph=True)
        stepped = {n: p - 0.1 * g for (n, p), g in zip(trained.items(), gradients, strict=True)}
        _, logits = functional_call(model, stepped, (made.inputs[quiz],))
        (expected,) = torch.autograd.grad(F.cross_entropy(logits, made.labels[quiz]), guides)
    assert sent["guides"].value.shape == (CLASSES, width)
    torch.testing.assert_close(sent["guides"].value, expected, rtol=1e-4, atol=1e-8)


def split(made):
    """Positions of the quiz and of the study images of client 1."""
    shard = made.shards[1]
    parts = fp.data.study_quiz_split(
        made.labels[shard],
        quiz_size=len(shard) // 4,
        generator=made.generator(0, 1, purpose="quiz"),
    )
    study, quiz = (shard[torch.as_tensor(part)] for part in parts)
    assert (len(quiz), len(study)) == (2, 6)
    return quiz, study


def test_a_client_with_one_image_sends_nothing():
    shards = {0: torch.arange(1), 1: torch.arange(1, 9)}
    made = mixed_federation(shards=shards, clients=[0, 1], cohort_size=2)
    messages = sent_by(made)
    last(fedl2g_l, made)
    assert {client for _, client, _ in messages.of("up")} == {1}


@pytest.mark.parametrize(("images", "expected"), [(3, 1), (24, 6), (40, 10), (80, 10)])
def test_a_quarter_of_the_images_but_at_most_ten_are_the_quiz(images, expected):
    made = mixed_federation(shards={0: torch.arange(images) % 40})
    study, (_, labels) = _study_and_quiz(made.data(0, 0), 10)
    assert (len(study), len(labels)) == (images - expected, expected)


@pytest.mark.parametrize(("method", "by_features", "width"), METHODS)
def test_clients_follow_the_guides_from_the_third_round_on(method, by_features, width):
    for rounds, equal in ((2, True), (3, False)):
        made = [mixed_federation(rounds=rounds, clients=[1], cohort_size=1) for _ in range(2)]
        light = parameters(last(method, made[0], guide_weight=0.1), 1)
        heavy = parameters(last(method, made[1], guide_weight=5.0), 1)
        assert all(torch.equal(light[name], heavy[name]) for name in light) == equal


@pytest.mark.parametrize(("method", "by_features", "width"), METHODS)
def test_images_of_the_quiz_never_train(method, by_features, width):
    """Other labels of the quiz change the guides, but not the model of the first round."""
    found, guides = [], []
    for change in (0, 1):
        made = mixed_federation(rounds=1, clients=[1], cohort_size=1)
        quiz, _ = split(made)
        made.labels = made.labels.clone()
        made.labels[quiz] = (made.labels[quiz] + change) % CLASSES
        messages = sent_by(made)
        found.append(parameters(last(method, made), 1))
        guides.append(messages.of("up")[0][2]["guides"].value)
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert not torch.equal(*guides)


@pytest.mark.parametrize(("method", "by_features", "width"), METHODS)
def test_the_broadcast_is_one_guide_for_each_class(method, by_features, width):
    made = mixed_federation()
    last(method, made)
    assert made.ledger.total(direction="down") == 2 * 3 * 4 * CLASSES * width


@pytest.mark.parametrize(("method", "by_features", "width"), METHODS)
def test_without_a_weight_clients_train_alone_without_their_quiz(method, by_features, width):
    """The row "quiz held back" of the ablations: guides neither move nor are followed."""
    made = mixed_federation(rounds=3, clients=[1], cohort_size=1)
    messages = sent_by(made)
    found = parameters(last(method, made, guide_weight=0.0), 1)
    alone = mixed_federation(rounds=3, clients=[1], cohort_size=1)
    alone.shards = {**alone.shards, 1: split(alone)[1]}
    expected = parameters(last(local, alone, learning_rate=1e-2), 1)
    assert all(torch.equal(found[name], expected[name]) for name in found)
    first, *_, end = [message["guides"] for _, _, message in messages.of("down")]
    assert torch.equal(first, end)
