"""KgCoOp: its step follows the stated objective."""

import pytest
import torch
import torch.nn.functional as F

from fedprompt.methods.kgcoop import kgcoop
from tiny_federations import ONE_CLIENT, clip_federation, descend, last, parameters


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("guide_weight", [0.5, 8.0])
def test_a_step_descends_the_loss_plus_the_distance_to_handwritten_features(guide_weight):
    """The squared distance of normalized features is twice one minus their cosine."""
    federation = clip_federation(**ONE_CLIENT | {"steps": 1})
    found = parameters(last(kgcoop, federation, learning_rate=0.1, guide_weight=guide_weight), 0)
    model = federation.new_model()
    ((tokens, labels),) = federation.batches(0, 0)
    cosine = F.cosine_similarity(model.text()[0], federation.handwritten_text(), dim=-1)
    objective = F.cross_entropy(model(tokens), labels) + guide_weight * 2 * (1 - cosine).mean()
    descend(objective, model.parameters(), 0.1)
    torch.testing.assert_close(found["context.context"], model.context.context.detach())
