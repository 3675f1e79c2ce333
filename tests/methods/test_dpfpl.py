"""DP-FPL: one image moves the shared context by at most its sensitivity, and noise matches it."""

import pytest
import torch
import torch.nn.functional as F

from fedprompt import privacy
from fedprompt.methods.dpfpl import _factors, _gradients, _projected, dpfpl
from tiny_federations import clip_federation, last

STEP = {"learning_rate": 0.5, "max_norm": 0.2, "rank": 2}


def contexts(federation, **values):
    """Run one step of two clients, and return the shared and the private context of client 0."""
    changes = {"rounds": 1, "steps": 1, "clients": [0, 1], "cohort_size": 2}
    for name, value in changes.items():
        setattr(federation, name, value)
    predictions = last(dpfpl, federation, **STEP, **values)
    new, own = (predictions.of(client).context().detach()[0].clone() for client in (5, 0))
    rng = federation.generator(0, purpose="private")
    shared = new - torch.empty_like(new).normal_(0, 0.02, generator=rng)
    return shared, own - shared


def test_another_image_moves_the_shared_context_by_at_most_twice_the_bound():
    """Without clipping, an image of client 0 would move it much further."""
    before, _ = contexts(clip_federation(), noise_multiplier=0.0)
    other = clip_federation()
    (chosen, _), *_ = [next(clip_federation(steps=1).batches(0, 0))]
    other.inputs = other.inputs.clone()
    other.inputs[(other.inputs == chosen[0]).all(-1).all(-1)] *= -1
    after, _ = contexts(other, noise_multiplier=0.0)
    bound = STEP["learning_rate"] * 2 * STEP["max_norm"] / (4 * 2)  # batch of 4, two clients
    moved = float((after - before).norm())
    assert 0.1 * bound < moved <= bound * (1 + 1e-5)
    each = _gradients(clip_federation().new_model(), *next(clip_federation().batches(0, 0)))
    assert (each.flatten(1).norm(dim=1) > STEP["max_norm"]).all()


@pytest.mark.parametrize("multiplier", [2.0, 6.0])
def test_noise_has_the_deviation_of_the_gaussian_mechanism(multiplier):
    plain, own = contexts(clip_federation(), noise_multiplier=0.0)
    noisy, own_noisy = contexts(clip_federation(), noise_multiplier=multiplier)
    one_client = STEP["learning_rate"] * multiplier * STEP["max_norm"] / 4
    numbers = noisy.numel()
    assert float((noisy - plain).std()) == pytest.approx(one_client / 2, rel=0.3)
    # The private noise fills r columns and r rows, and each is orthonormal to its factor.
    rank, (length, dim) = STEP["rank"], own.shape
    filled = (rank * (length + dim - rank)) / numbers
    deviation = float((own_noisy - own).square().mean().sqrt())
    assert deviation == pytest.approx(0.1 * one_client * filled**0.5, rel=0.3)


def test_without_noise_and_bound_the_private_step_is_the_projected_gradient():
    federation = clip_federation(rounds=1, steps=1, clients=[0], cohort_size=1)
    values = {"learning_rate": 0.5, "max_norm": 1e6, "rank": 2, "noise_multiplier": 0.0}
    predictions = last(dpfpl, federation, **values)
    found = predictions.of(0).context().detach()[0].clone()
    model = clip_federation().new_model()
    shared = model.context().detach()[0].clone()
    rng = federation.generator(0, purpose="private")
    private = torch.empty_like(shared).normal_(0, 0.02, generator=rng)
    model.context.context.data = (shared + private)[None]
    tokens, labels = next(federation.batches(0, 0))
    F.cross_entropy(model(tokens), labels).backward()
    gradient = model.context.context.grad[0] * len(labels) / federation.batch_size
    u, v = _factors(private, 2, federation.generator(0, 0, purpose="noise"))
    outside = (torch.eye(len(u)) - u @ u.T) @ gradient @ (torch.eye(v.shape[1]) - v.T @ v)
    expected = shared + private - 0.5 * gradient - 0.05 * (gradient - outside)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_steps_of_a_round_have_batches_of_their_own_and_go_on_with_their_noise():
    made = clip_federation(rounds=1, steps=3, clients=[0], cohort_size=1)
    found = last(dpfpl, made, **STEP, noise_multiplier=2.0).of(0).context().detach()[0]
    model, bound = made.new_model(), {"max_norm": STEP["max_norm"]}
    shared = model.context().detach()[0].clone()
    rng = made.generator(0, purpose="private")
    private = torch.empty_like(shared).normal_(0, 0.02, generator=rng)
    own, server = (made.generator(0, *of, purpose="noise") for of in ((0,), ()))

    def noisy(gradients, draw):
        options = {"expected_batch_size": made.batch_size, "generator": draw, "multiplier": 2.0}
        total = privacy.clipped_sum({"": gradients}, **bound)
        return privacy.noisy_mean(total, **options, **bound)[""].float()

    for batch in made.batches(0, 0):
        model.context.context.data = (shared + private)[None]
        each = _gradients(model, *batch)
        u, v = _factors(private, 2, own)
        of_u, of_v = noisy(each @ v.T, own), noisy(u.T @ each, own)
        private = private - 0.05 * _projected(of_u, of_v, u, v)
        shared = shared - 0.5 * noisy(each, server)
    torch.testing.assert_close(found, shared + private)


def test_factors_are_orthonormal_and_exact_for_a_context_of_their_rank():
    rng = torch.Generator().manual_seed(0)
    private = torch.randn(4, 2, generator=rng) @ torch.randn(2, 9, generator=rng)
    u, v = _factors(private, 2, rng)
    torch.testing.assert_close(u.T @ u, torch.eye(2))
    torch.testing.assert_close(v @ v.T, torch.eye(2))
    torch.testing.assert_close(u @ (u.T @ private @ v.T) @ v, private, rtol=1e-4, atol=1e-5)
