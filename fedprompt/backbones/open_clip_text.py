"""open_clip's text towers, fed with sentences of embeddings instead of token ids."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fedprompt._checks import check_count, kind, wrong_type, wrong_value
from fedprompt.backbones._adapted import check_unadapted
from fedprompt.backbones._vocabulary import Vocabulary, padded
from fedprompt.freezing import freeze
from fedprompt.interfaces import ClassNames, PromptedText


class TextTower:
    r"""The text tower of an open_clip model, for sentences whose context is learned.

    In a causal tower the tokens before the class name do not see it. So they run once for many classes, and behind them only the few
    tokens of each name: for 100 classes and 16 context tokens 14 times fewer tokens than 100 full sentences. Nothing behind the
    end of text is run. Where the tower looks both ways (SigLIP, MobileCLIP), every sentence runs in full length.

    The model is put into eval mode and its gradients are turned off (:func:`freeze`); its gradient checkpointing
    (``model.set_grad_checkpointing()``) is honoured. The tower is a plain object, so ``.to(device)`` of a client module does not
    reach it: move the model before. A deep copy of a client shares the tower.

    Args:
        clip_model: An open_clip ``CLIP`` or ``CustomTextCLIP``.
        tokenizer: The model's own, ``open_clip.get_tokenizer(name)``.
        class_chunk: Run at most so many classes at a time, and run them again for the gradients: the same gradients with the memory of
            one chunk. None: all at once.

    Attributes:
        dim: Width of a token, that of a context; features may have another.
        context_length: Number of positions.
        causal: Whether a token sees only what stands before it, and features are read at the end of text.

    Raises:
        TypeError: If the model's text tower cannot take embeddings (CoCa, Hugging Face towers), or `tokenizer` is not one of open_clip's.
        ValueError: If `tokenizer` has ids that the model has not, `class_chunk` is below 1, or some parameters of a tower are trained
            and others are not (adapters such as LoRA's would be frozen silently). (when used) If the model was unfrozen or put
            back into training.

    Example:
        >>> import open_clip
        >>> clip_model = open_clip.model.CLIP(
        ...     embed_dim=4, vision_cfg=dict(layers=1, width=8, head_width=4, patch_size=8, image_size=16),
        ...     text_cfg=dict(context_length=16, vocab_size=49408, width=8, heads=2, layers=1))
        >>> tower = TextTower(clip_model, open_clip.tokenizer.SimpleTokenizer(context_length=16))
        >>> names = tower.class_names(["cat", "polar bear"])
        >>> context = ContextPrompts(tower.dim, num_contexts=3, init=tower.words("a photo of a"))
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
        check_unadapted(
            "clip_model",
            (
                named
                for named in clip_model.named_parameters()
                if not named[0].startswith(("visual.", "logit_"))
            ),
        )
        self.model = freeze(clip_model)
        self._text = text
        self._pool_type = _pool_type(text)
        self.causal = text.attn_mask is not None and self._pool_type in ("argmax", "eos")
        # Looked through at every pass, so kept as flat lists.
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
        """Tokenize class names once; underscores count as spaces.

        Each name and its full stop are tokenized as one string, as in CoOp.

        Args:
            names: One for each class; two classes may have the same.

        Returns:
            The tokens of each name and of what closes its sentence, for :func:`prompted_text`; on the model's device.

        Raises:
            TypeError: If a name is not a string.
            ValueError: If there is none, one is empty, or one is too long for the tower.
        """
        if isinstance(names, str) or not isinstance(names, Sequence):
            raise wrong_type("names", "be a sequence of strings", kind(names))
        if not names:
            raise wrong_value("names", "hold at least one name", "none")
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
        """Return the embeddings of a text's tokens, as a context to start from; a word may have several, underscores count as spaces.

        Raises:
            TypeError: If `text` is not a string.
            ValueError: If it is empty or too long for the tower.
        """
        return self._embedded(self._vocabulary.words(text))

    def __call__(self, text: PromptedText) -> Float[Tensor, "*batch contexts classes features"]:
        """Encode every sentence at its end token, or where else the model pools; projected, not normalised."""
        self._check(text)
        num_classes = text.suffix.shape[-3]
        chunk = self.class_chunk
        if chunk is None or chunk >= num_classes:
            return self._features(*text)
        return torch.cat(
            [
                checkpoint(
                    self._features,
                    text.prefix,
                    suffix,
                    end,
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
                for suffix, end in zip(
                    torch.split(text.suffix, chunk, -3), torch.split(text.end, chunk), strict=True
                )
            ],
            -2,
        )

    def _features(self, prefix: Tensor, suffix: Tensor, end: Tensor) -> Tensor:
        """Run rows of one prefix and the suffixes of several classes side by side, and pool each class's own token."""
        *leading, num_classes, length, dim = suffix.shape
        num_contexts, shared = math.prod(leading), prefix.shape[-2]
        per_row = _classes_per_row(shared, length, dim, num_classes) if self.causal else 1
        rows = math.ceil(num_classes / per_row)
        owner, position = _layout(shared, length, per_row, suffix.device)
        suffix = F.pad(suffix, (0, 0, 0, 0, 0, rows * per_row - num_classes)).reshape(
            num_contexts * rows, per_row * length, dim
        )
        tokens = torch.cat(
            [prefix.reshape(num_contexts, shared, dim).repeat_interleave(rows, 0), suffix], 1
        )

        text = self._text
        dtype = text.transformer.get_cast_dtype()
        tokens = tokens.to(dtype) + text.positional_embedding.to(dtype)[position]
        mask = _mask(owner, position, dtype) if self.causal else text.attn_mask
        hidden = text.transformer(tokens, attn_mask=mask).reshape(
            *leading, rows, tokens.shape[1], dim
        )

        classes = torch.arange(num_classes, device=suffix.device)
        pooled: Tensor = text.ln_final(
            hidden[..., classes // per_row, self._pooled_at(end) + classes % per_row * length, :]
        )
        projection = text.text_projection
        if projection is None:
            return pooled
        projected: Tensor = (
            projection(pooled) if isinstance(projection, nn.Module) else pooled @ projection
        )
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
            rule = f"have a prefix of shape (contexts, length, {self.dim}) and a suffix of shape (contexts, classes, length, {self.dim})"
            raise wrong_value(
                "text", f"{rule}, with one axis more in front for samples", f"{prefix} and {suffix}"
            )
        if end != suffix[-3:-2]:
            raise wrong_value(
                "text.end", f"have shape ({suffix[-3]},), one position for each class", end
            )
        length = prefix[-2] + suffix[-2]
        if length > self.context_length or not (self.causal or length == self.context_length):
            raise wrong_value(
                "text",
                f"have {'at most' if self.causal else 'exactly'} {self.context_length} tokens",
                length,
            )
        if torch.compiler.is_compiling():
            return
        if any(module.training for module in self._all_modules):
            raise wrong_value(
                "tower", "stay in eval mode, as freeze(model) left it", "a model in train mode"
            )
        if any(parameter.requires_grad for parameter in self._all_parameters):
            raise wrong_value(
                "tower",
                "stay frozen, as freeze(model) left it",
                "a model with parameters that require gradients",
            )


def _classes_per_row(shared: int, length: int, dim: int, num_classes: int) -> int:
    """How many classes share one copy of the prefix.

    With n suffix tokens in a row, each of them pays shared / n for the prefix and, relative to the 24 dim^2 operations of its matrix
    products, n * 4 dim / (24 dim^2) for attention scores across classes that are masked; the sum is least at n^2 = 6 shared dim.
    """
    best = max(1, round(math.sqrt(6 * shared * dim) / length))
    return math.ceil(num_classes / math.ceil(num_classes / best))


def _layout(shared: int, length: int, per_row: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Whose each token of a row is (0: the prefix, shared), and where in its sentence it stands."""
    owner = torch.arange(per_row, device=device).repeat_interleave(length) + 1
    position = torch.arange(shared, shared + length, device=device).repeat(per_row)
    return F.pad(owner, (shared, 0)), torch.cat([torch.arange(shared, device=device), position])


def _mask(owner: Tensor, position: Tensor, dtype: torch.dtype) -> Tensor:
    """A token sees what stands before it in its own sentence: the prefix, and tokens of its own class."""
    seen = ((owner[None] == owner[:, None]) | (owner[None] == 0)) & (
        position[None] <= position[:, None]
    )
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, -torch.inf)


def _text_of(clip_model: nn.Module) -> Any:
    """The part of a model that holds the text tower; a TypeError with the reason where it cannot take embeddings."""
    from open_clip.model import CLIP, CustomTextCLIP
    from open_clip.transformer import TextTransformer

    if not isinstance(clip_model, CLIP | CustomTextCLIP):
        raise wrong_type(
            "clip_model",
            "be an open_clip CLIP or CustomTextCLIP (CoCa adds a token of its own)",
            type(clip_model).__name__,
        )
    text: Any = getattr(clip_model, "text", clip_model)
    reason = None
    if text is not clip_model and not isinstance(text, TextTransformer):
        reason = "its tower is Hugging Face's, which takes token ids alone"
    elif len(text.positional_embedding) != text.context_length:
        reason = "it adds a token of its own, as CoCa does"
    elif getattr(text, "use_pad_mask", False):
        reason = "it masks padding by token ids"
    elif _pool_type(text) == "none":
        reason = "it does not pool"
    if reason is not None:
        raise wrong_type(
            "clip_model",
            f"have a text tower that takes embeddings ({reason})",
            type(clip_model).__name__,
        )
    return text


def _pool_type(text: Any) -> str:
    name: str = text.text_pool_type if hasattr(text, "text_pool_type") else text.pool_type
    return name
