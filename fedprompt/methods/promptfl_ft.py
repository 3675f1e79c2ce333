"""PromptFL, and each client predicts with the context that it fine-tuned on its data.

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

import torch.nn.functional as F

import fedprompt as fp
from fedprompt.methods.models import ClipSetting
from fedprompt.methods.registry import LEARNING_RATE, PERSONALIZED_CLIP, register
from fedprompt.methods.steps import averaged, take_step


@register("PromptFL + fine-tuning", **PERSONALIZED_CLIP, search=LEARNING_RATE)
def promptfl_ft(setting: ClipSetting, *, learning_rate: float = 5e-3) -> fp.Method:
    """PromptFL + fine-tuning."""
    model = setting.new_model()

    def train(data, answer, state):
        fp.load_values(model, answer)
        optimizer = data.optimizer(model, learning_rate)
        for tokens, labels in data.batches():
            take_step(optimizer, F.cross_entropy(model(tokens), labels))
        return fp.collect(model, weight=data.num_examples), fp.snapshot(model)

    return averaged(model, train)
