"""Settings of FedOTP (Li et al., CVPR 2024): text contexts for CLIP, matched by transport."""

from collections.abc import Mapping
from typing import Any

from studies.papers.printed import Methods, rows
from studies.papers.setting import Partition, Recipe, Row, Setting

PAPER = "FedOTP (Li et al., CVPR 2024)"

RATE = {"learning_rate": 0.001}
METHODS: Methods = {
    "Zero-Shot CLIP": ("zero_shot", {}),
    "CoOp": ("coop", RATE),
    "PromptFL": ("promptfl", RATE),
    "PromptFL+FT": ("promptfl_ft", RATE),
    "PromptFL+FedProx": ("promptfl_fedprox", RATE | {"proximal_weight": 0.5}),
    "PromptFL+FedPer": ("promptfl_fedper", RATE),
    "PromptFL+FedAMP": ("promptfl_fedamp", RATE),
    "pFedPrompt": (None, {}),
    "FedOTP (Ours)": ("fedotp", RATE | {"mass": 0.8, "epsilon": 0.1}),
    "FedOTP (Similarity Averaging)": ("fedotp_average", RATE),
    "FedOTP (Classical OT)": ("fedotp_classical", RATE | {"epsilon": 0.1}),
    "FedOTP (Unbalanced OT)": ("fedotp", RATE | {"mass": 0.8, "epsilon": 0.1}),
}

SMALL = ("food101", "dtd", "caltech101", "flowers102", "pets")
TABLE_1 = {
    "Zero-Shot CLIP": "75.27±0.05 40.21±0.12 85.14±0.24 62.17±0.12 84.47±0.10",
    "CoOp": "82.54±2.42 82.69±0.63 90.41±0.44 88.23±0.76 94.52±1.30",
    "PromptFL": "74.81±0.64 50.46±0.54 87.90±0.54 73.68±1.58 88.17±1.18",
    "PromptFL+FT": "77.16±1.56 53.74±1.36 89.70±0.25 72.31±0.91 91.23±0.50",
    "PromptFL+FedProx": "73.96±0.75 50.89±0.71 87.80±1.10 74.14±0.65 87.25±1.48",
    "PromptFL+FedPer": "71.29±1.87 50.23±0.82 86.72±1.45 72.11±1.35 89.50±1.62",
    "PromptFL+FedAMP": "74.48±1.71 47.16±0.92 87.31±1.60 69.10±0.13 80.21±0.44",
    "pFedPrompt": "92.26±1.34 77.14±0.09 96.54±1.31 86.46±0.15 91.84±0.41",
    "FedOTP (Ours)": "92.73±0.15 87.67±0.70 97.02±0.36 96.23±0.44 98.82±0.11",
}

DOMAINNET = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch", "own")
TABLE_2 = {
    "Zero-Shot CLIP": ("8.72±1.73 12.48±3.78 8.53±4.32 9.31±0.69 9.13±2.55 11.96±2.80 10.02±2.65"),
    "CoOp": ("44.40±14.89 45.68±16.53 47.21±18.20 41.13±20.62 48.02±24.49 39.47±5.68 44.32±16.74"),
    "PromptFL": "9.31±6.53 12.58±9.91 8.23±8.47 14.79±12.07 9.37±10.82 7.48±11.32 10.29±10.35",
    "PromptFL+FedProx": (
        "9.84±6.60 11.16±11.17 10.64±6.79 13.40±16.09 9.39±7.69 6.78±11.76 10.20±10.99"
    ),
    "FedOTP (Ours)": (
        "46.14±6.53 60.14±18.23 45.2±16.86 38.66±7.60 49.30±17.80 49.02±24.22 48.08±15.21"
    ),
}

TABLE_3 = {
    "Zero-Shot CLIP": "87.71±0.68 64.92±0.53",
    "CoOp": "93.11±0.39 74.83±0.45",
    "PromptFL": "92.30±0.87 73.67±0.56",
    "PromptFL+FedProx": "91.83±0.47 71.11±0.91",
    "FedOTP (Ours)": "96.05±0.12 78.03±0.08",
}

SHOTS = (2, 8)
TABLE_4 = {
    "FedOTP (Similarity Averaging)": (
        "83.38±0.54 87.59±1.05 81.01±0.23 88.17±0.73 92.68±0.44 96.73±0.29 91.73±0.68 97.09±0.18 "
        "96.23±0.25 98.34±0.15"
    ),
    "FedOTP (Classical OT)": (
        "88.07±0.63 89.77±0.62 81.42±0.99 88.43±0.45 93.17±0.68 96.80±0.23 92.84±1.34 97.07±0.25 "
        "96.55±0.26 98.51±0.27"
    ),
    "FedOTP (Unbalanced OT)": (
        "89.12±0.28 92.94±0.18 85.50±0.35 90.25±0.74 95.05±0.49 97.34±0.18 93.96±0.48 98.23±0.32 "
        "97.73±0.57 99.02±0.38"
    ),
}

OFFICE = ("amazon", "caltech", "dslr", "webcam", "own")
TABLE_A2 = {
    "Zero-Shot CLIP": "19.3 18.2 21.9 18.6 19.50 49.92 47.15 53.63 31.3 48.4 50.18 46.76",
    "CoOp": "96.38 97.24 100 98.31 97.98 98.32 83.01 98.18 82.37 98.21 97.70 92.95",
    "PromptFL": "96.41 96.39 96.90 100 97.42 98.23 79.91 97.89 66.52 96.83 97.31 89.45",
    "PromptFL+FedProx": "97.93 97.21 96.89 100 98.01 98.45 72.32 96.00 63.51 96.08 98.04 87.40",
    "FedOTP (Ours)": "97.92 98.68 100 100 99.16 98.93 84.52 98.89 87.87 98.64 98.42 94.55",
}

TABLE_A3 = {
    "Zero-Shot CLIP": "8.45±1.49 6.01±4.25 12.92±9.15 6.48±4.82 8.46±6.26",
    "CoOp": "25.59±6.60 36.23±16.97 30.30±5.18 22.56±5.46 28.67±11.13",
    "PromptFL": "10.92±4.36 10.37±12.63 15.45±15.34 15.90±17.33 13.16±13.60",
    "PromptFL+FedProx": "11.05±4.70 12.04±10.65 19.70±21.74 12.56±12.72 13.84±14.29",
    "FedOTP (Ours)": "23.59±4.74 31.64±5.25 43.94±5.67 35.51±9.19 33.67±9.76",
}

ALPHAS = (0.1, 0.3, 0.5, 1, 5, 10)
TABLE_A5 = {
    "Zero-Shot CLIP": "65.22±0.32 64.92±0.53 65.78±0.41 63.93±0.16 64.01±0.27 65.07±0.35",
    "CoOp": "62.01±0.29 74.83±0.45 51.72±0.42 47.03±0.37 41.03±0.23 41.37±0.19",
    "PromptFL": "72.45±0.64 73.67±0.56 74.37±0.18 73.95±0.14 74.68±0.05 74.43±0.08",
    "PromptFL+FedProx": "72.57±0.54 71.11±0.91 74.45±0.19 74.19±0.06 74.23±0.09 74.53±0.07",
    "FedOTP (Similarity Averaging)": (
        "78.68±0.17 75.70±0.27 75.28±0.12 74.88±0.16 74.48±0.05 74.31±0.39"
    ),
    "FedOTP (Classical OT)": "79.93±0.19 77.86±0.09 75.76±0.12 75.38±0.08 75.01±0.05 74.73±0.05",
    "FedOTP (Unbalanced OT)": "80.56±0.12 78.03±0.08 76.75±0.10 76.17±0.13 75.75±0.03 75.52±0.06",
}

TABLE_A4_MASS = {
    ("dtd", 2): "0.7",
    ("dtd", 4): "0.7",
    ("dtd", 8): "0.7",
    ("caltech101", 2): "1",
    ("caltech101", 8): "0.5",
    ("flowers102", 2): "0.9",
    ("flowers102", 4): "0.9",
    ("pets", 2): "1",
    ("pets", 8): "0.9",
}
"""Mass at which Table A4 has the figure of Table 1 (4 shots) or Table 4, if it is not 0.8."""

CHOICES = (
    "Momentum and weight decay are those of the authors' code.",
    "Images are not changed at random, so each is encoded once, where the authors' code crops and "
    "flips them.",
)
OF_ROWS = {
    "Zero-Shot CLIP": "The sentence of zero-shot CLIP is that of the authors' code.",
    "CoOp": "A client of CoOp trains in the same rounds as with other methods, where the authors' "
    "code trains it once, for 30 epochs.",
    "PromptFL+FedProx": "The weight of FedProx is 0.5, which is the default of the authors' code.",
    "PromptFL+FedPer": "FedPer shares half of a context.",
    "PromptFL+FedAMP": "FedAMP has the gallery's default weight and temperature.",
}
"""Choices of settings that have a row."""
LAST = ("Figures are means over the last five rounds, as in the authors' code.",)
FEW_SHOT = (
    *LAST,
    "Training and test images are those of CoOp's lists.",
    "Classes are divided evenly over clients at random.",
    "Batches have 32 images as in the paper, where the authors' script has one a shot.",
    "Epsilon is 0.1 as in the paper, where the authors' script has 0.01.",
)
FOUR_SHOTS = (
    "There are 4 shots, because Table A4 has FedOTP's figures of Table 1 at 4, except for Food101.",
)
RESNET = (
    "The backbone is ResNet-50 as in Table 1, which has the 4-shot figures of the same experiment "
    "(Table A4).",
)
DOMAINS = (
    "Figures are those of the last round.",
    "There are 10 rounds, which is the default of the authors' code.",
    "Zero-shot CLIP has class names in its sentence, although the paper's low figures suggest "
    "otherwise.",
)
SKEWED = ("The paper's deviations are over the clients of a domain, not over seeds.",)
CIFAR = (
    "A context has 16 tokens as in the paper, where the authors' script for CIFAR-100 has 4.",
    "Each class is divided by a Dirichlet distribution, where the authors' code for CIFAR-100 "
    "divides superclasses first.",
)
HUNDRED = ("There are 100 clients as in Table 3, which has the figures of the column 0.3.",)


def setting(
    name: str, table: str, task: str, made: tuple[Row, ...], choices: tuple[str, ...], **fields: Any
) -> Setting:
    """Make a setting, with all clients in each round unless `fields` has a cohort."""
    titles = [row.title for row in made]
    epochs = 5 if task in SMALL else 1
    recipe = Recipe(
        values={"momentum": 0.9, "weight_decay": 5e-4},
        epochs=epochs,
        batch_size=32,
    )
    common: dict[str, Any] = {"rounds": 10, "cohort_size": fields["num_clients"]}
    return Setting(
        name=name,
        source=f"{PAPER}, {table}",
        task=f"{task}-coop" if task in SMALL else task,
        family="CLIP",
        recipe=recipe,
        rows=made,
        choices=CHOICES + tuple(OF_ROWS[each] for each in titles if each in OF_ROWS) + choices,
        **common | {"backbones": ("ViT-B-16.openai",)} | fields,
    )


def few_shot(
    table: str, lines: Mapping[str, str], task: str, shots: int, position: int, *choices: str
) -> Setting:
    """Make a setting of ten clients without common classes."""
    name = f"fedotp-{table}-{task}" + (f"-{shots}shots" if table == "4" else "")
    mass = TABLE_A4_MASS.get((task, shots))
    if mass:
        choices += (
            f"The mass is 0.8 as in the text, where the figure is that of {mass} in Table A4.",
        )
    return setting(
        name,
        f"Table {table}",
        task,
        rows(lines, METHODS, {"own": position}),
        FEW_SHOT + choices,
        backbones=("RN50.openai",),
        last_rounds=5,
        partition=Partition(kind="classes", disjoint=True, shots=shots),
        num_clients=10,
    )


def domains(
    table: str, lines: Mapping[str, str], columns: tuple[str, ...], first: int, clients: int
) -> Setting:
    """Make a setting with the given number of clients for each domain."""
    task = "office-caltech10" if columns is OFFICE else "domainnet"
    alpha = None if clients == 1 else 0.1
    return setting(
        f"fedotp-{table.lower()}-{task}",
        f"Table {table}",
        task,
        rows(lines, METHODS, {name: first + position for position, name in enumerate(columns)}),
        DOMAINS + (SKEWED if alpha else ()),
        partition=Partition(kind="domains", alpha=alpha),
        num_clients=clients * (len(columns) - 1),
    )


def cifar(
    table: str, lines: Mapping[str, str], task: str, alpha: float, position: int, *choices: str
) -> Setting:
    """Make a setting of a hundred clients, ten in a round."""
    return setting(
        f"fedotp-{table.lower()}-{task}" + (f"-alpha{alpha:g}" if table == "A5" else ""),
        f"Table {table}",
        task,
        rows(lines, METHODS, {"own": position}),
        LAST + (CIFAR if task == "cifar100" else ()) + choices,
        partition=Partition(kind="dirichlet", alpha=alpha),
        num_clients=100,
        cohort_size=10,
        rounds=150,
        last_rounds=5,
    )


SETTINGS: tuple[Setting, ...] = (
    *(few_shot("1", TABLE_1, task, 4, at, *FOUR_SHOTS) for at, task in enumerate(SMALL)),
    domains("2", TABLE_2, DOMAINNET, 0, 5),
    *(cifar("3", TABLE_3, task, 0.3, at) for at, task in enumerate(("cifar10", "cifar100"))),
    *(
        few_shot("4", TABLE_4, task, shots, 2 * at + after, *RESNET)
        for at, task in enumerate(SMALL)
        for after, shots in enumerate(SHOTS)
    ),
    domains("A2", TABLE_A2, OFFICE, 0, 1),
    domains("A2", TABLE_A2, DOMAINNET, len(OFFICE), 1),
    domains("A3", TABLE_A3, OFFICE, 0, 3),
    *(cifar("A5", TABLE_A5, "cifar100", alpha, at, *HUNDRED) for at, alpha in enumerate(ALPHAS)),
)
