"""Server of FedAvg, and rules without a gradient: overwrite values, or average over rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

import fedprompt._refusals as check
from fedprompt.aggregation._packed import PayloadSums
from fedprompt.aggregation._rules import Blend
from fedprompt.aggregation._sums import RowSums
from fedprompt.aggregation.means import weighted_mean
from fedprompt.aggregation.unlike import leading, padded
from fedprompt.interfaces import Payload, Server, ServerRule, ServerUpdate, State


def overwrite() -> ServerRule:
    """Replace values by their mean (FedAvg).

    Rows of total weight 0 keep their previous value exactly.

    Returns:
        A :class:`ServerRule` with an empty state. Like every server update, it takes a tensor and
        an entry, or a dict of tensors and a payload. If a name is missing from the payload, its
        value does not change.

    Example:
        >>> server = overwrite()
        >>> values = {"head": torch.tensor([1.0, 2.0]), "keys": torch.tensor([3.0])}
        >>> mean = {"head": Weighted(torch.tensor([5.0, 0.0]), torch.tensor([3.0, 0.0]))}
        >>> server.step(values, mean, server.init(values))[0]
        {'head': tensor([5., 2.]), 'keys': tensor([3.])}

        The same with one tensor:

        >>> server.step(values["head"], mean["head"], server.init(values["head"]))[0]
        tensor([5., 2.])
    """
    return Blend(decay=0.0)


def ema(*, decay: float) -> ServerRule:
    r"""Move values towards their mean, as an exponential moving average over rounds.

    .. math:: v \leftarrow \text{decay} \cdot v + (1 - \text{decay}) \cdot \bar v

    Rows of total weight 0 keep their previous value exactly.

    Args:
        decay: Weight of the previous value (in [0, 1]). With 0, this is :func:`overwrite`. With 1,
            values never change. SGPT uses 0.5 for keys and group prompts.

    Returns:
        A :class:`ServerRule` for a tensor or a dict of tensors. Its state is empty.

    Example:
        >>> update = ema(decay=0.5)
        >>> value = torch.tensor([2.0])
        >>> mean = Weighted(torch.tensor([4.0]), torch.tensor(1.0))
        >>> update.step(value, mean, update.init(value))[0]
        tensor([3.])

    References:
        Deng et al., "Unlocking the Potential of Prompt-Tuning in Bridging Generalized and
        Personalized Federated Learning" (SGPT), CVPR 2024, Eq. 7.
    """
    check.number("decay", decay, at_least=0, at_most=1)
    return Blend(decay)


def averaging_server(
    values: Mapping[str, Tensor],
    update: ServerUpdate[Mapping[str, Tensor], Payload] | None = None,
    *,
    aggregate: Callable[[Iterable[Payload]], Payload] | None = None,
    form: Callable[[int], Payload] | None = None,
) -> Server:
    """Make a :class:`Server` that sends its values to clients, and averages their payloads.

    Args:
        values: First broadcast; the server keeps detached copies.
        update: Server update of the values, with the mean of a round. If None, :func:`overwrite`
            takes the mean.
        aggregate: Aggregator of a round, such as :func:`fedprompt.robust.weighted_median`. If None,
            :func:`weighted_mean`.
        form: Function from a client id to a payload with its shapes, as in :class:`Method`, for
            clients of unlike size. A client receives the first rows, as many as it has
            (:func:`~fedprompt.aggregation.leading`), and the others have weight 0 in its payload
            (:func:`~fedprompt.aggregation.padded`). If None, all clients have all rows.

    Returns:
        A server. Its state contains the `values` and the state of the `update`. It receives values,
        and with :func:`descend` changes (``server.changes``).

    Example:
        >>> from fedprompt import ema
        >>> server = averaging_server({"head": torch.tensor(0.0)}, ema(decay=0.5))
        >>> payload = {"head": Weighted(torch.tensor(4.0), torch.tensor(1.0))}
        >>> state = server.step(0, {3: payload}, server.state)
        >>> server.answer(1, state)
        {'head': tensor(2.)}
    """
    check.tensors("values", values, at_least=0)
    rule = overwrite() if update is None else update
    check.instance("update", rule, ServerUpdate, "be a server update, such as ema(decay=0.5)")
    aggregate = weighted_mean if aggregate is None else aggregate
    check.function("aggregate", aggregate)
    check.optional(check.function, "form", form)
    first = {name: value.detach().clone() for name, value in values.items()}

    def answer(client: int, state: State) -> Any:
        _check_state(state)
        return state["values"] if form is None else leading(state["values"], form(client))

    kind = _Mean if aggregate is weighted_mean else _Step
    step = kind(rule, aggregate, form is not None)
    changes = getattr(rule, "changes", None)  # of your own rule, it is not known
    state = {"values": first, "update": rule.init(first)}
    return Server(state, answer, step, changes, empty=False)


@dataclass(frozen=True)
class _Step:
    rule: ServerUpdate[Mapping[str, Tensor], Payload]
    aggregate: Callable[[Iterable[Payload]], Payload]
    unlike: bool

    def __call__(self, server_round: int, payloads: Mapping[int, Any], state: State) -> State:
        check.instance("payloads", payloads, Mapping, "map ids of clients to payloads")
        _check_state(state)
        found = [self.whole(client, payload, state) for client, payload in payloads.items()]
        return self.updated(self.aggregate(found), state)

    def whole(self, client: int, payload: Any, state: State) -> Any:
        if not self.unlike:
            return payload
        with check.located(f"payloads[{client}]"):
            return padded(payload, state["values"])

    def updated(self, mean: Payload, state: State) -> State:
        values, memory = self.rule.step(state["values"], mean, state["update"])
        return {"values": values, "update": memory}


@dataclass(frozen=True)
class _Mean(_Step):
    """Step that can add payloads as they come, with the bits of :func:`weighted_mean`."""

    def begin(self, state: State) -> _Sums:
        _check_state(state)
        return _Sums(self, state)


class _Sums:
    def __init__(self, step: _Step, begun: State) -> None:
        self.step, self.begun, self.sums = step, begun, PayloadSums(RowSums)

    def add(self, client: int, payload: Any) -> None:
        whole = self.step.whole(client, payload, self.begun)
        self.sums.add(f"payloads[{client}]", whole)

    def end(self, server_round: int, state: State) -> State:
        mean = self.sums.result()
        del self.sums  # in float64, they have the memory of two messages
        return self.step.updated(mean, state)


def _check_state(state: object) -> None:
    if not isinstance(state, Mapping) or not {"values", "update"} <= set(state):
        raise check.wrong("state", "come from the server or its last step", check.kind(state))
