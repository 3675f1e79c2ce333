"""PromptFL with a proximal term that keeps the context of each client near the broadcast.

Each step minimizes the loss of the batch plus half the squared distance to the broadcast, times a
weight. Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020. The combination
is a baseline of pFedPrompt (Guo et al., WWW 2023) and FedOTP (Li et al., CVPR 2024).

Up: a context (T D numbers). Down: a context.

Deviations: clients take equal numbers of steps, so the stragglers of FedProx do not occur.

Compared: equations of the paper, float64, largest difference 6.9e-15 (2026-11).
"""

import torch.nn.functional as F

import fedprompt as fp
from fedprompt.methods.models import ClipSetting
from fedprompt.methods.registry import LEARNING_RATE, register
from fedprompt.methods.steps import averaged, take_step


@register(
    "PromptFL + FedProx",
    families=("CLIP",),
    search=LEARNING_RATE | {"proximal_weight": (1e-3, 1e1)},
)
def promptfl_fedprox(
    setting: ClipSetting, *, learning_rate: float = 5e-3, proximal_weight: float = 0.1
) -> fp.Method:
    """PromptFL + FedProx."""
    model = setting.new_model()

    def train(data, answer, state):
        fp.load_values(model, answer)
        optimizer = data.optimizer(model, learning_rate)
        for tokens, labels in data.batches():
            loss = F.cross_entropy(model(tokens), labels)
            loss = loss + proximal_weight * fp.proximal_loss(model, answer)
            take_step(optimizer, loss)
        return fp.collect(model, weight=data.num_examples), state

    return averaged(model, train)
