"""Heterogeneous networks that return features.

There are eight tiny networks for the digits, and the larger ones of FedL2G's experiments.
"""

from collections.abc import Callable
from functools import partial

import torch.nn as nn
from timm.models._efficientnet_builder import decode_arch_def
from timm.models.convnext import ConvNeXt
from timm.models.mobilenetv3 import MobileNetV3
from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from timm.models.vision_transformer import VisionTransformer

from fedprompt.samples._pixels import IMAGE_SIZE


def cnn(
    channels: int, image_size: int, *, width: int, kernel: int, padding: int, dim: int
) -> nn.Module:
    """Build a network of two convolutions with max pooling and a linear layer.

    With its head it has four layers.
    """

    def block(before: int, after: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, kernel, padding=padding), nn.ReLU(), nn.MaxPool2d(2)]

    side = ((image_size + 2 * padding - kernel + 1) // 2 + 2 * padding - kernel + 1) // 2
    return nn.Sequential(
        *block(channels, width),
        *block(width, 2 * width),
        nn.Flatten(),
        nn.Linear(2 * width * side * side, dim),
        nn.ReLU(),
    )


def tiny_resnet(block: type[nn.Module], channels: tuple[int, ...]) -> nn.Module:
    """Build a ResNet with one block at each of four resolutions, from 8 pixels to 1."""
    model = ResNet(
        block,
        (1, 1, 1, 1),
        num_classes=0,
        in_chans=1,
        stem_type="deep",
        stem_width=8,
        channels=channels,
    )
    model.maxpool = nn.Identity()
    return model


def tiny_mobilenet() -> nn.Module:
    """Build a MobileNet of depthwise and inverted residual blocks with hard swish."""
    blocks = decode_arch_def([["ds_r1_k3_s1_e1_c8"], ["ir_r1_k3_s2_e3_c16"], ["cn_r1_k1_s1_c48"]])
    return MobileNetV3(
        blocks, num_classes=0, in_chans=1, stem_size=8, num_features=48, act_layer=nn.Hardswish
    )


tiny_vit = partial(VisionTransformer, img_size=IMAGE_SIZE, in_chans=1, num_classes=0, depth=2)
TINY: dict[str, Callable[[], nn.Module]] = {
    "cnn": partial(cnn, 1, IMAGE_SIZE, width=16, kernel=3, padding=1, dim=64),
    "resnet": partial(tiny_resnet, BasicBlock, (16, 16, 32, 32)),
    "vit4": partial(tiny_vit, patch_size=4, embed_dim=32, num_heads=2),
    "mobilenet": tiny_mobilenet,
    "wide_resnet": partial(tiny_resnet, BasicBlock, (16, 32, 48, 64)),
    "convnext": partial(
        ConvNeXt,
        in_chans=1,
        num_classes=0,
        depths=(1, 1, 1, 1),
        dims=(16, 24, 32, 48),
        patch_size=2,
        output_stride=16,
    ),
    "bottleneck_resnet": partial(tiny_resnet, Bottleneck, (8, 8, 16, 16)),
    "vit8": partial(tiny_vit, patch_size=8, embed_dim=48, num_heads=3),
}


SMALL = ("resnet4", "resnet6", "resnet8", "resnet10")
"""ResNets with a basic block at each of the first one, two, three or four stages."""


def network(name: str, image_size: int) -> nn.Module:
    """Build a network for color images, with random weights and without its head."""
    from torchvision.models import get_model, resnet

    if name == "cnn":
        return cnn(3, image_size, width=32, kernel=5, padding=0, dim=512)
    if name in SMALL:
        model = resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1])
        for stage in range(SMALL.index(name) + 2, 5):
            setattr(model, f"layer{stage}", nn.Identity())
    else:
        options = {"image_size": image_size} if name.startswith("vit") else {}
        if name == "googlenet":
            options = {"aux_logits": False, "init_weights": False}
        model = get_model(name, weights=None, **options)
    heads = ("heads", "fc", "classifier")
    setattr(model, next(head for head in heads if hasattr(model, head)), nn.Identity())
    return model
