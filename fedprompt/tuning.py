"""Parts of a model to train in place of prompts or with them: LoRA, adapters, norms and biases.

Each function returns a copy of your model and the parameters to train, for :func:`vit_trunk`. All
other parameters of the copy are frozen.
"""

from fedprompt.backbones.trained_parts import adapters, biases, lora, norms, save_lora

__all__ = ["adapters", "biases", "lora", "norms", "save_lora"]
