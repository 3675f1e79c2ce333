"""Files of trained prompts."""

import re
from pathlib import Path
from typing import Any

import torch.nn as nn

import fedprompt as fp
from fedprompt.compare import ranks
from fedprompt.compare.trials import Trial
from fedprompt.interfaces import Method, Round


def save(
    folder: Path, stem: str, shared: bool, trial: Trial, method: Method, now: Round
) -> list[Path]:
    """Save the model of each client by :func:`fedprompt.save_prompts`, or the one of all clients.

    Each rank saves those of its own clients. Predictions that are plain functions have no file.

    Args:
        folder: Folder of the files.
        stem: First part of their names.
        shared: Whether all clients have one model.
        trial: Trial of the run.
        method: Method.
        now: Last round.
    """
    setting: Any = trial.setting
    world = ranks.world()
    clients = [client for client in setting.clients if client % world == ranks.rank()]
    names = list(getattr(setting, "class_names", ()))
    saved = []
    for client in clients[: 1 if shared else None] if not shared or ranks.rank() == 0 else ():
        model = now.model(method, trial.federation.data(client, now.server_round))
        if not isinstance(model, nn.Module) or not fp.snapshot(model, buffers=True):
            continue
        backbone = setting.tower if hasattr(setting, "tower") else setting.trunk_of(client)
        end = "" if shared else f"-{_file(client, trial)}"
        folder.mkdir(parents=True, exist_ok=True)
        saved.append(folder / f"{stem}-seed{setting.seed}{end}.safetensors")
        fp.save_prompts(model, saved[-1], trunk=backbone, class_names=names)
    return saved


def _file(client: int, trial: Trial) -> str:
    """Return the name of a client for a file. Of equal names, each has the id of its client."""
    names = [re.sub(r"[^\w .-]", "_", name) for name in trial.names]
    if not names:
        return str(client)
    return names[client] if names.count(names[client]) == 1 else f"{names[client]}-{client}"
