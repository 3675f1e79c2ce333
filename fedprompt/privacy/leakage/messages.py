"""Membership from the messages that a server receives: a curious server, and an active one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import is_dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.func import functional_call

import fedprompt._nouns as nouns
import fedprompt._refusals as check
from fedprompt._own_copies import copied, own_module
from fedprompt._random_streams import kept_streams, resumed_streams
from fedprompt._signatures import short_types
from fedprompt.interfaces import Message, Method, Weighted
from fedprompt.interfaces.calls import Calls, seed_of
from fedprompt.interfaces.method import Clients, wrappers_of

Labeled = tuple[Tensor, Int[Tensor, " batch"]]
"""Inputs of a method, and their labels."""

_FEDERATION = "be a Federation, with one image for each client"
_RIDGE = 0.01
"""Share of the total variance over the number of images, which is added to each variance."""
MESSAGE = "be a message, as `observed` logs it"


@short_types
class Received(NamedTuple):
    """Messages that a server and a client exchanged, as the server sees them.

    Attributes:
        server_round: Round (0-based).
        client: Id of the client.
        answer: What the server sent.
        payload: What the client sent back.
    """

    server_round: int
    client: int
    answer: Message
    payload: Message


def observed(method: Method, log: list[Received]) -> Method:
    """Let the server of a method keep all messages, as a curious server does.

    Args:
        method: Method. Observe it before it is coded, so that its messages are those that the
            server decodes.
        log: List to which messages are added, one for each client and exchange.

    Returns:
        The method, with the same results.

    Raises:
        ValueError: If the method is coded already.

    Example:
        >>> from fedprompt import Weighted, averaging_server, run_rounds
        >>> def train(data, answer, state):
        ...     return {"x": Weighted(answer["x"] + data, torch.tensor(1.0))}, state
        >>> server = averaging_server({"x": torch.tensor(0.0)})
        >>> method = Method(train, server, predict=lambda *all: torch.nn.Identity())
        >>> log = []
        >>> for now in run_rounds(observed(method, log), lambda c, r: c, [[2, 4], [2]]):
        ...     pass
        >>> [(m.server_round, m.client, m.payload["x"].value.item()) for m in log]
        [(0, 2, 2.0), (0, 4, 4.0), (1, 2, 5.0)]
    """
    nouns.method(method)
    check.instance("log", log, list, "be a list")
    rule = "be observed before it is coded, as in coded(observed(method, log), codec)"
    check.require("coded" not in wrappers_of(method), "method", rule, "a coded one")
    server = method.server

    def step(server_round: int, payloads: Mapping[int, Message], state: Any) -> Any:
        for client, payload in payloads.items():
            with resumed_streams("answer", client):  # the same answer as the client had
                answer = copied(server.answer(client, copied(state)))
            log.append(Received(server_round, client, answer, copied(payload)))
        return server.step(server_round, payloads, state)

    return method._replace(server=server._replace(step=step))


def message_scores(
    method: Method,
    received: Sequence[Received] | Mapping[int, Sequence[Received]],
    candidates: Clients,
    *,
    population: Clients | None = None,
) -> Float[Tensor, " candidates"]:
    r"""Score how likely messages of a client were trained on each candidate image.

    The server has the client function, so it simulates the message :math:`m_x` of a client that has
    one image alone, for the same answer. What the client changed, M, is then compared with
    what this image would change, by a matched filter:

    .. math:: \frac{(m_x - \mu)^\top S^{-1} (M - c \mu)}
        {\sqrt{(m_x - \mu)^\top S^{-1} (m_x - \mu)} \sqrt{(M - c \mu)^\top S^{-1} (M - c \mu)}}

    :math:`\mu` and S are the mean and the covariance of simulated messages of the population. To
    each variance, 1 % of the total variance over the number of images is added. The factor c fits
    M best in the same metric, because steps on many images, or clipped ones, have another length.
    Without a population, :math:`\mu = 0` and S is the identity, so the score is a cosine. Scores of
    several messages are added. The form of messages does not matter: they may be parameters,
    prototypes or gradients.

    Args:
        method: Method as the server simulates it: without codecs, and without privacy noise.
        received: Messages of one client (:func:`observed`). Or messages by candidate
            (:func:`probed`).
        candidates: Federation with one client for each candidate image.
        population: Federation with one client for each image that the server has, other than the
            candidates. If None, nothing is known about other images.

    Returns:
        Score of each candidate in the order of ``candidates.shards``, in [-1, 1] for each message.

    Raises:
        ValueError: If there is no message, or a message has no payload.

    Example:
        A client of one image, and two candidates.

        >>> from fedprompt import samples, vit_trunk
        >>> from fedprompt.methods import Federation, VitSetting, head_tuning
        >>> images, labels, *_ = samples.digits()
        >>> trunk = vit_trunk(samples.vit("S"))
        >>> method = head_tuning(VitSetting(trunk=trunk, num_classes=10, rounds=1, clients=[5]))
        >>> data = Federation(images, labels, {5: torch.tensor([7])}).data(method.setting, 5, 0)
        >>> answer = method.server.answer(5, method.server.state)
        >>> received = Received(0, 5, answer, method.client(data, dict(answer), {})[0])
        >>> candidates = Federation(images, labels, {k: torch.tensor([k]) for k in (7, 8)})
        >>> message_scores(method, [received], candidates) > 0.999
        tensor([ True, False])

    References:
        Comparing an update with gradients of candidates is known from Nasr et al., "Comprehensive
        Privacy Analysis of Deep Learning", S&P 2019, and others. The filter is ours.
    """
    _check_clients(method, candidates, population)
    listed: Any = received
    if not isinstance(received, Mapping):
        listed = dict.fromkeys(candidates.shards, received)
    check.known("received", map(str, candidates.shards), [*map(str, listed)], "name candidates in")
    check.gradients_are_recorded("message_scores")
    filters, scores = dict[int, Callable[[list[Tensor]], Tensor]](), []
    with kept_streams(), torch.enable_grad():
        for candidate in candidates.shards:
            messages = listed[candidate]
            if id(messages) not in filters:
                filters[id(messages)] = _filter(method, messages, population)
            own = _simulated(method, messages, candidates, candidate)
            scores.append(filters[id(messages)](own))
    return torch.stack(scores)


def _filter(
    method: Method, messages: Sequence[Received], population: Clients | None
) -> Callable[[list[Tensor]], Tensor]:
    """Return the function from simulated messages to the sum of their correlations."""
    check.sequence("received", messages, "messages")
    check.some("received", messages, "have at least one message")
    for one in messages:
        check.instance("received", one, Received, MESSAGE)
    seen = [_changes(one.payload, one) for one in messages]
    if population is None:
        pairs = [_Metric(None, each) for each in seen]
    else:
        others = [_simulated(method, messages, population, each) for each in population.shards]
        pairs = [_Metric(torch.stack(each), one) for *each, one in zip(*others, seen, strict=True)]
    return lambda own: torch.stack([f(each) for f, each in zip(pairs, own, strict=True)]).sum()


class _Metric:
    """Correlation with a message, in the metric of the inverse covariance of a population."""

    def __init__(self, population: Tensor | None, seen: Tensor) -> None:
        others = torch.zeros(1, len(seen)).to(seen) if population is None else population
        self.mean = others.mean(0)
        self.apart = others - self.mean
        gram = self.apart @ self.apart.T
        ridge = _RIDGE * gram.diagonal().mean().clamp(min=torch.finfo(torch.float64).tiny / _RIDGE)
        self.inner = torch.linalg.inv(gram + ridge * torch.eye(len(gram)).to(gram))
        length = self._of(self.mean, self.mean).clamp(min=torch.finfo(torch.float64).tiny)
        self.moved = seen - self._of(self.mean, seen) / length * self.mean

    def __call__(self, own: Tensor) -> Tensor:
        own = own - self.mean
        return cosine(
            self._of(own, self.moved), self._of(own, own), self._of(self.moved, self.moved)
        )

    def _of(self, a: Tensor, b: Tensor) -> Tensor:
        """Return a S^-1 b times the ridge, by Woodbury."""
        product: Tensor = a @ b - (self.apart @ a) @ self.inner @ (self.apart @ b)
        return product


def cosine(product: Tensor, own: Tensor, other: Tensor) -> Tensor:
    """Return a cosine from the product of two vectors and their squared lengths."""
    tiny = torch.finfo(product.dtype).tiny ** 0.5
    return product / (own.clamp(min=tiny).sqrt() * other.clamp(min=tiny).sqrt())


def _simulated(
    method: Method, messages: Sequence[Received], clients: Clients, number: int
) -> list[Tensor]:
    """Return what a client that has these inputs alone changes in each message, as vectors.

    It remembers the earlier exchanges of a round, and no earlier round.
    """
    found, state, last, exchange = list[Tensor](), dict[str, Any](), None, 0
    for one in messages:
        if last != (last := (one.server_round, one.client)):
            state, exchange = {}, -1
        exchange += 1
        data = clients.data(method.setting, number, one.server_round)
        if is_dataclass(data) and not isinstance(data, type):  # as the client, whose network it has
            data = replace(data, **{"id": one.client})
        calls = Calls(method, seed_of(method), one.server_round, exchange)
        payload, state = calls.train(one.client, data, copied(one.answer), state)
        found.append(_changes(payload, one))
    return found


def _changes(payload: Any, one: Received) -> Float[Tensor, " numbers"]:
    """Return the entries of a payload minus those of the answer; 0 for rows of weight 0."""
    parts = []
    for name, sent in (one.payload or {}).items():
        own = (payload or {}).get(name)
        nothing = torch.zeros(value_of(sent).numel(), dtype=torch.float64, device="cpu")
        change = nothing if own is None else change_of(own, one.answer.get(name))
        parts.append(change.reshape(-1))
    check.some("received", parts, "have a payload with an entry")
    return torch.cat(parts)


def change_of(sent: Tensor | Weighted, before: Tensor | Weighted | None) -> Tensor:
    """Return what an entry changes of the answer's in float64, 0 in rows of weight 0."""
    change, known = (
        value_of(each).detach().double().cpu()
        for each in (sent, sent if before is None else before)
    )
    if before is not None and known.shape == change.shape:
        change = change - known
    return Weighted(change, sent.weight.cpu()).known if isinstance(sent, Weighted) else change


def value_of(entry: Tensor | Weighted) -> Tensor:
    """Return the tensor of an entry."""
    return entry.value if isinstance(entry, Weighted) else entry


def crafted_answer(
    method: Method,
    answer: Message,
    data: Any,
    target: Labeled,
    population: Labeled,
    *,
    steps: int = 20,
    learning_rate: float = 0.05,
) -> Message:
    r"""Craft an answer for which one image has a large gradient, and others have small ones.

    An active server sends it in place of its values. Adam minimizes the mean loss of the population
    minus the loss of the target, which counts up to 8 nats:

    .. math:: \tfrac 1P \sum_p \ell(x_p, y_p) - \min(\ell(x, y), 8)

    If the client has the target, its update is mostly made by it.

    Args:
        method: Method whose answers have entries of its prediction, by their names.
        answer: What an honest server would send.
        data: Data for the prediction of the method, such as that of a client of the server.
        target: Inputs and labels of one candidate image.
        population: Inputs and labels of other images that the server has.
        steps: Number of steps of Adam (at least 1).
        learning_rate: Learning rate of Adam (above 0).

    Returns:
        An answer with the names, shapes and dtypes of the honest one.

    Raises:
        ValueError: If the prediction has no floating-point entry of the answer.

    :func:`probed` has an example.

    References:
        Nguyen et al., "Leveraging Soft Prompts for Privacy Attacks in Federated Prompt Tuning"
        (PromptMIA, arXiv:2601.06641), of which the abstract was read: a malicious server inserts
        crafted prompts and monitors their updates. How they craft prompts was not read, so this
        loss is ours. Raising the loss of a target is known from Nasr et al., S&P 2019.
    """
    nouns.method(method)
    check.names("answer", answer)
    check.count("steps", steps)
    check.number("learning_rate", learning_rate, above=0)
    for argument, given in {"target": target, "population": population}.items():
        check.pair(argument, given, "be inputs and labels")
        check.labels(f"{argument}[1]", given[1], check.LARGEST_INT, size=len(given[0]), of="inputs")
        check.some(argument, len(given[1]), "have at least one image")
    check.gradients_are_recorded("crafted_answer")
    count, device = len(target[1]), target[0].device
    sides = zip(population, target, strict=True)
    inputs, labels = (torch.cat([part.to(device) for part in pair]) for pair in sides)
    with kept_streams(), torch.enable_grad():
        model, values = prediction(method, answer, data, answer)
        optimizer = torch.optim.Adam(values.values(), learning_rate)
        for _ in range(steps):
            logits = functional_call(model, values, (inputs,))
            losses = F.cross_entropy(logits, labels.to(logits.device), reduction="none")
            loss = losses[:-count].mean() - losses[-count:].clamp(max=8).mean()
            optimizer.zero_grad()
            torch.autograd.backward(loss, inputs=[*values.values()])
            optimizer.step()
    made = dict(copied(answer))
    for name, value in values.items():
        entry, found = made[name], value.detach()
        made[name] = entry._replace(value=found) if isinstance(entry, Weighted) else found
    return made


def prediction(
    method: Method, answer: Message, data: Any, names: Iterable[str]
) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return the prediction for an answer, in eval mode, and those of its values to optimize."""
    round_of = getattr(data, "server_round", 0)
    calls = Calls(method, seed_of(method), round_of)
    model = own_module(calls.predict(getattr(data, "id", 0), data, copied(answer), {})).eval()
    known = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = {}
    for name in names:
        fits = name in answer and name in known and known[name].is_floating_point()
        if fits and (value := value_of(answer[name])).shape == known[name].shape:
            values[name] = value.detach().clone().to(known[name]).requires_grad_()
    rule = "have answers with entries of its prediction, by their names"
    check.require(values, "method", rule, check.some_names(answer))
    return model, values


def probed(
    method: Method,
    answer: Message,
    federation: Clients,
    client: int,
    candidates: Clients,
    *,
    population: Labeled,
    server_round: int = 0,
    steps: int = 20,
    learning_rate: float = 0.05,
) -> dict[int, list[Received]]:
    """Send a client the crafted answer for each candidate, and receive its messages.

    This is the experiment of an active server: each candidate costs one exchange.

    Args:
        method: Method as clients run it, such as with privacy noise.
        answer: What an honest server would send.
        federation: Federation of the client.
        client: Id of the client that is attacked, which has no state.
        candidates: Federation with one client for each candidate image.
        population: Inputs and labels of other images that the server has.
        server_round: Round (at least 0).
        steps: Number of steps of :func:`crafted_answer`.
        learning_rate: Learning rate of :func:`crafted_answer`.

    Returns:
        Messages by candidate, for :func:`message_scores`.

    Example:
        >>> from fedprompt import samples, vit_trunk
        >>> from fedprompt.methods import Federation, VitSetting, head_tuning
        >>> images, labels, *_ = samples.digits()
        >>> trunk = vit_trunk(samples.vit("S"))
        >>> method = head_tuning(VitSetting(trunk=trunk, num_classes=10, rounds=1, clients=[0]))
        >>> answer = method.server.answer(0, method.server.state)
        >>> federation = Federation(images, labels, {0: torch.arange(4)})
        >>> candidates = Federation(images, labels, {k: torch.tensor([k]) for k in (2, 5)})
        >>> population = images[9:40], labels[9:40]
        >>> received = probed(method, answer, federation, 0, candidates, population=population)
        >>> scores = message_scores(method, received, candidates)
        >>> bool(scores[0] > scores[1])
        True
    """
    _check_clients(method, candidates, None)
    check.instance("federation", federation, Clients, "be a Federation")
    check.known("client", [str(client)], [*map(str, federation.shards)], "be one of")
    check.count("server_round", server_round, at_least=0)
    check.gradients_are_recorded("probed")
    calls, received = Calls(method, seed_of(method), server_round), {}
    with kept_streams(), torch.enable_grad():
        data = federation.data(method.setting, client, server_round)
        for number in candidates.shards:
            target = candidates.data(method.setting, number, server_round).own()
            how: dict[str, Any] = {"steps": steps, "learning_rate": learning_rate}
            sent = crafted_answer(method, answer, data, target, population, **how)
            payload, _ = calls.train(client, data, copied(sent), {})
            received[number] = [Received(server_round, client, sent, copied(payload))]
    return received


def _check_clients(method: Method, candidates: Clients, population: Clients | None) -> None:
    nouns.method(method)
    check.require(method.setting is not None, "method", "have a setting", "none")
    check.instance("candidates", candidates, Clients, _FEDERATION)
    check.some("candidates", candidates.shards, "have at least one client")
    check.optional(check.instance, "population", population, Clients, _FEDERATION)
    check.require(population is None or len(population.shards) > 1, "population",
                  "have at least two clients", 1)  # fmt: skip
