"""Guide gradients on every kind of model, step and loss, against reverse over reverse; the pieces around them; what bad input says."""

import os
import re
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from fedprompt import (
    Ledger,
    Weighted,
    class_means,
    collect,
    guide_gradient,
    guided_loss,
    num_bytes,
    overwrite,
    per_name,
    per_name_update,
    snapshot,
    weighted_mean,
)
from fedprompt.guidance import GuideVectors, central_difference, double_backward, forward_mode
from guided import (
    BODIES,
    CLASSES,
    LOSSES,
    QUIZ,
    STUDY,
    WIDTH,
    Guided,
    Prompted,
    cnn,
    draw_guides,
    mlp,
    seeded,
    vit,
)
from references import fedl2g
from same import assert_same


def near(actual, expected, tolerance=1e-10):
    assert expected.norm() > 0
    assert (actual - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("features", [False, True])
@pytest.mark.parametrize("method", [forward_mode, double_backward])
@pytest.mark.parametrize("body", BODIES)
def test_every_model_space_and_loss_against_double_backward(body, method, features, loss):
    make, without_checkpointing = BODIES[body]
    model, twin = (Guided(build(), features=features) for build in (make, without_checkpointing))
    guides = draw_guides(WIDTH if features else CLASSES)
    torch.manual_seed(11)
    expected = fedl2g.double_backward(
        twin, guides, STUDY, QUIZ, fedl2g.descend(0.1), weight=0.7, loss=LOSSES[loss]
    )
    torch.manual_seed(11)
    value, weight = guide_gradient(
        model, guides, STUDY, QUIZ, learning_rate=0.1, weight=0.7, loss=LOSSES[loss], method=method
    )
    near(value, expected)
    assert weight.tolist() == [1.0, 1.0, 1.0, 1.0, 0.0]


def decay_and_momentum(parameters, gradients, *, learning_rate):
    return {
        name: value - learning_rate * (1.9 * (gradients[name] + 0.1 * value) + 0.05)
        for name, value in parameters.items()
    }


def adam(parameters, gradients, *, learning_rate):
    """The first step from zero moments; smooth at 0, where a bias before batch normalization has its gradient."""
    return {
        name: value - learning_rate * gradients[name] / (gradients[name].square() + 1e-6).sqrt()
        for name, value in parameters.items()
    }


def clipped(parameters, gradients, *, learning_rate):
    norm = torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt()
    assert norm > 0.5  # it is cut
    return {
        name: value - learning_rate * 0.5 / norm * gradients[name]
        for name, value in parameters.items()
    }


@pytest.mark.parametrize("update", [decay_and_momentum, adam, clipped])
@pytest.mark.parametrize("features", [False, True])
def test_any_step_that_can_be_differentiated(update, features):
    model, guides = Guided(cnn(), features=features), draw_guides(WIDTH if features else CLASSES)
    expected = fedl2g.double_backward(
        model, guides, STUDY, QUIZ, partial(update, learning_rate=0.1)
    )
    near(
        guide_gradient(model, guides, STUDY, QUIZ, learning_rate=0.1, update=update).value, expected
    )


def test_a_step_of_torch_optim_is_a_step():
    """`differentiable=True` of PyTorch's own optimisers, against the same step by hand."""

    def sgd(parameters, gradients, *, learning_rate):
        moved = {name: value.clone() for name, value in parameters.items()}
        optimizer = torch.optim.SGD(
            moved.values(), lr=learning_rate, weight_decay=0.1, differentiable=True
        )
        for name, value in moved.items():
            value.grad = gradients[name]
        optimizer.step()
        return moved

    def by_hand(parameters, gradients):
        return {
            name: value - 0.1 * (gradients[name] + 0.1 * value)
            for name, value in parameters.items()
        }

    model, guides = Guided(mlp(), features=False), draw_guides(CLASSES)
    expected = fedl2g.double_backward(model, guides, STUDY, QUIZ, by_hand)
    near(guide_gradient(model, guides, STUDY, QUIZ, learning_rate=0.1, update=sgd).value, expected)


class Pooled(nn.Module):
    """Features of any width on a common one: averaged over neighbours, or projected."""

    def __init__(self, *, projected):
        super().__init__()
        self.body = mlp()
        self.adapt = nn.Linear(WIDTH, 8).double() if projected else nn.AdaptiveAvgPool1d(8)
        self.head = nn.Linear(8, CLASSES).double()

    def forward(self, images):
        features = self.adapt(self.body(images))
        return features, self.head(features)


@pytest.mark.parametrize("projected", [False, True])
def test_features_of_another_width_are_pooled_or_projected(projected):
    model, guides = Pooled(projected=projected), draw_guides(8)
    near(
        guide_gradient(model, guides, STUDY, QUIZ, learning_rate=0.1).value,
        fedl2g.double_backward(model, guides, STUDY, QUIZ, fedl2g.descend(0.1)),
    )


def test_single_batches_and_sequences_of_one_are_the_same():
    model, guides = Guided(mlp(), features=False), draw_guides(CLASSES)
    single = guide_gradient(
        model, guides, STUDY[0], list(QUIZ[0]), learning_rate=0.1
    )  # a DataLoader yields lists
    several = guide_gradient(model, guides, [STUDY[0]], [list(QUIZ[0])], learning_rate=0.1)
    assert torch.equal(single.value, several.value)
    assert single.weight.tolist() == several.weight.tolist() == [1.0, 1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_labels_of_other_integer_dtypes_are_indices(dtype):
    model, guides, (images, labels) = Guided(mlp(), features=False), draw_guides(CLASSES), STUDY[0]
    expected = guide_gradient(model, guides, (images, labels), QUIZ[0], learning_rate=0.1)
    actual = guide_gradient(
        model,
        guides,
        (images, labels.to(dtype)),
        (QUIZ[0][0], QUIZ[0][1].to(dtype)),
        learning_rate=0.1,
    )
    assert torch.equal(actual.value, expected.value)
    assert torch.equal(actual.weight, expected.weight)


def test_it_works_where_gradients_are_off():
    model, guides = Guided(mlp(), features=False), draw_guides(CLASSES)
    expected = guide_gradient(model, guides, STUDY, QUIZ, learning_rate=0.1).value
    with torch.no_grad():
        assert torch.equal(
            guide_gradient(model, guides, STUDY, QUIZ, learning_rate=0.1).value, expected
        )


@pytest.mark.bad_input
def test_inference_mode_is_refused_in_plain_words():
    with (
        torch.inference_mode(),
        pytest.raises(RuntimeError, match="inference_mode forbids: call it outside"),
    ):
        run()


def test_guides_that_learn_get_no_gradient_from_here():
    guides = GuideVectors(CLASSES, CLASSES).double()
    upload = guide_gradient(Guided(mlp(), features=False), guides(), STUDY, QUIZ, learning_rate=0.1)
    assert guides.vectors.grad is None
    assert not upload.value.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_and_autocast_are_near_float64(dtype):
    model, guides = Guided(vit(), features=False), draw_guides(CLASSES)
    expected = guide_gradient(model, guides, STUDY, QUIZ, learning_rate=0.1).value

    def single(pairs):
        return [(images.float(), labels) for images, labels in pairs]

    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        actual = guide_gradient(
            model.float(), guides.float(), single(STUDY), single(QUIZ), learning_rate=0.1
        ).value
    assert actual.dtype == torch.float32
    near(actual.double(), expected, 1e-4 if dtype == torch.float32 else 0.1)


def test_weights_that_are_tied_move_together():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = (
                nn.Linear(768, CLASSES).double(),
                nn.Linear(768, CLASSES).double(),
            )
            self.second.weight = self.first.weight

        def forward(self, images):
            logits = self.first(images.flatten(1)).tanh() + self.second(images.flatten(1).flip(1))
            return logits, logits

    model, guides = Tied(), draw_guides(CLASSES)
    near(
        guide_gradient(model, guides, STUDY, QUIZ, learning_rate=0.01).value,
        fedl2g.double_backward(model, guides, STUDY, QUIZ, fedl2g.descend(0.01)),
    )


class Branches(nn.Module):
    """One layer for batches of five, the study's, another for batches of four, the quiz's; a scale that is rounded, and so never moves."""

    def __init__(self):
        super().__init__()
        self.body, self.scale = mlp(), nn.Parameter(torch.full((WIDTH,), 2.2, dtype=torch.float64))
        self.studied, self.judged = (seeded(lambda: nn.Linear(WIDTH, WIDTH)) for _ in range(2))

    def forward(self, images):
        return (self.studied if len(images) == 5 else self.judged)(
            self.body(images).tanh()
        ) * self.scale.round()


@pytest.mark.parametrize("method", [forward_mode, double_backward])
@pytest.mark.parametrize("update", [None, decay_and_momentum])
def test_parameters_that_one_batch_or_no_derivative_reaches(update, method):
    model, guides = Guided(Branches(), features=False), draw_guides(CLASSES)
    step = fedl2g.descend(0.1) if update is None else partial(update, learning_rate=0.1)
    expected = fedl2g.double_backward(model, guides, STUDY[:1], QUIZ[:1], step)
    near(
        guide_gradient(
            model, guides, STUDY[0], QUIZ[0], learning_rate=0.1, update=update, method=method
        ).value,
        expected,
    )


# What forward mode must know of a model.


class WithoutGradient(nn.Module):
    """A gate that is computed with gradients off, from weights that learn elsewhere: a constant, whichever way one differentiates."""

    def __init__(self):
        super().__init__()
        self.body = mlp()

    def forward(self, images):
        features = self.body(images)
        with torch.no_grad():
            gate = torch.sigmoid(self.body(images.flip(0)))
        return features * gate


def test_what_stands_under_no_grad_is_a_constant():
    model, guides = Guided(WithoutGradient(), features=False), draw_guides(CLASSES)
    expected = fedl2g.double_backward(model, guides, STUDY, QUIZ, fedl2g.descend(0.1))
    for method in (forward_mode, double_backward):
        near(
            guide_gradient(model, guides, STUDY, QUIZ, learning_rate=0.1, method=method).value,
            expected,
        )


class Attending(nn.Module):
    """Attention after layer normalisation, as asked for, scaled by a copy of itself that is computed with gradients off."""

    def __init__(self, norm, query=None, **options):
        super().__init__()
        self.embed, self.norm, self.join = (
            seeded(make)
            for make in (lambda: nn.Linear(256, 48), norm, lambda: nn.Linear(72, WIDTH))
        )
        self.query, self.options = query, options
        for number, parameter in enumerate(self.norm.parameters()):
            parameter.data = 1 + 0.5 * draw_guides(48, classes=1, seed=number)[0]

    def attend(self, hidden):
        heads = self.norm(hidden).unflatten(-1, (4, 12)).transpose(1, 2)
        query, key, value = heads[..., :3], heads[..., 3:6], heads[..., 6:]
        if self.options.get("enable_gqa", False):
            key, value = key[:, :2], value[:, :2]
        return F.scaled_dot_product_attention(
            query if self.query is None else self.query, key, value, **self.options
        ).flatten(1)

    def forward(self, images):
        hidden = self.embed(images.flatten(2))
        with torch.no_grad():
            gate = self.attend(hidden.flip(0))
        return self.join(self.attend(hidden) * (1 + gate))


def half_frozen():
    norm = nn.LayerNorm(48)
    norm.weight.requires_grad_(False)
    return norm


NORMS = {
    "learned": lambda: nn.LayerNorm(48),
    "frozen": lambda: nn.LayerNorm(48).requires_grad_(False),
    "only the bias learns": half_frozen,
    "only the weight learns": lambda: nn.LayerNorm(48, bias=False),
    "no bias": lambda: nn.LayerNorm(48, bias=False, eps=0.5).requires_grad_(False),
    "nothing": lambda: nn.LayerNorm(48, elementwise_affine=False),
}
ATTENTION = {
    "plain": {},
    "scale": {"scale": 0.3},
    "causal": {"is_causal": True},
    "numbers masked": {"attn_mask": draw_guides(3, classes=3)},
    "some masked": {"attn_mask": torch.ones(3, 3).tril().bool()},
    "grouped": {"enable_gqa": True},
    "constant query": {"query": draw_guides(3, classes=3).expand(4, 3, 3)},
}


@pytest.mark.parametrize(
    ("norm", "options"),
    [*((norm, {}) for norm in NORMS), *(("frozen", options) for options in ATTENTION.values())],
)
def test_every_form_of_attention_and_layer_normalisation(norm, options):
    model, guides = Guided(Attending(NORMS[norm], **options), features=False), draw_guides(CLASSES)
    expected = fedl2g.double_backward(model, guides, STUDY, QUIZ, fedl2g.descend(0.1))
    near(guide_gradient(model, guides, STUDY, QUIZ, learning_rate=0.1).value, expected)


class Cube(torch.autograd.Function):
    """Differentiable twice, but without a forward mode."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, slope):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * slope


@torch.library.custom_op("fedprompt_tests::square", mutates_args=())
def square(x: torch.Tensor) -> torch.Tensor:
    return x * x


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


square.register_autograd(lambda ctx, slope: 2 * ctx.saved_tensors[0] * slope, setup_context=_keep)


class Opaque(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.body, self.function = mlp(), function

    def forward(self, images):
        hidden = self.body(images)
        return hidden + self.function(
            hidden
        )  # the tangent of the sum is there, and wrong, where the function lost its own


@pytest.mark.parametrize("function", [Cube.apply, square, lambda x: square(x=x)])
def test_an_operator_without_forward_mode_is_said_and_worked_around(function):
    model, guides = Guided(Opaque(function), features=True), draw_guides(WIDTH)
    expected = fedl2g.double_backward(model, guides, STUDY, QUIZ, fedl2g.descend(0.1))
    with pytest.warns(UserWarning, match="falls back on double_backward"):
        value = guide_gradient(model, guides, STUDY, QUIZ, learning_rate=0.1).value
    near(value, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        near(
            guide_gradient(
                model, guides, STUDY, QUIZ, learning_rate=0.1, method=double_backward
            ).value,
            expected,
        )


PROGRAM = """
import torch
from fedprompt import guide_gradient
from guided import QUIZ, STUDY, WIDTH, Guided, draw_guides
from test_guidance import Cube, Opaque
for _ in range(3):
    guide_gradient(Guided(Opaque(Cube.apply), features=True), draw_guides(WIDTH), STUDY, QUIZ, learning_rate=0.1)
"""


def test_the_fallback_is_said_once_and_points_at_the_call():
    """In a process of its own: the import hook's frames and pytest's filters would make Python repeat itself."""
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here.parent), str(here)])
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert run.stderr.count("falls back on double_backward") == 1, run.stderr
    assert run.stderr.startswith("<string>:7: UserWarning: forward_mode falls back")


def test_the_fast_path_of_multihead_attention_is_off_only_inside():
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True).double().eval()
    body = nn.Sequential(
        nn.Flatten(2),
        nn.Linear(256, WIDTH).double(),
        layer,
        nn.Flatten(),
        nn.Linear(3 * WIDTH, WIDTH).double(),
    )
    model, guides = Guided(body, features=False), draw_guides(CLASSES)
    expected = fedl2g.double_backward(model, guides, STUDY, QUIZ, fedl2g.descend(0.1))
    inside = []

    def watched(evaluate, parameters, direction):
        def look(guided):
            inside.append(torch.backends.mha.get_fastpath_enabled())
            return guided

        return forward_mode(
            lambda values, then: evaluate(values, lambda guided: then(look(guided))),
            parameters,
            direction,
        )

    near(
        guide_gradient(model, guides, STUDY, QUIZ, learning_rate=0.1, method=watched).value,
        expected,
    )
    assert inside == [False, False]
    assert torch.backends.mha.get_fastpath_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()


class Kernels(TorchFunctionMode):
    """Writes down, for every attention, how much it drops out and whether the fused kernels are allowed."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            self.seen.append((kwargs["dropout_p"], torch.backends.cuda.flash_sdp_enabled()))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("dropout", "passes"), [(0.0, [True, True, False]), (0.3, [False, False, False])]
)
def test_fused_attention_runs_where_masks_need_no_replay(dropout, passes):
    """The study, quiz and tangent pass of 3 blocks each, the last by a method that hands attention on; a CPU would choose so by itself."""
    model, guides = Guided(vit(dropout=dropout), features=False), draw_guides(CLASSES)
    with Kernels() as kernels:
        guide_gradient(model, guides, STUDY[0], QUIZ[0], learning_rate=0.1, method=double_backward)
    assert kernels.seen == [(dropout, fused) for fused in passes for _ in range(3)]


def test_an_error_in_the_model_leaves_everything_as_it_was():
    model = Guided(nn.Sequential(nn.Dropout(0.5), mlp()), features=False)
    state, before = (
        torch.get_rng_state(),
        {name: value.clone() for name, value in model.state_dict().items()},
    )
    broken = [QUIZ[0], (torch.zeros(2, 3, 8, 8, dtype=torch.float64), torch.tensor([0, 1]))]
    with pytest.raises(RuntimeError):
        guide_gradient(model, draw_guides(CLASSES), STUDY, broken, learning_rate=0.1)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.backends.mha.get_fastpath_enabled()


def test_frozen_weights_are_not_multiplied_by_zero_tangents():
    """Products of the tangent pass, counted: for each frozen linear map one of the values and one of the tangents."""
    from torch.profiler import ProfilerActivity, profile

    model = Guided(Prompted(checkpointing=False), features=False)

    def products(method):
        with profile(activities=[ProfilerActivity.CPU]) as record:
            guide_gradient(
                model, draw_guides(CLASSES), STUDY[0], QUIZ[0], learning_rate=0.1, method=method
            )
        return sum(
            event.count
            for event in record.key_averages()
            if event.key in ("aten::addmm", "aten::mm")
        )

    def nothing(evaluate, parameters, direction):
        return evaluate(parameters, torch.zeros_like)

    # A plain pass has 14 of them (embedding is a convolution; 3 blocks of qkv, proj, fc1, fc2; the head counts thrice, for it learns).
    plain = products(nothing) - products(
        lambda evaluate, parameters, direction: torch.zeros(
            len(STUDY[0][1]), CLASSES, dtype=torch.float64
        )
    )
    assert products(forward_mode) - products(nothing) + plain <= 2 * plain + 1


def test_the_tangent_pass_of_attention_and_frozen_norms_is_as_short_as_it_can_be():
    """Four products for each of 3 attentions, of which PyTorch's own rule has six; one kernel for the tangent of each of 8 norms."""
    from torch.profiler import ProfilerActivity, profile

    body = Prompted(checkpointing=False)
    parameters = {name: value.detach() for name, value in body.named_parameters()}

    def evaluate(values, then):
        return then(torch.func.functional_call(body, values, (STUDY[0][0],)))

    with profile(activities=[ProfilerActivity.CPU]) as record:
        forward_mode(evaluate, parameters, parameters)
    counts = {event.key: event.count for event in record.key_averages()}
    assert counts["aten::bmm"] == 3 * 4
    assert (
        counts["aten::native_layer_norm"] == counts["aten::native_layer_norm_backward"] == 3 * 2 + 2
    )  # two in each block, the pooled token's, the prompts'


# The pieces around it.


def test_guide_vectors_are_standard_normal_and_travel_as_one_table(generator):
    guides = GuideVectors(200, 50, generator=generator)
    # 10,000 numbers: mean within 5 / 100, standard deviation within 5 / sqrt(20000).
    assert abs(guides().mean().item()) < 0.05
    assert abs(guides().std().item() - 1) < 0.036
    assert torch.equal(
        GuideVectors(200, 50, generator=torch.Generator().manual_seed(0))(), guides()
    )
    assert list(snapshot(guides)) == ["vectors"]


def test_guided_loss_by_hand():
    guided, logits = (
        torch.tensor([[1.0, 2.0], [0.0, 0.0]]),
        torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]),
    )
    guides = torch.tensor([[0.0, 0.0], [1.0, 1.0], [3.0, 0.0]])
    value = guided_loss(guided, logits, torch.tensor([1, 2]), guides, weight=2.0)
    # log 3 + 2 * (0 + 1 + 9 + 0) / 4
    torch.testing.assert_close(value, torch.tensor(3.0).log() + 5.0)
    doubled = guided_loss(
        guided,
        logits,
        torch.tensor([1, 2]),
        guides,
        weight=0.5,
        loss=lambda own, row: (own - row).abs().sum(),
    )
    torch.testing.assert_close(doubled, torch.tensor(3.0).log() + 0.5 * 4)


def test_table_3_bytes_down_and_the_rows_that_go_up():
    """L-l. 20 clients, 100 classes, float32: 0.763 and 3.906 MiB down; Table 3 prints 0.76 and 3.89. Up goes one study batch's classes."""
    for dim, mebibytes in ((100, 0.763), (512, 3.906)):
        ledger, table = Ledger(), snapshot(GuideVectors(100, dim))
        for client in range(20):
            ledger.record(table, direction="down", client=client, server_round=0)
        assert ledger.total(direction="down") == 20 * 100 * dim * 4
        assert round(ledger.total(direction="down") / 2**20, 3) == mebibytes
        for classes in (
            7,
            45,
        ):  # of a batch of ten, say; 45 rows for each client are what the printed 0.34 and 1.75 MiB up come to
            upload = Weighted(torch.ones(100, dim), (torch.arange(100) < classes).float())
            assert num_bytes({"vectors": upload}) == classes * dim * 4 + 100 * 4
    assert pytest.approx(0.34, abs=0.005) == 20 * 45 * 100 * 4 / 2**20
    assert pytest.approx(1.75, abs=0.01) == 20 * 45 * 512 * 4 / 2**20


UNKNOWN = Weighted(
    torch.tensor([[0.0, 0.0], [torch.nan, torch.nan], [3.0, 0.0]], dtype=torch.float64),
    torch.tensor([2.0, 0.0, 0.5]),
)


def test_guides_of_weight_zero_pull_nothing_by_hand():
    guided = torch.tensor(
        [[1.0, 2.0], [3.0, 5.0], [1.0, 1.0]], dtype=torch.float64, requires_grad=True
    )
    logits, labels = torch.zeros(3, 3, dtype=torch.float64), torch.tensor([0, 1, 2])
    loss = guided_loss(guided, logits, labels, UNKNOWN, weight=3.0)
    loss.backward()
    # log 3 + 3 * (1 + 4 + 0 + 0 + 4 + 1) / 6; a slope of 3 * 2 * difference / 6; positive weights count the same.
    torch.testing.assert_close(loss.detach(), torch.tensor(3.0, dtype=torch.float64).log() + 5)
    assert guided.grad.tolist() == [[1.0, 2.0], [0.0, 0.0], [-2.0, 1.0]]


def root(guided, rows):
    """No divergence, and without a slope where the two agree."""
    return (guided - rows).square().sum(1).sqrt().mean() + guided.sum()


@pytest.mark.parametrize("loss", [*LOSSES.values(), root])
def test_guides_of_weight_zero_pull_nothing_under_any_loss(loss, generator):
    guided = torch.randn(4, 2, generator=generator, dtype=torch.float64).requires_grad_()
    logits, labels = torch.zeros(4, 3, dtype=torch.float64), torch.tensor([1, 0, 1, 2])
    guides = Weighted(
        UNKNOWN.value + 1, UNKNOWN.weight
    )  # a cosine has no slope at a guide of zeros
    (slope,) = torch.autograd.grad(guided_loss(guided, logits, labels, guides, loss=loss), guided)
    assert not slope[labels == 1].any()
    assert bool(slope[labels != 1].isfinite().all())
    assert bool((slope[labels != 1] != 0).any(1).all())
    everything = guided_loss(
        guided, logits, labels, Weighted(UNKNOWN.value.nan_to_num(), torch.ones(3)), loss=loss
    )
    assert_same(
        everything, guided_loss(guided, logits, labels, UNKNOWN.value.nan_to_num(), loss=loss)
    )


@pytest.mark.parametrize("method", [forward_mode, double_backward])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_gradient_of_guides_of_which_some_are_unknown(loss, method):
    """The reference sees the whole batch and a loss that leaves the samples of class 1 out."""
    model, guides = Guided(mlp(), features=False), draw_guides(CLASSES)
    weight = torch.tensor([1.0, 0.0, 2.0, 5.0, 1.0])
    told = Weighted(guides.index_fill(0, torch.tensor(1), torch.nan), weight)

    def without(guided, rows):
        unknown = (rows == guides[1]).all(1)
        return LOSSES[loss](guided[~unknown], rows[~unknown]) * (~unknown).double().mean()

    expected = fedl2g.double_backward(model, guides, STUDY, QUIZ, fedl2g.descend(0.1), loss=without)
    value, known = guide_gradient(
        model, told, STUDY, QUIZ, learning_rate=0.1, loss=LOSSES[loss], method=method
    )
    near(value, expected)
    assert not value[1].any()
    assert known.tolist() == [1.0, 0.0, 1.0, 1.0, 0.0]


def test_an_empty_batch_costs_nothing_and_has_gradients_of_zero():
    guided, logits, guides = (
        torch.ones(size, requires_grad=True) for size in ((0, 2), (0, 3), (3, 2))
    )
    labels = torch.zeros(0, dtype=torch.int64)
    for table in (guides, Weighted(guides, torch.tensor([1.0, 0.0, 1.0]))):
        loss = guided_loss(guided, logits, labels, table)
        loss.backward()
        assert loss.item() == 0
    assert guides.grad.tolist() == [[0.0, 0.0]] * 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_clients_follow_guides_in_float32(dtype):
    # Differences of 300 have squares beyond float16 (65,504); so has the spread of the logits.
    guided = torch.zeros(1, 2, dtype=dtype, requires_grad=True)
    logits = torch.tensor([[6e4, -6e4]], dtype=dtype)
    loss = guided_loss(
        guided, logits, torch.tensor([1]), torch.full((2, 2), 300.0, dtype=dtype), weight=2.0
    )
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.item(), 2 * logits[0, 0].item() + 2 * 300.0**2)
    loss.backward()
    assert guided.grad.tolist() == [[-600.0, -600.0]]  # 2 * 2 * -300 / 2


# Baselines from the same pieces.


def test_fedproto_and_feddistill_are_class_means_and_a_guided_loss(generator):
    """Prototypes of three clients by hand; each then follows them. In the first round all have weight 0."""
    features = torch.randn(3, 6, 4, generator=generator, dtype=torch.float64)
    labels = torch.tensor([[0, 0, 1, 1, 1, 2], [1, 1, 1, 1, 1, 1], [2, 2, 0, 2, 2, 2]])
    uploads = [
        class_means(own, label, num_classes=4) for own, label in zip(features, labels, strict=True)
    ]
    update = overwrite()
    start = torch.zeros(4, 4, dtype=torch.float64)
    prototypes, _ = update.step(start, weighted_mean(uploads), update.init(start))
    pooled, owner = features.flatten(0, 1), labels.flatten()
    for label in range(3):
        torch.testing.assert_close(prototypes[label], pooled[owner == label].mean(0))
    assert not prototypes[3].any()
    logits = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    expected = (
        F.cross_entropy(logits, labels[0])
        + 0.1 * (features[0] - prototypes[labels[0]]).square().mean()
    )
    torch.testing.assert_close(
        guided_loss(features[0], logits, labels[0], prototypes, weight=0.1), expected
    )
    nothing = Weighted(start, torch.zeros(4))
    torch.testing.assert_close(
        guided_loss(features[0], logits, labels[0], nothing), F.cross_entropy(logits, labels[0])
    )


def test_lg_fedavg_shares_the_heads_of_equal_width():
    """Heads are averaged among clients of the same shape, weighted by their samples; bodies stay at home."""
    heads = [
        nn.ModuleDict({"body": nn.Linear(width, 3), "head": nn.Linear(3, 2)}) for width in (5, 7, 5)
    ]
    uploads = [
        collect(model, weight=size, only=["head"])
        for model, size in zip(heads, (1, 2, 5), strict=True)
    ]
    assert list(uploads[0]) == ["head.weight", "head.bias"]
    values, server = snapshot(heads[0], only=["head"]), per_name_update()
    new, _ = server.step(values, per_name()(uploads), server.init(values))
    expected = (
        sum(size * model["head"].weight for model, size in zip(heads, (1, 2, 5), strict=True)) / 8
    )
    torch.testing.assert_close(new["head.weight"], expected.detach())


# Bad input.


def run(model=None, guides=None, study=None, quiz=None, **options):
    model = Guided(mlp(), features=False) if model is None else model
    guides = draw_guides(CLASSES) if guides is None else guides
    study, quiz = (own if given is None else given for given, own in ((study, STUDY), (quiz, QUIZ)))
    return guide_gradient(model, guides, study, quiz, **{"learning_rate": 0.1, **options})


class Answer(nn.Module):
    """Gives whatever a function makes of two good outputs."""

    def __init__(self, change):
        super().__init__()
        self.inner, self.change = Guided(mlp(), features=False), change

    def forward(self, images):
        return self.change(*self.inner(images))


def frozen_body():
    model = Guided(mlp(), features=True)
    model.body.requires_grad_(False)
    return model


def with_an_unused_parameter():
    model = Guided(mlp(), features=False)
    model.spare = nn.Linear(2, 2).double()
    return model


def with_a_broken_weight():
    model = Guided(mlp(), features=False)
    with torch.no_grad():
        model.head.bias[0] = torch.inf
    return model


IMAGES = STUDY[0][0]
EMPTY = (IMAGES[:0], torch.zeros(0, dtype=torch.int64))
BAD = [
    (
        {"model": torch.nn.functional.relu},
        TypeError,
        "`model` must be an nn.Module; got <function relu",
    ),
    (
        {"guides": torch.zeros(5, 5, dtype=torch.int64)},
        TypeError,
        "`guides` must be a floating-point tensor of shape (classes, dim), or such rows as a Weighted; got a int64",
    ),
    ({"guides": torch.zeros(5)}, ValueError, "`guides` must have shape (classes, dim); got (5,)"),
    (
        {"guides": draw_guides(7)},
        ValueError,
        "`guided` must be floating-point of shape (5, 7) to match `logits` and `guides`; got a float64",
    ),
    (
        {"guides": draw_guides(5, classes=6)},
        ValueError,
        "`logits` must be floating-point of shape (batch, 6), a column for each row",
    ),
    ({"learning_rate": 0.0}, ValueError, "`learning_rate` must be above 0; got 0.0"),
    ({"weight": -1.0}, ValueError, "`weight` must be at least 0; got -1.0"),
    (
        {"study": (IMAGES, torch.tensor([0, 1, 5, 0, 0]))},
        ValueError,
        "`study labels` must lie in [0, 5); got values from 0 to 5",
    ),
    (
        {"quiz": [QUIZ[0], (IMAGES, torch.tensor([0, 1, -1, 0, 0]))]},
        ValueError,
        "`quiz[1] labels` must lie in [0, 5); got values from -1 to 1",
    ),
    (
        {"study": (IMAGES, torch.zeros(5))},
        TypeError,
        "`study labels` must be integers of shape (batch,); got a float32",
    ),
    ({"study": EMPTY}, ValueError, "`study` must hold at least one sample; got none"),
    ({"quiz": EMPTY}, ValueError, "`quiz` must hold at least one sample; got none"),
    ({"study": []}, ValueError, "`study` must hold at least one batch; got none"),
    ({"quiz": []}, ValueError, "`quiz` must hold at least one batch; got none"),
    (
        {"study": IMAGES},
        TypeError,
        "`study` must be a pair (images, labels) or a sequence of pairs; got a float64",
    ),
    (
        {"study": [IMAGES, STUDY[0][1], IMAGES]},
        TypeError,
        "`study[0]` must be a pair of tensors (images, labels); got a float64",
    ),
    (
        {"quiz": (IMAGES, torch.tensor([0, 1]))},
        ValueError,
        "`quiz` must have as many images as labels; got (5, 3, 16, 16) and (2,)",
    ),
    (
        {"model": Answer(lambda guided, logits: logits)},
        TypeError,
        "`model` must return two tensors (guided, logits); got a float64",
    ),
    (
        {"model": Answer(lambda guided, logits: (logits,))},
        TypeError,
        "`model` must return two tensors (guided, logits); got ['a float64",
    ),
    (
        {"model": Answer(lambda guided, logits: (guided, logits[:, :4]))},
        ValueError,
        "`logits` must be floating-point of shape (batch, 5)",
    ),
    (
        {"model": Answer(lambda guided, logits: (guided[:-1], logits))},
        ValueError,
        "`guided` must be floating-point of shape (5, 5)",
    ),
    (
        {"model": Answer(lambda guided, logits: (guided[:-1], logits[:-1]))},
        ValueError,
        "`labels` must be integers of shape (4,)",
    ),
    (
        {"model": Answer(lambda guided, logits: (guided.detach(), logits))},
        ValueError,
        "`model` must let a trainable parameter reach its guided",
    ),
    (
        {"model": frozen_body(), "guides": draw_guides(WIDTH)},
        ValueError,
        "`model` must let a trainable parameter reach its guided output; got",
    ),
    (
        {"model": with_an_unused_parameter()},
        ValueError,
        "or freeze it; got no gradient for ['spare.weight', 'spare.bias'].",
    ),
    (
        {"model": with_an_unused_parameter(), "update": decay_and_momentum},
        ValueError,
        "or freeze it; got no gradient for ['spare.weight'",
    ),
    (
        {"model": Guided(mlp(), features=False).requires_grad_(False)},
        ValueError,
        "`model` must have a parameter that requires gradients; got none",
    ),
    (
        {"model": with_a_broken_weight()},
        ValueError,
        "`study` must give finite gradients; got NaN or infinity for ['body.1.weight'",
    ),
    (
        {"quiz": (QUIZ[0][0] * torch.nan, QUIZ[0][1])},
        ValueError,
        "`quiz` must give finite gradients; got NaN or infinity for ['body.1.weight'",
    ),
    (
        {"loss": lambda guided, rows: (guided - rows).square()},
        ValueError,
        "`loss` must return a scalar, such as a mean over the batch; got a",
    ),
    (
        {"loss": lambda guided, rows: guided.mean()},
        ValueError,
        "`loss` must be twice differentiable; got a gradient in",
    ),
    (
        {"update": lambda parameters, gradients, *, learning_rate: {}},
        ValueError,
        "`update` must return the parameters {'body.1.weight': (10, 768)",
    ),
    (
        {"update": lambda parameters, gradients, *, learning_rate: parameters},
        ValueError,
        "`update` must compute the step from the gradients",
    ),
    (
        {"method": partial(central_difference, step=0.0)},
        ValueError,
        "`step` must be above 0; got 0.0",
    ),
]


@pytest.mark.bad_input
@pytest.mark.parametrize(("options", "error", "message"), BAD)
def test_guide_gradient_names_a_bad_argument(options, error, message):
    state = torch.get_rng_state()
    with pytest.raises(error, match=re.escape(message)):
        run(**options)
    assert torch.equal(torch.get_rng_state(), state)


def follow(guided=None, logits=None, labels=None, guides=None, **options):
    good = (torch.zeros(2, 3), torch.zeros(2, 4), torch.tensor([0, 1]), torch.zeros(4, 3))
    given = (guided, logits, labels, guides)
    return guided_loss(
        *(one if other is None else other for one, other in zip(good, given, strict=True)),
        **options,
    )


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: GuideVectors(0, 3), ValueError, "`num_classes` must be at least 1; got 0"),
        (lambda: GuideVectors(3, 2.0), TypeError, "`dim` must be an integer; got 2.0"),
        (
            lambda: follow(labels=torch.tensor([0, 4])),
            ValueError,
            "`labels` must lie in [0, 4); got values from 0 to 4",
        ),
        (
            lambda: follow(labels=torch.zeros(2)),
            TypeError,
            "`labels` must be integers of shape (batch,)",
        ),
        (
            lambda: follow(labels=torch.tensor([0])),
            ValueError,
            "`labels` must be integers of shape (2,) to match `logits`",
        ),
        (
            lambda: follow(logits=torch.zeros(2, 5)),
            ValueError,
            "`logits` must be floating-point of shape (batch, 4), a column",
        ),
        (
            lambda: follow(guided=torch.zeros(2, 2)),
            ValueError,
            "`guided` must be floating-point of shape (2, 3)",
        ),
        (
            lambda: follow(guides=torch.zeros(0, 3)),
            ValueError,
            "`guides` must have shape (classes, dim); got (0, 3)",
        ),
        (
            lambda: follow(guides=Weighted(torch.zeros(4, 3), torch.zeros(()))),
            ValueError,
            "`guides.weight` must have shape (4,); got ()",
        ),
        (
            lambda: follow(guides=Weighted(torch.zeros(4, 3), torch.tensor([1.0, -1.0, 0.0, 0.0]))),
            ValueError,
            "`guides.weight` must be finite and at least 0; got -1.0",
        ),
        (lambda: follow(weight="1"), TypeError, "`weight` must be a number"),
        (lambda: follow(weight=-0.5), ValueError, "`weight` must be at least 0; got -0.5"),
    ],
)
def test_the_other_pieces_name_a_bad_argument(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()
