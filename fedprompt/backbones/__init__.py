"""Adapters for timm and open_clip, the only modules that import these libraries."""

from fedprompt.backbones.fingerprint import fingerprint
from fedprompt.backbones.open_clip_activation import check_activation
from fedprompt.backbones.open_clip_images import image_tokens
from fedprompt.backbones.text_encoder_check import check_text_encoder
from fedprompt.backbones.text_tower import TextTower
from fedprompt.backbones.timm import vit_trunk
from fedprompt.backbones.zero_shot import zero_shot_classifier

__all__ = [
    "TextTower",
    "check_activation",
    "check_text_encoder",
    "fingerprint",
    "image_tokens",
    "vit_trunk",
    "zero_shot_classifier",
]
