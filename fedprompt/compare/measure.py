"""Accuracy, bytes and gradient passes of a method on a trial, and which test images were right."""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import fedprompt as fp
from fedprompt.compare import ranks
from fedprompt.compare.intervals import contributions
from fedprompt.compare.records import Record
from fedprompt.compare.trials import CompareError, Trial
from fedprompt.interfaces import Method, Round
from fedprompt.methods import HeldOut, counted_passes, evaluate

OWN_STEPS = 10  # of a newcomer, after every method
PAUSE = 60.0
"""Seconds between two checkpoints within a run."""
PAIRS = {"own": "own_balanced", "full": "balanced"}
"""Names of accuracies and of their balanced ones; of others, the name with ``_balanced``."""

Bits = dict[str, np.ndarray]
"""Which test images a model predicts right, ``right`` (clients, images), with one line if all
clients have one model; ``labels``, ``places`` and ``weights`` (clients, images) in the clients' own
tests. The same of further tests, with their name before a dot."""


class Finished(NamedTuple):
    """A finished run: its figures, its bits, and the last round."""

    figures: Record
    bits: Bits
    now: Round | None


def run(
    method: Method,
    trial: Trial,
    *,
    shared: bool,
    progress: Callable[[float], object] = lambda share: None,
    checkpoint: Path | None = None,
) -> Finished:
    """Run all rounds of a method, and measure the last predictions.

    Args:
        method: Method.
        trial: Trial, whose further figures are averaged over the rounds that have them.
        shared: Whether all clients predict with one model.
        progress: Function that is called with each further share of the run.
        checkpoint: Folder of the state of a run that is not finished, or None.
    """
    group = dist.group.WORLD if dist.is_initialized() else None
    where = progress, checkpoint
    with torch.device(trial.setting.device):
        now, sent, passes, listed = _rounds(method, trial, group, *where)
    common: dict[str, Any] = {"clients": trial.tested, "newcomers": (), "shared": shared}
    common |= {"group": group}
    with counted_passes() as counts:
        found = evaluate(method, trial.federation, now, trial.tests, **common)
    passes += Counter(clients=counts.total(), all=counts.total())
    new = [client for client in trial.newcomers if trial.has_tests(client)]
    options: dict[str, Any] = {"clients": (), "newcomers": new, "steps": OWN_STEPS}
    options |= {"group": group}
    received = evaluate(method, trial.federation, now, trial.tests, **options)
    bits = {**_tested(trial), "right": _right(found.predicted, trial.tests.labels, shared)}
    for name, (inputs, labels, class_names, _) in trial.further.items():
        more = {**common, "class_names": class_names}
        other = evaluate(method, trial.federation, now, HeldOut(inputs, labels), **more)
        bits[f"{name}.labels"] = labels.numpy()
        bits[f"{name}.right"] = _right(other.predicted, labels, shared)
    record = {**found, **received, **accuracies(bits), **uses(trial)}
    record["clients"] = _by_name(trial, bits, {**found.clients, **received.clients})
    record["predicted"] = max(len(torch.unique(each)) for each in found.predicted.values())
    turns = trial.setting.rounds * (trial.setting.cohort_size or len(trial.setting.clients))
    record |= _costs(sent, passes, turns)
    names = dict.fromkeys(name for each in listed for name in each)
    for name in names:
        record[name] = float(np.mean([each[name] for each in listed if name in each]))
    return Finished(record, bits, now)


def _rounds(
    method: Method,
    trial: Trial,
    group: Any,
    progress: Callable[[float], object],
    checkpoint: Path | None,
) -> tuple[Round, Counter[str], Counter[str], list[Mapping[str, float]]]:
    """Run the rounds; return the last one, the bytes sent, the passes, and further figures."""
    ledger, passes, figures = fp.Ledger(), Counter[str](), trial.figures
    counted = fp.rounds.counted(_with_passes(method, passes), ledger)
    start, sent, listed = None, Counter[str](), list[Mapping[str, float]]()
    if checkpoint is not None and (known := fp.load_checkpoint(checkpoint, default=None)):
        start, sent = known["now"], Counter(known["sent"])
        passes.update(known["passes"])
        listed += known["figures"]
        if "measured" in known:
            cast(Any, figures).load_state_dict(known["measured"])
        progress((start.server_round + 1) / trial.setting.rounds)
    saved, now = time.monotonic(), start
    rounds = fp.run_rounds(counted, trial.federation, start=start, group=group, share=True)
    while True:
        with counted_passes() as counts:
            now, before = next(rounds, None), now
        passes["all"] += counts.total()
        if now is None:
            assert before is not None  # a setting has at least one round
            sent.update(_sent(ledger))
            return before, sent, passes, listed
        if figures is not None and ranks.rank() == 0:
            listed.append(dict(figures(trial, method, now)))
        progress(1 / trial.setting.rounds)
        if checkpoint is not None and group is None and time.monotonic() > saved + PAUSE:
            state = {"now": now, "passes": dict(passes), "figures": listed}
            fp.save_checkpoint(state | _earlier(sent, ledger, figures), checkpoint)
            saved = time.monotonic()


def _earlier(sent: Counter[str], ledger: fp.Ledger, figures: Any) -> dict[str, Any]:
    """Return the bytes sent so far, and what figures keep of earlier rounds."""
    total = sent.copy()
    total.update(_sent(ledger))
    kept = {"measured": figures.state_dict()} if hasattr(figures, "state_dict") else {}
    return {"sent": dict(total), **kept}


def _sent(ledger: fp.Ledger) -> dict[str, int]:
    return {name: ledger.total(direction=name) for name in ("up", "down")}


def _with_passes(method: Method, passes: Counter[str]) -> Method:
    """Count the backward passes of the clients of a method."""

    def client(data: Any, answer: Any, state: Any) -> Any:
        with counted_passes() as counts:
            result = method.client(data, answer, state)
        passes["clients"] += counts.total()
        return result

    return method._replace(client=client)


def constant(trial: Trial) -> Finished:
    """Predict the most frequent class: of a client on its own tests, of all clients on all tests.

    Further tests of classes or domains without training inputs have 1 / K.
    """
    setting, owned = trial.setting, trial.federation.shards
    count, labels = setting.num_classes, trial.federation.labels
    counts = torch.stack([labels[owned[c]].bincount(minlength=count) for c in setting.clients])
    tested = torch.stack([labels[owned[c]].bincount(minlength=count) for c in trial.tested])
    bits = _tested(trial)
    guess = fp.metrics.most_frequent_class
    bits["own.right"] = guess(tested, trial.tests.labels).numpy()
    bits["right"] = guess(counts.sum(0)[None], trial.tests.labels).numpy()
    for name, (_, known, names, trained) in trial.further.items():
        bits[f"{name}.labels"] = known.numpy()
        chance = torch.full((1, len(known)), 1 / (count if names is None else len(names)))
        right = guess(counts.sum(0)[None], known) if trained else chance
        bits[f"{name}.right"] = right.numpy()
    record = {**accuracies(bits), **uses(trial), "predicted": 1, "backward": 0.0}
    record["clients"] = _by_name(trial, bits, {})
    return Finished(record, bits, None)


def _tested(trial: Trial) -> Bits:
    """Return labels and places of the tests, and their weights in the clients' own tests."""
    tests, clients = trial.tests, trial.tested
    labels = tests.labels.cpu()
    if tests.own is not None:
        weights = torch.zeros(len(clients), len(labels), dtype=torch.bool)
        for line, client in enumerate(clients):
            weights[line, torch.as_tensor(tests.own[client]).cpu()] = True
    else:
        cells = labels if tests.cells is None else tests.cells.cpu()
        mixes: Any = tests.mixes
        if not isinstance(mixes, Mapping):
            mixes = {
                c: trial.federation.data(trial.setting, c, 0).class_counts.cpu() for c in clients
            }
        table = torch.stack([mixes[client].double() for client in clients])
        weights = (table / cells.bincount(minlength=table.shape[1]).clamp(min=1))[:, cells]
        if none := [c for c, sum_ in zip(clients, weights.sum(1), strict=True) if not sum_]:
            rule = "have a class, or a cell, of each client"
            raise CompareError(f"The tests must {rule}; got none of clients {none}.")
    return {"labels": labels.numpy(), "places": trial.places.numpy(), "weights": weights.numpy()}


def _right(predicted: Mapping[int, Tensor], labels: Tensor, shared: bool) -> np.ndarray:
    rows = [predicted[client] == labels.cpu() for client in predicted]
    return torch.stack(rows[: 1 if shared else None]).numpy()


def sides(bits: Bits, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return what is right, weights, labels and places of the tests of a figure, by clients."""
    if name == "own":
        right, weights = bits.get("own.right", bits["right"]), bits["weights"]
        right = np.broadcast_to(right, weights.shape)
        return right, weights, bits["labels"], bits["places"]
    if name == "full":
        right, labels, places = bits["right"], bits["labels"], bits["places"]
    else:
        right, labels = bits[f"{name}.right"], bits[f"{name}.labels"]
        places = np.arange(len(labels))
    return right, np.ones(right.shape), labels, places


def accuracies(bits: Bits) -> dict[str, float]:
    """Return each accuracy and balanced accuracy, and H of base and new classes."""
    found = dict[str, float]()
    further = [name.partition(".")[0] for name in bits if name.endswith(".labels")]
    for name in ("own", "full", *further):
        right, weights, labels, _ = sides(bits, name)
        found[name] = float(contributions(right, weights)[0])
        balanced = PAIRS.get(name, f"{name}_balanced")
        found[balanced] = float(contributions(right, weights, labels)[0])
    right, weights, *_ = sides(bits, "own")
    each = (right * weights).sum(1) / weights.sum(1)
    found["worst"] = float(each.min())
    if "new" in further:
        for end, base in {"": "full", "_balanced": "balanced"}.items():
            found[f"h{end}"] = fp.metrics.harmonic_mean(found[base], found[f"new{end}"])
    return found


def _by_name(
    trial: Trial, bits: Bits, figures: Mapping[int, Mapping[str, float]]
) -> dict[str, Record]:
    """Return the accuracies of each client under its name."""
    kept = ("full", "balanced", "own", "received", "after")
    found = {
        trial.names[client]: {name: each[name] for name in kept if name in each}
        for client, each in figures.items()
    }
    right, weights, labels, _ = sides(bits, "own")
    for line, client in enumerate(trial.tested):
        one = right[line : line + 1], weights[line : line + 1]
        own = {"own": float(contributions(*one)[0])}
        own["own_balanced"] = float(contributions(*one, labels)[0])
        found.setdefault(trial.names[client], {}).update(own)
    return found


def uses(trial: Trial) -> dict[str, list[float]]:
    """Return how often an image of the smallest and of the largest client is used on average."""
    setting, owned = trial.setting, trial.federation.shards
    sizes = sorted(len(owned[client]) for client in setting.clients)
    share = (setting.cohort_size or len(sizes)) / len(sizes)
    batches = setting.steps
    rounds = setting.rounds * share
    ends = sizes[0], sizes[-1]
    if batches is None:
        batches = 1 if setting.epochs is None else setting.epochs
        whole = setting.batch_size if setting.drop_last else 1
        each = [(size // whole * whole or size) / size for size in ends]
    else:
        each = [min(setting.batch_size, size) / size for size in ends]
    return {"uses": [rounds * batches * share for share in each]}


def _costs(sent: Counter[str], passes: Counter[str], turns: int) -> dict[str, float]:
    """Return the bytes and the backward passes of one client in one round."""
    here = {f"bytes_{name}": count for name, count in sent.items()}
    total = ranks.summed(here | {"backward": passes["clients"]})
    total["backward"] += passes["all"] - passes["clients"]  # each rank runs the server
    return {name: count / turns for name, count in total.items()}


def packed(bits: Bits) -> Bits:
    """Return arrays of which those of flags have eight in a byte, with their shapes."""
    flags = {name: array for name, array in bits.items() if array.dtype == bool}
    shapes = {f"{name}/shape": np.array(array.shape) for name, array in flags.items()}
    return {**bits, **{name: np.packbits(array) for name, array in flags.items()}, **shapes}


def unpacked(found: Mapping[str, np.ndarray]) -> Bits:
    """Return the arrays of :func:`packed`."""
    bits = {name: found[name] for name in found if not name.endswith("/shape")}
    for name in [name for name in found if name.endswith("/shape")]:
        shape, key = found[name], name.removesuffix("/shape")
        flat = np.unpackbits(bits[key], count=int(np.prod(shape))).astype(bool)
        bits[key] = flat.reshape(shape)
    return bits
