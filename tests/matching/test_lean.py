"""Lean logits: values and gradients against the plain ones, and memory."""

import importlib
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compilers import COMPILERS
from fedprompt import transport_logits
from fedprompt.transport import newton
from refusals import refused
from tolerance import assert_near

lean = importlib.import_module("fedprompt.matching._lean")


def draw(batch=4, patches=9, prompts=2, classes=3, dim=6, *, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(batch, patches, dim, generator=generator, dtype=torch.float64) + 0.5
    text = torch.randn(prompts, classes, dim, generator=generator, dtype=torch.float64) + 0.5
    return images.to(dtype), text.to(dtype)


def plain(patches, text, *, scale, mass=0.8, lean=False, **options):
    solver = partial(newton, **options)
    return transport_logits(patches, text, scale=scale, mass=mass, solver=solver, lean=lean)


lean_logits = partial(plain, lean=True)


def with_gradients(logits, patches, text, scale, **options):
    """Return logits, and the gradients of a nonlinear loss by patches, text and scale."""
    inputs = patches, text, torch.as_tensor(scale, dtype=patches.dtype)
    inputs = [tensor.clone().requires_grad_() for tensor in inputs]
    patches, text, scale = inputs
    result = logits(patches, text, scale=scale, **options)
    return result.detach(), *torch.autograd.grad(result.sin().sum(), inputs)


def assert_equals_the_plain_form(patches, text, scale, *, rtol, atol, **options):
    """Compare logits and all gradients, which must be finite."""
    found = with_gradients(lean_logits, patches, text, scale, **options)
    expected = with_gradients(plain, patches, text, scale, **options)
    for own, other in zip(found, expected, strict=True):
        assert torch.isfinite(own).all()
        torch.testing.assert_close(own, other, rtol=rtol, atol=atol)


@given(
    batch=st.integers(1, 4),
    patches=st.integers(1, 20),
    prompts=st.integers(1, 5),
    classes=st.integers(1, 4),
    mass=st.sampled_from([0.05, 0.4, 0.8, 0.99, 1.0]),
    epsilon=st.sampled_from([0.01, 0.05, 0.1, 3.0]),
    chunk=st.sampled_from([1, 40, 10_000]),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=40, deadline=None)
def test_values_and_gradients_are_those_of_the_plain_form(
    batch, patches, prompts, classes, mass, epsilon, chunk, seed
):
    """For any shape, mass and epsilon, and any size of the blocks of images."""
    drawn = draw(batch, patches, prompts, classes, seed=seed)
    options = {"mass": mass, "epsilon": epsilon, "max_iterations": 300}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(lean.ENTRIES, "cpu", chunk)
        assert_equals_the_plain_form(*drawn, 7.0, rtol=0, atol=1e-11, **options)


@pytest.mark.parametrize(("epsilon", "tolerance"), [(0.1, 1e-5), (0.01, 1e-4)])
def test_float32(epsilon, tolerance):
    drawn = draw(8, 49, dtype=torch.float32)
    assert_equals_the_plain_form(*drawn, 10.0, epsilon=epsilon, rtol=tolerance, atol=tolerance)


def test_duals_beyond_the_range_of_float32():
    """At epsilon 0.001 the exponential of a dual overflows, but the plan is finite."""
    patches, text = draw(2, 30, dtype=torch.float32)
    text[1] = -text[0]  # costs from 0 to 2
    assert_equals_the_plain_form(patches, text, 10.0, epsilon=0.001, rtol=0, atol=1e-3)


def test_a_patch_of_zeros_has_the_gradient_of_the_plain_form():
    patches, text = draw()
    patches[0, 0] = 0
    assert_equals_the_plain_form(patches, text, 1.0, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("learning", [(True, False), (False, True), (False, False)])
def test_only_inputs_that_require_a_gradient_get_one(learning):
    patches, text = (
        tensor.requires_grad_(learns) for tensor, learns in zip(draw(), learning, strict=True)
    )
    logits = lean_logits(patches, text, scale=5.0)
    assert logits.requires_grad == any(learning)
    expected = with_gradients(plain, patches.detach(), text.detach(), 5.0)[1:3]
    if any(learning):
        logits.sin().sum().backward()
    for tensor, learns, gradient in zip((patches, text), learning, expected, strict=True):
        assert (tensor.grad is not None) == learns
        if learns:
            assert_near(tensor.grad, gradient)
    with torch.no_grad():
        assert not lean_logits(patches, text, scale=5.0).requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_features_and_autocast_are_matched_in_float32(dtype):
    patches, text = draw(dtype=dtype)
    expected = with_gradients(plain, patches.float(), text.float(), 10.0)
    half = [tensor.clone().requires_grad_() for tensor in (patches, text)]
    logits = lean_logits(*half, scale=10.0)
    assert logits.dtype == torch.float32
    assert_near(logits.detach(), expected[0])
    for own, other in zip(
        torch.autograd.grad(logits.sin().sum(), half), expected[1:3], strict=True
    ):
        assert own.dtype == dtype
        assert_near(own, other)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = with_gradients(lean_logits, patches.float(), text.float(), 10.0)
    for own, other in zip(inside[:3], expected[:3], strict=True):
        assert_near(own, other)


def saved(logits, patches, text):
    """Count the entries of the tensors that a graph saves, inputs excluded."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
    ):
        logits(patches, text.requires_grad_(), scale=5.0)
    inputs = {tensor.untyped_storage().data_ptr() for tensor in (patches, text)}
    return sum(
        tensor.numel() for tensor in kept if tensor.untyped_storage().data_ptr() not in inputs
    )


def test_the_graph_keeps_duals_and_no_plans():
    batch, patches, prompts, classes, dim = 6, 50, 2, 5, 4
    drawn = draw(batch, patches, prompts, classes, dim)
    entries, features = batch * patches * prompts * classes, prompts * classes * dim
    assert saved(plain, *drawn) >= entries
    # The duals, the logits for the scale, the normalized text twice and its norms.
    assert saved(lean_logits, *drawn) <= batch * classes * (prompts + 2) + 3 * features


@pytest.mark.parametrize("first", [0, 1], ids=["patches", "text"])
@pytest.mark.parametrize("second", [0, 1], ids=["patches", "text"])
@pytest.mark.parametrize("way", ["backward", "inputs"])
def test_a_second_derivative_is_refused_both_ways(first, second, way):
    """Autograd alone would return a part of it, through the norms of the features."""
    features = [tensor.requires_grad_() for tensor in draw()]
    logits = lean_logits(*features, scale=5.0)
    gradient = torch.autograd.grad(logits.sin().sum(), features[first], create_graph=True)[0]
    inputs = None if way == "backward" else features[second]  # as autograd.grad(..., inputs)
    message = "Lean logits are differentiable once; pass `lean=False`"
    with pytest.raises(RuntimeError, match=message):
        gradient.sum().backward(inputs=inputs)


def test_a_mixed_derivative_in_the_scale_is_allowed():
    """The gradient in the scale is the score, which can be differentiated once."""
    patches, text = draw()
    results = []
    for logits in (lean_logits, plain):
        scale = torch.tensor(5.0, dtype=torch.float64, requires_grad=True)
        own = text.clone().requires_grad_()
        (of_scale,) = torch.autograd.grad(
            logits(patches, own, scale=scale).sum(), scale, create_graph=True
        )
        results.append(torch.autograd.grad(of_scale, own)[0])
    assert_near(*results)


def test_an_empty_batch_gives_empty_logits_and_a_gradient_of_0():
    patches, text = draw()
    text.requires_grad_()
    logits = lean_logits(patches[:0], text, scale=10.0)
    assert logits.shape == (0, 3)
    logits.sum().backward()
    assert (text.grad == 0).all()


def test_no_argument_is_mutated():
    drawn = draw()
    before = [tensor.clone() for tensor in drawn]
    with_gradients(lean_logits, *drawn, 10.0)
    assert all(torch.equal(tensor, old) for tensor, old in zip(drawn, before, strict=True))


def natural_duals(cost, a, b, epsilon=0.1):
    """Refer log v to the cost itself."""
    coupling = newton(cost, a, b, epsilon=epsilon)
    return coupling._replace(duals=coupling.duals + cost.amin(-2) / epsilon)


def without_duals(cost, a, b, epsilon=0.1):
    return newton(cost, a, b, epsilon=epsilon)._replace(duals=None)


@pytest.mark.benchmark
@pytest.mark.parametrize("backend", COMPILERS)
def test_compiles_into_one_graph_with_its_gradient(backend):
    drawn = draw(dtype=torch.float32)
    compiled = torch.compile(lean_logits, fullgraph=True, backend=backend)
    for own, other in zip(
        with_gradients(compiled, *drawn, 10.0),
        with_gradients(lean_logits, *drawn, 10.0),
        strict=True,
    ):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)


X, H = draw()


def one_by_one(patches=X, text=H, **options):
    """Match one image at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(lean.ENTRIES, "cpu", 1)
        return transport_logits(patches, text, **{"scale": 1.0, "lean": True, **options})


test_wrong_calls_are_refused_by_name = refused(globals())("""
one_by_one(X / ones(4, 1, 1).index_fill(0, tensor(2), 0)) -> ValueError: must be finite; got
one_by_one(text=H / 0) -> ValueError: `text` must be finite; got
one_by_one(gradient=transport.implicit) -> ValueError: `gradient` must be plan_fixed for lean logits
one_by_one(solver=transport.independent) -> ValueError: an `epsilon` and duals for lean
one_by_one(solver=without_duals) -> ValueError: `solver` must return duals for lean logits
one_by_one(solver=transport.unbalanced) -> ValueError: `solver` must return duals for lean logits
one_by_one(solver=natural_duals) -> ValueError: `solver` must return the duals of its plans
one_by_one(strict=1) -> TypeError: `strict` must be True or False
one_by_one(lean=1) -> TypeError: `lean` must be True or False
""")
