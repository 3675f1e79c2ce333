"""Signatures as ``help`` prints them."""

import inspect
import re
from collections.abc import Iterator, Mapping
from types import GenericAlias

UNREADABLE = re.compile(r" at 0x|ForwardRef|fedprompt\.\w+\.")


def signatures(names: Mapping[str, object]) -> Iterator[tuple[str, inspect.Signature]]:
    """Yield the signatures of functions and classes, and of the methods of these classes."""
    for name, thing in names.items():
        if callable(thing) and not isinstance(thing, GenericAlias):
            yield name, inspect.signature(thing)
        for inner, method in vars(thing).items() if isinstance(thing, type) else ():
            if inspect.isfunction(method) and not inner.startswith("_"):
                yield f"{name}.{inner}", inspect.signature(method)


def unreadable(names: Mapping[str, object]) -> list[str]:
    """Return signatures with an address, an inner module, or 45 characters for an argument."""
    return [
        f"{name}{signature}"
        for name, signature in signatures(names)
        if UNREADABLE.search(str(signature))
        or len(str(signature)) > 45 * max(7, len(signature.parameters))
    ]
