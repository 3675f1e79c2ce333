"""Features of open_clip's text towers, against whole sentences encoded one at a time."""

from functools import partial

import open_clip
import pytest
import torch

from clips import CONTEXT_LENGTH, NAMES, TOKENIZER, TOWERS, draw, make_clip
from fedprompt import ContextPrompts, TextTower, image_tokens, prompted_text
from fedprompt.privacy import per_sample
from references import coop
from tolerance import assert_near

PLACES = {"end": 5, "middle": 2, "front": 0}  # context tokens before the name, of 5


def gradients(features, *inputs):
    return torch.autograd.grad((features * draw(*features.shape, seed=5)).sum(), inputs)


# Every kind with every place, and both with contexts of classes and without.
WRITTEN = [
    (kind, place, (row + column) % 2 == 1)
    for row, kind in enumerate(["CLIP", "custom text", "custom text, custom blocks"])
    for column, place in enumerate(PLACES)
]


@pytest.mark.parametrize(("kind", "place", "specific"), WRITTEN)
def test_features_and_gradients_equal_those_of_whole_sentences(kind, place, specific):
    model = make_clip(**TOWERS[kind])
    tower = TextTower(model, TOKENIZER)
    context = draw(2, *[len(NAMES)] * specific, 5, tower.dim).requires_grad_()
    features = tower(
        prompted_text(
            context, tower.class_names(NAMES), name_position=PLACES[place], class_specific=specific
        )
    )
    expected = coop.text_features(model, TOKENIZER, context, NAMES, PLACES[place])
    assert_near(features, expected)
    assert_near(*(gradients(values, context)[0] for values in (features, expected)))


LOW = [
    (kind, dtype)
    for kind in ("CLIP", "both ways, last")
    for dtype in (torch.float32, torch.bfloat16)
]


@pytest.mark.parametrize(("kind", "dtype"), [*((kind, torch.float64) for kind in TOWERS), *LOW])
def test_a_context_of_words_gives_the_features_of_the_text(kind, dtype):
    model = make_clip(**TOWERS[kind]).to(dtype)
    tower = TextTower(model, TOKENIZER)
    features = tower(
        prompted_text(tower.words("a blurry photo of one")[None], tower.class_names(NAMES))
    )
    expected = model.encode_text(TOKENIZER([f"a blurry photo of one {name}." for name in NAMES]))
    assert features.dtype == expected.dtype == dtype
    assert_near(features[0], expected)


def test_only_causal_towers_read_at_the_end_of_text_get_short_sentences():
    """In other towers, padding affects the features."""
    for kind, arguments in TOWERS.items():
        tower = TextTower(make_clip(**arguments), TOKENIZER)
        text = prompted_text(draw(1, 3, tower.dim), tower.class_names(["cat"]))
        length = text.prefix.shape[1] + text.suffix.shape[2]
        assert length == (
            CONTEXT_LENGTH
            if kind.startswith("both ways") or kind.endswith(", last")
            else 1 + 3 + 1 + 2
        ), kind


@pytest.mark.parametrize(
    ("kind", "place", "specific"), [*WRITTEN[:3], ("both ways, last", "middle", False)]
)
def test_contexts_per_sample_equal_a_loop_over_samples(kind, place, specific):
    model = make_clip(**TOWERS[kind])
    contexts = draw(3, 2, *[len(NAMES)] * specific, 5, 16).requires_grad_()
    for chunk in (None, 4):
        tower = TextTower(model, TOKENIZER, class_chunk=chunk)
        names = tower.class_names(NAMES)
        write = partial(
            prompted_text, names=names, name_position=PLACES[place], class_specific=specific
        )
        features = tower(write(contexts, per_sample=True))
        expected = torch.stack([tower(write(context)) for context in contexts])
        assert_near(features, expected)
        assert_near(*(gradients(values, contexts)[0] for values in (features, expected)))


def test_contexts_per_sample_are_never_treated_as_class_specific():
    """The shapes of 7 samples, 10 contexts and 10 classes match both readings."""
    tower = TextTower(make_clip(), TOKENIZER)
    names = tower.class_names(NAMES[:10])
    contexts = ContextPrompts(
        tower.dim, num_contexts=10, length=4, generator=torch.Generator().manual_seed(0)
    ).double()
    copies = per_sample(contexts, 7)()
    with pytest.raises(
        ValueError,
        match=r"`context` must .*`per_sample=True`.*`class_specific=True`.*; got \(7, 10, 4, 16\)",
    ):
        prompted_text(copies, names)
    features = tower(prompted_text(copies, names, per_sample=True))
    assert features.shape == (7, 10, 10, 12)
    for own in features:
        assert_near(own, tower(prompted_text(contexts(), names)))


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("kind", ["CLIP", "both ways, last"])
def test_a_batch_may_be_empty(kind, chunk):
    """`poisson_batch` sometimes returns no samples."""
    tower = TextTower(make_clip(**TOWERS[kind]), TOKENIZER, class_chunk=chunk)
    names = tower.class_names(NAMES)
    copies = per_sample(ContextPrompts(tower.dim, num_contexts=2, length=4).double(), 0)
    features = tower(prompted_text(copies(), names, per_sample=True))
    assert features.shape == (0, 2, 11, 12)
    features.sum().backward()
    assert copies.context.grad.shape == (0, 2, 4, 16)
    assert tower(prompted_text(copies()[:, 0], names)).shape == (0, 11, 12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["ViT-B-32-quickgelu", "RN50", "EVA02-B-16", "PE-Core-T-16-384", "MobileCLIP2-S0", "ViTamin-S"],
)
def test_shipped_models_encode_a_context_of_words_as_they_encode_text(name):
    """Use the sizes, norms and activations that open_clip ships, with random weights."""
    model = open_clip.create_model(name, pretrained=None)
    tokenizer = open_clip.tokenizer.SimpleTokenizer(context_length=model.context_length)
    tower = TextTower(model, tokenizer)
    features = tower(prompted_text(tower.words("a photo of a")[None], tower.class_names(NAMES[:3])))
    assert_near(
        features[0], model.encode_text(tokenizer([f"a photo of a {name}." for name in NAMES[:3]]))
    )
    size = model.visual.image_size
    images = draw(1, 3, *(size if isinstance(size, tuple) else (size, size))).float()
    assert_near(image_tokens(model, images)[0], model.encode_image(images))
