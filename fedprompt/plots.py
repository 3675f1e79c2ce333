"""Figures of a federation, drawn on matplotlib axes that the caller owns.

Every function takes data and ``axes``, draws, and returns the same axes. The caller makes figures,
titles, legends and files. matplotlib is an extra: ``pip install 'fedprompt[plots]'``. It is
imported when a function is called.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from einops import reduce
from jaxtyping import Float, Float64, Integer, Real
from torch import Tensor

import fedprompt._conversions as convert
import fedprompt._refusals as check

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.axis

__all__ = ["accuracy_matrix", "group_usage", "partition", "transport_plan"]

_Array = Float64[np.ndarray, "..."]
_LARGEST_ANNOTATED = 12
"""Largest number of rows or columns of a matrix whose entries are printed into the image."""


def partition(
    labels: Integer[np.ndarray, " samples"] | Integer[Tensor, " samples"] | Sequence[int],
    clients: Sequence[Integer[np.ndarray, " _"] | Integer[Tensor, " _"] | Sequence[int]],
    *,
    axes: "matplotlib.axes.Axes",
) -> "matplotlib.axes.Axes":
    """Draw how many samples of each class each client holds, as stacked bars.

    Each class is one color and one container of bars, with the label ``class 0`` and so on. Call
    ``axes.legend()`` to show these labels.

    Args:
        labels: Classes of all samples, at least 0.
        clients: Positions in `labels` for each client, as partition functions return them.
        axes: Axes to draw on.

    Returns:
        The same axes.

    Example:
        >>> from matplotlib.figure import Figure
        >>> from fedprompt import plots
        >>> from fedprompt.data import dirichlet
        >>> labels, axes = np.arange(60) % 3, Figure().subplots()
        >>> shards = dirichlet(labels, 4, alpha=0.5, generator=np.random.default_rng(0))
        >>> plots.partition(labels, shards, axes=axes).get_ylabel()
        'samples'
    """
    _check_axes(axes)
    counts = _class_counts(labels, clients)
    num_clients, num_classes = counts.shape
    bottom = np.zeros(num_clients, dtype=np.int64)
    for label, (bars, color) in enumerate(zip(counts.T, _colors(num_classes), strict=True)):
        axes.bar(np.arange(num_clients), bars, bottom=bottom, color=color, label=f"class {label}")
        bottom += bars
    axes.set(xlabel="client", ylabel="samples")
    _whole_ticks(axes.xaxis, axes.yaxis)
    return axes


def accuracy_matrix(
    accuracy: Float[Tensor, "clients tests"], *, axes: "matplotlib.axes.Axes"
) -> "matplotlib.axes.Axes":
    """Draw the accuracy of every client's model on every client's test set, as an image.

    The color scale runs from 0 to 1, so that figures can be compared. Matrices of at most 12 rows
    and columns are annotated in %. For a color bar, call ``figure.colorbar(axes.images[0])``.

    Args:
        accuracy: Accuracies in [0, 1], with a row for each client, or a single row for one global
            model. Entry (i, j) is the accuracy of model i on test set j.
        axes: Axes to draw on.

    Returns:
        The same axes.

    Example:
        >>> from matplotlib.figure import Figure
        >>> from fedprompt import plots
        >>> accuracy = torch.tensor([[0.9, 0.2], [0.4, 0.7]])
        >>> axes = plots.accuracy_matrix(accuracy, axes=Figure().subplots())
        >>> [text.get_text() for text in axes.texts]
        ['90', '20', '40', '70']
    """
    _check_axes(axes)
    matrix = convert.accuracies(accuracy).numpy()
    axes.imshow(matrix, cmap="Blues", vmin=0, vmax=1)
    axes.set(xlabel="test set of client", ylabel="model of client")
    _whole_ticks(axes.xaxis, axes.yaxis)
    if max(matrix.shape) <= _LARGEST_ANNOTATED:
        for (row, column), value in np.ndenumerate(matrix):
            color = "white" if value > 0.5 else "black"
            axes.text(column, row, f"{100 * value:.0f}", ha="center", va="center", color=color)
    return axes


def transport_plan(
    plan: Float[Tensor, "patches"] | Float[Tensor, "rows columns"],
    image: Real[Tensor, "*channels height width"],
    *,
    axes: "matplotlib.axes.Axes",
) -> "matplotlib.axes.Axes":
    """Draw how much of each patch one prompt takes, as a translucent layer over the image.

    The picture is drawn in gray, so that color shows only the plan. The first image of the axes is
    the picture, and the second is the plan. The color scale of the plan runs from 0 to its largest
    entry. For comparable panels, call ``axes.images[1].set_clim(0, 1)``.

    Args:
        plan: Transported mass of each patch: one column of a plan, for one image and one prompt.
            Patches are in row-major order on a square grid. For another grid, pass a plan of
            shape (rows, columns).
        image: Picture of shape (3, height, width), (1, height, width) or (height, width), in any
            range.
        axes: Axes to draw on.

    Returns:
        The same axes.

    Example:
        >>> from matplotlib.figure import Figure
        >>> from fedprompt import plots
        >>> from fedprompt.transport import sinkhorn
        >>> image, cost = torch.rand(3, 32, 32), torch.rand(16, 2)
        >>> plan = sinkhorn(cost, torch.ones(16) / 16, torch.ones(2) / 2, epsilon=0.1).plan
        >>> axes = plots.transport_plan(plan[:, 0], image, axes=Figure().subplots())
        >>> axes.images[1].get_array().shape
        (4, 4)
    """
    _check_axes(axes)
    grid = _grid(plan)
    picture = _picture(image)
    height, width = picture.shape
    extent = (-0.5, width - 0.5, height - 0.5, -0.5)
    axes.imshow(picture, cmap="gray")
    axes.imshow(grid, cmap="magma", alpha=0.6, vmin=0, extent=extent, interpolation="nearest")
    axes.set(xticks=[], yticks=[])
    return axes


def group_usage(
    counts: Real[Tensor, " groups"] | Real[Tensor, "rounds groups"], *, axes: "matplotlib.axes.Axes"
) -> "matplotlib.axes.Axes":
    """Draw the share of each group in all selections, as bars or as bands over rounds.

    Counts of one period become one bar for each group, with a dashed line at equal shares. Counts
    of several rounds become one band for each group, stacked from 0 to 1.

    Args:
        counts: Number of selections of each group, such as ``selector.counts``, or one row of them
            for each round. Every row has a positive sum.
        axes: Axes to draw on.

    Returns:
        The same axes.

    Example:
        >>> from matplotlib.figure import Figure
        >>> from fedprompt import plots
        >>> axes = plots.group_usage(torch.tensor([30, 0, 10]), axes=Figure().subplots())
        >>> [float(bar.get_height()) for bar in axes.patches]
        [0.75, 0.0, 0.25]
    """
    _check_axes(axes)
    table = convert.counts("counts", counts, "(groups,) or (rounds, groups)", ndims=(1, 2)).numpy()
    totals = table.sum(axis=-1, keepdims=True)
    check.some("counts", totals.all(), "be positive for one group of each row")
    shares = table / totals
    if shares.ndim == 1:
        axes.bar(np.arange(len(shares)), shares)
        axes.axhline(1 / len(shares), color="gray", linestyle="--", linewidth=1)
        axes.set(xlabel="group", ylabel="share of selections")
    else:
        rounds = np.arange(1, len(shares) + 1)
        axes.stackplot(rounds, shares.T, colors=_colors(shares.shape[1]))
        axes.set(xlabel="round", ylabel="share of selections", ylim=(0, 1), xmargin=0)
    _whole_ticks(axes.xaxis)
    return axes


def _check_axes(axes: object) -> None:
    try:
        from matplotlib.axes import Axes
    except ImportError as error:
        message = "`fedprompt.plots` needs matplotlib: pip install 'fedprompt[plots]'"
        raise ImportError(message) from error
    check.instance("axes", axes, Axes, "be one matplotlib Axes, such as figure.subplots()")


def _class_counts(labels: object, clients: Any) -> "np.ndarray[Any, np.dtype[np.int64]]":
    classes = convert.integers("labels", labels)
    check.some("labels", classes.size, "hold at least one label")
    rule = "be a list with the positions of at least one client"
    check.typed(isinstance(clients, list | tuple) and clients, "clients", rule, clients)
    held = convert.positions(clients, len(classes))
    size = int(classes.max()) + 1
    return np.stack([np.bincount(classes[own], minlength=size) for own in held])


def _real_array(argument: str, tensor: object, shape: str, ndims: Sequence[int]) -> _Array:
    """Require a finite real tensor of a shape without empty axes, and copy it to numpy."""
    table = convert.table(argument, tensor, shape, ndims=ndims, floating=False)
    check.finite(argument, table)
    return table.numpy()


def _grid(plan: object) -> _Array:
    grid = _real_array("plan", plan, "(patches,) or (rows, columns)", ndims=(1, 2))
    check.require(grid.min() >= 0, "plan", "be at least 0", grid.min())
    if grid.ndim == 2:
        return grid
    side = math.isqrt(len(grid))
    rule = "have a square number of patches, or shape (rows, columns)"
    check.require(side * side == len(grid), "plan", rule, len(grid))
    return grid.reshape(side, side)


def _picture(image: object) -> _Array:
    """Convert an image to one channel in [0, 1]."""
    shape = "(3, height, width), (1, height, width) or (height, width)"
    picture = _real_array("image", image, shape, ndims=(2, 3))
    rule = f"have shape {shape}"
    check.require(picture.ndim != 3 or len(picture) in (1, 3), "image", rule, picture.shape)
    gray = picture if picture.ndim == 2 else reduce(picture, "c h w -> h w", "mean")
    low, high = gray.min(), gray.max()
    return (gray - low) / (high - low) if high > low else np.zeros_like(gray)


def _colors(number: int) -> list[Any]:
    """Return one color for each of `number` classes: up to ten distinct ones, or a color map."""
    from matplotlib import colormaps

    if number <= 10:
        return [colormaps["tab10"](index) for index in range(number)]
    return [colormaps["turbo"](index / (number - 1)) for index in range(number)]


def _whole_ticks(*axis: "matplotlib.axis.Axis") -> None:
    from matplotlib.ticker import MaxNLocator

    for one in axis:
        one.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
