"""Names of earlier versions: those that only moved work with a warning, others name the new one."""

import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from operator import attrgetter

# Old name and new name of 0.3. A name without a new one kept its name in the family.
_MOVED = {
    "aggregation": "distances fedadam:adam fedopt fedyogi:yogi low_rank_mean mixtures",
    "check": "check_activation:activation check_text_encoder:text_encoder check_trunk:trunk",
    "data": "by_domain dirichlet dirichlet_overlapping iid pathological",
    "guidance": "guide_gradient guided_loss",
    "interfaces": "Aggregator Coupling PromptSelector Selection ServerUpdate TextEncoder "
    "TransportSolver Trunk",
    "robust": "aggregate_by_name krum multi_krum trimmed_mean weighted_median",
    "selection": "SelectionKeys key_loss select_balanced select_nearest",
    "": "cohort:sample_clients front_tokens:encode_front mean_tokens:mean_patch_tokens "
    "start_at_tokens:initialize_at",
}
_RENAMED = {
    name.partition(":")[0]: f"{family}.{name.rpartition(':')[2]}".lstrip(".")
    for family, names in _MOVED.items()
    for name in names.split()
}
_CHANGED = {
    "averaging": "averaging_server(values, update)",
    "lean_transport_logits": "transport_logits(..., lean=True)",
    "batch_streams": "GroupPrompts(num_clients, ...), called with the client of each image",
    "PromptGenerator": "methods.fedtpg.Network",
    "per_name": "weighted_mean(payloads)",
    "per_name_update": "update_by_name(rules)",
    "fedavgm": "aggregation.fedopt(partial(torch.optim.SGD, lr=1.0, momentum=0.9))",
    "frozen": "freeze(model)",
    "load": "load_values(module, values)",
    "stream_seed": "stream_generator(seed, server_round=...)",
    "flatten": "privacy.to_summable(payload)",
    "unflatten": "privacy.from_sum(total)",
    "nearest_keys": "selection.select_nearest(query, keys)",
    "balanced_keys": "selection.select_balanced(query, keys)",
    "at_end": "prompted_text(context, names)",
    "in_middle": "prompted_text(context, names, name_position=...)",
    "at_front": "prompted_text(context, names, name_position=0)",
    "global_accuracy": "metrics.global_accuracy(matrix)",
}


def find(name: str) -> object:
    """Find a name of an earlier version, or the version of the installed package."""
    if name == "__version__":
        return version("fedprompt")
    package = sys.modules["fedprompt"]
    if name in _RENAMED:
        text = f"`fedprompt.{name}` is `fedprompt.{_RENAMED[name]}` since 0.3."
        warnings.warn(text, FutureWarning, stacklevel=2)
        return attrgetter(_RENAMED[name])(package)
    if name in _CHANGED:
        raise AttributeError(f"`fedprompt.{name}` is `fedprompt.{_CHANGED[name]}` now.")
    raise AttributeError(f"module 'fedprompt' has no attribute {name!r}")


def moved(module: str, **places: str) -> Callable[[str], object]:
    """Make the `__getattr__` of a module, for names that are in other modules of its package now.

    Args:
        module: Name of the module.
        places: Names, separated by spaces, by the module that has them now.
    """
    package = module.rpartition(".")[0]
    homes = {name: f"{package}.{home}" for home, names in places.items() for name in names.split()}

    def find(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        text = f"`{module}.{name}` is `{homes[name]}.{name}` since 0.3."
        warnings.warn(text, FutureWarning, stacklevel=2)
        return getattr(import_module(homes[name]), name)

    return find
