"""Clients train LoRA of ranks that may differ, and the server adds the mean product to the weights.

The server stacks the factors A, times the shares of the clients, and the factors B. The product of
the stacks is the mean of the products B A, without error. It is merged into the frozen weights, and
every client begins the next round with a new A and with B = 0. Wang et al., "FLoRA: Federated
Fine-Tuning Large Language Models with Heterogeneous Low-Rank Adaptations", NeurIPS 2024, of which
the abstract and the introduction were read.

Up: LoRA and head, 4 r L D + D C + C numbers for rank r. Down: the head, and 3 L D² numbers of
weights.

Deviations: the paper trains language models, and clients receive the stacks of a round. Here a
client may miss rounds, so it receives the weights themselves. The product has no scale, because the
learning rate is tuned. There is a head, which is averaged.

Compared: the stacks and the merging in ATP-1010/FederatedLLM 7bea158, by hand, with the deviations
above, float64, largest difference 1.1e-16 (2026-11).
"""

import math
from functools import partial
from itertools import chain

import torch.nn as nn
import torch.nn.functional as F

import fedprompt as fp
from fedprompt.methods.fedex_lora import with_weights
from fedprompt.methods.models import VitSetting
from fedprompt.methods.registry import LEARNING_RATE, register
from fedprompt.methods.sizes import Sizes, checked_sizes, low_rank_pairs
from fedprompt.methods.steps import broadcast, take_step


@register("FLoRA", families=("one model",), search=LEARNING_RATE)
def flora(
    setting: VitSetting, *, learning_rate: float = 1e-2, rank: int = 2, sizes: Sizes | None = None
) -> fp.Method:
    """FLoRA. A size is the rank of a client."""
    own = checked_sizes(setting, sizes or {}, rank=rank)
    ranks = {rank, *(size for (size,) in own.values())}
    models = {each: setting.new_model(tune=partial(with_weights, rank=each)) for each in ranks}
    values = fp.snapshot(models[rank])
    first = {name: value for name, value in values.items() if ".lora_" not in name}
    factors = low_rank_pairs(values)
    for each in models.values():
        for weight in factors:
            each.get_parameter(weight).requires_grad_(False)
    lora = {each: fp.snapshot(models[each], only=[*chain(*factors.values())]) for each in models}
    sent = [*(name for name in first if name not in factors), *chain(*factors.values())]

    def model_of(client, values):
        (size,) = own.get(client, (rank,))
        fp.load_values(models[size], {**lora[size], **values})  # B is 0
        return models[size]

    def train(data, answer, state):
        checked_sizes(data.setting, sizes or {}, rank=rank)
        model, draw = model_of(data.id, answer), data.generator("LoRA")
        for _, a in factors.values():
            nn.init.kaiming_uniform_(model.get_parameter(a), math.sqrt(5), generator=draw)
        optimizer = data.optimizer(model, learning_rate)
        for images, labels in data.batches():
            take_step(optimizer, F.cross_entropy(model(images), labels))
        return fp.collect(model, weight=data.num_examples, only=sent), state

    def merged(payload):
        products = {name: payload[b].value @ payload[a].value for name, (b, a) in factors.items()}
        weight = payload[sent[0]].weight
        change = {name: fp.Weighted(product, weight) for name, product in products.items()}
        return {name: change.get(name) or payload[name] for name in first}

    def step(server_round, payloads, state):
        mean = fp.weighted_mean(map(merged, payloads.values()))
        before = {name: state[name] if name in factors else 0 for name in first}
        return {name: before[name] + entry.value for name, entry in mean.items()}

    def form(client):
        return fp.collect(model_of(client, first), weight=0, only=sent)

    def predict(data, answer, state):
        return model_of(data.id, answer)  # a new B is 0

    return fp.Method(train, fp.Server(first, broadcast, step), predict, form=form)
