"""The CLIP of digits: metadata of its weights, contents of canvases, and captions of images."""

import hashlib
import json

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file

import fedprompt as fp
from build_samples import build_clip, canvas, digits_clip


@pytest.fixture(scope="module")
def model():
    return fp.freeze(digits_clip.clip())


def images(count, seed=0):
    """Return images without an empty pixel, so that every covered pixel is visible."""
    return 0.2 + 0.8 * torch.rand(count, 1, 16, 16, generator=torch.Generator().manual_seed(seed))


def test_committed_weights_are_those_their_metadata_describes(model):
    path = digits_clip._CLIP
    with safe_open(path, framework="pt") as file:
        metadata, weights = file.metadata(), load_file(path)
    stored = b"".join(weights[name].numpy().tobytes() for name in sorted(weights))
    assert metadata["sha256"] == hashlib.sha256(stored).hexdigest()
    assert metadata["recipe"] == build_clip.RECIPE
    assert tuple(json.loads(metadata["words"])) == build_clip.WORDS
    assert json.loads(metadata["architecture"]) == build_clip.ARCHITECTURE
    assert {tensor.dtype for tensor in weights.values()} == {torch.float16}
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, weights[name].float())
    assert path.stat().st_size < 1e6


def test_every_sentence_is_written_in_known_words_and_ends_at_the_highest_id():
    texts = [
        form.format(name)
        for forms in digits_clip.TEMPLATES.values()
        for form in forms
        for name in build_clip.NAMES
    ]
    rows = digits_clip.tokenize(texts)
    assert len(set(texts)) == 12 * 47 == len(rows.unique(dim=0))
    assert rows.max() == build_clip.WORDS.index("<eot>") == len(build_clip.WORDS) - 1
    assert len(set(build_clip.WORDS)) == len(build_clip.WORDS)
    for text, row in zip(texts, rows, strict=True):  # read back
        words = [build_clip.WORDS[index] for index in row[: int(row.argmax()) + 1]]
        assert " ".join(words[1:-1]).replace(" .", ".") == text
        assert words[0] == "<start>"
        assert not row[len(words) :].any()


def test_gray_images_are_centered_and_repeated_in_three_channels():
    gray = torch.tensor([[[[0.25, 1.0]]]])
    assert digits_clip.preprocess(gray).tolist() == [[[[-0.25, 0.5]]] * 3]


def test_an_unknown_word_is_refused():
    with pytest.raises(
        ValueError, match=r"`texts` must consist of the 48 words .* three .*; got 'heron'"
    ):
        digits_clip.tokenize(["a photo of a heron."])


def test_the_text_tower_gives_the_text_features_of_the_model(model):
    # Whole sentences as token ids give the same features as a context of words before class names.
    tower = fp.TextTower(model, digits_clip.tokenize)
    context = fp.ContextPrompts(tower.dim, init=tower.words("a photo of a"))
    features = tower(fp.prompted_text(context(), tower.class_names(build_clip.NAMES)))[0]
    whole = model.encode_text(
        digits_clip.tokenize([f"a photo of a {name}." for name in build_clip.NAMES])
    )
    torch.testing.assert_close(features, whole)


def test_short_texts_are_encoded_as_in_their_full_length(model):
    texts = ["a noisy drawing of a small A.", "a photo of a three."]
    torch.testing.assert_close(
        build_clip.encode_text(model, digits_clip.tokenize(texts, 12)),
        model.encode_text(digits_clip.tokenize(texts)),
    )


def test_an_image_of_half_its_size_is_a_mean_of_four_pixels():
    image = images(1)
    placed = canvas._place(image, torch.tensor([8.0]), torch.tensor([[10.0, 4.0]]))
    expected = F.pad(F.avg_pool2d(image, 2), (10, 14, 4, 20))
    torch.testing.assert_close(placed, expected, atol=1e-5, rtol=0)


def test_clutter_stays_outside_of_the_image_and_an_image_that_fills_the_canvas_has_none():
    ink = images(40)
    canvases, square = canvas._cluttered(
        ink, torch.Generator().manual_seed(0), smallest=12, largest=12
    )
    # Interpolation extends a side of 12 to at most 14 pixels, depending on the corner.
    sides = (square > 0).sum(-1).amax(-1)
    assert set(sides.flatten().tolist()) <= {12, 13, 14}
    outside = canvases * (square == 0)
    assert (outside.flatten(1).count_nonzero(1) > 50).all()
    again = torch.Generator().manual_seed(0)
    size = 12 + 0 * torch.rand(40, generator=again)
    placed = canvas._place(ink, size, torch.rand(40, 2, generator=again) * 20)
    torch.testing.assert_close(canvases * (square > 0), placed)

    full, square = canvas._cluttered(ink, torch.Generator().manual_seed(0), smallest=32)
    assert (square > 0).all()
    torch.testing.assert_close(
        full, canvas._place(ink, torch.full((40,), 32.0), torch.zeros(40, 2))
    )


def test_canvases_are_assigned_to_domains_in_turn():
    ink, generator = images(9), torch.Generator().manual_seed(0)
    plain, domains = canvas.on_canvases(ink, generator, domains=["plain"], smallest=12, largest=20)
    assert not domains.any()
    mixed, domains = canvas.on_canvases(
        ink,
        torch.Generator().manual_seed(0),
        domains=["plain", "inverted", "noisy"],
        smallest=12,
        largest=20,
    )
    assert domains.tolist() == [0, 1, 2] * 3
    assert torch.equal(mixed[::3], plain[::3])
    assert torch.equal(mixed[1::3], 1 - plain[1::3])
    # With 3,072 draws, the standard error of the deviation is 1.3 %.
    assert (mixed[2::3] - plain[2::3]).std().item() == pytest.approx(0.3, rel=0.1)


@pytest.mark.bad_input
def test_an_unknown_domain_is_refused_with_the_choices():
    with pytest.raises(ValueError, match="`domains` must be among plain, inverted, noisy; got rot"):
        canvas.on_canvases(
            images(1), torch.Generator(), domains=["rotated"], smallest=12, largest=20
        )
