"""Clients tune prompts and a head, and learn from mean class logits of all clients.

A client sends the mean logits of each class, over the images that it classifies correctly. The
server averages them with more weight for trunks of similar width, and each sample is distilled
towards the row of its class. Ma et al., "FedHPL: Efficient Heterogeneous Federated Learning with
Prompt Tuning and Logit Distillation", 2024.

Up: at most C(C + 1) numbers, which are a row of logits for each class with a correct image and C
counts; with +P also the prompts, PLD numbers, and with +H the projection and the head. Down: the
same, from the second round on.

Deviations: the defaults are AdamW and eight prompts, where the paper has SGD (momentum 0.9, weight
decay 1e-4) and three. A projection to a common width lies between trunk and head if the setting has
one, as for every method of this family. It is shared with the head. Teachers come from the clients
of the last round only, since the paper has no client sampling. The server aggregates after all
clients, where Algorithm 1 prints it inside the loop over clients. Round 1 has no teacher. The count
of a class is the number of logits sent, because the paper's count of all samples is not in its
message. Class means replace single logits (Equation 36).

Compared: no public code; with Equations 1 to 10, 36 and App. C.4 on networks of unlike width and
depth, with +P, +H and all ablations, sample by sample, float64, largest difference 2.8e-16
(2026-11).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import fedprompt as fp
from fedprompt.interfaces import Payload, PromptInjector, Trunk
from fedprompt.methods.models import PromptedModel, VitSetting
from fedprompt.methods.registry import DIFFERENT_MODELS, LEARNING_RATE, register
from fedprompt.methods.setting import ClientData
from fedprompt.methods.steps import take_step
from fedprompt.methods.whole_networks import ImageSetting, NetworkModel

_Model = PromptedModel | NetworkModel
_SEARCH = LEARNING_RATE | {"distillation_weight": (1e-1, 10.0)}


@register("FedHPL", **DIFFERENT_MODELS, search=_SEARCH)
def fedhpl(
    setting: ImageSetting,
    *,
    learning_rate: float = 1e-2,
    distillation_weight: float = 1.0,
    share: Sequence[str] = (),
    temperature: float = 4.5,
    similarity: Callable[[int, int], float] | float | None = None,
    smoothing: float = 1.0,
    keep_all: bool = False,
    deep: bool = True,
    num_prompts: int | None = None,
    prompts: Callable[[Trunk], PromptInjector] | None = None,
) -> fp.Method:
    """FedHPL, with every axis that the paper varies.

    Args:
        setting: Setting of the run.
        learning_rate: Learning rate of clients (at least 0).
        distillation_weight: Weight gamma of the distillation (at least 0).
        share: Parts that are averaged among trunks of one width, such as "prompts" (+P).
        temperature: Softmax temperature of the distillation (above 0).
        similarity: Function of two latent dimensions, or a number for all pairs: 1 is the uniform
            ablation. If None, that of Equation 7.
        smoothing: Number that is added to the denominator of Equation 8 (at least 0).
        keep_all: Whether clients also send the logits of misclassified images.
        deep: Whether each block has its own prompts (Equation 5) or the first one only (4).
        num_prompts: Number of prompts at a block. If None, that of the setting.
        prompts: Function from a trunk to a module that returns a prompt stream, in place of `deep`
            and `num_prompts`.

    Raises:
        ValueError: If `prompts` is given with `num_prompts` or ``deep=False``.
    """
    if prompts is not None and not (deep and num_prompts is None):
        raise ValueError("`prompts` must be None with `num_prompts` or `deep=False`.")
    if num_prompts is not None or prompts is not None or not deep:
        if not isinstance(setting, VitSetting):
            raise ValueError("`setting` must be a VitSetting for prompts that are tokens.")
        tokens = setting if num_prompts is None else replace(setting, num_prompts=num_prompts)
        prompts = prompts or (None if deep else partial(fp.ShallowPrompts, tokens.num_prompts))
        setting = tokens if prompts is None else replace(tokens, prompts=prompts)
    means = partial(fp.heterogeneous_means, smoothing=smoothing, similarity=similarity)

    def train(model, data, teacher):
        optimizer = data.optimizer(model, learning_rate)
        for images, labels in data.batches():
            logits = model(images)
            loss = fp.distillation_loss(logits, labels, teacher, temperature=temperature)
            take_step(optimizer, F.cross_entropy(logits, labels) + distillation_weight * loss)
        return _class_logits(model, data, keep_all)

    return _taught(setting, share, train, means)


@register("FedHPL +P", **DIFFERENT_MODELS, search=_SEARCH)
def fedhpl_p(
    setting: ImageSetting, *, learning_rate: float = 1e-2, distillation_weight: float = 1.0
) -> fp.Method:
    """FedHPL +P: prompts are averaged among trunks of one width, which need one depth."""
    rates = dict[str, Any](learning_rate=learning_rate, distillation_weight=distillation_weight)
    return fedhpl(setting, share=["prompts"], **rates)


@register("FedHPL +H", **DIFFERENT_MODELS, search=_SEARCH)
def fedhpl_h(
    setting: ImageSetting, *, learning_rate: float = 1e-2, distillation_weight: float = 1.0
) -> fp.Method:
    """FedHPL +H: heads are averaged among trunks of one width."""
    rates = dict[str, Any](learning_rate=learning_rate, distillation_weight=distillation_weight)
    model = setting.new_model(0)
    shared = [part for part in ("projection", "head") if [*model.get_submodule(part).parameters()]]
    return fedhpl(setting, share=shared, **rates)


def _taught(
    setting: ImageSetting,
    share: Sequence[str],
    learn: Callable[[_Model, ClientData, fp.Weighted], fp.Weighted],
    means: Callable[..., dict[int, fp.Weighted]],
) -> fp.Method:
    """Make the method, which averages some parts among trunks of one width."""
    unknown = setting.unknown_rows(setting.num_classes)

    def dim(client):
        return setting.width_of(client)

    def message(logits, model, size):
        return {"logits": logits} | (fp.collect(model, weight=size, only=share) if share else {})

    def train(data, answer, state):
        model = setting.model(data.id, state)
        fp.load_values(model, {n: entry for n, entry in answer.items() if n != "logits"})
        logits = learn(model, data, answer["logits"])
        return message(logits, model, data.num_examples), fp.snapshot(model, buffers=True)

    def answer(client, state):
        return state[str(dim(client))]

    def step(server_round, payloads, state):
        widths = [*map(dim, payloads)]
        # An entry of weight 0 for each width gives every width a teacher.
        entries = [payload["logits"] for payload in payloads.values()] + [unknown] * len(state)
        teachers = means(entries, [*widths, *map(int, state)])
        shared = _shared(payloads.values(), widths, state)
        return {width: {**shared[width], "logits": teachers[int(width)]} for width in state}

    def form(client):
        return message(unknown, setting.model(client, {}), 0)

    new = setting.num_backbones * (1 + max(setting.clients, default=0))  # newcomers, of all kinds
    forms = {client: form(client) for client in range(new, new + setting.num_backbones)}
    first: dict[str, Payload] = {str(dim(client)): sent for client, sent in forms.items()}
    _shared(forms.values(), [*map(dim, forms)], first)  # refuses prompts of unlike depth
    step(0, {}, first)  # refuses hyperparameters of the means
    return fp.Method(train, fp.Server(first, answer, step), setting.private_model, form=form)


@torch.no_grad()
def _class_logits(model: _Model, data: ClientData, keep_all: bool) -> fp.Weighted:
    """Average the logits of each class, in eval mode and in parts of the images."""

    def parts() -> Iterator[fp.Weighted]:
        for images, labels in data.parts():
            logits = model(images)
            keep = None if keep_all else logits.argmax(1) == labels
            yield fp.class_means(logits, labels, num_classes=logits.shape[1], keep=keep)

    model.eval()
    means = fp.weighted_mean(parts())
    model.train()
    return means


def _shared(
    payloads: Iterable[Payload], widths: Sequence[int], replies: Mapping[str, Payload]
) -> dict[str, Payload]:
    """Average the entries of clients with equal widths; a width without clients keeps its reply."""
    sent: dict[str, list[Payload]] = {width: [] for width in replies}
    for payload, width in zip(payloads, widths, strict=True):
        sent[str(width)].append(payload)
    return {
        width: fp.weighted_mean(sent[width]) if sent[width] else reply
        for width, reply in replies.items()
    }
