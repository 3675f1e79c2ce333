"""Refuse to freeze a model in which some parameters were singled out for training."""

from collections.abc import Iterable

import torch.nn as nn

from fedprompt._checks import wrong_value

_ADAPTERS = ("lora_", "adapter")
_POSITIONS = (
    "pos_embed",
    "positional_embedding",
)  # sine and cosine tables of positions are parameters without gradients


def check_unadapted(argument: str, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Require that all parameters train or none does; by name, that no adapter trains."""
    listed = list(parameters)
    trainable = [name for name, parameter in listed if parameter.requires_grad]
    adapters = [name for name in trainable if any(word in name.lower() for word in _ADAPTERS)]
    fixed = any(
        not parameter.requires_grad and not name.endswith(_POSITIONS) for name, parameter in listed
    )
    if adapters or (trainable and fixed):
        named = adapters or trainable
        rest = f" and {len(named) - 3} more" if len(named) > 3 else ""
        rule = "have no parameters that are trained, as all are frozen here; merge adapters or call freeze(model) first"
        raise wrong_value(argument, rule, f"a model that trains {', '.join(named[:3])}{rest}")
