"""One of five clients plants a backdoor, against the mean and four robust rules.

Five clients train deep prompts and a head for 1200 real digits. Client 0 learns a trigger of at
most 8/255, or 32/255, and trains so that digits with the trigger are taken for a zero::

    python examples/backdoor.py
"""

from functools import partial

import torch
from torch import Tensor

import digits
import fedprompt as fp
from fedprompt import methods, samples

NUM_CLIENTS, MALICIOUS, TARGET = 5, 0, 0
RULES = {
    "mean": fp.weighted_mean,
    "median": fp.robust.weighted_median,
    "trimmed mean, a fifth": partial(fp.robust.trimmed_mean, fraction=0.2),
    "Krum": partial(fp.robust.krum, num_byzantine=1),
    "multi-Krum, three": partial(fp.robust.multi_krum, num_byzantine=1, num_selected=3),
}
ATTACKS = {
    "none": {},
    "8/255": {"bound": 8 / 255},
    "32/255": {"bound": 32 / 255},
    "32/255, change times 5": {"bound": 32 / 255, "boost": 5.0},
}


Problem = tuple[methods.VitSetting, methods.Federation]


def problem(seed: int, *, quick: bool) -> Problem:
    """Divide the digits at random over five clients with one small vision transformer."""
    images, labels, *_ = samples.digits()
    setting = methods.VitSetting(
        trunks=[fp.vit_trunk(samples.vit("B"))], num_prompts=4, clients=range(NUM_CLIENTS),
        num_classes=10, rounds=2 if quick else 8, steps=2 if quick else 6,
        cohort_size=NUM_CLIENTS, batch_size=16, seed=seed, public=images[:0],
    )  # fmt: skip
    draw = torch.Generator().manual_seed(seed)
    shards = fp.data.iid(labels, NUM_CLIENTS, generator=draw)
    return setting, methods.Federation(images, labels, dict(enumerate(shards)))


def run(made: Problem, rule, attack) -> tuple[dict[str, Tensor], Tensor]:
    """Return the values of the model after the last round, and the trigger, or 0."""
    setting, federation = made
    method = methods.fedvpt_d(setting)
    server = fp.averaging_server(method.server.state["values"], aggregate=rule)
    method = method._replace(server=server)
    if attack:
        method = methods.backdoored(method, malicious=[MALICIOUS], target=TARGET, **attack)
    *_, now = fp.run_rounds(method, federation)
    trigger = now.clients[str(MALICIOUS)].get("trigger", torch.zeros(()))
    return now.server["values"], trigger


@torch.no_grad()
def table(setting: methods.VitSetting, values: dict[str, Tensor], trigger: Tensor) -> Tensor:
    """Count predictions of the test images with a trigger, (predicted, classes)."""
    *_, images, labels = samples.digits()
    predicted = setting.model(0, values)(images + trigger).argmax(1)
    return fp.metrics.contingency_table(predicted, labels, 10, 10)


def row(seeds: list[Problem], rule, attack, honest: list) -> list[str]:
    """Measure accuracy, success, and success of the same triggers on honest models, over seeds."""
    clean, poisoned, control = [], [], []
    success = partial(fp.metrics.attack_success, target=TARGET)
    for made, other in zip(seeds, honest, strict=True):
        values, trigger = run(made, rule, attack) if attack else (other, torch.zeros(()))
        clean.append(fp.metrics.balanced_accuracy(table(made[0], values, torch.zeros(()))))
        poisoned.append(success(table(made[0], values, trigger)))
        control.append(success(table(made[0], other, trigger)))
    return [shown(each) for each in (clean, poisoned, control)]


def shown(figures: list[float]) -> str:
    """Write the mean over seeds in %, with the lowest and the highest."""
    low, high = 100 * min(figures), 100 * max(figures)
    return f"{100 * sum(figures) / len(figures):.0f} ({low:.0f} to {high:.0f})"


def main() -> None:
    parser = digits.parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    seeds = [problem(seed, quick=args.quick) for seed in range(args.seeds)]
    print("| trigger | server | accuracy | success | without poison |\n|---|---|---:|---:|---:|")
    for name, rule in RULES.items():
        honest = [run(made, rule, {})[0] for made in seeds]
        for trigger, attack in ATTACKS.items():
            print("|", " | ".join([trigger, name, *row(seeds, rule, attack, honest)]), "|")


if __name__ == "__main__":
    main()
