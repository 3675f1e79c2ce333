"""Learnable prompts for frozen backbones, and the forward pass that inserts them."""

from fedprompt.prompts.context import ContextPrompts, prompted_text
from fedprompt.prompts.encode import encode_from, encode_front, encode_prompted
from fedprompt.prompts.low_rank import LowRankContext
from fedprompt.prompts.padding import PadPrompts
from fedprompt.prompts.start import initialize_at, mean_patch_tokens
from fedprompt.prompts.visual import DeepPrompts, GroupPrompts, LayeredPrompts, ShallowPrompts

__all__ = [
    "ContextPrompts",
    "DeepPrompts",
    "GroupPrompts",
    "LayeredPrompts",
    "LowRankContext",
    "PadPrompts",
    "ShallowPrompts",
    "encode_from",
    "encode_front",
    "encode_prompted",
    "initialize_at",
    "mean_patch_tokens",
    "prompted_text",
]
