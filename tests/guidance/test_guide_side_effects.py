"""The state that a guide gradient may change: settings of attention, random streams, the model."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from fedprompt.guidance import double_backward, forward_mode, guide_gradient
from guided import CLASSES, QUIZ, STUDY, WIDTH, Guided, assert_near_in_norm, draw_guides, mlp, vit
from references import fedl2g


def test_the_attention_fast_path_is_off_only_during_the_call():
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

    def recording(evaluate, parameters, direction):
        def record(guided):
            inside.append(torch.backends.mha.get_fastpath_enabled())
            return guided

        return forward_mode(
            lambda values, then: evaluate(values, lambda guided: then(record(guided))),
            parameters,
            direction,
        )

    assert_near_in_norm(
        guide_gradient(model, guides, STUDY, QUIZ, learning_rate=0.1, method=recording).value,
        expected,
    )
    assert inside == [False, False]
    assert torch.backends.mha.get_fastpath_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()


class Kernels(TorchFunctionMode):
    """Function mode that records the dropout of each attention, and if fused kernels are on."""

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
def test_study_and_quiz_use_fused_attention_unless_it_has_dropout(dropout, passes):
    """Study, quiz and tangent pass have 3 attentions each. Double backward keeps all of them."""
    model, guides = Guided(vit(dropout=dropout), features=False), draw_guides(CLASSES)
    with Kernels() as kernels:
        guide_gradient(model, guides, STUDY[0], QUIZ[0], learning_rate=0.1, method=double_backward)
    assert kernels.seen == [(dropout, fused) for fused in passes for _ in range(3)]


def test_an_error_in_the_model_leaves_model_and_streams_unchanged():
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
