"""Control variates correct each gradient step for the drift of a client.

A client adds the server's control variate to its gradients and subtracts its own. Both estimate
mean gradients from the movement of earlier rounds (option II of the paper). Karimireddy et al.,
"SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020.

Up: the changes of prompts, head and control variate, 2 (L P D + D C + C) numbers. Down: prompts,
head and the server's control variate, as many.

Deviations: none. The steps are plain gradient steps, because the definition needs them, so
`make_optimizer` of the setting is not read. The server rate is 1. Every client counts once in the
mean.

Compared: option II of the paper and TsingZ0/PFLlib d832e76, float64, largest difference 5.6e-17
(2026-11).
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp
from fedprompt.interfaces import Payload
from fedprompt.methods.registry import register
from fedprompt.methods.whole_networks import ImageSetting


def _control_changes(moved: Payload, c: Mapping[str, Tensor], length: float) -> Payload:
    """Estimate how a control variate changes, from the movement of the client (option II).

    Without steps, or with a rate of 0, a client learns nothing about its gradient.
    """
    if not length:
        return {name: entry._replace(value=0 * entry.value) for name, entry in moved.items()}
    return {
        name: entry._replace(value=-1 / length * entry.value - c[name])
        for name, entry in moved.items()
    }


@register("SCAFFOLD", families=("one model",), search={"learning_rate": (3e-2, 3.0)})
def scaffold(setting: ImageSetting, *, learning_rate: float = 0.3) -> fp.Method:
    """SCAFFOLD."""
    model = setting.new_model()
    count = len(setting.named_clients)
    first = fp.snapshot(model)
    zeros = {name: torch.zeros_like(value) for name, value in first.items()}

    def train(data, answer, state):
        predict(data, answer, state)
        c = fp.part(answer, "control")
        c_i = state or zeros
        rate = data.learning_rate(learning_rate)
        optimizer = torch.optim.SGD(model.parameters(), rate)
        for images, labels in data.batches():
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    parameter.grad += c[name] - c_i[name]
            optimizer.step()
        moved = fp.delta(fp.collect(model, weight=1.0), answer)
        changes = _control_changes(moved, c, data.steps * rate)
        c_i = {name: value + changes[name].value for name, value in c_i.items()}
        return moved | fp.named("control", changes), c_i

    def answer(client, state):
        return state["x"] | fp.named("control", state["c"])

    def step(server_round, payloads, state):
        mean = {name: entry.value for name, entry in fp.weighted_mean(payloads.values()).items()}
        share = len(payloads) / count
        x = {name: value + mean[name] for name, value in state["x"].items()}
        c = {name: value + share * mean[f"control.{name}"] for name, value in state["c"].items()}
        return {"x": x, "c": c}

    def predict(data, answer, state):
        fp.load_values(model, {name: answer[name] for name in first})
        return model

    def form(client):
        entries = fp.collect(model, weight=0)
        return entries | fp.named("control", entries)

    server = fp.Server({"x": first, "c": zeros}, answer, step, changes=True)
    return fp.Method(train, server, predict, form=form)
