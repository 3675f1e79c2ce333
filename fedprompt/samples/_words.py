"""Byte pair encoding of plain words."""

import re
import unicodedata
from functools import lru_cache
from itertools import pairwise

import torch
from jaxtyping import Int
from torch import Tensor

END = "_"  # marks the last letter of a word
_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
_ALPHABET = (".", *_LETTERS, *(letter + END for letter in _LETTERS))
_FIRST = 2  # 0 is padding, 1 is the start


def words_of(text: str) -> list[str]:
    """Return the words and full stops of a text in lower case, without accents."""
    plain = unicodedata.normalize("NFKD", text.lower().replace("\u2019", ""))
    plain = "".join(letter for letter in plain if not unicodedata.combining(letter))
    return re.findall(r"[a-z0-9]+|\.", plain)


class WordPieces:
    """Tokenizer in the layout of open_clip: start, pieces of words, end, padding.

    Args:
        merges: Pairs of pieces that are joined, separated by a space, in the order in which they
            were learned.
    """

    def __init__(self, merges: tuple[str, ...]) -> None:
        self._rank = {tuple(pair.split(" ")): rank for rank, pair in enumerate(merges)}
        pieces = (*_ALPHABET, *(pair.replace(" ", "") for pair in merges))
        self._ids = {piece: number for number, piece in enumerate(pieces, _FIRST)}
        self.size = _FIRST + len(pieces) + 1
        """Number of ids. The last one is the end, at which a CLIP pools."""
        self.pieces = lru_cache(maxsize=None)(self._pieces)

    def _pieces(self, word: str) -> tuple[str, ...]:
        """Join the letters of a word, most frequent pairs first."""
        parts = [*word[:-1], word[-1] + END] if word != "." else [word]
        while len(parts) > 1:
            pairs = list(pairwise(parts))
            best = min(pairs, key=lambda pair: self._rank.get(pair, len(self._rank)))
            if best not in self._rank:
                break
            at = pairs.index(best)
            parts[at : at + 2] = ["".join(best)]
        return tuple(parts)

    def __call__(self, texts: list[str], context_length: int) -> Int[Tensor, "texts length"]:
        """Tokenize texts. Letters outside of a to z and 0 to 9 are left out."""
        rows = torch.zeros(len(texts), context_length, dtype=torch.long)
        for row, text in zip(rows, texts, strict=True):
            ids = [self._ids[piece] for word in words_of(text) for piece in self.pieces(word)]
            ids = [1, *ids[: context_length - 2], self.size - 1]
            row[: len(ids)] = torch.tensor(ids)
        return rows
