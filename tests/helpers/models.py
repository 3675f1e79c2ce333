"""Small models with random weights; ``docs/reference/models.md`` is made from the same table."""

from collections.abc import Mapping
from typing import NamedTuple

import timm
import torch
import torch.nn as nn
import torch.nn.functional as F
from packaging.version import Version
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from fedprompt import DeepPrompts, encode_prompted
from fedprompt.interfaces import Trunk
from fedprompt.privacy import per_sample

TINY: Mapping[str, object] = {"depth": 3, "embed_dim": 48, "num_heads": 3}


class Row(NamedTuple):
    """One timm model: its name, its family, overrides, and a part of the reason if refused."""

    name: str
    family: str
    overrides: Mapping[str, object]
    refusal: str | None = None
    sizes: Mapping[str, object] = TINY


PATCH_16: Mapping[str, object] = {"img_size": 64}
PATCH_14: Mapping[str, object] = {"img_size": 56}

# Versions of timm that added a model, or a float64 table of mixed rotary positions.
SINCE = {
    "vit_base_patch14_reg1_tipsv2": "1.0.28", "vit_tiny_patch16_dinov3_qkvb": "1.0.28",
    "vit_base_patch16_radio_v3": "1.0.31", "vit_small_patch16_rope_mixed_224": "1.0.31",
    "vit_small_patch16_rope_mixed_ape_224": "1.0.31", "test_vit_relpos": "1.0.31",
    "test_coatnet": "1.0.31",
}  # fmt: skip


def installed(name: str) -> bool:
    """Whether the installed timm has a model; all models are in the newest version."""
    return Version(timm.__version__) >= Version(SINCE.get(name, "0"))


ALL_ACCEPTED = (
    # VisionTransformer
    Row("vit_tiny_patch16_224", "ViT", PATCH_16),
    Row("vit_small_patch16_224", "ViT, dynamic image size", {**PATCH_16, "dynamic_img_size": True}),
    Row("vit_base_patch16_224_miil", "ViT, MIIL", PATCH_16),
    Row("vit_small_patch16_18x2_224", "ViT, parallel things", PATCH_16),
    Row("vit_medium_patch16_reg1_gap_256", "ViT, register", PATCH_16),
    Row("vit_dwee_patch16_reg1_gap_256", "ViT, differential attention", PATCH_16),
    Row("vit_pwee_patch16_reg1_gap_256", "ViT, parallel scaling", PATCH_16),
    Row("vit_so150m_patch16_reg4_gap_256", "ViT SO150M", PATCH_16),
    Row("vit_so150m_patch16_reg4_map_256", "ViT SO150M", PATCH_16),
    Row("vit_so150m2_patch16_reg1_gap_256", "ViT SO150M 2", PATCH_16),
    Row("vit_base_patch16_rpn_224", "ViT, residual post-norm", PATCH_16),
    Row("vit_base_patch16_xp_224", "ViT-22B style", PATCH_16),
    Row("vit_tiny_r_s16_p8_224", "ViT, ResNet hybrid", PATCH_16),
    Row("flexivit_small", "FlexiViT", PATCH_16),
    Row("deit_tiny_distilled_patch16_224", "DeiT, distilled", PATCH_16),
    Row("deit3_small_patch16_224", "DeiT III", PATCH_16),
    Row("beit3_base_patch16_224", "BEiT-3", PATCH_16),
    Row("vit_small_patch14_dinov2", "DINOv2", PATCH_14),
    Row("vit_small_patch14_reg4_dinov2", "DINOv2, registers", PATCH_14),
    Row("vit_base_patch14_reg1_tipsv2", "TIPSv2", PATCH_14),
    Row("vit_base_patch16_siglip_224", "SigLIP", PATCH_16),
    Row("vit_base_patch16_siglip_gap_224", "SigLIP", PATCH_16),
    Row("vit_base_patch16_clip_224", "CLIP", PATCH_16),
    Row("vit_base_patch32_clip_quickgelu_224", "CLIP, QuickGELU", PATCH_16),
    Row("aimv2_large_patch14_224", "AIMv2", PATCH_14),
    Row("vit_base_patch16_radio_v3", "RADIO", PATCH_16),
    Row("vit_intern300m_patch14_448", "InternViT", PATCH_14),
    Row("eva_large_patch14_196", "EVA", PATCH_14),
    Row("test_vit", "ViT, timm's test model", PATCH_16),
    Row("test_vit3", "ViT, timm's test model", PATCH_16),
    # Eva: rotary positions
    Row("eva_giant_patch14_224", "EVA", PATCH_14),
    Row("eva_giant_patch14_clip_224", "EVA-CLIP", PATCH_14),
    Row("eva02_tiny_patch14_224", "EVA-02", PATCH_14),
    Row("eva02_base_patch16_clip_224", "EVA-02-CLIP", PATCH_16),
    Row("vit_small_patch16_dinov3", "DINOv3", PATCH_16),
    Row("vit_tiny_patch16_dinov3_qkvb", "DINOv3", PATCH_16),
    Row("vit_pe_core_tiny_patch16_384", "Perception Encoder, core", PATCH_16),
    Row("vit_pe_lang_large_patch14_448", "Perception Encoder, language", PATCH_14),
    Row("vit_pe_spatial_tiny_patch16_512", "Perception Encoder, spatial", PATCH_16),
    Row("vit_small_patch16_rope_224", "RoPE-ViT, axial", PATCH_16),
    Row("vit_small_patch16_rope_ape_224", "RoPE-ViT, axial and absolute", PATCH_16),
    Row("vit_small_patch16_rope_mixed_224", "RoPE-ViT, mixed", PATCH_16),
    Row("vit_small_patch16_rope_mixed_ape_224", "RoPE-ViT, mixed and absolute", PATCH_16),
    Row("vit_base_patch16_rope_reg1_gap_256", "RoPE-ViT, register", PATCH_16),
)

ACCEPTED = tuple(row for row in ALL_ACCEPTED if installed(row.name))

SWIN: Mapping[str, object] = {"embed_dim": 24, "depths": (1, 1), "num_heads": (1, 2)}
HIERA: Mapping[str, object] = {"embed_dim": 24, "num_heads": 1, "stages": (1, 1, 1, 1)}
LEVIT: Mapping[str, object] = {"embed_dim": (32, 48), "depth": (1, 1), "num_heads": (2, 3)}
NONE: Mapping[str, object] = {}
WRITE = "Write a trunk"
WINDOWS = "no trunk can support it.*windows has none"

ALL_REFUSED = (
    Row("swin_tiny_patch4_window7_224", "Swin", PATCH_14, WINDOWS, SWIN),
    Row("swinv2_tiny_window8_256", "Swin v2", PATCH_16, WINDOWS, SWIN),
    Row("samvit_base_patch16", "SAM", PATCH_16, refusal=WINDOWS),
    Row("beit_base_patch16_224", "BEiT", PATCH_16, refusal="relative position"),
    Row("beitv2_base_patch16_224", "BEiT v2", PATCH_16, refusal="relative position"),
    Row("test_vit_relpos", "ViT, relative positions", PATCH_16, refusal="relative position"),
    Row("naflexvit_base_patch16_gap", "NaFlexViT", {}, refusal="packed sequences"),
    Row("hiera_tiny_224", "Hiera", {}, WRITE, HIERA),
    Row("cait_xxs24_224", "CaiT", PATCH_16, WRITE),
    Row("xcit_nano_12_p16_224", "XCiT", PATCH_16, WRITE),
    Row("levit_128s", "LeViT", {"img_size": 64}, WRITE, LEVIT),
    Row("test_resnet", "ResNet", {}, "PadPrompts", NONE),
    Row("test_convnext", "ConvNeXt", {}, "PadPrompts", NONE),
    Row("test_efficientnet", "EfficientNet", {}, "PadPrompts", NONE),
)
REFUSED = tuple(row for row in ALL_REFUSED if installed(row.name))


def build(row: Row, *, seed: int = 0) -> nn.Module:
    """Make a row's model in float64 and eval mode, with three blocks of width 48.

    No parameter keeps a value of zero or one, see `perturbed`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = timm.create_model(
            row.name, pretrained=False, num_classes=0, **row.sizes, **row.overrides
        )
    return perturbed(model, seed=seed)


def perturbed(model: nn.Module, *, seed: int = 0) -> nn.Module:
    """Convert a model to float64 and eval mode and add noise to every parameter, in place.

    The class token, registers and gammas of a fresh model are zero. Without noise, a forward pass
    that ignores them would pass the tests.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.double().parameters():
            parameter += 0.1 * torch.randn(
                parameter.shape, generator=generator, dtype=parameter.dtype
            )
    return model.eval()


def tiny_vit(**overrides: object) -> VisionTransformer:
    """Make a float64 ViT with four patches, a class token, a register and three blocks."""
    sizes = {
        "img_size": 16, "patch_size": 8, "embed_dim": 12, "depth": 3, "num_heads": 2,
        "reg_tokens": 1, "num_classes": 0,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = VisionTransformer(**sizes | overrides)
    return perturbed(model)


class Client(nn.Module):
    """Trainable prompts and a head over a shared trunk, in float64."""

    def __init__(self, trunk: Trunk, generator: torch.Generator, *, num_classes: int = 4) -> None:
        super().__init__()
        self.trunk = trunk
        self.prompts = DeepPrompts(2, trunk.dim, trunk.depth, generator=generator)
        self.head = nn.Linear(trunk.dim, num_classes)
        for parameter in self.head.parameters():
            nn.init.normal_(parameter, generator=generator)
        self.double()

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (batch, classes)."""
        return self.head(encode_prompted(self.trunk, images, self.prompts()).pooled)


def row_named(name: str) -> Row:
    """Find an accepted model."""
    return next(row for row in ACCEPTED if row.name == name)


def draw_images(model: nn.Module, batch: int = 2, *, seed: int = 1) -> Tensor:
    """Draw images of the model's input size, in its dtype."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(
        batch, 3, *model.patch_embed.img_size, generator=generator, dtype=torch.float64
    )
    return images.to(next(model.parameters()).dtype)


def plain(model: nn.Module, images: Tensor) -> Tensor:
    """Return the features that timm passes to the classifier."""
    return model.forward_head(model.forward_features(images), pre_logits=True)


def train(
    client: nn.Module, images: Tensor, labels: Tensor, *, steps: int = 3
) -> dict[str, Tensor]:
    """Train a client with momentum and weight decay, and return its state from before."""
    before = {name: value.clone() for name, value in client.state_dict().items()}
    client.train()
    optimizer = torch.optim.SGD(client.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(client(images), labels).backward()
        optimizer.step()
    return before


def assert_takes_no_images(trunk: Trunk, images: Tensor) -> None:
    """Run an empty batch forward and backward, with the prompts of no samples and of all."""
    prompts = DeepPrompts(2, trunk).double()
    for module in (per_sample(prompts, 0), prompts):
        encoded = encode_prompted(trunk, images[:0], module())
        assert encoded.pooled.shape == (0, trunk.num_features)
        assert encoded.streams[0].shape == (0, 2, trunk.dim)
        (encoded.pooled.sum() + encoded.streams[0].sum()).backward()
        for parameter in module.parameters():
            assert torch.equal(parameter.grad, torch.zeros_like(parameter))


def num_trainable(*modules: nn.Module) -> int:
    """Count the parameters with gradients."""
    parameters = (parameter for module in modules for parameter in module.parameters())
    return sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
