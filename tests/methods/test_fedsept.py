"""FedSEPT: a step with factors, residual and router, and the noise of the factors."""

import pytest
import torch

import fedprompt as fp
from clips import TOKENIZER
from fedprompt.methods.fedsept import _Experts, fedsept
from references import coop
from tiny_federations import clip_federation, last, parameters

pytestmark = pytest.mark.usefixtures("float64")

ONE = {"rounds": 1, "steps": 1, "cohort_size": 1, "clients": [2]}


def losses_by_hand(made, model, tokens, labels, weight):
    """Return the loss of each image; the logits of experts are mixed by softmax of the router."""
    contexts = torch.stack([factor @ model.basis + model.residual for factor in model.experts])
    text = coop.text_features(made.clip, TOKENIZER, contexts, made.class_names, made.length)
    text, losses = text / text.norm(dim=-1, keepdim=True), []
    value, output, norm, gate = model.router
    factors = [factor.flatten() / factor.norm() for factor in model.experts]
    pairs = [(a @ b) ** 2 for i, a in enumerate(factors) for b in factors[:i]]
    for image, label in zip(tokens[:, 0], labels, strict=True):
        image = image / image.norm()
        routed = output.weight @ (value.weight @ image + value.bias) + output.bias
        routed = (routed - routed.mean()) / (routed.var(correction=0) + norm.eps).sqrt()
        routed = norm.weight * routed + norm.bias
        shares = (gate.weight @ routed + gate.bias).exp()
        logits = 10.0 * sum(
            s / shares.sum() * (h @ image) for s, h in zip(shares, text, strict=True)
        )
        losses.append(-logits.log_softmax(0)[label] + weight * sum(pairs) / len(pairs))
    return losses


@pytest.mark.parametrize("private", [True, False])
def test_steps_clip_the_gradient_of_each_image_in_the_factors_alone(private):
    made = clip_federation(**ONE | {"steps": 2}, make_optimizer=torch.optim.SGD)
    options = {"num_experts": 3, "rank": 2, "diversity_weight": 2.0}
    noise = {"max_norm": 0.05, "noise_multiplier": 0.0, "private": private}
    found = parameters(last(fedsept, made, learning_rate=0.1, **options, **noise), 2)
    model = made.seeded(_Experts, made, 3, 2)
    values = [*model.parameters()]
    for tokens, labels in made.batches(2, 0):
        losses = losses_by_hand(made, model, tokens, labels, 2.0)
        steps = [*torch.autograd.grad(sum(losses) / len(losses), values, retain_graph=True)]
        if private:
            clipped = 0
            for loss in losses:
                (gradient,) = torch.autograd.grad(loss, values[0], retain_graph=True)
                clipped = clipped + gradient * min(1.0, 0.05 / float(gradient.norm()))
                assert gradient.norm() > 0.05
            steps[0] = clipped / len(losses)
        with torch.no_grad():
            for value, step in zip(values, steps, strict=True):
                value -= 0.1 * step
    torch.testing.assert_close(found, fp.snapshot(model), rtol=0, atol=1e-13)


def test_factors_and_gate_start_near_zero_and_the_residual_at_zero():
    torch.manual_seed(0)
    model = _Experts(clip_federation(length=20), 60, 90)
    gate = model.router[-1]
    for drawn, deviation in ((model.basis, 0.02), (model.experts, 0.02), (gate.weight, 0.01)):
        assert drawn.std().item() == pytest.approx(deviation, rel=0.1)
        assert drawn.mean().abs() < 0.1 * deviation
    assert not gate.bias.any()
    assert not model.residual.any()


def test_the_noise_of_the_factors_has_the_deviation_of_the_multiplier():
    made = clip_federation(**ONE, make_optimizer=torch.optim.SGD)
    exact, noisy = (
        parameters(last(fedsept, made, learning_rate=1.0, noise_multiplier=multiplier), 2)
        for multiplier in (0.0, 3.0)
    )
    noise = (noisy["experts"] - exact["experts"]) * made.batch_size / 3.0
    assert 0.85 < noise.std() < 1.15
    assert noise.mean().abs() < 0.3
    assert torch.equal(noisy["residual"], exact["residual"])
