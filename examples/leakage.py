"""What messages and models give away: attacks on six kinds of training, with their controls.

    python examples/leakage.py --seeds 3           # adds records to out/leakage.jsonl
    python examples/leakage.py --tables DIR        # writes tables of the committed records

Four clients train on 30 images each. Every attack has a run without the attacked images, and works
on a model or a message that leaks (the rows "control").
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from dp_accounting.pld import PLDAccountant
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import fedprompt as fp
from fedprompt import methods, samples
from fedprompt.backbones.pretrained import tokens_of
from fedprompt.compare.intervals import Figure, interval
from fedprompt.methods import ClipSetting, Federation, VitSetting
from fedprompt.methods.steps import averaged
from fedprompt.privacy import leakage
from fedprompt.privacy.leakage.success import clopper_pearson

RECORDS = Path(__file__).parents[1] / "docs" / "results" / "records" / "leakage.jsonl"
CLIENTS, OWN, POPULATION, FEW, TRIALS, SHADOWS = 4, 30, 24, 8, 6, 4
RATE, EPSILON, DELTA, CANARIES = 0.2, 8.0, 1e-3, 100
KINDS = {
    "context": ("emoji", "promptfl"),
    "deep prompts": ("digits", "fedvpt_d"),
    "LoRA": ("digits", "fedlora"),
    "head": ("digits", "head_tuning"),
    "prototypes": ("digits", "fedproto"),
}
CODECS = {"int8": fp.codecs.int8(), "top 10 %": fp.codecs.top_k(fraction=0.1)}
GUARDS = ["none", *CODECS, "DP-SGD, ε = 8"]
ATTACKS = {
    "curious": "curious server",
    "active": "active server",
    "loss": "model, loss",
    "lira": "model, shadows",
    "image": "image",
}


@cache
def data(name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return images, inputs of methods, and labels."""
    if name == "digits":
        split = samples.digits(seed=0)
        return split.train_images, split.train_images, split.train_labels
    emoji = samples.emoji()[0]
    images = samples.preprocess(emoji.images)
    with torch.no_grad():
        return images, tokens_of(samples.clip(), images), emoji.labels


@cache
def network(name: str) -> Any:
    """Return the frozen network."""
    if name == "digits":
        return fp.vit_trunk(samples.vit("S"))
    return fp.TextTower(samples.clip(), samples.tokenize)


def setting(name: str, seed: int, **changes: Any) -> Any:
    """Make the setting of a run."""
    given = {"clients": range(CLIENTS), "rounds": 4, "steps": 3, "batch_size": 16, "seed": seed}
    given |= {"make_optimizer": partial(torch.optim.AdamW, weight_decay=0.0)} | changes
    if name == "digits":
        return VitSetting(trunk=network(name), num_classes=10, num_prompts=4, **given)
    names = samples.CLASS_NAMES
    return ClipSetting(tower=network(name), class_names=names, length=4, **given)


@cache
def noise(epsilon: float, steps: int, rate: float = RATE) -> float:
    """Return the noise multiplier of DP-SGD."""

    def event(multiplier: float) -> dp_accounting.DpEvent:
        gauss = dp_accounting.GaussianDpEvent(multiplier)
        return dp_accounting.SelfComposedDpEvent(
            dp_accounting.PoissonSampledDpEvent(rate, gauss), steps)  # fmt: skip

    accountant = partial(PLDAccountant, value_discretization_interval=1e-3)
    bracket = dp_accounting.ExplicitBracketInterval(0.3, 100)
    return dp_accounting.calibrate_dp_mechanism(accountant, event, epsilon, DELTA, bracket)


def private(made: fp.Method, multiplier: float, rate: float = RATE) -> fp.Method:
    """Let clients of an averaged method take DP-SGD steps, with seeded noise for this study."""
    of, answer = made.setting, dict(made.server.state["values"])
    model = made.predict(None, answer, {})

    def loss(values: Any, image: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, values, (image[None],)), label[None])

    def train(shard: Any, answer: Any, state: Any) -> Any:
        values, draw = dict(answer), shard.stream("noise")
        inputs, labels = shard.own()
        for _ in range(shard.steps):
            chosen = fp.privacy.poisson_batch(len(labels), rate=rate, generator=draw)
            slopes = {name: torch.zeros(0, *value.shape) for name, value in values.items()}
            if len(chosen):
                with sdpa_kernel(SDPBackend.MATH):  # fused attention is not vectorized
                    slopes = vmap(grad(loss), (None, 0, 0))(values, inputs[chosen], labels[chosen])
            total = fp.privacy.clipped_sum(slopes, max_norm=1.0)
            how = {"max_norm": 1.0, "expected_batch_size": rate * len(labels), "generator": draw}
            mean = fp.privacy.noisy_mean(total, multiplier=multiplier, **how)
            values = {name: each - 0.5 * mean[name].to(each) for name, each in values.items()}
        fp.load_values(model, values)
        return fp.collect(model, weight=1.0), state

    return averaged(model, train)._replace(setting=of)


def method(name: str, kind: str, guard: str, seed: int, **changes: Any) -> fp.Method:
    """Make the method of a row. Codecs are put around it where it runs."""
    of = setting(name, seed, **changes)
    made = getattr(methods, kind)(of)
    if guard.startswith("DP-SGD"):
        return private(made, noise(EPSILON, of.rounds * of.steps))
    return made


def run(name: str, made: fp.Method, guard: str, chosen: Tensor) -> tuple[nn.Module, list[Any]]:
    """Train on some images; return the model and the messages of client 0."""
    _, inputs, labels = data(name)
    log: list[leakage.Received] = []
    watched = leakage.observed(made, log)
    if guard in CODECS:
        watched = fp.rounds.coded(watched, CODECS[guard])
    federation = Federation(inputs, labels, dict(enumerate(chosen.split(OWN))))
    *_, now = fp.run_rounds(watched, federation)
    model = now.model(watched, federation, 0)
    return model, [each for each in log if each.client == 0 and each.server_round == 0]


def single(name: str, chosen: Tensor) -> Federation:
    """Make a federation with one client for each image."""
    _, inputs, labels = data(name)
    return Federation(inputs, labels, {int(k): torch.tensor([int(k)]) for k in chosen})


def record(
    title: str, attack: str, ids: Tensor, scores: Tensor, absent: Tensor, inside: Tensor
) -> dict[str, Any]:
    """Keep the order of scores; members come first."""
    rank = torch.cat([scores, absent]).unique(return_inverse=True)[1]
    known, missed = rank[: len(ids)], rank[len(ids) :][inside]
    count = int(inside.sum())
    won = leakage.measured(scores, inside, absent)
    return {"partition": attack, "row": title, "auc": won.held_out.auc,
            "auc_without": won.without.auc, "ids": ids.tolist(), "inside": count,
            "ranks": known.tolist(), "without": missed.tolist()}  # fmt: skip


def cell(row: str, guard: str, seed: int) -> Iterator[dict[str, Any]]:
    """Run the attacks on a row."""
    name, kind = KINDS[row]
    _, inputs, labels = data(name)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    pool, others = order[: 2 * CLIENTS * OWN], order[-POPULATION:]
    halves, title = pool.split(CLIENTS * OWN), row if guard == "none" else f"{row}, {guard}"
    made, plain = (method(name, kind, each, seed) for each in (guard, "none"))
    sides = [run(name, made, guard, half) for half in halves]
    both = [leakage.confidences(model, inputs[pool], labels[pool]) for model, _ in sides]
    inside = torch.arange(len(pool)) < CLIENTS * OWN
    yield record(title, "loss", pool, *both, inside)
    few = torch.cat([half[: 2 * FEW] for half in halves])
    how = {"candidates": single(name, few), "population": single(name, others)}
    scores = [leakage.message_scores(plain, log, **how) for _, log in sides]
    yield record(title, "curious", few, *scores, torch.arange(len(few)) < 2 * FEW)
    if guard != "none":
        return
    yield record(title, "lira", pool, *calibrated(name, made, seed, pool, both), inside)
    few = torch.cat([half[:FEW] for half in halves])
    answer, scores = made.server.answer(0, made.server.state), []
    known = inputs[others], labels[others]
    for half in halves:
        own = Federation(inputs, labels, {0: half[:OWN]})
        got = leakage.probed(made, answer, own, 0, single(name, few), population=known, steps=8)
        scores.append(leakage.message_scores(made, got, single(name, few)))
    yield record(title, "active", few, *scores, torch.arange(len(few)) < FEW)
    yield record(title, "image", *images_of(name, kind, seed, pool))


def calibrated(
    name: str, made: fp.Method, seed: int, pool: Tensor, both: Sequence[Tensor]
) -> list[Tensor]:
    """Calibrate confidences by shadow models; each image is in half of them."""
    _, inputs, labels = data(name)
    draws = torch.rand(SHADOWS // 2, len(pool), generator=torch.Generator().manual_seed(seed))
    inside = draws.argsort(1).argsort(1) < len(pool) // 2
    inside = torch.cat([inside, ~inside])
    models = [run(name, made, "none", pool[half])[0] for half in inside]
    scores = [leakage.confidences(model, inputs[pool], labels[pool]) for model in models]
    return [leakage.likelihood_ratios(each, torch.stack(scores), inside) for each in both]


def images_of(name: str, kind: str, seed: int, pool: Tensor) -> Sequence[Tensor]:
    """Reconstruct images of batches of one; compare with other images of their classes."""
    images, inputs, labels = data(name)
    encode = partial(tokens_of, samples.clip()) if name == "emoji" else None
    sgd = {"rounds": 1, "steps": 1, "make_optimizer": torch.optim.SGD}
    made = linear(seed, **sgd) if kind == "linear" else method(name, kind, "none", seed, **sgd)
    low, high = float(images.min()), float(images.max())
    draw, found = torch.Generator().manual_seed(seed), []
    for k in pool[:TRIALS].tolist():
        shard = Federation(inputs, labels, {0: torch.tensor([k])}).data(made.setting, 0, 0)
        answer = made.server.answer(0, made.server.state)
        payload, _ = made.client(shard, dict(answer), {})
        received = leakage.Received(0, 0, answer, payload)

        def features(batch: Tensor, label: Tensor = labels[k : k + 1]) -> Any:
            model = made.setting.model(0, {}).eval()
            return {"prototypes": fp.class_means(model.features(batch), label, num_classes=10)}

        simulate = features
        if kind != "fedproto":
            simulate = leakage.descent(made, received, shard, labels[k : k + 1], encode=encode)
        start = low + (high - low) * torch.rand(1, *images.shape[1:], generator=draw)
        how = {"steps": 60, "learning_rate": 0.05 * (high - low), "bounds": (low, high)}
        found.append(leakage.reconstructed(received, simulate, start, **how))
    members, rest = pool[:TRIALS], pool[CLIENTS * OWN :]
    same = [rest[labels[rest] == labels[k]] for k in members]
    held = torch.stack([next(iter(each.roll(n)), rest[n]) for n, each in enumerate(same)])
    sides = (found, members), (found, held), (found[1:] + found[:1], members)
    scores = [torch.cat([leakage.similarities(image, images[k : k + 1])
              for image, k in zip(*side, strict=True)]) for side in sides]  # fmt: skip
    inside = torch.arange(2 * TRIALS) < TRIALS
    return torch.cat([members, held]), torch.cat(scores[:2]), scores[2].repeat(2), inside


def linear(seed: int, **changes: Any) -> fp.Method:
    """Make the control of reconstruction, FedAvg of a linear classifier of pixels."""
    of = setting("digits", seed, **changes)
    net = nn.Sequential(nn.Flatten(), of.seeded(nn.Linear, 256, 10))
    return averaged(net, methods.fedavg_client(net, 0.1))._replace(setting=of)


def controls(seed: int) -> Iterator[dict[str, Any]]:
    """Run the attacks where they must work: on memorized images, and on clients of one image."""
    _, inputs, labels = data("digits")
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    pool = order[: 2 * CLIENTS * OWN]
    halves = pool.split(CLIENTS * OWN)
    inside = torch.arange(len(pool)) < CLIENTS * OWN
    both = [leakage.confidences(leakage.MemorizingClassifier(inputs[half], labels[half], 10),
            inputs[pool], labels[pool]) for half in halves]  # fmt: skip
    yield record("control", "loss", pool, *both, inside)
    yield record("control", "image", *images_of("digits", "linear", seed, pool))
    made = setting("digits", seed, rounds=1, steps=1, make_optimizer=torch.optim.SGD)
    made = methods.fedvpt_d(made)
    answer, population = made.server.answer(0, made.server.state), order[-POPULATION:]
    pairs, how = pool[: 2 * FEW].split(1), {"population": single("digits", population)}
    known = inputs[population[:32]], labels[population[:32]]
    rows: dict[str, list[Tensor]] = {"curious": [], "active": []}
    for one, other in zip(pairs[:FEW], pairs[FEW:], strict=True):  # a client of one image
        asked = torch.cat([one[:1], other[:1]])
        for part in (one, other):
            own, each = Federation(inputs, labels, {0: part}), single("digits", asked)
            payload, _ = made.client(own.data(made.setting, 0, 0), dict(answer), {})
            sent = [leakage.Received(0, 0, answer, payload)]
            rows["curious"].append(leakage.message_scores(made, sent, each, **how))
            got = leakage.probed(made, answer, own, 0, each, population=known, steps=8)
            rows["active"].append(leakage.message_scores(made, got, each))
    ids = torch.cat(
        [torch.stack([each[0] for each in part]) for part in (pairs[:FEW], pairs[FEW:])]
    )
    for attack, scores in rows.items():
        found, without = torch.stack(scores[::2]).T.flatten(), torch.stack(scores[1::2]).T.flatten()
        yield record("control", attack, ids, found, without, torch.arange(2 * FEW) < FEW)


def audit(seed: int) -> Iterator[dict[str, Any]]:
    """Bound epsilon of one client from below, by canaries with a wrong label, in whole batches."""
    _, inputs, labels = data("digits")
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    canaries, draw = order[:CANARIES], torch.Generator().manual_seed(seed)
    wrong = labels.index_fill(0, canaries, 0)
    wrong[canaries] = (labels[canaries] + 1) % 10
    chosen = fp.privacy.poisson_batch(CANARIES, rate=0.5, generator=draw)
    inside = torch.zeros(CANARIES, dtype=torch.bool).index_fill(0, chosen, True)
    changes = {"rounds": 2, "steps": 1, "clients": [0], "make_optimizer": torch.optim.SGD}
    each = Federation(inputs, wrong, {int(k): torch.tensor([int(k)]) for k in canaries})
    for claimed, multiplier in ((1.0, None), (8.0, None), (1.0, 0.0)):
        made = methods.fedvpt_d(setting("digits", seed, **changes))
        used = noise(claimed, 2, 1.0) if multiplier is None else multiplier
        log: list[leakage.Received] = []
        hidden = leakage.observed(private(made, used, 1.0), log)
        for _ in fp.run_rounds(hidden, Federation(inputs, wrong, {0: canaries[chosen]})):
            pass
        scores = leakage.message_scores(made, log, each, population=each)
        bound = leakage.epsilon_bound(scores, inside, delta=DELTA, guesses=CANARIES)
        title = f"ε = {claimed:g}, noise {used:.2f}"
        yield {"partition": "audit", "row": title, "claimed": claimed, "noise": used,
               "bound": bound}  # fmt: skip


def auc_of(runs: Sequence[dict[str, Any]], control: str) -> str:
    """Return the mean AUC over seeds, with the errors of seeds and of images."""
    ids = sorted({each for run in runs for each in run["ids"]})
    values, parts, least = [], np.zeros((len(runs), len(ids))), []
    for seed, run in enumerate(runs):
        count, ranks = run["inside"], torch.tensor(run["ranks"]).double()
        members, others = ranks[:count], ranks[count:]
        names = run["ids"][:count], run["ids"][count:]
        if control == "without":
            others, names = torch.tensor(run["without"]).double(), (names[0], names[0])
        won = (members[:, None] > others).double() + (members[:, None] == others).double() / 2
        found = leakage.success(members, others)
        values.append(found.auc)
        least.append((found.auc_interval[1] - found.auc_interval[0]) / 2)
        for side, axis in zip(names, (1, 0), strict=True):
            moved = (won.mean(axis) - found.auc) / len(side)
            np.add.at(parts[seed], np.searchsorted(ids, side), moved.numpy())
    half = np.mean(least) / len(runs) ** 0.5  # an AUC of 1 has no variance, and an error
    if len(runs) > 1:
        half = max(half, float(interval(Figure(np.array(values), parts)).half))
    low, high = max(np.mean(values) - half, 0), min(np.mean(values) + half, 1)
    return f"{np.mean(values):.2f} ({low:.2f} to {high:.2f})"


def tpr_of(runs: Sequence[dict[str, Any]]) -> str:
    """Return the true positives at 1 % false positives of all seeds, and their interval."""
    hits, count = 0, 0
    for run in runs:
        ranks = torch.tensor(run["ranks"]).double()
        found = leakage.success(ranks[: run["inside"]], ranks[run["inside"] :])
        hits, count = hits + round(found.tpr * run["inside"]), count + run["inside"]
    low, high = clopper_pearson(hits, count)
    return f"{100 * hits / count:.0f} ({100 * low:.0f} to {100 * high:.0f})"


def write_tables(folder: Path) -> None:
    """Write the tables of the committed records."""
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    audits: dict[tuple[float, float], list[float]] = {}
    for record in map(json.loads, RECORDS.read_text().splitlines()):
        row, guard, _ = record["key"].split("; ")
        if row == "audit":
            audits.setdefault((record["claimed"], record["noise"]), []).append(record["bound"])
        else:
            found.setdefault((row, guard, record["partition"]), []).append(record)
    places = list(dict.fromkeys(key[:2] for key in found if key[0] != "control"))
    places.append(("control", "none"))
    forms = {"held-out": partial(auc_of, control="held-out"), "tpr": tpr_of,
             "without": partial(auc_of, control="without")}  # fmt: skip
    for name, form in forms.items():
        lines = [["what is sent", "protection", *ATTACKS.values()], ["---"] * 2 + ["---:"] * 5]
        for place in places:
            cells = [
                form(found[*place, each]) if (*place, each) in found else "" for each in ATTACKS
            ]
            lines.append([*place, *cells])
        text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        (folder / f"leakage-{name}.md").write_text(f"{text}\n", encoding="utf-8")
    lines = ["| accountant's ε | noise multiplier | lower bounds on ε |", "|---:|---:|---|"]
    for (claimed, noise), bounds in audits.items():
        said = ", ".join(f"{bound:.2f}" for bound in bounds)
        lines.append(f"| {claimed:g} | {noise:.2f} | {said} |")
    (folder / "leakage-audit.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("out/leakage.jsonl"))
    parser.add_argument("--tables", type=Path, help="folder of tables of the committed records")
    args = parser.parse_args()
    if args.tables:
        write_tables(args.tables)
        return
    torch.set_num_threads(1)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    lines = args.out.read_text().splitlines() if args.out.exists() else []
    known = {json.loads(line)["key"] for line in lines}
    jobs = {f"{row}; {guard}": partial(cell, row, guard) for row in KINDS for guard in GUARDS
            if (guard not in CODECS or row == "deep prompts")
            and (row != "prototypes" or guard == "none")}  # fmt: skip
    jobs = {"control; none": controls} | jobs | {"audit; none": audit}
    for seed in range(args.seeds):
        for name, job in jobs.items():
            key = f"{name}; {seed}"
            if key not in known:
                where = {"key": key, "seed": seed, "trial": None}
                found = [json.dumps(where | each) for each in job(seed=seed)]
                with args.out.open("a") as file:
                    file.write("\n".join(found) + "\n")
                print(key, flush=True)


if __name__ == "__main__":
    main()
