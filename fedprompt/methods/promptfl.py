"""Clients learn one context before the class names of a frozen CLIP, and the server averages it.

Guo et al., "PromptFL: Let Federated Participants Cooperatively Learn Prompts Instead of Models",
IEEE Transactions on Mobile Computing 2023.

Up: a context. Down: a context.

Deviations: none. Beyond the paper, clients may have shorter contexts (`sizes`).

Compared: equations of the paper, with the text encoder of KaiyangZhou/CoOp ff61507, float64,
largest difference 3e-15 (2026-11).
"""

import fedprompt as fp
from fedprompt.methods.models import ClipSetting, PromptedClassifier
from fedprompt.methods.registry import LEARNING_RATE, register
from fedprompt.methods.sizes import Sizes, of_sizes
from fedprompt.methods.steps import averaged, fedavg_client


@register("PromptFL", families=("CLIP",), search=LEARNING_RATE)
def promptfl(
    setting: ClipSetting, *, learning_rate: float = 5e-3, sizes: Sizes | None = None
) -> fp.Method:
    """PromptFL. A size is the length of a client's context."""

    def make(length: int) -> fp.Method:
        model = PromptedClassifier(setting, setting.new_context(length))
        return averaged(model, fedavg_client(model, learning_rate))

    return of_sizes(setting, make, sizes, length=setting.length)
