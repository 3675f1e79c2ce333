"""Each client keeps a private context, and the server sends it a mixture of similar contexts.

The weight of another client's context falls with the squared distance to the own one, and the own
context has the rest. The client trains with a proximal term towards the mixture. FedAMP is from
Huang et al., "Personalized Cross-Silo Federated Learning on Non-IID Data", AAAI 2021. The
combination is a baseline of pFedPrompt (Guo et al., WWW 2023) and FedOTP (Li et al., CVPR 2024).

Up: a context (T D numbers). Down: a mixture (T D numbers).

Deviations: the paper's step of the server is its temperature divided by the number of clients. So
the weights are positive, and at an infinite temperature they are equal. `proximal_weight` is the
paper's lambda divided by this step. Only the clients of a round train, and the server mixes the
last contexts of all clients. Training continues from a client's own context.

Compared: TsingZ0/PFLlib d832e76 and equations of the paper, with the deviations above, float64,
largest difference 6.4e-15 (2026-11).
"""

import torch.nn.functional as F

import fedprompt as fp
from fedprompt.methods.fedamp import attentive_server
from fedprompt.methods.models import ClipSetting
from fedprompt.methods.registry import LEARNING_RATE, PERSONALIZED_CLIP, register
from fedprompt.methods.steps import averaged, take_step


@register(
    "PromptFL + FedAMP",
    **PERSONALIZED_CLIP,
    search=LEARNING_RATE | {"proximal_weight": (1e-3, 1e1), "temperature": (1e-1, 1e2)},
)
def promptfl_fedamp(
    setting: ClipSetting,
    *,
    learning_rate: float = 5e-3,
    proximal_weight: float = 0.1,
    temperature: float = 1.0,
) -> fp.Method:
    """PromptFL + FedAMP."""
    model = setting.new_model()
    first = fp.collect(model, weight=1)

    def train(data, answer, state):
        fp.load_values(model, state or first)
        optimizer = data.optimizer(model, learning_rate)
        for tokens, labels in data.batches():
            loss = F.cross_entropy(model(tokens), labels)
            loss = loss + proximal_weight * fp.proximal_loss(model, answer)
            take_step(optimizer, loss)
        return fp.collect(model, weight=1), fp.snapshot(model)

    def answer(client, state):
        return {name: entry.value for name, entry in server.answer(client, state).items()}

    server = attentive_server(setting.named_clients, first, temperature)
    return averaged(model, train, server=server._replace(answer=answer))
