"""Command-line flags, data split, backbone and precomputed queries of the SGPT study."""

import argparse
from argparse import Namespace
from typing import Any

from torch import Tensor

import fedprompt as fp
from embedded.shifts import Federation, Side, feature_shift, label_shift
from embedded.tasks import Backbone, load_backbone
from studies.flags import completed, limit_threads, new_parser
from studies.memory import add_checkpoint_flag

DIGITS: dict[str, Any] = {
    "backbone": "B", "ratio": 0.25, "rounds": 20, "epochs": 2, "batch_size": 32,
    "learning_rate": 0.05, "num_prompts": 8, "shared_length": 8, "shared_layers": (0, 1),
    "group_layers": (2, 3), "average": False,
}  # fmt: skip
PAPER: dict[str, Any] = {
    "backbone": "vit_base_patch16_224.augreg_in21k", "ratio": 0.05, "rounds": 60, "epochs": 5,
    "batch_size": 40, "learning_rate": 0.01, "num_prompts": 10, "shared_length": 1,
    "shared_layers": (0, 1, 2, 3), "group_layers": (4, 5, 6), "average": True, "groups": 20,
}  # fmt: skip
GROUPS = {"label": 10, "feature": 5}
"""Number of groups for the digits: the number of classes, or of domains."""


def layers(text: str) -> tuple[int, ...]:
    return tuple(int(layer) for layer in text.split(","))


def flags() -> argparse.ArgumentParser:
    """Make the parser; missing flags are set from `DIGITS` or, for other data, `PAPER`."""
    parser = new_parser(
        "SGPT",
        quick="two rounds of one epoch, to see that it runs",
        full="the tables of the documentation: both shifts, all rows, three seeds",
    )
    parser.add_argument(
        "--shift",
        choices=("label", "feature"),
        default="label",
        help="difference between clients: classes, or domains",
    )
    parser.add_argument("--classes-per-client", type=int, default=2, help="for label shift")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument(
        "--unseen",
        type=int,
        default=0,
        help="number of clients that never take part; they are tested with the global model",
    )
    parser.add_argument("--ratio", type=float, help="fraction of the clients in a round")
    parser.add_argument(
        "--validate",
        action="store_true",
        help="test on a quarter of the training images: to choose the other flags",
    )
    add_training_flags(parser)
    add_model_flags(parser)
    add_checkpoint_flag(parser)
    return parser


def add_training_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of local training."""
    parser.add_argument("--rounds", type=int)
    parser.add_argument(
        "--epochs",
        type=int,
        help="for each of SGPT's two blocks; rows of one block have twice as many",
    )
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument(
        "--weight-decay",
        type=float,
        default=1e-5,
        help="of shared prompts and heads; keys and groups have none",
    )


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of models and prompts."""
    parser.add_argument("--groups", type=int)
    parser.add_argument("--num-prompts", type=int, help="of FedVPT and FedVPT-D, for each layer")
    parser.add_argument(
        "--shared-length", type=int, help="shared prompts that enter at each of their layers"
    )
    parser.add_argument(
        "--group-length",
        type=int,
        default=1,
        help="prompts of each group that enter at each of its layers",
    )
    parser.add_argument("--shared-layers", type=layers)
    parser.add_argument("--group-layers", type=layers)
    parser.add_argument(
        "--average",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="the head reads the mean of class and group tokens; default: except for the digits",
    )
    parser.add_argument("--query-depth", type=int, help="blocks of the query; default: all")
    parser.add_argument("--backbone", help="B, L, or any of timm's vision transformers")
    parser.add_argument(
        "--pretrained", action="store_true", help="download weights for timm's models"
    )


def filled(args: Namespace) -> Namespace:
    """Set missing flags from the defaults."""
    usual = DIGITS | {"groups": GROUPS[args.shift]} if args.dataset == "digits" else PAPER
    quick = {"rounds": 2, "epochs": 1} if args.quick else {}
    return Namespace(**vars(completed(args, usual)) | quick)


def prepare(args: Namespace) -> tuple[Federation, Backbone, Namespace]:
    """Load data and backbone, compute every query once, and set missing flags."""
    limit_threads(args)
    args = filled(args)
    if args.shift == "label":
        keys = ("root", "image_size", "seed", "classes_per_client", "validate")
        federation = label_shift(
            args.dataset, num_clients=args.clients, **{key: vars(args)[key] for key in keys}
        )
    elif args.dataset == "digits":
        federation = feature_shift(seed=args.seed, num_clients=args.clients, validate=args.validate)
    else:
        raise ValueError(
            f"`--shift feature` must come with `--dataset digits`; got {args.dataset}."
        )
    backbone = load_backbone(
        args.backbone, pretrained=args.pretrained, image_size=args.image_size, device=args.device
    )
    sides = [_with_queries(side, backbone, args) for side in (federation.train, federation.test)]
    return federation._replace(train=sides[0], test=sides[1]), backbone, args


def _with_queries(side: Side, backbone: Backbone, args: Namespace) -> Side:
    """Compute all queries once.

    Queries do not depend on prompts, and images are not augmented, so that they never change.
    """

    def encode(images: Tensor) -> Tensor:
        images = (images.to(args.device) - backbone.mean) / backbone.std
        return fp.encode_prompted(backbone.encoder, images, depth=args.query_depth).pooled

    queries = fp.precompute(encode, side.split.dataset, batch_size=128)
    return side._replace(queries=queries, labels=side.labels.to(args.device))
