"""The sample emoji and their CLIP: metadata, captions, and nothing of the tests in the training."""

import hashlib
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file

import fedprompt as fp
from build_samples import emoji, emoji_clip, emoji_division
from build_samples.emoji_division import PRETRAINING, TEST, TRAINING, division
from fedprompt import samples
from fedprompt.samples import networks
from fedprompt.samples._words import WordPieces


@pytest.fixture(scope="module")
def clip():
    return fp.freeze(samples.clip())


def balanced(right, labels):
    """Return the mean accuracy of the classes, in percent."""
    return 100 * torch.stack([right[labels == k].float().mean() for k in labels.unique()]).mean()


def test_committed_weights_are_those_their_metadata_describes(clip):
    with safe_open(networks._CLIP, framework="pt") as file:
        metadata, weights = file.metadata(), load_file(networks._CLIP)
    stored = b"".join(weights[name].numpy().tobytes() for name in sorted(weights))
    assert metadata["sha256"] == hashlib.sha256(stored).hexdigest()
    assert metadata["recipe"] == emoji_clip.RECIPE
    assert {tensor.dtype for tensor in weights.values()} == {torch.float16}
    assert all(
        torch.equal(value, weights[name].float()) for name, value in clip.state_dict().items()
    )
    architecture = json.loads(metadata["architecture"])
    assert architecture["vision_cfg"] == emoji_clip.TINY_VISION
    assert len(json.loads(metadata["merges"])) == emoji_clip.TINY.merges


def test_zero_shot_works_on_concepts_that_were_not_trained(clip):
    """The mean of the patches on an emoji classifies almost as well as the pooled token."""
    _, test = samples.emoji()
    images, labels = test.images[::4], test.labels[::4]
    tower = fp.TextTower(clip, samples.tokenize)
    text = fp.zero_shot_classifier(tower, samples.CLASS_NAMES, samples.TEMPLATES[""][:1])
    pooled, patches = fp.image_tokens(clip, samples.preprocess(images))
    ink = emoji_clip.inked(images, 4)[..., None]
    shown = (F.normalize(patches, dim=-1) * ink).sum(1)
    whole, parts = (
        balanced((F.normalize(x, dim=-1) @ text.T).argmax(1) == labels, labels)
        for x in (pooled, shown)
    )
    assert whole > 4 * 100 / 24
    assert abs(whole - parts) < 3


def test_emoji_of_the_wheel_are_held_out_and_have_permitted_licenses():
    found, table = division(), {}
    for label, codes in enumerate(found.classes.values()):
        for code in codes:
            table.setdefault((label, found.parts[code][0]), set()).add(found.keys[code])
    train, test = samples.emoji()
    assert tuple(found.classes) == samples.CLASS_NAMES
    permitted = [name for name, style in emoji.STYLES.items() if style.sample]
    assert tuple(permitted) == samples.STYLES
    assert not set(train.names) & set(test.names)
    for part, side in ((TRAINING, train), (TEST, test)):
        for label in range(len(samples.CLASS_NAMES)):
            names = {n for n, k in zip(side.names, side.labels.tolist(), strict=True) if k == label}
            assert len(names) >= (10 if part == TEST else 4)
            assert len(names) >= len(table[label, part]) > 1
        assert side.images.min() >= 0
        assert side.images.max() == 1
    assert len(train.images) + len(test.images) == 2017


def test_no_drawing_is_in_training_and_test():
    sides = samples.emoji()
    names = list(dict.fromkeys(name for side in sides for name in side.names))
    images = torch.cat([side.images for side in sides]).mul(255).byte().movedim(1, 3).numpy()
    concept = np.array([names.index(name) for side in sides for name in side.names])
    style = torch.cat([side.styles for side in sides]).numpy()
    part = {
        str(k): (TEST if name in sides[1].names else TRAINING,) * 3 for k, name in enumerate(names)
    }
    table = [emoji.Concept(str(k), name, "", (), ()) for k, name in enumerate(names)]
    drawings = emoji.Emoji(images, concept, style, table)
    assert not emoji_division.leaks(drawings, emoji_division.Division({}, {}, part))
    part |= {"0": (TRAINING,) * 3, "1": (TEST,) * 3}
    drawings.images[concept <= 1] = drawings.images[0]
    assert emoji_division.leaks(drawings, emoji_division.Division({}, {}, part))


def test_captions_of_images_have_no_name_that_is_held_out():
    rows = [
        ("1", "owl", ("bird", "night")),
        ("2", "bird", ("fly",)),
        ("3", "bird house", ("bird",)),
    ]
    table = [emoji.Concept(code, name, "", words, ()) for code, name, words in rows]
    none = np.zeros(0)
    texts = emoji_clip.Texts(emoji.Emoji(none, none, none, table), np.array([0, 2, 0]))
    draw = np.random.default_rng(0)
    shown = {texts.caption(number, "noto", draw)[1] for number in (0, 2) for _ in range(200)}
    assert shown == {"owl", "night", "owl night", "bird house"}
    entries = {texts.entry(number, draw) for number in range(3) for _ in range(50)}
    assert ("owl", "bird") in entries  # the dictionary is text alone
    assert ("bird", "fly") in entries


def test_words_are_split_into_known_pieces():
    pieces = WordPieces(("l l", "o w_", "ll ow_"))
    assert pieces.pieces("yellow") == ("y", "e", "llow_")
    start, *ids, end, pad = pieces(["Low."], 6)[0].tolist()[:6]
    assert (start, end, pad) == (1, pieces.size - 1, 0)
    assert len(ids) == 3
    assert pieces(["low low low."], 4)[0].tolist() == [1, *ids[:2], pieces.size - 1]
    assert (pieces.pieces("x"), pieces.pieces("ow")) == (("x_",), ("ow_",))
    assert torch.equal(pieces(["Pi\u00f1ata!"], 9), pieces(["pinata"], 9))
    assert emoji_clip.learn_merges(("low low", "owl"), 2) == ("l o", "lo w_")


def test_the_text_tower_gives_the_text_features_of_the_model(clip):
    # Whole sentences as token ids give the same features as a context of words before class names.
    tower = fp.TextTower(clip, samples.tokenize)
    context = fp.ContextPrompts(tower.dim, init=tower.words("an emoji of a"))
    features = tower(fp.prompted_text(context(), tower.class_names(samples.CLASS_NAMES)))[0]
    sentences = [samples.TEMPLATES[""][0].format(name) for name in samples.CLASS_NAMES]
    torch.testing.assert_close(features, clip.encode_text(samples.tokenize(sentences)))


def test_short_texts_are_encoded_as_in_their_full_length(clip):
    texts = ["an emoji of a bird.", "a drawing of a polar bear."]
    pieces, whole = networks._pieces(), clip.encode_text(samples.tokenize(texts))
    torch.testing.assert_close(emoji_clip._text(clip, pieces, texts), whole)


def test_gray_images_are_centered_and_repeated_in_three_channels():
    gray = torch.tensor([[[[0.25, 1.0]]]])
    assert samples.preprocess(gray).tolist() == [[[[-0.25, 0.5]]] * 3]


def test_the_recipe_repeats():
    """Two runs of a few steps on the same world give the same networks."""
    draw = torch.Generator().manual_seed(0)
    table = [emoji.Concept(str(k), f"thing {k}", "", (f"word {k}",), ()) for k in range(140)]
    images = torch.randint(256, (140, 32, 32, 3), generator=draw, dtype=torch.uint8).numpy()
    drawings = emoji.Emoji(images, np.arange(140), np.zeros(140, int), table)
    ink = torch.ones(140, 36, dtype=torch.bool)
    encoded = emoji_clip.Encoded(torch.randn(140, 37, 384, generator=draw).half(), ink)
    world = emoji_clip.World(drawings, np.full(140, PRETRAINING), encoded)

    def built():
        tokens = WordPieces(())
        model = small_teacher(tokens.size)
        emoji_clip.train_text(model, tokens, world, 3)
        return torch.cat([value.flatten() for value in model.state_dict().values()])

    first = built()
    assert torch.equal(first, built())


def small_teacher(vocabulary):
    """Return a CLIP with a linear projection of cached tokens, without a trunk."""
    sizes = emoji_clip.Sizes(dim=16, width=16, layers=1, merges=0, steps=3)
    vision = {"layers": 1, "width": 8, "head_width": 8, "patch_size": 16, "image_size": 32}
    made = {"embed_dim": 16, "vision_cfg": vision, "text_cfg": sizes.text(vocabulary)}
    model = emoji_clip.new_model(emoji_clip.open_clip.model.CLIP, made, 0)
    model.visual = torch.nn.Module()
    model.visual.head = torch.nn.Module()
    model.visual.head.proj = torch.nn.Linear(384, 16)
    torch.nn.init.zeros_(model.visual.head.proj.bias)
    return model


def test_one_text_is_one_row():
    assert torch.equal(samples.tokenize("a penguin."), samples.tokenize(["a penguin."]))
