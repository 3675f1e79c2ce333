"""Token ids of the parts of a sentence, from the rows that open_clip's tokenizers return."""

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

import fedprompt._refusals as check

# Words are tokenized after this one, as in the middle of a sentence. Some tokenizers give a word at
# the start of a text a different id.
_LEAD = "a"


class Vocabulary:
    """Token ids of a tokenizer: start, end and padding, and those of any text between them.

    Attributes:
        start: Ids before every text.
        end: Ids after every text, one or none; if none, the padding id.
        pad: Id of padding.
    """

    def __init__(self, tokenizer: Any, *, context_length: int, size: int) -> None:
        rule = "be a tokenizer of open_clip, called with texts and `context_length`, or one of "
        check.function("tokenizer", tokenizer, rule + "transformers")
        self._tokenizer: Callable[..., Int[Tensor, "texts length"]] = tokenizer
        self._context_length = context_length
        self._size = size
        self.pad = self._rows([""])[0][-1]
        empty, lead = self._unpadded(["", _LEAD])
        common = takewhile(lambda pair: pair[0] == pair[1], zip(empty, lead, strict=False))
        num_start = sum(1 for _ in common)
        self.start = empty[:num_start]
        ending = empty[num_start:]
        if len(ending) > 1 or lead[len(lead) - len(ending) :] != ending:
            got = f"{empty} for an empty text and {lead} for {_LEAD!r}"
            rule = "return nothing but padding after an end token"
            raise check.wrong_type("tokenizer", rule, got)
        # If the end token is the padding token, as in SigLIP, its first copy is the end.
        self._num_end = len(ending)
        (self._lead,) = self._alone([_LEAD])
        self.end = ending or [self.pad]

    def closed(self, names: Sequence[str]) -> tuple[list[list[int]], list[int]]:
        """Return the ids from each name to the end of its sentence, and the number of closing ids.

        A name and its full stop are tokenized as one string, as in CoOp. A tokenizer may return
        one token for ")."; that token counts as part of the name.
        """
        full_stop = self._inner([f"{_LEAD}."])[0]
        available = self._context_length - len(self.start) - len(self.end)
        rows = []
        endings = []
        leading = [f"{_LEAD} {_spaced(name)}" for name in names]
        alone = self._inner(leading)
        stopped = self._inner([f"{text}." for text in leading])
        for name, ids, row in zip(names, alone, stopped, strict=True):
            if not ids or len(row) > available:
                longest = available - len(full_stop)
                raise _wrong_count("names", len(ids), longest, f"{name!r} with ")
            rows.append([*row, *self.end])
            endings.append(max(0, len(row) - len(ids)) + len(self.end))
        return rows, endings

    def words(self, text: str) -> list[int]:
        """Return the ids of a text at the start of a sentence."""
        check.text("text", text)
        (ids,) = self._alone([_spaced(text)])
        available = self._context_length - len(self.start) - 1
        if not 0 < len(ids) <= available:
            raise _wrong_count("text", len(ids), available, "")
        return ids

    def sentences(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of whole sentences, special tokens included."""
        special = len(self.start) + len(self.end)
        rows = self._unpadded([_spaced(text) for text in texts])
        rows = [row if self._num_end else [*row, *self.end] for row in rows]
        for text, row in zip(texts, rows, strict=True):
            if not special < len(row) <= self._context_length:
                longest = self._context_length - special
                raise _wrong_count("texts", len(row) - special, longest, f"{text!r} with ")
        return rows

    def _alone(self, texts: Sequence[str]) -> list[list[int]]:
        return [row[len(self.start) : len(row) - self._num_end] for row in self._unpadded(texts)]

    def _inner(self, sentences: Sequence[str]) -> list[list[int]]:
        return [ids[len(self._lead) :] for ids in self._alone(sentences)]

    def _unpadded(self, texts: Sequence[str]) -> list[list[int]]:
        rows = self._rows(texts)
        for row in rows:
            while row and row[-1] == self.pad:
                row.pop()
        return rows

    def _rows(self, texts: Sequence[str]) -> list[list[int]]:
        # Three positions more than needed: two for the lead, one for padding. A row without padding
        # was truncated.
        length = self._context_length + 3
        ids = self._tokenizer(list(texts), context_length=length)
        rule = "return a tensor (texts, length) of ids; pass processor.tokenizer of a processor"
        fits = isinstance(ids, Tensor) and ids.ndim == 2 and not ids.is_floating_point()
        check.typed(fits, "tokenizer", rule, ids)
        rows: list[list[int]] = ids.tolist()
        for row in rows:
            if len(row) != length:
                raise check.wrong("tokenizer", f"return the requested {length} ids", len(row))
            rule = f"belong to the model, whose vocabulary has {self._size} tokens"
            check.require(max(row) < self._size, "tokenizer", rule, f"the id {max(row)}")
        return rows


def padded(
    rows: Sequence[Sequence[int]], pad: int, *, at_least: int = 0
) -> Int[Tensor, "rows length"]:
    """Stack rows of ids, padded to the length of the longest, or to more."""
    longest = max(at_least, *map(len, rows))
    return torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows])


def _spaced(text: str) -> str:
    """Replace underscores in a string, as CoOp does for the names of folders."""
    return text.replace("_", " ")


def _wrong_count(argument: str, count: int, longest: int, text: str) -> ValueError:
    rule = f"have at least 1 token and at most {longest}"
    return check.wrong(argument, rule, text + (f"more than {longest}" if count else "0"))
