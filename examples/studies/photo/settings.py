"""Settings of the study of photographs: divisions over clients, networks, rows and budgets."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from studies.gallery.tasks import Settings

IMAGE_SIZE, START = 56, 9  # pixels, and first block of a client
SHORT = 9  # blocks of the network that ends early; it starts as many blocks before its end
HEAD_RATE = 0.1  # of the learning rate of a method
ALPHA = 0.3
NUM_IMAGES = {"solar": 2624, "mnist": 3000}
BUDGET = Settings(
    rounds=16, steps=10, batch_size=8, cohort_size=4, num_clients=12, num_public=64, num_test=480
)
QUICK = Settings(
    rounds=2, steps=2, batch_size=8, cohort_size=2, num_clients=12, num_public=16, num_test=60
)

ONE = ("local", "head_tuning", "fedvpt", "fedvpt_d", "sgpt", "pfedme", "perfedavg", "ditto")
TAUGHT = ("local", "fedhpl", "fedhpl_p", "fedhpl_h")
GUIDED = ("local", "fedl2g_l", "fedl2g_f")


class Setting(NamedTuple):
    """A data set, the division over the clients, their networks, and the rows.

    Attributes:
        title: Words for tables.
        shifted: Whether each client has one domain. If not, labels are divided by Dirichlet.
        networks: Names in `NETWORKS`, given to the clients in turn.
        methods: Rows.
        rounds: Number of rounds. A step of a convolutional network takes several times as long.
    """

    title: str
    shifted: bool
    networks: tuple[str, ...]
    methods: tuple[str, ...]
    rounds: int = BUDGET.rounds

    def budget(self, quick: bool) -> Settings:
        """Return the budget of a run."""
        return QUICK if quick else replace(BUDGET, rounds=self.rounds)


SETTINGS = {
    "domains": Setting("one domain for each client", True, ("whole",), ONE),
    "labels": Setting("label shift (Dirichlet .3)", False, ("whole",), ONE),
    "depths": Setting(
        "label shift, networks of three widths",
        False,
        ("short", "wide", "convolutional"),
        TAUGHT,
        12,
    ),
    "networks": Setting(
        "label shift, three kinds of networks",
        False,
        ("whole", "convolutional", "small"),
        GUIDED,
        12,
    ),
}
TITLES = {"solar": "Solar cells", "mnist": "MNIST-5k"}


@dataclass(frozen=True)
class Sources:
    """Where the two pretrained networks come from.

    Attributes:
        dino: File of DINOv2, or None.
        efficientnet: File of EfficientNet-Lite0, or None.
        pretrained: Whether timm downloads the missing ones.
        random: Whether tiny random networks take their place, for tests.
    """

    dino: Path | None = None
    efficientnet: Path | None = None
    pretrained: bool = False
    random: bool = False
