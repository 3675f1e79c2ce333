"""Decoding photographs into a file, next to `ImageFolder` of torchvision with as many workers."""

import time
from statistics import median

import numpy as np
import pytest
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from fedprompt.backbones.preparation import Preparation
from fedprompt.compare.images import decoded
from fedprompt.compare.trials import cores
from fedprompt.data import read_folder

pytestmark = pytest.mark.benchmark


def photographs(root, count):
    """Write noisy JPEG images of 500 x 375 pixels."""
    draw = np.random.default_rng(0)
    for number in range(count):
        colors = draw.integers(0, 256, (24, 32, 3), dtype=np.uint8)
        smooth = np.asarray(Image.fromarray(colors).resize((500, 375), Image.Resampling.BICUBIC))
        noisy = (smooth + draw.normal(0, 8, smooth.shape)).clip(0, 255).astype(np.uint8)
        place = root / f"class{number % 4}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noisy).save(place / f"{number}.jpg", quality=90)
    return root


def test_photographs_are_decoded_as_fast_as_by_torchvision(meter, tmp_path):
    root = photographs(tmp_path / "photos", meter.size(1_000, brief=8))
    how = {"preparation": Preparation(224, (0.5,) * 3, (0.5,) * 3, resized=256)}
    steps = [v2.Resize(256, v2.InterpolationMode.BICUBIC), v2.CenterCrop(224), v2.PILToTensor()]
    theirs, ours = ImageFolder(root, v2.Compose(steps)), read_folder(root)
    ratios = []
    for number in range(min(meter.rounds, 5)):
        began = time.perf_counter()
        decoded(ours, tmp_path / "cache", content=str(number), **how)
        between = time.perf_counter()
        for _ in DataLoader(theirs, batch_size=256, num_workers=cores()):
            pass
        ratios.append((between - began) / (time.perf_counter() - between))
    meter.report(f"{len(ours)} photographs, {cores()} cores", median(ratios), at_most=1.1)
