"""open_clip's text towers: sentences that share what they can against whole sentences, one at a time."""

import copy
from functools import partial

import open_clip
import pytest
import torch
import torch.nn as nn
from peft import LoraConfig, inject_adapter_in_model
from torch.nn.attention import SDPBackend, sdpa_kernel

from clips import CONTEXT_LENGTH, NAMES, TEXT, TOKENIZER, VISION, WordTokenizer, draw, make_clip
from fedprompt import ContextPrompts, TextTower, freeze, image_tokens, prompted_text
from fedprompt.interfaces import PromptedText, TextEncoder
from fedprompt.privacy import per_sample
from references import coop
from tolerance import assert_near

PLACES = {"end": 5, "middle": 2, "front": 0}  # context tokens before the name, of 5
CUSTOM_BLOCK = {
    "qk_norm": True,
    "scale_heads": True,
    "scale_attn_inner": True,
    "scale_attn": True,
    "scale_fc": True,
    "ls_init_value": 0.5,
}
TOWERS = {
    "CLIP": {},
    "CLIP, QuickGELU": {"quick_gelu": True},
    "custom text": {"custom": True},
    "custom text, projection with bias": {"custom": True, "proj_bias": True},
    "custom text, no projection": {"custom": True, "proj_type": "none"},
    "custom text, end of text by id": {"custom": True, "pool_type": "eos", "eos_id": 49407},
    "custom text, custom blocks": {"custom": True, **CUSTOM_BLOCK},
    "both ways, end of text": {"custom": True, "no_causal_mask": True},
    "both ways, last": {"custom": True, "no_causal_mask": True, "pool_type": "last"},
    "both ways, first": {"custom": True, "no_causal_mask": True, "pool_type": "first"},
    "causal, last": {"custom": True, "pool_type": "last"},
}


def gradients(features, *inputs):
    return torch.autograd.grad((features * draw(*features.shape, seed=5)).sum(), inputs)


@pytest.mark.parametrize("specific", [False, True])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["CLIP", "custom text", "custom text, custom blocks"])
def test_features_and_gradients_are_those_of_whole_sentences(kind, place, specific):
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", TOWERS)
def test_with_the_words_themselves_as_context_features_are_those_of_the_text(kind, dtype):
    model = make_clip(**TOWERS[kind]).to(dtype)
    tower = TextTower(model, TOKENIZER)
    features = tower(
        prompted_text(tower.words("a blurry photo of one")[None], tower.class_names(NAMES))
    )
    expected = model.encode_text(TOKENIZER([f"a blurry photo of one {name}." for name in NAMES]))
    assert features.dtype == expected.dtype == dtype
    assert_near(features[0], expected)


def test_only_a_causal_tower_that_reads_the_end_of_text_is_cut_short():
    """Where a token sees what comes behind it, or the last one is read, padding counts."""
    for kind, arguments in TOWERS.items():
        tower = TextTower(make_clip(**arguments), TOKENIZER)
        text = prompted_text(draw(1, 3, tower.dim), tower.class_names(["cat"]))
        length = text.prefix.shape[1] + text.suffix.shape[2]
        assert length == (
            CONTEXT_LENGTH
            if kind.startswith("both ways") or kind.endswith(", last")
            else 1 + 3 + 1 + 2
        ), kind


@pytest.mark.parametrize("place", PLACES)
def test_the_end_is_where_the_tokenizer_puts_it(place):
    tower = TextTower(make_clip(), TOKENIZER)
    text = prompted_text(
        draw(1, 5, tower.dim), tower.class_names(NAMES), name_position=PLACES[place]
    )
    assert torch.equal(text.end, coop.ends(TOKENIZER, NAMES, 5, PLACES[place]))
    assert len(set(text.end.tolist())) > 2


@pytest.mark.parametrize(
    "tokenizer",
    [
        WordTokenizer(start=[2]),
        WordTokenizer(stops=False),
        WordTokenizer(pad=1, end=[]),  # as SigLIP's: the end of text is the first padding
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
def test_any_tokenizer_that_pads_behind_the_end(tokenizer):
    model = make_clip(custom=True, no_causal_mask=True, pool_type="last", vocab_size=64)
    tower = TextTower(model, tokenizer)
    names = tower.class_names(["cat", "polar bear", "a black cat"])
    features = tower(prompted_text(tower.words("a photo of")[None], names))
    expected = model.encode_text(
        tokenizer([f"a photo of {name}." for name in ("cat", "polar bear", "a black cat")])
    )
    assert_near(features[0], expected)


@pytest.mark.parametrize("specific", [False, True])
@pytest.mark.parametrize("chunk", [1, 4, 11, 100])
@pytest.mark.parametrize("kind", ["CLIP", "both ways, last"])
def test_chunks_of_classes_change_nothing(kind, chunk, specific):
    model = make_clip(**TOWERS[kind])
    context = draw(2, *[len(NAMES)] * specific, 5, 16).requires_grad_()
    results = []
    for tower in (TextTower(model, TOKENIZER), TextTower(model, TOKENIZER, class_chunk=chunk)):
        text = prompted_text(
            context, tower.class_names(NAMES), name_position=2, class_specific=specific
        )
        features = tower(text)
        results.append((features, *gradients(features, context)))
    for chunked, expected in zip(*reversed(results), strict=True):
        assert_near(chunked, expected)
    with torch.no_grad():
        assert_near(tower(text), results[0][0])


def test_chunks_are_run_again_for_the_gradients():
    """That is what bounds the memory: 3 chunks of up to 4 classes run forwards, and once more backwards."""
    tower = TextTower(make_clip(), TOKENIZER, class_chunk=4)
    rows = counted(tower.model.transformer)
    context = draw(1, 5, tower.dim).requires_grad_()
    features = tower(prompted_text(context, tower.class_names(NAMES)))
    assert len(rows) == 3
    features.sum().backward()
    assert len(rows) == 6


def test_gradient_checkpointing_of_the_model_is_honoured():
    model = make_clip()
    tower = TextTower(model, TOKENIZER)
    context = draw(2, 5, tower.dim).requires_grad_()
    plain = gradients(tower(prompted_text(context, tower.class_names(NAMES))), context)
    model.set_grad_checkpointing()
    runs = counted(model.transformer.resblocks[0])
    frugal = gradients(tower(prompted_text(context, tower.class_names(NAMES))), context)
    assert len(runs) == 2
    assert_near(*frugal, *plain)


def counted(module):
    runs = []
    module.register_forward_pre_hook(lambda *_: runs.append(1))
    return runs


def test_what_classes_share_runs_once_for_many():
    """Of 2 prompts x 11 sentences of 1 + 5 + up to 12 tokens; the prefix of 6 stands in each row once."""
    tower = TextTower(make_clip(width=64, heads=4), TOKENIZER)
    sizes = []
    tower.model.transformer.register_forward_pre_hook(
        lambda _, inputs: sizes.append(inputs[0].shape[:2])
    )
    names = tower.class_names(NAMES)
    tower(prompted_text(draw(2, 5, tower.dim), names))
    ((rows, length),) = sizes
    copies, suffix = rows // 2, names.tokens.shape[1]
    assert copies < len(NAMES) / 2
    assert rows * length < 2 * (copies * 6 + (len(NAMES) + copies) * suffix)


def test_clients_may_be_stacked():
    tower = TextTower(make_clip(), TOKENIZER)
    names = tower.class_names(NAMES)

    def loss(context):
        return tower(prompted_text(context, names)).square().sum()

    contexts = draw(3, 2, 5, tower.dim)
    with sdpa_kernel(
        SDPBackend.MATH
    ):  # torch stacks the fused kernel on a CPU one by one, and warns of it
        stacked = torch.func.vmap(torch.func.grad(loss))(contexts)
    for client, context in enumerate(contexts.requires_grad_()):
        assert_near(stacked[client], torch.autograd.grad(loss(context), context)[0])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", ["CLIP", "both ways, last"])
def test_sentences_stay_on_the_device_of_the_model(kind, device):
    """In float32, against the CPU in float64."""
    expected, _ = encoded(make_clip(**TOWERS[kind]))
    features, text = encoded(make_clip(**TOWERS[kind]).float().to(device))
    assert {tensor.device.type for tensor in (features, *text)} == {device}
    assert_near(features.cpu(), expected)


def encoded(model):
    tower = TextTower(model, TOKENIZER, class_chunk=4)
    context = draw(2, 5, 16).to(model.logit_scale.detach())
    text = prompted_text(context, tower.class_names(NAMES), name_position=2)
    return tower(text), text


@pytest.mark.parametrize("kind", ["CLIP", "both ways, end of text"])
def test_autocast_is_that_of_the_model(kind):
    model = make_clip(**TOWERS[kind]).float()
    tower = TextTower(model, TOKENIZER)
    with torch.autocast("cpu", torch.bfloat16):
        features = tower(prompted_text(tower.words("a photo of a")[None], tower.class_names(NAMES)))
        expected = model.encode_text(TOKENIZER([f"a photo of a {name}." for name in NAMES]))
    assert features.dtype == expected.dtype
    assert_near(features[0], expected, dtype=torch.bfloat16)


@pytest.mark.compiled
@pytest.mark.parametrize("kind", ["CLIP", "both ways, last"])
def test_the_tower_compiles_in_one_graph(kind):
    torch.compiler.reset()
    tower = TextTower(make_clip(**TOWERS[kind]), TOKENIZER)
    names, context = tower.class_names(NAMES), draw(2, 5, 16).requires_grad_()

    def encode(context):
        return tower(prompted_text(context, names))

    results = []
    for call in (encode, torch.compile(encode, fullgraph=True, backend="aot_eager")):
        features = call(context)
        results.append((features, *gradients(features, context)))
    for compiled, expected in zip(*reversed(results), strict=True):
        assert_near(compiled, expected)


def test_the_tower_is_shared_and_frozen():
    model = make_clip().train().requires_grad_()
    tower = TextTower(model, TOKENIZER)
    client = nn.Linear(1, 1)
    client.tower = tower
    assert copy.deepcopy(client).tower is tower
    assert isinstance(tower, TextEncoder)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not any(key.startswith("tower") for key in client.state_dict())


def with_lora(part):
    """LoRA in one tower; every other parameter of the model still trains, or none does."""
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
def test_a_model_that_carries_adapters_is_refused(make, names):
    model = make()
    with pytest.raises(
        ValueError,
        match=f"`clip_model` must have no parameters that are trained.*; got a model that trains {names}",
    ):
        TextTower(model, TOKENIZER)
    TextTower(freeze(model), TOKENIZER)


def test_a_tower_may_be_frozen_before_the_other():
    model = make_clip(
        vision={"pos_embed_type": "sin_cos_2d"}
    )  # a fresh one has a table without gradients
    TextTower(model, TOKENIZER)
    locked = make_clip()
    freeze(locked.visual)
    TextTower(locked, TOKENIZER)
    locked = make_clip()
    locked.lock_text_tower()
    TextTower(locked, TOKENIZER)


def test_names_are_written_as_a_person_would():
    tower = TextTower(make_clip(), TOKENIZER)
    names, plain = (
        tower.class_names(["golden_retriever", "CAT"]),
        tower.class_names(["golden retriever", "cat"]),
    )
    assert torch.equal(names.tokens, plain.tokens)
    assert names.names == ("golden_retriever", "CAT")
    assert torch.equal(tower.words("a_photo_of"), tower.words("a photo of"))


TRICKY = (
    "arch (outdoor)", "U.S.A.", "A.", "Mr. Bean", "what?", "wow!!", "C++", "C#", "rock 'n' roll", "jack-o'-lantern", "the dog's",
    "dogs'", "A&W", "A &amp; W", "café", "naïve", "crème brûlée", "50%", "Boeing 737-800", "3.14", "9", "and/or", "(left)", "[right]",
    '"quoted"', "wait...", "semi;", "colon:", "dash-", "under_score_", "tab\tbed", "  wide   gap  ", "dog 🐕", "日本", "\u2019", ";)", "!?",
    "...",
)  # fmt: skip


@pytest.mark.parametrize(
    "names", [TRICKY, tuple(open_clip.IMAGENET_CLASSNAMES)], ids=["tricky", "ImageNet"]
)
def test_a_name_and_its_full_stop_are_tokenized_as_in_the_whole_sentence(names):
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
def test_a_context_stands_around_a_tricky_name_as_in_the_published_code(place):
    tower = TextTower(make_clip(), TOKENIZER)
    context, weight = draw(1, 5, tower.dim), tower.model.token_embedding.weight
    text = prompted_text(context, tower.class_names(TRICKY), name_position=PLACES[place])
    for name, suffix, end in zip(TRICKY, text.suffix[0], text.end, strict=True):
        rest = iter(context[0])
        ids = coop.published(TOKENIZER, name.replace("_", " "), 5, PLACES[place])
        expected = torch.stack([next(rest) if index is None else weight[index] for index in ids])
        assert torch.equal(torch.cat([text.prefix[0], suffix])[: len(ids)], expected), name
        assert end == len(ids) - 1


def test_two_classes_may_have_one_name():
    """ImageNet has "missile" and "sunglasses" twice."""
    tower = TextTower(make_clip(), TOKENIZER)
    features = tower(
        prompted_text(
            draw(1, 3, tower.dim), tower.class_names(["cat", "polar_bear", "dog", "Polar bear"])
        )
    )[0]
    assert_near(features[1], features[3])
    assert_near(
        features[:3],
        tower(
            prompted_text(draw(1, 3, tower.dim), tower.class_names(["cat", "polar bear", "dog"]))
        )[0],
    )
    assert (features[0] - features[1]).abs().max() > 0.1


def test_words_are_counted_by_their_tokens():
    """CoOp counts words by spaces, and breaks where one of them has several tokens."""
    tower = TextTower(make_clip(), TOKENIZER)
    ids = TOKENIZER.encode("a photomicrograph of")
    assert len(ids) > 3
    assert torch.equal(tower.words("a photomicrograph of"), tower.model.token_embedding.weight[ids])


@pytest.mark.parametrize("specific", [False, True])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["CLIP", "both ways, last"])
def test_each_sample_may_bring_contexts_of_its_own(kind, place, specific):
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


def test_contexts_of_single_samples_are_never_read_as_class_specific():
    """Of 7 samples and 10 contexts, with 10 classes: the shapes fit both."""
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
    """`poisson_batch` draws nobody now and then."""
    tower = TextTower(make_clip(**TOWERS[kind]), TOKENIZER, class_chunk=chunk)
    names = tower.class_names(NAMES)
    copies = per_sample(ContextPrompts(tower.dim, num_contexts=2, length=4).double(), 0)
    features = tower(prompted_text(copies(), names, per_sample=True))
    assert features.shape == (0, 2, 11, 12)
    features.sum().backward()
    assert copies.context.grad.shape == (0, 2, 4, 16)
    assert tower(prompted_text(copies()[:, 0], names)).shape == (0, 11, 12)


LONG = " ".join(["polar bear"] * 20)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        ("cat", TypeError, "`names` must be a sequence of strings; got 'cat'"),
        (3, TypeError, "`names` must be a sequence of strings; got 3"),
        (["cat", 3], TypeError, "`names` must be strings; got 3"),
        ([], ValueError, "`names` must hold at least one name"),
        (
            ["cat", ""],
            ValueError,
            "`names` must have at least 1 token and at most 21; got '' with 0",
        ),
        (["cat", " _ "], ValueError, "got ' _ ' with 0"),
        (
            ["cat", LONG],
            ValueError,
            f"`names` must have at least 1 token and at most 21; got '{LONG}' with more than 21",
        ),
        (["cat", " ".join(["bear"] * 22)], ValueError, "with more than 21"),
    ],
)
def test_wrong_names(names, error, message):
    with pytest.raises(error, match=message):
        TextTower(make_clip(), TOKENIZER).class_names(names)


@pytest.mark.bad_input
def test_the_longest_name_fits_without_context_and_is_named_when_it_does_not_fit_with_one():
    tower = TextTower(make_clip(), TOKENIZER)
    longest = " ".join(["bear"] * 21)
    names = tower.class_names(["cat", longest])
    text = prompted_text(torch.zeros(1, 0, 16), names)
    assert text.prefix.shape[1] + text.suffix.shape[2] == CONTEXT_LENGTH
    with pytest.raises(
        ValueError, match=f"so that 1 of context fit into 24; got '{longest}' with 23"
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
def test_wrong_words(text, error, message):
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
        (
            coca,
            r"be an open_clip CLIP or CustomTextCLIP \(CoCa adds a token of its own\); got CoCa",
        ),
        (lambda: nn.Linear(1, 1), "be an open_clip CLIP or CustomTextCLIP .* got Linear"),
        (
            lambda: with_text(nn.Linear(1, 1)),
            r"have a text tower that takes embeddings \(its tower is Hugging Face's",
        ),
        (
            lambda: make_clip(custom=True, embed_cls=True),
            "it adds a token of its own, as CoCa does",
        ),
        (lambda: make_clip(embed_cls=True), "it adds a token of its own, as CoCa does"),
        (padding_masked, "it masks padding by token ids"),
        (lambda: make_clip(custom=True, pool_type="none"), "it does not pool"),
        (lambda: make_clip(pool_type="none"), "it does not pool"),
    ],
)
def test_towers_that_cannot_be_right_are_refused(make, message):
    with pytest.raises(TypeError, match=f"`clip_model` must .*{message}"):
        TextTower(make(), TOKENIZER)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("tokenizer", "error", "message"),
    [
        ("ViT-B-16", TypeError, "`tokenizer` must be one of open_clip's"),
        (
            WordTokenizer(end=[1, 0, 7], pad=7),
            TypeError,
            "`tokenizer` must write padding alone behind an end token",
        ),
        (
            lambda texts, context_length: TOKENIZER(texts),
            ValueError,
            "`tokenizer` must write the 27 ids that it is asked for; got 24",
        ),
        (
            WordTokenizer(start=[49408]),
            ValueError,
            "whose vocabulary has 49408 tokens; got the id 49408",
        ),
    ],
)
def test_wrong_tokenizers(tokenizer, error, message):
    with pytest.raises(error, match=message):
        TextTower(make_clip(), tokenizer)


@pytest.mark.bad_input
@pytest.mark.parametrize("class_chunk", [0, 2.5])
def test_wrong_chunks(class_chunk):
    with pytest.raises((ValueError, TypeError), match="`class_chunk` must be"):
        TextTower(make_clip(), TOKENIZER, class_chunk=class_chunk)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (torch.zeros(1, 2, 16), TypeError, "`text` must be PromptedText, from prompted_text"),
        (
            PromptedText(torch.zeros(1, 2, 8), torch.zeros(1, 3, 4, 8), torch.zeros(3)),
            ValueError,
            r"prefix of shape \(contexts, length, 16\)",
        ),
        (
            PromptedText(torch.zeros(2, 2, 16), torch.zeros(1, 3, 4, 16), torch.zeros(3)),
            ValueError,
            r"got \(2, 2, 16\) and \(1, 3, 4, 16\)",
        ),
        (
            PromptedText(torch.zeros(1, 2, 16), torch.zeros(1, 0, 4, 16), torch.zeros(0)),
            ValueError,
            r"got \(1, 2, 16\) and \(1, 0, 4, 16\)",
        ),
        (
            PromptedText(torch.zeros(1, 2, 16), torch.zeros(1, 3, 4, 16), torch.zeros(1)),
            ValueError,
            r"`text.end` must have shape \(3,\).*; got \(1,\)",
        ),
        (
            PromptedText(torch.zeros(1, 2, 16), torch.zeros(1, 3, 23, 16), torch.zeros(3)),
            ValueError,
            "at most 24 tokens; got 25",
        ),
    ],
)
def test_wrong_sentences(text, error, message):
    with pytest.raises(error, match=message):
        TextTower(make_clip(), TOKENIZER)(text)


@pytest.mark.bad_input
def test_a_tower_that_looks_both_ways_takes_no_short_sentences():
    tower = TextTower(make_clip(**TOWERS["both ways, last"]), TOKENIZER)
    short = TextTower(make_clip(), TOKENIZER).class_names(NAMES)
    with pytest.raises(ValueError, match="exactly 24 tokens"):
        tower(prompted_text(torch.zeros(1, 2, 16), short))


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("spoil", "message"),
    [(nn.Module.train, "stay in eval mode"), (nn.Module.requires_grad_, "stay frozen")],
)
def test_a_model_that_was_unfrozen_is_noticed(spoil, message):
    model = make_clip()
    tower = TextTower(model, TOKENIZER)
    spoil(model)
    with pytest.raises(ValueError, match=f"`tower` must {message}"):
        tower(prompted_text(torch.zeros(1, 2, 16), tower.class_names(NAMES)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["ViT-B-32-quickgelu", "RN50", "EVA02-B-16", "PE-Core-T-16-384", "MobileCLIP2-S0", "ViTamin-S"],
)
def test_shipped_models_read_words_as_they_read_text(name):
    """Random weights, but the sizes, norms and activations that open_clip ships."""
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
