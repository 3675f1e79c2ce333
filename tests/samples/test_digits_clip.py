"""The CLIP of digits: its weights, its words, and the contents of canvases."""

import hashlib

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file

import fedprompt as fp
from build_samples import canvas, digits_clip


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
    assert {tensor.dtype for tensor in weights.values()} == {torch.float16}
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, weights[name].float())
    assert path.stat().st_size < 1e6


def test_words_are_those_of_the_file_and_the_end_has_the_highest_id():
    words = digits_clip._words()
    (row,) = digits_clip.tokenize(["a photo of a three."], 9)
    written = ["<start>", "a", "photo", "of", "a", "three", ".", "<eot>", "<pad>"]
    assert [words[index] for index in row] == written
    assert row.max() == len(words) - 1


def test_the_text_tower_gives_the_text_features_of_the_model(model):
    # Whole sentences as token ids give the same features as a context of words before class names.
    tower = fp.TextTower(model, digits_clip.tokenize)
    context = fp.ContextPrompts(tower.dim, init=tower.words("a photo of a"))
    names = digits_clip.CLASS_NAMES
    features = tower(fp.prompted_text(context(), tower.class_names(names)))[0]
    whole = model.encode_text(digits_clip.tokenize([f"a photo of a {name}." for name in names]))
    torch.testing.assert_close(features, whole)


def test_an_image_of_half_its_size_is_a_mean_of_four_pixels():
    image = images(1)
    placed = canvas._place(image, torch.tensor([8.0]), torch.tensor([[10.0, 4.0]]))
    expected = F.pad(F.avg_pool2d(image, 2), (10, 14, 4, 20))
    torch.testing.assert_close(placed, expected, atol=1e-5, rtol=0)


def test_clutter_stays_outside_of_the_image_and_an_image_that_fills_the_canvas_has_none():
    ink, size = images(40), torch.full((40,), 12.0)

    def put(side):
        draw = torch.Generator().manual_seed(0)
        return canvas.on_canvases(ink, draw, domains=["plain"], smallest=side, largest=side)[0]

    again = torch.Generator().manual_seed(0)
    torch.rand(40, generator=again)  # sizes, which are equal here
    corner = torch.rand(40, 2, generator=again) * 20
    inside = canvas._place(torch.ones_like(ink), size, corner) > 0
    # Interpolation extends a side of 12 to at most 14 pixels, depending on the corner.
    assert set(inside.sum(-1).amax(-1).flatten().tolist()) <= {12, 13, 14}
    canvases = put(12)
    assert ((canvases * ~inside).flatten(1).count_nonzero(1) > 50).all()
    torch.testing.assert_close(canvases * inside, canvas._place(ink, size, corner))
    whole = canvas._place(ink, torch.full((40,), 32.0), torch.zeros(40, 2))
    torch.testing.assert_close(put(32), whole)


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
