"""Draw the transport plan of test images between their patches and two prototypes of their class.

PYTHONPATH=examples python docs/make_plan.py WEIGHTS docs/results/tables/plan.png
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

import fedprompt as fp
from studies import patches
from studies.core import Machine
from studies.photos import DINO

weights, path = sys.argv[1:]
row = patches.ROWS[1]  # mass 1
machine = Machine(weights={DINO: Path(weights)})
trial = patches.make("shots-8", row, seed=0, machine=machine)
method = row.entry.make(trial.setting, **row.values)
*_, now = fp.run_rounds(method, trial.federation)
model = now.model(method, trial.federation, 0)
side = patches.CANVAS // 14
known = (trial.tests.mixes[0] > 0)[trial.tests.cells].nonzero()[:4, 0].tolist()
figure, axes = plt.subplots(2, len(known), figsize=(8, 4.2), layout="constrained")
for column, image in enumerate(known):
    label = trial.tests.cells[image]
    prototypes = torch.stack(
        [part.weight[label] for part in (model.shared, model.private)]
    )
    cost = 1 - F.cosine_similarity(
        trial.tests.inputs[image, 1:, None], prototypes[None], dim=-1
    )
    with torch.no_grad():
        patch, prototype = (
            torch.full((len(cost),), 1 / len(cost)),
            torch.full((2,), 0.5),
        )
        plan = fp.transport.newton(cost, patch, prototype, epsilon=0.1).plan
    axes[0, column].imshow(
        patches.canvases()[0][patches.NUM_TRAIN + image, 0], cmap="gray"
    )
    share = (plan[:, 1] / plan.sum(1)).view(side, side)
    drawn = axes[1, column].imshow(share, cmap="RdBu", vmin=0, vmax=1)
for axis in axes.flat:
    axis.set(xticks=[], yticks=[])
figure.colorbar(drawn, ax=axes[1], label="to the private prototype")
figure.savefig(path, dpi=120)
