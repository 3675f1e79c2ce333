"""PromptFL whose gradient never opposes the direction towards the zero-shot predictions.

The second direction is the gradient of the KL divergence from the predictions of a handwritten
sentence. Where the gradient of the labels opposes it, that part is removed. ProGrad is from Zhu et
al., "Prompt-aligned Gradient for Prompt Tuning", ICCV 2023.

Up: a context (T D numbers). Down: a context.

Deviations: the context is averaged over clients. The projected gradient enters the optimizer of
all methods, where the paper uses SGD. The opposing part is removed completely, as with the paper's
factor 1.

Compared: BeierZhu/Prompt-align 1b76203, with the deviations above, float64, largest difference
2.7e-15 (2026-11).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp
from fedprompt.methods.models import ClipSetting
from fedprompt.methods.registry import LEARNING_RATE, register
from fedprompt.methods.steps import averaged


@register("ProGrad (averaged)", families=("CLIP",), search=LEARNING_RATE)
def prograd(setting: ClipSetting, *, learning_rate: float = 1e-2) -> fp.Method:
    """ProGrad (averaged)."""
    model = setting.new_model()
    handwritten = setting.handwritten_text()
    context = model.context.context

    def train(data, answer, state):
        fp.load_values(model, answer)
        optimizer = data.optimizer(model, learning_rate)
        for tokens, labels in data.batches():
            logits = model(tokens)
            zero_shot = fp.cosine_logits(tokens[:, 0], handwritten, scale=setting.scale)
            divergence = fp.mutual_loss(logits, zero_shot, temperature=1.0)
            (guide,) = torch.autograd.grad(divergence, context, retain_graph=True)
            (gradient,) = torch.autograd.grad(F.cross_entropy(logits, labels), context)
            context.grad = _aligned(gradient, guide)
            optimizer.step()
        return fp.collect(model, weight=data.num_examples), state

    return averaged(model, train)


def _aligned(gradient: Tensor, guide: Tensor) -> Tensor:
    """Remove the part of a gradient that opposes the guide."""
    opposing = (gradient * guide).sum().clamp(max=0)
    smallest = torch.finfo(guide.dtype).tiny
    return gradient - opposing / guide.square().sum().clamp(min=smallest) * guide
