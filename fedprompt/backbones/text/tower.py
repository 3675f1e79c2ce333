"""Text towers of CLIP models, for sentences of embeddings instead of token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

import torch
import torch.nn as nn
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fedprompt._refusals as check
from fedprompt.backbones._blocks import tokens_at
from fedprompt.backbones._models import inside, libraries
from fedprompt.backbones._probe import Probe
from fedprompt.backbones.freezing import check_unadapted, freeze, restored_on_error
from fedprompt.backbones.text import _layout
from fedprompt.backbones.text._deep import Replacement, replacements
from fedprompt.backbones.text._open_clip_text import OpenClipText
from fedprompt.backbones.text._transformers_text import HuggingText, padded_ids
from fedprompt.backbones.text._vocabulary import Vocabulary, padded
from fedprompt.interfaces import ClassNames, PromptedText, PromptStream


class TextTower:
    """Text tower of a CLIP model, for sentences with learned contexts.

    In a causal tower, the tokens before the class name do not attend to it. They are encoded
    once for many classes, together with only the few tokens of each name. Tokens after the end
    of text are not encoded. In a bidirectional tower (SigLIP, MobileCLIP), every sentence is
    encoded in full length.

    The model is put into eval mode and its gradients are turned off (:func:`freeze`). Its
    gradient checkpointing (``model.set_grad_checkpointing()``) and hooks on its blocks are
    respected. The tower is a plain object and not a submodule. ``.to(device)`` of a client module
    does not move it, so move the model first. A deep copy of a client shares the tower.

    Args:
        clip_model: Model of open_clip's class ``CLIP`` or ``CustomTextCLIP``, or of transformers'
            class ``CLIPModel`` or ``CLIPTextModelWithProjection``.
        tokenizer: Tokenizer of the model, ``open_clip.get_tokenizer(name)`` or transformers'
            ``AutoTokenizer.from_pretrained(name)``.
        class_chunk: Maximum number of classes that are encoded at a time, at least 1. Chunks are
            encoded again in the backward pass, so memory is bounded by one chunk and gradients
            are the same. If None, all classes are encoded at once.
        probe: Whether to probe the model, as in :func:`vit_trunk`, by a sentence of three words.

    Attributes:
        dim: Width of a token, and so of a context. Features may have another width.
        depth: Number of blocks.
        context_length: Number of positions.
        causal: Whether a token attends to earlier ones only, and features are read at the end of
            text.

    Raises:
        TypeError: If the model's text tower cannot take embeddings (CoCa, open_clip's towers of
            Hugging Face).
        ValueError: If `tokenizer` has ids outside the model's vocabulary. If only some
            parameters of a tower are trained, or adapters such as LoRA's are, because they would
            be frozen silently. If the features differ from those of the model, or a layer has no
            backward pass. When used: if the model is no longer frozen or in eval mode.

    Example:
        >>> import open_clip
        >>> vision = dict(layers=1, width=8, head_width=4, patch_size=8, image_size=16)
        >>> text = dict(context_length=16, vocab_size=49408, width=8, heads=2, layers=1)
        >>> clip_model = open_clip.model.CLIP(4, vision, text)
        >>> tokenizer = open_clip.tokenizer.SimpleTokenizer(context_length=16)
        >>> tower = TextTower(clip_model, tokenizer)
        >>> names = tower.class_names(["cat", "polar bear"])
        >>> words = tower.words("a photo of a")
        >>> context = ContextPrompts(tower.dim, num_contexts=3, init=words)
        >>> tower(prompted_text(context(), names)).shape
        torch.Size([3, 2, 4])
    """

    dim: int

    def __init__(
        self,
        clip_model: nn.Module,
        tokenizer: Any,
        *,
        class_chunk: int | None = None,
        probe: bool = True,
    ) -> None:
        make = _maker(clip_model)
        if make is None:
            reason = inside(clip_model, _maker) or "CoCa adds a token"
            raise check.wrong_type("clip_model", f"{_RULE} ({reason})", type(clip_model).__name__)
        self._parts = make(clip_model)
        check.flag("probe", probe)
        check.optional(check.count, "class_chunk", class_chunk)
        self.class_chunk = class_chunk
        self.dim = self._parts.embedding.embedding_dim
        self.depth = self._parts.depth
        self.context_length = self._parts.context_length
        self.causal = self._parts.causal
        if "transformers" in libraries(tokenizer):  # a processor has a tokenizer
            tokenizer = partial(padded_ids, getattr(tokenizer, "tokenizer", tokenizer))
        parts, size = self._parts, self._parts.embedding.num_embeddings
        self._vocabulary = Vocabulary(tokenizer, context_length=self.context_length, size=size)
        _check_unadapted(clip_model, parts.images)
        self.model = clip_model
        self.probe = Probe(self, "tower", "clip_model", parts.containers, parts.modules)
        with restored_on_error(clip_model):
            freeze(clip_model)
            self.probe.begin({}, enabled=probe)

    def __deepcopy__(self, memo: dict[int, Any]) -> TextTower:
        return self

    def class_names(self, names: Sequence[str]) -> ClassNames:
        """Tokenize and embed class names, once for all rounds.

        Each name and its full stop are tokenized as one string, as in CoOp. Underscores are
        replaced by spaces.

        Args:
            names: Name of each class. Several classes may have the same name.

        Returns:
            The tokens of each name and of the end of its sentence, for :func:`prompted_text`, on
            the model's device.

        Raises:
            ValueError: If there are no names, or a name is empty or too long for the tower.
        """
        check.texts("names", names)
        vocabulary = self._vocabulary
        rows, endings = vocabulary.closed(names)
        return ClassNames(
            start=self._embedded(vocabulary.start),
            tokens=self._embedded(padded(rows, vocabulary.pad)),
            length=tuple(map(len, rows)),
            pad=self._embedded([vocabulary.pad])[0],
            context_length=self.context_length,
            causal=self.causal,
            names=tuple(names),
            ending=tuple(endings),
        )

    def sentences(self, texts: Sequence[str]) -> PromptedText:
        """Tokenize and embed whole sentences, one for each class, without a learned context.

        The first tokens are shared if all sentences have them. Underscores are replaced by spaces.

        Raises:
            ValueError: If there are no sentences, or one is empty or too long for the tower.
        """
        check.texts("texts", texts)
        rows = self._vocabulary.sentences(texts)
        pad = self._vocabulary.pad
        same = takewhile(lambda ids: len(set(ids)) == 1, zip(*rows, strict=False))
        shared = min(sum(1 for _ in same), min(map(len, rows)) - 1)
        suffixes = [row[shared:] for row in rows]
        length = 0 if self.causal else self.context_length - shared
        return PromptedText(
            prefix=self._embedded(rows[0][:shared])[None],
            suffix=self._embedded(padded(suffixes, pad, at_least=length))[None],
            end=tuple(len(row) - 1 for row in rows),
        )

    def words(self, text: str) -> Float[Tensor, "length dim"]:
        """Embed the tokens of a text, as initial values of a context.

        A word may have several tokens. Underscores are replaced by spaces.

        Raises:
            ValueError: If `text` is empty or too long for the tower.
        """
        return self._embedded(self._vocabulary.words(text))

    def __call__(
        self, text: PromptedText, *streams: PromptStream
    ) -> Float[Tensor, "*batch contexts classes features"]:
        """Encode every sentence, by the model's pooling and projection, without normalization.

        Args:
            text: Sentences from :func:`prompted_text`.
            *streams: Deep prompts (MaPLe, IVLP, PromptSRC). Before each of their layers, they
                replace the tokens of the context. They need ``replace=True``, and a context right
                before the names. The first stream replaces the first tokens of the context, and
                the next streams those after it.

        Returns:
            Features of each context and class.

        Raises:
            ValueError: If `text` does not fit the tower, or `streams` do not fit the context.
        """
        self._check(text)
        replaced = replacements(text, streams, dim=self.dim, depth=self.depth)
        shared = text.prefix.shape[-2]
        stride = text.suffix.shape[-2]
        num_classes = len(text.end)
        pooled_at = self._parts.pooled_at
        ends = text.end if pooled_at is None else (pooled_at,) * num_classes
        lengths = [end + 1 - shared for end in text.end] if self.causal else [stride] * num_classes
        suffix = _layout.best_suffix(shared, self.dim)
        encode = self._features
        if self.class_chunk is not None and self.class_chunk < num_classes:
            encode = partial(checkpoint, encode, use_reentrant=False, preserve_rng_state=False)
        order: list[int] = []
        features = []
        for run in _layout.runs(lengths, suffix=suffix, most=self.class_chunk):
            rows = len(run)
            if self.causal:
                widths = [lengths[number] for number in run]
                rows = _layout.best_rows(widths, shared=shared, dim=self.dim)
            layout = _layout.layout(run, lengths, ends, shared=shared, stride=stride, rows=rows)
            features.append(encode(text, replaced, layout)[..., : len(run), :])
            order += run
        back = torch.tensor(order).argsort()
        return torch.cat(features, -2).index_select(-2, _moved(back, text.prefix.device))

    def _features(
        self, text: PromptedText, replaced: Mapping[int, Sequence[Replacement]], run: _layout.Layout
    ) -> Tensor:
        """Encode the rows of one layout, and pool each place of all rows."""
        source, owner, position, read = (_moved(part, text.prefix.device) for part in run)
        axes = text.prefix.shape[:-2]
        rows = source.shape[0]
        suffix = text.suffix.flatten(-3, -2).index_select(-2, source.flatten())
        suffix = suffix.reshape(*axes, *source.shape, self.dim)
        prefix = text.prefix.unsqueeze(-3).expand(*axes, rows, -1, -1)
        tokens = torch.cat([prefix, suffix], -2).flatten(0, -3)

        parts = self._parts
        hidden = tokens.to(parts.dtype) + parts.positions.to(parts.dtype)[position]
        mask = _layout.mask(owner, position, parts.dtype) if self.causal else parts.mask
        read = read.expand(*axes, *read.shape).flatten(0, -2)
        for layer in range(self.depth):
            for start, new in replaced.get(layer, ()):
                length = new.shape[-2]
                new = new.unsqueeze(-3).expand(*axes, rows, -1, -1).flatten(0, -3).to(hidden.dtype)
                hidden = torch.cat([hidden[:, :start], new, hidden[:, start + length :]], 1)
            only = read if layer == self.depth - 1 else None  # the last block of other tokens
            if 0 in axes:  # some blocks refuse empty batches
                hidden = tokens_at(hidden, only)
            else:
                hidden = parts.block(layer, hidden, mask, only)
        pooled = hidden.reshape(*axes, rows, *hidden.shape[1:]).transpose(-3, -2).flatten(-3, -2)
        return parts.project(pooled)

    def _sentence(self) -> list[int]:
        """Return the ids of a sentence of three equal words, with padding if it is read."""
        end = self._parts.end
        word = 0 if end else 1
        length = 4 if self.causal else self.context_length
        return [word, word, word, end, *[word] * (length - 4)]

    def as_a_whole(self) -> Any:
        """Return the model's features of a sentence."""
        ids = self._sentence()
        ids += ids[:1] * (self.context_length - len(ids))
        return self._parts.own_features(torch.tensor([ids], device=self._parts.positions.device))

    def part_by_part(self, prompts: Sequence[Tensor]) -> Tensor:
        """Return features of the sentence, with prompts of each layer in place of a word."""
        tokens = self._embedded(self._sentence())
        words = [tokens[:1], prompts[0].to(tokens) if prompts else tokens[1:2]]
        text = PromptedText(torch.cat(words)[None], tokens[None, None, 2:], (3,), 1)
        deep = dict(enumerate(prompts[1:], 1))
        features: Tensor
        (features,) = self(text, *[PromptStream(deep, replace=True)] * bool(deep))
        return features

    def _embedded(self, ids: Sequence[int] | Tensor) -> Tensor:
        weight = self._parts.embedding.weight.detach()
        return weight[torch.as_tensor(ids, dtype=torch.long, device=weight.device)]

    def _check(self, text: Any) -> None:
        check.instance("text", text, PromptedText, "be PromptedText, from prompted_text")
        check.number_tensor("text.prefix", text.prefix, read=True)
        check.number_tensor("text.suffix", text.suffix, read=True)
        prefix, suffix = tuple(text.prefix.shape), tuple(text.suffix.shape)
        fits = len(prefix) in (3, 4) and suffix[:-3] == prefix[:-2] and 0 not in suffix[-3:]
        if not fits or (prefix[-1], suffix[-1]) != (self.dim, self.dim):
            rule = (
                f"have a prefix of shape (contexts, length, {self.dim}) and a suffix of shape "
                f"(contexts, classes, length, {self.dim}), optionally with an axis of samples first"
            )
            raise check.wrong("text", rule, f"{prefix} and {suffix}")
        first = prefix[-2]
        length = first + suffix[-2]
        ends = text.end
        fits = isinstance(ends, tuple) and len(ends) == suffix[-3]
        if not fits or not all(isinstance(end, int) and first <= end < length for end in ends):
            rule = f"be {suffix[-3]} positions in [{first}, {length}), one for each class"
            raise check.wrong("text.end", rule, check.kind(ends))
        check.optional(check.count, "text.context", text.context, at_least=0)
        rule = f"have {'at most' if self.causal else 'exactly'} {self.context_length} tokens"
        fits = length <= self.context_length and (self.causal or length == self.context_length)
        check.require(fits, "text", rule, length)
        self.probe.look(text.prefix)


_RULE = (
    "be an open_clip CLIP or CustomTextCLIP, or a CLIPModel or CLIPTextModelWithProjection of "
    "transformers"
)


def _maker(clip_model: object) -> type[OpenClipText] | type[HuggingText] | None:
    """Return the class of the parts of a model, None for other models."""
    defined_in = libraries(clip_model)
    if "transformers" in defined_in:
        from transformers import CLIPModel, CLIPTextModelWithProjection

        known = isinstance(clip_model, CLIPModel | CLIPTextModelWithProjection)
        return HuggingText if known else None
    if "open_clip" in defined_in:
        from open_clip.model import CLIP, CustomTextCLIP

        return OpenClipText if isinstance(clip_model, CLIP | CustomTextCLIP) else None
    return None


def _moved(indices: Tensor, device: torch.device) -> Tensor:
    """Copy indices from the host, without a synchronization of a GPU."""
    return indices.to(device, non_blocking=device.type == "cuda")


def _check_unadapted(clip_model: nn.Module, images: tuple[str, ...]) -> None:
    """Require that each tower trains all parameters or none."""
    named = [pair for pair in clip_model.named_parameters() if not pair[0].startswith("logit_")]
    for visual in (True, False):
        tower = [pair for pair in named if pair[0].startswith(images) == visual]
        check_unadapted("clip_model", tower, remedy="merge adapters")
