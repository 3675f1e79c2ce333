"""Clients train LoRA of ranks that may differ, and the server pads it with zeros and averages it.

A client counts by the Frobenius norm of its product B A at a layer, so clients whose products have
small rows count less. A client receives the first columns of B and the first rows of A. Cho et al.,
"Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models", EMNLP 2024.

Up: LoRA and head, 4 r L D + D C + C numbers for rank r. Down: the same.

Deviations: clients do not prune their ranks, so ranks are those that you give (`sizes`). The paper
trains language models. Here is a head, whose clients count by their examples. The norm is that of
each layer. The product has no scale, because the learning rate is tuned. If all products of a layer
are 0, its factors stay as they are.

Compared: equations of the abstract and of our reading of the method, float64, largest difference
2e-16 (2026-11). The code of the authors was not available.
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
