"""Settings of SGPT, with the figures of the paper.

Deng et al., "Unlocking the Potential of Prompt-Tuning in Bridging Generalized and Personalized
Federated Learning", CVPR 2024. Tables 1, 2, 3 and 4.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from studies.papers.setting import Partition, Recipe, Row, Setting

MEASURES = ("full", "own", "worst")
OFFICE = ("amazon", "caltech", "dslr", "webcam", "own")
DOMAINNET = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch", "own")
METHODS = {
    "Head-Tune": "head_tuning",
    "FedVPT": "fedvpt",
    "FedVPT-D": "fedvpt_d",
    "FedMix": "fedmix",
    "pFedPG": "pfedpg",
    "FedEM": "fedem",
    "FedPR": "fedpr",
    "Per-FedAvg": "perfedavg",
    "FedRep": "fedrep",
    "SGPT": "sgpt",
}
RECIPE = Recipe(values={"momentum": 0.9, "weight_decay": 1e-5}, epochs=5, batch_size=40)
OFFICE_RECIPE = replace(RECIPE, batch_size=50, flip=True)
DOMAIN = Partition(kind="domains")

# Global, local and worst local accuracy.
TABLE_1_S50 = {
    "Head-Tune": (76.69, 76.68, 65.96),
    "FedVPT": (82.35, 85.67, 72.28),
    "FedVPT-D": (85.85, 85.85, 74.83),
    "FedMix": (85.65, 85.67, 74.33),
    "pFedPG": (84.67, 85.22, 72.33),
    "FedEM": (81.52, 81.53, 72.06),
    "FedPR": (85.92, 85.92, 75.26),
    "SGPT": (86.72, 86.71, 77.56),
}
TABLE_1_S10 = {
    "Head-Tune": (75.35, 75.36, 55.53),
    "FedVPT": (80.79, 80.79, 66.43),
    "FedVPT-D": (79.49, 79.49, 63.38),
    "FedMix": (80.83, 80.82, 69.59),
    "pFedPG": (81.19, 81.82, 70.53),
    "FedEM": (78.41, 78.40, 63.87),
    "FedPR": (81.42, 81.35, 63.93),
    "SGPT": (84.64, 84.64, 73.85),
}
TABLE_1_FIVE = {
    "Head-Tune": (75.09, 75.09, 28.60),
    "FedVPT": (80.88, 80.88, 53.04),
    "FedVPT-D": (82.09, 82.09, 54.96),
    "FedMix": (81.07, 81.07, 42.62),
    "pFedPG": (72.12, 82.48, 56.24),
    "FedEM": (79.54, 79.54, 46.50),
    "FedPR": (81.29, 81.29, 42.12),
    "SGPT": (83.40, 83.40, 61.04),
}
# Each domain, then the average.
TABLE_2_OFFICE = {
    "Per-FedAvg": (91.67, 90.22, 100.0, 100.0, 95.47),
    "FedRep": (91.15, 88.44, 100.0, 100.0, 94.90),
    "FedVPT": (92.71, 84.44, 100.0, 100.0, 94.29),
    "FedVPT-D": (91.67, 89.33, 100.0, 100.0, 95.25),
    "pFedPG": (94.79, 92.44, 100.0, 100.0, 96.81),
    "FedPR": (95.31, 95.11, 100.0, 96.61, 96.76),
    "SGPT": (95.31, 95.56, 100.0, 100.0, 97.72),
}
TABLE_2_DOMAINNET = {
    "Per-FedAvg": (69.39, 48.71, 82.07, 35.30, 90.63, 72.56, 66.44),
    "FedRep": (64.26, 38.20, 72.86, 62.10, 82.66, 60.11, 63.37),
    "FedVPT": (65.59, 44.14, 76.58, 47.30, 91.04, 60.29, 64.16),
    "FedVPT-D": (63.31, 43.07, 74.80, 54.80, 87.26, 67.15, 65.07),
    "pFedPG": (73.00, 50.08, 84.33, 60.00, 94.00, 68.41, 71.64),
    "FedPR": (88.02, 49.16, 86.11, 70.00, 96.06, 83.94, 78.88),
    "SGPT": (89.54, 52.82, 87.56, 70.00, 96.14, 86.82, 80.48),
}
# Global and worst local accuracy.
TABLE_3 = {
    "shared prompts": (79.49, 63.38),
    "group prompts": (82.51, 70.79),
    "both, trained together": (77.82, 62.62),
    "both, blocks in inverse order": (76.76, 62.15),
    "both, blocks (SGPT)": (84.64, 73.85),
}
# Agreement of the groups with the superclasses, for s = 50 and s = 10.
TABLE_4 = {
    "FedAvg": (5.00, 5.00),
    "with q": (46.09, 51.26),
    "with momentum and q": (56.39, 56.62),
}

CHOICES = (
    "The paper gives no learning rate, batch size or weight decay: those of the authors' code, for "
    "all rows.",
    "The paper gives no seeds: seed 0.",
    "The weights are ViT-B/16 of timm, pretrained on ImageNet-21k with augmentation; the paper "
    "does not name a file.",
    "All rows have one prompt at a layer. The paper does not say whether this includes the "
    "baselines.",
    "The paper has five local epochs. In the authors' code each of the two blocks has five, so "
    "SGPT has ten epochs here and the other rows have five.",
    "The paper puts shared prompts in the first layers and groups in the fourth to sixth. Here "
    "shared prompts are in the first half of the layers and groups in the second half.",
    "The head reads the class token alone, and not its mean with the group tokens.",
    "The paper does not give other hyperparameters of the baselines: our defaults.",
)
CIFAR_ROUNDS = "The paper does not give the rounds for CIFAR-100: 60, from the authors' code."
CLASSES = (
    "Local test images of a client are its share of the test images of its classes, in the same "
    "proportions as its training images."
)
FIVE = "Images of one of the five data sets are divided evenly over its four clients."
DOMAINS = (
    "The paper does not give the rounds and batches for domains: 40 rounds of batches of 50, from "
    "the authors' code.",
    "The authors' code trains on a half of the Office images and a twentieth of DomainNet's, and "
    "rotates them. Here clients have all images of their domain, and images are flipped only.",
    "The paper selects groups by features of the fifth layer. The gallery's row uses the last one.",
    "The paper takes baselines from the pFedPG paper, where Per-FedAvg and FedRep may train other "
    "parts. Here they tune prompts and head.",
    "The paper does not say how many rounds these accuracies are averaged over: one.",
    "Per-FedAvg leaves out the last batch of an epoch if it is not full, because it halves each "
    "batch and one image has no halves.",
)
SPLIT = "Office-Caltech10 has no split: a fifth of each class of each domain is for testing."
MARKS = (
    "The check marks of Table 3 are missing in our copy of the paper. Rows are read in the order "
    "of its columns.",
    "Shared prompts alone have the figures of FedVPT-D in Table 1, so this row is FedVPT-D.",
    "Group prompts alone, joint training and the inverse order are arguments of the gallery's "
    "file. `examples/studies/mechanisms.py` has them for other data.",
)
CLUSTERS = (
    "The paper does not define clustering accuracy: each group counts as its most frequent "
    "superclass. One group for all images then has 5 percent, as in the paper.",
    "Keys of plain FedAvg, without the balance of groups, are not in the gallery.",
    "Momentum is that of keys and groups together, so the row without it has neither.",
)


def row(title: str, figures: Mapping[str, float], recipe: Recipe, num_groups: int) -> Row:
    """Make a row. SGPT has the epochs for each of its two blocks, and Per-FedAvg full batches."""
    values: dict[str, Any] = {"learning_rate": 0.01}
    changes: dict[str, Any] = {}
    if title == "SGPT":
        values |= {"decay": 0.5, "num_groups": num_groups}
        changes = {"recipe": replace(recipe, epochs=2 * recipe.epochs)}
    if title == "Per-FedAvg":
        changes = {"recipe": replace(recipe, drop_last=True)}
    return Row(title=title, method=METHODS[title], figures=figures, values=values, changes=changes)


def table(
    figures: Mapping[str, Sequence[float]],
    measures: Sequence[str],
    num_groups: int,
    recipe: Recipe = RECIPE,
) -> list[Row]:
    """Make the rows of a column of Table 1 or 2."""
    named = {title: dict(zip(measures, row, strict=True)) for title, row in figures.items()}
    return [row(title, each, recipe, num_groups) for title, each in named.items()]


def setting(
    name: str,
    task: str,
    partition: Partition,
    clients: tuple[int, int],
    rows: Sequence[Row],
    *choices: str,
    **more: Any,
) -> Setting:
    """Make a setting; `clients` are their number and the size of a cohort."""
    fields: dict[str, Any] = {"rounds": 60, "recipe": RECIPE, "last_rounds": 10}
    return Setting(
        name=f"sgpt-{name}",
        source=f"SGPT, Table {name[0]}",
        task=task,
        family="one model",
        backbones=("vit_base_patch16_224.augreg_in21k",),
        partition=partition,
        num_clients=clients[0],
        cohort_size=clients[1],
        rows=tuple(rows),
        choices=(*CHOICES, *choices),
        num_prompts=1,
        **(fields | more),
    )


def cifar100(number: int, classes: int, rows: Sequence[Row], *choices: str) -> Setting:
    """Make a setting of 100 clients with a few classes each."""
    name, partition = f"{number}-cifar100-s{classes}", Partition(kind="classes", classes=classes)
    return setting(name, "cifar100", partition, (100, 5), rows, CIFAR_ROUNDS, CLASSES, *choices)


def domains(task: str, num_domains: int, rows: Sequence[Row], *choices: str) -> Setting:
    """Make a setting of one client for each domain."""
    clients, more = (num_domains, num_domains), {"rounds": 40, "recipe": OFFICE_RECIPE}
    return setting(
        f"2-{task}", task, DOMAIN, clients, rows, *DOMAINS, *choices, last_rounds=1, **more
    )


def blocks() -> list[Row]:
    """Make the rows of Table 3."""
    measured = {name: {"full": row[0], "worst": row[1]} for name, row in TABLE_3.items()}
    made = {"shared prompts": "FedVPT-D", "both, blocks (SGPT)": "SGPT"}
    return [
        replace(row(made[name], each, RECIPE, 20), title=name)
        if name in made
        else Row(title=name, method=None, figures=each)
        for name, each in measured.items()
    ]


def clusters(column: int) -> list[Row]:
    """Make the rows of a column of Table 4."""
    plain, balanced, whole = ({"clusters": each[column]} for each in TABLE_4.values())
    last = row("SGPT", whole, RECIPE, 20)
    return [
        Row(title="FedAvg", method=None, figures=plain),
        replace(last, title="with q", figures=balanced, values={**last.values, "decay": 0.0}),
        replace(last, title="with momentum and q"),
    ]


SETTINGS = (
    cifar100(1, 50, table(TABLE_1_S50, MEASURES, 20)),
    cifar100(1, 10, table(TABLE_1_S10, MEASURES, 20)),
    setting(
        "1-five-dataset",
        "five-dataset",
        DOMAIN,
        (20, 2),
        table(TABLE_1_FIVE, MEASURES, 5),
        FIVE,
        rounds=50,
    ),
    domains("office-caltech10", 4, table(TABLE_2_OFFICE, OFFICE, 4, OFFICE_RECIPE), SPLIT),
    domains("domainnet", 6, table(TABLE_2_DOMAINNET, DOMAINNET, 6, OFFICE_RECIPE)),
    cifar100(3, 10, blocks(), *MARKS),
    cifar100(4, 50, clusters(0), *CLUSTERS),
    cifar100(4, 10, clusters(1), *CLUSTERS),
)
