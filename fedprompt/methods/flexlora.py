"""Clients train LoRA of ranks that may differ, and the server averages and divides the products.

The mean of the products B A is divided by a singular value decomposition U S V. A client of rank r
receives the first r columns of U S as B, and the first r rows of V as A. So each begins with the
best approximation of the mean product of its rank. Bai et al., "Federated Fine-tuning of Large
Language Models under Heterogeneous Tasks and Client Resources" (FlexLoRA), NeurIPS 2024.

The exact variant adds what a client's rank misses to its frozen weights, as FedEx-LoRA does. All
clients begin with the mean of the products then, whatever their rank. It is a reference of ours.

Up: LoRA and head, 4 r L D + D C + C numbers for rank r. Down: the same, and for the exact variant
3 L D² numbers of weights.

Deviations: the text of the paper was not available, so this is the method as later papers describe
it. The paper trains language models. Clients have the ranks that you give (`sizes`). The product
has no scale, because the learning rate is tuned. There is a head, which is averaged. If a mean
product is 0, its factors stay.

Compared: the mean product and its best approximations by hand, float64, largest difference 2.8e-16
(2026-11).
"""

from functools import partial

import torch

import fedprompt as fp
from fedprompt.aggregation import leading
from fedprompt.methods.fedex_lora import with_weights
from fedprompt.methods.models import VitSetting
from fedprompt.methods.registry import LEARNING_RATE, register
from fedprompt.methods.sizes import Sizes, low_rank_pairs, of_sizes
from fedprompt.methods.steps import averaged, fedavg_client


@register("FlexLoRA", families=("one model",), search=LEARNING_RATE)
def flexlora(
    setting: VitSetting, *, learning_rate: float = 1e-2, rank: int = 2, sizes: Sizes | None = None
) -> fp.Method:
    """FlexLoRA. A size is the rank of a client."""
    return _divided(setting, learning_rate, rank, sizes, exact=False)


@register("FlexLoRA (exact)", families=("one model",), search=LEARNING_RATE)
def flexlora_exact(
    setting: VitSetting, *, learning_rate: float = 1e-2, rank: int = 2, sizes: Sizes | None = None
) -> fp.Method:
    """FlexLoRA: the frozen weights take what a rank misses. A size is the rank of a client."""
    return _divided(setting, learning_rate, rank, sizes, exact=True)


def _divided(
    setting: VitSetting, learning_rate: float, rank: int, sizes: Sizes | None, *, exact: bool
) -> fp.Method:
    frozen = {}

    def make(rank: int) -> fp.Method:
        tune = with_weights if exact else fp.tuning.lora
        model = setting.new_model(tune=partial(tune, rank=rank))
        first = fp.snapshot(model)
        sent = [name for name in first if ".base_layer." not in name]
        frozen.update({name: value for name, value in first.items() if name not in sent})
        for name in frozen:
            model.get_parameter(name).requires_grad_(False)
        return averaged(model, fedavg_client(model, learning_rate, shared=sent), shared=sent)

    method = of_sizes(setting, make, sizes, rank=rank)
    first = method.server.state["values"]
    pairs = low_rank_pairs(first)

    def products(values):
        return {weight: values[b] @ values[a] for weight, (b, a) in pairs.items()}

    def answer(client, state):
        own = leading(state["values"], method.form(client))
        missed = products(own) if exact else {}
        return own | {w: frozen[w] + state["mean"][w] - missed[w] for w in missed}

    def multiplied(payload, state):
        new = products({name: entry.value for name, entry in payload.items()})
        old = products(leading(state["values"], payload)) if exact else dict.fromkeys(new, 0)
        heads = {name: payload[name] for name in payload if ".lora_" not in name}
        weights = {weight: payload[b].weight for weight, (b, _) in pairs.items()}
        return heads | {w: fp.Weighted(new[w] - old[w], weights[w]) for w in pairs}

    def step(server_round, payloads, state):
        sent = fp.weighted_mean(multiplied(each, state) for each in payloads.values())
        values = {name: entry.value for name, entry in sent.items()}
        mean = {w: values.pop(w) + (state["mean"][w] if exact else 0) for w in pairs}
        for weight, (b, a) in pairs.items():
            left, scale, right = torch.linalg.svd(mean[weight], full_matrices=False)
            values[b], values[a] = torch.zeros_like(first[b]), torch.zeros_like(first[a])
            values[b][:, : len(scale)] = (left * scale)[:, :rank]
            values[a][: len(scale)] = right[:rank]
        still = [name for w, pair in pairs.items() if not mean[w].any() for name in pair]
        values |= {name: state["values"][name] for name in still}  # 0 has no directions
        return {"values": values, "mean": mean if exact else {}}

    mean = {weight: torch.zeros_like(value) for weight, value in frozen.items()}
    server = fp.Server({"values": first, "mean": mean}, answer, step, False, False)
    return method._replace(server=server)
