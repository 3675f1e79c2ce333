"""Refusal of models in which only some parameters are trained."""

from collections.abc import Collection, Iterable

import torch.nn as nn

from fedprompt._checks import wrong_value

_ADAPTERS = ("lora_", "adapter")
# Sine and cosine tables of positions are parameters without gradients.
_POSITIONS = ("pos_embed", "positional_embedding")


def check_unadapted(
    argument: str,
    parameters: Iterable[tuple[str, nn.Parameter]],
    kept: Collection[nn.Parameter] = (),
) -> None:
    """Require that either all parameters are trained or none, and that no adapter is trained.

    Adapters are recognized by the names of their parameters. Parameters in `kept` are not frozen
    later and may be either.
    """
    listed = [(name, parameter) for name, parameter in parameters if parameter not in kept]
    trainable = [name for name, parameter in listed if parameter.requires_grad]
    adapters = [name for name in trainable if any(word in name.lower() for word in _ADAPTERS)]
    fixed = any(
        not parameter.requires_grad and not name.endswith(_POSITIONS) for name, parameter in listed
    )
    if adapters or (trainable and fixed):
        named = adapters or trainable
        rest = f" and {len(named) - 3} more" if len(named) > 3 else ""
        rule = (
            "have no adapters and train all parameters or none, because all are frozen here; "
            "merge adapters, pass them as `trainable`, or call freeze(model) first"
        )
        got = f"a model that trains {', '.join(named[:3])}{rest}"
        raise wrong_value(argument, rule, got)
