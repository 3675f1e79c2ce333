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
of a template with noise. Initial visual prompts are those of VPT in place of N(0, .02²).

Compared: weihao-bo/FedMGP 3a02697, with the deviations above, float64, largest difference 4.9e-15
(2026-11).
"""

from collections.abc import Iterator

import torch
import torch.nn as nn
import torch.nn.functional as F
from einops import einsum
from torch import Tensor

import fedprompt as fp
from methods.federation import ClipFederation, Predictions

FAMILIES = ("CLIP",)
TRAITS = ("personalized",)
SEARCH = {"learning_rate": (1e-3, 1e-1), "diversity": (0.1, 10.0)}
INPUTS = "images"


class Groups(nn.Module):
    """Groups of two text and two visual prompts each, before the first layers."""

    def __init__(self, federation: ClipFederation, num_groups: int = 5) -> None:
        super().__init__()
        self.federation, self.num_groups = federation, num_groups
        self.tower, self.trunk = federation.tower, fp.vit_trunk(federation.clip.visual)
        draw = {"generator": federation.generator(0, purpose="prompts")}
        self.text = fp.ContextPrompts(self.tower.dim, num_contexts=num_groups, length=2, **draw)
        self.visual = fp.GroupPrompts(num_groups, 2, self.trunk, layers=[0], **draw)

    def features(self, images: Tensor) -> list[Tensor]:
        """Encode images (groups, batch, dim) and classes (groups, classes, dim)."""
        groups = torch.arange(self.num_groups).repeat_interleave(len(images))
        copies = images.repeat(self.num_groups, 1, 1, 1)
        prompts = self.federation.clip.visual.ln_pre(self.visual(groups).layers[0])
        pooled = fp.encode_prompted(self.trunk, copies, fp.PromptStream({0: prompts})).pooled
        image = pooled.unflatten(0, (self.num_groups, len(images)))
        text = self.tower(fp.prompted_text(self.text(), self.federation.names))
        return [F.normalize(each, dim=-1) for each in (image, text)]

    def logits(self, image: Tensor, text: Tensor) -> Tensor:
        """Classify with each group (groups, batch, classes)."""
        return self.federation.scale * einsum(image, text, "group b d, group c d -> group b c")

    def forward(self, images: Tensor) -> Tensor:
        """Classify with the mean of all groups."""
        return self.logits(*self.features(images)).mean(0)


def likeness(features: Tensor) -> Tensor:
    """Return minus the mean absolute difference of the features of two groups."""
    first, second = torch.triu_indices(len(features), len(features), 1)
    return -(features[first] - features[second]).abs().mean()


def sample(own: Tensor, common: Tensor, sharpness: float, draw: torch.Generator) -> Tensor:
    """Draw as many groups as there are common ones, by their largest cosine to these."""
    cosines = F.cosine_similarity(own.flatten(1)[:, None], common.flatten(1), dim=-1)
    return (sharpness * cosines.amax(1)).softmax(0).multinomial(len(common), generator=draw)


def fedmgp(
    federation: ClipFederation, *, learning_rate: float = 5e-3, diversity: float = 1.0
) -> Iterator[Predictions]:
    """FedMGP."""
    model = Groups(federation)
    new, own, slots = fp.snapshot(model), {}, {}
    values = {name: value[:2] for name, value in new.items()}
    first = dict.fromkeys(new, torch.arange(2))

    def personal(client: int) -> nn.Module:
        mine, last = own.get(client, new), slots.get(client, first)
        mine = {name: mine[name].index_copy(0, last[name], values[name]) for name in mine}
        fp.load_values(model, mine)
        return model

    for server_round in range(federation.rounds):
        payloads, sharpness = [], float(server_round > 0)  # the first draw is uniform
        for client in federation.cohort(server_round):
            federation.send_down(client, values)
            optimizer = federation.optimizer(personal(client), learning_rate)
            for images, labels in federation.batches(client, server_round):
                features = model.features(images)
                logits = model.logits(*features).flatten(0, 1)
                loss = F.cross_entropy(logits, labels.repeat(model.num_groups))
                loss = loss + diversity / 2 * sum(likeness(each) for each in features)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            mine, chosen = fp.snapshot(model), {}
            for name in mine:  # the same draw for both halves of a group
                draw = federation.generator(server_round, client, purpose="groups")
                chosen[name] = sample(mine[name], values[name], sharpness, draw)
            own[client], slots[client] = mine, chosen
            payload = {name: mine[name][rows] for name, rows in chosen.items()}
            payloads.append(federation.send_up(client, payload))
        values = {name: torch.stack([p[name] for p in payloads]).mean(0) for name in values}
        yield Predictions(client=personal, newcomer=personal)
