"""The gallery: published methods as functions (setting, *, hyperparameters) -> :class:`Method`.

These are reference implementations. Their figures may change between minor versions, with a line in
the changelog. Only the signature is stable. ``import fedprompt`` does not import this package.
"""

from fedprompt.methods.checks import check_messages
from fedprompt.methods.cocoop import cocoop
from fedprompt.methods.coop import coop
from fedprompt.methods.ditto import ditto
from fedprompt.methods.dpfpl import dpfpl
from fedprompt.methods.evaluate import counted_passes, evaluate
from fedprompt.methods.fedamp import fedamp
from fedprompt.methods.fedapt import fedapt
from fedprompt.methods.fedbabu import fedbabu
from fedprompt.methods.fedclip import fedclip
from fedprompt.methods.feddistill import feddistill
from fedprompt.methods.fedem import fedem
from fedprompt.methods.fedex_lora import fedex_lora
from fedprompt.methods.fedgen import fedgen
from fedprompt.methods.fedgh import fedgh
from fedprompt.methods.fedhe import fedhe
from fedprompt.methods.fedhpl import fedhpl, fedhpl_h, fedhpl_p
from fedprompt.methods.fedkd import fedkd
from fedprompt.methods.fedl2g import fedl2g_f, fedl2g_l
from fedprompt.methods.fedlora import fedlora
from fedprompt.methods.fedmaple import fedmaple
from fedprompt.methods.fedmd import fedmd
from fedprompt.methods.fedmgp import fedmgp
from fedprompt.methods.fedmix import fedmix
from fedprompt.methods.fedopt import fedadam, fedavgm, fedyogi
from fedprompt.methods.fedotp import fedotp, fedotp_average, fedotp_classical
from fedprompt.methods.fedper import fedper
from fedprompt.methods.fedpgp import fedpgp
from fedprompt.methods.fedpha import fedpha
from fedprompt.methods.fedpr import fedpr
from fedprompt.methods.fedproto import fedproto
from fedprompt.methods.fedprox import fedprox
from fedprompt.methods.fedrep import fedrep
from fedprompt.methods.fedtgp import fedtgp
from fedprompt.methods.fedtpg import fedtpg
from fedprompt.methods.fedvpt import fedvpt, fedvpt_d
from fedprompt.methods.ffa_lora import ffa_lora
from fedprompt.methods.fml import fml
from fedprompt.methods.full_tuning import full_tuning
from fedprompt.methods.head import head_tuning
from fedprompt.methods.kgcoop import kgcoop
from fedprompt.methods.lg_fedavg import lg_fedavg
from fedprompt.methods.local import local
from fedprompt.methods.perfedavg import perfedavg, perfedavg_first_order
from fedprompt.methods.pfedme import pfedme
from fedprompt.methods.pfedmoap import pfedmoap
from fedprompt.methods.pfedpg import pfedpg
from fedprompt.methods.pfedpt import pfedpt
from fedprompt.methods.plain_steps import plain_steps
from fedprompt.methods.prograd import prograd
from fedprompt.methods.promptfl import promptfl
from fedprompt.methods.promptfl_fedamp import promptfl_fedamp
from fedprompt.methods.promptfl_fedper import promptfl_fedper
from fedprompt.methods.promptfl_fedprox import promptfl_fedprox
from fedprompt.methods.promptfl_ft import promptfl_ft
from fedprompt.methods.promptfolio import promptfolio
from fedprompt.methods.promptsrc import promptsrc
from fedprompt.methods.registry import METHODS, Entry, register
from fedprompt.methods.scaffold import scaffold
from fedprompt.methods.setting import ClientData, ClipSetting, Federation, Setting, VitSetting
from fedprompt.methods.sgpt import sgpt
from fedprompt.methods.zero_shot import zero_shot

__all__ = [
    "METHODS",
    "ClientData",
    "ClipSetting",
    "Entry",
    "Federation",
    "Setting",
    "VitSetting",
    "check_messages",
    "cocoop",
    "coop",
    "counted_passes",
    "ditto",
    "dpfpl",
    "evaluate",
    "fedadam",
    "fedamp",
    "fedapt",
    "fedavgm",
    "fedbabu",
    "fedclip",
    "feddistill",
    "fedem",
    "fedex_lora",
    "fedgen",
    "fedgh",
    "fedhe",
    "fedhpl",
    "fedhpl_h",
    "fedhpl_p",
    "fedkd",
    "fedl2g_f",
    "fedl2g_l",
    "fedlora",
    "fedmaple",
    "fedmd",
    "fedmgp",
    "fedmix",
    "fedotp",
    "fedotp_average",
    "fedotp_classical",
    "fedper",
    "fedpgp",
    "fedpha",
    "fedpr",
    "fedproto",
    "fedprox",
    "fedrep",
    "fedtgp",
    "fedtpg",
    "fedvpt",
    "fedvpt_d",
    "fedyogi",
    "ffa_lora",
    "fml",
    "full_tuning",
    "head_tuning",
    "kgcoop",
    "lg_fedavg",
    "local",
    "perfedavg",
    "perfedavg_first_order",
    "pfedme",
    "pfedmoap",
    "pfedpg",
    "pfedpt",
    "plain_steps",
    "prograd",
    "promptfl",
    "promptfl_fedamp",
    "promptfl_fedper",
    "promptfl_fedprox",
    "promptfl_ft",
    "promptfolio",
    "promptsrc",
    "register",
    "scaffold",
    "sgpt",
    "zero_shot",
]
