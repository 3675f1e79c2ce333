"""Several shared contexts describe each class, and transport compares them with the patches.

The plan of an image's patches to the contexts of a class has uniform masses on both sides, and no
gradient. Chen et al., "PLOT: Prompt Learning with Optimal Transport for Vision-Language Models",
ICLR 2023, is the ancestor of FedOTP, which keeps one of its contexts on the client. Here clients
share all contexts by FedAvg (McMahan et al., AISTATS 2017).

Up: N contexts (N T D numbers). Down: N contexts.

Deviations: the paper trains on one machine. Transport is solved by Newton's method to its solution,
where the authors' code stops Sinkhorn's algorithm early; that is `solver`. Their code adds the
logits of the pooled token for ImageNet alone; that is `pooled`. A context has the length of the
setting, in place of 16 tokens.

Compared: CHENGY12/PLOT 728539f, `plot-coop/trainers/plot.py`, float64, largest difference 3.9e-15
with the solver of that code, 1.2e-9 (tolerance of the solver) with ours (2026-11).
"""

from functools import partial

from jaxtyping import Float
from torch import Tensor

import fedprompt as fp
from fedprompt.interfaces import PatchMatcher, TransportScore, TransportSolver
from fedprompt.methods.models import ClipSetting, PromptedClassifier
from fedprompt.methods.registry import LEARNING_RATE, register
from fedprompt.methods.steps import averaged, fedavg_client


class _Contexts(PromptedClassifier):
    """Classifier of image tokens with several contexts, by the patches after the pooled token."""

    def __init__(self, setting: ClipSetting, count: int, match: PatchMatcher, pooled: bool) -> None:
        super().__init__(setting, setting.drawn_contexts("contexts", count))
        self.match = match
        self.pooled = pooled

    def forward(self, tokens: Float[Tensor, "batch tokens dim"]) -> Float[Tensor, "batch classes"]:
        """Classify images by their patches, and by the pooled token if it is read."""
        text = self.text()
        logits = self.match(tokens[:, 1:], text, scale=self.scale)
        if self.pooled:
            logits = logits + fp.cosine_logits(tokens[:, 0], text.mean(0), scale=self.scale)
        return logits


@register("PLOT (averaged)", families=("CLIP",), search=LEARNING_RATE | {"num_contexts": [2, 4, 8]})
def fedplot(
    setting: ClipSetting,
    *,
    learning_rate: float = 5e-3,
    num_contexts: int = 4,
    epsilon: float = 0.1,
    solver: TransportSolver | None = None,
    gradient: TransportScore | None = None,
    pooled: bool = False,
) -> fp.Method:
    """PLOT (averaged).

    `solver` has its options bound, and takes the place of Newton's method with `epsilon`.
    """
    solver = solver or partial(fp.transport.newton, epsilon=epsilon)
    gradient = gradient or fp.transport.plan_fixed
    match = partial(fp.transport_logits, solver=solver, mass=1.0, gradient=gradient)
    model = _Contexts(setting, num_contexts, match, pooled)
    return averaged(model, fedavg_client(model, learning_rate))
