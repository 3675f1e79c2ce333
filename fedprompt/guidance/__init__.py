"""One small vector for each class that all clients follow, and the gradient by which they learn it together (FedL2G)."""

from fedprompt.guidance.gradient import guide_gradient
from fedprompt.guidance.guides import GuideVectors, guided_loss
from fedprompt.guidance.methods import central_difference, double_backward, forward_mode

__all__ = [
    "GuideVectors",
    "central_difference",
    "double_backward",
    "forward_mode",
    "guide_gradient",
    "guided_loss",
]
