"""Speed and memory of transport.

With ``--check``, sizes are those below and ratios are asserted. Otherwise, batches are small.

Problems have costs like those of zero-shot CLIP, epsilon 0.1 and mass 0.8. The published loop is
re-implemented, and runs until the error is 1e-6. Its published stopping rule leaves an error of
1e-3.
"""

from functools import partial

import pytest
import torch

from fedprompt import transport_logits
from fedprompt.transport import newton
from references.transport import marginals, planted_cost, published_plan

pytestmark = pytest.mark.benchmark


def draw(batch, classes, patches, prompts=2):
    """Draw problems in the memory layout of :func:`transport_logits`."""
    generator = torch.Generator().manual_seed(0)
    cost = (
        planted_cost("clip", (batch, classes, prompts, patches), generator).float().transpose(2, 3)
    )
    return cost, *marginals(patches, prompts, 0.8, torch.float32)


def published(cost, a, b):
    flat = cost.flatten(0, -3).contiguous()
    return published_plan(
        flat, a.expand(len(flat), -1), b.expand(len(flat), -1), epsilon=0.1, threshold=1e-6
    )


@pytest.mark.parametrize(
    ("batch", "classes", "patches", "eager", "compiled"),
    [(32, 100, 196, 15.0, 40.0), (32, 10, 49, 1.5, 5.0)],
)
def test_newton_against_the_published_loop(meter, batch, classes, patches, eager, compiled):
    if not meter.check and patches == 49:
        return  # inductor would compile the same solver for one more size
    batch = meter.size(batch)
    problem, solve = draw(batch, classes, patches), partial(newton, tolerance=1e-6)
    fused, plan = torch.compile(solve, fullgraph=True), published(*problem)
    for result in (solve(*problem), fused(*problem)):  # the first call compiles the solver
        assert result.error.max() <= 1e-6
        torch.testing.assert_close(result.plan.flatten(0, 1), plan, rtol=0, atol=1e-7)
    calls = {
        "published": partial(published, *problem),
        "eager": partial(solve, *problem),
        "compiled": partial(fused, *problem),
    }
    title = f"{batch} x {classes} problems, {patches} patches, published loop / newton"
    unsettled, seconds = meter.seconds(**calls), meter.seconds(settled=True, **calls)
    for name, goal in (("eager", eager), ("compiled", compiled)):
        meter.report(f"{title}, {name}", seconds["published"] / seconds[name], at_least=goal)
        meter.report(
            f"{title}, {name}, first call after another function",
            unsettled["published"] / unsettled[name],
        )


def test_close_to_full_mass(meter):
    cost, a, b = draw(1, 100, 196)
    coupling = newton(cost, a, b * 0.999 / 0.8, tolerance=1e-6)
    assert coupling.error.max() <= 1e-6
    meter.report("evaluations at mass 0.999", float(coupling.iterations.max()), at_most=15)


def test_memory(meter):
    batch = meter.size(16)
    problem = draw(batch, 100, 196)
    peak = meter.peak_bytes(solve=partial(newton, *problem))["solve"]
    cost = problem[0].numel() * 4
    meter.report("newton, peak memory without the cost / the cost", peak / cost)
    many = draw(8 * batch, 100, 196)
    grown = meter.peak_bytes(solve=partial(newton, *many))["solve"]
    meter.report(
        "newton, eight times the problems, peak memory / the cost", grown / (8 * cost), at_most=2.0
    )


def test_logits_forward_and_backward(meter):
    generator = torch.Generator().manual_seed(0)
    patches = torch.randn(meter.size(32), 196, 512, generator=generator)
    text = torch.randn(2, 100, 512, generator=generator, requires_grad=True)

    def products():
        units = (
            torch.nn.functional.normalize(patches, dim=-1),
            torch.nn.functional.normalize(text, dim=-1),
        )
        torch.einsum("bvd,pkd->bkpv", *units).sum().backward()

    def logits():
        transport_logits(patches, text, scale=100.0).sum().backward()

    title = "transport_logits and its matrix products alone, forward and backward"
    meter.compare(title, "logits / products, time", products=products, logits=logits)


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "classes"), [(32, 100), (128, 1000)])
def test_newton_on_a_gpu(meter, batch, classes):
    drawn = [tensor.cuda() for tensor in draw(batch, classes, 196)]
    title = f"{batch} x {classes} problems, 196 patches, on a GPU, microseconds"
    meter.report(title, meter.microseconds(partial(newton, *drawn)))


def test_lean_logits(meter):
    """Compare the memory of plain autograd and of the lean form.

    Plain autograd stores costs and plans of the whole batch. The lean form stores the duals, and
    costs and plans of a few images.
    """
    generator = torch.Generator().manual_seed(0)
    num_images = meter.size(64, brief=4)  # two blocks of the lean form
    patches = torch.randn(num_images, 196, 512, generator=generator)
    text = torch.randn(2, 250, 512, generator=generator, requires_grad=True)

    def step(logits):
        (gradient,) = torch.autograd.grad(
            logits(patches, text, scale=100.0).logsumexp(1).sum(), text
        )
        return gradient

    calls = {
        "plain": partial(step, transport_logits),
        "lean": partial(step, partial(transport_logits, lean=True)),
    }
    torch.testing.assert_close(calls["lean"](), calls["plain"](), rtol=0, atol=1e-4)
    title = f"logits of {num_images} images for 250 classes, forward and backward"
    ratios = """
        plain / lean, memory >= 10.0
        plain / lean, time
    """
    found = meter.compare(title, ratios, **calls)
    costs = num_images * 250 * 2 * 196 * 4
    meter.report("lean logits, peak / the costs of the batch", found["memory"]["lean"] / costs)
