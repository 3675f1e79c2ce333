"""The gallery: published methods as functions (setting, *, hyperparameters) -> :class:`Method`.

These are reference implementations. Their figures may change between minor versions, with a line in
the changelog. Only the signature is stable. ``import fedprompt`` does not import this package.
"""

from fedprompt.methods.ditto import ditto
from fedprompt.methods.fedamp import fedamp
from fedprompt.methods.fedbabu import fedbabu
from fedprompt.methods.feddistill import feddistill
from fedprompt.methods.fedem import fedem
from fedprompt.methods.fedgen import fedgen
from fedprompt.methods.fedgh import fedgh
from fedprompt.methods.fedhe import fedhe
from fedprompt.methods.fedmd import fedmd
from fedprompt.methods.fedmix import fedmix
from fedprompt.methods.fedopt import fedadam, fedavgm, fedyogi
from fedprompt.methods.fedper import fedper
from fedprompt.methods.fedpr import fedpr
from fedprompt.methods.fedproto import fedproto
from fedprompt.methods.fedprox import fedprox
from fedprompt.methods.fedrep import fedrep
from fedprompt.methods.fedvpt import fedvpt, fedvpt_d
from fedprompt.methods.head import head_tuning
from fedprompt.methods.local import local
from fedprompt.methods.perfedavg import perfedavg, perfedavg_first_order
from fedprompt.methods.pfedme import pfedme
from fedprompt.methods.pfedmoap import pfedmoap
from fedprompt.methods.pfedpg import pfedpg
from fedprompt.methods.pfedpt import pfedpt
from fedprompt.methods.plain_steps import plain_steps
from fedprompt.methods.registry import METHODS, Entry, register
from fedprompt.methods.scaffold import scaffold
from fedprompt.methods.setting import ClientData, ClipSetting, Federation, Setting, VitSetting
from fedprompt.methods.sgpt import sgpt

__all__ = [
    "METHODS",
    "ClientData",
    "ClipSetting",
    "Entry",
    "Federation",
    "Setting",
    "VitSetting",
    "ditto",
    "fedadam",
    "fedamp",
    "fedavgm",
    "fedbabu",
    "feddistill",
    "fedem",
    "fedgen",
    "fedgh",
    "fedhe",
    "fedmd",
    "fedmix",
    "fedper",
    "fedpr",
    "fedproto",
    "fedprox",
    "fedrep",
    "fedvpt",
    "fedvpt_d",
    "fedyogi",
    "head_tuning",
    "local",
    "perfedavg",
    "perfedavg_first_order",
    "pfedme",
    "pfedmoap",
    "pfedpg",
    "pfedpt",
    "plain_steps",
    "register",
    "scaffold",
    "sgpt",
]
