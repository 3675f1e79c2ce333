"""FedIVLP and FedVPT on CLIP: prompts of the first layers of both towers, or of one."""

import pytest
import torch
import torch.nn.functional as F

import fedprompt as fp
from clips import TOKENIZER
from fedprompt.methods import fedivlp, fedvpt_clip
from references import deep_clip
from tiny_federations import clip_image_federation, last

pytestmark = pytest.mark.usefixtures("float64", "new_models")


@pytest.mark.parametrize("depth", [1, None])
@pytest.mark.parametrize("method", [fedivlp, fedvpt_clip])
def test_a_step_descends_the_cross_entropy_of_the_towers_with_prompts(method, depth):
    one = {"rounds": 1, "steps": 1, "cohort_size": 1, "clients": [2]}
    federation = clip_image_federation(**one, make_optimizer=torch.optim.SGD)
    federation.clip.visual.ln_pre.weight.data = torch.linspace(0.5, 2, 16)
    start = method(federation, depth=depth).server.state["values"]
    assert all(len(tokens) == (depth or 2) for tokens in start.values())
    values = {name: tokens.clone().requires_grad_() for name, tokens in start.items()}
    ((images, labels),) = federation.batches(2, 0)
    image = deep_clip.encode_images(federation.clip.visual, images, values["prompts.tokens"])
    text = federation.handwritten_text()
    if method is fedivlp:
        text = (federation.clip, TOKENIZER, values["context.context"], federation.class_names)
        text = deep_clip.encode_names(*text)
    logits = 10.0 * F.normalize(image, dim=1) @ F.normalize(text, dim=1).T
    loss = -logits.log_softmax(1)[range(len(labels)), labels].mean()
    steps = torch.autograd.grad(loss, [*values.values()])
    model = last(method, federation, learning_rate=0.1, depth=depth).of(0)
    found = fp.snapshot(model, only=list(values))
    for (name, value), step in zip(start.items(), steps, strict=True):
        assert step.abs().max() > 1e-6
        torch.testing.assert_close(found[name], value - 0.1 * step, rtol=0, atol=1e-13)
