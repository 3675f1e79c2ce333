"""The check of a trunk: supported models pass, and each mistake fails its line."""

import pytest
import torch

from fedprompt.backbones.checks._report import Line, Report
from fedprompt.check import trunk as check_trunk
from own_trunks import (
    WRONG,
    AnotherModel,
    CachedMask,
    NormalizeIsTheIdentity,
    PaddedImages,
    PlainTrunk,
    WithoutGradients,
)


@pytest.fixture
def images(generator):
    return torch.randn(3, 3, 16, 16, generator=generator)


def test_a_right_trunk_passes_every_line(images):
    trunk = PlainTrunk()
    report = check_trunk(trunk, images, trunk.forward)
    assert report.passed, report
    assert [line.passed for line in report.lines] == [True] * 11
    assert str(report).startswith("PlainTrunk\nok  members\nok  sizes\n")


@pytest.mark.parametrize(("make", "failed"), WRONG.values(), ids=WRONG)
def test_each_mistake_fails_its_line_with_a_remedy(make, failed, images):
    trunk = make()
    report = check_trunk(trunk, images, trunk.forward)
    assert report.failed == failed, report
    assert not report.passed
    for line in report.lines:
        if line.passed is False:
            assert line.measured
            assert f"-> {line.remedy}" in str(report)


def test_patches_may_leave_out_the_rest_of_an_image():
    images = torch.randn(3, 3, 17, 19, generator=torch.Generator().manual_seed(0))
    for trunk in (PlainTrunk(), PaddedImages(patches=25)):
        assert "sizes" not in check_trunk(trunk, images).failed


def test_float64_is_judged_to_nine_digits(images):
    trunk = PlainTrunk()
    trunk.model.double()
    trunk.mask = trunk.mask.double()
    for factor, failed in ((1 + 1e-11, ()), (1 + 1e-7, ("same as the model",))):
        forward = lambda images, factor=factor: factor * trunk.forward(images)  # noqa: E731
        assert check_trunk(trunk, images.double(), forward).failed == failed


def test_a_trunk_without_modules_and_tensors_has_one_line_that_is_not_judged(images):
    trunk = PlainTrunk()
    members = ("prefix", "dim", "depth", "num_features", "patch_size")
    members += ("embed", "block", "normalize", "pool", "__deepcopy__")
    hidden = type("Hidden", (), {name: getattr(trunk, name) for name in members})()
    hidden.__class__.__deepcopy__ = lambda self, memo: self
    report = check_trunk(hidden, images, trunk.forward)
    assert report.passed, report
    (line,) = [line for line in report.lines if line.passed is None]
    assert (line.name, line.measured[:31]) == ("frozen", "no modules or tensors found; ke")


def test_every_line_fails_for_some_mistake(images):
    names = {line.name for line in check_trunk(PlainTrunk(), images).lines}
    assert {name for _, lines in WRONG.values() for name in lines} == names


def test_a_trunk_of_a_model_without_a_last_norm_passes(images):
    trunk = NormalizeIsTheIdentity()
    trunk.pool = lambda tokens: tokens[:, 0]
    assert check_trunk(trunk, images).passed


def test_without_the_models_function_that_line_is_not_judged(images):
    report = check_trunk(AnotherModel(), images)
    assert report.passed
    (line,) = [line for line in report.lines if line.name == "same as the model"]
    assert (line.passed, line.measured) == (None, "no `forward` was given")


def test_an_exception_of_the_trunk_is_shown_in_its_line(images):
    text = str(check_trunk(CachedMask(), images))
    assert "FAILED      repeatable         RuntimeError: " in text
    assert "not judged  positions          needs a trunk that is repeatable" in text


def test_a_line_names_what_is_wrong_and_counts_the_rest(images):
    assert "none at layers 0\n" in str(check_trunk(WithoutGradients(), images))
    trunk = PlainTrunk()
    trunk.model.requires_grad_()
    number = len(list(trunk.model.parameters())) - 3
    rest = f"trainable: class_token, positions, norm_images.weight and {number} more"
    assert rest in str(check_trunk(trunk, images))


def test_a_report_prints_as_a_table():
    lines = (
        Line("short", True, "no difference", "not shown"),
        Line("a longer name", False, "difference 1", "change it"),
        Line("third", None, "not possible"),
    )
    report = Report("Thing", lines)
    assert str(report).splitlines() == [
        "Thing",
        "ok          short          no difference",
        "FAILED      a longer name  difference 1",
        "            -> change it",
        "not judged  third          not possible",
    ]
    assert report.failed == ("a longer name",)
    assert not report.passed
    assert Report("Thing", lines[::2]).passed


def test_an_object_that_is_no_trunk_lacks_members(images):
    report = check_trunk("vit", images)
    assert report.failed == ("members",)
    assert "lacks prefix, dim, depth" in str(report)
