"""The frozen CLIP classifies with a handwritten sentence, and nothing is trained.

The sentence contains the class name, such as "a photo of a three.". It is the reference that shows
how much training adds. Radford et al., "Learning Transferable Visual Models From Natural Language
Supervision", ICML 2021.

Up: nothing. Down: nothing.

Deviations: there is one sentence for each class, without an ensemble. No steps are taken, so
`schedule`, `make_optimizer` and `autocast` of the setting are not read.

Compared: its definition, float64, largest difference 6.9e-15 (2026-11).
"""

from functools import partial

import fedprompt as fp
from fedprompt.methods.models import ClipSetting
from fedprompt.methods.registry import register


@register("Zero-shot CLIP", families=("CLIP",))
def zero_shot(setting: ClipSetting) -> fp.Method:
    """Zero-shot CLIP."""
    classify = partial(fp.cosine_logits, text=setting.handwritten_text(), scale=setting.scale)

    def train(data, answer, state):
        return {}, state

    def predict(data, answer, state):
        return lambda tokens: classify(tokens[:, 0])

    return fp.Method(train, fp.averaging_server({}), predict, form=lambda client: {})
