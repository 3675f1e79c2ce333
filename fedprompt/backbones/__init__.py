"""Adapters for timm and open_clip, the only modules that import these libraries."""

from fedprompt.backbones.fingerprint import fingerprint
from fedprompt.backbones.open_clip_activation import check_activation
from fedprompt.backbones.open_clip_images import image_tokens
from fedprompt.backbones.text_tower import TextTower
from fedprompt.backbones.timm import vit_trunk

__all__ = ["TextTower", "check_activation", "fingerprint", "image_tokens", "vit_trunk"]
