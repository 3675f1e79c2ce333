"""Aggregators and server updates for whole payloads: the same pieces, name by name."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from fedprompt._checks import kind, wrong_type, wrong_value
from fedprompt.aggregation.means import weighted_mean
from fedprompt.aggregation.server import overwrite
from fedprompt.interfaces import Aggregator, Payload, ServerUpdate, Weighted

Rule = TypeVar("Rule")
State = Mapping[str, Any]


def per_name(
    rules: Mapping[str, Aggregator] | None = None, *, default: Aggregator = weighted_mean
) -> Callable[[Iterable[Payload]], dict[str, Weighted]]:
    """Lift aggregators over the names of payloads.

    Args:
        rules: From a name, or a dotted prefix of names, to the aggregator for it; a full name wins over prefixes, a longer prefix over
            a shorter one.
        default: The aggregator of all other names.

    Returns:
        A function from payloads to one payload. A client that does not send a name counts as weight 0 for it. The payloads are held until
        all have arrived; to stream, feed :func:`weighted_mean` name by name.

    Raises:
        ValueError: (the returned function) If there is no payload, a rule matches no name, or an aggregator refuses; the name is added.
        TypeError: If a rule is not a function. (the returned function) If a payload is not a mapping.

    Example:
        >>> payloads = [{"head.bias": Weighted(torch.tensor([2.0]), torch.tensor(1.0))},
        ...             {"head.bias": Weighted(torch.tensor([5.0]), torch.tensor(2.0))}]
        >>> per_name()(payloads)["head.bias"].value
        tensor([4.])
    """
    chosen = _checked_rules(rules, default, "a function of uploads", callable)

    def aggregate(payloads: Iterable[Payload], /) -> dict[str, Weighted]:
        held = list(payloads)
        if not held:
            raise wrong_value("payloads", "hold at least one payload", "none")
        for position, payload in enumerate(held):
            if not isinstance(payload, Mapping):
                raise wrong_type(f"payloads[{position}]", "map names to Weighted", kind(payload))
        names = list(dict.fromkeys(name for payload in held for name in payload))
        matched = _match(names, chosen, default)
        return {name: _aggregate(name, matched[name], held) for name in names}

    return aggregate


def per_name_update(
    rules: Mapping[str, ServerUpdate[Tensor, Weighted]] | None = None,
    *,
    default: ServerUpdate[Tensor, Weighted] | None = None,
) -> ServerUpdate[Mapping[str, Tensor], Payload]:
    """Lift server updates over the names of a model: from ``Mapping[str, Tensor]`` and a payload to the next broadcast.

    Args:
        rules: From a name, or a dotted prefix of names, to its update, matched as in :func:`per_name`.
        default: The update of all other names; None means :func:`overwrite`.

    Returns:
        A :class:`ServerUpdate`. Names that the payload lacks keep their value and their state.

    Raises:
        ValueError: (``init``) If a rule matches no name. (``step``) If the payload has a name that the values lack, or an update refuses;
            nothing is changed then, as nothing ever is in place.

    Example:
        >>> from fedprompt import ema
        >>> update = per_name_update({"keys": ema(decay=0.5)})
        >>> values = {"keys": torch.zeros(1), "head": torch.zeros(1)}
        >>> mean = {name: Weighted(torch.ones(1), torch.tensor(1.0)) for name in values}
        >>> update.step(values, mean, update.init(values))[0]
        {'keys': tensor([0.5000]), 'head': tensor([1.])}
    """
    default = overwrite() if default is None else default
    return _PerName(_checked_rules(rules, default, "a server update", _is_update), default)


@dataclass(frozen=True)
class _PerName:
    rules: Mapping[str, ServerUpdate[Tensor, Weighted]]
    default: ServerUpdate[Tensor, Weighted]

    def init(self, previous: Mapping[str, Tensor], /) -> State:
        matched = _match(list(previous), self.rules, self.default)
        return {name: update.init(previous[name]) for name, update in matched.items()}

    def step(self, previous: Mapping[str, Tensor], mean: Payload, state: State, /) -> tuple[dict[str, Tensor], State]:
        if unknown := sorted(set(mean) - set(previous)):
            raise wrong_value("mean", f"have no other names than `previous` {sorted(previous)}", unknown)
        if missing := sorted(set(previous) - set(state)):
            raise wrong_value("state", "come from `init` or the last `step`", f"nothing for {missing}")
        matched = _match(list(previous), self.rules, self.default)
        new, states = dict(previous), dict(state)
        for name in (name for name in previous if name in mean):
            with _named(name):
                new[name], states[name] = matched[name].step(previous[name], mean[name], state[name])
        return new, states


def _checked_rules(rules: Mapping[str, Rule] | None, default: Rule, noun: str, fits: Callable[[object], bool]) -> dict[str, Rule]:
    """Copy rules that map names to what fits."""
    if not isinstance(rules, Mapping | None):
        raise wrong_type("rules", f"map names to {noun} each", f"a {type(rules).__name__}")
    for argument, rule in [*((f"rules[{name!r}]", rule) for name, rule in (rules or {}).items()), ("default", default)]:
        if not fits(rule):
            raise wrong_type(argument, f"be {noun}", kind(rule))
    return dict(rules or {})


def _is_update(rule: object) -> bool:
    return isinstance(rule, ServerUpdate) and not isinstance(rule, type)


@contextmanager
def _named(name: str, among: str = "") -> Iterator[None]:
    """Put a name in front of a ValueError or TypeError of what runs inside."""
    try:
        yield
    except (ValueError, TypeError) as error:
        refused = ValueError if isinstance(error, ValueError) else TypeError
        raise refused(f"{name!r}{among}: {error}") from error


def _aggregate(name: str, aggregator: Aggregator, payloads: list[Payload]) -> Weighted:
    holders = [payload for payload in payloads if name in payload]
    among = "" if len(holders) == len(payloads) else f" (counting the {len(holders)} payloads of {len(payloads)} that have it)"
    with _named(name, among):
        return aggregator(payload[name] for payload in holders)


def _match(names: list[str], rules: Mapping[str, Rule], default: Rule) -> dict[str, Rule]:
    """For each name its rule: that of the full name, else of the longest dotted prefix, else the default."""
    keys = {name: next((key for key in _prefixes(name) if key in rules), None) for name in names}
    if unused := [rule for rule in rules if not any(name == rule or name.startswith(f"{rule}.") for name in names)]:
        raise wrong_value("rules", f"each match a name or a dotted prefix of {names}", unused)
    return {name: default if key is None else rules[key] for name, key in keys.items()}


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
