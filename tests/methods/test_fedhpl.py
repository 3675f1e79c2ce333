"""FedHPL: its step follows Equations 2, 8 and 9, and its message holds correct logits only."""

import pytest
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer

import fedprompt as fp
from fedprompt.methods.fedhpl import fedhpl, fedhpl_h, fedhpl_p
from fedprompt.methods.local import local
from sent_messages import sent_by
from tiny_federations import (
    CLASSES,
    descend,
    last,
    mixed_federation,
    parameters,
    trunk,
    vit_federation,
)


def test_without_distillation_it_is_local_training_bitwise():
    alone = last(local, mixed_federation())
    taught = last(fedhpl, mixed_federation(), distillation_weight=0.0)
    for client in range(5):
        expected, found = parameters(alone, client), parameters(taught, client)
        assert all(torch.equal(value, found[name]) for name, value in expected.items())


def test_the_second_round_descends_the_stated_objective():
    """One client is its own teacher: n / (1 + n) times its mean logits of correct images."""
    made = mixed_federation(
        clients=[1], cohort_size=1, steps=1, batch_size=8, make_optimizer=torch.optim.SGD
    )
    found = parameters(last(fedhpl, made, learning_rate=0.1, distillation_weight=2.0), 1)
    model = made.new_model(1)
    train(model, made, 0, lambda logits, labels: 0.0)
    images, labels = made.own(1)
    logits = model(images).detach()
    sums, counts = torch.zeros(CLASSES, CLASSES), torch.zeros(CLASSES)
    for row, label in zip(logits, labels, strict=True):
        if row.argmax() == label:
            sums[label] += row
            counts[label] += 1
    assert 0 < counts.count_nonzero() < CLASSES  # so the mask matters

    def divergence(logits, labels):
        total = 0.0
        for row, label in zip(logits, labels, strict=True):
            if counts[label] > 0:
                teacher = (sums[label] / (1 + counts[label]) / 4.5).softmax(0)
                total = total + (teacher * (teacher.log() - (row / 4.5).log_softmax(0))).sum()
        return 2.0 * total / len(labels)

    train(model, made, 1, divergence)
    expected = dict(model.named_parameters())
    torch.testing.assert_close(found, {name: expected[name].detach() for name in found})


def train(model, made, server_round, extra):
    for images, labels in made.batches(1, server_round):
        logits = model(images)
        objective = F.cross_entropy(logits, labels) + extra(logits, labels)
        descend(objective, model.parameters(), 0.1)


def test_a_message_has_one_count_for_each_class_and_the_rows_of_correct_classes():
    made = mixed_federation()
    messages = sent_by(made)
    last(fedhpl, made)
    for entry, (_, client, message) in zip(
        [each for each in made.ledger.entries if each.direction == "up"],
        messages.of("up"),
        strict=True,
    ):
        correct = message["logits"].weight
        assert entry.num_bytes == 4 * (CLASSES + CLASSES * int((correct > 0).sum()))
        assert (correct <= made.data(client, 0).class_counts).all()


def test_prompts_or_heads_are_averaged_among_trunks_of_one_width_by_numbers_of_images():
    for method, kind, other in ((fedhpl_p, "prompts", "head"), (fedhpl_h, "head", "prompts")):
        made = mixed_federation(cohort_size=5)
        messages = sent_by(made)
        last(method, made)
        first = {client: message for number, client, message in messages.of("up") if number == 0}
        for number, client, message in messages.of("down"):
            names = [name for name in message if name.startswith(kind)]
            assert not [name for name in message if name.startswith(other)]
            assert {bool(message[name].weight) for name in names} == {number == 1}
            alike = [k for k in first if k % 2 == client % 2]
            for name in names if number == 1 else ():
                total = sum(made.num_examples(k) for k in alike)
                mean = sum(first[k][name].value * made.num_examples(k) / total for k in alike)
                torch.testing.assert_close(message[name].value, mean)


@pytest.mark.parametrize(
    ("federation", "parts"),
    [(vit_federation, {"logits", "head"}), (mixed_federation, {"logits", "projection", "head"})],
)
def test_a_projection_is_shared_with_the_head_if_there_is_one(federation, parts):
    made = federation()
    messages = sent_by(made)
    last(fedhpl_h, made)
    names = {name.split(".")[0] for _, _, payload in messages.of("up") for name in payload}
    assert names == parts


def test_prompts_of_unlike_depth_are_refused_by_name():
    deep = VisionTransformer(8, 4, 1, num_classes=0, embed_dim=8, depth=3, num_heads=2)
    made = mixed_federation(trunks=[trunk(8), fp.vit_trunk(deep)])
    with pytest.raises(ValueError, match=r"\['prompts.tokens'\].value` must have the shape of the"):
        fedhpl_p(made)
    fedhpl_h(made)


def test_a_newcomer_with_a_trunk_that_no_client_has_gets_an_answer():
    made = mixed_federation(clients=[1, 3], cohort_size=2)
    predictions, model = last(fedhpl, made), made.new_model(0)
    assert torch.equal(predictions.received(0).head.weight, model.head.weight)
