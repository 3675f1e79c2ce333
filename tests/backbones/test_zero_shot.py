"""Zero-shot classifiers and selected names, against plain open_clip."""

import pytest
import torch
import torch.nn.functional as F

from clips import CONTEXT_LENGTH, TOKENIZER, TOWERS, draw, make_clip
from fedprompt import TextTower, prompted_text, zero_shot_classifier
from fedprompt.interfaces import ClassNames
from tolerance import assert_near

NAMES = ("cat", "golden retriever", "Boeing 737-800", "dog", "cat")
TEMPLATES = ("a photo of a {}.", "itap of the {}", "{}", lambda name: f"{name} in a game.")


def plain(model, names, templates):
    """Encode every sentence on its own, as in CLIP's notebook."""
    rows = []
    for name in names:
        texts = [t(name) if callable(t) else t.format(name) for t in templates]
        features = [F.normalize(model.encode_text(TOKENIZER([text]))[0], dim=0) for text in texts]
        rows.append(F.normalize(torch.stack(features).mean(0), dim=0))
    return torch.stack(rows)


@pytest.mark.parametrize("kind", ["CLIP", "custom text, custom blocks", "both ways, last"])
def test_a_classifier_is_the_normalized_mean_of_normalized_features(kind):
    model = make_clip(**TOWERS[kind])
    classifier = zero_shot_classifier(TextTower(model, TOKENIZER), NAMES, TEMPLATES)
    expected = plain(model, NAMES, TEMPLATES)
    assert_near(classifier, expected)
    assert not classifier.requires_grad
    # The mean of features that are not normalized, and sentences of other classes, differ.
    mean = torch.stack([model.encode_text(TOKENIZER([t.format("cat") for t in TEMPLATES[:3]]))])
    assert (F.normalize(mean.mean(1), dim=1)[0] - expected[0]).abs().max() > 1e-3
    assert (classifier[0] - classifier[1]).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["CLIP", "both ways, last"])
def test_whole_sentences_are_encoded_as_by_the_model(kind):
    model = make_clip(**TOWERS[kind])
    tower = TextTower(model, TOKENIZER)
    for texts in (["a cat."], ["a dog", "a dog on a very long road", "one cat"], ["same"] * 2):
        assert_near(tower(tower.sentences(texts))[0], model.encode_text(TOKENIZER(texts)))
    shared = tower.sentences(["a photo of a dog.", "a photo of a polar bear."]).prefix
    assert shared.shape == (1, 1 + 4, 16)


def test_underscores_are_spaces_and_half_precision_is_averaged_in_float32():
    tower = TextTower(make_clip().bfloat16(), TOKENIZER)
    names = ["polar_bear", "polar bear"]
    classifier = zero_shot_classifier(tower, names, ["a {}.", "the {}."])
    assert classifier.dtype == torch.float32
    assert torch.equal(classifier[0], classifier[1])


def test_selected_names_are_encoded_like_new_ones():
    tower = TextTower(make_clip(), TOKENIZER)
    names, context = tower.class_names(NAMES), draw(2, 5, tower.dim)
    everything = tower(prompted_text(context, names))
    for indices in ([3, 0], torch.tensor([2, 2]), range(4), [1]):
        chosen = names.select(indices)
        fresh = tower.class_names([NAMES[index] for index in indices])
        for own, new in zip(chosen, fresh, strict=True):
            assert torch.equal(own, new) if isinstance(own, torch.Tensor) else own == new
        features = tower(prompted_text(context, chosen))
        assert_near(features, everything[:, list(indices)])


@pytest.mark.bad_input
@pytest.mark.parametrize("indices", [[], [5], [0, -1], torch.tensor([7])])
def test_numbers_of_no_class_are_refused(indices):
    names = TextTower(make_clip(), TOKENIZER).class_names(NAMES)
    assert isinstance(names, ClassNames)
    with pytest.raises(IndexError, match=r"`indices` must contain .*, all in \[0, 5\); got"):
        names.select(indices)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("names", "templates", "error", "message"),
    [
        (["cat"], "a {}", TypeError, "`templates` must be a sequence of strings or functions"),
        (["cat"], [], ValueError, "`templates` must contain at least one template; got none"),
        (["cat"], ["a cat"], ValueError, "`templates` must contain {} in place of the name; got"),
        (["cat"], [3], TypeError, "`templates` must be strings or functions of a name; got 3"),
        (["cat"], ["bear " * 22 + "{}"], ValueError, "`texts` must have .* with more than 22"),
        ("cat", ["a {}"], TypeError, "`names` must be a sequence of strings; got 'cat'"),
        ([], ["a {}"], ValueError, "`names` must contain at least one string; got none"),
        ([3], [lambda name: name], TypeError, r"`names\[0\]` must be a string; got 3"),
    ],
)
def test_bad_templates_and_names_are_refused(names, templates, error, message):
    assert CONTEXT_LENGTH == 24
    with pytest.raises(error, match=message):
        zero_shot_classifier(TextTower(make_clip(), TOKENIZER), names, templates)
