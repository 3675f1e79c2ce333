"""Clients train LoRA and a linear head, and the frozen weights take what the mean of LoRA misses.

The server averages A and B separately. It adds the mean of the products B A, less the product of
the means, to the frozen weights. So every client begins the next round with the mean of the
products. Singhal et al., "FedEx-LoRA: Exact Aggregation for Federated and Efficient Fine-Tuning of
Large Language Models", ACL 2025, Eq. 12-18.

Up: LoRA and head, 4 r L D + D C + C numbers for rank r. Down: the same, and 3 L D² numbers of
weights.

Deviations: the paper trains language models, and all clients in every round. It sends the residual
of a round, as two factors. Here a client may miss rounds, so it receives the weights themselves.
The product has no scale, because the learning rate is tuned. In the code, clients count equally,
and the residual is transposed, which fits the layers of GPT-2 alone.

Compared: the server's step in RaghavSinghal10/fedex-lora 683a3f3, with the deviations above,
float64, largest difference 2.2e-16 (2026-11).
"""

import torch.nn as nn
import torch.nn.functional as F

import fedprompt as fp
from fedprompt.methods.models import VitSetting
from fedprompt.methods.registry import LEARNING_RATE, register
from fedprompt.methods.sizes import low_rank_pairs
from fedprompt.methods.steps import averaged, broadcast, take_step


def with_weights(model: nn.Module, rank: int) -> tuple[nn.Module, list[nn.Parameter]]:
    """Add LoRA, and name the weights that it changes among the parameters."""
    tuned, parameters = fp.tuning.lora(model, rank=rank)
    named = tuned.named_parameters()
    return tuned, parameters + [w for name, w in named if name.endswith("base_layer.weight")]


@register("FedEx-LoRA", families=("one model",), search=LEARNING_RATE)
def fedex_lora(
    setting: VitSetting,
    *,
    learning_rate: float = 1e-2,
    rank: int = 2,
    residual_rank: int | None = None,
) -> fp.Method:
    """FedEx-LoRA."""
    model = setting.new_model(tune=lambda model: with_weights(model, rank))
    first = fp.snapshot(model)
    pairs = low_rank_pairs(first)
    for weight in pairs:
        model.get_parameter(weight).requires_grad_(False)
    sent = [name for name in first if name not in pairs]

    def train(data, answer, state):
        fp.load_values(model, answer)
        optimizer = data.optimizer(model, learning_rate)
        for images, labels in data.batches():
            take_step(optimizer, F.cross_entropy(model(images), labels))
        return fp.collect(model, weight=data.num_examples, only=sent), state

    def step(server_round, payloads, state):
        mean = fp.aggregation.low_rank_mean(payloads.values(), pairs, rank=residual_rank)
        residuals = {name: state[name] + mean[name].value for name in pairs}
        return {name: entry.value for name, entry in mean.items()} | residuals

    server = fp.Server(first, broadcast, step)
    return averaged(model, train, shared=sent, server=server)
