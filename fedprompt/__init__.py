"""Composable pieces for federated prompt tuning in PyTorch. The loop stays yours.

The names below are the pieces of a training loop, grouped by concept. Families are submodules,
such as ``fp.data`` for partitions and ``fp.transport`` for solvers. ``fedprompt.methods``,
``fedprompt.samples`` and ``fedprompt.flower``, which needs an extra, are imported by name.
"""

from importlib.metadata import version as _version

from fedprompt import (
    aggregation,
    check,
    codecs,
    data,
    guidance,
    interfaces,
    metrics,
    plots,
    privacy,
    robust,
    rounds,
    selection,
    transport,
    tuning,
    wire,
)
from fedprompt.aggregation.by_name import update_by_name
from fedprompt.aggregation.heterogeneous import heterogeneous_means
from fedprompt.aggregation.means import weighted_mean
from fedprompt.aggregation.optimizers import descend
from fedprompt.aggregation.servers import averaging_server, ema, overwrite
from fedprompt.backbones.features import precompute
from fedprompt.backbones.fingerprint import fingerprint
from fedprompt.backbones.freezing import freeze, training_only
from fedprompt.backbones.images.patches import image_tokens
from fedprompt.backbones.images.vit import vit_trunk
from fedprompt.backbones.text.templates import zero_shot_classifier
from fedprompt.backbones.text.tower import TextTower
from fedprompt.checkpoint import load_checkpoint, save_checkpoint
from fedprompt.distillation import class_means, distillation_loss, mutual_loss
from fedprompt.interfaces import Method, PromptStream, Round, Server, Weighted
from fedprompt.matching.logits import cosine_logits, transport_logits
from fedprompt.messages.describe import describe
from fedprompt.messages.ledger import Ledger
from fedprompt.messages.parts import named, part
from fedprompt.messages.payload import collect, delta, load_values, num_bytes, snapshot
from fedprompt.prompts.context import ContextPrompts, prompted_text
from fedprompt.prompts.forward import encode_from, encode_front, encode_prompted
from fedprompt.prompts.low_rank_context import LowRankContext
from fedprompt.prompts.padding import PadPrompts
from fedprompt.prompts.start import initialize_at, mean_patch_tokens
from fedprompt.prompts.visual import DeepPrompts, GroupPrompts, LayeredPrompts, ShallowPrompts
from fedprompt.proximal import proximal_loss
from fedprompt.rounds import run_rounds
from fedprompt.sampling import sample_clients, stream_generator
from fedprompt.saved.prompts import load_prompts, save_prompts

__all__ = [
    # Evidence: a value, and a weight for each row
    "Weighted",
    # Prompts, and the forward pass with them
    "ShallowPrompts",
    "DeepPrompts",
    "LayeredPrompts",
    "GroupPrompts",
    "PadPrompts",
    "ContextPrompts",
    "LowRankContext",
    "PromptStream",
    "prompted_text",
    "encode_prompted",
    "encode_front",
    "encode_from",
    "mean_patch_tokens",
    "initialize_at",
    # Frozen backbones
    "vit_trunk",
    "TextTower",
    "image_tokens",
    "zero_shot_classifier",
    "fingerprint",
    "freeze",
    "training_only",
    "precompute",
    # Logits and losses
    "cosine_logits",
    "transport_logits",
    "class_means",
    "distillation_loss",
    "mutual_loss",
    "proximal_loss",
    # Messages
    "snapshot",
    "collect",
    "load_values",
    "part",
    "named",
    "delta",
    "num_bytes",
    "describe",
    "Ledger",
    "save_prompts",
    "load_prompts",
    # Aggregators: entries or payloads in, one out
    "weighted_mean",
    "heterogeneous_means",
    # Server rules: the next broadcast from the last one and a mean
    "overwrite",
    "ema",
    "descend",
    "update_by_name",
    # Methods, their rounds and checkpoints
    "Method",
    "Server",
    "Round",
    "averaging_server",
    "run_rounds",
    "sample_clients",
    "stream_generator",
    "save_checkpoint",
    "load_checkpoint",
    # Families
    "aggregation",
    "check",
    "codecs",
    "data",
    "guidance",
    "interfaces",
    "metrics",
    "plots",
    "privacy",
    "robust",
    "rounds",
    "selection",
    "transport",
    "tuning",
    "wire",
]

__version__ = _version("fedprompt")
