"""CoCoOp: each image has its own context, and without the network it is PromptFL."""

import pytest
import torch
import torch.nn as nn

import fedprompt as fp
from fedprompt import samples
from fedprompt.methods import ClipSetting
from fedprompt.methods.cocoop import _ConditionalText, cocoop
from fedprompt.methods.promptfl import promptfl
from tiny_federations import clip_federation, last


@pytest.mark.usefixtures("float64")
def test_with_a_network_that_returns_zero_it_is_promptfl(monkeypatch):
    made = _ConditionalText.__init__

    def without_network(self, federation):
        made(self, federation)
        self.network = nn.Sequential(*(layer.requires_grad_(False) for layer in self.network))
        nn.init.zeros_(self.network[-1].weight)
        nn.init.zeros_(self.network[-1].bias)

    monkeypatch.setattr(_ConditionalText, "__init__", without_network)
    federation = clip_federation()
    found = last(cocoop, federation, learning_rate=0.05).of(0)
    plain = last(promptfl, clip_federation(), learning_rate=0.05).of(0)
    torch.testing.assert_close(found(federation.inputs), plain(federation.inputs))


def test_the_network_shifts_the_context_by_the_normalized_pooled_token():
    tower = fp.TextTower(samples.clip(), samples.tokenize)
    model = _ConditionalText(ClipSetting(tower=tower, class_names=["cat"], rounds=1))
    first, _, second = model.network
    width = first.in_features
    tokens = torch.randn(3, 5, width, generator=torch.Generator().manual_seed(0))
    hidden = (tokens[:, 0] / tokens[:, 0].norm(dim=1, keepdim=True)) @ first.weight.T + first.bias
    shift = hidden.clamp(min=0) @ second.weight.T + second.bias
    expected = model.context() + shift[:, None, None]
    torch.testing.assert_close(model.contexts(tokens), expected)
    assert (expected[0] - expected[1]).abs().max() > 1e-3
    assert hidden.shape == (3, width // 16) != (3, width // 17)
