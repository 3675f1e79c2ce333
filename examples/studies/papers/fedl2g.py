"""Settings of FedL2G (Zhang et al., 2024): networks from scratch that follow learned guides."""

from collections.abc import Mapping
from typing import Any

from embedded.zoo import GROUPS
from studies.papers.printed import Methods, rows
from studies.papers.setting import Partition, Recipe, Setting

PAPER = "FedL2G (Zhang et al., 2024)"

RATE = {"learning_rate": 0.01}
METHODS: Methods = {
    "LG-FedAvg": ("lg_fedavg", RATE),
    "FedGH": ("fedgh", RATE | {"server_rate": 0.01, "server_steps": 20}),
    "FML": ("fml", RATE | {"alpha": 0.5, "beta": 0.5}),
    "FedKD": ("fedkd", RATE | {"energies": (0.95, 0.98)}),
    "FedDistill": ("feddistill", RATE | {"distillation_weight": 1.0}),
    "FedProto": ("fedproto", RATE | {"prototype_weight": 10.0}),
    "FedL2G-l": ("fedl2g_l", RATE | {"guide_weight": 1.0, "server_rate": 0.1}),
    "FedL2G-f": ("fedl2g_f", RATE | {"guide_weight": 1.0, "server_rate": 100.0}),
}

TASKS = ("cifar10", "cifar100", "flowers102", "tiny-imagenet")
TABLE_1 = {
    "LG-FedAvg": "86.8±.3 57.0±.7 58.9±.3 32.0±.2 84.6±.5 40.7±.1 70.0±.9 48.2±.1",
    "FedGH": "86.6±.2 57.2±.2 59.3±.3 32.6±.4 84.4±.3 41.0±.5 69.7±.2 46.7±.1",
    "FML": "87.1±.2 55.2±.1 57.8±.3 31.4±.2 85.9±.1 39.9±.3 68.4±1.2 47.1±.1",
    "FedKD": "87.3±.3 56.6±.3 54.8±.4 32.6±.4 86.5±.2 40.6±.3 69.6±1.6 48.2±.5",
    "FedDistill": "87.2±.1 57.0±.3 58.5±.3 31.5±.4 86.0±.3 41.5±.1 71.2±.7 48.8±.1",
    "FedProto": "83.4±.2 53.6±.3 55.1±.2 29.3±.4 82.1±1.7 36.3±.3 62.3±.6 40.0±.1",
    "FedL2G-l": "87.7±.1 59.2±.4 60.3±.9 32.8±.7 86.5±.1 42.3±.1 71.5±.5 49.5±.3",
    "FedL2G-f": "89.3±.2 64.2±.3 64.2±.2 34.7±.3 87.6±.2 43.8±.4 73.6±.3 50.3±.4",
}
CLASSES = {"cifar10": 2, "cifar100": 10, "flowers102": 10, "tiny-imagenet": 20}
ALPHA = {"cifar10": 0.1, "cifar100": 0.1, "flowers102": 0.01, "tiny-imagenet": 0.01}

TABLE_2 = {
    "LG-FedAvg": "46.6±.2 45.6±.4 43.9±.2 42.0±.3 - 37.8±.1 35.1±.5",
    "FedGH": "46.7±.4 45.2±.2 43.3±.2 43.0±.9 - 37.3±.4 34.3±.2",
    "FML": "45.9±.2 43.1±.1 43.0±.1 42.4±.3 39.9±.1 38.8±.1 36.1±.3",
    "FedKD": "46.3±.2 43.2±.5 43.2±.4 42.3±.4 40.4±.1 38.3±.4 35.6±.6",
    "FedDistill": "46.9±.1 43.5±.2 43.6±.1 42.1±.2 41.0±.1 38.5±.4 36.1±.2",
    "FedProto": "44.0±.2 38.1±.6 34.7±.6 32.7±.8 36.1±.1 33.0±.4 29.0±.5",
    "FedL2G-l": "47.3±.1 44.5±.1 44.8±.1 44.1±.1 41.8±.2 38.9±.2 36.7±.1",
    "FedL2G-f": "47.8±.3 45.8±.1 44.7±.1 45.7±.2 43.5±.1 40.5±.0 37.9±.3",
}

TABLE_3 = {
    "LG-FedAvg": "40.3±.2 40.5±.1 40.9±.2",
    "FedGH": "41.1±.3 39.9±.3 40.2±.4",
    "FML": "39.1±.3 38.0±.2 36.0±.2",
    "FedKD": "41.1±.1 40.4±.2 39.1±.3",
    "FedDistill": "41.0±.3 41.3±.2 41.1±.4",
    "FedProto": "38.0±.5 38.1±.4 38.7±.5",
    "FedL2G-l": "42.2±.2 42.0±.2 42.1±.1",
    "FedL2G-f": "43.7±.1 43.8±.2 44.3±.3",
}
"""Accuracy after training with more epochs. The bytes and seconds of the table are left out."""

CHOICES = (
    "A quarter of all images is held out before the division, where the paper holds out a quarter "
    "of each client's images.",
    "Figures are means over clients after the last round, where the paper has the best round.",
    "There are 1000 rounds, which the paper gives as the maximum.",
    "Hyperparameters of the baselines are those of the authors' library HtFLlib, where the paper "
    "refers to earlier work.",
    "The server of FedGH takes 20 steps on all prototypes of a round, where the paper has one "
    "epoch.",
    "Guides learn for two rounds before they are followed, where the paper has 50 rounds without "
    "training of clients.",
)
LARGE_IMAGES = (
    "Images have a side of 64 pixels, as in the authors' library PFLlib.",
    "The shared network of FML and FedKD is the CNN, which is not the smallest network at 64 "
    "pixels.",
)
DIVISION = (
    "The classes of a client are those of `fedprompt.pathological`, whose clients differ less in "
    "size than those of the authors' code.",
)
LEFT_OUT = ("Two classes are left out at random, so that each of the others has two clients.",)
MIXED = ("All networks have a linear head, where vision transformers of the paper have another.",)


def setting(
    name: str,
    table: str,
    lines: Mapping[str, str],
    position: int,
    *choices: str,
    task: str = "cifar100",
    group: str = "HtFE8",
    partition: Partition | None = None,
    epochs: int = 1,
    **fields: Any,
) -> Setting:
    """Make a setting, whose defaults are CIFAR-100, HtFE8 and twenty clients in each round."""
    common: dict[str, Any] = {"num_clients": 20, "cohort_size": 20, "rounds": 1000}
    large = task in ("flowers102", "tiny-imagenet")
    return Setting(
        name=f"fedl2g-{table}-{name}",
        source=f"{PAPER}, Table {table}",
        task=task,
        family="networks",
        backbones=GROUPS[group],
        partition=partition or Partition(kind="dirichlet", alpha=ALPHA[task]),
        recipe=Recipe(epochs=epochs, batch_size=10, drop_last=True),
        rows=rows(lines, METHODS, {"own": position}),
        choices=CHOICES + (LARGE_IMAGES if large else ()) + choices,
        image_size=64 if large else 32,
        num_features=512,
        test_share=0.25,
        **common | fields,
    )


def more_clients(count: int, position: int) -> Setting:
    """Make a setting of Table 2 with half of the clients in a round."""
    sizes = {"num_clients": count, "cohort_size": count // 2}
    return setting(f"clients{count}", "2", TABLE_2, position, **sizes)


SETTINGS: tuple[Setting, ...] = (
    *(
        setting(
            f"{task}-pathological",
            "1",
            TABLE_1,
            position,
            *DIVISION,
            *(LEFT_OUT if task == "flowers102" else ()),
            task=task,
            partition=Partition(kind="classes", classes=CLASSES[task]),
        )
        for position, task in enumerate(TASKS)
    ),
    *(
        setting(f"{task}-dirichlet", "1", TABLE_1, len(TASKS) + position, task=task)
        for position, task in enumerate(TASKS)
    ),
    *(
        setting(group.lower(), "2", TABLE_2, at, *(MIXED if group == "HtM10" else ()), group=group)
        for at, group in enumerate(("HtFE2", "HtFE3", "HtFE4", "HtFE9", "HtM10"))
    ),
    more_clients(50, 5),
    more_clients(100, 6),
    *(
        setting(f"epochs{epochs}", "3", TABLE_3, position, epochs=epochs)
        for position, epochs in enumerate((5, 10, 20))
    ),
)
