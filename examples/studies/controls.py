"""Control rows: what methods have beside their mechanism, such as parameters and passes."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp
from fedprompt import compare
from fedprompt.methods import METHODS, ClipSetting, Entry, VitSetting, fedvpt_d
from fedprompt.methods.models import ClipModel, PromptedClassifier, Tune, tuned_trunk
from fedprompt.methods.pfedmoap import Mixture
from fedprompt.methods.setting import ClientData
from fedprompt.methods.steps import averaged, train


def apart(method: fp.Method) -> fp.Method:
    """Make each client its own server: it trains on from its own payload, and sends nothing."""

    def values(payload: Any) -> Any:
        return {name: sent.value for name, sent in payload.items()}

    def client(data: ClientData, answer: Any, state: Any) -> Any:
        payload, _ = method.client(data, {**first, **state}, {})
        return {}, values(payload)

    first = values(method.form(0))
    return method._replace(client=client, server=fp.averaging_server({}), form=lambda client: {})


def together(model: nn.Module, learning_rate: float, times: int = 1) -> fp.Method:
    """Average one model, whose clients count equally."""

    def client(data: ClientData, answer: Any, state: Any) -> Any:
        fp.load_values(model, answer)
        train(model, data, learning_rate, times=times)
        return fp.collect(model, weight=1.0), state

    return averaged(model, client)


def fednorms(setting: VitSetting, *, learning_rate: float = 1e-2) -> fp.Method:
    """Average of normalization layers and heads."""
    return fedvpt_d(replace(setting, tune=fp.tuning.norms), learning_rate=learning_rate)


def tuned_alone(
    tune: Tune, times: int, setting: VitSetting, *, learning_rate: float = 1e-2
) -> fp.Method:
    """Parameters of the network, and a head, on each client alone."""
    model = setting.new_model(tune=tune)
    return apart(together(model, learning_rate, times=times))


def pfedme_lora(
    setting: VitSetting,
    *,
    learning_rate: float = 1e-2,
    proximal_weight: float = 0.1,
    outer_step: float = 0.5,
) -> fp.Method:
    """pFedMe of LoRA and heads, in place of prompts."""  # noqa: D403
    setting = replace(setting, tune=partial(fp.tuning.lora, rank=2))
    weights = {"proximal_weight": proximal_weight, "outer_step": outer_step}
    return PFEDME.make(setting, learning_rate=learning_rate, **weights)


class OfClasses(PromptedClassifier):
    """A context for each class."""

    def __init__(self, setting: ClipSetting) -> None:
        draw = setting.generator(0, purpose="keys and contexts")  # as in FedAPT
        size = dict[str, Any](length=setting.length, num_classes=setting.num_classes)
        super().__init__(setting, fp.ContextPrompts(setting.tower.dim, **size, generator=draw))

    def text(self) -> Tensor:
        """Encode each class name behind its context."""
        return self.tower(fp.prompted_text(self.context(), self.names, class_specific=True))


def coop_csc(setting: ClipSetting, *, learning_rate: float = 5e-3) -> fp.Method:
    """CoOp with a context for each class, on each client alone."""
    return apart(together(setting.seeded(OfClasses, setting), learning_rate))


def promptfl_csc(setting: ClipSetting, *, learning_rate: float = 5e-3) -> fp.Method:
    """Average of contexts for each class; clients count equally, as in FedAPT."""
    return together(setting.seeded(OfClasses, setting), learning_rate)


class Linear(nn.Module):
    """Linear classifier of the pooled token, without text."""

    def __init__(self, setting: ClipSetting) -> None:
        super().__init__()
        dim = setting.handwritten_text().shape[1]
        self.scale, self.head = setting.scale, nn.Linear(dim, setting.num_classes)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Classify images."""
        return self.scale * self.head(F.normalize(tokens[:, 0], dim=-1))


def linear_head(setting: ClipSetting, *, learning_rate: float = 5e-3) -> fp.Method:
    """Average of linear heads on the pooled token."""
    return together(setting.seeded(Linear, setting), learning_rate)


def linear_alone(setting: ClipSetting, *, learning_rate: float = 5e-3) -> fp.Method:
    """Linear head on the pooled token, on each client alone."""
    return apart(linear_head(setting, learning_rate=learning_rate))


def adapter_alone(setting: ClipSetting, *, learning_rate: float = 1e-3) -> fp.Method:
    """FedCLIP's adapter, on each client alone."""
    return apart(FEDCLIP.make(setting, learning_rate=learning_rate))


class Gate(Mixture):
    """pFedMoAP's gate over the client's text, without contexts of other clients."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Classify images by their pooled token."""
        return self.mixed(tokens, torch.empty(0, *self.names.tokens.shape[:1], self.gate.embed_dim))


def lora_of_mlps(model: nn.Module) -> tuple[nn.Module, list[nn.Parameter]]:
    """Add LoRA of rank 2 to the MLPs of a copy: open_clip has no projections as modules."""
    from peft import LoraConfig, inject_adapter_in_model  # the other rows do without it

    config = LoraConfig(r=2, lora_alpha=2, target_modules=["c_fc", "c_proj"])
    tuned: Any = inject_adapter_in_model(config, deepcopy(model))
    return tuned, [weight for name, weight in tuned.named_parameters() if ".lora_" in name]


class TunedClip(ClipModel):
    """Image tower with LoRA, and handwritten sentences."""

    def __init__(self, setting: ClipSetting) -> None:
        super().__init__(setting)
        self.trunk = tuned_trunk(fp.vit_trunk(setting.clip.visual), lora_of_mlps)
        self.tuned = self.trunk.trainable
        self.text = setting.handwritten_text()

    def forward(self, images: Tensor) -> Tensor:
        """Classify images."""
        image = fp.encode_prompted(self.trunk, images).pooled
        return fp.cosine_logits(image, self.text, scale=self.scale)


def fedlora_clip(setting: ClipSetting, *, learning_rate: float = 5e-3) -> fp.Method:
    """Average of LoRA in the image tower of a CLIP."""
    return together(setting.seeded(TunedClip, setting), learning_rate)


def plot_independent(setting: ClipSetting, *, learning_rate: float = 5e-3) -> fp.Method:
    """PLOT with means over patches in place of transport."""
    solver = fp.transport.independent
    return METHODS["fedplot"].make(setting, learning_rate=learning_rate, solver=solver)


def fedsept_public(
    setting: ClipSetting,
    *,
    learning_rate: float = 5e-3,
    num_experts: int = 4,
    diversity_weight: float = 10.0,
) -> fp.Method:
    """FedSEPT without clipping and noise."""
    values = {"num_experts": num_experts, "diversity_weight": diversity_weight}
    return FEDSEPT.make(setting, learning_rate=learning_rate, private=False, **values)


def coop_gate(
    setting: ClipSetting, *, learning_rate: float = 5e-3, own_weight: float = 0.5
) -> fp.Method:
    """CoOp with pFedMoAP's gate over its text, on each client alone."""
    return apart(together(setting.seeded(Gate, setting, own_weight), learning_rate))


def _entry(
    name: str,
    title: str,
    make: Callable[..., fp.Method],
    family: str,
    *traits: str,
    inputs: str = "",
) -> Entry:
    return Entry(name, title, make, tuple(family.split(", ")), traits, {}, inputs)


ALONE, GATE = "personalized", "CoOp with a gate over its text (local)"
IMAGES = "one model, mixed models"
LONGER = compare.Row("Training alone", "longer").entry.make
TWICE, THRICE = (partial(LONGER, times=times) for times in (2, 3))
NORMS = partial(tuned_alone, fp.tuning.norms, 1)
LORA, LORA_4 = (partial(tuned_alone, partial(fp.tuning.lora, rank=rank)) for rank in (2, 4))
LONGEST = "LoRA, rank 4 (local), three times as long"
LONG = partial(LORA, 3)
PFEDME, FEDCLIP = METHODS["pfedme"], METHODS["fedclip"]
FEDSEPT = METHODS["fedsept"]
PLOT, SEPT = "PLOT, means of patches", "FedSEPT without noise"
ADAPTER = "FedCLIP's adapter (local)"
CONTROLS = {
    entry.name: entry
    for entry in (
        _entry("local_twice", "Local training, twice as long", TWICE, IMAGES, ALONE),
        _entry("local_thrice", "Local training, three times as long", THRICE, IMAGES, ALONE),
        _entry("coop_twice", "CoOp (local), twice as long", TWICE, "CLIP", ALONE),
        _entry("fednorms", "Norms", fednorms, "one model"),
        _entry("norms_alone", "Norms (local)", NORMS, "one model", ALONE),
        _entry("fedlora_alone", "LoRA (local)", partial(LORA, 1), "one model", ALONE),
        _entry("fedlora_thrice", "LoRA (local), three times as long", LONG, "one model", ALONE),
        _entry("pfedme_lora", "pFedMe of LoRA", pfedme_lora, "one model", ALONE),
        _entry("lora_alone", "LoRA, rank 4 (local)", partial(LORA_4, 1), "pretrained", ALONE),
        _entry("lora_thrice", LONGEST, partial(LORA_4, 3), "pretrained", ALONE),
        _entry("adapter_alone", ADAPTER, adapter_alone, "CLIP", ALONE),
        _entry("linear_head", "Linear head", linear_head, "CLIP"),
        _entry("linear_alone", "Linear head (local)", linear_alone, "CLIP", ALONE),
        _entry("fedlora_clip", "LoRA of the image tower", fedlora_clip, "CLIP", inputs="images"),
        _entry("plot_independent", PLOT, plot_independent, "CLIP"),
        _entry("fedsept_public", SEPT, fedsept_public, "CLIP", ALONE),
        _entry("coop_csc", "CoOp, a context for each class (local)", coop_csc, "CLIP", ALONE),
        _entry("promptfl_csc", "PromptFL, a context for each class", promptfl_csc, "CLIP", ALONE),
        _entry("coop_gate", GATE, coop_gate, "CLIP", ALONE),
    )
}
"""Control rows by the name of their function, as in :data:`fedprompt.methods.METHODS`."""
