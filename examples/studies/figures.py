"""Figures beside accuracy: functions (trial, method, round) -> figures, for `figures=` of a study.

They are called after each round. A figure is averaged over the rounds that have it. One that needs
earlier rounds has ``state_dict`` and ``load_state_dict``, so that a killed run goes on.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp
from fedprompt.methods import evaluate

Measured = Callable[[Any, fp.Method, fp.Round], Mapping[str, float]]
"""Function from a trial, a method and a round to figures by name."""
GUIDES = "distance of the guides, of their first norm"


class Joined:
    """All figures of some functions."""

    def __init__(self, *measures: Measured | None) -> None:
        self.measures = [measure for measure in measures if measure is not None]

    def __call__(self, *where: Any) -> dict[str, float]:
        """Measure."""
        return {name: each for measure in self.measures for name, each in measure(*where).items()}

    def state_dict(self) -> list[Any]:
        """Return what earlier rounds left."""
        return [getattr(each, "state_dict", dict)() for each in self.measures]

    def load_state_dict(self, state: Sequence[Any]) -> None:
        """Go on from a state."""
        for each, known in zip(self.measures, state, strict=True):
            getattr(each, "load_state_dict", id)(known)


class Over:
    """Figures of all rounds together.

    Args:
        measure: Function (trial, method, round) -> tensor.
        summary: Function from the stacked tensors of all rounds to figures, at the last round.
        every: Distance of two rounds that are measured. The last one is always measured.
    """

    def __init__(
        self,
        measure: Callable[..., Tensor],
        summary: Callable[[Tensor], Mapping[str, float]],
        every: int = 1,
    ) -> None:
        self.measure, self.summary, self.every = measure, summary, every
        self.found: list[Tensor] = []

    def __call__(self, trial: Any, method: fp.Method, now: fp.Round) -> Mapping[str, float]:
        """Measure, and summarize after the last round."""
        left = trial.setting.rounds - 1 - now.server_round
        if not left or (now.server_round + 1) % self.every == 0:
            self.found.append(self.measure(trial, method, now))
        return {} if left else self.summary(torch.stack(self.found))

    def state_dict(self) -> dict[str, Any]:
        """Return what earlier rounds left."""
        return {"found": list(self.found)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self.found = list(state["found"])


def last(measure: Measured, count: int = 1) -> Measured:
    """Measure the last rounds only."""

    def measured(trial: Any, method: fp.Method, now: fp.Round) -> Mapping[str, float]:
        left = trial.setting.rounds - 1 - now.server_round
        return measure(trial, method, now) if left < count else {}

    return measured


def accuracies(trial: Any, method: fp.Method, now: fp.Round, *, shared: bool = False) -> Any:
    """Evaluate the clients of a trial, and those of each domain, whose names are DOMAIN-NUMBER."""
    domains = dict[str, list[int]]()
    for client in trial.tested:
        if "-" in (name := trial.names[client]):
            domains.setdefault(name.rpartition("-")[0], []).append(client)
    how = {"clients": trial.tested, "newcomers": (), "shared": shared, "domains": domains}
    return evaluate(method, trial.federation, now, trial.tests, **how)


def averaged(count: int, shared: bool, domains: bool = False) -> Measured | None:
    """Average the accuracies of the last rounds. One round needs no average without domains."""
    return last(partial(accuracies, shared=shared), count) if count > 1 or domains else None


def curve(column: str, shared: bool, every: int = 1) -> Over:
    """Return an accuracy of each round, and that of the best round."""

    def measure(*where: Any) -> Tensor:
        return torch.tensor(accuracies(*where, shared=shared)[column])

    def summary(found: Tensor) -> dict[str, float]:
        points = {f"{column}, point {k}": float(each) for k, each in enumerate(found, 1)}
        return {f"{column}, best round": float(found.max()), **points}

    return Over(measure, summary, every)


def losses(trial: Any, method: fp.Method, now: fp.Round) -> Tensor:
    """Measure the loss of each client on all its training images, in nats."""
    found = []
    for client in trial.setting.clients:
        images, labels = trial.federation.data(trial.setting, client, now.server_round).own()
        model = now.model(method, trial.federation, client).eval()
        with torch.no_grad():
            found.append(F.cross_entropy(model(images), labels))
    return torch.stack(found)


def rise() -> Over:
    """Negative effect: largest rise of a client's training loss over its lowest value before."""
    return Over(losses, lambda all: {"rise": fp.metrics.negative_effect(all).average})


def loss_curve(every: int = 1) -> Over:
    """Return the mean training loss of all clients after each round."""

    def summary(found: Tensor) -> dict[str, float]:
        return {f"loss, point {k}": float(each.mean()) for k, each in enumerate(found, 1)}

    return Over(losses, summary, every)


def classes(trial: Any, method: fp.Method, now: fp.Round) -> dict[str, float]:
    """Measure the accuracy of each class on all test images, its mean over clients."""
    found, labels = accuracies(trial, method, now), trial.tests.labels.cpu()
    right = torch.stack([each == labels for each in found.predicted.values()]).double().mean(0)
    return {f"class {k}": float(right[labels == k].mean()) for k in labels.unique().tolist()}


# Mechanisms of the papers.


def guides(trial: Any, method: fp.Method, now: fp.Round) -> dict[str, float]:
    """Measure how far the guides of FedL2G moved."""
    first, moved = method.server.state["guides"], now.server["guides"]
    return {GUIDES: float((moved - first).norm() / first.norm())}


@torch.no_grad()
def two_losses(trial: Any, method: fp.Method, now: fp.Round) -> dict[str, float]:
    """Measure how far the guides of FedL2G-f moved, and the two losses of the first client."""
    data = trial.federation.data(trial.setting, 0, now.server_round)
    model, (images, labels) = now.model(method, data), data.own()
    model.eval()
    features = model.features(images)
    return guides(trial, method, now) | {
        "guide loss": F.mse_loss(features, now.server["guides"][labels]).item(),
        "cross-entropy": F.cross_entropy(model.head(features), labels).item(),
    }


@torch.no_grad()
def violation(trial: Any, method: fp.Method, now: fp.Round) -> dict[str, float]:
    """Measure the largest violation of a marginal by the plans of FedOTP, for 64 test images."""
    model, seen = now.model(method, trial.federation, trial.setting.clients[0]).eval(), list[Any]()
    solver = model.match.keywords["solver"]

    def watched(*problem: Any) -> Any:
        seen.append(solver(*problem))
        return seen[-1]

    model.match = partial(model.match, solver=watched)
    model(trial.tests.inputs[:64].to(trial.setting.device))
    return {"violation of the plans": max(float(each.error.max()) for each in seen)}


@torch.no_grad()
def distillation(trial: Any, method: fp.Method, now: fp.Round) -> dict[str, float]:
    """Measure the two terms of FedHPL's Eq. 34, their means over clients, at temperature 4.5."""
    found = []
    for client in trial.tested:
        data = trial.federation.data(trial.setting, client, now.server_round)
        model, teacher = now.model(method, data).eval(), method.server.answer(client, now.server)
        logits = torch.cat([model(images) for images, _ in data.parts()])
        labels = torch.cat([labels for _, labels in data.parts()])
        if (teacher["logits"].weight[labels] > 0).any():
            terms = fp.metrics.distillation_terms(
                logits, labels, teacher["logits"], temperature=4.5
            )
            found.append(torch.tensor(terms))
    if not found:  # of a federation whose server knows no class
        return {}
    error, similarity = torch.stack(found).mean(0).tolist()
    return {"error of the teachers": error, "distance from the teachers": similarity}


@torch.no_grad()
def selected(model: Any, inputs: Any, device: Any) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Return batches of inputs with their queries and their groups."""
    for batch in inputs.split(256):
        batch = batch.to(device)
        query = model.query(batch)
        yield batch, query, model.selector(query).indices


def groups_of(trial: Any, method: fp.Method, now: fp.Round) -> tuple[Any, Tensor]:
    """Return the model of SGPT and the group of each test image."""
    model = now.model(method, trial.federation, trial.setting.clients[0]).eval()
    parts = selected(model, trial.tests.inputs, trial.setting.device)
    return model, torch.cat([chosen for *_, chosen in parts])


def selections(trial: Any, method: fp.Method, now: fp.Round) -> dict[str, float]:
    """Measure how many groups of SGPT the test images select."""
    model, chosen = groups_of(trial, method, now)
    counts = chosen.bincount(minlength=len(model.selector.keys))
    return {"effective groups": fp.selection.selection_health(counts)["effective_groups"]}


@torch.no_grad()
def groups(trial: Any, method: fp.Method, now: fp.Round) -> dict[str, float]:
    """Measure how the groups of SGPT are selected, and what their prompts change."""
    model, chosen = groups_of(trial, method, now)
    count, labels = len(model.selector.keys), trial.tests.labels
    domains = trial.tests.cells // trial.setting.num_classes
    table = fp.metrics.contingency_table(chosen, domains, count, 1 + int(domains.max())).float()
    used, health = table[table.any(1)], fp.selection.selection_health(table.sum(1))
    shares = used.amax(1) / used.sum(1)
    pairs = list(zip(trial.tests.inputs.split(256), chosen.split(256), strict=True))
    own = torch.cat([model.logits(*pair).argmax(1) for pair in pairs])
    none = torch.cat([model.logits(batch).argmax(1) for batch, _ in pairs])
    other = torch.cat([model.logits(batch, (of + 1) % count).argmax(1) for batch, of in pairs])
    return {
        "effective groups": health["effective_groups"],
        "dead groups": health["dead_groups"],
        "images in the group of their domain": fp.selection.clustering_accuracy(table),
        "smallest share of the main domain of a group": shares.min().item(),
        "groups of one domain": (shares == 1).sum().item(),
        "accuracy with the selected groups": (own == labels).float().mean().item(),
        "accuracy without groups": (none == labels).float().mean().item(),
        "predictions that the next group changes": (own != other).float().mean().item(),
    }


def clusters(kinds: Tensor) -> Measured:
    """Measure the share of test images whose kind is the most frequent one of their group.

    Args:
        kinds: Kind of each class, such as the superclasses of CIFAR-100.
    """

    def measured(trial: Any, method: fp.Method, now: fp.Round) -> dict[str, float]:
        _, chosen = groups_of(trial, method, now)
        found = kinds[trial.tests.labels.cpu()]
        return {"clusters": purity(chosen.cpu(), found)}

    return measured


def purity(groups: Tensor, kinds: Tensor) -> float:
    """Return the share of the images whose kind is the most frequent one of their group."""
    sizes = int(groups.max()) + 1, int(kinds.max()) + 1
    table = fp.metrics.contingency_table(groups, kinds, *sizes)
    return fp.selection.selection_health(table)["purity"]


def selections_of_client(client: int = 0) -> Over:
    """Return mean and deviation over rounds of how many images of a client select each group."""

    def measure(trial: Any, method: fp.Method, now: fp.Round) -> Tensor:
        data = trial.federation.data(trial.setting, client, now.server_round)
        model = now.model(method, data).eval()
        parts = [selected(model, part, part.device) for part, _ in data.parts()]
        chosen = torch.cat([chosen for part in parts for *_, chosen in part])
        return chosen.bincount(minlength=len(model.selector.keys)).cpu().double()

    def summary(found: Tensor) -> dict[str, float]:
        sides = {"mean": found.mean(0), "deviation": found.std(0, correction=0)}
        return {
            f"client {client} selects group {k}, {name}": float(each)
            for name, side in sides.items()
            for k, each in enumerate(side)
        }

    return Over(measure, summary)


def congruence(trial: Any, method: fp.Method, now: fp.Round) -> dict[str, float]:
    """Compare the groups of SGPT with k-means of the queries of all training images."""
    from sklearn.cluster import KMeans

    setting, federation = trial.setting, trial.federation
    model = now.model(method, federation, setting.clients[0]).eval()
    used = torch.cat([federation.shards[client] for client in setting.clients]).unique()
    found = [
        (query.cpu(), chosen.cpu())
        for part in used.split(256)
        for _, query, chosen in selected(model, federation.inputs[part], setting.device)
    ]
    queries, chosen = (torch.cat(side) for side in zip(*found, strict=True))
    means = KMeans(min(len(model.selector.keys), len(queries)), n_init=1, random_state=0)
    kinds = torch.from_numpy(means.fit_predict(queries.double().numpy())).long()
    return {"congruence": fp.metrics.congruence(chosen, kinds, federation.labels[used].cpu())}


def bytes_kept(trial: Any, method: fp.Method, now: fp.Round) -> dict[str, float]:
    """Measure the bytes that a batch of the first client keeps for its backward pass.

    Parameters do not count, and their copies in bfloat16 do.
    """
    data = trial.federation.data(trial.setting, 0, now.server_round)
    inputs, labels = next(data.batches())
    model, held = now.model(method, data), WeakValueDictionary[int, Tensor]()
    parameters = (*model.parameters(), *model.trunk.whole.model.parameters())  # frozen ones, too
    fixed = {parameter.untyped_storage().data_ptr() for parameter in parameters}

    def pack(tensor: Tensor) -> Tensor:
        kept = tensor.detach()  # an output with its node would keep itself
        held[id(kept)] = kept
        return kept

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = F.cross_entropy(model(inputs), labels)
    storages = [tensor.untyped_storage() for tensor in held.values()]  # those of the graph only
    sizes = {part.data_ptr(): part.nbytes() for part in storages if part.data_ptr() not in fixed}
    return {"kept": sum(sizes.values())} if loss.requires_grad else {}


MECHANISMS: Mapping[str, Measured] = {
    **dict.fromkeys(("fedl2g_l", "fedl2g_f"), guides),
    **dict.fromkeys(("fedotp", "fedotp_classical"), violation),
    **dict.fromkeys(("fedhpl", "fedhpl_p", "fedhpl_h"), distillation),
    "sgpt": selections,
}
"""Measure of the mechanism of each paper's method."""


def mechanism(row: Any) -> Measured | None:
    """Return the measure of the mechanism of a row after the last round."""
    found = MECHANISMS.get(str(row.method))
    return None if found is None else last(found)
