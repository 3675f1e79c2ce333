"""Composable pieces for federated prompt tuning in PyTorch. The loop stays yours.

The names below are the pieces of a training loop, grouped by concept. Families are submodules:
``fp.transport``, ``fp.wire``, ``fp.codecs``, ``fp.privacy``, ``fp.metrics``, ``fp.data``,
``fp.selection``, ``fp.guidance`` and ``fp.plots``. ``fedprompt.samples`` and ``fedprompt.flower``,
which needs an extra, are imported by name.
"""

from fedprompt import codecs, data, guidance, metrics, plots, privacy, selection, transport, wire

# Aggregators and server rules: entries or payloads in, one out; then the next broadcast.
from fedprompt.aggregation import (
    aggregate_by_name,
    averaging_server,
    descend,
    distances,
    ema,
    fedadam,
    fedavgm,
    fedopt,
    fedyogi,
    heterogeneous_means,
    krum,
    mixtures,
    multi_krum,
    overwrite,
    trimmed_mean,
    update_by_name,
    weighted_mean,
    weighted_median,
)

# Frozen backbones.
from fedprompt.backbones import (
    TextTower,
    check_activation,
    check_text_encoder,
    check_trunk,
    fingerprint,
    image_tokens,
    vit_trunk,
    zero_shot_classifier,
)

# Checkpoints of a run.
from fedprompt.checkpoint import load_checkpoint, save_checkpoint

# Partitions of a data set over clients.
from fedprompt.data import by_domain, dirichlet, dirichlet_overlapping, iid, pathological

# Losses and logits.
from fedprompt.distillation import class_means, distillation_loss, mutual_loss
from fedprompt.features import precompute
from fedprompt.freezing import freeze, training_only
from fedprompt.guidance import guide_gradient, guided_loss

# The noun, and the protocols that your own pieces implement.
from fedprompt.interfaces import (
    Aggregator,
    Coupling,
    Method,
    PromptSelector,
    PromptStream,
    Round,
    Selection,
    Server,
    ServerUpdate,
    TextEncoder,
    TransportSolver,
    Trunk,
    Weighted,
)
from fedprompt.matching import cosine_logits, transport_logits

# Messages between clients and server.
from fedprompt.messages import (
    Ledger,
    collect,
    delta,
    load_values,
    named,
    num_bytes,
    part,
    snapshot,
)

# Prompts, and the forward pass with them.
from fedprompt.prompts import (
    ContextPrompts,
    DeepPrompts,
    GroupPrompts,
    LayeredPrompts,
    LowRankContext,
    PadPrompts,
    PromptGenerator,
    ShallowPrompts,
    batch_streams,
    encode_from,
    encode_prompted,
    front_tokens,
    mean_tokens,
    prompted_text,
    start_at_tokens,
)
from fedprompt.proximal import proximal_loss

# Rounds of a method, in one process or on ranks.
from fedprompt.rounds import coded, counted, load_optimizer, optimizer_state, run_rounds

# Client sampling and random generators.
from fedprompt.sampling import cohort, stream_generator

# Trained prompts in files, for use elsewhere.
from fedprompt.saved_prompts import load_prompts, save_prompts
from fedprompt.selection import SelectionKeys, key_loss, select_balanced, select_nearest

__all__ = [
    # The noun
    "Weighted",
    # Prompts
    "ShallowPrompts",
    "DeepPrompts",
    "LayeredPrompts",
    "GroupPrompts",
    "PadPrompts",
    "ContextPrompts",
    "LowRankContext",
    "PromptGenerator",
    "prompted_text",
    "encode_prompted",
    "encode_from",
    "front_tokens",
    "mean_tokens",
    "start_at_tokens",
    "batch_streams",
    # Frozen backbones
    "vit_trunk",
    "check_trunk",
    "TextTower",
    "image_tokens",
    "zero_shot_classifier",
    "check_text_encoder",
    "check_activation",
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
    "guided_loss",
    "guide_gradient",
    "proximal_loss",
    # Prompt selection
    "SelectionKeys",
    "select_nearest",
    "select_balanced",
    "key_loss",
    # Aggregators
    "weighted_mean",
    "heterogeneous_means",
    "weighted_median",
    "trimmed_mean",
    "krum",
    "multi_krum",
    "aggregate_by_name",
    "mixtures",
    "distances",
    # Server rules
    "overwrite",
    "ema",
    "descend",
    "fedopt",
    "fedavgm",
    "fedadam",
    "fedyogi",
    "update_by_name",
    # Methods and their rounds
    "Method",
    "Server",
    "Round",
    "run_rounds",
    "averaging_server",
    "counted",
    "coded",
    "optimizer_state",
    "load_optimizer",
    # Messages
    "snapshot",
    "collect",
    "load_values",
    "part",
    "named",
    "delta",
    "num_bytes",
    "Ledger",
    "save_prompts",
    "load_prompts",
    # Sampling, checkpoints
    "cohort",
    "stream_generator",
    "save_checkpoint",
    "load_checkpoint",
    # Partitions
    "iid",
    "dirichlet",
    "dirichlet_overlapping",
    "pathological",
    "by_domain",
    # Protocols, and what their implementations return
    "Trunk",
    "TextEncoder",
    "PromptSelector",
    "TransportSolver",
    "Aggregator",
    "ServerUpdate",
    "PromptStream",
    "Selection",
    "Coupling",
    # Families
    "transport",
    "selection",
    "guidance",
    "wire",
    "codecs",
    "privacy",
    "metrics",
    "data",
    "plots",
]
