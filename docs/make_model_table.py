"""Write ``docs/reference/models.md``, the tables of the models that accept prompts.

The models are those of the tests. Run ``python docs/make_model_table.py`` from any folder.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "helpers")]

import torch  # noqa: E402

from fedprompt import vit_trunk  # noqa: E402
from models import ACCEPTED, REFUSED, Row, build  # noqa: E402
from towers import OPEN_CLIP, TRANSFORMERS, Tower, build_tower  # noqa: E402

TEXT = """# Models that accept prompts

`vit_trunk(model)` makes a trunk from any timm `VisionTransformer` or `Eva`, from the image towers
of open_clip, from torchvision's `VisionTransformer`, and from ViT, DeiT, DINOv2, DINOv3, CLIP and
SigLIP of transformers. You can use any of their sizes and weights. The tables list the models of
the tests: without prompts, features equal the model's, and with prompts at every layer the model's
forward pass with the same prompts inserted by hooks, to 3e-15 in float64.

## timm

<!-- made by docs/make_model_table.py -->

| Model | Family | Pooling |
|---|---|---|
{accepted}

<!-- end -->

## open_clip

Pass the image tower, `vit_trunk(clip_model.visual)`. The names are those of open_clip's
configurations.

<!-- made by docs/make_model_table.py -->

| Model | Family | Features |
|---|---|---|
{open_clip}

<!-- end -->

## transformers

<!-- made by docs/make_model_table.py -->

| Model | Family | Features |
|---|---|---|
{transformers}

<!-- end -->

## Refused models

Other models are refused by a `TypeError` with the reason. {{doc}}`/how-to/write-a-trunk` shows how
to support a transformer. For convolutional networks and for attention within windows, use
{{class}}`~fedprompt.PadPrompts`.

<!-- made by docs/make_model_table.py -->

| Model | Family | Reason |
|---|---|---|
{refused}

<!-- end -->
"""


def accepted_line(row: Row) -> str:
    """Return the row of a model of timm."""
    model = build(row)
    vit_trunk(model)
    after = not isinstance(model.fc_norm, torch.nn.Identity)
    pooling = f"{model.global_pool}, norm after" if after else model.global_pool
    return line(row.name, row.family, pooling)


def tower_line(row: Tower) -> str:
    """Return the row of a tower of open_clip or transformers."""
    model = build_tower(row)
    trunk = vit_trunk(model)
    projected = trunk.num_features != trunk.dim
    features = "projected" if projected else "as wide as tokens"
    return line(row.name, row.family, features)


def line(name: str, family: str, last: str) -> str:
    """Return a row of a table."""
    return f"| `{name}` | {family} | {last} |"


def refused_line(row: Row) -> str:
    """Return the row of a refused model, with the reason."""
    try:
        vit_trunk(build(row))
    except TypeError as error:
        reason = str(error).partition("(")[2].rpartition(")")[0].partition(";")[0]
        if "attention within windows" in reason:
            reason = (
                "attention within windows, so no token is attended to by every patch"
            )
        return f"| `{row.name}` | {row.family} | {reason} |"
    raise RuntimeError(f"{row.name} was not refused.")


if __name__ == "__main__":
    torch.set_num_threads(1)
    page = TEXT.format(
        accepted="\n".join(map(accepted_line, ACCEPTED)),
        open_clip="\n".join(map(tower_line, OPEN_CLIP)),
        transformers="\n".join(map(tower_line, TRANSFORMERS)),
        refused="\n".join(map(refused_line, REFUSED)),
    )
    (ROOT / "docs" / "reference" / "models.md").write_text(page)
