"""Export of prompted models by `torch.export` and ONNX, with a dynamic batch size."""

import numpy as np
import pytest
import torch
import torch.nn as nn
from timm.models.eva import Eva
from torch.export import Dim, export

import fedprompt as fp
from clips import NAMES, TOKENIZER, make_clip
from fedprompt.selection import select_nearest
from models import tiny_vit
from tolerance import assert_near


class Deep(nn.Module):
    """VPT-deep and a head."""

    def __init__(self, model):
        super().__init__()
        self.trunk = fp.vit_trunk(model)
        self.backbone = model
        self.prompts = fp.DeepPrompts(2, self.trunk.dim, self.trunk.depth)
        self.head = nn.Linear(self.trunk.dim, 5)

    def forward(self, images):
        return self.head(fp.encode_prompted(self.trunk, images, self.prompts()).pooled)


class Grouped(Deep):
    """SGPT: shared prompts, and those of the group of each image."""

    def __init__(self, model):
        super().__init__(model)
        self.shared = fp.LayeredPrompts(2, self.trunk.dim, layers=(0, 1))
        self.groups = fp.GroupPrompts(4, 1, self.trunk.dim, layers=(1, 2))
        self.keys = nn.Parameter(torch.randn(4, self.trunk.dim))

    def forward(self, images):
        query = fp.encode_prompted(self.trunk, images).pooled
        chosen = select_nearest(query, self.keys).indices
        encoded = fp.encode_prompted(self.trunk, images, self.shared(), self.groups(chosen))
        return self.head(torch.cat([encoded.pooled[:, None], encoded.streams[1]], 1).mean(1))


class Padded(nn.Module):
    """Learnable pixels around the images of a convolution."""

    def __init__(self):
        super().__init__()
        self.pad = fp.PadPrompts(16, padding=2)
        self.cnn = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)
        )

    def forward(self, images):
        return self.cnn(self.pad(images))


class Worded(nn.Module):
    """CoOp: a learned context, encoded in every forward pass."""

    def __init__(self):
        super().__init__()
        self.clip = make_clip().float()
        self.tower = fp.TextTower(self.clip, TOKENIZER)
        self.names = self.tower.class_names(NAMES)
        self.context = nn.Parameter(torch.randn(1, 4, self.tower.dim))

    def forward(self, images):
        text = self.tower(fp.prompted_text(self.context, self.names))[0]
        return fp.cosine_logits(fp.image_tokens(self.clip, images)[0], text, scale=10.0)


def tiny_eva():
    return Eva(
        img_size=16,
        patch_size=4,
        num_classes=0,
        embed_dim=16,
        depth=3,
        num_heads=2,
        use_rot_pos_emb=True,
    )


MODELS = {
    "deep": lambda: Deep(tiny_vit()),
    "deep, rotary": lambda: Deep(tiny_eva()),
    "grouped": lambda: Grouped(tiny_vit()),
    "padded": Padded,
    "words": Worded,
}


@pytest.fixture(params=MODELS)
def model(request):
    torch.manual_seed(0)
    return MODELS[request.param]().float().eval()


def images(batch, seed=0):
    return torch.randn(batch, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


@pytest.mark.unhooked  # checks of shapes would fix the batch size
@pytest.mark.parametrize(
    "model",
    [name if name == "deep" else pytest.param(name, marks=pytest.mark.slow) for name in MODELS],
    indirect=True,
)
def test_an_exported_program_takes_any_batch(model):
    program = export(model, (images(3),), dynamic_shapes=({0: Dim("batch", min=1)},)).module()
    for batch in (1, 2, 3, 8):
        assert_near(program(images(batch, seed=batch)), model(images(batch, seed=batch)))


@pytest.mark.slow
@pytest.mark.unhooked
@pytest.mark.parametrize("model", ["grouped", "padded"], indirect=True)
def test_an_onnx_model_takes_any_batch(model, tmp_path):
    import onnxruntime

    path = tmp_path / "model.onnx"
    shapes = ({0: Dim("batch", min=1)},)
    torch.onnx.export(model, (images(3),), path, dynamo=True, dynamic_shapes=shapes, verbose=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (name,) = (given.name for given in session.get_inputs())
    for batch in (1, 2, 3, 8):
        (logits,) = session.run(None, {name: images(batch, seed=batch).numpy()})
        expected = model(images(batch, seed=batch)).detach().numpy()
        np.testing.assert_allclose(logits, expected, atol=2e-5, rtol=1e-4)
