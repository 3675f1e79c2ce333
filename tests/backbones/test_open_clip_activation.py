"""Warnings about weights of QuickGELU in a model with GELU."""

import warnings

import open_clip
import pytest

from clips import make_clip
from fedprompt.check import activation as check_activation

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
def test_another_activation_than_in_training_gives_a_warning(name, pretrained, custom):
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


def test_the_suggested_remedy_works():
    config = open_clip.get_model_config("ViT-B-16")
    config["vision_cfg"] |= {"layers": 1, "width": 64}
    config["text_cfg"] |= {"layers": 1, "width": 64, "heads": 1}
    assert not config.get("quick_gelu", False)
    assert check_activation(
        open_clip.model.CLIP(**config | {"quick_gelu": True}), "ViT-B-16", "openai"
    )
