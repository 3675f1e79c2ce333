"""Different aggregators and server updates for different names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TypeVar

from torch import Tensor

import fedprompt._nouns as nouns
import fedprompt._refusals as check
from fedprompt.aggregation._rules import TensorUpdate, init_by_name, step_by_name
from fedprompt.aggregation.means import weighted_mean
from fedprompt.aggregation.servers import overwrite
from fedprompt.interfaces import Aggregator, Payload, ServerUpdate, State, Weighted

_Rule = TypeVar("_Rule")


def aggregate_by_name(
    rules: Mapping[str, Aggregator], *, default: Aggregator | None = None
) -> Callable[[Iterable[Payload]], dict[str, Weighted]]:
    """Combine aggregators, with one for each name of the payloads.

    If all names have the same aggregator, pass the payloads to it directly. :func:`weighted_mean`
    then also streams them.

    Args:
        rules: Aggregator for each name or dotted prefix of names. A full name takes precedence over
            prefixes, and a longer prefix over a shorter one.
        default: Aggregator of all other names. If None, :func:`weighted_mean`.

    Returns:
        A function from payloads to one payload. It keeps all payloads in memory. If a client does
        not send a name, it has weight 0 for that name.

    Raises:
        ValueError: When the returned function is called, if there is no payload, a rule matches no
            name, or an aggregator raises. The message then begins with the name.

    Example:
        >>> from fedprompt.robust import weighted_median
        >>> one, two = torch.tensor(1.0), torch.tensor(2.0)
        >>> payloads = [{"head": Weighted(one, one), "keys": Weighted(one, one)},
        ...             {"head": Weighted(two, two), "keys": Weighted(4 * two, two)}]
        >>> aggregate = aggregate_by_name({"keys": weighted_median})
        >>> {name: round(entry.value.item(), 2) for name, entry in aggregate(payloads).items()}
        {'head': 1.67, 'keys': 8.0}
    """
    default = weighted_mean if default is None else default
    chosen = _rules_of(rules, default, "a function of entries", check.function)

    def aggregate(payloads: Iterable[Payload], /) -> dict[str, Weighted]:
        check.iterable("payloads", payloads, "payloads")
        sent = [
            nouns.form(f"payloads[{position}]", payload, at_least=0)
            for position, payload in enumerate(payloads)
        ]
        check.some("payloads", sent, "hold at least one payload")
        names = list(dict.fromkeys(name for payload in sent for name in payload))
        means = {}
        for name, aggregator in _match(names, chosen, default).items():
            having = [payload for payload in sent if name in payload]
            among = f" (counting the {len(having)} payloads of {len(sent)} that have it)"
            with check.located(f"{name!r}{among if len(having) < len(sent) else ''}"):
                means[name] = aggregator(payload[name] for payload in having)
        return means

    return aggregate


def update_by_name(
    rules: Mapping[str, ServerUpdate[Tensor, Weighted]],
    *,
    default: ServerUpdate[Tensor, Weighted] = overwrite(),  # noqa: B008 (immutable)
) -> ServerUpdate[Mapping[str, Tensor], Payload]:
    """Combine server updates, with one for each name of the values.

    If all names have the same update, pass the dict to it directly, as in :func:`overwrite`.

    Args:
        rules: Update for each name or dotted prefix of names, matched as in
            :func:`~fedprompt.robust.aggregate_by_name`.
        default: Update of all other names.

    Returns:
        A :class:`ServerUpdate` for values and payloads. If the payload lacks a name, the value and
        the state of that name are unchanged.

    Raises:
        ValueError: In ``init``, if a rule matches no name. In ``step``, if the payload has an
            unknown name, or an update raises. The message then begins with the name.

    Example:
        >>> from fedprompt import ema
        >>> server = update_by_name({"keys": ema(decay=0.5)})
        >>> values = {"keys": torch.zeros(1), "head": torch.zeros(1)}
        >>> mean = {name: Weighted(torch.ones(1), torch.tensor(1.0)) for name in values}
        >>> server.step(values, mean, server.init(values))[0]
        {'keys': tensor([0.5000]), 'head': tensor([1.])}
    """
    update = partial(check.instance, kinds=ServerUpdate)
    return _ByName(_rules_of(rules, default, "a server update", update), default)


@dataclass(frozen=True)
class _ByName:
    rules: Mapping[str, TensorUpdate]
    default: TensorUpdate

    def init(self, previous: Mapping[str, Tensor], /) -> State:
        return init_by_name(self._matched(previous), previous)

    def step(
        self, previous: Mapping[str, Tensor], mean: Payload, state: State, /
    ) -> tuple[dict[str, Tensor], State]:
        return step_by_name(self._matched(previous), previous, mean, state)

    def _matched(self, previous: Mapping[str, Tensor]) -> dict[str, TensorUpdate]:
        check.names("previous", previous, "map names to tensors")
        return _match(list(previous), self.rules, self.default)


def _rules_of(
    rules: Mapping[str, _Rule], default: _Rule, noun: str, required: Callable[..., None]
) -> dict[str, _Rule]:
    """Copy rules after checking that each of them, and the default, is of the required kind."""
    check.names("rules", rules, f"be a mapping from names, each to {noun}")
    labeled = {f"rules[{name!r}]": rule for name, rule in rules.items()}
    for argument, rule in {**labeled, "default": default}.items():
        required(argument, rule, rule=f"be {noun}")
    return dict(rules)


def _match(names: list[str], rules: Mapping[str, _Rule], default: _Rule) -> dict[str, _Rule]:
    """Map names to rules: of the full name, else of the longest dotted prefix, else the default."""
    prefixes = {name: list(accumulate(name.split("."), "{}.{}".format)) for name in names}
    if unused := rules.keys() - {prefix for parts in prefixes.values() for prefix in parts}:
        rule = f"each match a name or a dotted prefix of {names}"
        raise check.wrong("rules", rule, [key for key in rules if key in unused])
    matched = {name: [key for key in keys if key in rules] for name, keys in prefixes.items()}
    return {name: rules[keys[-1]] if keys else default for name, keys in matched.items()}
