"""Small comparisons: three clients with digits, and folders of images whose color is the class."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from fedprompt import compare, samples, vit_trunk
from fedprompt.methods import HeldOut, VitSetting

CLASSES = ("cat", "dog", "fox", "owl")
AMOUNT = 1.0


def dimmed(images, generator=None):
    """Make images darker by a global number."""
    return images * AMOUNT


class Lazy:
    """Inputs that are read when they are needed."""

    def __init__(self, values):
        self.values = values

    def __len__(self):
        return len(self.values)

    def __getitem__(self, positions):
        return self.values[positions]


@cache
def _trunk(dtype):
    return vit_trunk(samples.vit("S"))


def setting_of_digits():
    """Make the setting of a small network."""
    given = {"num_classes": 10, "rounds": 2, "steps": 2, "batch_size": 4}
    return VitSetting(trunk=_trunk(torch.get_default_dtype()), **given)


def trial_of(problem, partition="", **where):
    """Make the trial of a row without a method."""
    row = compare.Row("", "", family=problem.families[0])
    return problem.trial(partition, row, **{"seed": 0, **where})


def digits(seeds_differ=False, figures=None, **changes):
    """Make a problem of three clients with 30 digits each."""
    images, labels, test_images, test_labels = samples.digits()
    parts = {
        "inputs": images[:90],
        "labels": labels[:90],
        "tests": HeldOut(test_images[:60], test_labels[:60]),
        "newcomers": 0,
    }
    own = {name: changes.pop(name) for name in parts.keys() & changes.keys()}
    parts |= own

    def clients(draw):
        order = draw.permutation(90) if seeds_differ else np.arange(90)
        return dict(enumerate(np.split(order, 3)))

    given = {"setting": replace(setting_of_digits(), **changes), "newcomers": parts["newcomers"]}
    where = parts["inputs"], parts["labels"], clients, parts["tests"]
    return compare.problem(*where, figures=figures, **given)


def run_of(root, out):
    """Run two methods, of a folder of images or of digits."""
    given = {"vit": "digits-B", "layout": "domain/class", "rounds": 3, "steps": 1}
    cache = None if out is None else f"{out}/cache"
    problem = compare.folder(root, cache=cache, **given) if root else digits(rounds=4)
    return compare.run(problem, ["head_tuning", "fedproto"], seeds=1 if root else 2, out=out)


def folder(root, layout="{name}", count=6, domains=("art", "photo"), size=32):
    """Write images whose color says the class, and whose brightness the domain."""
    draw = np.random.default_rng(0)
    for number, domain in enumerate(domains if "{domain}" in layout else ("",)):
        for label, name in enumerate(CLASSES):
            for index in range(count):
                split = "test" if index % 3 == 0 else "train"
                place = Path(root) / layout.format(domain=domain, split=split, name=name)
                place.mkdir(parents=True, exist_ok=True)
                pixels = draw.normal(60 + 20 * number, 20, (size, size, 3))
                pixels[..., label % 3] += 90 - 60 * (label == 3)
                shown = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
                shown.save(place / f"{domain}{index}.png")
    return Path(root)


def tiny_vit(**options):
    """Make a random vision transformer of timm."""
    import timm

    with torch.random.fork_rng():
        torch.manual_seed(0)
        return timm.create_model("test_vit", num_classes=0, **({"img_size": 32} | options)).eval()
