"""Checks of the backbones that you load or write."""

from fedprompt.backbones.activation import activation
from fedprompt.backbones.conformance import text_encoder, trunk

__all__ = ["activation", "text_encoder", "trunk"]
