"""The gallery: published methods as functions (setting, *, hyperparameters) -> :class:`Method`.

These are reference implementations. Their figures may change between minor versions, with a line in
the changelog. Only the signature is stable. ``import fedprompt`` does not import this package.
"""

# Type checkers read the names written in `__all__`, and for methods, which are not, the `as`.
from fedprompt.methods.attack import backdoored
from fedprompt.methods.audit import check_messages
from fedprompt.methods.cocoop import cocoop as cocoop
from fedprompt.methods.coop import coop as coop
from fedprompt.methods.ditto import ditto as ditto
from fedprompt.methods.dpfpl import dpfpl as dpfpl
from fedprompt.methods.evaluate import Figures, HeldOut, counted_passes, evaluate
from fedprompt.methods.fedamp import fedamp as fedamp
from fedprompt.methods.fedapt import fedapt as fedapt
from fedprompt.methods.fedbabu import fedbabu as fedbabu
from fedprompt.methods.fedclip import fedclip as fedclip
from fedprompt.methods.feddistill import feddistill as feddistill
from fedprompt.methods.fedem import fedem as fedem
from fedprompt.methods.fedex_lora import fedex_lora as fedex_lora
from fedprompt.methods.fedgen import fedgen as fedgen
from fedprompt.methods.fedgh import fedgh as fedgh
from fedprompt.methods.fedhe import fedhe as fedhe
from fedprompt.methods.fedhpl import fedhpl as fedhpl
from fedprompt.methods.fedhpl import fedhpl_h as fedhpl_h
from fedprompt.methods.fedhpl import fedhpl_p as fedhpl_p
from fedprompt.methods.fedivlp import fedivlp as fedivlp
from fedprompt.methods.fedivlp import fedvpt_clip as fedvpt_clip
from fedprompt.methods.fedkd import fedkd as fedkd
from fedprompt.methods.fedl2g import fedl2g_f as fedl2g_f
from fedprompt.methods.fedl2g import fedl2g_l as fedl2g_l
from fedprompt.methods.fedlora import fedlora as fedlora
from fedprompt.methods.fedmaple import fedmaple as fedmaple
from fedprompt.methods.fedmd import fedmd as fedmd
from fedprompt.methods.fedmgp import fedmgp as fedmgp
from fedprompt.methods.fedmix import fedmix as fedmix
from fedprompt.methods.fedmvp import fedmvp as fedmvp
from fedprompt.methods.fedopt import fedadam as fedadam
from fedprompt.methods.fedopt import fedavgm as fedavgm
from fedprompt.methods.fedopt import fedyogi as fedyogi
from fedprompt.methods.fedotp import fedotp as fedotp
from fedprompt.methods.fedotp import fedotp_average as fedotp_average
from fedprompt.methods.fedotp import fedotp_classical as fedotp_classical
from fedprompt.methods.fedper import fedper as fedper
from fedprompt.methods.fedpgp import fedpgp as fedpgp
from fedprompt.methods.fedpha import fedpha as fedpha
from fedprompt.methods.fedplot import fedplot as fedplot
from fedprompt.methods.fedpr import fedpr as fedpr
from fedprompt.methods.fedproto import fedproto as fedproto
from fedprompt.methods.fedprox import fedprox as fedprox
from fedprompt.methods.fedrep import fedrep as fedrep
from fedprompt.methods.fedsa_lora import fedsa_lora as fedsa_lora
from fedprompt.methods.fedsept import fedsept as fedsept
from fedprompt.methods.fedtgp import fedtgp as fedtgp
from fedprompt.methods.fedtpg import fedtpg as fedtpg
from fedprompt.methods.fedvpt import fedvpt as fedvpt
from fedprompt.methods.fedvpt import fedvpt_d as fedvpt_d
from fedprompt.methods.ffa_lora import ffa_lora as ffa_lora
from fedprompt.methods.flexlora import flexlora as flexlora
from fedprompt.methods.flexlora import flexlora_exact as flexlora_exact
from fedprompt.methods.flora import flora as flora
from fedprompt.methods.fml import fml as fml
from fedprompt.methods.full_tuning import full_tuning as full_tuning
from fedprompt.methods.head import head_tuning as head_tuning
from fedprompt.methods.hetlora import hetlora as hetlora
from fedprompt.methods.kgcoop import kgcoop as kgcoop
from fedprompt.methods.lg_fedavg import lg_fedavg as lg_fedavg
from fedprompt.methods.local import local as local
from fedprompt.methods.models import ClipSetting, VitSetting
from fedprompt.methods.perfedavg import perfedavg as perfedavg
from fedprompt.methods.perfedavg import perfedavg_first_order as perfedavg_first_order
from fedprompt.methods.pfedme import pfedme as pfedme
from fedprompt.methods.pfedmoap import pfedmoap as pfedmoap
from fedprompt.methods.pfedpg import pfedpg as pfedpg
from fedprompt.methods.pfedpt import pfedpt as pfedpt
from fedprompt.methods.plain_steps import plain_steps as plain_steps
from fedprompt.methods.prograd import prograd as prograd
from fedprompt.methods.promptfl import promptfl as promptfl
from fedprompt.methods.promptfl_fedamp import promptfl_fedamp as promptfl_fedamp
from fedprompt.methods.promptfl_fedper import promptfl_fedper as promptfl_fedper
from fedprompt.methods.promptfl_fedprox import promptfl_fedprox as promptfl_fedprox
from fedprompt.methods.promptfl_ft import promptfl_ft as promptfl_ft
from fedprompt.methods.promptfolio import promptfolio as promptfolio
from fedprompt.methods.promptsrc import promptsrc as promptsrc
from fedprompt.methods.registry import METHODS, Entry, import_packages, register
from fedprompt.methods.scaffold import scaffold as scaffold
from fedprompt.methods.setting import ClientData, Federation, Setting
from fedprompt.methods.sgpt import sgpt as sgpt
from fedprompt.methods.sizes import of_sizes
from fedprompt.methods.steps import averaged, fedavg_client, take_step
from fedprompt.methods.trip import trip as trip
from fedprompt.methods.whole_networks import NetworkSetting as NetworkSetting
from fedprompt.methods.zero_shot import zero_shot as zero_shot

__all__ = [
    "METHODS",
    "ClientData",
    "ClipSetting",
    "Entry",
    "Federation",
    "Figures",
    "HeldOut",
    "NetworkSetting",
    "Setting",
    "VitSetting",
    "averaged",
    "backdoored",
    "check_messages",
    "counted_passes",
    "evaluate",
    "fedavg_client",
    "of_sizes",
    "papers",
    "register",
    "take_step",
    *METHODS,
]

from fedprompt.methods import papers as papers

import_packages()  # after `__all__`, which has the methods of this package alone
