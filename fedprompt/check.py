"""Checks of the backbones that you load or write."""

from fedprompt.backbones.checks.activation import activation
from fedprompt.backbones.checks.text_encoder import text_encoder
from fedprompt.backbones.checks.trunk import trunk

__all__ = ["activation", "text_encoder", "trunk"]
