"""Cosine logits and transport logits against loops over the equations."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from compilers import COMPILERS
from fedprompt import cosine_logits, transport_logits
from fedprompt.transport import dykstra, envelope, exact, implicit, independent, newton, sinkhorn
from references import fedotp
from references.transport import marginals, slow_plan
from refusals import refused
from tolerance import assert_near

BATCH, PATCHES, PROMPTS, CLASSES, DIM = 3, 7, 2, 4, 5


def draw(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    patches = torch.randn(BATCH, PATCHES, DIM, generator=generator, dtype=torch.float64)
    text = torch.randn(PROMPTS, CLASSES, DIM, generator=generator, dtype=torch.float64)
    return patches.to(dtype), text.to(dtype)


@pytest.mark.parametrize("mass", [0.3, 0.8, 1.0])
@pytest.mark.parametrize("epsilon", [0.1, 0.3])
def test_transport_logits_follow_the_equations(mass, epsilon):
    """Law T-k: the paper prints scale * (1 - distance), which differs by a constant."""
    patches, text = draw()
    solver = partial(newton, epsilon=epsilon, tolerance=1e-12)
    plan = partial(slow_plan, epsilon=epsilon)
    printed = torch.stack(
        [fedotp.logits(image, text, scale=50.0, mass=mass, plan=plan) for image in patches]
    )
    found = transport_logits(patches, text, scale=50.0, mass=mass, solver=solver)
    torch.testing.assert_close(found, printed - 50 * (1 - mass), rtol=0, atol=1e-7)


def test_one_prompt_at_full_mass_is_the_mean_similarity():
    patches, text = draw()
    mean = F.normalize(patches, dim=-1).mean(1) @ F.normalize(text[0], dim=-1).T
    for solver in (newton, dykstra, sinkhorn, exact, independent):
        assert_near(
            transport_logits(patches, text[:1], scale=10.0, mass=1.0, solver=solver),
            10 * mean,
            dtype=torch.float32,
        )


def test_the_gradient_holds_the_plan_fixed():
    """Law T-l: autograd runs through the similarity only. The exact gradient differs."""
    patches, text = draw()
    text.requires_grad_()
    (gradient,) = torch.autograd.grad(transport_logits(patches, text, scale=20.0).sin().sum(), text)

    similarity = torch.einsum(
        "bvd,pkd->bkvp", F.normalize(patches, dim=-1), F.normalize(text, dim=-1)
    )
    a, b = marginals(PATCHES, PROMPTS, 0.8)
    plan = newton((1 - similarity).detach(), a, b).plan
    (expected,) = torch.autograd.grad((20.0 * (plan * similarity).sum((2, 3))).sin().sum(), text)
    assert_near(gradient, expected, dtype=torch.float32)
    (moving,) = torch.autograd.grad(
        transport_logits(patches, text, scale=20.0, gradient=implicit).sin().sum(), text
    )
    assert not torch.allclose(moving, gradient, rtol=1e-2)


@pytest.mark.parametrize("gradient", [implicit, envelope])
def test_gradients_of_logits_are_those_of_finite_differences(gradient):
    patches, text = draw()
    logits = partial(
        transport_logits,
        scale=5.0,
        solver=partial(newton, epsilon=0.3, tolerance=1e-13),
        gradient=gradient,
    )
    assert torch.autograd.gradcheck(
        lambda x, h: logits(x, h),
        (patches[:1, :4].requires_grad_(), text[:, :2].requires_grad_()),
        atol=1e-5,
    )


def test_cosine_logits_are_cosines():
    patches, text = draw()
    image, classes = patches[:, 0], text[0]
    expected = torch.stack(
        [torch.stack([7 * (x @ h) / (x.norm() * h.norm()) for h in classes]) for x in image]
    )
    torch.testing.assert_close(cosine_logits(image, classes, scale=7.0), expected)
    torch.testing.assert_close(
        cosine_logits(3 * image, 0.1 * classes, scale=torch.tensor(7.0, dtype=torch.float64)),
        expected,
    )


def test_cosine_logits_take_text_of_each_image():
    """Each image is compared with its own text, as with contexts that depend on the image."""
    patches, text = draw()
    image = patches[:, 0]
    own = torch.stack([text[0], 2 * text[1], text[0] - text[1]]).requires_grad_()
    logits = cosine_logits(image, own, scale=7.0)
    pairs = zip(image, own, strict=True)
    cosines = [7 * (x @ h) / (x.norm() * h.norm()) for x, its in pairs for h in its]
    expected = torch.stack(cosines).view(own.shape[:2])
    torch.testing.assert_close(logits, expected)
    (gradient,) = torch.autograd.grad(logits.sin().sum(), own)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.sin().sum(), own)[0])
    assert_near(
        cosine_logits(image, text[0].expand(3, -1, -1), scale=7.0),
        cosine_logits(image, text[0], scale=7.0),
    )
    assert cosine_logits(image[:0], own[:0], scale=7.0).shape == (0, CLASSES)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_features_and_autocast_are_matched_in_float32(dtype):
    patches, text = draw(dtype)
    expected = transport_logits(patches.float(), text.float(), scale=10.0)
    for logits in (
        transport_logits(patches, text, scale=10.0),
        transport_logits(patches.float(), text, scale=10.0),
    ):
        assert logits.dtype == torch.float32
        assert_near(logits, expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_near(transport_logits(patches.float(), text.float(), scale=10.0), expected)
        pooled = cosine_logits(patches[:, 0], text[0], scale=10.0)
    assert_near(pooled, cosine_logits(patches[:, 0].float(), text[0].float(), scale=10.0))


def test_an_empty_batch_gives_empty_logits():
    patches, text = draw()
    assert transport_logits(patches[:0], text, scale=1.0).shape == (0, CLASSES)
    assert cosine_logits(patches[:0, 0], text[0], scale=1.0).shape == (0, CLASSES)


@pytest.mark.benchmark
@pytest.mark.parametrize("backend", COMPILERS)
@pytest.mark.parametrize("gradient", [None, implicit])
def test_logits_and_their_gradient_compile_into_one_graph(gradient, backend):
    patches, text = draw(torch.float32)
    options = {} if gradient is None else {"gradient": gradient}

    def run(function):
        own = text.clone().requires_grad_()
        logits = function(patches, own, scale=10.0, **options)
        logits.sin().sum().backward()
        return logits.detach(), own.grad

    compiled = torch.compile(transport_logits, fullgraph=True, backend=backend)
    for own, eager in zip(run(compiled), run(transport_logits), strict=True):
        torch.testing.assert_close(own, eager, rtol=1e-3, atol=1e-3)


X, H = draw()


def plan(x=X, h=H, *, scale=1.0, **options):
    return transport_logits(x, h, scale=scale, **options)


test_wrong_calls_are_refused_by_name = refused(globals())("""
plan(X[0]) -> ValueError: `patches` must have
plan(X[:, :0]) -> ValueError: `patches` must have
plan(X, H[0]) -> ValueError: `text` must have
plan(X, H[:0]) -> ValueError: `text` must have shape
plan(X, H[..., 1:]) -> ValueError: `text` must have
plan(X.long()) -> TypeError: `patches` must be a
plan(X, H.float()) -> TypeError: the dtype of `patches`, torch.float64; got torch.float32
plan(X * nan) -> ValueError: `patches` must be finite
plan(mass=1.2) -> ValueError: `mass` must be
plan(mass=0.0) -> ValueError: `mass` must be
plan(scale=tensor(-1.0)) -> ValueError: `scale` must be above 0; got -1.0
plan(scale=tensor(0.0)) -> ValueError: `scale` must be above 0; got 0.0
plan(scale=tensor(nan)) -> ValueError: `scale` must be finite; got 1 entries
plan(scale=-1.0) -> ValueError: `scale` must be above 0
plan(scale=ones(2)) -> TypeError: `scale` must be
plan(scale='1') -> TypeError: `scale` must be a number
plan(solver=3) -> TypeError: `solver` must be a function; got 3
plan(solver=lambda *_: None) -> TypeError: `solver` must return a Coupling; got None
plan(gradient=lambda *_: None) -> TypeError: `gradient` must return a tensor; got None
plan(gradient=lambda *_: zeros(1)) -> ValueError: `gradient` must have the shape of the problems
plan(solver=sinkhorn) -> ValueError: `b` must sum to the sum of `a`
cosine_logits(X, H[0], scale=1.0) -> ValueError: `image` must have shape
cosine_logits(X[0], H[0].to('meta'), scale=1.0) -> ValueError: `text` must
cosine_logits(X[0], H[0], scale=ones((), device='meta')) -> ValueError: on the device cpu; got meta
cosine_logits(X[:, 0], H[0, 0], scale=1.0) -> ValueError: `text` must
cosine_logits(X[:, 0], H, scale=1.0) -> ValueError: such as text[0] of
cosine_logits(X[:, 0], H[0, :0], scale=1.0) -> ValueError: `text` must
""")
