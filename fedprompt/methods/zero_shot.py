"""The frozen CLIP classifies with a handwritten sentence, and nothing is trained.

The sentence contains the class name, such as "a photo of a three.". It is the reference that shows
how much training adds. Radford et al., "Learning Transferable Visual Models From Natural Language
Supervision", ICML 2021.

Up: nothing. Down: nothing.

Deviations: there is one sentence for each class, without an ensemble. No steps are taken, so
`schedule`, `make_optimizer` and `autocast` of the setting are not read.

Compared: its definition, float64, largest difference 6.9e-15 (2026-11).
"""

from jaxtyping import Float
from torch import Tensor

import fedprompt as fp
from fedprompt.methods.models import ClipSetting, Complete
from fedprompt.methods.registry import register


class _Handwritten(Complete):
    """Classifier of image tokens by a sentence of each class."""

    def __init__(self, setting: ClipSetting) -> None:
        super().__init__()
        self.text, self.scale = setting.handwritten_text(), setting.scale

    def forward(self, tokens: Float[Tensor, "batch tokens dim"]) -> Float[Tensor, "batch classes"]:
        """Classify images by their pooled token, which is first."""
        return fp.cosine_logits(tokens[:, 0], self.text, scale=self.scale)


@register("Zero-shot CLIP", families=("CLIP",))
def zero_shot(setting: ClipSetting) -> fp.Method:
    """Zero-shot CLIP."""
    model = _Handwritten(setting)

    def train(data, answer, state):
        return {}, state

    def predict(data, answer, state):
        return model

    return fp.Method(train, fp.averaging_server({}), predict, form=lambda client: {})
