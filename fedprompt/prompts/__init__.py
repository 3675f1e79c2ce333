"""What is learned: tokens for transformers and pixels for convolutional networks, and how a frozen trunk runs with them."""

from fedprompt.prompts.encode import batch_streams, encode_prompted
from fedprompt.prompts.padding import PadPrompts
from fedprompt.prompts.visual import DeepPrompts, LayeredPrompts, ShallowPrompts

__all__ = ["DeepPrompts", "LayeredPrompts", "PadPrompts", "ShallowPrompts", "batch_streams", "encode_prompted"]
