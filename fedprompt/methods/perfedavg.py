"""Clients train the global model so that one gradient step on a client's images adapts it well.

Each step descends the loss after such an adaptation. The exact method differentiates through the
adaptation. Its first-order approximation leaves out the Hessian. Fallah et al., "Personalized
Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning Approach", NeurIPS
2020.

Up: prompts and head, L P D + D C + C numbers. Down: prompts and head.

Deviations: the paper draws three batches a step. Here half of each batch adapts and also gives the
Hessian, and the other half gives the outer gradient. The outer steps use the clients' optimizer. A
client adapts with all its training images, in one step, when its predictions are requested. Every
client counts once in the mean.

Compared: equations of the paper with the exact Hessian, with the deviations above, float64, largest
difference 1.1e-16 (2026-11).
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

import fedprompt as fp
from fedprompt.methods.models import PromptedModel
from fedprompt.methods.registry import LEARNING_RATE, PERSONALIZED, register
from fedprompt.methods.setting import Batch
from fedprompt.methods.steps import averaged, take_step
from fedprompt.methods.whole_networks import ImageSetting

_SEARCH = LEARNING_RATE | {"inner_rate": (1e-2, 1.0)}


@register("Per-FedAvg", **PERSONALIZED, search=_SEARCH)
def perfedavg(
    setting: ImageSetting, *, learning_rate: float = 1e-2, inner_rate: float = 0.1
) -> fp.Method:
    """Per-FedAvg."""
    return _meta_learned(setting, learning_rate, inner_rate, exact=True)


@register("Per-FedAvg (first order)", **PERSONALIZED, search=_SEARCH)
def perfedavg_first_order(
    setting: ImageSetting, *, learning_rate: float = 1e-2, inner_rate: float = 0.1
) -> fp.Method:
    """Per-FedAvg (first order)."""
    return _meta_learned(setting, learning_rate, inner_rate, exact=False)


def _meta_learned(
    setting: ImageSetting, learning_rate: float, inner_rate: float, *, exact: bool
) -> fp.Method:
    """Make the method with the exact Hessian, or without it."""
    model = setting.new_model()

    def train(data, answer, state):
        fp.load_values(model, answer)
        optimizer = data.optimizer(model, learning_rate)
        rate = data.learning_rate(inner_rate)
        for images, labels in data.batches():
            with sdpa_kernel(SDPBackend.MATH):  # other kernels have no second derivative
                first = images[::2], labels[::2]
                adapted = _adapt(model, [first], len(first[1]), rate, exact=exact)
                logits = functional_call(model, adapted, (images[1::2],))
            loss = F.cross_entropy(logits, labels[1::2])
            take_step(optimizer, loss)
        return fp.collect(model, weight=1.0), {"trained": True}

    def predict(data, answer, state):
        fp.load_values(model, answer)
        if state:
            rate = data.learning_rate(inner_rate)
            all_images = data.parts(), data.num_examples
            fp.load_values(model, _adapt(model, *all_images, rate, exact=False))
        return model

    return averaged(model, train, predict=predict)


def _adapt(
    model: PromptedModel, parts: Iterable[Batch], count: int, inner_rate: float, *, exact: bool
) -> dict[str, Tensor]:
    """Return the parameters of a model after one gradient step on `count` images in parts."""
    parameters = dict(model.named_parameters())
    options = {"create_graph": exact, "materialize_grads": True}
    adapted: dict[str, Tensor] = dict(parameters)
    for images, labels in parts:
        loss = F.cross_entropy(model(images), labels) * (len(labels) / count)
        gradients = torch.autograd.grad(loss, list(parameters.values()), **options)
        for name, gradient in zip(parameters, gradients, strict=True):
            adapted[name] = adapted[name] - inner_rate * gradient
    return adapted
