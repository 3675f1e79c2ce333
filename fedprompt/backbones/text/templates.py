"""CLIP's zero-shot classifier, from several sentences for each class."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

import fedprompt._refusals as check
from fedprompt._cosine import unit
from fedprompt.backbones.text.tower import TextTower


@torch.no_grad()
def zero_shot_classifier(
    tower: TextTower, names: Sequence[str], templates: Sequence[str | Callable[[str], str]]
) -> Float[Tensor, "classes features"]:
    r"""Average the features of several sentences for each class (prompt ensembling).

    .. math:: w_k = \frac{m_k}{\lVert m_k \rVert}, \qquad
              m_k = \frac{1}{T} \sum_t \frac{h_{tk}}{\lVert h_{tk} \rVert}

    :math:`h_{tk}` is the text feature of template t with the name of class k. The classifier is the
    `text` of :func:`cosine_logits`. It has no gradients.

    Args:
        tower: Text tower, with a tokenizer.
        names: Name of each class. Underscores are replaced by spaces.
        templates: Sentences with ``{}`` in place of the name, such as ``"a photo of a {}."``, or
            functions from a name to a sentence, as in ``open_clip.OPENAI_IMAGENET_TEMPLATES``.

    Returns:
        Weights of norm 1, in float32 at least.

    Raises:
        ValueError: If there are no templates, a template lacks ``{}``, or a sentence is too long
            for the tower.

    Example:
        >>> from fedprompt import samples
        >>> tower = TextTower(samples.clip(), samples.tokenize)
        >>> templates = ["an emoji of a {}.", "a drawing of the {}."]
        >>> zero_shot_classifier(tower, ["penguin", "tool"], templates).shape
        torch.Size([2, 96])

    References:
        Radford et al., "Learning Transferable Visual Models From Natural Language Supervision",
        ICML 2021.
    """
    check.instance("tower", tower, TextTower, "be a TextTower")
    check.sequence("templates", templates, "strings or functions")
    check.some("templates", templates, "contain at least one template")
    check.texts("names", names)
    total = torch.zeros(())
    for template in templates:
        (features,) = tower(tower.sentences([_sentence(template, name) for name in names]))
        total = total.to(features.device) + unit(features)
    return unit(total)


def _sentence(template: str | Callable[[str], str], name: str) -> str:
    if isinstance(template, str):
        rule = "contain {} in place of the name"
        check.require("{}" in template, "templates", rule, repr(template))
        return template.replace("{}", name)
    check.function("templates", template, "be strings or functions of a name")
    return template(name)
