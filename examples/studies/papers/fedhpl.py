"""Settings of FedHPL, with the figures of the paper.

Ma et al., "FedHPL: Efficient Heterogeneous Federated Learning with Prompt Tuning and Logit
Distillation", 2024. Tables 1, 2, 3, 11, 13 and 14.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from studies.papers.fedhpl_figures import (
    TABLE_1,
    TABLE_2,
    TABLE_3_LEFT,
    TABLE_3_RIGHT,
    TABLE_11,
    TABLE_13,
    TABLE_14,
)
from studies.papers.setting import Partition, Recipe, Row, Setting

SMALL, BASE, LARGE = (
    f"vit_{size}_patch16_224.augreg_in21k_ft_in1k" for size in ("small", "base", "large")
)
TRANSFORMERS = {"homogeneous": (BASE,), "heterogeneous": (SMALL, BASE, LARGE, BASE, SMALL)}
NETWORKS = ("resnet18", "resnet34", "resnet50", "resnet34", "resnet18")
PRETRAINED_NETWORKS = tuple(f"{name}.tv_in1k" for name in NETWORKS)

TASKS = ("cifar10", "cifar100", "svhn")
ROUNDS = {"cifar10": 10, "cifar100": 15, "svhn": 15}
MIN_SHARES = {"cifar10": 0.01, "cifar100": 0.1, "svhn": 0.005}
DIVISIONS = ("iid", "dirichlet", "non-iid")
RECIPE = Recipe(values={"momentum": 0.9, "weight_decay": 1e-4}, batch_size=16)
RATE = {"learning_rate": 0.01}
FEDHPL = {"learning_rate": 0.01, "distillation_weight": 1.0}

CHOICES = (
    "The paper gives no seeds and no augmentation: seed 0, no augmentation.",
    "The batch size of the tables is 16, because Section C.5.5 gives the first figure of Table 1 "
    "for it.",
    "The paper does not name the files of the weights: ViTs of timm, pretrained on ImageNet-21k "
    "and fine-tuned on ImageNet-1k.",
    "Denominators count correct logits, and a class without one is not distilled; see the page of "
    "the method.",
)
CONCENTRATION = (
    "The paper draws concentrations at random: 0.5, because the figures of Table 13 for 0.1 and "
    "1.0 enclose those of Table 1."
)
EQUAL_SHARDS = "Clients of Dir have equal numbers of images, whose size the paper does not give."
SMALLEST = (
    "The smallest share of a client is that of Section C.5.4, read as a share of all training "
    "images."
)
WHOLE_TRANSFORMERS = (
    "From FedAVG to pFedPT the paper trains whole transformers, and its accuracies suggest random "
    "weights. Here these rows tune prompts and head of the pretrained backbone, so they should be "
    "far above the paper's figures."
)
BASELINES = "The paper gives no hyperparameters of the baselines: its learning rate, our defaults."
TEN_EPOCHS = (
    "FedBABU and FedRep have ten local epochs at some point in the paper. Here they have the "
    "schedules of their pages in the gallery."
)
WHOLE_NETWORKS = (
    "The paper does not say how large the images of the baselines are or whether their networks "
    "are pretrained. Its accuracies suggest random weights: ResNets from scratch at 32 pixels."
)
FULL_BATCHES = (
    "Networks from scratch leave out the last batch of an epoch if it is not full, because batch "
    "normalization cannot train on one image."
)
COMMON_WIDTH = "Baselines of different networks share features of width 512, as in FedGH's layer."
PUBLIC = (
    "The paper does not name the public images of FedMD: 500 training images without labels. Its "
    "50 epochs of pretraining are left out."
)
BORDER = (
    "FedHPL (CNN) has a border of 3 pixels on each side, as Table 8 counts, where Appendix B.3 has "
    "10 prompts."
)
SVHN_BATCHES = (
    "The batch size for SVHN is 32, because Section C.5.5 gives the figure of FedHPL (ViT) with "
    "Dir for it."
)
PROJECTION = "The gallery shares +H together with a projection, here to a width of 768."
LOCAL = "The paper's policy Local is prompts and head of each client, without messages."
ALL_LOGITS = (
    "All logits and mean logits with counts give the same teachers, so the gallery has one of them."
)
NO_WEIGHTS = "Neither timm nor open_clip has weights of MoCo-v3, so these rows are not run."


def setting(
    name: str, table: str, task: str, models: str, division: str, rows: Sequence[Row], **more: Any
) -> Setting:
    """Make a setting of five clients; `division` is one of `DIVISIONS` or "alpha-" and a number."""
    choices = [*CHOICES, *more.pop("choices", ())]
    if division in ("dirichlet", "non-iid"):
        choices.append(CONCENTRATION)
    if division == "dirichlet":
        choices.append(EQUAL_SHARDS)
    partition = partition_of(division, task)
    if partition.kind == "dirichlet":
        choices.append(SMALLEST)
    fields: dict[str, Any] = {
        "family": "mixed models",
        "backbones": TRANSFORMERS[models],
        "recipe": RECIPE,
        "num_prompts": 3,
    }
    return Setting(
        name=f"fedhpl-{name}",
        source=f"FedHPL, Table {table}",
        task=task,
        partition=partition,
        num_clients=5,
        cohort_size=5,
        rounds=ROUNDS[task],
        rows=tuple(rows),
        choices=tuple(choices),
        **(fields | more),
    )


def partition_of(division: str, task: str) -> Partition:
    """Make the partition of a column."""
    if division == "iid":
        return Partition(kind="iid")
    if division == "dirichlet":
        return Partition(kind="overlapping", alpha=0.5)
    alpha = 0.5 if division == "non-iid" else float(division.removeprefix("alpha-"))
    return Partition(kind="dirichlet", alpha=alpha, min_share=MIN_SHARES[task])


def fedhpl(title: str, figures: Mapping[str, float], **changes: Any) -> Row:
    """Make a row of FedHPL."""
    return Row(title=title, method="fedhpl", figures=figures, values=FEDHPL, changes=changes)


def clients(figures: Sequence[float]) -> dict[str, float]:
    """Name the accuracies of the lowest client, the mean, and the highest client."""
    return dict(zip(("lowest", "full", "highest"), figures, strict=True))


def equal_models(task: str, division: str, column: int) -> Setting:
    """Make a column of Table 1."""
    methods = {"FedAVG": "fedvpt_d"}
    rows = []
    for title, figures in TABLE_1.items():
        changes: dict[str, Any] = {"rounds": 100}
        if title == "pFedPG":
            changes |= {"num_prompts": 10, "recipe": replace(RECIPE, epochs=5)}
        full = {"full": figures[column]}
        method = methods.get(title, title.lower())
        rows.append(Row(title=title, method=method, figures=full, values=RATE, changes=changes))
    rows[-1] = fedhpl("FedHPL", {"full": TABLE_1["FedHPL"][column]}, family="mixed models")
    choices = (WHOLE_TRANSFORMERS, BASELINES, TEN_EPOCHS)
    return setting(
        f"1-{task}-{division}",
        "1",
        task,
        "homogeneous",
        division,
        rows,
        family="one model",
        choices=choices,
    )


def different_models(task: str, division: str, column: int) -> Setting:
    """Make a column of Table 2."""
    recipe = replace(RECIPE, batch_size=32) if task == "svhn" else RECIPE
    full = replace(recipe, drop_last=True)
    scratch: dict[str, Any] = {
        "recipe": full,
        "family": "networks",
        "backbones": NETWORKS,
        "rounds": 100,
        "image_size": 32,
        "num_features": 512,
    }
    public = {"recipe": replace(full, epochs=5)}
    border = {"backbones": PRETRAINED_NETWORKS, "rounds": 100}
    rows = []
    for title, line in TABLE_2.items():
        own = {"figures": {"full": line[column]}}
        if title.startswith("FedHPL"):
            rows.append(fedhpl(title, **own, **(border if title.endswith("(CNN)") else {})))
        else:
            own["changes"] = scratch | (public if title == "FedMD" else {})
            rows.append(Row(title=title, method=title.lower(), values=RATE, **own))
    choices = [WHOLE_NETWORKS, FULL_BATCHES, COMMON_WIDTH, BASELINES, PUBLIC, BORDER]
    if task == "svhn":
        choices.append(SVHN_BATCHES)
    name = f"2-{task}-{division}"
    return setting(name, "2", task, "heterogeneous", division, rows, recipe=recipe, choices=choices)


def heterogeneity(models: str, division: str) -> Setting:
    """Make a cell of the left part of Table 3."""
    rows = [fedhpl("FedHPL", clients(TABLE_3_LEFT[models][division]))]
    return setting(f"3-{division}-{models}", "3 (left)", "cifar10", models, division, rows)


def policies(models: str, division: str, column: int) -> Setting:
    """Make a column of the right part of Table 3."""
    figures = {title: {"full": row[column]} for title, row in TABLE_3_RIGHT[models].items()}
    projection = {"num_features": 768}
    rows = [
        Row(title="Local", method="local", figures=figures["Local"], values=RATE),
        fedhpl("FedHPL", figures["FedHPL"]),
        replace(fedhpl("+P", figures["+P"]), method="fedhpl_p"),
        replace(fedhpl("+H", figures["+H"], **projection), method="fedhpl_h"),
    ]
    name, choices = f"3-policies-{division}-{models}", (LOCAL, PROJECTION)
    return setting(name, "3 (right)", "cifar10", models, division, rows, choices=choices)


def uploads(models: str, task: str, division: str, column: int) -> Setting:
    """Make a cell of Table 11."""
    mean, everything = TABLE_11[models, task][column]
    rows = [
        fedhpl("Average", {"full": mean}),
        Row(title="All", method=None, figures={"full": everything}),
    ]
    name, choices = f"11-{task}-{division}-{models}", (ALL_LOGITS,)
    return setting(name, "11", task, models, division, rows, choices=choices)


def pretraining(models: str, task: str, alpha: float) -> Setting:
    """Make a cell of Table 13."""
    first = 0 if models == "homogeneous" else 3
    short, long, supervised = TABLE_13[task, alpha][first : first + 3]
    rows = [
        Row(title="MoCo-v3 (1)", method=None, figures={"full": short}),
        Row(title="MoCo-v3 (2)", method=None, figures={"full": long}, changes={"rounds": 50}),
        fedhpl("Supervised", {"full": supervised}),
    ]
    name = f"13-{task}-alpha-{alpha}-{models}"
    return setting(name, "13", task, models, f"alpha-{alpha}", rows, choices=(NO_WEIGHTS,))


def local_epochs(models: str) -> Setting:
    """Make a half of Table 14."""
    rows = [
        fedhpl(f"T_c = {epochs}", clients(figures), recipe=replace(RECIPE, epochs=epochs))
        for epochs, figures in enumerate(TABLE_14[models], start=1)
    ]
    return setting(f"14-{models}", "14", "cifar10", models, "alpha-0.1", rows)


COLUMNS = [(task, division) for task in TASKS for division in DIVISIONS]
SETTINGS = (
    *(equal_models(*each, column) for column, each in enumerate(COLUMNS)),
    *(different_models(*each, column) for column, each in enumerate(COLUMNS)),
    *(heterogeneity(models, each) for models, half in TABLE_3_LEFT.items() for each in half),
    *(policies(models, each, i) for models in TABLE_3_RIGHT for i, each in enumerate(DIVISIONS)),
    *(uploads(*each, division, i) for each in TABLE_11 for i, division in enumerate(DIVISIONS)),
    *(pretraining(models, *each) for models in TRANSFORMERS for each in TABLE_13),
    *(local_epochs(models) for models in TRANSFORMERS),
)
