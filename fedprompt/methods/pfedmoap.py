"""Each client combines its prompt with prompts of other clients, by an attention gate.

The server keeps the newest context of every client. It sends the averaged context, from which the
client continues, and the contexts that are nearest to the client's last one. These experts are
fixed. A private attention gate mixes their text features for each image, and the logits of the
mixture are added to the logits of the client's context. Luo et al., "Mixture of Experts Made
Personalized: Federated Prompt Learning for Vision-Language Models", ICLR 2025 (pFedMoAP).

Up: a context (T D). Down: the mean context (T D) and, from the second time, E - 1 contexts of
other clients (T D each) for E experts.

Deviations: the gate has 4 heads and the width of the features, which are not subsampled. A client
predicts with the context, the gate and the experts of its last round, as after local training.
Experts are the nearest contexts, as in the paper. The released code always draws them at random,
because it never reads its flag. The gate has the learning rate of the context, where that code has
a five times larger one.

Compared: ljaiverson/pFedMoAP a481de3, with the deviations above, float64, largest difference
2.7e-15 (2026-11).
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from einops import einsum
from torch import Tensor

import fedprompt as fp
from fedprompt.methods.models import ClipSetting, PromptedClassifier
from fedprompt.methods.registry import LEARNING_RATE, PERSONALIZED_CLIP, register
from fedprompt.methods.steps import averaged, take_step

__all__ = ["Mixture", "pfedmoap"]


class Mixture(PromptedClassifier):
    """Prompted text with a gate over the text features of other clients, if there are any."""

    def __init__(self, setting: ClipSetting, own_weight: float, num_others: int = 0) -> None:
        super().__init__(setting, setting.new_context())
        width = setting.handwritten_text().shape[1]
        heads = 4
        self.gate = nn.MultiheadAttention(width, heads, batch_first=True)
        self.sharpness = 10 * (width / heads) ** 0.5  # attention divides by the root
        self.own_weight = own_weight
        self.others = torch.zeros(num_others, setting.num_classes, width)  # normalized text
        self.known = torch.zeros(num_others, dtype=torch.bool)

    def forward(self, tokens: Tensor) -> Tensor:
        """Classify images by their pooled token."""
        return self.mixed(tokens, self.others[self.known] if self.known.any() else None)

    def mixed(self, tokens: Tensor, others: Tensor | None) -> Tensor:
        """Classify with the gate over the own text and that of others, or without a gate."""
        image = F.normalize(tokens[:, 0], dim=-1)
        text = F.normalize(self.text(), dim=-1)
        logits = self.scale * image @ text[0].T
        if others is None:
            return logits
        experts = torch.cat([text, others]).transpose(0, 1)  # (classes, experts, dim)
        mixed, _ = self.gate(self.sharpness * image.expand(len(experts), -1, -1), experts, experts)
        return self.own_weight * logits + self.scale * einsum(image, mixed, "b d, c b d -> b c")


def _nearest(contexts: dict[str, Tensor], client: str, count: int) -> list[Tensor]:
    """Return the contexts of other clients that are nearest to the one of a client."""
    others = [c for other, c in contexts.items() if client in contexts and other != client]
    return sorted(others, key=lambda context: float((context - contexts[client]).norm()))[:count]


def _experts(contexts: dict[str, Tensor], client: str, unknown: Tensor) -> fp.Weighted:
    """Put the nearest contexts into the first rows; the others are unknown."""
    near = _nearest(contexts, client, len(unknown))
    weights = (torch.arange(len(unknown)) < len(near)).float()
    return fp.Weighted(torch.cat([*near, unknown])[: len(unknown)], weights)


@register(
    "pFedMoAP",
    **PERSONALIZED_CLIP,
    search=LEARNING_RATE | {"num_experts": [2, 4, 8], "own_weight": (0.1, 2.0)},
)
def pfedmoap(
    setting: ClipSetting,
    *,
    learning_rate: float = 5e-3,
    num_experts: int = 4,
    own_weight: float = 0.5,
) -> fp.Method:
    """pFedMoAP."""  # noqa: D403
    model = setting.seeded(Mixture, setting, own_weight, num_experts - 1)
    first = fp.snapshot(model)
    mean = fp.averaging_server(fp.snapshot(model, only=["context"]))
    unknown = torch.zeros(num_experts - 1, *first["context.context"].shape[1:])

    def loaded(answer, gate):
        contexts, weight = answer["experts"]
        model.known, model.others = weight > 0, torch.zeros_like(model.others)
        if model.known.any():
            with torch.no_grad():
                near = model.encode_names(contexts[model.known])
            model.others[model.known] = F.normalize(near, dim=-1)
        fp.load_values(model, {**first, **gate, "context.context": answer["context.context"]})
        return model

    def train(data, answer, state):
        optimizer = data.optimizer(loaded(answer, state.get("gate", {})), learning_rate)
        for tokens, labels in data.batches():
            take_step(optimizer, F.cross_entropy(model(tokens), labels))
        last = {**answer, **fp.snapshot(model, only=["context"])}
        payload = fp.collect(model, weight=data.num_examples, only=["context"])
        return payload, {"gate": fp.snapshot(model, only=["gate"]), "last": last}

    def answer(client, state):
        return state["values"] | {"experts": _experts(state["latest"], str(client), unknown)}

    def step(server_round, payloads, state):
        new = {str(c): sent["context.context"].value for c, sent in payloads.items()}
        return mean.step(server_round, payloads, state) | {"latest": state["latest"] | new}

    def predict(data, answer, state):
        return loaded(state.get("last", answer), state.get("gate", {}))

    server = fp.Server({**mean.state, "latest": {}}, answer, step)
    return averaged(model, train, shared=["context"], server=server, predict=predict)
