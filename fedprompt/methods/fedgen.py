"""The server trains a generator of features, which gives clients examples of all classes.

Clients share their heads and the labels of their images. The generator learns to make features of
given classes that the heads recognize, and each client also trains its head on such features. Zhu
et al., "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", ICML 2021.

Up: the head, C(D + 1) numbers, and C counts of labels. Down: the head, the generator, 2D(D + 1) +
CD + 2D numbers, and C counts of labels.

Deviations: only heads are averaged, which is the paper's version for models that differ. The heads
are linear, so the mean of their logits is computed by the mean head. The generator has the layers
of HtFLlib, with batch statistics at all times and without a diversity loss. Its noise is Gaussian,
as in the paper. HtFLlib and the authors' code draw it uniformly from 0 to 1. Labels are drawn from
the labels of clients that took part so far. Generated features begin in the second round.

Compared: TsingZ0/HtFLlib e959261 and zhuangdizhu/FedGen dd5807c, with the deviations above,
float64, largest difference 2.0e-13 (2026-11).
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp
from fedprompt.methods.registry import DIFFERENT_MODELS, LEARNING_RATE, register
from fedprompt.methods.steps import adam_steps, take_step
from fedprompt.methods.whole_networks import ImageSetting


class _FeatureGenerator(nn.Sequential):
    """Network from noise and a class to features."""

    def __init__(self, classes: int, dim: int) -> None:
        norm = nn.BatchNorm1d(dim, track_running_stats=False)
        super().__init__(nn.Linear(dim + classes, dim), norm, nn.ReLU(), nn.Linear(dim, dim))

    def draw(self, counts: Tensor, size: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw labels (size,) with frequencies `counts` (classes,), and features (size, dim)."""
        labels = torch.multinomial(counts, size, replacement=True, generator=rng)
        noise = torch.randn(size, self[-1].out_features, generator=rng)
        return self(torch.cat([noise, F.one_hot(labels, len(counts))], 1)), labels


def _server(
    setting: ImageSetting, head: nn.Linear, generator: _FeatureGenerator, rate: float, steps: int
) -> fp.Server:
    """Make the server, which averages heads and trains the generator for these heads."""
    no_counts = torch.zeros(setting.num_classes)

    def answer(client, state):
        networks = fp.named("head", state["head"])
        networks |= fp.named("generator", state["values"])
        return networks | {"counts": sum(state["counts"].values(), no_counts)}

    def step(server_round, payloads, state):
        mean = fp.weighted_mean(payloads.values())
        fp.load_values(head, {**state["head"], **fp.part(mean, "head")})
        counts = state["counts"] | {str(c): sent["counts"].value for c, sent in payloads.items()}
        total = sum(counts.values(), no_counts)
        draw = setting.generator(server_round, purpose="generated")

        def loss():
            features, labels = generator.draw(total, setting.batch_size, draw)
            return F.cross_entropy(head(features), labels)

        trained = adam_steps(generator, loss, state, learning_rate=rate, steps=steps)
        return {"head": fp.snapshot(head), "counts": counts, **trained}

    new = {"values": fp.snapshot(generator), "adam": {}}
    return fp.Server({"head": fp.snapshot(head), "counts": {}, **new}, answer, step)


@register("FedGen", **DIFFERENT_MODELS, search=LEARNING_RATE | {"generated_weight": (1e-2, 1.0)})
def fedgen(
    setting: ImageSetting,
    *,
    learning_rate: float = 1e-2,
    generated_weight: float = 0.1,
    server_rate: float = 5e-3,
    server_steps: int = 50,
) -> fp.Method:
    """FedGen."""
    if setting.batch_size < 2:
        rule = "be at least 2 for FedGen, whose generator normalizes over a batch"
        raise ValueError(f"`batch_size` must {rule}; got {setting.batch_size}.")
    head = setting.new_model(0).head
    generator = setting.seeded(_FeatureGenerator, setting.num_classes, head.in_features)

    def train(data, answer, state):
        model = predict(data, answer, state)
        fp.load_values(generator, fp.part(answer, "generator"))
        optimizer = data.optimizer(model, learning_rate)
        draw = data.generator("generated")
        for images, labels in data.batches():
            loss = F.cross_entropy(model(images), labels)
            if answer["counts"].any():  # from the second round on
                features, drawn = generator.draw(answer["counts"], setting.batch_size, draw)
                loss += generated_weight * F.cross_entropy(model.head(features.detach()), drawn)
            take_step(optimizer, loss)
        payload = fp.collect(model, weight=data.num_examples, only=["head"])
        payload["counts"] = fp.Weighted(data.class_counts, torch.tensor(1.0))
        return payload, fp.snapshot(model, buffers=True)

    def predict(data, answer, state):
        return setting.shared_head(data, fp.part(answer, "head"), state)

    def form(client):
        counts = fp.Weighted(torch.zeros(setting.num_classes), torch.tensor(0.0))
        return fp.named("head", fp.collect(head, weight=0)) | {"counts": counts}

    server = _server(setting, head, generator, server_rate, server_steps)
    return fp.Method(train, server, predict, form=form)
