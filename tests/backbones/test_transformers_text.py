"""Text towers of transformers' CLIP models, against the models' own output."""

import open_clip
import pytest
import torch
from transformers import (
    CLIPConfig,
    CLIPModel,
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
)

from clips import CONTEXT_LENGTH, NAMES, TOKENIZER, draw, spread
from fedprompt import TextTower, prompted_text, zero_shot_classifier
from fedprompt.check import text_encoder as check_text_encoder
from fedprompt.interfaces import PromptStream
from tolerance import assert_near

SIZES = {
    "vocab_size": 49408, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3,
    "num_attention_heads": 2, "max_position_embeddings": CONTEXT_LENGTH, "projection_dim": 12,
    "bos_token_id": 49406, "eos_token_id": 49407,
}  # fmt: skip
VISION = {
    "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
    "image_size": 16, "patch_size": 8,
}  # fmt: skip


def text_model(**changes):
    return spread(CLIPTextModelWithProjection(CLIPTextConfig(**SIZES | changes))).eval()


def whole_model():
    config = CLIPConfig(text_config=SIZES, vision_config=VISION, projection_dim=12)
    return spread(CLIPModel(config)).eval()


MODELS = {
    "text": text_model,
    "text, eager attention": lambda: text_model(attn_implementation="eager"),
    "text, end by the largest id": lambda: text_model(eos_token_id=2),
    "text and images": whole_model,
}


@pytest.fixture(scope="module")
def tokenizer():
    """The tokenizer of transformers, with the vocabulary that open_clip contains."""
    special = {"<start_of_text>": "<|startoftext|>", "<end_of_text>": "<|endoftext|>"}
    ids = {special.get(token, token): index for token, index in TOKENIZER.encoder.items()}
    return CLIPTokenizer(vocab=ids, merges=list(TOKENIZER.bpe_ranks))


def own_features(model, ids):
    ids = {"input_ids": ids}
    if isinstance(model, CLIPModel):
        return model.get_text_features(**ids).pooler_output
    return model(**ids).text_embeds


@pytest.mark.parametrize("kind", MODELS)
def test_a_context_of_words_gives_the_features_of_the_text(kind, tokenizer):
    model = MODELS[kind]()
    sentences = [f"a blurry photo of one {name}." for name in NAMES]
    padded = tokenizer(sentences, padding=True, return_tensors="pt")
    expected = own_features(model, padded["input_ids"])
    for own in (tokenizer, TOKENIZER):  # open_clip's tokenizer has the same ids
        tower = TextTower(model, own)
        words = tower.words("a blurry photo of one")[None]
        features = tower(prompted_text(words, tower.class_names(NAMES)))[0]
        # Eager attention computes its softmax in float32.
        assert_near(features, expected, dtype=torch.float32 if "eager" in kind else None)
    assert (tower.dim, tower.depth, tower.context_length, tower.causal) == (16, 3, 24, True)


def test_both_libraries_tokenize_names_alike(tokenizer):
    model = text_model()
    names = open_clip.IMAGENET_CLASSNAMES[:50]
    theirs, ours = (TextTower(model, own).class_names(names) for own in (tokenizer, TOKENIZER))
    with pytest.raises(ValueError, match="at most 22; got more than 22"):
        TextTower(model, tokenizer).words("bear " * 30)
    assert theirs.length == ours.length
    for own, other, length in zip(theirs.tokens, ours.tokens, ours.length, strict=True):
        assert torch.equal(own[:length], other[:length])


def test_deep_prompts_overwrite_the_context_in_the_model(tokenizer):
    model = text_model()
    deep, words = draw(4, 16, seed=8).requires_grad_(), "a photo of a"
    ids = torch.tensor(tokenizer([f"{words} {name}." for name in NAMES], padding=True)["input_ids"])

    def overwrite(_, inputs):
        hidden = inputs[0].clone()
        hidden[:, 1:5] = deep
        return (hidden, *inputs[1:])

    hook = model.text_model.encoder.layers[2].register_forward_pre_hook(overwrite)
    expected = own_features(model, ids)
    hook.remove()
    tower = TextTower(model, tokenizer)
    text = prompted_text(tower.words(words)[None], tower.class_names(NAMES))
    features = tower(text, PromptStream({2: deep}, replace=True))[0]
    assert_near(features, expected)
    weight = draw(*features.shape, seed=5)
    assert_near(*(torch.autograd.grad((f * weight).sum(), deep)[0] for f in (features, expected)))


def test_gradient_checkpointing_of_the_model_is_respected(tokenizer):
    model = text_model()
    tower = TextTower(model, tokenizer)
    context = draw(1, 4, 16).requires_grad_()
    text = prompted_text(context, tower.class_names(["cat", "dog"]))
    expected = tower(text)
    newest = getattr(model, "activation_checkpointing_enable", None)
    (newest or model.gradient_checkpointing_enable)()
    tower(text)  # its hook on the embedding is probed
    runs = []
    model.text_model.encoder.layers[0].mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    features = tower(text)
    assert torch.equal(features, expected)
    frugal, plain = (torch.autograd.grad(each.sum(), context)[0] for each in (features, expected))
    assert torch.equal(frugal, plain)
    assert len(runs) == 2


def test_towers_of_transformers_pass_all_checks(tokenizer):
    model = whole_model()
    tower = TextTower(model, tokenizer)
    ids = tokenizer([f"a photo of a {name}." for name in NAMES], padding=True)["input_ids"]
    check_text_encoder(
        tower,
        tower.class_names(NAMES),
        words=tower.words("a photo of a"),
        expected=own_features(model, torch.tensor(ids)),
    )
    assert zero_shot_classifier(tower, NAMES, ["a {}."]).shape == (len(NAMES), 12)


@pytest.mark.bad_input
def test_an_attention_without_masks_of_choice_is_refused(tokenizer):
    model = text_model()
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ValueError, match=r'attn_implementation="sdpa".*flash_attention_2'):
        TextTower(model, tokenizer)
