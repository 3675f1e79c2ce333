"""A backdoor: some clients learn a trigger, and prompts that map it to a class of their choice."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

import fedprompt as fp
import fedprompt._refusals as check
from fedprompt.methods.setting import Batch, ClientData

__all__ = ["backdoored"]


def backdoored(
    method: fp.Method,
    *,
    malicious: Collection[int],
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
        boost: Factor of the change that a malicious client sends. With the number of clients in a
            round, its model takes the place of the mean (above 0). It needs a method whose answer
            has the values that clients send.

    Returns:
        The method with an attack, for every engine.

    Raises:
        ValueError: In the first round, if an id or the target is not in the setting.

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
    check.iterable("malicious", malicious, "ids of clients")
    for position, each in enumerate(malicious):
        check.count(f"malicious[{position}]", each, at_least=0)
    chosen = frozenset(malicious)
    check.count("target", target, at_least=0)
    check.number("bound", bound, above=0)
    check.number("boost", boost, above=0)

    def client(data: ClientData, answer: Any, state: Any) -> Any:
        clients, classes = data.setting.clients, data.setting.num_classes
        strange = [each for each in chosen if each not in clients]
        check.nothing(strange, "malicious", "be ids of clients of the setting")
        check.require(target < classes, "target", f"be below {classes}, the classes", target)
        if data.id not in chosen:
            return method.client(data, answer, state)
        own = state.get("client", {})
        trigger = state.get("trigger", torch.zeros(()))
        trigger = _learned(trigger, method.predict(data, answer, own), data, target, bound)
        poisoned = _Poisoned(**vars(data), trigger=trigger, target=target)
        payload, own = method.client(poisoned, answer, own)
        if payload is not None:
            payload = _boosted(payload, answer, boost)
        return payload, {"client": own, "trigger": trigger}

    def predict(data: ClientData, answer: Any, state: Any) -> Any:
        own = state.get("client", {}) if data.id in chosen else state
        return method.predict(data, answer, own)

    return method._replace(client=client, predict=predict)


@dataclass(frozen=True)
class _Poisoned(ClientData):
    """Data that yields all images twice: as they are, and triggered for the target."""

    trigger: Float[Tensor, "..."]
    target: int

    @property
    def class_counts(self) -> Float[Tensor, "classes"]:
        counts = super().class_counts
        counts[self.target] += len(self.labels)
        return counts

    def batch(self, chosen: Int[Tensor, "chosen"], rng: torch.Generator) -> Batch:
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
) -> Float[Tensor, "..."]:
    """Take a step of the trigger on each batch, towards the target class of the model."""
    for images, labels in data.batches(purpose="trigger"):
        trigger = trigger.to(images).expand_as(images[0]).clone().requires_grad_()
        loss = F.cross_entropy(model(images + trigger), torch.full_like(labels, target))
        (slope,) = torch.autograd.grad(loss, trigger)
        trigger = (trigger.detach() - bound / 4 * slope.sign()).clamp(-bound, bound)
    return trigger


def _boosted(payload: Any, answer: Any, boost: float) -> Any:
    """Scale the changes of a payload from the answer."""
    if boost == 1:
        return payload
    if missing := sorted(payload.keys() - answer.keys()):
        rule = "have each entry of the payload, because its change is boosted"
        raise check.wrong("answer", rule, f"none for {missing[0]!r}")
    boosted = {}
    for name, entry in payload.items():
        known = answer[name]
        known = known.value if isinstance(known, fp.Weighted) else known
        boosted[name] = entry._replace(value=known + boost * (entry.value - known))
    return boosted
