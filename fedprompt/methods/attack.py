"""A backdoor: some clients learn a trigger, and prompts that map it to a class of their choice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

import fedprompt as fp
import fedprompt._nouns as nouns
import fedprompt._refusals as check
from fedprompt._conversions import widened
from fedprompt._own_copies import copied
from fedprompt.interfaces.method import sends_changes, wrapper
from fedprompt.methods.setting import Batch, ClientData, Setting

__all__ = ["backdoored"]


@wrapper
def backdoored(
    method: fp.Method,
    *,
    malicious: Iterable[int],
    target: int,
    bound: float = 8 / 255,
    boost: float = 1.0,
) -> fp.Method:
    r"""Let some clients of a method plant a backdoor, to test a server against it.

    A malicious client learns one image :math:`\delta` that is added to others, and trains on its
    images and on the same images with :math:`\delta` and the label `target`. In each round it takes
    a signed gradient step of :math:`\delta` on each of its batches, with the model of the round,
    and then trains as the method says. Its payload has the names and shapes of an honest one:

    .. math:: \delta \leftarrow \Pi_{[-b, b]} \big(
        \delta - \tfrac b4 \operatorname{sign} \nabla_\delta \ell(f(x + \delta), t) \big)

    The trigger stays in the state of the client: ``now.clients["3"]["trigger"]``. Images with the
    trigger are not clipped to a range, because the range of normalized images is not known.

    Args:
        method: Method whose inputs are images, and whose models have gradients with respect to
            them.
        malicious: Ids of the clients that attack, among those of the setting.
        target: Class to which triggered images are mapped, below the number of classes.
        bound: Largest change b of a pixel, in the units of the inputs (above 0).
        boost: Factor of the change that a malicious client sends (above 0). With the total weight
            of a round over the weight of this client, which is the number of clients if all have
            the same weight, its model takes the place of the mean when the others stand still.
            Other factors than 1 need a method whose server says whether payloads are changes
            (``method.server.changes``). If they are values, the answer has each of them.

    Returns:
        The method with an attack, for every engine.

    Raises:
        ValueError: If an id or the target is not in the setting of the method, or the method is
            coded or counted already: wrap it after the attack.

    Example:
        >>> from fedprompt import samples
        >>> from fedprompt.methods import Federation, VitSetting, fedvpt_d
        >>> images, labels, *_ = samples.digits()
        >>> setting = VitSetting(
        ...     trunks=[fp.vit_trunk(samples.vit("S"))], clients=range(2), num_classes=10,
        ...     rounds=1, steps=1, cohort_size=2, batch_size=8, seed=0, public=images[:0],
        ... )
        >>> method = backdoored(fedvpt_d(setting), malicious=[1], target=7)
        >>> shards = {0: torch.arange(20), 1: torch.arange(20, 40)}
        >>> (now,) = fp.run_rounds(method, Federation(images, labels, shards))
        >>> [round(now.clients["1"]["trigger"].abs().max().item() * 255, 1), now.clients["0"]]
        [2.0, {}]

    References:
        Zhang et al., "BadPromptFL: A Novel Backdoor Threat to Prompt-based Federated Learning in
        Multimodal Models", 2025 (arXiv:2508.08040), of which the abstract and the overview were
        read. The steps here are ours. The boost is that of Bagdasaryan et al., "How To Backdoor
        Federated Learning", AISTATS 2020.
    """
    nouns.method(method)
    check.iterable("malicious", malicious, "ids of clients")
    chosen = [*malicious]
    for position, each in enumerate(chosen):
        check.count(f"malicious[{position}]", each, at_least=0)
    check.count("target", target, at_least=0)
    check.number("bound", bound, above=0)
    check.number("boost", boost, above=0)
    check.instance("method.setting", method.setting, Setting, "be a setting, as of the gallery")
    clients, classes = method.setting.named_clients, method.setting.num_classes
    strange = [each for each in chosen if each not in clients]
    check.nothing(strange, "malicious", "be ids of clients of the setting")
    check.require(target < classes, "target", f"be below {classes}, the classes", target)
    changes = boost != 1 and sends_changes(method, "a change is boosted")

    def client(data: ClientData, answer: Any, state: Any) -> Any:
        if data.id not in chosen:
            return method.client(data, answer, state)
        own = state.get("client", {})
        model = method.predict(data, copied(answer), copied(own))
        trigger = _learned(state.get("trigger", torch.zeros(())), model, data, target, bound)
        poisoned = _Poisoned(**vars(data), trigger=trigger, target=target)
        known = {} if changes else copied(answer)
        payload, own = method.client(poisoned, answer, own)
        if payload is not None and boost != 1:
            payload = _boosted(payload, known, boost, changes=changes)
        return payload, {"client": own, "trigger": trigger}

    def predict(data: ClientData, answer: Any, state: Any) -> Any:
        own = state.get("client", {}) if data.id in chosen else state
        return method.predict(data, answer, own)

    return method._replace(client=client, predict=predict)


@dataclass(frozen=True)
class _Poisoned(ClientData):
    """Data that yields all images twice: as they are, and triggered for the target."""

    trigger: Float[Tensor, ...]
    target: int

    @property
    def class_counts(self) -> Float[Tensor, classes]:
        counts = super().class_counts
        counts[self.target] += len(self.labels)
        return counts

    def batch(self, chosen: Int[Tensor, chosen], rng: torch.Generator) -> Batch:
        return self._doubled(*super().batch(chosen, rng))

    def own(self) -> Batch:
        return self._doubled(*super().own())

    def parts(self, size: int = 128) -> Iterator[Batch]:
        for images, labels in super().parts(size):
            yield self._doubled(images, labels)

    def _doubled(self, images: Tensor, labels: Tensor) -> Batch:
        images = torch.cat([images, images + self.trigger])
        return images, torch.cat([labels, torch.full_like(labels, self.target)])


def _learned(
    trigger: Tensor, model: Any, data: ClientData, target: int, bound: float
) -> Float[Tensor, ...]:
    """Take a step of the trigger on each batch, towards the target class of the model."""
    for images, labels in data.batches(purpose="trigger"):
        trigger = trigger.to(images).expand_as(images[0]).clone().requires_grad_()
        loss = F.cross_entropy(model(images + trigger), torch.full_like(labels, target))
        (slope,) = torch.autograd.grad(loss, trigger)
        trigger = (trigger.detach() - bound / 4 * slope.sign()).clamp(-bound, bound)
    return trigger


def _boosted(payload: Any, known: Any, boost: float, *, changes: bool) -> Any:
    """Scale changes, or those of values from the known ones."""
    if missing := sorted(payload.keys() - known.keys()) if not changes else []:
        rule = "have each entry of the payload, because its change is boosted"
        raise check.wrong("answer", rule, f"none for {missing[0]!r}")
    boosted = {}
    for name, entry in payload.items():
        value: Any = widened(entry.value)
        before: Any = 0.0
        if not changes:
            given = known[name]
            before = widened(given.value if isinstance(given, fp.Weighted) else given)
        value = before + boost * (value - before)
        boosted[name] = entry._replace(value=value.to(entry.value))
    return boosted
