"""Guide vectors that clients follow, and the gradient by which they learn them (FedL2G)."""

from fedprompt.guidance.derivatives import double_backward, forward_mode
from fedprompt.guidance.gradient import guide_gradient
from fedprompt.guidance.loss import guided_loss
from fedprompt.guidance.trial_step import optimizer_update

__all__ = ["double_backward", "forward_mode", "guide_gradient", "guided_loss", "optimizer_update"]
