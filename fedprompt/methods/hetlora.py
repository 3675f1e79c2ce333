"""Clients train LoRA of ranks that may differ, and the server pads it with zeros and averages it.

A client counts by the Frobenius norm of its product B A at a layer. It receives the first columns
of B and the first rows of A. Cho et al., "Heterogeneous LoRA for Federated Fine-tuning of On-Device
Foundation Models", EMNLP 2024.

Up: LoRA and head, 4 r L D + D C + C numbers for rank r. Down: the same.

Deviations: the text of the paper was not available, so this is the method as later papers describe
it. Clients do not prune their ranks: they have those that you give (`sizes`). The paper trains
language models. There is a head, for which clients count by their examples. The product has no
scale, because the learning rate is tuned. If all products of a layer are 0, its factors stay.

Compared: padded factors and their weighted means by hand, float64, largest difference 1.4e-16
(2026-11).
"""

import fedprompt as fp
from fedprompt.aggregation import padded
from fedprompt.methods.fedlora import fedlora
from fedprompt.methods.models import VitSetting
from fedprompt.methods.registry import LEARNING_RATE, register
from fedprompt.methods.sizes import Sizes, low_rank_pairs


@register("HetLoRA", families=("one model",), search=LEARNING_RATE)
def hetlora(
    setting: VitSetting, *, learning_rate: float = 1e-2, rank: int = 2, sizes: Sizes | None = None
) -> fp.Method:
    """HetLoRA without pruning. A size is the rank of a client."""
    method = fedlora(setting, learning_rate=learning_rate, rank=rank, sizes=sizes)
    values, rule = method.server.state["values"], fp.overwrite()
    pairs = low_rank_pairs(values)

    def weighed(payload):
        whole = padded(payload, values)
        for b, a in pairs.values():
            norm = (payload[b].value @ payload[a].value).norm()
            for name in (b, a):
                value = whole[name].value
                whole[name] = fp.Weighted(value, norm.expand(value.shape))
        return whole

    def step(server_round, payloads, state):
        mean = fp.weighted_mean(map(weighed, payloads.values()))
        new, update = rule.step(state["values"], mean, state["update"])
        return {"values": new, "update": update}

    return method._replace(server=method.server._replace(step=step))
