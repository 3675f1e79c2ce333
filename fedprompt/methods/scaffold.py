"""Control variates correct each gradient step for the drift of a client.

A client adds the server's control variate to its gradients and subtracts its own. Both estimate
mean gradients from the movement of earlier rounds (option II of the paper). Karimireddy et al.,
"SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020.

Up: the changes of prompts, head and control variate, 2 (L P D + D C + C) numbers. Down: prompts,
head and the server's control variate, as many.

Deviations: none. The steps are plain gradient steps, because the definition needs them, and the
server rate is 1. Every client counts once in the mean.

Compared: option II of the paper and TsingZ0/PFLlib d832e76, float64, largest difference 5.6e-17
(2026-11).
"""

import torch
import torch.nn.functional as F

import fedprompt as fp
from fedprompt.methods.registry import register
from fedprompt.methods.setting import VitSetting


@register("SCAFFOLD", families=("one model",), search={"learning_rate": (3e-2, 3.0)})
def scaffold(setting: VitSetting, *, learning_rate: float = 0.3) -> fp.Method:
    """SCAFFOLD."""
    model = setting.new_model()
    x = fp.snapshot(model)
    zeros = {name: torch.zeros_like(value) for name, value in x.items()}

    def train(data, answer, state):
        x, c = {name: answer[name] for name in zeros}, fp.part(answer, "control")
        c_i = state or zeros
        fp.load_values(model, x)
        optimizer = torch.optim.SGD(model.parameters(), learning_rate)
        for images, labels in data.batches():
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            for name, parameter in model.named_parameters():
                parameter.grad += c[name] - c_i[name]
            optimizer.step()
        moved = fp.delta(fp.collect(model, weight=1.0), x)
        scale = -1 / (data.steps * learning_rate)
        changes = {
            name: entry._replace(value=scale * entry.value - c[name])
            for name, entry in moved.items()
        }
        c_i = {name: c_i[name] + changes[name].value for name in c_i}
        return moved | fp.named("control", changes), c_i

    def answer(client, state):
        return state["x"] | fp.named("control", state["c"])

    def step(server_round, payloads, state):
        mean = {name: entry.value for name, entry in fp.weighted_mean(payloads.values()).items()}
        share, control = len(payloads) / len(setting.clients), fp.part(mean, "control")
        x = {name: value + mean[name] for name, value in state["x"].items()}
        c = {name: value + share * control[name] for name, value in state["c"].items()}
        return {"x": x, "c": c}

    def predict(data, answer, state):
        fp.load_values(model, {name: answer[name] for name in zeros})
        return model

    def form(client):
        entries = fp.collect(model, weight=0)
        return entries | fp.named("control", entries)

    return fp.Method(train, fp.Server({"x": x, "c": zeros}, answer, step), predict, form=form)
