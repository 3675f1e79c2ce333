"""Signatures with the short names of types, for ``help``."""

import inspect
import re
from typing import Any, TypeVar, cast

Made = TypeVar("Made", bound=type)


def readable(signature: inspect.Signature) -> inspect.Signature:
    """Return a signature with the short names of its types."""

    def short(kind: Any) -> Any:
        kind = getattr(kind, "__forward_arg__", kind)
        plain = kind is signature.empty or isinstance(kind, str)
        return kind if plain else re.sub(r"(\w+\.)+(?=\w)", "", inspect.formatannotation(kind))

    options = [
        option.replace(annotation=short(option.annotation))
        for option in signature.parameters.values()
    ]
    return signature.replace(
        parameters=options, return_annotation=short(signature.return_annotation)
    )


def short_types(made: Made) -> Made:
    """Let ``help`` print short types of a named tuple, whose fields are its signature."""
    cast(Any, made).__signature__ = readable(inspect.signature(made))
    return made
