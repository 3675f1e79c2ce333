"""Models that backbones refuse, and wrong arguments next to the edges that are taken."""

from functools import cache, partial

import open_clip
import transformers
from open_clip.timm_model import TimmModel
from open_clip.transformer import VisionTransformer
from torch import nn, zeros
from torchvision.models import VisionTransformer as TorchVit

from clips import EMBED_DIM, NAMES, TEXT, TOKENIZER, TOWERS, VISION, WordTokenizer, make_clip
from fedprompt import (
    DeepPrompts,
    PromptStream,
    TextTower,
    check,
    encode_prompted,
    fingerprint,
    freeze,
    image_tokens,
    prompted_text,
    vit_trunk,
    zero_shot_classifier,
)
from fedprompt.backbones.pretrained import network
from fedprompt.interfaces import PromptedText
from models import build, draw_images, row_named, tiny_vit
from own_trunks import PlainTrunk
from refusals import number, refused, refused_and_taken
from towers import build_tower, tower_named

CLASSES = ("cat", "golden retriever", "Boeing 737-800", "dog")
SMALL = {"image_size": 16, "patch_size": 8, "width": 8, "layers": 1}
WIDTHS = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


# Text towers.


@cache
def tower(kind="CLIP", **text):
    return TextTower(make_clip(**TOWERS[kind] | text), TOKENIZER)


def with_text(text):
    model = make_clip(custom=True)
    model.text = text
    return model


def padding_masked():
    model = make_clip(custom=True, no_causal_mask=True)
    model.text.use_pad_mask = True
    return model


def trained_in(name):
    """A frozen CLIP except for one parameter of a part."""
    model = freeze(make_clip())
    next(model.get_submodule(name).parameters()).requires_grad_()
    return model


def coca():
    pools = {"attentional_pool": True, "attn_pooler_heads": 2}
    return open_clip.coca_model.CoCa(12, TEXT | {"attn_pooler_heads": 2}, TEXT, VISION | pools)


def spoiled(spoil):
    """Encode with a tower whose model is changed after the tower was made."""
    model = make_clip()
    own = TextTower(model, TOKENIZER)
    spoil(model)
    return own(prompted_text(zeros(1, 2, 16), own.class_names(NAMES)))


def of_siglip():
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = transformers.SiglipTextConfig(**sizes, vocab_size=64, num_attention_heads=1)
    return TextTower(transformers.SiglipTextModel(config), TOKENIZER)


# Image towers.


def clip_with(visual):
    model = open_clip.model.CLIP(EMBED_DIM, VISION, TEXT | {"vocab_size": 64})
    model.visual = visual
    return model.eval()


def tokens_of(model, *shape):
    return image_tokens(model, zeros(shape or (2, 3, 160, 160)))


def visual(**vision):
    return make_clip(vocab_size=64, vision=vision)


def unpooled():
    own = TimmModel("test_vit", EMBED_DIM, pool="avg", proj="none")
    own.trunk.global_pool = ""
    return own


def classifier():
    config = transformers.Dinov2Config(**WIDTHS, image_size=16, patch_size=8)
    return transformers.Dinov2ForImageClassification(config)


def swin():
    sizes = {"embed_dim": 8, "depths": [1], "num_heads": [2], "image_size": 32}
    return transformers.SwinModel(transformers.SwinConfig(**sizes))


def siglip2():
    config = transformers.Siglip2VisionConfig(**WIDTHS, intermediate_size=8, num_patches=4)
    return transformers.Siglip2VisionModel(config)


def two_pools():
    pools = {"attentional_pool": "parallel", "attn_pooler_heads": 2, "output_dim": 8}
    return VisionTransformer(**SMALL, heads=2, mlp_ratio=2, **pools)


def altered(model):
    """Change the forward pass of a model."""

    class Altered(type(model)):
        def forward(self, images):
            return super().forward(images.flip(1))

        def forward_features(self, images):
            return super().forward_features(images).flip(1)

    model.__class__ = Altered
    return model


def of_few_words():
    """A CLIP with a vocabulary of its own, whose tokenizer is not known."""
    clip = open_clip.model.CLIP(4, SMALL | {"head_width": 4}, TEXT | {"vocab_size": 9})
    clip.visual.preprocess_cfg = {"size": 16, "mean": (0.5,) * 3, "std": (0.5,) * 3}
    return network(clip, "clip")


def unsized():
    """A model that keeps its weights as buffers."""
    model = tiny_vit()
    for part in model.modules():
        for name in list(part._parameters):
            value = part._parameters.pop(name)
            part.register_buffer(name, None if value is None else value.detach())
    return model


def blind():
    """A model that embeds no image."""
    model = tiny_vit()
    model.patch_embed.proj = nn.Conv2d(3, 7, 8, 8)
    return model


@cache
def torch_vit():
    return TorchVit(32, 8, num_layers=3, num_heads=2, hidden_dim=16, mlp_dim=32)


def flash():
    model = build_tower(tower_named("ViTModel"))
    model.config._attn_implementation = "flash_attention_2"
    return model


def with_extra(name):
    model = freeze(build_tower(tower_named(name)))
    model.lora_extra = nn.Parameter(zeros(2))
    return model


@cache
def trunk(name):
    return vit_trunk(build_tower(tower_named(name)))


test_models_are_refused_with_the_reason = refused(globals())("""
TextTower(coca(), TOKENIZER) -> TypeError: (CoCa adds a token); got CoCa.
TextTower(nn.Linear(1, 1), TOKENIZER) -> TypeError: `clip_model` must be an open_clip CLIP or
zero_shot_classifier(make_clip(), ['cat'], ['a {}']) -> TypeError: `tower` must be a TextTower
TextTower(with_text(nn.Linear(1, 1)), TOKENIZER) -> TypeError: have a text tower that takes
TextTower(make_clip(custom=True, embed_cls=True), TOKENIZER) -> TypeError: it adds a token, as CoCa
TextTower(make_clip(embed_cls=True), TOKENIZER) -> TypeError: it adds a token, as CoCa does
TextTower(padding_masked(), TOKENIZER) -> TypeError: it masks padding by token ids
TextTower(make_clip(custom=True, pool_type='none'), TOKENIZER) -> TypeError: it does not pool
TextTower(make_clip(pool_type='none'), TOKENIZER) -> TypeError: it does not pool
TextTower(trained_in('visual'), TOKENIZER) -> ValueError: `clip_model` must have no adapters and tr
TextTower(trained_in('transformer'), TOKENIZER) -> ValueError: `clip_model` must have no adapters an
of_siglip() -> TypeError: or a CLIPModel or
spoiled(nn.Module.train) -> ValueError: `tower` must stay in eval mode
spoiled(nn.Module.requires_grad_) -> ValueError: `tower` must stay frozen
tokens_of(nn.Linear(1, 1)) -> TypeError: have one of open_clip's image towers; got Linear
tokens_of(clip_with(nn.Linear(1, 1))) -> TypeError: have one of open_clip's image towers;
tokens_of(visual(attentional_pool=True, attn_pooler_heads=2)) -> TypeError: whose queries are not
tokens_of(visual(pool_type='none')) -> TypeError: `clip_model` must pool a clas
tokens_of(clip_with(TimmModel('resnet10t', 12, 160, pool='abs_attn', proj=''))) -> TypeError: whose
tokens_of(clip_with(unpooled())) -> TypeError: pool its image tokens
vit_trunk(open_clip.model.CLIP(4, SMALL | {'head_width': 4}, TEXT | {'vocab_size': 9})) \
-> TypeError: it contains one; pass model.visual
vit_trunk(classifier()) -> TypeError: it contains one; pass model.dinov2
vit_trunk(swin()) -> TypeError: windows has none; use freeze(model) and PadPrompts
vit_trunk(siglip2()) -> TypeError: the same weights are supported in timm and open_clip, as
vit_trunk(altered(visual().visual)) -> ValueError: compute part by part what it computes as a
vit_trunk(altered(build_tower(tower_named('ViTModel')))) -> ValueError: must run in eval mode
vit_trunk(altered(tiny_vit())) -> ValueError: compute part by part what it computes as a whole
vit_trunk(altered(build(row_named('eva02_tiny_patch14_224')))) -> ValueError: compute part by part
vit_trunk(two_pools()) -> TypeError: its forward pass is not known here
vit_trunk(open_clip.modified_resnet.ModifiedResNet((1,) * 4, 8, 8, width=8)) -> TypeError: is convol
vit_trunk(TimmModel('test_convnext', 4, 160)) -> TypeError: it is convolutional
vit_trunk('vit_tiny_patch16_224') -> TypeError: (it is not an nn.Module); got str
vit_trunk(nn.Linear(2, 2)) -> TypeError: (it has no attention); got Linear
vit_trunk(nn.Sequential(tiny_vit())) -> TypeError: it contains one; pass model.get_submodule('0'))
vit_trunk(with_extra('ViT-B-16')) -> ValueError: must have no adapters and train all parameters or
vit_trunk(with_extra('PE-Core-B-16')) -> ValueError: must have no adapters and train all parameters
vit_trunk(with_extra('CLIPModel')) -> ValueError: must have no adapters and train all parameters or
tokens_of(make_clip().train()) -> ValueError: be in eval mode, as freeze(clip_model)
vit_trunk(half := tiny_vit().bfloat16(), trainable=[half.norm]) -> ValueError: be in float32 or fl
vit_trunk(flash(), attention_mask=zeros(17, 17)) -> ValueError: must be None, or the model's attent
vit_trunk(torch_vit(), attention_mask=zeros(17, 17)) -> ValueError: must be None, because blocks of
vit_trunk(transformers.CLIPSegVisionModel(transformers.CLIPSegVisionConfig(**WIDTHS))) \
-> TypeError: (its weights are in no library that is supported; the how-to page
vit_trunk(nn.DataParallel(nn.Sequential(tiny_vit()))) -> TypeError: model.get_submodule('module.0')
TextTower(nn.DataParallel(make_clip()), TOKENIZER) -> TypeError: it contains one; pass model.module
tokens_of(nn.DataParallel(make_clip())) -> TypeError: it contains one; pass model.module); got
vit_trunk(tiny_vit()).embed(zeros(1, 16, 16, 3)) -> ValueError: call images.permute(0, 3, 1, 2);
vit_trunk(tiny_vit()).embed(zeros(1, 1, 16, 16)) -> ValueError: images.expand(-1, 3, -1, -1); got
of_few_words() -> TypeError: or a CLIP of open_clip with the tokenizer of CLIP; got a CLIP
vit_trunk(unsized()) -> ValueError: `model` must have floating-point parameters; got none.
vit_trunk(blind()) -> ValueError: must embed an image; weights outside of blocks must fit, not shard
""")


# Arguments: what is refused by name, and the edges that are taken.

CLASS_NAMES = tower().class_names(CLASSES)
LONG = "bear " * 21
TEXTS = (["cat", ["cat", 3], [], ["cat", ""], ["cat", " _ "]], [["cat"]])
PARTS = {"prefix": zeros(1, 2, 16), "suffix": zeros(1, 3, 4, 16), "end": (2, 3, 5)}
FLAG = (["x", 1, None], [True])


def encoded(text, *streams, kind="CLIP", layers=3):
    return tower(kind, layers=layers)(text, *streams)


def sentence(text):
    """Encode a sentence of which some parts are others."""
    return tower()(PromptedText(**PARTS | text))


def parts(**wrong):
    return [{name: each} for name, values in wrong.items() for each in values]


def with_context(*given, **options):
    return prompted_text(zeros(*(given or (2, 5, 16))), CLASS_NAMES, **options)


def streamed(streams):
    made = [PromptStream(each) if isinstance(each, dict) else each for each in streams]
    return encoded(with_context(), *made)


def deep(*layers):
    return [PromptStream(each, True) for each in layers]


def sized(name, wrong, taken):
    """Return a row of the sizes of images of a tower."""
    encode = partial(encode_prompted, trunk(name))
    return encode, {}, {"images": tuple([zeros(each) for each in some] for some in (wrong, taken))}


def masked(attention_mask):
    """Encode with a mask of a vision transformer whose tokens are 17, and a prompt."""
    model = build(row_named("vit_tiny_patch16_224"))
    own = vit_trunk(model, attention_mask=attention_mask)
    return encode_prompted(own, draw_images(model), PromptStream({0: zeros(1, model.embed_dim)}))


FIVE, IMAGE = zeros(5, 16), zeros(2, 3, 32, 32)
MASK = zeros(17, 17)
TOWER_ARGUMENTS = [
    (tower().class_names, {}, {"names": (
        [*TEXTS[0], ["cat", LONG + "bear"], ["cat", "polar bear " * 20]], [["cat"], [LONG]])}),
    (tower().sentences, {}, {"texts": ([*TEXTS[0], [LONG + "bear bear"]], [["cat"]])}),
    (tower().words, {}, {"text": ([3, "", LONG + "bear bear"], [LONG + "bear"])}),
    (CLASS_NAMES.select, {}, {"indices": (
        [[], [True, False], [0.5], [4], [0, -1], zeros(1).long() + 7], [[0, 3], zeros(1).long()])}),
    (lambda names: prompted_text(zeros(1, 1, 16), names), {}, {"names": (
        [tower().class_names([LONG])], [CLASS_NAMES])}),
    (zero_shot_classifier, {"tower": tower(), "names": ["cat"], "templates": ["a {}"]}, {
        "names": (["cat", [], [3]], []), "templates": (
        ["a {}", [], ["a cat"], [3]], [["{}"], [str]])}),
    (TextTower, {"clip_model": make_clip(), "tokenizer": TOKENIZER}, {
        "class_chunk": number(1), "probe": FLAG, "tokenizer": ([
            "ViT-B-16", WordTokenizer(end=[1, 0, 7], pad=7), WordTokenizer(start=[49408]),
            lambda texts, context_length: TOKENIZER(texts),
            lambda texts, context_length: zeros(1, 27), lambda texts, context_length: [[1]],
            lambda texts, context_length: zeros(27).long()], [WordTokenizer(start=[49407])])}),
    (encoded, {}, {"text": ([zeros(1, 2, 16)], [with_context(1, 2, 16)])}),
    (lambda text: encoded(text, kind="both ways, last", layers=2), {}, {"text": (
        [with_context(1, 2, 16)], [])}),
    (sentence, {}, {"text": (parts(
        prefix=[[[[0.0]]], zeros(1, 2, 16) / 0, zeros(2, 16), zeros(1, 2, 8), zeros(2, 2, 16)],
        suffix=[None, zeros(1, 3, 4, 16) / 0, zeros(3, 4, 16), zeros(1, 3, 4, 8),
                zeros(1, 0, 4, 16), zeros(1, 3, 23, 16)],
        end=[(2, 3, 4.0), [2, 3, 4], (2,), zeros(3).long(), (2, 3, 6), (1, 2, 3)], context=[-1],
        ), [{}, {"context": 0}, {"suffix": zeros(1, 3, 22, 16)}])}),
    (streamed, {}, {"streams": (
        [[{1: FIVE}], [{}], deep({}), deep({0: FIVE}), deep({3: FIVE}), deep({1: FIVE[:4]}),
         deep({1: FIVE}, {1: FIVE}), deep({1: FIVE, 2: FIVE[:4]}), deep({1: zeros(3, 5, 16)}),
         deep({1: [0.0]}), [3]],
        [[], deep({1: FIVE, 2: FIVE}), deep({1: zeros(2, 5, 16)}),
         deep({1: FIVE[:2]}, {2: FIVE[:3]})])}),
    (lambda streams: encoded(with_context(), *streams, layers=1), {}, {"streams": (
        [deep({1: FIVE})], [[]])}),
    (lambda text: encoded(text, *deep({1: FIVE})), {}, {"text": (
        [with_context(name_position=2), with_context(name_position=0),
         with_context(2, 4, 5, 16, class_specific=True)], [with_context(name_position=5)])}),
]  # fmt: skip
IMAGE_ARGUMENTS = [
    (image_tokens, {"clip_model": make_clip()}, {"images": (
        [[[0.0]], zeros(2, 3, 24, 24), zeros(2, 16, 16, 3)], [zeros(0, 3, 16, 16).double()])}),
    sized("ViT-B-16", [(2, 3, 16, 16), (2, 32, 32, 3), (2, 1, 32, 32)], [(1, 3, 32, 32)]),
    sized("EVA02-B-16", [(2, 3, 16, 16), (2, 1, 32, 32)], [(1, 3, 32, 32)]),
    sized("ViTModel", [(2, 3, 33, 33), (2, 4, 32, 32), (2, 3, 0, 32)], [(1, 3, 8, 8)]),
    (lambda images: encode_prompted(trunk("ViTModel"), images), {}, {"images": (
        [IMAGE.to_sparse(), IMAGE.to("meta")], [])}),
    (lambda images: encode_prompted(vit_trunk(torch_vit()), images), {}, {"images": (
        [zeros(2, 3, 32, 16)], [IMAGE])}),
    (masked, {}, {"attention_mask": (
        [zeros(3, 4), zeros(17), MASK / 0, MASK + float("inf"), MASK.bool(), [[0.0]], zeros(1, 1),
         zeros(18, 18)], [MASK])}),
    (vit_trunk, {"model": tiny_vit()}, {"probe": FLAG}),
    (lambda trainable: vit_trunk(tiny_vit(), trainable=trainable), {}, {"trainable": (
        [[], "lora_", ["lora_"], [nn.Linear(2, 2)], nn.Parameter(zeros(2))], [None])}),
    (check.trunk, {"trunk": PlainTrunk(), "images": zeros(2, 3, 16, 16)}, {
        "trunk": (["vit"], []), "forward": ([3], [None]),
        "images": ([zeros(1, 3, 16, 16)], [zeros(2, 3, 16, 16)])}),
    (check.text_encoder, {"encoder": tower(), "names": CLASS_NAMES}, {
        "encoder": ([3], []), "names": ([["cat"], tower().class_names(["cat"])], [
        tower().class_names(["cat", "dog"])]), "expected": ([zeros(4, 12)], [None])}),
    (partial(check.activation, name="ViT-B-32"), {
        "clip_model": make_clip(), "pretrained": "laion2b_e16"}, {
        "clip_model": ([None], []), "name": ([3], []),
        "pretrained": ([None, "no such tag", "/home/weights.pt"], ["laion2b_e16"])}),
    (fingerprint, {"backbone": vit_trunk(tiny_vit())}, {
        "backbone": ([nn.Identity(), 3], [tiny_vit()]), "name_position": (["end", -1], [0, None]),
        "class_names": (["cat", [1]], [["cat"], ()])}),
    (lambda streams: fingerprint(vit_trunk(tiny_vit()), streams), {}, {"streams": (
        [DeepPrompts(2, 12, 3)], [DeepPrompts(2, 12, 3)()])}),
]  # fmt: skip

test_arguments_are_refused_by_name_and_edges_are_taken = refused_and_taken(
    TOWER_ARGUMENTS + IMAGE_ARGUMENTS
)
