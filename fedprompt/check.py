"""Checks of the backbones that you load or write."""

from fedprompt.backbones.checks.activation import check_activation as activation
from fedprompt.backbones.checks.text_encoder import check_text_encoder as text_encoder
from fedprompt.backbones.checks.trunk import check_trunk as trunk

__all__ = ["activation", "text_encoder", "trunk"]
