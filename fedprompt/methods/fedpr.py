"""Clients change their prompts only in the approximate null space of the global prompts.

After each step, the change of a layer's prompts is projected onto the directions in which the
broadcast prompts of that layer are smallest. So the new prompts interfere little with the old ones.
Feng et al., "Learning Federated Visual Prompt in Null Space for MRI Reconstruction" (FedPR), CVPR
2023.

Up: prompts and head. Down: prompts and head.

Deviations: the paper has a pretrained head, which stays frozen. Here the head is new, so it is
trained and averaged, without a projection. The projection is not divided by its norm, because the
learning rate is tuned. As in the authors' code, there is no projection in the first round. The
number of directions is rounded to the nearest integer. The authors' code rounds it up, so it may
keep one direction more.

Compared: chunmeifeng/FedPR f5c3e67, with the deviations above, float64, largest difference 1.1e-16
(2026-11).
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp
from fedprompt.methods.models import VitSetting
from fedprompt.methods.registry import LEARNING_RATE, register
from fedprompt.methods.steps import averaged, take_step


def _null_space(tokens: Tensor, share: float) -> Tensor:
    """Return the projections on the directions in which the tokens of a layer are smallest."""
    rising = torch.linalg.eigh((tokens.mT @ tokens).double()).eigenvectors
    smallest = rising[..., : round(share * tokens.shape[-1])]
    return (smallest @ smallest.mT).to(tokens.dtype)


@register("FedPR", families=("one model",), search=LEARNING_RATE | {"share": [0.5, 0.8, 0.9]})
def fedpr(setting: VitSetting, *, learning_rate: float = 1e-2, share: float = 0.8) -> fp.Method:
    """FedPR."""
    model = setting.new_model(prompts=partial(fp.DeepPrompts, setting.num_prompts))
    tokens = model.get_parameter("prompts.tokens")

    def train(data, answer, state):
        fp.load_values(model, answer)
        start = answer["prompts.tokens"]
        projection = _null_space(start, share)
        optimizer = data.optimizer(model, learning_rate)
        for images, labels in data.batches():
            take_step(optimizer, F.cross_entropy(model(images), labels))
            if data.server_round > 0:
                with torch.no_grad():
                    tokens.copy_(start + (tokens - start) @ projection)
        return fp.collect(model, weight=data.num_examples), state

    return averaged(model, train)
