"""Refused models, tokenizers, names and sentences of the text tower."""

import open_clip
import pytest
import torch
import torch.nn as nn

from clips import CONTEXT_LENGTH, NAMES, TEXT, TOKENIZER, TOWERS, VISION, WordTokenizer, make_clip
from fedprompt import TextTower, freeze, prompted_text
from fedprompt.interfaces import PromptedText


def with_lora(part):
    """Inject LoRA into one part of a model."""
    from peft import LoraConfig, inject_adapter_in_model

    model = make_clip()
    inject_adapter_in_model(LoraConfig(target_modules=["c_fc"]), part(model))
    return model


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: with_lora(lambda model: model), r"visual\..*lora_A"),
        (lambda: with_lora(lambda model: model.visual), r"visual\..*lora_A"),
        (lambda: with_lora(lambda model: model.transformer), r"transformer\..*lora_A"),
    ],
)
def test_a_model_with_adapters_is_refused(make, names):
    model = make()
    with pytest.raises(
        ValueError, match=f"`clip_model` must have no adapters.*; got a model that trains {names}"
    ):
        TextTower(model, TOKENIZER)
    TextTower(freeze(model), TOKENIZER)


def test_one_tower_may_already_be_frozen():
    model = make_clip(
        vision={"pos_embed_type": "sin_cos_2d"}
    )  # its position table has no gradients
    TextTower(model, TOKENIZER)
    locked = make_clip()
    freeze(locked.visual)
    TextTower(locked, TOKENIZER)
    locked = make_clip()
    locked.lock_text_tower()
    TextTower(locked, TOKENIZER)


LONG = " ".join(["polar bear"] * 20)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        ("cat", TypeError, "`names` must be a sequence of strings; got 'cat'"),
        (3, TypeError, "`names` must be a sequence of strings; got 3"),
        (["cat", 3], TypeError, "`names` must be strings; got 3"),
        ([], ValueError, "`names` must contain at least one string"),
        (["cat", ""], ValueError, "`names` must have at least 1 token and at most 21; got ''"),
        (["cat", " _ "], ValueError, "got ' _ ' with 0"),
        (
            ["cat", LONG],
            ValueError,
            f"`names` must have at least 1 token and at most 21; got '{LONG}' with more than 21",
        ),
        (["cat", " ".join(["bear"] * 22)], ValueError, "with more than 21"),
    ],
)
def test_bad_names_are_refused(names, error, message):
    with pytest.raises(error, match=message):
        TextTower(make_clip(), TOKENIZER).class_names(names)


@pytest.mark.bad_input
def test_a_name_that_is_too_long_for_the_context_is_refused_by_name():
    tower = TextTower(make_clip(), TOKENIZER)
    longest = " ".join(["bear"] * 21)
    names = tower.class_names(["cat", longest])
    text = prompted_text(torch.zeros(1, 0, 16), names)
    assert text.prefix.shape[1] + text.suffix.shape[2] == CONTEXT_LENGTH
    with pytest.raises(
        ValueError, match=f"a context of length 1 fits into 24 positions; got '{longest}' with 23"
    ):
        prompted_text(torch.zeros(1, 1, 16), names)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (3, TypeError, "`text` must be a string; got 3"),
        ("", ValueError, "at least 1 token and at most 22; got 0"),
        (LONG, ValueError, "more than 22"),
    ],
)
def test_bad_words_are_refused(text, error, message):
    with pytest.raises(error, match=message):
        TextTower(make_clip(), TOKENIZER).words(text)


def with_text(text):
    model = make_clip(custom=True)
    model.text = text
    return model


def padding_masked():
    model = make_clip(custom=True, no_causal_mask=True)
    model.text.use_pad_mask = True
    return model


def coca():
    return open_clip.coca_model.CoCa(
        12,
        {**TEXT, "attn_pooler_heads": 2},
        TEXT,
        {**VISION, "attentional_pool": True, "attn_pooler_heads": 2},
    )


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (coca, r"be an open_clip CLIP or CustomTextCLIP \(CoCa adds a token\), .*; got CoCa"),
        (lambda: nn.Linear(1, 1), "be an open_clip CLIP or CustomTextCLIP .* got Linear"),
        (lambda: with_text(nn.Linear(1, 1)), r"have a text tower that takes embeddings \(a"),
        (lambda: make_clip(custom=True, embed_cls=True), "it adds a token, as CoCa does"),
        (lambda: make_clip(embed_cls=True), "it adds a token, as CoCa does"),
        (padding_masked, "it masks padding by token ids"),
        (lambda: make_clip(custom=True, pool_type="none"), "it does not pool"),
        (lambda: make_clip(pool_type="none"), "it does not pool"),
    ],
)
def test_towers_that_cannot_take_embeddings_are_refused(make, message):
    with pytest.raises(TypeError, match=f"`clip_model` must .*{message}"):
        TextTower(make(), TOKENIZER)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("tokenizer", "error", "message"),
    [
        ("ViT-B-16", TypeError, "`tokenizer` must be a tokenizer of open_clip"),
        (WordTokenizer(end=[1, 0, 7], pad=7), TypeError, "`tokenizer` must return nothing but"),
        (lambda texts, context_length: TOKENIZER(texts), ValueError, "`tokenizer` must return"),
        (WordTokenizer(start=[49408]), ValueError, "whose vocabulary has 49408 tokens; got the"),
    ],
)
def test_tokenizers_of_another_format_are_refused(tokenizer, error, message):
    with pytest.raises(error, match=message):
        TextTower(make_clip(), tokenizer)


@pytest.mark.bad_input
@pytest.mark.parametrize("class_chunk", [0, 2.5])
def test_bad_chunk_sizes_are_refused(class_chunk):
    with pytest.raises((ValueError, TypeError), match="`class_chunk` must be"):
        TextTower(make_clip(), TOKENIZER, class_chunk=class_chunk)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (torch.zeros(1, 2, 16), TypeError, "`text` must be PromptedText, from prompted_text"),
        (
            PromptedText(torch.zeros(1, 2, 8), torch.zeros(1, 3, 4, 8), (2, 3, 4)),
            ValueError,
            r"prefix of shape \(contexts, length, 16\)",
        ),
        (
            PromptedText(torch.zeros(2, 2, 16), torch.zeros(1, 3, 4, 16), (2, 3, 4)),
            ValueError,
            r"got \(2, 2, 16\) and \(1, 3, 4, 16\)",
        ),
        (
            PromptedText(torch.zeros(1, 2, 16), torch.zeros(1, 0, 4, 16), ()),
            ValueError,
            r"got \(1, 2, 16\) and \(1, 0, 4, 16\)",
        ),
        (
            PromptedText(torch.zeros(1, 2, 16), torch.zeros(1, 3, 4, 16), (2,)),
            ValueError,
            r"`text.end` must be 3 positions in \[2, 6\), one .* class; got a tuple of length 1",
        ),
        (
            PromptedText(torch.zeros(1, 2, 16), torch.zeros(1, 3, 23, 16), (24, 3, 4)),
            ValueError,
            "at most 24 tokens; got 25",
        ),
        (
            PromptedText(torch.zeros(1, 2, 16), torch.zeros(1, 3, 4, 16), torch.tensor([2, 3, 4])),
            ValueError,
            "`text.end` must be 3 positions .*; got a int64 tensor",
        ),
        (
            PromptedText(torch.zeros(1, 2, 16), torch.zeros(1, 3, 4, 16), (2, 3, 6)),
            ValueError,
            r"`text.end` must be 3 positions in \[2, 6\).*; got a tuple of length 3",
        ),
    ],
)
def test_sentences_of_other_shapes_are_refused(text, error, message):
    with pytest.raises(error, match=message):
        TextTower(make_clip(), TOKENIZER)(text)


@pytest.mark.bad_input
def test_a_bidirectional_tower_refuses_short_sentences():
    tower = TextTower(make_clip(**TOWERS["both ways, last"]), TOKENIZER)
    short = TextTower(make_clip(), TOKENIZER).class_names(NAMES)
    with pytest.raises(ValueError, match="exactly 24 tokens"):
        tower(prompted_text(torch.zeros(1, 2, 16), short))


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("spoil", "message"),
    [(nn.Module.train, "stay in eval mode"), (nn.Module.requires_grad_, "stay frozen")],
)
def test_a_model_that_is_no_longer_frozen_is_refused(spoil, message):
    model = make_clip()
    tower = TextTower(model, TOKENIZER)
    spoil(model)
    with pytest.raises(ValueError, match=f"`tower` must {message}"):
        tower(prompted_text(torch.zeros(1, 2, 16), tower.class_names(NAMES)))
