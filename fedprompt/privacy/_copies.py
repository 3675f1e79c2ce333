"""Stand-ins for modules, with a separate copy of each parameter for every sample."""

import copy
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.nn as nn
from torch import Tensor
from torch.func import functional_call

import fedprompt._refusals as check
from fedprompt._threads import replacing
from fedprompt.interfaces import PromptStream

Copies = Mapping[nn.Parameter, nn.Parameter]


class _Copies(nn.Module):
    """A module that owns parameters, called once for each sample with that sample's copies."""

    def __init__(self, module: nn.Module, copies: Copies) -> None:
        super().__init__()
        self._single = (module,)  # a tuple hides the module from `named_parameters`
        self._slots = _parameter_slots(module, copies)
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter in copies:
                self.register_parameter(name, copies[parameter])
        for name, child in module.named_children():  # only for the names of their parameters
            self.add_module(name, _Copies(child, copies))

    def forward(self, *inputs: Tensor) -> Tensor | PromptStream:
        check.gradients_are_recorded("per_sample")
        replaces = []  # kept aside, because `vmap` returns only tensors
        batch = len(next(iter(self._slots.values())))
        for position, tensor in enumerate(inputs):
            place = f"inputs[{position}]"
            if not isinstance(tensor, Tensor) or tensor.shape[:1] != (batch,):
                raise check.wrong(place, f"have the batch of {batch} samples", check.kind(tensor))
            check.dense(place, tensor)

        def one(slots: dict[str, Tensor], *sample: Tensor) -> Any:
            sample = tuple(tensor[None] for tensor in sample)
            result = functional_call(self._single[0], slots, sample, tie_weights=False)
            if isinstance(result, PromptStream):
                replaces.append(result.replace)
                return dict(result.layers)
            rule = "return a tensor or a PromptStream from every module that owns parameters"
            check.instance("model", result, Tensor, rule)
            rule = "return (batch, ...) from every module that is called with a batch"
            check.require(not inputs or result.shape[:1] == (1,), "model", rule, result)
            return result[0] if inputs else result

        with replacing(self._single[0]):
            results: Any = torch.vmap(one, randomness="different")(self._slots, *inputs)
        if replaces:
            layers = {layer: tokens.flatten(0, -3) for layer, tokens in results.items()}
            return PromptStream(layers, replaces[0])
        return cast(Tensor, results)


def _parameter_slots(module: nn.Module, copies: Copies) -> dict[str, Tensor]:
    """Map each attribute in the module's tree that is a copied parameter to its copy.

    Each attribute is listed once, even if its module has two names. ``functional_call`` restores an
    attribute as often as it is listed, and the second time it would restore a copy.
    """
    return {
        f"{prefix}.{name}" if prefix else name: copies[parameter]
        for prefix, owner in module.named_modules()
        for name, parameter in owner._parameters.items()
        if parameter is not None and parameter in copies
    }


def twin_of(module: nn.Module, copies: Copies, twins: dict[nn.Module, nn.Module]) -> nn.Module:
    """Return the module with copies of its parameters. A module without any is copied shallowly."""
    if module in twins:
        return twins[module]
    if any(parameter in copies for parameter in module._parameters.values()):
        twins[module] = _Copies(module, copies)
        return twins[module]
    twin = twins[module] = copy.copy(module)
    children = module._modules.items()
    twin._modules = {name: child and twin_of(child, copies, twins) for name, child in children}
    return twin
