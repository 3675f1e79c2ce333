"""DP-SGD in pieces: who is drawn, every sample's own gradient in one pass, a clipped sum, and noise."""

from collections.abc import Mapping

import torch
import torch.nn as nn
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from fedprompt._checks import check_count, check_finite, check_number, kind, wrong_type, wrong_value
from fedprompt.privacy._copies import check_gradients_are_recorded, twin_of
from fedprompt.privacy._lengths import clip_factors, scaled_down
from fedprompt.privacy.randomness import check_source, coins, with_noise

__all__ = ["clipped_sum", "noisy_mean", "per_sample", "poisson_batch"]


def poisson_batch(
    num_examples: int, *, rate: float, generator: torch.Generator | None = None
) -> Int[Tensor, " batch"]:
    """Draw a batch with an independent coin for every example, as accountants of DP-SGD assume.

    Args:
        num_examples: How many there are.
        rate: The chance of each, above 0 and at most 1; ``rate * num_examples`` of them are expected.
        generator: Random source for tests and reproducible studies, on the CPU. If None, the
            operating system's entropy is used, as privacy requires.

    Returns:
        Indices in rising order. There may be none; then the step is noise alone. It must be taken
        nevertheless.

    Raises:
        ValueError: If a number is out of range, or `generator` was never seeded.

    Example:
        A seeded generator, so that the example can be repeated.

        >>> draw = torch.Generator().manual_seed(0)
        >>> [len(poisson_batch(100, rate=0.1, generator=draw)) for _ in range(5)]
        [6, 10, 5, 7, 14]

    References:
        Abadi et al., "Deep Learning with Differential Privacy", CCS 2016.
    """
    check_count("num_examples", num_examples)
    check_number("rate", rate, above=0, at_most=1)
    check_source(generator)
    return coins(num_examples, rate=rate, generator=generator)


def per_sample(model: nn.Module, batch_size: int) -> nn.Module:
    r"""Give every sample a copy of its own of all that learns in a model: the gradients of the copies are those of single samples.

    The copies share the memory of the original, ``expand`` makes them. So run the model that comes back as you run `model`, once, and call
    backward on the *sum* of the samples' losses: no sample's loss depends on another's copy, and :math:`\nabla_{\theta_i} \sum_j \ell_j
    (\theta_j) = \nabla \ell_i`, exactly. The frozen backbone sees one ordinary batch.

    A module may have two names, and two modules may share a parameter: its copy receives the gradient of every use.

    Each module that owns parameters must be called, with nothing but tensors (batch, ...); it sees one sample at a time, as a batch of one
    (``torch.vmap``). A prompt module then returns a stream with tokens (batch, prompts, dim). What lies between such modules sees the
    whole batch and must keep its samples apart: a backbone in eval mode does.

    Args:
        model: All that learns together, such as prompts and a head; parameters without ``requires_grad`` stay shared. Not changed.
        batch_size: How many samples; 0 is one of the cases of :func:`poisson_batch`.

    Returns:
        A model for one batch, with the names of `model` and parameters (batch, \*shape). Make it anew for each batch. Its values are the
        memory of `model`, whatever is written there, and modes are those of `model`, to be set before. Afterwards ``train()`` of either
        reaches but a part of what comes back.

    Raises:
        TypeError: If an argument is of the wrong kind; when called, if a module that owns parameters returns neither a tensor nor a
            :class:`PromptStream`.
        RuntimeError: Under ``torch.inference_mode``, which records no gradients; here and when called.
        ValueError: If all parameters are frozen, `batch_size` is negative, or samples would meet in the statistics of a normalisation:
            batch normalisation without running ones, and any that keeps running ones while in training mode.

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
    check_count("batch_size", batch_size, at_least=0)
    check_gradients_are_recorded()
    if not isinstance(model, nn.Module):
        raise wrong_type("model", "be an nn.Module", kind(model))
    learning = {parameter for parameter in model.parameters() if parameter.requires_grad}
    if not learning:
        raise wrong_value("model", "have a parameter with requires_grad", "none")
    if any(parameter.is_inference() for parameter in learning):
        raise wrong_value(
            "model", "be made outside torch.inference_mode", "parameters without a gradient"
        )
    if mixing := [name for name, module in model.named_modules() if _sees_the_batch(module)]:
        raise wrong_value(
            "model",
            "keep samples apart: normalise by running statistics, in eval mode",
            f"others in {mixing}",
        )
    copies = {
        parameter: nn.Parameter(parameter.detach().expand(batch_size, *parameter.shape))
        for parameter in learning
    }
    return twin_of(model, copies, {})


def clipped_sum(
    gradients: Mapping[str, Float[Tensor, "batch ..."]], *, max_norm: float
) -> dict[str, Float[Tensor, "..."]]:
    r"""Add up the gradients of single samples, each shrunk to at most `max_norm`, as one vector over all names.

    .. math:: \sum_i g_i \cdot \min\bigl(1,\; C / \lVert g_i \rVert_2\bigr)

    One sample more or less moves the sum by at most C; another in its place, by at most 2 C. Sums over parts of a batch add up: clip part
    after part where memory is short, and add noise once.

    Args:
        gradients: By name (batch, \*shape), of all that learns from these samples.
        max_norm: C, above 0.

    Returns:
        By name (\*shape), in float64.

    Raises:
        TypeError: If an argument is of the wrong kind; a gradient that is None was not used by the loss.
        ValueError: If batches differ, `max_norm` is not above 0, a gradient is not finite, or a sum is too large for float64.

    Example:
        Two samples, of length 5 and 1 over two names.

        >>> clipped_sum({"a": torch.tensor([3.0, 1.0]), "b": torch.tensor([4.0, 0.0])}, max_norm=1.0)
        {'a': tensor(1.6000, dtype=torch.float64), 'b': tensor(0.8000, dtype=torch.float64)}

    References:
        Abadi et al., "Deep Learning with Differential Privacy", CCS 2016, Algorithm 1.
    """
    check_number("max_norm", max_norm, above=0)
    _check_tensors("gradients", gradients)
    batches = {
        name: gradient.shape[0] if gradient.ndim else None for name, gradient in gradients.items()
    }
    if None in batches.values() or len(set(batches.values())) > 1:
        raise wrong_value("gradients", "all have shape (batch, ...)", f"batches {batches}")
    rows = {
        name: gradient.reshape(len(gradient), gradient.shape[1:].numel())
        for name, gradient in gradients.items()
    }
    scale, factor = clip_factors(list(rows.values()), max_norm=max_norm)
    sums = {}
    for name, row in rows.items():
        sums[name] = (factor @ scaled_down(row, scale)).reshape(gradients[name].shape[1:])
        check_finite(f"gradients[{name!r}] clipped and added", sums[name])
    return sums


def noisy_mean(
    total: Mapping[str, Float[Tensor, "..."]],
    *,
    multiplier: float,
    max_norm: float,
    expected_batch_size: float,
    generator: torch.Generator | None = None,
) -> dict[str, Float[Tensor, "..."]]:
    r"""Add independent Gaussian noise to every number of a clipped sum, and divide by the batch size that was expected.

    .. math:: \frac{1}{B} \bigl(s + \mathcal N(0, \sigma^2 I)\bigr), \qquad \sigma = z \cdot C

    B is a constant, ``rate * num_examples``: how many were drawn is itself private. What T such steps are worth in
    :math:`(\varepsilon, \delta)` is for an accountant to say.

    Args:
        total: By name, from :func:`clipped_sum` over the whole batch.
        multiplier: z, at least 0; 0 adds nothing.
        max_norm: C, as in :func:`clipped_sum`.
        expected_batch_size: B, above 0; need not be whole.
        generator: Random source for tests and reproducible studies, on the CPU. If None, the
            operating system's entropy is used, as privacy requires.

    Returns:
        Noisy means by name, in float64. ``mean[name].to(parameter)`` is a gradient for any
        optimizer.

    Raises:
        ValueError: If a number is out of range, a result is not finite, or `generator` was never
            seeded.

    Example:
        >>> total = {"head": torch.zeros(100_000)}
        >>> mean = noisy_mean(total, multiplier=1.5, max_norm=2.0, expected_batch_size=10)
        >>> round(mean["head"].std().item(), 1)
        0.3

    References:
        Abadi et al., "Deep Learning with Differential Privacy", CCS 2016, Algorithm 1.
    """
    check_number("multiplier", multiplier, at_least=0)
    check_number("max_norm", max_norm, above=0)
    check_number("expected_batch_size", expected_batch_size, above=0)
    check_source(generator)
    _check_tensors("total", total)
    means = {}
    for name, tensor in total.items():
        noisy = with_noise(tensor, sigma=multiplier * max_norm, generator=generator)
        means[name] = noisy / expected_batch_size
        check_finite(f"total[{name!r}] with its noise", means[name])
    return means


def _sees_the_batch(module: nn.Module) -> bool:
    """Whether samples meet in a module's statistics: those it computes of a batch, or those it keeps for later."""
    if isinstance(module, _BatchNorm) and module.running_mean is None:
        return True
    return module.training and any(
        name.startswith("running_")
        for name, buffer in module._buffers.items()
        if buffer is not None
    )


def _check_tensors(argument: str, tensors: object) -> None:
    if not isinstance(tensors, Mapping):
        raise wrong_type(argument, "map names to tensors", kind(tensors))
    if not tensors:
        raise wrong_value(argument, "hold at least one name", "none")
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            raise wrong_type(f"{argument}[{name!r}]", "be a floating-point tensor", kind(tensor))
        check_finite(f"{argument}[{name!r}]", tensor)
