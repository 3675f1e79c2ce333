"""PLOT: a step against the published algorithm, with one image and one class at a time."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from clips import TOKENIZER
from fedprompt.interfaces import Coupling
from fedprompt.methods import fedplot
from fedprompt.transport import newton
from references import coop
from references import fedotp as reference
from references.transport import slow_plan
from tiny_federations import clip_federation, last


def sinkhorn(cost, a, b):
    """Scale rows and columns until the rows change by less than 0.01, in at most 100 iterations."""
    kernel, rows, columns = torch.exp(-cost / 0.1), torch.ones_like(a), torch.ones_like(b)
    for _ in range(100):
        before, rows = rows, a / (kernel @ columns)
        columns = b / (kernel.T @ rows)
        if (rows - before).abs().mean() < 1e-2:
            break
    return rows[:, None] * kernel * columns


def as_solver(plan, cost, a, b):
    plans = torch.stack([plan(one, a, b) for one in cost.flatten(0, 1)]).reshape(cost.shape)
    zeros = cost.new_zeros(cost.shape[:2])
    return Coupling(plans, zeros, zeros.long(), a, b, 0.1)


def at_rest(cost, a, b):
    return slow_plan(cost, a, b, epsilon=0.1, tolerance=1e-14)


@pytest.mark.parametrize(
    ("solver", "plan", "tolerance"),
    [(partial(newton, tolerance=1e-13), at_rest, 1e-10), (None, sinkhorn, 1e-12)],
    ids=["at rest", "published"],
)
@pytest.mark.parametrize("pooled", [False, True])
def test_a_step_is_the_published_one(float64, solver, plan, tolerance, pooled):
    one = {"rounds": 1, "steps": 1, "cohort_size": 1, "clients": [2]}
    made = clip_federation(**one, make_optimizer=torch.optim.SGD)
    options = {"num_contexts": 3, "solver": solver or partial(as_solver, sinkhorn)}
    start = fedplot(made, **options).server.state["values"]["context.context"]
    context = start.clone().requires_grad_()
    text = coop.text_features(made.clip, TOKENIZER, context, made.class_names, made.length)
    ((tokens, labels),) = made.batches(2, 0)
    match = partial(reference.logits, scale=10.0, mass=1.0, plan=plan)
    logits = torch.stack([match(image[1:], text) for image in tokens])
    if pooled:
        units = F.normalize(tokens[:, 0], dim=1), F.normalize(text.mean(0), dim=1)
        logits = logits + 10.0 * units[0] @ units[1].T
    loss = -logits.log_softmax(1)[range(len(labels)), labels].mean()
    (step,) = torch.autograd.grad(loss, context)
    found = last(fedplot, made, learning_rate=0.1, pooled=pooled, **options).of(0)
    assert step.abs().max() > 1e-4
    expected = start - 0.1 * step
    torch.testing.assert_close(found.context.context.detach(), expected, rtol=0, atol=tolerance)
