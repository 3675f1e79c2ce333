"""What a tokenizer writes around a text: open_clip's tokenizers return finished rows, and a sentence is put together from their pieces."""

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
        closing: Ids behind every sentence: full stop, where the tokenizer keeps punctuation, and end of text.
        pad: Id behind them.
    """

    def __init__(self, tokenizer: Any, *, context_length: int, size: int) -> None:
        if not callable(tokenizer):
            raise wrong_type("tokenizer", "be one of open_clip's, called with texts and `context_length`", kind(tokenizer))
        self._tokenizer: Callable[..., Int[Tensor, "texts length"]] = tokenizer
        self._context_length = context_length
        self._size = size
        self.pad = self._row("")[-1]
        empty, lead = self._unpadded(""), self._unpadded(_LEAD)
        num_start = next((place for place, pair in enumerate(zip(empty, lead, strict=False)) if pair[0] != pair[1]), len(empty))
        self.start, ending = empty[:num_start], empty[num_start:]
        if len(ending) > 1 or lead[len(lead) - len(ending) :] != ending:
            raise wrong_type("tokenizer", "write padding alone behind an end token", f"{empty} for an empty text, {lead} for {_LEAD!r}")
        # Where the end token is the padding token, as in SigLIP, its first copy is the end.
        self._num_end = len(ending)
        self._lead = self._alone(_LEAD)
        self.closing = [*self._inner(f"{_LEAD}."), *(ending or [self.pad])]

    def names(self, names: Sequence[str]) -> list[list[int]]:
        """Return the ids of each name; all must differ and leave room for the start of a text and what closes it."""
        room = self._context_length - len(self.start) - len(self.closing)
        seen = dict[tuple[int, ...], str]()
        for name in names:
            if not isinstance(name, str):
                raise wrong_type("names", "be strings", kind(name))
            ids = self._inner(f"{_LEAD} {_spaced(name)}")
            _check_room("names", ids, room, f"{name!r} with ")
            if tuple(ids) in seen:
                raise wrong_value("names", "differ from one another in their tokens", f"{seen[tuple(ids)]!r} and {name!r}")
            seen[tuple(ids)] = name
        return [list(ids) for ids in seen]

    def words(self, text: str) -> list[int]:
        """Return the ids of a text that opens a sentence."""
        if not isinstance(text, str):
            raise wrong_type("text", "be a string", kind(text))
        ids = self._alone(_spaced(text))
        _check_room("text", ids, self._context_length - len(self.start) - 1, "")
        return ids

    def _alone(self, text: str) -> list[int]:
        row = self._unpadded(text)
        return row[len(self.start) : len(row) - self._num_end]

    def _inner(self, sentence: str) -> list[int]:
        return self._alone(sentence)[len(self._lead) :]

    def _unpadded(self, text: str) -> list[int]:
        row = self._row(text)
        while row and row[-1] == self.pad:
            row.pop()
        return row

    def _row(self, text: str) -> list[int]:
        # With places to spare (two for the lead and one to see padding), a full row means that the text was cut.
        length = self._context_length + 3
        row: list[int] = self._tokenizer([text], context_length=length)[0].tolist()
        if len(row) != length:
            raise wrong_value("tokenizer", f"write the {length} ids that it is asked for", len(row))
        if max(row) >= self._size:
            raise wrong_value("tokenizer", f"belong to the model, whose vocabulary has {self._size} tokens", f"the id {max(row)}")
        return row


def padded(rows: Sequence[Sequence[int]], pad: int) -> Int[Tensor, "rows length"]:
    """Stack rows of ids, padded to the longest."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows])


def _spaced(text: str) -> str:
    """CoOp's rule, for names such as those of folders."""
    return text.replace("_", " ")


def _check_room(argument: str, ids: Sequence[int], room: int, whose: str) -> None:
    if not 0 < len(ids) <= room:
        count = len(ids) if len(ids) <= room else f"more than {room}"
        raise wrong_value(argument, f"have at least 1 token and at most {room}", f"{whose}{count}")
