"""Private contexts of any length are kept away from the shared one, of the same length for all.

Both classify the batch. The private context is also projected onto minor directions of the shared
context, which a singular value decomposition gives. A pull loss moves its text features towards the
projection. A push loss separates the text features of both contexts up to a margin. Clients predict
with their private context. Fang et al., "FedPHA: Federated Prompt Learning for Heterogeneous Client
Adaptation", ICML 2025.

Up: the shared context (T D). Down: the shared context (T D).

Deviations: lengths are drawn between half and twice T, or up to the room that the longest class
name leaves, where that is less. The projection keeps the last of the T right singular vectors and
no direction outside their span, as in the authors' code. No gradient passes through the singular
value decomposition. A newcomer predicts with the shared context, because it has no trained private
one. Every text is read at its end token. The authors' code reads shorter contexts at a position
after their end token.

Compared: CYFang6/FedPHA 1ab33df, with the deviations above, float64, largest difference 2.1e-14
(2026-11).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp
from fedprompt.methods.models import ClipSetting, Personal, PromptedClassifier
from fedprompt.methods.registry import LEARNING_RATE, PERSONALIZED_CLIP, adapted, register
from fedprompt.methods.steps import averaged, take_step


def _on_minor_directions(private: Tensor, shared: Tensor, minor_share: float) -> Tensor:
    """Project a context onto the right singular vectors of another with the least values."""
    directions = torch.linalg.svd(shared.detach()[0], full_matrices=False).Vh
    minor = directions[int(len(directions) * (1 - minor_share)) :]
    return private @ minor.T @ minor


def _alignment(shared: Tensor, private: Tensor, projected: Tensor, margin: float) -> Tensor:
    """Pull private text features to projected ones, and push them from shared ones."""
    pull = F.mse_loss(private, projected)
    return pull + (margin - (private - shared).norm(dim=-1)).relu().mean()


class _PrivateContext(fp.ContextPrompts):
    """Context that takes the length of the context in a state that it loads."""

    def _load_from_state_dict(self, state, prefix, *others):
        if (context := state.get(f"{prefix}context")) is not None:
            self.context = torch.nn.Parameter(torch.empty_like(context))
        super()._load_from_state_dict(state, prefix, *others)


def _private_context(setting: ClipSetting, client: int) -> fp.ContextPrompts:
    """Make a context whose length is drawn for the client, and fits in front of each name."""
    draw = setting.generator(0, client, purpose="private")
    names, shortest = setting.names, setting.length // 2
    room = names.context_length - len(names.start) - max(names.length)
    longest = max(shortest, min(2 * setting.length, room))
    length = int(torch.randint(shortest, longest + 1, (), generator=draw))
    return _PrivateContext(setting.tower.dim, length=length, generator=draw)


@register(
    "FedPHA",
    **adapted(PERSONALIZED_CLIP),
    search=LEARNING_RATE | {"margin": (0.1, 2.0), "minor_share": [0.5, 0.8, 0.95]},
)
def fedpha(
    setting: ClipSetting,
    *,
    learning_rate: float = 5e-3,
    margin: float = 1.0,
    minor_share: float = 0.8,
) -> fp.Method:
    """FedPHA."""
    model = setting.new_model()

    def private_of(client, state):
        private = PromptedClassifier(setting, _private_context(setting, client))
        fp.load_values(private, state)
        return private

    def train(data, answer, state):
        fp.load_values(model, answer)
        private = private_of(data.id, state)
        optimizer = data.optimizer([*model.parameters(), *private.parameters()], learning_rate)
        for tokens, labels in data.batches():
            contexts = [model.context(), private.context()]
            contexts.append(_on_minor_directions(contexts[1], contexts[0], minor_share))
            texts = [F.normalize(model.encode_names(one)[0], dim=-1) for one in contexts]
            loss = _alignment(*texts, margin)
            for text in texts[:2]:
                logits = fp.cosine_logits(tokens[:, 0], text, scale=model.scale)
                loss = loss + F.cross_entropy(logits, labels)
            take_step(optimizer, loss)
        return fp.collect(model, weight=data.num_examples), fp.snapshot(private)

    def predict(data, answer, state):
        fp.load_values(model, answer)
        return Personal(private_of(data.id, state), model, trained=bool(state))

    return averaged(model, train, predict=predict)
