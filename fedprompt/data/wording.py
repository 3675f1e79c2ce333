"""Names of strangers as text that is safe to print, and short lists of them."""

import re
from collections.abc import Iterable
from unicodedata import category, normalize

SHOWN = 10
"""Largest number of names in a list."""
JOINERS = "\u200c\u200d"
"""Characters without a glyph that belong to words of some languages, and to emoji."""


def named(name: object) -> str:
    """Compose accents, and escape bytes that are not in UTF-8 and characters that are not printed.

    So escape codes of terminals, line breaks and reversed text of a name have no effect.
    """
    return "".join(
        c if c.isprintable() or c in JOINERS or category(c) == "Zs" else _escaped(c)
        for c in normalize("NFC", str(name))
    )


def _escaped(character: str) -> str:
    if "\udc80" <= character <= "\udcff":  # a byte of a file name
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("unicode_escape").decode()


def few(names: Iterable[str]) -> str:
    """List some names in their order."""
    listed = list(names)
    more = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    return ", ".join(listed[:SHOWN]) + more


def counted(number: int, noun: str) -> str:
    """Say a number of things."""
    return f"{number} {noun}" + ("" if number == 1 else "es" if noun.endswith("s") else "s")


def similar(name: str) -> str:
    """Return a name without case, blanks, ``_``, leading zeros, ``.0`` and encoding of accents."""
    text = re.sub(r"\\x([0-9a-f]{2})", lambda found: chr(int(found[1], 16)), name)
    try:
        text = text.encode("latin-1").decode("utf-8")  # UTF-8 that was read as Latin-1
    except UnicodeError:
        text = name if text == name else text
    text = normalize("NFKC", normalize("NFKC", text).casefold())
    text = re.sub(r"(?<=[^\W\d_])-(?=[^\W\d_])", " ", text)
    text = re.sub(rf"[\s_{JOINERS}]+", " ", text).strip()
    text = re.sub(r"(?<!\d) | (?!\d)", "", text)  # those between two numbers stay
    text = re.sub(r"(?<![\d.,])0+(?=\d)", "", text)
    return re.sub(r"(\d+)\.0+", r"\1", text) if re.fullmatch(r"\d+\.0+", text) else text
