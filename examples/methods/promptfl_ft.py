"""PromptFL, and each client predicts with the context that it fine-tuned on its own data.

Fine-tuning starts from the broadcast. Local training of PromptFL does so, too, so a client keeps
the context that it sends. Cheng et al., "Fine-tuning is Fine in Federated Learning", 2021. The
combination is a baseline of pFedPrompt (Guo et al., WWW 2023) and FedOTP (Li et al., CVPR 2024).

Up: a context (T D numbers). Down: a context.

Deviations: the papers fine-tune once, after the last round. Here a client fine-tunes in each of its
rounds, so that all methods have equal numbers of batches. Its own context follows the last
broadcast that it received.

Compared: equations of the papers, with the deviations above, float64, largest difference 6.9e-15
(2026-11).
"""

from collections.abc import Iterator

import torch.nn.functional as F

import fedprompt as fp
from methods.federation import ClipFederation, Predictions, PromptedText

FAMILIES = ("CLIP",)
TRAITS = ("personalized",)
SEARCH = {"learning_rate": (1e-3, 1e-1)}


def promptfl_ft(
    federation: ClipFederation, *, learning_rate: float = 5e-3
) -> Iterator[Predictions]:
    """PromptFL + fine-tuning."""
    model, server = federation.new_model(), fp.overwrite()
    values = fp.snapshot(model)
    state, tuned = server.init(values), {}

    def of(client: int) -> PromptedText:
        fp.load_values(model, tuned.get(client, values))
        return model

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
            tuned[client] = fp.snapshot(model)
            payload = fp.collect(model, weight=federation.num_examples(client))
            payloads.append(federation.send_up(client, payload))
        values, state = server.step(values, fp.weighted_mean(payloads), state)
        yield Predictions(client=of, newcomer=of)
