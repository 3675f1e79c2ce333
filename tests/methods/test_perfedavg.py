"""Per-FedAvg: its steps have the gradient of the loss after adaptation, with or without Hessian."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

import fedprompt as fp
from fedprompt.methods.perfedavg import perfedavg, perfedavg_first_order
from tiny_federations import descend, last, parameters, vit_federation

ONE_STEP = {"clients": [3], "cohort_size": 1, "rounds": 1, "steps": 1}


def step(method, inner_rate=0.8):
    """Return the gradient of one step of a method, and all that it is computed from."""
    federation = vit_federation(**ONE_STEP, make_optimizer=torch.optim.SGD)
    predictions = last(method, federation, learning_rate=0.5, inner_rate=inner_rate)
    model = federation.new_model()
    start, after = fp.snapshot(model), fp.snapshot(predictions.received(5))
    ((images, labels),) = federation.batches(3, 0)
    gradient = {name: (start[name] - after[name]).double() / 0.5 for name in start}
    return gradient, start, model, images, labels


def losses(model, images, labels):
    """Return the losses of the adapting and of the judging half, as functions of parameters."""

    def loss(part):
        def of(values):
            return F.cross_entropy(functional_call(model, values, (images[part],)), labels[part])

        return of

    return loss(slice(0, None, 2)), loss(slice(1, None, 2))


def flat(values):
    return torch.cat([value.flatten().double() for value in values.values()])


def gradient_of(loss, values, **options):
    found = torch.autograd.grad(loss(values), list(values.values()), **options)
    return dict(zip(values, found, strict=True))


def adapted(values, first):
    return {name: (values[name] - 0.8 * first[name]).detach().requires_grad_() for name in values}


def test_the_exact_gradient_is_that_of_the_paper_with_an_explicit_hessian():
    r""":math:`(I - \alpha \nabla^2 f(w))\, \nabla f'(w - \alpha \nabla f(w))`, row by row."""
    gradient, start, model, images, labels = step(perfedavg)
    adapting, judging = losses(model, images, labels)
    values = {name: value.requires_grad_() for name, value in start.items()}
    with sdpa_kernel(SDPBackend.MATH):
        first = gradient_of(adapting, values, create_graph=True)
        rows = [
            flat(gradient_of(lambda _, number=number: number, values, retain_graph=True))
            for each in first.values()
            for number in each.flatten()
        ]
        outer = flat(gradient_of(judging, adapted(values, first)))
    expected = outer - 0.8 * torch.stack(rows) @ outer
    torch.testing.assert_close(flat(gradient), expected, rtol=1e-3, atol=1e-5)
    assert (flat(gradient) - outer).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("method", "rate"),
    [(perfedavg_first_order, 0.8), (perfedavg_first_order, 0.0), (perfedavg, 0.0)],
)
def test_the_first_order_gradient_leaves_out_the_hessian_as_do_both_without_adaptation(
    method, rate
):
    """Without adaptation, it is plain descent on the judging half."""
    gradient, start, model, images, labels = step(method, inner_rate=rate)
    adapting, judging = losses(model, images, labels)
    values = {name: value.requires_grad_() for name, value in start.items()}
    values = adapted(values, gradient_of(adapting, values)) if rate else values
    expected = flat(gradient_of(judging, values))
    torch.testing.assert_close(flat(gradient), expected, rtol=1e-3, atol=1e-5)


def test_a_client_adapts_with_one_gradient_step_on_all_its_images():
    federation = vit_federation()
    predictions = last(perfedavg_first_order, federation, inner_rate=0.3)
    model = federation.new_model()
    fp.load_values(model, fp.snapshot(predictions.received(5)))
    images, labels = federation.own(2)
    descend(F.cross_entropy(model(images), labels), model.parameters(), 0.3)
    torch.testing.assert_close(parameters(predictions, 2), fp.snapshot(model))
