"""Clients have groups of text and visual prompts, and share those most like the global ones.

Each group classifies the batch with its own text and image features, and a diversity loss drives
the features of the groups apart. A client samples some of its groups, with probabilities that grow
with the cosine to the global groups. The text and the visual half of a group use the same random
numbers, so they are mostly sampled together. The server averages the sampled groups by rank. They
replace the groups that the client sampled last. Predictions average the logits of all groups. Bo et
al., "FedMGP: Personalized Federated Learning with Multi-Group Text-Visual Prompts", NeurIPS 2025.

Up: 2 groups of text (2 D) and of visual prompts (2 V), V the width of image tokens. Down: 2 groups.

Deviations: the diversity loss is minus the mean absolute difference of features, as the paper
intends. The authors' code takes its absolute value, which drives groups together. A client that
skips rounds receives the newest global groups when it returns. In its first round, and as a
newcomer, it has them in its first two groups. Initial text prompts are N(0, .02²) in place of words
of a template with noise. Initial visual prompts are drawn as in VPT, in place of N(0, .02²).

Compared: weihao-bo/FedMGP 3a02697, with the deviations above, float64, largest difference 4.9e-15
(2026-11).
"""

from typing import Any

import torch
import torch.nn.functional as F
from einops import einsum
from torch import Tensor

import fedprompt as fp
from fedprompt.methods.models import ClipModel, ClipSetting
from fedprompt.methods.registry import LEARNING_RATE, PERSONALIZED_CLIP, register
from fedprompt.methods.steps import broadcast, take_step


class _Groups(ClipModel):
    """Groups of two text and two visual prompts each, before the first layers."""

    def __init__(self, setting: ClipSetting, num_groups: int = 5) -> None:
        super().__init__(setting)
        self.num_groups = num_groups
        self.trunk: Any = fp.vit_trunk(setting.clip.visual)
        draw = dict[str, Any](generator=setting.generator(0, purpose="prompts"))
        self.text = fp.ContextPrompts(self.tower.dim, num_contexts=num_groups, length=2, **draw)
        self.visual = fp.GroupPrompts(num_groups, 2, self.trunk, layers=[0], **draw)

    def features(self, images: Tensor) -> list[Tensor]:
        """Encode images (groups, batch, dim) and classes (groups, classes, dim)."""
        groups = torch.arange(self.num_groups).repeat_interleave(len(images))
        copies = images.repeat(self.num_groups, 1, 1, 1)
        prompts = self.trunk.model.ln_pre(self.visual(groups).layers[0])
        pooled = fp.encode_prompted(self.trunk, copies, fp.PromptStream({0: prompts})).pooled
        image = pooled.unflatten(0, (self.num_groups, len(images)))
        text = self.encode_names(self.text())
        return [F.normalize(features, dim=-1) for features in (image, text)]

    def logits(self, image: Tensor, text: Tensor) -> Tensor:
        """Classify with each group (groups, batch, classes)."""
        return self.scale * einsum(image, text, "group b d, group c d -> group b c")

    def forward(self, images: Tensor) -> Tensor:
        """Classify with the mean of all groups."""
        return self.logits(*self.features(images)).mean(0)


def _likeness(features: Tensor) -> Tensor:
    """Return minus the mean absolute difference of the features of two groups."""
    first, second = torch.triu_indices(len(features), len(features), 1)
    return -(features[first] - features[second]).abs().mean()


def _sample(groups: Tensor, common: Tensor, sharpness: float, draw: torch.Generator) -> Tensor:
    """Draw as many groups as there are common ones, by their largest cosine to these."""
    cosines = F.cosine_similarity(groups.flatten(1)[:, None], common.flatten(1), dim=-1)
    return (sharpness * cosines.amax(1)).softmax(0).multinomial(len(common), generator=draw)


@register(
    "FedMGP",
    **PERSONALIZED_CLIP,
    search=LEARNING_RATE | {"diversity": (0.1, 10.0)},
    inputs="images",
)
def fedmgp(
    setting: ClipSetting, *, learning_rate: float = 5e-3, diversity: float = 1.0
) -> fp.Method:
    """FedMGP."""
    model = _Groups(setting)
    new = fp.snapshot(model)
    first = {name: value[:2] for name, value in new.items()}
    start = {"groups": new, "slots": dict.fromkeys(new, torch.arange(2))}

    def train(data, answer, state):
        optimizer = data.optimizer(predict(data, answer, state), learning_rate)
        for images, labels in data.batches():
            features = model.features(images)
            logits = model.logits(*features).flatten(0, 1)
            loss = F.cross_entropy(logits, labels.repeat(model.num_groups))
            loss = loss + diversity / 2 * sum(_likeness(part) for part in features)
            take_step(optimizer, loss)
        groups = fp.snapshot(model)
        slots = {}
        sharpness = float(data.server_round > 0)  # the first draw is uniform
        for name, prompts in groups.items():  # the same draw for both halves of a group
            slots[name] = _sample(prompts, answer[name], sharpness, data.generator("groups"))
        payload = {name: groups[name][rows] for name, rows in slots.items()}
        return payload, {"groups": groups, "slots": slots}

    def step(server_round, payloads, state):
        sent = payloads.values()
        return {n: torch.stack([payload[n] for payload in sent]).mean(0) for n in state}

    def predict(data, answer, state):
        state = state or start
        values = {
            name: prompts.index_copy(0, state["slots"][name], answer[name])
            for name, prompts in state["groups"].items()
        }
        fp.load_values(model, values)
        return model

    return fp.Method(train, fp.Server(first, broadcast, step), predict, form=lambda client: first)
