"""Judgment of a custom text encoder: the promises of ``TextEncoder``, one line each."""

import torch
from jaxtyping import Float
from torch import Tensor

import fedprompt._nouns as nouns
import fedprompt._refusals as check
from fedprompt.backbones.checks._report import Judge, Line, Report, fail_if, judged, near
from fedprompt.interfaces import ClassNames, TextEncoder
from fedprompt.prompts.context import prompted_text


def text_encoder(
    encoder: object,
    names: ClassNames,
    *,
    words: Float[Tensor, "length dim"] | None = None,
    expected: Float[Tensor, "classes features"] | None = None,
) -> Report:
    """Judge a custom text encoder line by line, with random contexts.

    The lines of the report are:

    - *shape*: `dim` is the width of a token. Features are finite and have shape
      (contexts, classes, features).
    - *repeatable*: the same sentences have the same features, so there is no dropout.
    - *classes*: features have the order of the classes, and no class affects another one.
    - *contexts*: no context affects another one.
    - *end of text*: tokens after the end change nothing. Names with ``causal=False`` pass.
    - *class-specific*: class-specific contexts with equal rows give the same features as one
      context for all classes.
    - *samples*: contexts of samples equal a loop over the samples, and there may be none.
    - *gradients*: gradients reach each token of each context.
    - *frozen*: all modules are in eval mode, and no parameter is trainable.
    - *unchanged*: the checks above changed no weight and no buffer.
    - *shared*: a deep copy of the encoder is the encoder, so that clients share it.
    - *same as the model*: the features of `words` before each name are `expected`.

    An exception of the encoder fails the line in which it was raised. It is shown and not raised.

    Args:
        encoder: Text encoder of your own.
        names: At least two different names, from the encoder. Names of different lengths find
            more mistakes.
        words: Embedded words, such as ``tower.words("a photo of a")``.
        expected: Features of the same sentences, from the model's own forward pass. If None,
            features are not compared.

    Returns:
        Report that prints as a table. ``report.passed`` is whether no line failed, and
        ``report.failed`` has the names of the lines that did.

    Raises:
        ValueError: If there are fewer than two names, or only one of `words` and `expected`.

    Example:
        >>> from fedprompt import samples
        >>> tower = TextTower(samples.clip(), samples.tokenize)
        >>> names = tower.class_names(["bird", "tool"])
        >>> check.text_encoder(tower, names).passed
        True
        >>> tower.dim = 7
        >>> "shape" in check.text_encoder(tower, names).failed
        True
    """
    nouns.class_names(names)
    check.require(len(names.names) >= 2, "names", "contain at least two names", len(names.names))
    rule = "be given together with `words`"
    check.require((words is None) == (expected is None), "expected", rule, "only one of them")
    title = type(encoder).__name__
    if not isinstance(encoder, TextEncoder):
        remedy = "add the attribute `dim` and the method __call__, as in the protocol TextEncoder"
        return Report(title, (Line("members", False, "not a text encoder", remedy),))
    judge = _Judge(encoder, names)
    lines = [judged(name, remedy, getattr(judge, method)) for name, method, remedy in _CHECKS]
    same = Line("same as the model", None, "", "give `words` and the model's features, `expected`")
    if words is not None and expected is not None:
        same = judged(same.name, _SAME, lambda: _near(judge.encode(words[None])[0], expected))
    return Report(title, (*lines, same))


class _Judge(Judge):
    """The checks of one encoder. Each returns whether the claim holds, and what was measured."""

    def __init__(self, encoder: TextEncoder, names: ClassNames) -> None:
        super().__init__(encoder)
        self.encoder = encoder
        self.names = names
        dtype = torch.promote_types(names.tokens.dtype, torch.float32)
        size = (2, 3, names.tokens.shape[-1])
        noise = torch.randn(size, generator=torch.Generator().manual_seed(0), device="cpu")
        self.context = (noise * names.tokens.float().std().cpu()).to(names.tokens.device, dtype)

    @torch.no_grad()
    def encode(self, context: Tensor, names: ClassNames | None = None) -> Tensor:
        several = context.ndim == 4
        return self.encoder(prompted_text(context, names or self.names, per_sample=several))

    def shape(self) -> None:
        dim, width = self.encoder.dim, self.names.tokens.shape[-1]
        fail_if(dim != width, f"dim is {dim}, but tokens have width {width}")
        for context in (self.context, self.context[:1]):
            features = self.encode(context)
            axes = (len(context), len(self.names.names))
            fits = features.ndim == 3 and features.shape[:2] == axes
            fail_if(not fits, f"features {tuple(features.shape)} for {axes} contexts and classes")
            fail_if(not features.isfinite().all(), "features that are not finite")

    def repeatable(self) -> str:
        return _near(self.encode(self.context), self.encode(self.context))

    def classes(self) -> str:
        together = self.encode(self.context)
        count = len(self.names.names)
        reverse = self.encode(self.context, self.names.select(range(count)[::-1])).flip(1)
        alone = [self.encode(self.context, self.names.select([number])) for number in range(count)]
        _near(torch.cat(alone, 1), together)
        return _near(reverse, together)

    def contexts(self) -> str:
        alone = [self.encode(context[None]) for context in self.context]
        return _near(torch.cat(alone), self.encode(self.context))

    @torch.no_grad()
    def end_of_text(self) -> str:
        if not self.names.causal:
            return "may be read, because the names have causal=False"
        text = prompted_text(self.context, self.names)
        position = torch.arange(text.suffix.shape[-2], device=text.suffix.device)
        last = torch.tensor(text.end, device=position.device) - text.prefix.shape[-2]
        after = (position > last[:, None])[..., None]
        generator = torch.Generator().manual_seed(1)
        noise = torch.randn(text.suffix.shape, generator=generator, device="cpu")
        changed = text._replace(suffix=text.suffix + after * noise.to(text.suffix))
        return _near(self.encoder(changed), self.encoder(text))

    @torch.no_grad()
    def class_specific(self) -> str:
        by_class = self.context[:, None].expand(-1, len(self.names.names), -1, -1)
        text = prompted_text(by_class, self.names, class_specific=True)
        return _near(self.encoder(text), self.encode(self.context))

    def samples(self) -> str:
        contexts = torch.stack([self.context, -self.context, 2 * self.context])
        together = self.encode(contexts)
        loop = torch.stack([self.encode(context) for context in contexts])
        _near(self.encode(contexts[:0]), loop[:0])
        return _near(together, loop)

    def gradients(self) -> None:
        context = self.context.clone().requires_grad_()
        with torch.enable_grad():
            features = self.encoder(prompted_text(context, self.names))
            fail_if(not features.requires_grad, "features have no graph")
            weights = torch.linspace(0.5, 1.5, features.shape[-1], device=features.device)
            loss = (features.float() * weights).square().sum()
            (gradient,) = torch.autograd.grad(loss, context, allow_unused=True)
        fail_if(gradient is None or not gradient.isfinite().all(), "no finite gradient")
        missing = int((gradient == 0).all(-1).sum())
        fail_if(missing, f"none at {missing} tokens")


_SAME = "check positions, the mask, the last norm, the pooled position and the projection"
_CHECKS: tuple[tuple[str, str, str], ...] = (
    ("shape", "shape", "return (contexts, classes, features), also for a single context"),
    ("repeatable", "repeatable", "put the model into eval mode with freeze(model)"),
    ("classes", "classes", "keep the order of classes, and let no class read another one"),
    ("contexts", "contexts", "encode each context with sentences that no other context reads"),
    ("end of text", "end_of_text", "read at `text.end` under a causal mask, or set causal=False"),
    ("class-specific", "class_specific", "read the context from `text.suffix`, if it is there"),
    ("samples", "samples", "keep all axes in front of the contexts"),
    ("gradients", "gradients", "use every token, without no_grad, detach and .data"),
    ("frozen", "frozen", "call freeze(model)"),
    ("unchanged", "unchanged", "make new tensors, do not write in place"),
    ("shared", "shared", "let __deepcopy__ return the encoder"),
)


def _near(actual: Tensor, expected: Tensor) -> str:
    """Compare up to rounding, relative to the largest number."""
    return near(actual, expected, torch.finfo(actual.dtype).eps ** (2 / 3))
