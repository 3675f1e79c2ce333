"""FedPHA: private lengths differ while messages do not, and the objective is the stated one."""

import pytest
import torch
import torch.nn.functional as F

import fedprompt as fp
from fedprompt import samples
from fedprompt.methods.fedpha import _alignment, _on_minor_directions, _private_context, fedpha
from fedprompt.methods.models import ClipSetting, PromptedClassifier
from tiny_federations import clip_federation, descend, last


def test_contexts_of_different_lengths_send_messages_of_one_size():
    federation = clip_federation()
    predictions = last(fedpha, federation)
    lengths = {predictions.of(client).own.context().shape[1] for client in federation.clients}
    assert len(lengths) > 1
    assert lengths <= set(range(2, 9))
    size = 4 * federation.length * federation.tower.dim
    assert {sent.num_bytes for sent in federation.ledger.sent.values()} == {size, size + 4}


def test_contexts_fit_in_front_of_the_longest_name():
    """A context of twice T would need 1 + 16 + 9 positions of 24."""
    tower, longest = fp.TextTower(samples.clip(), samples.tokenize), "household item"
    setting = ClipSetting(tower=tower, class_names=["cat", longest], rounds=1, length=8)
    room = 24 - 1 - max(setting.names.length)
    lengths = {_private_context(setting, client).context.shape[-2] for client in range(50)}
    assert 8 <= room < 16
    assert lengths == set(range(4, room + 1))


def test_the_projection_removes_the_leading_directions_alone():
    rng = torch.Generator().manual_seed(0)
    shared, private = torch.randn(1, 4, 10, generator=rng), torch.randn(1, 6, 10, generator=rng)
    projected = _on_minor_directions(private, shared, 0.5)
    values, vectors = torch.linalg.eigh(shared[0].T @ shared[0])
    leading, minor = vectors[:, -2:], vectors[:, -4:-2]
    assert (values[-4:] > 1e-3).all()
    torch.testing.assert_close(projected @ leading, torch.zeros(1, 6, 2), rtol=0, atol=1e-5)
    torch.testing.assert_close(projected, private @ minor @ minor.T, rtol=1e-4, atol=1e-5)


def test_features_at_the_margin_are_no_longer_pushed():
    shared = torch.zeros(2, 3)
    private = torch.tensor([[0.5, 0.0, 0.0], [0.0, 2.0, 0.0]])
    torch.testing.assert_close(_alignment(shared, private, private, 1.0), torch.tensor(0.25))


@pytest.mark.usefixtures("float64")
def test_steps_descend_the_stated_objective_in_both_contexts():
    changes = {"rounds": 1, "clients": [0], "cohort_size": 1, "make_optimizer": torch.optim.SGD}
    federation = clip_federation(**changes)
    predictions = last(fedpha, federation, learning_rate=0.2, margin=1.5, minor_share=0.5)
    shared = federation.new_model()
    private = PromptedClassifier(federation, _private_context(federation, 0))
    for tokens, labels in federation.batches(0, 0):
        directions = torch.linalg.svd(shared.context().detach()[0]).Vh[2:4]
        projected = private.context() @ (directions.T @ directions)
        general, personal, minor = (
            F.normalize(federation.tower(fp.prompted_text(each, federation.names))[0], dim=1)
            for each in (shared.context(), private.context(), projected)
        )
        objective = sum(F.cross_entropy(each(tokens), labels) for each in (shared, private))
        objective = objective + (personal - minor).square().mean()
        objective = objective + (1.5 - (personal - general).norm(dim=1)).clamp(min=0).mean()
        both = [shared.context.context, private.context.context]
        descend(objective, both, 0.2)
    for found, expected in (
        (predictions.received(5).shared, shared),
        (predictions.of(0).own, private),
    ):
        torch.testing.assert_close(fp.snapshot(found), fp.snapshot(expected))
