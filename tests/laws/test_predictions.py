"""Laws of predictions, over the whole gallery: their state is all that they learned."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn

import fedprompt as fp
from fedprompt.methods import METHODS
from method_runs import CHANGES, MAKERS, RUNS
from same import assert_same
from tiny_federations import federation_of


def logits(model, federation):
    with torch.no_grad():
        return model.eval()(federation.inputs)


def frozen_in(state, federation):
    """Return the names of frozen weights in a state."""
    networks = [trunk.model for trunk in getattr(federation, "trunks", ())]
    frozen = [w for model in networks or [federation.clip] for w in model.parameters()]
    large = {name: value for name, value in state.items() if value.numel() > 32}
    return [name for name, value in large.items() if any(torch.equal(value, w) for w in frozen)]


@pytest.mark.parametrize(("name", "family"), RUNS)
def test_the_state_of_a_prediction_is_all_that_it_learned(name, family):
    """It is loaded by a stranger of the same network, whose run has another seed and no rounds."""
    entry = METHODS[name]
    federation = federation_of(entry, family, **CHANGES)
    method = MAKERS[name](federation)
    *_, now = fp.run_rounds(method, federation.data, federation.cohorts())
    other = federation_of(entry, family, **CHANGES, seed=7)
    made = MAKERS[name](other)
    start = fp.Round(-1, made.server.state, {})
    for client, stranger in ((0, 4), (1, 1), (2, 4)):  # client 1 may be smaller than others
        model = now.model(method, federation.data(client, 1))
        state = {key: value.clone() for key, value in model.state_dict().items()}
        expected = logits(model, federation)
        model = start.model(made, other.data(stranger, 0))
        assert not frozen_in(state, federation), "a frozen network is in the state"
        model.load_state_dict(state)
        assert torch.equal(logits(model, federation), expected)
        again = now.model(method, federation.data(client, 1))
        assert_same(dict(again.state_dict()), state, ordered=False)


def test_a_model_is_copied_with_tensors_that_were_computed_from_its_parameters():
    """Such as features of a text; PyTorch copies no tensor that was computed."""
    model = nn.Linear(2, 2)
    model.register_buffer("doubled", 2 * model.weight)
    method = fp.Method(lambda *all: (None, {}), fp.averaging_server({}), lambda *all: model)
    data = SimpleNamespace(id=0, server_round=0)
    copy = fp.Round(-1, method.server.state, {}).model(method, data)
    assert torch.equal(copy.doubled, 2 * model.weight)
    assert copy.weight.requires_grad
    with torch.no_grad():
        model.weight.add_(1)
    assert torch.equal(copy.doubled, 2 * copy.weight)


@pytest.mark.parametrize(("name", "family"), RUNS)
def test_models_that_are_kept_stay_what_they_were_and_share_the_frozen_network(name, family):
    """Models of all clients and rounds, at a time, also when one of them is trained on."""
    federation = federation_of(METHODS[name], family, **CHANGES)
    method, kept = MAKERS[name](federation), []
    for now in fp.run_rounds(method, federation.data, federation.cohorts()):
        for client in (0, 1, 2, 5):
            model = now.model(method, federation.data(client, now.server_round))
            kept.append((model, logits(model, federation)))
    first, second = kept[0][0], kept[4][0]
    assert any(value.requires_grad for value in first.parameters()) or name == "zero_shot"
    shared = ("tower", "names") if hasattr(first, "tuned") else ("tower", "names", "trunk")
    assert all(getattr(first, part, None) is getattr(second, part, None) for part in shared)
    with torch.no_grad():
        for value in first.parameters():
            value.add_(1)
    for model, expected in kept[1:]:
        assert torch.equal(logits(model, federation), expected)
