"""Pieces of DP-SGD: Poisson sampling, per-sample gradients, a clipped sum, and noise."""

from collections.abc import Mapping

import torch
import torch.nn as nn
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

import fedprompt._refusals as check
from fedprompt._threads import reading
from fedprompt.privacy._copies import twin_of
from fedprompt.privacy._randomness import check_source, coins, deviation, with_noise
from fedprompt.privacy.clipping import clip_factors, scaled_down

_LARGEST = 10**10
"""Largest number of examples from which a batch is drawn. One random number is drawn for each."""


def poisson_batch(
    num_examples: int, *, rate: float, generator: torch.Generator | None = None
) -> Int[Tensor, " batch"]:
    """Draw a batch that contains each example independently with probability `rate`.

    Privacy accountants of DP-SGD assume this sampling.

    Args:
        num_examples: Number of examples (at least 1, at most 10 billion). One random number is
            drawn for each of them, so a billion takes about a minute.
        rate: Probability of each example (above 0, at most 1). The expected batch size is
            ``rate * num_examples``.
        generator: Random generator for tests and reproducible studies (seeded, on the CPU). If
            None, the operating system's entropy is used, as privacy requires.

    Returns:
        Indices in ascending order. The batch may be empty. The optimizer must then still take its
        step, which consists of noise only.

    Raises:
        ValueError: If a number is out of range, or `generator` was never seeded.

    Example:
        The seeded generator makes this example reproducible.

        >>> draw = torch.Generator().manual_seed(0)
        >>> [len(poisson_batch(100, rate=0.1, generator=draw)) for _ in range(5)]
        [6, 10, 5, 7, 14]

    References:
        Abadi et al., "Deep Learning with Differential Privacy", CCS 2016.
    """
    reason = "because one random number is drawn for each"
    check.count("num_examples", num_examples, at_most=_LARGEST, of=reason)
    check.number("rate", rate, above=0, at_most=1)
    check_source(generator)
    return coins(num_examples, rate=rate, generator=generator)


def per_sample(model: nn.Module, batch_size: int) -> nn.Module:
    r"""Make a model in which every sample has a separate copy of each trainable parameter.

    The gradients of the copies are the gradients of single samples. Run the returned model once, as
    you run `model`, and call ``backward`` on the *sum* of the samples' losses. The loss of a sample
    depends only on its copies, so :math:`\nabla_{\theta_i} \sum_j \ell_j(\theta_j) = \nabla \ell_i`
    exactly. The frozen backbone processes one ordinary batch. The copies share the memory of the
    original parameters.

    Each module that owns parameters must be called, and only with tensors (batch, ...). It receives
    one sample at a time, as a batch of one (``torch.vmap``). A prompt module then returns a stream
    with tokens (batch, prompts, dim). All other computation sees the whole batch and must not mix
    samples, such as ``x - x.mean(0)`` does. A backbone in eval mode does not mix them.

    A module may have two names, and two modules may share a parameter. The copy of the parameter
    then receives the gradients of all uses.

    Use a separate model in each thread, because the modules of `model` run with replaced
    parameters. Threads may share a frozen trunk.

    Args:
        model: Module with all trainable parameters, such as prompts and a head. It is not changed.
            Parameters without ``requires_grad`` stay shared.
        batch_size: Number of samples (at least 0). :func:`poisson_batch` may draw an empty batch.

    Returns:
        A model for one batch, with the names of `model` and parameters (batch, \*shape). Make a new
        one for each batch. Set ``train()`` or ``eval()`` on `model` before, because a later change
        reaches only some of the modules. Call its modules, and read only gradients from its
        parameters: in ``h @ copies.weight`` the batch would be one more axis. Do not give its
        parameters to an optimizer: with one sample, the step would change `model`.

    Raises:
        TypeError: When called, if a module that owns parameters returns neither a tensor nor a
            :class:`PromptStream`.
        RuntimeError: Under ``torch.inference_mode``, which records no gradients. Also, here and
            when called, if another thread replaces parameters of `model` by its copies or in
            :func:`guide_gradient`.
        ValueError: If all parameters are frozen, or the statistics of a normalization layer mix
            samples. This is batch normalization without running statistics, or any layer in
            training mode that updates running statistics.

    Example:
        >>> model, images = nn.Linear(4, 2), torch.randn(3, 4)
        >>> copies = per_sample(model, 3)
        >>> copies(images).square().sum().backward()
        >>> {name: tuple(copy.grad.shape) for name, copy in copies.named_parameters()}
        {'weight': (3, 2, 4), 'bias': (3, 2)}
        >>> model(images[1:2]).square().sum().backward()
        >>> torch.allclose(copies.weight.grad[1], model.weight.grad)
        True
    """
    check.count("batch_size", batch_size, at_least=0)
    check.gradients_are_recorded("per_sample")
    check.module("model", model)
    with reading(model):
        trainable = {parameter for parameter in model.parameters() if parameter.requires_grad}
        check.some("model", trainable, "have a parameter with requires_grad")
        rule = "be made outside torch.inference_mode"
        fits = not any(parameter.is_inference() for parameter in trainable)
        check.require(fits, "model", rule, "parameters without a gradient")
        mixing = [name for name, module in model.named_modules() if _sees_the_batch(module)]
        rule = "keep samples apart: normalize by running statistics, in eval mode"
        check.require(not mixing, "model", rule, f"others in {mixing}")
        copies = {p: nn.Parameter(p.detach().expand(batch_size, *p.shape)) for p in trainable}
        return twin_of(model, copies, {})


def clipped_sum(
    gradients: Mapping[str, Float[Tensor, "batch ..."]], *, max_norm: float
) -> dict[str, Float[Tensor, "..."]]:
    r"""Clip the gradient of each sample to at most norm `max_norm`, and sum over samples.

    The gradient of a sample is one vector over all names.

    .. math:: \sum_i g_i \cdot \min\bigl(1,\; C / \lVert g_i \rVert_2\bigr)

    Adding or removing one sample changes the sum by at most C. Replacing one changes it by at most
    2 C. If memory is short, clip parts of a batch one after another, add their sums, and add noise
    once.

    Args:
        gradients: Per-sample gradients (batch, \*shape) by name, of all trainable parameters.
        max_norm: Bound C (above 0).

    Returns:
        Sums (\*shape) by name, in float64, on the CPU if their device has no float64.

    Raises:
        TypeError: If a gradient is None, because the loss does not depend on its parameter.
        ValueError: If batches differ, a gradient is not finite, or a sum overflows float64.

    Example:
        Two samples, of norm 5 and 1 over two names.

        >>> gradients = {"a": torch.tensor([3.0, 1.0]), "b": torch.tensor([4.0, 0.0])}
        >>> clipped_sum(gradients, max_norm=1.0)
        {'a': tensor(1.6000, dtype=torch.float64), 'b': tensor(0.8000, dtype=torch.float64)}

    References:
        Abadi et al., "Deep Learning with Differential Privacy", CCS 2016, Algorithm 1.
    """
    check.number("max_norm", max_norm, above=0)
    check.tensors("gradients", gradients)
    batches = {name: len(tensor) if tensor.ndim else None for name, tensor in gradients.items()}
    if None in batches.values() or len(set(batches.values())) > 1:
        raise check.wrong("gradients", "all have shape (batch, ...)", f"batches {batches}")
    flat = {name: gradient[..., None].flatten(1) for name, gradient in gradients.items()}
    # MPS has no float64.
    rows = {name: row.cpu() if row.device.type == "mps" else row for name, row in flat.items()}
    scale, factor = clip_factors(list(rows.values()), max_norm=max_norm)
    sums = {}
    for name, row in rows.items():
        sums[name] = (factor @ scaled_down(row, scale)).reshape(gradients[name].shape[1:])
        check.finite(f"gradients[{name!r}] clipped and added", sums[name])
    return sums


def noisy_mean(
    total: Mapping[str, Float[Tensor, "..."]],
    *,
    multiplier: float,
    max_norm: float,
    expected_batch_size: float,
    generator: torch.Generator | None = None,
) -> dict[str, Float[Tensor, "..."]]:
    r"""Add independent Gaussian noise to a clipped sum, and divide by the expected batch size.

    .. math:: \frac{1}{B} \bigl(s + \mathcal N(0, \sigma^2 I)\bigr), \qquad \sigma = z \cdot C

    B is the constant ``rate * num_examples``, because the actual batch size is private. An
    accountant computes :math:`(\varepsilon, \delta)` for a number of such steps.

    Args:
        total: Sums of :func:`clipped_sum` over the whole batch, by name.
        multiplier: Noise multiplier z (at least 0).
        max_norm: Bound C, as in :func:`clipped_sum` (above 0).
        expected_batch_size: Expected batch size B (above 0), not necessarily an integer.
        generator: Random generator for tests and reproducible studies (seeded, on the CPU). If
            None, the operating system's entropy is used, as privacy requires.

    Returns:
        Noisy means by name, in float64. ``mean[name].to(parameter)`` is a gradient for any
        optimizer.

    Raises:
        ValueError: If a number is out of range, the noise underflows float64, a result is not
            finite, or `generator` was never seeded.

    Example:
        >>> total = {"head": torch.zeros(100_000)}
        >>> mean = noisy_mean(total, multiplier=1.5, max_norm=2.0, expected_batch_size=10)
        >>> round(mean["head"].std().item(), 1)
        0.3

    References:
        Abadi et al., "Deep Learning with Differential Privacy", CCS 2016, Algorithm 1.
    """
    check.number("multiplier", multiplier, at_least=0)
    check.number("max_norm", max_norm, above=0)
    check.number("expected_batch_size", expected_batch_size, above=0)
    check_source(generator)
    check.tensors("total", total)
    sigma = deviation(multiplier, max_norm, dtypes=[torch.float64], divisor=expected_batch_size)
    means = {}
    for name, tensor in total.items():
        means[name] = with_noise(tensor, sigma=sigma, generator=generator) / expected_batch_size
        check.finite(f"total[{name!r}] with its noise", means[name])
    return means


def _sees_the_batch(module: nn.Module) -> bool:
    """Whether a module computes statistics of a batch, or updates running statistics with it."""
    if isinstance(module, _BatchNorm) and module.running_mean is None:
        return True
    running = [name for name, buffer in module._buffers.items() if buffer is not None]
    return module.training and any(name.startswith("running_") for name in running)
