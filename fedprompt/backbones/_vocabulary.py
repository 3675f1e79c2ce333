"""Token ids of the parts of a sentence, read off the finished rows that open_clip's tokenizers return."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from fedprompt._checks import kind, wrong_type, wrong_value

# Words are tokenised behind another one, as in the middle of a sentence: some tokenizers write a word at the start differently.
_LEAD = "a"


class Vocabulary:
    """The token ids of a tokenizer: start, end and padding, and those of any text alone.

    Attributes:
        start: Ids before every text.
        end: Id behind every text.
        pad: Id behind that one.
    """

    def __init__(self, tokenizer: Any, *, context_length: int, size: int) -> None:
        if not callable(tokenizer):
            raise wrong_type(
                "tokenizer",
                "be one of open_clip's, called with texts and `context_length`",
                kind(tokenizer),
            )
        self._tokenizer: Callable[..., Int[Tensor, "texts length"]] = tokenizer
        self._context_length = context_length
        self._size = size
        self.pad = self._rows([""])[0][-1]
        empty, lead = self._unpadded(["", _LEAD])
        num_start = next(
            (
                place
                for place, pair in enumerate(zip(empty, lead, strict=False))
                if pair[0] != pair[1]
            ),
            len(empty),
        )
        self.start, ending = empty[:num_start], empty[num_start:]
        if len(ending) > 1 or lead[len(lead) - len(ending) :] != ending:
            raise wrong_type(
                "tokenizer",
                "write padding alone behind an end token",
                f"{empty} for an empty text, {lead} for {_LEAD!r}",
            )
        # Where the end token is the padding token, as in SigLIP, its first copy is the end.
        self._num_end = len(ending)
        (self._lead,) = self._alone([_LEAD])
        self.end = ending or [self.pad]

    def closed(self, names: Sequence[str]) -> tuple[list[list[int]], list[int]]:
        """Return the ids from each name to the end of its sentence, and how many of them close it.

        A name and the full stop are one string, as in CoOp: a tokenizer may write ")." as one token, which then belongs to the name.
        """
        full_stop = self._inner([f"{_LEAD}."])[0]
        room = self._context_length - len(self.start) - len(self.end)
        rows, endings = [], []
        for name in names:
            if not isinstance(name, str):
                raise wrong_type("names", "be strings", kind(name))
        leading = [f"{_LEAD} {_spaced(name)}" for name in names]
        alone, stopped = self._inner(leading), self._inner([f"{text}." for text in leading])
        for name, ids, row in zip(names, alone, stopped, strict=True):
            if not ids or len(row) > room:
                raise _wrong_count("names", len(ids), room - len(full_stop), f"{name!r} with ")
            rows.append([*row, *self.end])
            endings.append(max(0, len(row) - len(ids)) + len(self.end))
        return rows, endings

    def words(self, text: str) -> list[int]:
        """Return the ids of a text that opens a sentence."""
        if not isinstance(text, str):
            raise wrong_type("text", "be a string", kind(text))
        (ids,) = self._alone([_spaced(text)])
        room = self._context_length - len(self.start) - 1
        if not 0 < len(ids) <= room:
            raise _wrong_count("text", len(ids), room, "")
        return ids

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
        # With places to spare (two for the lead and one to see padding), a full row means that the text was cut.
        length = self._context_length + 3
        rows: list[list[int]] = self._tokenizer(list(texts), context_length=length).tolist()
        for row in rows:
            if len(row) != length:
                raise wrong_value(
                    "tokenizer", f"write the {length} ids that it is asked for", len(row)
                )
            if max(row) >= self._size:
                raise wrong_value(
                    "tokenizer",
                    f"belong to the model, whose vocabulary has {self._size} tokens",
                    f"the id {max(row)}",
                )
        return rows


def padded(rows: Sequence[Sequence[int]], pad: int) -> Int[Tensor, "rows length"]:
    """Stack rows of ids, padded to the longest."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows])


def _spaced(text: str) -> str:
    """CoOp's rule, for names such as those of folders."""
    return text.replace("_", " ")


def _wrong_count(argument: str, count: int, room: int, whose: str) -> ValueError:
    rule = f"have at least 1 token and at most {room}"
    return wrong_value(argument, rule, f"{whose}{count if count == 0 else f'more than {room}'}")
