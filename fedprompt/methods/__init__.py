"""The gallery: published methods as functions (setting, *, hyperparameters) -> :class:`Method`.

These are reference implementations. Their figures may change between minor versions, with a line in
the changelog. Only the signature is stable. ``import fedprompt`` does not import this package.
"""

from fedprompt.methods.fedbabu import fedbabu
from fedprompt.methods.fedgen import fedgen
from fedprompt.methods.fedper import fedper
from fedprompt.methods.fedprox import fedprox
from fedprompt.methods.pfedmoap import pfedmoap
from fedprompt.methods.registry import METHODS, Entry, register
from fedprompt.methods.scaffold import scaffold
from fedprompt.methods.setting import ClientData, ClipSetting, Federation, Setting, VitSetting

__all__ = [
    "METHODS",
    "ClientData",
    "ClipSetting",
    "Entry",
    "Federation",
    "Setting",
    "VitSetting",
    "fedbabu",
    "fedgen",
    "fedper",
    "fedprox",
    "pfedmoap",
    "register",
    "scaffold",
]
