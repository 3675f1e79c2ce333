"""Weights in files as people have them: tensors only, and no code is run."""

import pickle
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import ZipFile, is_zipfile

import torch
import torch.nn as nn
from safetensors.torch import load_file
from torch import Tensor

NESTS = ("state_dict.", "model_state_dict.", "model.", "module.", "_orig_mod.")
"""Beginnings that checkpoints of training add to the names of a library that is not ours."""


INNER = ("_parameters", "_buffers", "_modules")
"""Attributes of a module in a file, which are not in the names of its weights."""
DTYPES = {"CharStorage": "int8", "ByteStorage": "uint8"}
"""Dtypes of storages whose names are others."""
REMEDY = "write it by torch.save(model.state_dict(), FILE)"


class _Inert(dict[Any, Any]):
    """Object of a class that is not imported, such as arguments, NumPy numbers or a module."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        self.update(state if isinstance(state, dict) else {})

    def append(self, _: Any) -> None:
        """Forget a part."""

    def extend(self, _: Any) -> None:
        """Forget parts."""


class _Tensors(pickle.Unpickler):
    """Reader of a pickle of torch, of which only containers and tensors are made."""

    def __init__(self, archive: ZipFile) -> None:
        (self.tree,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        self.archive = archive
        super().__init__(archive.open(self.tree))

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name.startswith("_rebuild_"):
            return _rebuilt
        if module == "torch" and name.endswith("Storage"):
            return getattr(torch, DTYPES.get(name, name.removesuffix("Storage").lower()))
        return OrderedDict if name == "OrderedDict" else type(name, (_Inert,), {})

    def persistent_load(self, saved: Any) -> Tensor:
        _, kind, key, *_ = saved
        blob = bytearray(self.archive.read(self.tree.replace("data.pkl", f"data/{key}")))
        return torch.frombuffer(blob, dtype=kind) if blob else torch.empty(0, dtype=kind)


def _rebuilt(storage: Tensor, offset: Any = 0, size: Any = None, stride: Any = (), *_: Any) -> Any:
    """Make a tensor of its numbers; a parameter is its tensor."""
    return storage if not isinstance(size, tuple) else storage.as_strided(size, stride, offset)


def tensors_in(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by dotted names: safetensors, state dicts, TorchScript.

    Raises:
        ValueError: If it has none, as a file that is damaged or of another kind.
    """
    with path.open("rb") as file:
        is_safetensors = file.read(9)[8:] == b"{"
    if is_safetensors:
        return load_file(path)
    if is_zipfile(path):
        with ZipFile(path) as archive:
            saved = _Tensors(archive).load()
    else:
        try:  # as torch wrote it before 1.6
            saved = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # of any type, whose text advises to run the code in the file
            raise ValueError(f"it is damaged, or is not a file of tensors; {REMEDY}") from error
    found: dict[str, Tensor] = {}
    _flatten("", saved, found)
    if not found:
        raise ValueError(f"it has no tensors; {REMEDY}")
    return found


def _flatten(name: str, value: Any, found: dict[str, Tensor]) -> None:
    if isinstance(value, Tensor):
        found[name] = value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            inner = name if key in INNER else f"{name}.{key}" if name else str(key)
            _flatten(inner, part, found)


def weights_of(found: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Choose the tensors that a model has, whatever stands before their names.

    If names are those of another library, all tensors are returned, without `NESTS`.

    Args:
        found: Tensors of a file.
        model: Model without a classifier. Its numbers are not read.

    Raises:
        ValueError: If a file has two networks of this form, or one with other blocks.
    """
    names = model.state_dict().keys()
    before = Counter(
        key.removesuffix(name) for key in found for name in names if f".{key}".endswith(f".{name}")
    )
    (prefix, count), (other, second) = [*before.most_common(2), ("", 0), ("", 0)][:2]
    if count < len(names) / 2:
        for nest in NESTS:
            if any(key.startswith(nest) for key in found):
                found = {k.removeprefix(nest): v for k, v in found.items() if k.startswith(nest)}
        return dict(found)
    if count == second:
        got = f"two networks, whose names begin with {prefix!r} and {other!r}"
        raise ValueError(f"it has {got}: {REMEDY} for one")
    own = {k.removeprefix(prefix): v for k, v in found.items() if k.startswith(prefix)}
    if missing := [name for name in names if name not in own]:
        raise ValueError(f"it is of another network, which has no {missing[0]}")
    for name, part in model.named_modules():
        after = f"{name}.{len(part)}." if isinstance(part, nn.ModuleList | nn.Sequential) else ""
        if after and (more := [key for key in own if key.startswith(after)]):
            raise ValueError(f"it is of another network, which has {more[0]}")
    return {name: own[name].contiguous() for name in names}
