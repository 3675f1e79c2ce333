"""Clients share one context and keep another, and transport divides the patches between them.

Both contexts describe each class. The partial transport of an image's patches to the two
descriptions decides which patches are compared with which. The plan has no gradient. Li et al.,
"Global and Local Prompts Cooperation via Optimal Transport for Federated Learning", CVPR 2024. The
variants are from its ablation. Two controls are arguments: `local` keeps both contexts on the
client, and `pooled` compares the contexts with the pooled token alone.

Up: a context (T D numbers). Down: a context.

Deviations: transport is solved by Newton's method to its solution, where the paper stops Dykstra's
algorithm early; that is `solver`. The learning rate is 0.005, and 0.001 in the paper. These are
fields of the setting: the optimizer is AdamW, where the paper uses SGD, and a context has eight
tokens in place of 16.

Compared: HongxiaLee/FedOTP 9948611, with the deviations above, float64, largest difference 3.8e-8
(tolerance of the solver), without transport 6.4e-15 (2026-11).
"""

from functools import partial
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

import fedprompt as fp
from fedprompt.interfaces import ContextLearner, PatchMatcher, TransportScore, TransportSolver
from fedprompt.methods.models import ClipModel, ClipSetting, check_logits, replace_contexts
from fedprompt.methods.registry import LEARNING_RATE, PERSONALIZED_CLIP, register
from fedprompt.methods.steps import averaged, take_step

__all__ = ["fedotp", "fedotp_average", "fedotp_classical", "two_contexts"]

PATCHES = slice(1, None)  # tokens after the pooled one


@register("FedOTP", **PERSONALIZED_CLIP, search=LEARNING_RATE | {"mass": (0.4, 0.95)})
def fedotp(
    setting: ClipSetting,
    *,
    learning_rate: float = 5e-3,
    mass: float = 0.8,
    epsilon: float = 0.1,
    solver: TransportSolver | None = None,
    gradient: TransportScore | None = None,
    match: PatchMatcher | None = None,
    shared: ContextLearner | None = None,
    private: ContextLearner | None = None,
    local: bool = False,
) -> fp.Method:
    """FedOTP: partial transport.

    `solver` has its options bound, and takes the place of Newton's method with `epsilon`. `match`
    takes the place of :func:`fedprompt.transport_logits` with `solver`, `mass` and `gradient`, of
    which the first and the last must be None then. Copies of `shared` and `private`, with their
    initial values, take the place of the two contexts. Both have equal lengths.
    """
    if match is not None and (solver is not None or gradient is not None):
        raise ValueError("`match` must be None with `solver` or `gradient`; got a function.")
    model = _TwoContexts(setting, match or _transport(mass, epsilon, solver, gradient))
    replace_contexts(model, shared=shared, private=private)
    return two_contexts(model, learning_rate, local=local)


@register("FedOTP (classical)", **PERSONALIZED_CLIP, search=LEARNING_RATE)
def fedotp_classical(
    setting: ClipSetting,
    *,
    learning_rate: float = 5e-3,
    epsilon: float = 0.1,
    solver: TransportSolver | None = None,
) -> fp.Method:
    """FedOTP (classical): balanced transport, in which every patch has equal mass."""
    return two_contexts(_TwoContexts(setting, _transport(1.0, epsilon, solver)), learning_rate)


@register("FedOTP (average)", **PERSONALIZED_CLIP, search=LEARNING_RATE)
def fedotp_average(
    setting: ClipSetting, *, learning_rate: float = 5e-3, pooled: bool = False
) -> fp.Method:
    """FedOTP (average): the mean cosine of all patches and both contexts, without transport."""
    match = partial(fp.transport_logits, solver=fp.transport.independent, mass=1.0)
    model = _TwoContexts(setting, match, slice(1) if pooled else PATCHES)
    return two_contexts(model, learning_rate)


def _transport(mass: float, epsilon: float, solver: Any, gradient: Any = None) -> PatchMatcher:
    solver = solver or partial(fp.transport.newton, epsilon=epsilon)
    gradient = gradient or fp.transport.plan_fixed
    return partial(fp.transport_logits, solver=solver, mass=mass, gradient=gradient)


class _TwoContexts(ClipModel):
    """Classifier of image tokens with a shared and a private context."""

    def __init__(self, setting: ClipSetting, match: PatchMatcher, read: slice = PATCHES) -> None:
        super().__init__(setting)
        self.match = match
        self.read = read
        self.shared = setting.new_context()
        self.private = setting.drawn_contexts("private context")

    def forward(self, tokens: Float[Tensor, "batch tokens dim"]) -> Float[Tensor, "batch classes"]:
        """Classify images by the tokens that are read: the patches follow the pooled one."""
        contexts = torch.cat([self.shared(), self.private()])
        text = self.encode_names(contexts, class_specific=contexts.ndim == 4)
        logits = self.match(tokens[:, self.read], text, scale=self.scale)
        check_logits("match", logits, len(tokens), text.shape[1])
        return logits


def two_contexts(model: nn.Module, learning_rate: float, *, local: bool = False) -> fp.Method:
    """Make the method for a classifier with a part "shared" and a part "private"."""
    first = fp.snapshot(model)

    def train(data, answer, state):
        fp.load_values(model, {**first, **answer, **state})
        optimizer = data.optimizer(model, learning_rate)
        for tokens, labels in data.batches():
            take_step(optimizer, F.cross_entropy(model(tokens), labels))
        if local:
            return {}, fp.snapshot(model)
        payload = fp.collect(model, weight=data.num_examples, only=["shared"])
        return payload, fp.snapshot(model, only=["private"])

    if not local:
        return averaged(model, train, shared=["shared"])
    return averaged(model, train, server=fp.averaging_server({}))._replace(form=lambda client: {})
