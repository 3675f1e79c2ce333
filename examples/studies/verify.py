"""Checks of a paper's setting before a long run: a ladder that stops at the first wrong rung."""

import math
import warnings
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp
from fedprompt.compare import Trial
from fedprompt.methods.steps import take_step
from studies import papers, reproduction
from studies.backbones import Make, backbone, looks
from studies.core import Machine
from studies.estimate import SIZES
from studies.sets import SIZE, ImageSet

MARGIN = 2.0  # points that an accuracy may lie outside of two published ones; a guess
STEPS = 20  # on one batch
EACH = 10  # images of a class whose features are compared
MOST = 0.7  # share of a class that is taken for another one, if labels count as permuted


class Finding(NamedTuple):
    """What a rung expects and finds; `cause` is empty if the set-up is right."""

    expected: str
    found: str
    cause: str = ""


@dataclass
class Case:
    """A row of a setting, its data, and its trial with seed 0, which are read when needed.

    Attributes:
        paper: Name of the paper.
        partition: Name of the setting.
        row: papers.PaperRow.
        machine: Where the data set is, and the device.
        of: Function that makes backbones, without weights. If None, they have their weights.
    """

    paper: str
    partition: str
    row: papers.PaperRow
    machine: Machine
    of: Make | None = None

    @property
    def backbone(self) -> Make:
        """Function that makes backbones, with the weights of the machine."""
        return self.of or partial(backbone, weights=self.machine.weights)

    @cached_property
    def setting(self) -> papers.Setting:
        """Setting of the row."""
        return papers.settings(self.paper)[self.partition].of(self.row)

    @cached_property
    def data(self) -> ImageSet:
        """Whole data set, not shrunk."""
        return reproduction.loaded(self.setting, self.machine)

    @cached_property
    def trial(self) -> Trial:
        """Trial of the row."""
        parts = self.setting, self.data, self.row, 0, self.machine, self.backbone
        with torch.device("cpu"):  # where positions of images are
            return reproduction.divided(*parts).on(self.machine.device)

    @property
    def run(self) -> Any:
        """Setting of the methods."""
        return self.trial.setting

    @property
    def test_labels(self) -> Tensor:
        """Class of each test image."""
        return self.trial.tests.labels


def sizes(case: Case) -> Finding:
    """Compare the numbers of images and classes with the known ones."""
    right, data = SIZES[case.setting.data], case.data
    counts = {"train": len(data.train.labels), "test": len(data.test.labels)}
    counts["classes"] = len(data.class_names)
    near = 0.01 if "about" in right else 0.0
    wrong = [n for n in counts if n in right and abs(counts[n] - right[n]) > near * right[n]]
    cause = f"the numbers of {', '.join(wrong)} differ from the data set's" if wrong else ""
    if wrong and (counts["train"], counts["test"]) == (right["test"], right["train"]):
        cause = "training and test images are swapped"
    expected = ", ".join(f"{name} {right.get(name, 'not known')}" for name in counts)
    return Finding(expected, ", ".join(f"{n} {count}" for n, count in counts.items()), cause)


def names(case: Case) -> Finding:
    """Compare the range of labels, and the order of class names, with the known ones."""
    right, names = SIZES[case.setting.data], case.data.class_names
    sides = case.data.train.labels, case.data.test.labels
    expected = f"labels 0 to {len(names) - 1}, {right['first']} to {right['last']}"
    expected += ", alphabetical" if "alphabetical" in right else ""
    labels = torch.cat(sides)
    found = f"labels {labels.min()} to {labels.max()}, {names[0]} to {names[-1]}"
    keys = [name.replace(" ", "_").casefold() for name in names]
    cause = ""
    if any(side.unique().tolist() != list(range(len(names))) for side in sides):
        cause = "labels are shifted, or a class has no image"
    elif (names[0].casefold(), names[-1].casefold()) != (right["first"], right["last"]):
        cause = "class names are not those of the data set, or in another order"
    elif "alphabetical" in right and keys != sorted(keys):
        place = next(k for k, key in enumerate(sorted(keys)) if key != keys[k])
        cause = f"class names are swapped: {names[place]!r} has label {place}"
    return Finding(expected, found, cause)


def frozen(case: Case) -> Finding:
    """Require that backbones are in eval mode, and that none of their parameters is trained."""
    if case.setting.family == "networks":
        return Finding("networks from scratch are not frozen", "networks from scratch")
    models = [trunk.model for trunk in getattr(case.run, "trunks", ())]
    models = models or [*getattr(case.run, "networks", ())] or [case.run.clip]
    train = sum(module.training for model in models for module in model.modules())
    free = sum(weight.requires_grad for model in models for weight in model.parameters())
    cause = "the backbone is in train mode" if train else "the backbone is trained" if free else ""
    found = f"{train} modules in train mode, {free} trained parameters"
    return Finding("0 modules in train mode, 0 trained parameters", found, cause)


def images(case: Case) -> Finding:
    """Compare the side of images, their mean and deviation with the backbone's configuration."""
    setting, run = case.setting, case.run
    prepares = [trunk.prepare for trunk in getattr(run, "trunks", ())] or [run.prepare]
    stored = SIZES[setting.data].get("side", SIZE), case.data.train.pixels.shape[-1]
    for name, prepare in zip(setting.backbones, prepares, strict=False):
        normal = prepare.mean.flatten().tolist(), prepare.std.flatten().tolist()
        pair = configured(setting, name), (prepare.size, *normal, prepare.interpolation)
        expected, found = (
            f"stored {side} px, {size} px, mean {_short(mean)}, std {_short(std)}, {how}"
            for side, (size, mean, std, how) in zip(stored, pair, strict=True)
        )
        cause = "" if found == expected else f"images of {name} have another size or normalization"
        if cause:
            break
    return Finding(expected, found, cause)


def configured(setting: papers.Setting, name: str) -> tuple[int, Any, Any, str]:
    """Return the side, mean, deviation and interpolation that the weights of a name need."""
    if setting.family == "networks":
        return setting.image_size, (0.5,) * 3, (0.5,) * 3, "bilinear"
    return looks(name)


@torch.no_grad()
def labels(case: Case) -> Finding:
    """Require that training and test images of a class have similar features.

    Means of training features classify test images. Random networks notice gross mistakes only.
    """
    federation, count = case.trial.federation, case.run.num_classes
    sides = []
    model = None if hasattr(case.run, "clip") else case.run.new_model(0).eval()
    train = federation.inputs, federation.labels.cpu()
    for inputs, classes in (train, (case.trial.tests.inputs, case.test_labels)):
        chosen = torch.cat([torch.nonzero(classes == k)[:EACH, 0] for k in range(count)])
        parts = [inputs[part].to(case.run.device) for part in chosen.split(128)]
        found = [part[:, 0] if model is None else model.features(part) for part in parts]
        features = torch.cat(found).float().cpu()
        sides.append((features - features.mean(0), classes[chosen]))
    (features, classes), (test, true) = sides
    means = fp.class_means(features, classes, num_classes=count)
    distances = torch.cdist(test, means.value).masked_fill(means.weight == 0, math.inf)
    guesses = distances.argmin(1)
    cause = permuted(guesses, true, case.data.class_names)
    right = f"{(guesses == true).float().mean():.1%} of test images nearest to their class"
    return Finding("no classes exchanged between training and test images", right, cause)


def permuted(guesses: Tensor, true: Tensor, class_names: tuple[str, ...]) -> str:
    """Return which classes are taken for one another in a circle, or nothing."""
    count = len(class_names)
    counts = torch.bincount(true * count + guesses, minlength=count**2).view(count, count)
    share, other = (counts / counts.sum(1, keepdim=True).clamp(min=1)).max(1)
    follow = {k: int(other[k]) for k in range(len(share)) if share[k] > MOST}
    for first in follow:
        circle = [first]
        while (following := follow.get(circle[-1])) not in (None, *circle):
            circle.append(following)
        if following == first and len(circle) > 1:
            return f"labels are exchanged: {', '.join(class_names[k] for k in circle)}"
    return ""


def activation(case: Case) -> Finding:
    """Compare the activation of a CLIP with that of its weights."""
    name, tag = case.setting.backbones[0].split(":")
    with warnings.catch_warnings(action="ignore"):  # the cause says the same
        same = fp.check.activation(case.run.clip, name, tag)
    cause = "" if same else "build the model with force_quick_gelu=True"
    return Finding(f"the activation of the weights {tag}", "the same" if same else "another", cause)


def text(case: Case) -> Finding:
    """Check the text tower with ten class names, and print the cosines of their features."""
    run, chosen = case.run, case.data.class_names[:10]
    cause = ""
    try:
        fp.check.text_encoder(run.tower, run.tower.class_names(chosen))
    except ValueError as error:
        cause = f"the text tower fails: {error}"
    features = fp.zero_shot_classifier(run.tower, chosen, [case.data.template])
    others = ~torch.eye(len(chosen), device="cpu").bool()
    cosines = (features @ features.T).cpu()[others]
    found = f"cosines of {len(chosen)} sentences: mean {cosines.mean():.4f}, "
    found += f"lowest {cosines.min():.4f}, highest {cosines.max():.4f}"
    if not cause and cosines.max() > 1 - 1e-5:
        cause = "two class names have the same features"
    return Finding("different features; there is no published reference", found, cause)


@torch.no_grad()
def zero_shot(case: Case) -> Finding:
    """Compare the zero-shot accuracy of CLIP on all test images with published figures."""
    names = case.data.class_names
    classifier = fp.zero_shot_classifier(case.run.tower, names, [case.data.template])
    parts = torch.arange(len(case.trial.tests.inputs), device="cpu").split(1024)
    tokens = (case.trial.tests.inputs[part][:, 0].to(classifier.device) for part in parts)
    guesses = torch.cat([(part @ classifier.T).argmax(1).cpu() for part in tokens])
    accuracy = 100 * (guesses == case.test_labels).float().mean().item()
    band = SIZES[case.setting.data].get("zero_shot", {}).get(case.setting.backbones[0])
    found = f"{accuracy:.1f} %"
    off = {"random weights": case.of is not None}
    off |= {"few images": case.machine.shrink != 1, "no published figure": band is None}
    if why := [reason for reason, holds in off.items() if holds]:
        return Finding(f"no band ({why[0]})", found)
    low, high = band[0] - MARGIN, band[1] + MARGIN
    cause = permuted(guesses, case.test_labels, names)
    if not low <= accuracy <= high:
        cause = cause or "weights, images, class names or sentence are not those of the papers"
    return Finding(f"{low:.1f} to {high:.1f} %", found, cause)


def first_steps(case: Case) -> Finding:
    """Train on one batch, and require that the loss begins near chance and decreases."""
    data, model = case.trial.federation.data(case.run, 0, 0), case.run.new_model(0)
    rows = case.row, *papers.settings(case.paper)[case.partition].rows  # zero-shot has no rate
    rate = next(row.values["learning_rate"] for row in rows if "learning_rate" in row.values)
    optimizer = case.run.optimizer(model, rate)
    (inputs, classes), losses = next(iter(data.batches())), []
    for _ in range(STEPS):
        loss = F.cross_entropy(model(inputs), classes)
        take_step(optimizer, loss)
        losses.append(loss.item())
    chance = math.log(case.run.num_classes)
    low = 0.0 if case.setting.family == "CLIP" else chance / 2  # CLIP may know the classes
    cause = "" if low < losses[0] < 2 * chance else "the loss begins far from chance"
    if not cause and not min(losses[1:]) < losses[0]:
        cause = f"the loss does not decrease in {STEPS} steps on one batch"
    found = f"{losses[0]:.3f}, at best {min(losses[1:]):.3f} in {STEPS} steps"
    return Finding(f"{low:.2f} to {2 * chance:.2f}, then less", found, cause)


RUNGS = [sizes, names, frozen, images, labels, activation, text, zero_shot, first_steps]
CLIP_ONLY = (activation, text, zero_shot)


def climb(case: Case) -> None:
    """Print what each rung expects and finds.

    Raises:
        ValueError: At the first rung that fails, with the cause.
    """
    for number, rung in enumerate(RUNGS, 1):
        title = rung.__name__.replace("_", " ")
        if rung in CLIP_ONLY and case.setting.family != "CLIP":
            print(f"{number:2}. {title}: only for CLIP")
            continue
        with torch.device(case.machine.device):
            expected, found, cause = rung(case)
        print(f"{number:2}. {title}: expected {expected}; found {found}")
        if cause:
            raise ValueError(f"rung {number} of {len(RUNGS)}, {title}: {cause}.")


def _short(values: Any) -> str:
    return " ".join(f"{value:.3f}" for value in values)
