"""Bars and images of the plots, against counts and matrices by hand."""

from functools import partial

import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import eye, full, nan, ones, tensor, zeros

from fedprompt import plots
from refusals import refused_and_taken

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


def test_every_class_has_a_different_color():
    for number in (1, 10, 11, 40):
        axes = plots.partition(
            torch.arange(number), [torch.arange(number)], axes=Figure().subplots()
        )
        assert len({bars.patches[0].get_facecolor() for bars in axes.containers}) == number


def test_labels_and_clients_can_have_any_container_and_are_not_mutated():
    for make in (list, tuple, partial(np.array, dtype=int), partial(tensor, dtype=torch.int64)):
        labels, clients = make(LABELS), [make(own) for own in CLIENTS]
        axes = plots.partition(labels, clients, axes=Figure().subplots())
        assert [bar.get_height() for bar in axes.containers[2]] == [2, 0, 2]
        assert [int(label) for label in labels] == LABELS


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


def test_large_matrices_are_not_annotated():
    for clients, printed in ((12, 144), (13, 0)):
        axes = plots.accuracy_matrix(full((clients, clients), 0.5), axes=Figure().subplots())
        assert len(axes.texts) == printed


@pytest.mark.parametrize(
    "plan",
    [torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([[0.1, 0.2], [0.3, 0.4]])],
    ids=["patches", "grid"],
)
@pytest.mark.parametrize("channels", [(), (1,), (3,)], ids=str)
def test_transport_plan_covers_the_image_patch_by_patch(axes, plan, channels):
    image = torch.arange(5, 53).reshape(6, 8).expand(*channels, 6, 8)
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


WRONG_AXES = [None, Figure(), Figure().subplots(2)], [AXES]
CLIENT_LISTS = [np.eye(3), [], [[0], [7]], [0, 1]], [[[]], (range(7),)]
COUNTS = [
    zeros(3),
    tensor([2.0, -1]),
    ones(3) / 0,
    [1, 2],
    ones(1, 1, 1),
    tensor([[1.0, 0], [0, 0]]),
]
PLANS = (
    [ones(5), tensor([1.0, -1, 1, 1]), ones(2, 2, 2), ones(4) / 0, [1.0]],
    [ones(1), zeros(4), eye(3)],
)
IMAGES = (
    [ones(4, 8, 8), np.eye(4), full((2, 2), nan), ones(4)],
    [eye(4), ones(1, 2, 3), ones(3, 1, 1)],
)
ROWS = [
    (plots.partition, {"labels": LABELS, "clients": CLIENTS, "axes": AXES}, {
        "labels": ([[], [0.5] * 7, "0"], [[0] * 7]), "clients": CLIENT_LISTS, "axes": WRONG_AXES}),
    (plots.accuracy_matrix, {"accuracy": eye(2), "axes": AXES}, {
        "accuracy": ([[[1.0]], ones(3), ones(0, 3), tensor([[1.1]]), -eye(2)], [eye(1)]),
        "axes": WRONG_AXES}),
    (plots.transport_plan, {"plan": ones(4), "image": eye(4), "axes": AXES}, {
        "plan": PLANS, "image": IMAGES, "axes": WRONG_AXES}),
    (plots.group_usage, {"counts": ones(3), "axes": AXES}, {
        "counts": (COUNTS, [ones(1), tensor([0, 2]), ones(1, 2)]), "axes": WRONG_AXES}),
]  # fmt: skip
test_a_wrong_argument_is_refused_by_its_name_and_its_edge_is_taken = refused_and_taken(ROWS)


def test_every_figure_draws_nothing_if_it_refuses_and_keeps_the_settings_of_matplotlib():
    assert sorted(plot.__name__ for plot, *_ in ROWS) == plots.__all__
    before = dict(mpl.rcParams)
    for plot, good, arguments in ROWS:
        axes = Figure().subplots()
        empty = len(axes.get_children())
        for name, (wrong, _) in arguments.items():
            for value in wrong * (name != "axes"):
                with pytest.raises((TypeError, ValueError)):
                    plot(**good | {name: value, "axes": axes})
        assert len(axes.get_children()) == empty
        plot(**good | {"axes": axes})
    assert dict(mpl.rcParams) == before
