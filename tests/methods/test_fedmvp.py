"""FedMVP: a step with the cross-attention by hand, and attributes of several sentences."""

import torch

import fedprompt as fp
from clips import TOKENIZER
from fedprompt.methods.fedmvp import _Multimodal, fedmvp
from references import deep_clip
from refusals import refused
from tiny_federations import clip_image_federation, descend, last

ATTRIBUTES = [["a cat with whiskers", "soft fur"], ["a dog that barks"], ["white", "cold", "big"]]


def normed(tokens, norm):
    centered = tokens - tokens.mean(-1, keepdim=True)
    scaled = centered / (tokens.var(-1, keepdim=True, correction=0) + norm.eps).sqrt()
    return scaled * norm.weight + norm.bias


def prompts_by_hand(network, patches, text):
    """Attend with four heads of width 4; the mean of two neighbors is one prompt."""
    keys = text @ network.project.weight.T + network.project.bias
    inputs = normed(patches, network.query_norm), normed(keys, network.key_norm), keys
    attention = network.attention
    weights, biases = attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3)
    queries, keys, values = (x @ w.T + b for x, w, b in zip(inputs, weights, biases, strict=True))
    heads = [
        (queries[..., part] @ keys[:, part].T / 2.0).softmax(-1) @ values[:, part]
        for part in torch.arange(16).split(4)
    ]
    out = attention.out_proj
    mixed = torch.cat(heads, -1) @ out.weight.T + out.bias
    wide = normed(mixed, network.norm) @ network.widen.weight.T + network.widen.bias
    gates = wide[..., 64:] * (1 + torch.erf(wide[..., 64:] / 2**0.5)) / 2
    mixed = mixed + (wide[..., :64] * gates) @ network.narrow.weight.T + network.narrow.bias
    return (mixed[:, ::2] + mixed[:, 1::2]) / 2


def test_steps_descend_the_cross_entropy_among_own_classes_and_the_consistency(float64):
    """The patches are 2 x 2, and two prompts are their means by row. Client 2 has two classes."""
    one = {"rounds": 1, "steps": 4, "cohort_size": 1, "clients": [2], "length": 2}
    made = clip_image_federation(**one, attributes=ATTRIBUTES, make_optimizer=torch.optim.SGD)
    made.labels[made.shards[2]] = made.labels[made.shards[2]].clamp(min=1)
    visual = made.clip.visual
    model = _Multimodal(made)
    units = [made.clip.encode_text(TOKENIZER(each), normalize=True) for each in ATTRIBUTES]
    draw, mirrored = made.data(2, 0).stream("mirror"), []
    for images, labels in made.batches(2, 0):
        mirrored.append(bool(torch.rand((), generator=draw) < 0.5))
        patches = visual.conv1(images).flatten(2).mT + visual.positional_embedding[1:]
        prompts = prompts_by_hand(model.network, patches, torch.cat(units[1:]))
        image = encode(visual, images, prompts)
        cosines = [(image @ each.T).mean(1) for each in units[1:]]
        logits = 10.0 * torch.stack(cosines, 1)
        loss = -logits.log_softmax(1)[range(len(labels)), labels - 1].mean()
        frozen = made.clip.encode_image(images.flip(3) if mirrored[-1] else images, normalize=True)
        loss = loss + 3.0 * (1 - (image * frozen).sum(1).mean())
        descend(loss, [*model.network.parameters()], 0.1)
    assert len(set(mirrored)) == 2
    found = last(fedmvp, made, learning_rate=0.1, consistency_weight=3.0).of(2)
    before, after = fp.snapshot(model), fp.snapshot(found)
    torch.testing.assert_close(after, before, rtol=0, atol=1e-12)


def encode(visual, images, prompts):
    rows = [
        deep_clip.encode_images(visual, image[None], own[None])
        for image, own in zip(images, prompts, strict=True)
    ]
    image = torch.cat(rows)
    return image / image.norm(dim=1, keepdim=True)


def test_without_attributes_a_class_has_its_template():
    made = clip_image_federation()
    text = torch.cat(made.attribute_text())
    torch.testing.assert_close(text, made.handwritten_text(), rtol=0, atol=0)


test_wrong_attributes_are_refused = refused(globals())("""
clip_image_federation(attributes=["a cat"]) -> ValueError: `attributes` must have sentences for each
clip_image_federation(attributes=[["x"], ["y"], []]) -> ValueError: `attributes[2]` must
clip_image_federation(attributes=["cat", "dog", "ash"]) -> TypeError: `attributes[0]` must
""")
