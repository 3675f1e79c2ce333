"""Agreement of SGPT's groups with the superclasses of CIFAR-100."""

import torch
from jaxtyping import Int
from torch import Tensor

import fedprompt as fp
from fedprompt.compare.trials import Trial
from tasks.core import content

SUPERCLASSES = content("sizes")["superclasses"]["cifar100"]


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
