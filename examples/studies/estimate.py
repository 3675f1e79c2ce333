"""Arithmetic of the hours that rows take, without data and weights."""

import json
import math
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import timm
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import fedprompt as fp
from fedprompt import samples
from fedprompt.methods import (
    METHODS,
    ClipSetting,
    Federation,
    NetworkSetting,
    VitSetting,
    counted_passes,
)
from fedprompt.methods import Setting as Run
from studies.backbones import backbone
from studies.controls import CONTROLS
from studies.core import Row, content
from studies.networks import small_network
from studies.papers import POINTS, Setting

GPU = "an A100 at half of its 19.5 TFLOP/s in float32, and at least 10 ms a step"
SPEED = 0.5 * 19.5e12
STEP = 0.01  # seconds that a step takes at least, however small the batch; a guess
BATCH = 256  # test images
EACH = 4  # images of a client in the count of passes
NAME_TOKENS = 6  # of a class name with its start, stop and end
SIZES = content("sizes")
"""Numbers of images and classes of each data set."""


def paper_hours(setting: Setting, row: Row) -> float | None:
    """Estimate the hours of a row, or return None if the images cannot be counted.

    Training takes the operations that the method takes with small networks (:func:`passes`), for
    the images and networks of the setting. Evaluation counts: methods with a model for each client
    encode all test images for each client.
    """
    setting, sizes = setting.of(row), SIZES[setting.data]
    images = _images(setting)
    if images is None:
        return None
    tested = sizes["test"]
    if setting.test_share is not None:
        tested = setting.test_share * (tested + sizes["train"])
    count = setting.num_clients
    points = min(POINTS, setting.rounds) if setting.curve else 0
    looked = points * images if setting.curve == "loss" else 0
    tests = max(setting.last_rounds, 0 if looked else points) + setting.per_class
    tests *= count if row.personalized else 1
    turns = setting.rounds * setting.epochs * setting.cohort_size / count
    steps = turns * count * math.ceil(images / count / setting.batch_size)
    flops = [forward_flops(name, setting.image_size) for name in setting.backbones]
    one = sum(flops) / len(flops)
    kind = "borders" if setting.family != "networks" and _is_bordered(setting) else ""
    factor, blocks = passes(kind or setting.family, str(row.method), _frozen(row.values))
    if setting.family == "CLIP":
        # Image tokens are computed once; each step encodes all class names.
        text = _text_flops(setting.backbones[0]) * (setting.length + NAME_TOKENS)
        text *= sizes["classes"]
        before = (images + tested) * one + 2 * tests * math.ceil(tested / BATCH) * text
        total = factor * steps * text
    else:
        before = (tests * tested + looked) * one
        total = factor * turns * images * one
    return (before / SPEED + max(total / SPEED, blocks * steps * STEP)) / 3600


def _is_bordered(setting: Setting) -> bool:
    return setting.family != "CLIP" and not setting.backbones[0].startswith("vit")


def _frozen(values: Mapping[str, Any]) -> str:
    """Return the values of a row as text, without the rates and weights, which cost nothing."""
    kept = {name: each for name, each in values.items() if not isinstance(each, float)}
    return json.dumps(kept, sort_keys=True)


@cache
def passes(family: str, method: str, values: str) -> tuple[float, float]:
    """Count the operations of a method in training, with small networks on random images.

    Everything that a client computes in a round counts: passes back, second networks, queries,
    messages, and what a prediction trains for each round.

    Args:
        family: Family of the methods, or "borders" for frozen convolutional networks.
        method: Name of the method.
        values: Its values, as JSON; others have their defaults.

    Returns:
        Operations for each image of an epoch, in forward passes of its network, or for CLIP for
        each step, in passes of one context with all class names; and steps for each batch of an
        epoch.
    """
    setting, inputs, unit = small_setting(family)
    labels = torch.arange(len(inputs)) % setting.num_classes
    shards = dict(enumerate(torch.arange(len(inputs)).split(EACH)))
    federation = Federation(inputs, labels, shards)
    made = (METHODS | CONTROLS)[method].make(setting, **json.loads(values))
    steps, predicted = 0, list[int]()
    with Operations() as counted, counted_passes() as back:
        for now in fp.run_rounds(made, federation):
            spent, steps = counted.total - sum(predicted), back.total()
            now.model(made, federation, 0)
            predicted.append(counted.total - sum(predicted) - spent)
    batches = 2 * setting.rounds * EACH // setting.batch_size
    spent += 2 * (predicted[1] - predicted[0]) * setting.rounds
    count = batches if family == "CLIP" else batches * setting.batch_size
    return spent / count / unit, steps / batches


class Operations(TorchDispatchMode):
    """Count of the floating-point operations of products and convolutions, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count it."""
        found, count = func(*args, **(kwargs or {})), flop_registry.get(func.overloadpacket)
        if count is not None:
            self.total += count(*args, **(kwargs or {}), out_val=found)
        return found


def small_setting(family: str) -> tuple[Run, torch.Tensor, float]:
    """Make a setting of two clients with small networks, their inputs, and a pass of the network.

    Networks have twelve blocks, as ViT-B/16, and classes are as many as clients need.
    """
    torch.manual_seed(0)
    budget = {"clients": range(2), "cohort_size": 2, "rounds": 2, "epochs": 1, "batch_size": 2}
    budget |= {"make_optimizer": partial(torch.optim.SGD, momentum=0.9)}
    images = torch.randint(256, (2 * EACH, 3, 32, 32)).float()
    if family == "CLIP":
        clip = samples.clip()
        tower = fp.TextTower(clip, samples.tokenize)
        names = list(samples.CLASS_NAMES[:4])
        context = fp.ContextPrompts(tower.dim, length=8)
        run = ClipSetting(tower=tower, class_names=names, length=8, public=None, **budget)
        tokens = torch.rand(2 * EACH, 65, clip.visual.output_dim)
        return (
            run,
            tokens,
            _flops(lambda: tower(fp.prompted_text(context(), tower.class_names(names)))),
        )
    same = budget | {"num_classes": 4, "public": images[:4]}
    sizes = {"img_size": 32, "patch_size": 4, "embed_dim": 128, "num_heads": 2, "num_classes": 0}
    vit = timm.models.vision_transformer.VisionTransformer(depth=12, **sizes)
    network = small_network()
    if family == "networks":
        run = NetworkSetting(networks=[small_network], num_features=64, **same)
    elif family == "borders":
        border = partial(fp.PadPrompts, 32, padding=1, mean=[0.0] * 3, std=[1.0] * 3)
        run = NetworkSetting(networks=[network], border=border, num_features=64, **same)
    else:
        run, network = VitSetting(trunk=fp.vit_trunk(vit), num_prompts=1, **same), vit
    return run, images, _flops(lambda: network(images)) / len(images)


def _flops(call: Callable[[], object]) -> int:
    with torch.no_grad(), Operations() as counted:
        call()
    return counted.total


def _images(setting: Setting) -> float | None:
    """Count the training images of all clients."""
    partition, sizes = setting.partition, SIZES[setting.data]
    classes, total = sizes.get("classes"), sizes.get("train")
    if partition.shots is not None and classes:
        return partition.shots * classes
    if total is not None and setting.test_share is not None:
        total = (total + sizes["test"]) * (1 - setting.test_share)
    return total


@cache
def forward_flops(name: str, image_size: int) -> int:
    """Count the floating-point operations of a forward pass on one image, without prompts."""
    # open_clip moves its models, so theirs need memory.
    with torch.device("cpu" if name.endswith(":openai") else "meta"):
        model = backbone(name, image_size, random=True).model
        images = torch.zeros(1, 3, image_size, image_size)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        getattr(model, "visual", model).eval()(images)
    return counter.get_total_flops()


@cache
def _text_flops(name: str) -> int:
    """Count the operations of a CLIP's text blocks on one token, without attention scores."""
    import open_clip

    config = open_clip.get_model_config(name.removesuffix(":openai"))["text_cfg"]
    return 2 * 12 * config["layers"] * config["width"] ** 2
