"""open_clip's text towers, for sentences of embeddings instead of token ids."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from einops import rearrange, repeat
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fedprompt._checks import check_count, kind, wrong_type, wrong_value
from fedprompt.backbones._adapted import check_unadapted
from fedprompt.backbones._vocabulary import Vocabulary, padded
from fedprompt.freezing import freeze
from fedprompt.interfaces import ClassNames, PromptedText


class TextTower:
    """Text tower of an open_clip model, for sentences with learned contexts.

    In a causal tower, the tokens before the class name do not attend to it. They are encoded
    once for many classes, together with only the few tokens of each name. Tokens after the end
    of text are not encoded. In a bidirectional tower (SigLIP, MobileCLIP), every sentence is
    encoded in full length.

    The model is put into eval mode and its gradients are turned off (:func:`freeze`). Its
    gradient checkpointing (``model.set_grad_checkpointing()``) is respected. The tower is a plain
    object and not a submodule. ``.to(device)`` of a client module does not move it, so move the
    model first. A deep copy of a client shares the tower.

    Args:
        clip_model: Model of open_clip's class ``CLIP`` or ``CustomTextCLIP``.
        tokenizer: Tokenizer of the model, ``open_clip.get_tokenizer(name)``.
        class_chunk: Maximum number of classes that are encoded at a time, at least 1. Chunks are
            encoded again in the backward pass, so memory is bounded by one chunk and gradients
            are the same. If None, all classes are encoded at once.

    Attributes:
        dim: Width of a token, and so of a context. Features may have another width.
        context_length: Number of positions.
        causal: Whether a token attends to earlier ones only, and features are read at the end of
            text.

    Raises:
        TypeError: If the model's text tower cannot take embeddings (CoCa, Hugging Face towers).
        ValueError: If `tokenizer` has ids outside the model's vocabulary. If only some
            parameters of a tower are trained, or adapters such as LoRA's are, because they would
            be frozen silently. When used: if the model is no longer frozen or in eval mode.

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
        self, clip_model: nn.Module, tokenizer: Any, *, class_chunk: int | None = None
    ) -> None:
        text = _text_of(clip_model)
        if class_chunk is not None:
            check_count("class_chunk", class_chunk)
        self.class_chunk = class_chunk
        self.dim = text.token_embedding.embedding_dim
        self.context_length: int = text.context_length
        self._vocabulary = Vocabulary(
            tokenizer, context_length=self.context_length, size=text.token_embedding.num_embeddings
        )
        visual = getattr(clip_model, "visual", None)
        if isinstance(visual, nn.Module):
            check_unadapted("clip_model", visual.named_parameters("visual"))
        others = (
            (name, parameter)
            for name, parameter in clip_model.named_parameters()
            if not name.startswith(("visual.", "logit_"))
        )
        check_unadapted("clip_model", others)
        self.model = freeze(clip_model)
        self._text = text
        self._pool_type = _pool_type(text)
        self.causal = text.attn_mask is not None and self._pool_type in ("argmax", "eos")
        # Checked in every forward pass, so stored as flat lists.
        used = [text.transformer, text.ln_final, text.token_embedding, text.text_projection]
        self._all_modules = [
            module for part in used if isinstance(part, nn.Module) for module in part.modules()
        ]
        self._all_parameters = [
            parameter
            for module in self._all_modules
            for parameter in module.parameters(recurse=False)
        ]

    def __deepcopy__(self, memo: dict[int, Any]) -> "TextTower":
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
        if isinstance(names, str) or not isinstance(names, Sequence):
            raise wrong_type("names", "be a sequence of strings", kind(names))
        if not names:
            raise wrong_value("names", "contain at least one name", "none")
        vocabulary = self._vocabulary
        rows, endings = vocabulary.closed(names)
        device = self._text.positional_embedding.device
        return ClassNames(
            start=self._embedded(vocabulary.start),
            tokens=self._embedded(padded(rows, vocabulary.pad)),
            length=torch.tensor([len(row) for row in rows], device=device),
            pad=self._embedded([vocabulary.pad])[0],
            context_length=self.context_length,
            causal=self.causal,
            names=tuple(names),
            ending=torch.tensor(endings, device=device),
        )

    def words(self, text: str) -> Float[Tensor, "length dim"]:
        """Embed the tokens of a text, as initial values of a context.

        A word may have several tokens. Underscores are replaced by spaces.

        Raises:
            ValueError: If `text` is empty or too long for the tower.
        """
        return self._embedded(self._vocabulary.words(text))

    def __call__(self, text: PromptedText) -> Float[Tensor, "*batch contexts classes features"]:
        """Encode every sentence, by the model's pooling and projection, without normalization."""
        self._check(text)
        num_classes = text.suffix.shape[-3]
        chunk = self.class_chunk
        if chunk is None or chunk >= num_classes:
            return self._features(*text)
        encode = partial(checkpoint, self._features, use_reentrant=False, preserve_rng_state=False)
        suffixes, ends = torch.split(text.suffix, chunk, -3), torch.split(text.end, chunk)
        chunks = zip(suffixes, ends, strict=True)
        features = [encode(text.prefix, suffix, end) for suffix, end in chunks]
        return torch.cat(features, -2)

    def _features(self, prefix: Tensor, suffix: Tensor, end: Tensor) -> Tensor:
        """Encode rows of one prefix and the suffixes of several classes, and pool each class."""
        *leading, num_classes, length, dim = suffix.shape
        shared = prefix.shape[-2]
        per_row = _classes_per_row(shared, length, dim, num_classes) if self.causal else 1
        rows = math.ceil(num_classes / per_row)
        suffix = F.pad(suffix, (0, 0, 0, 0, 0, rows * per_row - num_classes))
        suffix = rearrange(
            suffix, "... (rows classes) length dim -> (... rows) (classes length) dim", rows=rows
        )
        prefix = repeat(prefix, "... length dim -> (... rows) length dim", rows=rows)
        hidden = self._run(torch.cat([prefix, suffix], 1), shared, length, per_row)
        hidden = hidden.reshape(*leading, rows, shared + per_row * length, dim)

        classes = torch.arange(num_classes, device=suffix.device)
        position = self._pooled_at(end) + classes % per_row * length
        return self._projected(hidden[..., classes // per_row, position, :])

    def _run(self, tokens: Tensor, shared: int, length: int, per_row: int) -> Tensor:
        """Run the transformer over rows of `shared` tokens and `per_row` suffixes of `length`."""
        text = self._text
        dtype = text.transformer.get_cast_dtype()
        owner, position = _layout(shared, length, per_row, tokens.device)
        tokens = tokens.to(dtype) + text.positional_embedding.to(dtype)[position]
        mask = _mask(owner, position, dtype) if self.causal else text.attn_mask
        hidden: Tensor = text.transformer(tokens, attn_mask=mask)
        return hidden

    def _projected(self, tokens: Tensor) -> Tensor:
        pooled: Tensor = self._text.ln_final(tokens)
        projection = self._text.text_projection
        if projection is None:
            return pooled
        is_module = isinstance(projection, nn.Module)
        projected: Tensor = projection(pooled) if is_module else pooled @ projection
        return projected

    def _pooled_at(self, end: Tensor) -> Tensor:
        if self._pool_type in ("argmax", "eos"):
            return end
        return torch.full_like(end, 0 if self._pool_type == "first" else self.context_length - 1)

    def _embedded(self, ids: Sequence[int] | Tensor) -> Tensor:
        weight: Tensor = self._text.token_embedding.weight.detach()
        return weight[torch.as_tensor(ids, dtype=torch.long, device=weight.device)]

    def _check(self, text: object) -> None:
        if not isinstance(text, PromptedText):
            raise wrong_type("text", "be PromptedText, from prompted_text", kind(text))
        prefix, suffix, end = (tuple(tensor.shape) for tensor in text)
        fits = len(prefix) in (3, 4) and suffix[:-3] == prefix[:-2] and 0 not in suffix[-3:]
        if not fits or (prefix[-1], suffix[-1]) != (self.dim, self.dim):
            rule = (
                f"have a prefix of shape (contexts, length, {self.dim}) and a suffix of shape "
                f"(contexts, classes, length, {self.dim}), optionally with an axis of samples first"
            )
            raise wrong_value("text", rule, f"{prefix} and {suffix}")
        if end != suffix[-3:-2]:
            rule = f"have shape ({suffix[-3]},), one position for each class"
            raise wrong_value("text.end", rule, end)
        length = prefix[-2] + suffix[-2]
        if length > self.context_length or not (self.causal or length == self.context_length):
            rule = f"have {'at most' if self.causal else 'exactly'} {self.context_length} tokens"
            raise wrong_value("text", rule, length)
        if not torch.compiler.is_compiling():
            self._check_frozen()

    def _check_frozen(self) -> None:
        if any(module.training for module in self._all_modules):
            rule = "stay in eval mode, as freeze(model) left it"
            raise wrong_value("tower", rule, "a model in train mode")
        if any(parameter.requires_grad for parameter in self._all_parameters):
            rule = "stay frozen, as freeze(model) left it"
            raise wrong_value("tower", rule, "a model with parameters that require gradients")


def _classes_per_row(shared: int, length: int, dim: int, num_classes: int) -> int:
    """Choose the number of classes that share one copy of the prefix.

    Let a row have n suffix tokens. The prefix costs shared / n for each of them. Attention scores
    between different classes, which are masked, cost n * 4 dim relative to the 24 dim^2
    operations of the matrix products. The sum is smallest at n^2 = 6 shared dim.
    """
    best = max(1, round(math.sqrt(6 * shared * dim) / length))
    return math.ceil(num_classes / math.ceil(num_classes / best))


def _layout(shared: int, length: int, per_row: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the owner of each token of a row, 0 for the prefix, and its position."""
    owner = torch.arange(per_row, device=device).repeat_interleave(length) + 1
    position = torch.arange(shared, shared + length, device=device).repeat(per_row)
    return F.pad(owner, (shared, 0)), torch.cat([torch.arange(shared, device=device), position])


def _mask(owner: Tensor, position: Tensor, dtype: torch.dtype) -> Tensor:
    """Mask all but the earlier tokens of the prefix and of the same class."""
    same_sentence = (owner[None] == owner[:, None]) | (owner[None] == 0)
    attended = same_sentence & (position[None] <= position[:, None])
    scores = torch.zeros(attended.shape, dtype=dtype, device=attended.device)
    return scores.masked_fill(~attended, -torch.inf)


def _text_of(clip_model: nn.Module) -> Any:
    """Return the part of a model that contains the text tower, or refuse the model."""
    from open_clip.model import CLIP, CustomTextCLIP

    if not isinstance(clip_model, CLIP | CustomTextCLIP):
        rule = "be an open_clip CLIP or CustomTextCLIP (CoCa adds a token)"
        raise wrong_type("clip_model", rule, type(clip_model).__name__)
    text: Any = getattr(clip_model, "text", clip_model)
    reason = _reason_to_refuse(text, separate=text is not clip_model)
    if reason is not None:
        rule = f"have a text tower that takes embeddings ({reason})"
        raise wrong_type("clip_model", rule, type(clip_model).__name__)
    return text


def _reason_to_refuse(text: Any, *, separate: bool) -> str | None:
    from open_clip.transformer import TextTransformer

    if separate and not isinstance(text, TextTransformer):
        return "a Hugging Face tower takes token ids only"
    if len(text.positional_embedding) != text.context_length:
        return "it adds a token, as CoCa does"
    if getattr(text, "use_pad_mask", False):
        return "it masks padding by token ids"
    if _pool_type(text) == "none":
        return "it does not pool"
    return None


def _pool_type(text: Any) -> str:
    name: str = text.text_pool_type if hasattr(text, "text_pool_type") else text.pool_type
    return name
