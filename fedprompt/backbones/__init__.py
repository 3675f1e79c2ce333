"""The only rooms that know timm and open_clip."""

from fedprompt.backbones.timm import vit_trunk

__all__ = ["vit_trunk"]
