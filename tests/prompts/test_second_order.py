"""Second-order gradients of prompts, with plain attention."""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedprompt import DeepPrompts, encode_prompted
from tolerance import assert_near


def test_a_hessian_vector_product_equals_finite_differences(trunk, images, generator):
    prompts = DeepPrompts(2, trunk, generator=generator).double()
    direction = torch.randn(prompts.tokens.shape, generator=generator, dtype=torch.float64)

    def gradient():
        loss = encode_prompted(trunk, images, prompts()).pooled.square().mean()
        return torch.autograd.grad(loss, prompts.tokens, create_graph=True)[0]

    with sdpa_kernel(SDPBackend.MATH):
        (product,) = torch.autograd.grad((gradient() * direction).sum(), prompts.tokens)
        ends = []
        for sign in (1, -1):
            with torch.no_grad():
                prompts.tokens += sign * 1e-5 * direction
            ends.append(gradient().detach())
            with torch.no_grad():
                prompts.tokens -= sign * 1e-5 * direction
    difference = (ends[0] - ends[1]) / 2e-5
    assert product.abs().max() > 1e-6
    assert_near(product, difference, dtype=torch.float32)
