"""Wrong models, tokenizers, names, sentences, streams and images of the backbones."""

from functools import cache

import open_clip
import transformers
from open_clip.timm_model import TimmModel
from open_clip.transformer import VisionTransformer
from torch import nn, zeros
from torchvision.models import VisionTransformer as TorchVit

from clips import EMBED_DIM, NAMES, TEXT, TOKENIZER, TOWERS, VISION, WordTokenizer, make_clip
from fedprompt import (
    PromptStream,
    TextTower,
    check,
    encode_prompted,
    freeze,
    image_tokens,
    prompted_text,
    vit_trunk,
)
from fedprompt.interfaces import PromptedText
from models import build, draw_images, row_named, tiny_vit
from own_trunks import PlainTrunk
from refusals import refused
from towers import build_tower, tower_named

LONG, LONGEST = "polar bear " * 20, "bear " * 21
CLASSES = ("cat", "golden retriever", "Boeing 737-800", "dog")
SMALL = {"image_size": 16, "patch_size": 8, "width": 8, "layers": 1}
WIDTHS = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


words = WordTokenizer


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


def sentence(prefix, suffix, *end):
    return tower()(PromptedText(zeros(prefix), zeros(suffix), *end))


def spoiled(spoil):
    """Encode with a tower whose model is changed after the tower was made."""
    model = make_clip()
    own = TextTower(model, TOKENIZER)
    spoil(model)
    return own(prompted_text(zeros(1, 2, 16), own.class_names(NAMES)))


def deep(*streams, layers=3, replace=True, text=None, **options):
    """Encode a context of five tokens with streams of the given layers."""
    own = tower(layers=layers)
    text = zeros(2, 5, 16) if text is None else text
    text = prompted_text(text, own.class_names(CLASSES), **options)
    return own(text, *(PromptStream(each, replace) for each in streams or [{1: zeros(5, 16)}]))


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


def images(name, *shape):
    return encode_prompted(trunk(name), zeros(shape))


def masked(mask):
    """Encode with a mask of a vision transformer whose tokens are 17, and a prompt."""
    model = build(row_named("vit_tiny_patch16_224"))
    own = vit_trunk(model, attention_mask=mask)
    return encode_prompted(own, draw_images(model), PromptStream({0: zeros(1, model.embed_dim)}))


def trainable(chosen):
    """Choose trained parameters, and require that an error leaves the model unchanged."""
    model = tiny_vit().train()
    try:
        vit_trunk(model, trainable=chosen)
    finally:
        assert model.training
        assert all(parameter.requires_grad for parameter in model.parameters())


def judged(*shape, forward=None, **options):
    return check.trunk(PlainTrunk(), zeros(shape, **options), forward)


def checked(*given, **more):
    return check.text_encoder(tower(), *given, **more)


test_wrong_calls_are_refused_by_name = refused(globals())("""
tower().class_names('cat') -> TypeError: `names` must be a sequence of strings; got 'cat'
tower().class_names(['cat', 3]) -> TypeError: `names[1]` must be a string; got 3
tower().class_names([]) -> ValueError: `names` must contain at least one string
tower().class_names(['cat', '']) -> ValueError: have at least 1 token and at most 21; got ''
tower().class_names(['cat', ' _ ']) -> ValueError: got ' _ ' with 0
tower().class_names(['cat', 'bear ' * 22]) -> ValueError: with more than 21
tower().class_names(['cat', LONG]) -> ValueError: at most 21; got 'polar bear polar
tower().class_names(CLASSES).select([]) -> IndexError: `indices` must contain
tower().class_names(CLASSES).select([True, False]) -> TypeError: `indices` must be integers; got
tower().class_names(CLASSES).select([0.5]) -> TypeError: `indices` must be integers; got
tower().class_names(CLASSES).select([4]) -> IndexError: all in [0, 4); got
tower().class_names(CLASSES).select([0, -1]) -> IndexError: all in [0, 4); got
tower().class_names(CLASSES).select(zeros(1).long() + 7) -> IndexError: all in [0, 4); got
prompted_text(zeros(1, 1, 16), tower().class_names([LONGEST])) -> ValueError: fits into 24 positions
tower().words(3) -> TypeError: `text` must be a string; got 3
tower().words('') -> ValueError: at least 1 token and at most 22; got 0
tower().words(LONG) -> ValueError: more than 22
zero_shot_classifier(tower(), ['cat'], 'a {}') -> TypeError: `templates` must be a sequence of str
zero_shot_classifier(tower(), ['cat'], []) -> ValueError: `templates` must contain at least one
zero_shot_classifier(tower(), ['cat'], ['a cat']) -> ValueError: contain {} in place of the name;
zero_shot_classifier(tower(), ['cat'], [3]) -> TypeError: must be strings or functions of a name; g
zero_shot_classifier(tower(), ['cat'], ['bear ' * 22 + '{}']) -> ValueError: with more than 22
zero_shot_classifier(tower(), 'cat', ['a {}']) -> TypeError: `names` must be a sequence of strings;
zero_shot_classifier(tower(), [], ['a {}']) -> ValueError: `names` must contain at least one string
zero_shot_classifier(tower(), [3], [str]) -> TypeError: `names[0]` must be a string; got 3
TextTower(coca(), TOKENIZER) -> TypeError: (CoCa adds a token); got CoCa.
TextTower(nn.Linear(1, 1), TOKENIZER) -> TypeError: `clip_model` must be an open_clip CLIP or
zero_shot_classifier(make_clip(), ['cat'], ['a {}']) -> TypeError: `tower` must be a TextTower
TextTower(with_text(nn.Linear(1, 1)), TOKENIZER) -> TypeError: have a text tower that takes
TextTower(make_clip(custom=True, embed_cls=True), TOKENIZER) -> TypeError: it adds a token, as CoCa
TextTower(make_clip(embed_cls=True), TOKENIZER) -> TypeError: it adds a token, as CoCa does
TextTower(padding_masked(), TOKENIZER) -> TypeError: it masks padding by token ids
TextTower(make_clip(custom=True, pool_type='none'), TOKENIZER) -> TypeError: it does not pool
TextTower(make_clip(pool_type='none'), TOKENIZER) -> TypeError: it does not pool
TextTower(make_clip(), 'ViT-B-16') -> TypeError: `tokenizer` must be a tokenizer of open_clip
TextTower(make_clip(), words(end=[1, 0, 7], pad=7)) -> TypeError: must return nothing but
TextTower(make_clip(), lambda texts, context_length: TOKENIZER(texts)) -> ValueError: must return
TextTower(make_clip(), words(start=[49408])) -> ValueError: whose vocabulary has 49408 tok
TextTower(make_clip(), lambda texts, context_length: zeros(1, 27)) -> TypeError: return a tensor (te
TextTower(make_clip(), lambda texts, context_length: zeros(27).long()) -> TypeError: return a tensor
TextTower(trained_in('visual'), TOKENIZER) -> ValueError: `clip_model` must have no adapters and tr
TextTower(trained_in('transformer'), TOKENIZER) -> ValueError: `clip_model` must have no adapters an
TextTower(make_clip(), TOKENIZER, class_chunk=0) -> ValueError: `class_chunk` must be
TextTower(make_clip(), TOKENIZER, class_chunk=2.5) -> TypeError: `class_chunk` must be
of_siglip() -> TypeError: or a CLIPModel or
tower().sentences('cat') -> TypeError: `texts` must be a sequence of strings; got 'cat'
tower().sentences([]) -> ValueError: `texts` must contain at least one string
tower()(zeros(1, 2, 16)) -> TypeError: `text` must be PromptedText, from prompted_text
tower()(PromptedText([[[0.0]]], zeros(1, 3, 4, 16), (2, 3, 4))) -> TypeError: `text.prefix` must be
tower()(PromptedText(zeros(1, 2, 16), None, (2, 3, 4))) -> TypeError: `text.suffix` must be a float
tower()(PromptedText(zeros(1, 2, 16) / 0, zeros(1, 3, 4, 16), (2, 3, 4))) -> ValueError: `text.prefi
tower()(PromptedText(zeros(1, 2, 16), zeros(1, 3, 4, 16) / 0, (2, 3, 4))) -> ValueError: `text.suffi
sentence((1, 2, 16), (1, 3, 4, 16), (2, 3, 4), -1) -> ValueError: `text.context` must be at least 0
sentence((1, 2, 16), (1, 3, 4, 16), (2, 3, 4.0)) -> ValueError: `text.end` must be 3 positions in
sentence((1, 2, 16), (1, 3, 4, 16), [2, 3, 4]) -> ValueError: `text.end` must be 3 positions in
sentence((2, 16), (3, 4, 16), (2, 3, 4)) -> ValueError: got (2, 16) and (3, 4, 16)
sentence((1, 2, 8), (1, 3, 4, 8), (2, 3, 4)) -> ValueError: prefix of shape (contexts, length, 16)
sentence((2, 2, 16), (1, 3, 4, 16), (2, 3, 4)) -> ValueError: got (2, 2, 16) and (1, 3, 4, 16)
sentence((1, 2, 16), (1, 0, 4, 16), ()) -> ValueError: got (1, 2, 16) and (1, 0, 4, 16)
sentence((1, 2, 16), (1, 3, 4, 16), (2,)) -> ValueError: `text.end` must be 3 positions in [2, 6),
sentence((1, 2, 16), (1, 3, 23, 16), (24, 3, 4)) -> ValueError: at most 24 tokens; got 25
sentence((1, 2, 16), (1, 3, 4, 16), zeros(3).long()) -> ValueError: got a int64 tensor
sentence((1, 2, 16), (1, 3, 4, 16), (2, 3, 6)) -> ValueError: got a tuple of length 3
tower('both ways, last')(prompted_text(zeros(1, 2, 16), tower().class_names(NAMES))) \
-> ValueError: exactly 24 tokens
spoiled(nn.Module.train) -> ValueError: `tower` must stay in eval mode
spoiled(nn.Module.requires_grad_) -> ValueError: `tower` must stay frozen
tower()(prompted_text(zeros(2, 5, 16), tower().class_names(CLASSES)), {1: zeros(5, 16)}) \
-> TypeError: `streams[0]` must be a PromptStream
deep(replace=False) -> ValueError: `streams[0]` must have replace=True
deep({}) -> ValueError: must enter before blocks 1 to 2
deep(DeepPrompts(5, 16, depth=3)().layers) -> ValueError: before blocks 1 to 2, because the
deep({3: zeros(5, 16)}) -> ValueError: got layers [3]
deep({1: zeros(4, 16)}) -> ValueError: `streams` must replace all 5
deep({1: zeros(5, 16)}, {1: zeros(5, 16)}) -> ValueError: all 5 tokens of the context; got 10
deep({1: zeros(5, 16), 2: zeros(4, 16)}) -> ValueError: `streams[
deep({1: zeros(3, 5, 16)}) -> ValueError: must have shape (length,
deep({1: [0.0]}) -> TypeError: must be a floating-point tensor
deep(name_position=2) -> ValueError: `text` must have the whole context right before
deep(name_position=0) -> ValueError: `text` must have the whole context right before
deep(text=zeros(2, 4, 5, 16), class_specific=True) -> ValueError: the whole context right before
deep(layers=1) -> ValueError: must not be given to a tower of one block
checked(['cat', 'dog']) -> TypeError: `names` must be ClassNames
checked(tower().class_names(['cat'])) -> ValueError: `names` must contain at least two names; got 1
checked(tower().class_names(CLASSES), words=zeros(3, 16)) -> ValueError: `expected` must be given
tokens_of(nn.Linear(1, 1)) -> TypeError: have one of open_clip's image towers; got Linear
tokens_of(clip_with(nn.Linear(1, 1))) -> TypeError: have one of open_clip's image towers;
tokens_of(visual(attentional_pool=True, attn_pooler_heads=2)) -> TypeError: whose queries are not
tokens_of(visual(pool_type='none')) -> TypeError: `clip_model` must pool a clas
tokens_of(clip_with(TimmModel('resnet10t', 12, 160, pool='abs_attn', proj=''))) -> TypeError: whose
tokens_of(clip_with(unpooled())) -> TypeError: pool its image tokens
tokens_of(make_clip().train()) -> ValueError: be in eval mode, as freeze(clip_model)
image_tokens(make_clip(), [[0.0]]) -> TypeError: `images` must be floating-point of shape
tokens_of(make_clip(), 2, 3, 224, 224) -> ValueError: (16, 16), because its positions are
tokens_of(make_clip(), 2, 16, 16, 3) -> ValueError: have 3 channels in front of height and width; c
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
vit_trunk(flash(), attention_mask=zeros(17, 17)) -> ValueError: must be None, or the model's attent
vit_trunk(torch_vit(), attention_mask=zeros(17, 17)) -> ValueError: must be None, because blocks of
encode_prompted(vit_trunk(torch_vit()), zeros(2, 3, 32, 16)) -> ValueError: the model's size (32, 32
vit_trunk(transformers.CLIPSegVisionModel(transformers.CLIPSegVisionConfig(**WIDTHS))) \
-> TypeError: (its weights are in no library that is supported; the how-to page
vit_trunk(nn.DataParallel(nn.Sequential(tiny_vit()))) -> TypeError: model.get_submodule('module.0')
TextTower(nn.DataParallel(make_clip()), TOKENIZER) -> TypeError: it contains one; pass model.module
tokens_of(nn.DataParallel(make_clip())) -> TypeError: it contains one; pass model.module); got
TextTower(make_clip(), lambda texts, context_length: [[1]]) -> TypeError: pass processor.tokenizer
TextTower(make_clip(), TOKENIZER, probe=1) -> TypeError: `probe` must be True or False; got 1
vit_trunk(tiny_vit(), probe=None) -> TypeError: `probe` must be True or False; got None
images('ViT-B-16', 2, 3, 16, 16) -> ValueError: (32, 32), because its positions are fixed; got (16
images('EVA02-B-16', 2, 3, 16, 16) -> ValueError: (32, 32), because its positions are fixed; got
images('ViTModel', 2, 3, 33, 33) -> ValueError: have a size that is a multiple of the patches' (8,
images('ViT-B-16', 2, 32, 32, 3) -> ValueError: `images` must have 3 channels in front of
images('EVA02-B-16', 2, 1, 32, 32) -> ValueError: `images` must have 3 channels; for gray
images('ViTModel', 2, 4, 32, 32) -> ValueError: `images` must have 3 channels; got
images('ViTModel', 2, 3, 0, 32) -> ValueError: `images` must have
encode_prompted(trunk('ViTModel'), zeros(2, 3, 32, 32).to_sparse()) -> TypeError: be a dense tensor
masked(zeros(3, 4)) -> ValueError: `attention_mask` must have shape (seq, seq); got (3, 4).
masked(zeros(17)) -> ValueError: `attention_mask` must have shape (seq, seq); got (17,).
masked(zeros(17, 17) / 0) -> ValueError: `attention_mask` must be finite; got 289
masked(zeros(17, 17) + float('inf')) -> ValueError: `attention_mask` must be finite; got 289
masked(zeros(17, 17).bool()) -> TypeError: shape (seq, seq); got a bool tensor of shape (17, 17).
masked([[0.0]]) -> TypeError: `attention_mask` must be a floating-point tensor of shape (seq, seq)
masked(zeros(1, 1)) -> ValueError: have shape (seq, seq) for the 17 tokens; got (1, 1).
masked(zeros(18, 18)) -> ValueError: have shape (seq, seq) for the 17 tokens; got (18, 18).
vit_trunk(half := tiny_vit().bfloat16(), trainable=[half.norm]) -> ValueError: be in float32 or fl
vit_trunk(unsized()) -> ValueError: `model` must have floating-point parameters; got none.
vit_trunk(blind()) -> ValueError: must embed an image; weights outside of blocks must fit, not shard
trainable([]) -> ValueError: contain at least one parameter of `model`; got none.
trainable('lora_') -> TypeError: `trainable` must be a list of parameters or modules of `model`; got
trainable(['lora_']) -> TypeError: `trainable[0]` must be a parameter or a module of `model`; got
trainable([nn.Linear(2, 2)]) -> ValueError: `trainable` must belong to `model`; got 2 parameters
judged(1, 3, 16, 16) -> ValueError: contain at least two images; got 1.
judged(2, 3, 16, 16, dtype=zeros(1).byte().dtype) -> TypeError: be floating-point of shape (bat
judged(2, 3, 16, 16, forward=3) -> TypeError: be a function of images or None; go
check.activation(None, 'ViT-B-16', 'openai') -> TypeError: `clip_model` must be an nn.Module; got
check.activation(make_clip(), 3, 'openai') -> TypeError: `name` must be a string; got 3
check.activation(make_clip(), 'ViT-B-16', None) -> TypeError: `pretrained` must be a string; got
check.activation(make_clip(), 'ViT-B-16', 'no such tag') -> ValueError: got no such tag
check.activation(make_clip(), 'ViT-B-16', '/home/weights.pt') -> ValueError: a tag that open_clip l
check.activation(make_clip(), 'no such model', 'openai') -> ValueError: lists for `no such model`;
fingerprint(nn.Identity()) -> TypeError: `backbone` must be a network with weights, or a trunk
fingerprint(vit_trunk(tiny_vit()), DeepPrompts(2, 12, 3)) -> TypeError: `streams[0]`
fingerprint(vit_trunk(tiny_vit()), class_names='cat') -> TypeError: `class_names` must be a
fingerprint(vit_trunk(tiny_vit()), class_names=[1]) -> TypeError: `class_names[0]` must
fingerprint(vit_trunk(tiny_vit()), name_position='end') -> TypeError: `name_position` must
""")
