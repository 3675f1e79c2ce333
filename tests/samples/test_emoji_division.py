"""Emoji: icons and their concepts, and a division in which no drawing is on two sides."""

import json
from collections import Counter

import numpy as np
import pytest

from build_samples import emoji, emoji_division
from build_samples.emoji_division import PRETRAINING, SPLITS, TEST, TRAINING, division


def concept(code, name, subgroup="tool", *shortcodes):
    return emoji.Concept(code, name, subgroup, (), shortcodes)


def drawn(*images):
    """Return emoji of one style with one image for each concept."""
    table = [concept(str(k), f"thing {k}") for k in range(len(images))]
    return emoji.Emoji(np.stack(images), np.arange(len(images)), np.zeros(len(images), int), table)


def test_each_class_has_ten_concepts_for_tests_in_each_split():
    found = division()
    for split in SPLITS:
        parts = Counter(row[split] for row in found.parts.values())
        assert parts[PRETRAINING] / parts.total() == pytest.approx(0.6, abs=0.015)
        for codes in found.classes.values():
            held = Counter(found.parts[code][split] for code in codes)
            assert held[TEST] >= 10
            assert held[TRAINING] >= 4
    keys: dict[str, tuple[int, ...]] = {}
    for code, key in found.keys.items():  # one key, one part
        assert keys.setdefault(key, found.parts[code]) == found.parts[code]
    assert len(found.classes) == 24


def test_a_shared_drawing_is_found():
    images = np.random.default_rng(1).integers(0, 256, (3, 16, 16, 3), np.uint8)
    images[2] = images[0] // 2 * 2  # invisibly different
    parts = {"0": (0, 1, 2), "1": (1, 1, 1), "2": (0, 2, 2)}
    found = emoji_division.Division({}, {}, parts)
    assert emoji_division.leaks(drawn(*images), found) == [(1, "thing 0", "thing 2")]


def test_an_icon_belongs_to_one_concept(tmp_path):
    icons: dict = {
        "icons": {key: {"body": "<g/>"} for key in ("cricket", "bat-and-ball", "dizzy-face")}
    }
    icons["aliases"] = {"cricket-game": {"parent": "bat-and-ball"}, "turned": {"hFlip": True}}
    (tmp_path / "icons.json").write_text(json.dumps(icons))
    table = [
        concept("1", "insect", "animal-bug", "cricket"),
        concept("2", "cricket game"),
        concept("3", "dizzy", "emotion", "dizzy_face"),
        concept("4", "dizzy face"),
        concept("5", "turned"),
    ]
    found = emoji.Icons(tmp_path)
    assert found.match(table) == {0: "cricket", 1: "bat-and-ball", 3: "dizzy-face"}
    assert 'viewBox="0 0 16 16"' in found.svg("cricket")


def test_another_version_of_a_package_is_refused(tmp_path):
    (tmp_path / "noto").mkdir()
    (tmp_path / "noto" / "package.json").write_text('{"version": "1.0.0"}')
    with pytest.raises(ValueError, match=r"`noto` must have version 1\.2\.9; got 1\.0\.0\."):
        emoji.package(tmp_path, "noto", "1.2.9")


def test_the_wheel_has_no_style_that_asks_for_share_alike():
    for style in emoji.STYLES.values():
        assert style.license in {"Apache-2.0", "MIT", "CC-BY-4.0", "CC-BY-SA-4.0"}
        assert not (style.seen and "SA" in style.license)
        assert not (style.sample and not style.seen)
