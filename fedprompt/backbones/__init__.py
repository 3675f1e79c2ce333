"""Adapters for timm, open_clip and transformers; no other package imports these libraries."""

from fedprompt.backbones.checks.activation import check_activation
from fedprompt.backbones.checks.text_encoder import check_text_encoder
from fedprompt.backbones.checks.trunk import check_trunk
from fedprompt.backbones.fingerprint import fingerprint
from fedprompt.backbones.images.patches import image_tokens
from fedprompt.backbones.images.trunk import vit_trunk
from fedprompt.backbones.text.tower import TextTower
from fedprompt.backbones.text.zero_shot import zero_shot_classifier

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
