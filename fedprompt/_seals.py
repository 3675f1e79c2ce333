"""Seals of trees, which tell whether a function wrote into a tree that it received."""

from collections.abc import Iterable, Mapping
from operator import is_
from typing import Any

from torch import Tensor


class Seal:
    """Containers and tensors of a tree, as they are now. Nothing is copied.

    It finds tensors that were written or need gradients since, and other keys or parts of a dict or
    a list. It does not find writes through NumPy or ``tensor.data``, nor any write into an
    inference tensor, because PyTorch does not count these.

    Args:
        tree: Tree of dicts, lists, tuples, tensors and other leaves.
        within: Seals that are compared at the same moments. Their containers are left out.
    """

    def __init__(self, tree: Any, within: "Iterable[Seal]" = ()) -> None:
        known = {container for seal in within for container in seal._containers}
        self._containers: dict[int, tuple[Any, list[Any], list[Any]]] = {}
        self._tensors: list[Tensor] = []
        pending = [tree]
        for part in pending:  # it grows meanwhile
            if isinstance(part, tuple):
                pending += part
            elif isinstance(part, Tensor):
                if not part.is_inference():
                    self._tensors.append(part)
            elif isinstance(part, dict | list | Mapping) and id(part) not in known:
                known.add(id(part))
                keys, parts = _content(part)
                self._containers[id(part)] = part, keys, parts
                pending += parts
        self._marks = _marks(self._tensors)

    def broken(self) -> str:
        """Describe the first write into the tree, or return an empty text."""
        for container, keys, parts in self._containers.values():
            now, others = _content(container)
            if now != keys or not all(map(is_, others, parts)) or len(others) != len(parts):
                kind = type(container).__name__
                return f"another content of a {kind} with {keys[:3] if keys else len(parts)}"
        if self._marks != (marks := _marks(self._tensors)):
            columns = zip(self._tensors, *self._marks, *marks, strict=True)
            tensor = next(tensor for tensor, *old, one, two in columns if old != [one, two])
            return f"a write into {self._name(tensor)}, a tensor of shape {tuple(tensor.shape)}"
        return ""

    def _name(self, tensor: Tensor) -> str:
        for container, keys, parts in self._containers.values():
            for place, part in enumerate(parts):
                if any(leaf is tensor for leaf in (part if isinstance(part, tuple) else [part])):
                    return repr(keys[place]) if keys else f"a {type(container).__name__}"
        return "a part"


def check_seals(where: str, rule: str, seals: Mapping[str, Seal]) -> None:
    """Refuse a write into one of several trees by its name."""
    for name, seal in seals.items():
        if broken := seal.broken():
            raise ValueError(f"{where}: {rule}; got {broken}, in {name}.")


def _content(container: Any) -> tuple[list[Any], list[Any]]:
    if isinstance(container, list):
        return [], [*container]
    return [*container], [*container.values()]


def _marks(tensors: list[Tensor]) -> tuple[list[int], list[bool]]:
    """Return the version of each tensor, which PyTorch counts, and whether it needs a gradient."""
    return [each._version for each in tensors], [each.requires_grad for each in tensors]
