"""FedPGP: the private part has the stated rank, and a step follows the stated objective."""

import torch
import torch.nn.functional as F

import fedprompt as fp
from fedprompt.methods.fedpgp import _Personalized, fedpgp
from tiny_federations import clip_federation, descend, last, parameters


def test_a_step_descends_the_stated_objective():
    """Two steps, because the private part is 0 and so equal to the shared one before the first."""
    changes = {"rounds": 1, "clients": [0], "cohort_size": 1, "make_optimizer": torch.optim.SGD}
    federation = clip_federation(**changes)
    values = {"learning_rate": 0.3, "contrast_weight": 0.7, "rank": 2, "temperature": 0.4}
    found = parameters(last(fedpgp, federation, **values), 0)
    model, written = _Personalized(federation, 2), federation.handwritten_text()
    for tokens, labels in federation.batches(0, 0):
        shared = model.shared()
        general, personal = (
            federation.tower(fp.prompted_text(each, federation.names))[0]
            for each in (shared, shared + model.private())
        )
        good, bad = (
            torch.exp(F.cosine_similarity(general, other, dim=1) / 0.4)
            for other in (written, personal)
        )
        image, classes = F.normalize(tokens[:, 0], dim=1), F.normalize(personal, dim=1)
        objective = F.cross_entropy(10 * image @ classes.T, labels)
        objective = objective - 0.7 * torch.log(good / (good + bad)).mean()
        descend(objective, model.parameters(), 0.3)
    torch.testing.assert_close(found, fp.snapshot(model), rtol=1e-4, atol=1e-6)


def test_a_newcomer_predicts_with_the_shared_context():
    federation = clip_federation()
    predictions = last(fedpgp, federation)
    model = predictions.received(5)
    shared, personal = model.text()
    torch.testing.assert_close(shared, personal)
    assert not torch.equal(*predictions.of(federation.cohort(1)[0]).text())
