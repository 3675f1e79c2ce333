"""Agreement of SGPT's groups with the superclasses of CIFAR-100."""

import torch
from jaxtyping import Int
from torch import Tensor

import fedprompt as fp
from fedprompt.compare.trials import Trial

# Superclass of each class of CIFAR-100, whose classes are in the order of their names.
SUPERCLASSES = (
    *(4, 1, 14, 8, 0, 6, 7, 7, 18, 3, 3, 14, 9, 18, 7, 11, 3, 9, 7, 11),
    *(6, 11, 5, 10, 7, 6, 13, 15, 3, 15, 0, 11, 1, 10, 12, 14, 16, 9, 11, 5),
    *(5, 19, 8, 8, 15, 13, 14, 17, 18, 10, 16, 4, 17, 4, 2, 0, 17, 4, 18, 17),
    *(10, 3, 2, 12, 12, 16, 12, 1, 9, 19, 2, 10, 0, 1, 16, 12, 9, 13, 15, 13),
    *(16, 19, 2, 4, 6, 19, 5, 5, 8, 19, 18, 1, 2, 15, 6, 0, 17, 8, 14, 13),
)


@torch.no_grad()
def cluster_accuracy(trial: Trial, method: fp.Method, now: fp.Round) -> dict[str, float]:
    """Measure how well the groups of test images of CIFAR-100 agree with their superclasses.

    Returns:
        `clusters`, the share of the images whose superclass is the most frequent one of their
        group.
    """
    first = trial.setting.clients[0]
    model = now.model(method, trial.federation.data(first, now.server_round))
    batches = (inputs.to(trial.setting.device) for inputs in trial.test.split(256))
    chosen = [model.selector(model.query(inputs)).indices.cpu() for inputs in batches]
    superclasses = torch.tensor(SUPERCLASSES, device="cpu")[trial.test_cells]
    return {"clusters": purity(torch.cat(chosen), superclasses)}


def purity(groups: Int[Tensor, "images"], kinds: Int[Tensor, "images"]) -> float:
    """Return the share of the images whose kind is the most frequent one of their group."""
    sizes = int(groups.max()) + 1, int(kinds.max()) + 1
    table = fp.metrics.contingency_table(groups, kinds, *sizes)
    return fp.selection.selection_health(table)["purity"]
