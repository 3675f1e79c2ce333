"""Clients of unlike strength: a third of them each with a small, a middle and a large size."""

from functools import partial
from typing import Any

import torch

import fedprompt as fp
from fedprompt.compare import Trial
from fedprompt.methods import METHODS
from fedprompt.methods.sizes import low_rank_pairs
from studies import digits, photos
from studies.core import HEAD_RATE, Machine, Row, study, trial
from studies.figures import Measured, last
from studies.tuning import HEAD

CLIENTS = {"digits": 18, "solar": 12}
RANKS, DEPTHS = (1, 3, 8), (1, 2, 3)
"""Sizes of thirds of the clients. Their means, 4 and 2, have as many bytes."""
DROPPED = "without the small clients"


def rows(partition: str) -> list[Row]:
    """Return the rows of LoRA and of deep prompts."""

    def row(title: str, method: str, sizes: Any = None, **values: Any) -> Row:
        rate = 0.01 if method == "fedvpt_d" else 0.003
        known = {} if sizes is None else {"sizes": sizes}
        instead = partial(dropped, method) if title.endswith(DROPPED) else None
        values = {"learning_rate": rate, HEAD_RATE: HEAD, **values, **known}
        return Row(title, method, values, instead=instead)

    def thirds(of: tuple[int, int, int]) -> dict[str, int]:
        return {str(client): of[client % 3] for client in range(CLIENTS[partition])}

    own, depths, rank = thirds(RANKS), thirds(DEPTHS), max(RANKS)
    names = {"fedlora": "LoRA", "hetlora": "HetLoRA", "flexlora": "FlexLoRA", "flora": "FLoRA"}
    names |= {"flexlora_exact": "FlexLoRA (exact)"}
    return [
        *(row(f"LoRA, all of rank {each}", "fedlora", rank=each) for each in (1, 4, 8)),
        row(f"LoRA, {DROPPED}", "fedlora", own, rank=rank),
        *(row(f"{names[each]}, unlike ranks", each, own, rank=rank) for each in names),
        row("FedEx-LoRA, all of rank 4", "fedex_lora", rank=4),
        *(row(f"Prompts, all in {n} of 3 layers", "fedvpt_d", _all(partition, n)) for n in DEPTHS),
        row(f"Prompts, {DROPPED}", "fedvpt_d", depths),
        row("Prompts, unlike numbers of layers", "fedvpt_d", depths),
    ]


def _all(partition: str, depth: int) -> dict[str, int]:
    return {str(client): depth for client in range(CLIENTS[partition])}


def dropped(name: str, setting: Any, **values: Any) -> fp.Method:
    """Make a method whose small clients send nothing; they predict with the model of all sizes."""
    sizes = {client: size for client, size in values["sizes"].items() if int(client) % 3}
    made = METHODS[name].make(setting, **{**values, "sizes": sizes})

    def client(data: Any, answer: Any, state: Any) -> Any:
        return made.client(data, answer, state) if data.id % 3 else (None, state)

    return made._replace(client=client)


def make(partition: str, row: Row, *, seed: int, machine: Machine) -> Trial:
    """Divide images over clients of one domain each; sizes take turns within a domain."""
    if partition == "solar":
        return photos.make(partition, "sizes", row, seed=seed, machine=machine)
    train, public, test = digits.digits(False, True, seed, "")
    shards = {"of": "domains", "count": CLIENTS[partition]}
    budget = {"rounds": 12, "steps": 8, "cohort_size": 6, "batch_size": 32, "public": public}
    budget["places"] = torch.arange(len(test.labels))  # the same test digits for all seeds
    budget |= {"make_optimizer": partial(torch.optim.AdamW, weight_decay=1e-3)}
    return trial(partial(digits.vits, "S"), train, test, shards, seed=seed, **budget)


def beyond(trial: Trial, method: fp.Method, now: fp.Round) -> dict[str, float]:
    """Measure the share of the mean change of weights that is beyond the smallest rank.

    It is of squared singular values, as the mean over layers.
    """
    large = 2  # a client of the largest size
    start = fp.Round(-1, method.server.state, {})
    before, after = (
        fp.snapshot(each.model(method, trial.federation, large)) for each in (start, now)
    )
    shares = []
    for weight, (b, a) in low_rank_pairs(after).items():
        change = after[b] @ after[a] + (after[weight] - before[weight] if weight in after else 0)
        energy = torch.linalg.svdvals(change).square()
        shares.append(1 - energy[: RANKS[0]].sum() / energy.sum())
    return {"beyond": float(torch.stack(shares).mean())}


def figures(partition: str, row: Row) -> Measured | None:
    """Return the measure of a row of LoRA."""
    return None if row.method == "fedvpt_d" else last(beyond)


STUDIES = {
    "sizes": study(
        "sizes",
        rows=rows,
        make=make,
        figures=figures,
        networks=lambda partition, row: [photos.RANDOM, photos.DINO] * (partition == "solar"),
    )
}
