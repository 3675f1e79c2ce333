"""The four papers as printed: a call makes the method with the paper's budget and arguments.

Each call takes your networks and classes. Any field of the setting and any argument of the method
takes the place of the printed value::

    method = papers.fedhpl(trunks, num_classes=100, rounds=15, temperature=2.0)
    for now in fp.run_rounds(method, federation):
        ...

The setting is ``method.setting``, for the other rows of a table. :data:`PRINTED` has the values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
import torch.nn as nn

import fedprompt as fp
import fedprompt._refusals as check
from fedprompt.interfaces import Trunk
from fedprompt.methods.fedhpl import fedhpl as _fedhpl
from fedprompt.methods.fedl2g import fedl2g_f, fedl2g_l
from fedprompt.methods.fedotp import fedotp as _fedotp
from fedprompt.methods.models import ClipSetting, VitSetting
from fedprompt.methods.setting import Setting
from fedprompt.methods.sgpt import sgpt as _sgpt
from fedprompt.methods.whole_networks import NetworkSetting

__all__ = ["PRINTED", "Printed", "fedhpl", "fedl2g", "fedotp", "sgpt"]

_SGD = torch.optim.SGD
_ALGORITHM_1 = partial(fp.transport.dykstra, epsilon=0.1, tolerance=1e-3, max_iterations=99)


@dataclass(frozen=True)
class Printed:
    """Values of a paper.

    Attributes:
        fields: Fields of the setting.
        arguments: Arguments of the method.

    Example:
        >>> PRINTED["fedotp"].arguments["mass"]
        0.8
    """

    fields: Mapping[str, Any]
    arguments: Mapping[str, Any]

    def method(
        self,
        make: Callable[..., fp.Method],
        kind: type[Setting],
        given: Mapping[str, Any],
        changes: Mapping[str, Any],
    ) -> fp.Method:
        """Make a method of the printed values, of the models that are given, and of changes."""
        known = {each.name for each in fields(kind) if each.init}
        options = {*inspect.signature(make).parameters} - {"setting"}
        unknown = sorted(changes.keys() - known - options)
        names = ", ".join(sorted(known | options))
        check.nothing(unknown, "changes", f"be fields of the setting or arguments: {names}")
        printed = {name: value for name, value in self.fields.items() if name in known}
        if "steps" in changes:  # in place of epochs
            printed = {n: value for n, value in printed.items() if n not in ("epochs", "drop_last")}
        own = {name: changes[name] for name in changes.keys() & known}
        arguments = {name: changes[name] for name in changes.keys() - known}
        return make(kind(**{**printed, **given, **own}), **{**self.arguments, **arguments})


PRINTED = {
    "fedhpl": Printed(
        {"clients": range(5), "rounds": 10, "epochs": 1, "batch_size": 16, "num_prompts": 3}
        | {"make_optimizer": partial(_SGD, momentum=0.9, weight_decay=1e-4)},
        {"learning_rate": 0.01, "distillation_weight": 1.0, "temperature": 4.5, "smoothing": 1.0}
        | {"keep_all": False, "deep": True},
    ),
    "sgpt": Printed(
        {
            "clients": range(100),
            "cohort_size": 5,
            "rounds": 60,
            "epochs": 5,
            "batch_size": 40,
            "num_prompts": 1,
        }
        | {"make_optimizer": partial(_SGD, momentum=0.9, weight_decay=1e-5)},
        {
            "learning_rate": 0.01,
            "num_groups": 20,
            "shared_layers": [0, 1, 2],
            "group_layers": [3, 4, 5],
        }
        | {"replace": True, "averaged": True, "query_depth": None, "decay": 0.5, "key_decay": 0.5},
    ),
    "fedl2g": Printed(
        {"clients": range(20), "rounds": 1000, "epochs": 1, "drop_last": True, "batch_size": 10}
        | {"num_features": 512, "make_optimizer": _SGD},
        {"learning_rate": 0.01, "guide_weight": 1.0, "server_rate": 0.1, "warm_up": 50}
        | {"train_in_warm_up": False},
    ),
    "fedotp": Printed(
        {"clients": range(10), "rounds": 10, "epochs": 5, "batch_size": 32, "length": 16}
        | {"make_optimizer": partial(_SGD, momentum=0.9, weight_decay=5e-4)},
        {"learning_rate": 1e-3, "mass": 0.8, "epsilon": 0.1, "solver": _ALGORITHM_1},
    ),
}
"""Printed values by the name of the call; of the first data set, where they differ by data set."""

_DOMAINS = Printed(
    {"rounds": 40, "batch_size": 50, "cohort_size": None}, {"query_depth": 5}
)  # SGPT, Table 2; rounds and batches are those of the authors' code


def fedhpl(
    trunks: Sequence[Trunk] | Sequence[nn.Module], *, num_classes: int, **changes: Any
) -> fp.Method:
    """Make FedHPL as printed for CIFAR-10: five clients, ten rounds of an epoch.

    Args:
        trunks: Frozen trunks of clients, given to them in turn. With `border`, frozen networks of
            any kind, as FedHPL (CNN): ``border=partial(fedprompt.PadPrompts, 224, padding=3)``.
        num_classes: Number of classes.
        changes: Fields of :class:`VitSetting`, or with `border` of
            :class:`~fedprompt.methods.NetworkSetting`, and arguments of
            :func:`fedprompt.methods.fedhpl`, such as ``share=["head"]`` for +H.

    Raises:
        ValueError: If a change is neither a field nor an argument.

    Example:
        >>> from fedprompt import methods, samples, vit_trunk
        >>> trunks = [vit_trunk(samples.vit(size)) for size in "SB"]
        >>> method = methods.papers.fedhpl(trunks, num_classes=10, rounds=15)
        >>> method.setting.rounds, method.setting.epochs, method.setting.num_prompts
        (15, 1, 3)
    """
    kind = NetworkSetting if "border" in changes else VitSetting
    parts = {"networks" if "border" in changes else "trunks": trunks}
    return PRINTED["fedhpl"].method(_fedhpl, kind, {**parts, "num_classes": num_classes}, changes)


def sgpt(
    trunk: Trunk, *, num_classes: int, domains: int | None = None, **changes: Any
) -> fp.Method:
    """Make SGPT as printed for CIFAR-100: 60 rounds of five of 100 clients.

    Each of the two blocks has five epochs, as in the authors' code.

    Args:
        trunk: Frozen trunk of all clients.
        num_classes: Number of classes.
        domains: Number of domains, one for each client, as for Office-Caltech10 and DomainNet: a
            group for each, queries of the fifth block, and 40 rounds of all clients. If None, the
            values for CIFAR-100.
        changes: Fields of :class:`VitSetting`, and arguments of :func:`fedprompt.methods.sgpt`.

    Raises:
        ValueError: If a change is neither a field nor an argument.

    Example:
        >>> from fedprompt import methods, samples, vit_trunk
        >>> trunk = vit_trunk(samples.vit("B"))
        >>> method = methods.papers.sgpt(
        ...     trunk, num_classes=10, shared_layers=[0, 1], group_layers=[2, 3], num_groups=4
        ... )
        >>> method.setting.epochs, len(method.setting.clients)
        (5, 100)
    """
    given: dict[str, Any] = {"trunks": [trunk], "num_classes": num_classes}
    if domains is not None:
        check.count("domains", domains)
        given |= {**_DOMAINS.fields, "clients": range(domains)}
        changes = {**_DOMAINS.arguments, "num_groups": domains, **changes}
    return PRINTED["sgpt"].method(_sgpt, VitSetting, given, changes)


def fedl2g(
    networks: Sequence[Callable[[], nn.Module]],
    *,
    num_classes: int,
    by_features: bool = False,
    **changes: Any,
) -> fp.Method:
    """Make FedL2G as printed: 20 clients train whole networks for 1000 rounds of an epoch.

    Args:
        networks: Functions that make a network without a head, given to clients in turn.
        num_classes: Number of classes.
        by_features: Whether guides are those of features (FedL2G-f, with a server rate of 100), and
            not those of logits (FedL2G-l, .1).
        changes: Fields of :class:`~fedprompt.methods.NetworkSetting`, and arguments of
            ``methods.fedl2g_l``.

    Raises:
        ValueError: If a change is neither a field nor an argument.

    Example:
        >>> from fedprompt import methods
        >>> network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(8), nn.Flatten())
        >>> method = methods.papers.fedl2g([lambda: network], num_classes=10)
        >>> method.setting.num_features, method.setting.drop_last
        (512, True)
    """
    check.flag("by_features", by_features)
    given: dict[str, Any] = {"networks": networks, "num_classes": num_classes}
    if by_features:
        changes = {"server_rate": 100.0, **changes}
    make = fedl2g_f if by_features else fedl2g_l
    return PRINTED["fedl2g"].method(make, NetworkSetting, given, changes)


def fedotp(tower: fp.TextTower, *, class_names: Sequence[str], **changes: Any) -> fp.Method:
    """Make FedOTP as printed for few shots: ten clients, ten rounds of five epochs.

    Transport stops as in Algorithm 1: at a change of 0.001, or after 100 iterations, of which
    :func:`fedprompt.transport.dykstra` starts half an iteration ahead.

    Args:
        tower: Text tower of a frozen CLIP.
        class_names: Names of the classes.
        changes: Fields of :class:`ClipSetting`, and arguments of :func:`fedprompt.methods.fedotp`.

    Raises:
        ValueError: If a change is neither a field nor an argument.

    Example:
        >>> from fedprompt import TextTower, methods, samples
        >>> tower = TextTower(samples.clip(), samples.tokenize)
        >>> method = methods.papers.fedotp(tower, class_names=samples.CLASS_NAMES)
        >>> method.setting.length, method.setting.epochs
        (16, 5)
    """
    if "match" in changes:
        changes = {"solver": None, **changes}
    elif "epsilon" in changes:
        changes = {"solver": partial(_ALGORITHM_1, epsilon=changes["epsilon"]), **changes}
    given = {"tower": tower, "class_names": class_names}
    return PRINTED["fedotp"].method(_fedotp, ClipSetting, given, changes)
