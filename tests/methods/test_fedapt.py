"""FedAPT: keys scale the contexts, and images of a client select its key."""

import pytest
import torch
import torch.nn.functional as F

import fedprompt as fp
from fedprompt.methods.fedapt import _Adaptive, fedapt
from tiny_federations import clip_federation, descend, last


@pytest.mark.usefixtures("float64")
def test_an_image_that_the_query_recognizes_is_classified_with_the_key_of_its_client():
    federation = clip_federation()
    model = _Adaptive(federation, 1e-2)
    tokens = torch.randn(5, 5, 12, generator=torch.Generator().manual_seed(0))
    model.query.weight.data = torch.linalg.pinv(tokens[:, 0]).T  # image i scores 1 at client i
    torch.testing.assert_close(model.weights(tokens), torch.eye(5))
    for number in range(5):
        contexts = model.contexts() + model.contexts() * model.keys[number]
        sentences = fp.prompted_text(contexts, federation.names, class_specific=True)
        text = F.normalize(federation.tower(sentences)[0], dim=1)
        expected = 10 * F.normalize(tokens[number, 0], dim=0) @ text.T
        torch.testing.assert_close(model(tokens)[number], expected)


def test_weights_are_standardized_before_their_softmax():
    model = _Adaptive(clip_federation(), 0.5)
    tokens = torch.randn(4, 5, 12, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model.weights(3 * tokens), model.weights(tokens))
    first = model.query(tokens[0, 0])
    expected = ((first - first.mean()) / first.var().sqrt() / 0.5).exp()
    torch.testing.assert_close(model.weights(tokens)[0], expected / expected.sum())


def test_the_key_of_a_single_client_has_all_the_weight():
    federation = clip_federation(clients=[0])
    model = _Adaptive(federation, 1e-2)
    tokens = federation.inputs[:3]
    assert model.weights(tokens).tolist() == [[1.0]] * 3
    torch.testing.assert_close(model(tokens), model.with_keys(tokens, model.keys))


@pytest.mark.usefixtures("float64")
def test_a_step_descends_both_losses_and_keys_stay_fixed():
    changes = {"rounds": 1, "clients": [2, 1], "cohort_size": 1, "make_optimizer": torch.optim.SGD}
    federation = clip_federation(**changes)
    (client,) = federation.cohort(0)
    found = last(fedapt, federation, learning_rate=0.2).of(client)
    model, number = federation.seeded(_Adaptive, federation, 1e-2), [2, 1].index(client)
    assert torch.equal(found.keys, model.keys)
    for tokens, labels in federation.batches(client, 0):
        contexts = model.contexts() * (1 + model.keys[number])
        sentences = fp.prompted_text(contexts, federation.names, class_specific=True)
        logits = fp.cosine_logits(tokens[:, 0], federation.tower(sentences)[0], scale=10.0)
        origin = model.query(tokens[:, 0]).log_softmax(1)[:, number]
        objective = F.cross_entropy(logits, labels) - origin.mean()
        descend(objective, model.parameters(), 0.2)
    torch.testing.assert_close(fp.snapshot(found), fp.snapshot(model))
