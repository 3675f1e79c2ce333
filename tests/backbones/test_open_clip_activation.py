"""Weights of QuickGELU in a model of GELU: nothing fails, so something has to say it."""

import warnings

import open_clip
import pytest

from clips import make_clip
from fedprompt import check_activation

TRAINED_WITH_QUICK_GELU = [
    ("ViT-B-16", "openai"),
    ("RN50", "openai"),
    ("ViT-H-14", "dfn5b"),
    ("ViT-B-32", "metaclip_400m"),
]
TRAINED_WITH_GELU = [
    ("ViT-B-16", "laion400m_e32"),
    ("ViT-B-32", "laion2b_s34b_b79k"),
    ("ViT-B-16-SigLIP", "webli"),
]


@pytest.mark.parametrize("custom", [False, True])
@pytest.mark.parametrize(("name", "pretrained"), [*TRAINED_WITH_QUICK_GELU, *TRAINED_WITH_GELU])
def test_only_the_activation_of_training_goes_without_a_word(name, pretrained, custom):
    trained = (name, pretrained) in TRAINED_WITH_QUICK_GELU
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert check_activation(make_clip(quick_gelu=trained, custom=custom), name, pretrained)
    with pytest.warns(
        UserWarning, match="force_quick_gelu=True" if trained else "without '-quickgelu'"
    ) as caught:
        assert not check_activation(
            make_clip(quick_gelu=not trained, custom=custom), name, pretrained
        )
    assert len(caught) == 1
    assert repr(pretrained) in str(caught[0].message)


def test_the_remedy_is_one():
    config = open_clip.get_model_config("ViT-B-16")
    config["vision_cfg"] |= {"layers": 1, "width": 64}
    config["text_cfg"] |= {"layers": 1, "width": 64, "heads": 1}
    assert not config.get("quick_gelu", False)
    assert check_activation(
        open_clip.model.CLIP(**config | {"quick_gelu": True}), "ViT-B-16", "openai"
    )


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("name", "pretrained"),
    [("ViT-B-16", "no such tag"), ("ViT-B-16", "/home/me/weights.pt"), ("no such model", "openai")],
)
def test_weights_that_open_clip_does_not_know_are_an_error(name, pretrained):
    with pytest.raises(
        ValueError,
        match=rf"`pretrained` must be a tag that open_clip lists for `{name}`; got {pretrained}",
    ):
        check_activation(make_clip(), name, pretrained)
