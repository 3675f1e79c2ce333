"""Bars and images of the plots, against counts and matrices by hand."""

import re
from functools import partial

import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedprompt import plots
from fedprompt.data import dirichlet
from refusals import check_refused, refusals

LABELS = [0, 2, 2, 1, 0, 2, 2]
CLIENTS = [[0, 1, 2], [], [3, 4, 5, 6]]
AXES = Figure().subplots()


@pytest.fixture
def axes() -> Axes:
    return Figure().subplots()


def drawn(axes: Axes) -> Axes:
    """Render the figure, which raises an error if an artist cannot be drawn."""
    axes.figure.canvas.draw()
    return axes


# Partitions.


def test_partition_stacks_the_classes_of_every_client(axes):
    assert plots.partition(LABELS, CLIENTS, axes=axes) is axes
    # Client 0 holds one 0 and two 2s, client 1 nothing, client 2 one 1, one 0 and two 2s.
    heights = [[bar.get_height() for bar in bars] for bars in drawn(axes).containers]
    assert heights == [[1, 0, 1], [0, 0, 1], [2, 0, 2]]
    bottoms = [[bar.get_y() for bar in bars] for bars in axes.containers]
    assert bottoms == [[0, 0, 0], [1, 0, 1], [1, 0, 2]]
    centers = [bar.get_x() + bar.get_width() / 2 for bar in axes.containers[0]]
    assert centers == pytest.approx([0, 1, 2])
    assert [bars.get_label() for bars in axes.containers] == ["class 0", "class 1", "class 2"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("client", "samples")
    assert all(place.is_integer() for place in axes.get_xticks())


@pytest.mark.parametrize("num_classes", [1, 7, 10, 11, 40])
def test_every_class_has_a_different_color(axes, num_classes):
    labels = torch.arange(5 * num_classes) % num_classes
    plots.partition(labels, [labels.argsort()], axes=axes)
    colors = {bars.patches[0].get_facecolor() for bars in axes.containers}
    assert len(colors) == num_classes


def test_the_bars_of_a_client_end_at_its_number_of_samples(axes, generator):
    labels = torch.randint(12, (300,), generator=generator)
    clients = dirichlet(labels, 6, alpha=0.5, generator=generator)
    plots.partition(labels, clients, axes=axes)
    last = axes.containers[-1]
    assert [bar.get_y() + bar.get_height() for bar in last] == [len(own) for own in clients]


def test_labels_and_clients_can_have_any_container_and_are_not_mutated():
    for make in (
        list,
        tuple,
        partial(np.array, dtype=int),
        partial(torch.tensor, dtype=torch.int64),
    ):
        labels, clients = make(LABELS), [make(own) for own in CLIENTS]
        axes = plots.partition(labels, clients, axes=Figure().subplots())
        assert [bar.get_height() for bar in axes.containers[2]] == [2, 0, 2]
        assert [int(label) for label in labels] == LABELS


# Accuracy.


def test_accuracy_matrix_shows_every_entry_on_a_scale_from_0_to_1(axes):
    accuracy = torch.tensor([[0.25, 0.5, 1.0], [0.125, 0.75, 0.0]])
    assert plots.accuracy_matrix(accuracy, axes=axes) is axes
    (image,) = drawn(axes).images
    assert image.get_array().tolist() == accuracy.tolist()
    assert image.get_clim() == (0, 1)
    # matplotlib prints row by row; 12.5 is rounded to the even 12.
    assert [text.get_text() for text in axes.texts] == ["25", "50", "100", "12", "75", "0"]
    assert [text.get_color() for text in axes.texts][1:3] == ["black", "white"]  # on light and dark
    assert [text.get_position() for text in axes.texts][:4] == [(0, 0), (1, 0), (2, 0), (0, 1)]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("test set of client", "model of client")
    assert all(place.is_integer() for place in (*axes.get_xticks(), *axes.get_yticks()))


# Transport plans.


@pytest.mark.parametrize(("clients", "printed"), [(12, 144), (13, 0)])
def test_large_matrices_are_not_annotated(axes, clients, printed):
    plots.accuracy_matrix(torch.full((clients, clients), 0.5), axes=axes)
    assert len(axes.texts) == printed


@pytest.mark.parametrize(
    "plan",
    [torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([[0.1, 0.2], [0.3, 0.4]])],
    ids=["patches", "grid"],
)
@pytest.mark.parametrize("channels", [(), (1,), (3,)], ids=str)
def test_transport_plan_covers_the_image_patch_by_patch(axes, plan, channels):
    image = torch.arange(48).reshape(6, 8).expand(*channels, 6, 8)
    assert plots.transport_plan(plan, image, axes=axes) is axes
    picture, layer = drawn(axes).images
    np.testing.assert_allclose(picture.get_array(), np.arange(48).reshape(6, 8) / 47)
    np.testing.assert_allclose(layer.get_array(), [[0.1, 0.2], [0.3, 0.4]], rtol=1e-6)
    assert list(layer.get_extent()) == list(picture.get_extent()) == [-0.5, 7.5, 5.5, -0.5]
    assert layer.get_clim() == pytest.approx((0, 0.4))
    assert 0 < layer.get_alpha() < 1


def test_an_image_of_one_value_is_black(axes):
    plots.transport_plan(torch.ones(4), torch.full((2, 2), 7.0), axes=axes)
    assert not axes.images[0].get_array().any()


# Groups.


def test_group_usage_of_one_period_is_a_bar_for_each_share(axes):
    assert plots.group_usage(torch.tensor([30, 0, 6, 4]), axes=axes) is axes
    assert [bar.get_height() for bar in drawn(axes).patches] == [0.75, 0, 0.15, 0.1]
    (equal,) = axes.lines
    assert set(equal.get_ydata()) == {0.25}
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("group", "share of selections")
    assert all(place.is_integer() for place in axes.get_xticks())


def test_group_usage_over_rounds_is_a_band_for_each_group(axes):
    plots.group_usage(torch.tensor([[3.0, 1.0, 0.0], [1.0, 1.0, 2.0]]), axes=axes)
    drawn(axes)
    # Shares .75 .25 0 and .25 .25 .5: the upper edges are their sums from the first group on.
    for band, edges in zip(axes.collections, [(0.75, 0.25), (1.0, 0.5), (1.0, 1.0)], strict=True):
        points = band.get_paths()[0].vertices
        for position, edge in zip((1, 2), edges, strict=True):
            assert points[points[:, 0] == position, 1].max() == pytest.approx(edge)
    assert axes.get_ylim() == (0, 1)


# Together.

CALLS = {
    "partition": lambda axes: plots.partition(LABELS, CLIENTS, axes=axes),
    "accuracy_matrix": lambda axes: plots.accuracy_matrix(torch.eye(2), axes=axes),
    "transport_plan": lambda axes: plots.transport_plan(torch.eye(2), torch.eye(4), axes=axes),
    "group_usage": lambda axes: plots.group_usage(torch.ones(3), axes=axes),
}


def test_every_figure_is_in_the_table():
    assert sorted(CALLS) == plots.__all__


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_settings_of_matplotlib_are_unchanged(call, axes):
    before = dict(mpl.rcParams)
    call(axes)
    assert dict(mpl.rcParams) == before


@pytest.mark.bad_input
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(
    ("axes", "got"),
    [(None, "None (NoneType)"), (Figure(), "a Figure"), (Figure().subplots(2), "a object array")],
    ids=["none", "figure", "several"],
)
def test_anything_but_one_axes_is_refused_by_name(call, axes, got):
    rule = "`axes` must be one matplotlib Axes, such as figure.subplots(); got "
    with pytest.raises(TypeError, match=re.escape(rule)):
        call(axes)


REFUSED = """
plots.partition([], [[]], axes=AXES) -> ValueError: `labels` must hold at least one label; got
plots.partition([0.5], [[0]], axes=AXES) -> TypeError: `labels[0]` must be an integer; got 0.5
plots.partition(LABELS, np.eye(3), axes=AXES) -> TypeError: got a float64 array of shape (3, 3).
plots.partition(LABELS, [], axes=AXES) -> TypeError: `clients` must be a list with the positions of
plots.partition(LABELS, [[0], [7]], axes=AXES) -> ValueError: `clients[1]` must lie in [0, 7), the
plots.partition(LABELS, [0, 1], axes=AXES) -> TypeError: `clients[0]` must be an array, a tensor or
plots.accuracy_matrix([[1.0]], axes=AXES) -> TypeError: `accuracy` must be a floating-point tensor
plots.accuracy_matrix(ones(3), axes=AXES) -> ValueError: `accuracy` must have shape (clients
plots.accuracy_matrix(ones(0, 3), axes=AXES) -> ValueError: got (0, 3).
plots.accuracy_matrix(tensor([[50.0, 1]]), axes=AXES) -> ValueError: `accuracy` must lie in [0, 1];
plots.transport_plan(ones(5), eye(4), axes=AXES) -> ValueError: `plan` must have a square number of
plots.transport_plan(-ones(4), eye(4), axes=AXES) -> ValueError: `plan` must be at least 0; got
plots.transport_plan(ones(4), ones(4, 8, 8), axes=AXES) -> ValueError: `image` must have shape (3,
plots.transport_plan(ones(4), np.eye(4), axes=AXES) -> TypeError: `image` must be a tensor of real
plots.transport_plan(ones(4), full((2, 2), nan), axes=AXES) -> ValueError: `image` must be finite;
plots.group_usage(tensor([[1.0, 0], [0, 0]]), axes=AXES) -> ValueError: `counts` must be positive
plots.group_usage(zeros(3), axes=AXES) -> ValueError: `counts` must be positive for one group of
plots.group_usage(tensor([2.0, -1.0]), axes=AXES) -> ValueError: `counts` must be finite and at
plots.group_usage([1, 2], axes=AXES) -> TypeError: `counts` must be a tensor of real numbers
"""


@pytest.mark.bad_input
@pytest.mark.parametrize(("call", "error", "message"), refusals(REFUSED))
def test_wrong_calls_are_refused_by_name_and_draw_nothing(call, error, message):
    before = len(AXES.get_children())
    check_refused(call, error, message, globals())
    assert len(AXES.get_children()) == before
