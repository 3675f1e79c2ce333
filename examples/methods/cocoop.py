"""A small network adds a vector of each image to the context, and the server averages both.

All tokens of the context are shifted by the same vector, so each image has its own text features.
CoCoOp is from Zhou et al., "Conditional Prompt Learning for Vision-Language Models", CVPR 2022.
The network has two layers, and its hidden width is a sixteenth of that of the image features.

Up: a context and the network (T D + D F / 16 + F F / 16 numbers and biases, for image features of
width F). Down: the same.

Deviations: the paper trains on one machine. Here the context and the network are averaged over
clients, as PromptFL averages a context. The batches are those of all methods, not single images.

Compared: KaiyangZhou/CoOp ff61507, with the deviations above, float64, largest difference 3e-16
(2026-11).
"""

from collections.abc import Iterator

import torch
import torch.nn as nn
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

import fedprompt as fp
from methods.federation import ClipFederation, Predictions

FAMILIES = ("CLIP",)
TRAITS = ()
SEARCH = {"learning_rate": (1e-3, 1e-1)}


class ConditionalText(nn.Module):
    """Classifier of image tokens, with a context for each image."""

    def __init__(self, federation: ClipFederation) -> None:
        super().__init__()
        self.tower, self.names, self.scale = federation.tower, federation.names, federation.scale
        self.context, width = federation.new_context(), federation.inputs.shape[-1]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(federation.seed)
            hidden = max(1, width // 16)
            self.network = nn.Sequential(
                nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, self.tower.dim)
            )

    def contexts(
        self, tokens: Float[Tensor, "batch tokens dim"]
    ) -> Float[Tensor, "batch 1 length width"]:
        """Return the context of each image."""
        shift = self.network(F.normalize(tokens[:, 0], dim=-1))
        return self.context() + shift[:, None, None]

    def forward(self, tokens: Float[Tensor, "batch tokens dim"]) -> Float[Tensor, "batch classes"]:
        """Classify images by their pooled token, which is first."""
        sentences = fp.prompted_text(self.contexts(tokens), self.names, per_sample=True)
        return fp.cosine_logits(tokens[:, 0], self.tower(sentences)[:, 0], scale=self.scale)


def cocoop(federation: ClipFederation, *, learning_rate: float = 5e-3) -> Iterator[Predictions]:
    """CoCoOp (averaged)."""
    model, server = ConditionalText(federation), fp.overwrite()
    values = fp.snapshot(model)
    state = server.init(values)
    for server_round in range(federation.rounds):
        payloads = []
        for client in federation.cohort(server_round):
            fp.load_values(model, federation.send_down(client, values))
            optimizer = federation.optimizer(model, learning_rate)
            for tokens, labels in federation.batches(client, server_round):
                loss = F.cross_entropy(model(tokens), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            payload = fp.collect(model, weight=federation.num_examples(client))
            payloads.append(federation.send_up(client, payload))
        values, state = server.step(values, fp.weighted_mean(payloads), state)
        fp.load_values(model, values)
        yield Predictions(everyone=model)
