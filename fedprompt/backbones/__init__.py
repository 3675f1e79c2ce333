"""Adapters for timm, open_clip and transformers; no other package imports these libraries."""

from fedprompt.backbones.fingerprint import fingerprint
from fedprompt.backbones.open_clip_activation import check_activation
from fedprompt.backbones.open_clip_images import image_tokens
from fedprompt.backbones.text_encoder_check import check_text_encoder
from fedprompt.backbones.text_tower import TextTower
from fedprompt.backbones.trunk import vit_trunk
from fedprompt.backbones.trunk_check import check_trunk
from fedprompt.backbones.zero_shot import zero_shot_classifier

__all__ = [
    "TextTower",
    "check_activation",
    "check_text_encoder",
    "check_trunk",
    "fingerprint",
    "image_tokens",
    "vit_trunk",
    "zero_shot_classifier",
]
