"""Zero-shot classifiers and selected names, against plain open_clip."""

import pytest
import torch
import torch.nn.functional as F

from clips import TOKENIZER, TOWERS, draw, make_clip
from fedprompt import TextTower, prompted_text, zero_shot_classifier
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
