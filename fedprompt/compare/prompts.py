"""Files of trained prompts."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

import fedprompt as fp
import fedprompt._refusals as check
from fedprompt.compare import ranks
from fedprompt.compare.identity import stamp
from fedprompt.compare.trials import Trial
from fedprompt.interfaces import Method, Round
from fedprompt.methods import METHODS, ClipSetting, Federation, VitSetting

__all__ = ["load"]

LONGEST = 40
"""Number of characters of a name that a file has."""


def load(
    path: str | PathLike[str],
    method: str | Callable[..., Method],
    setting: VitSetting | ClipSetting,
    inputs: Tensor,
    *,
    seed: int,
    client: int = 0,
    **values: Any,
) -> nn.Module:
    """Rebuild the model of a method from its file of trained prompts, for other images.

    Args:
        path: File in the folder ``prompts`` of the results.
        method: Name in the gallery, or a function of your own. Training alone is ``"local"``, or
            ``"coop"`` with a CLIP.
        setting: Setting with the network, and the number of classes or their names. FedAPT also
            needs the `clients` of the run.
        inputs: One image or more, as the network takes them: images that are normalized, or for
            most methods with a CLIP the tokens of its image tower (``fedprompt.image_tokens``).
        seed: Seed of the run. Some methods draw parts that they neither train nor save.
        client: Position of the file's client among the clients of the run, for methods whose
            models depend on it, such as FedPHA.
        **values: Hyperparameters of the run that are not defaults.

    Returns:
        Model in eval mode, from such inputs to logits.

    Raises:
        ValueError: If the file is of another network, method, or class names.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from fedprompt import samples, vit_trunk
        >>> setting = VitSetting(trunk=vit_trunk(samples.vit("S")), num_classes=10, rounds=1)
        >>> trained, images = setting.new_model(), samples.digits()[2][:3]
        >>> with TemporaryDirectory() as folder:
        ...     fp.save_prompts(trained, f"{folder}/a.safetensors", trunk=setting.trunk)
        ...     model = load(f"{folder}/a.safetensors", "fedprox", setting, images, seed=0)
        >>> torch.equal(model(images), trained.eval()(images))
        True
    """
    check.instance("inputs", inputs, Tensor, "be inputs of the network")
    make = METHODS[method].make if isinstance(method, str) else method
    clients = list(setting.clients) or [client]
    given = replace(setting, clients=clients, rounds=1, steps=1, seed=seed)
    labels = torch.zeros(len(inputs), dtype=torch.int64)
    federation = Federation(given, inputs, labels, {client: torch.arange(len(inputs))})
    made = make(given, **values)
    (now,) = fp.run_rounds(made, federation.data, [[client]])  # the state may decide the form
    model = now.model(made, federation.data(client, 0))
    check.instance("method", model, nn.Module, "predict with a module, which has a file")
    fp.load_prompts(model, path, trunk=_backbone(given), class_names=_names(given))
    loaded: nn.Module = model.eval()
    return loaded


def save(
    folder: Path, stem: str, shared: bool, trial: Trial, method: Method, now: Round
) -> list[Path]:
    """Save the model of each client by :func:`fedprompt.save_prompts`, or the one of all clients.

    Each rank saves those of its own clients. Predictions by plain functions, or by
    modules without parameters, have no file.

    Args:
        folder: Folder of the files.
        stem: First part of their names (:func:`stem`).
        shared: Whether all clients have one model.
        trial: Trial of the run.
        method: Method.
        now: Last round.
    """
    setting: Any = trial.setting
    world = ranks.world()
    clients = [client for client in setting.clients if client % world == ranks.rank()]
    saved = []
    for client in clients[: 1 if shared else None] if not shared or ranks.rank() == 0 else ():
        model = now.model(method, trial.federation.data(client, now.server_round))
        if not (isinstance(model, nn.Module) and model.state_dict()):
            continue
        end = "" if shared else f"-{file_name(trial.names[client] if trial.names else str(client))}"
        folder.mkdir(parents=True, exist_ok=True)
        saved.append(folder / f"{stem}{end}.safetensors")
        backbone, names = _backbone(setting, client), _names(setting)
        fp.save_prompts(model, saved[-1], trunk=backbone, class_names=names)
    return saved


def stem(record: Mapping[str, Any], key: str) -> str:
    """Return the first part of the names of files of a run, which has a hash of its key."""
    where = [file_name(record["partition"])] if record["partition"] else []
    row = re.sub(r"\W+", "-", record["row"]).strip("-").lower()
    return "-".join([*where, row, f"seed{record['seed']}", stamp(key)[:8]])


def file_name(name: str) -> str:
    """Return a name of a client or a domain for a file; if it is changed, it has a hash."""
    clean = re.sub(r"[^\w .-]", "_", name)[:LONGEST]
    return clean if clean == name else f"{clean}-{stamp(name)[:4]}"


def _backbone(setting: Any, client: int | None = None) -> Any:
    return setting.tower if isinstance(setting, ClipSetting) else setting.trunk_of(client)


def _names(setting: Any) -> list[str]:
    return list(getattr(setting, "class_names", ()))
