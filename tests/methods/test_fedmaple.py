"""FedMaPLe: visual prompts are projections of the text prompts, at every layer of both towers."""

import torch

import fedprompt as fp
from clips import TOKENIZER
from fedprompt.methods.fedmaple import _Coupled, fedmaple
from references import deep_clip
from tiny_federations import clip_image_federation, last


def test_logits_are_those_of_both_towers_with_the_prompts_of_each_layer(new_models):
    federation = clip_image_federation()
    federation.clip.visual.ln_pre.weight.data = torch.linspace(0.5, 2, 16)
    model = last(fedmaple, federation).of(0)
    images = federation.inputs[:4]
    text = model.prompts.context.detach()
    layers = zip(text, model.project, strict=True)
    visual = torch.stack([each @ project.weight.T + project.bias for each, project in layers])
    image = deep_clip.encode_images(federation.clip.visual, images, visual)
    classes = deep_clip.encode_names(federation.clip, TOKENIZER, text, federation.class_names)
    torch.testing.assert_close(model(images), fp.cosine_logits(image, classes, scale=10.0))


def test_gradients_of_the_image_reach_the_text_prompts_through_the_projections_alone():
    federation = clip_image_federation()
    found = []
    for factor in (1.0, 0.0):
        model = _Coupled(federation)
        for project in model.project:
            project.weight.data *= factor
        model.tower = lambda *text: torch.eye(12)[:3, None].transpose(0, 1)  # constant classes
        logits = model(federation.inputs[:2])
        found.append(torch.autograd.grad(logits.square().sum(), model.prompts.context)[0])
    assert (found[0].flatten(1).norm(dim=1) > 1e-4).all()
    assert not found[1].any()
