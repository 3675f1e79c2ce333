"""Tokens of class names and words, against whole sentences and the published code."""

import open_clip
import pytest
import torch

from clips import NAMES, TOKENIZER, WordTokenizer, draw, make_clip
from fedprompt import TextTower, prompted_text
from references import coop
from tolerance import assert_near

PLACES = {"end": 5, "middle": 2, "front": 0}  # context tokens before the name, of 5


@pytest.mark.parametrize("place", PLACES)
def test_the_end_is_at_the_position_of_the_tokenizer(place):
    tower = TextTower(make_clip(), TOKENIZER)
    text = prompted_text(
        draw(1, 5, tower.dim), tower.class_names(NAMES), name_position=PLACES[place]
    )
    assert text.end == tuple(coop.ends(TOKENIZER, NAMES, 5, PLACES[place]).tolist())
    assert len(set(text.end)) > 2


@pytest.mark.parametrize(
    "tokenizer",
    [
        WordTokenizer(start=[2]),
        WordTokenizer(stops=False),
        WordTokenizer(pad=1, end=[]),  # as in SigLIP, the first padding token ends the text
        WordTokenizer(start=[2], opening=True),
        WordTokenizer(start=[2, 3], end=[0], pad=0),
    ],
    ids=[
        "start and end",
        "no full stop",
        "end is padding",
        "words differ at the start",
        "two starts",
    ],
)
def test_tokenizers_with_other_special_tokens_are_supported(tokenizer):
    model = make_clip(custom=True, no_causal_mask=True, pool_type="last", vocab_size=64)
    tower = TextTower(model, tokenizer)
    names = tower.class_names(["cat", "polar bear", "a black cat"])
    features = tower(prompted_text(tower.words("a photo of")[None], names))
    expected = model.encode_text(
        tokenizer([f"a photo of {name}." for name in ("cat", "polar bear", "a black cat")])
    )
    assert_near(features[0], expected)


def test_underscores_and_case_of_names_do_not_matter():
    tower = TextTower(make_clip(), TOKENIZER)
    names = tower.class_names(["golden_retriever", "CAT"])
    plain = tower.class_names(["golden retriever", "cat"])
    assert torch.equal(names.tokens, plain.tokens)
    assert names.names == ("golden_retriever", "CAT")
    assert torch.equal(tower.words("a_photo_of"), tower.words("a photo of"))


def test_texts_have_one_token_or_fill_all_positions():
    tower = TextTower(make_clip(), TOKENIZER)
    assert (len(tower.words("a")), len(tower.words("bear " * 22))) == (1, 22)
    assert (tower.sentences(["a"]).end, tower.sentences(["bear " * 22]).end) == ((2,), (23,))
    assert tower.class_names(["bear " * 21]).length == (23,)


TRICKY = (
    "arch (outdoor)", "U.S.A.", "A.", "Mr. Bean", "what?", "wow!!", "C++", "C#", "rock 'n' roll",
    "jack-o'-lantern", "the dog's", "dogs'", "A&W", "A &amp; W", "café", "naïve", "crème brûlée",
    "50%", "Boeing 737-800", "3.14", "9", "and/or", "(left)", "[right]", '"quoted"', "wait...",
    "semi;", "colon:", "dash-", "under_score_", "tab\tbed", "  wide   gap  ", "dog 🐕", "日本",
    "\u2019", ";)", "!?", "...",
)  # fmt: skip


@pytest.mark.parametrize(
    "names", [TRICKY, tuple(open_clip.IMAGENET_CLASSNAMES)], ids=["tricky", "ImageNet"]
)
def test_names_are_tokenized_as_in_whole_sentences(names):
    tower = TextTower(make_clip(), TOKENIZER)
    known = tower.class_names(names)
    weight = tower.model.token_embedding.weight
    for name, tokens, length in zip(names, known.tokens, known.length, strict=True):
        row = TOKENIZER([f"x x x x {name.replace('_', ' ')}."])[0]
        expected = row[5 : row.argmax() + 1]
        assert torch.equal(tokens[:length], weight[expected]), (
            name,
            TOKENIZER.decode(expected.tolist()),
        )


@pytest.mark.parametrize("place", PLACES)
def test_context_and_tricky_names_are_ordered_as_in_the_published_code(place):
    tower = TextTower(make_clip(), TOKENIZER)
    context, weight = draw(1, 5, tower.dim), tower.model.token_embedding.weight
    text = prompted_text(context, tower.class_names(TRICKY), name_position=PLACES[place])
    for name, suffix, end in zip(TRICKY, text.suffix[0], text.end, strict=True):
        rest = iter(context[0])
        ids = coop.published(TOKENIZER, name.replace("_", " "), 5, PLACES[place])
        expected = torch.stack([next(rest) if index is None else weight[index] for index in ids])
        assert torch.equal(torch.cat([text.prefix[0], suffix])[: len(ids)], expected), name
        assert end == len(ids) - 1


def test_a_word_may_have_several_tokens():
    """CoOp counts words by spaces, which is wrong for a word with several tokens."""
    tower = TextTower(make_clip(), TOKENIZER)
    ids = TOKENIZER.encode("a photomicrograph of")
    assert len(ids) > 3
    assert torch.equal(tower.words("a photomicrograph of"), tower.model.token_embedding.weight[ids])
