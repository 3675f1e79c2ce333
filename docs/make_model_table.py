"""Write ``docs/reference/models.md``: which timm models take prompts, measured on the table that the tests use.

Run it from anywhere: ``python docs/make_model_table.py``.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import torch  # noqa: E402

from fedprompt import PromptStream, encode_prompted, vit_trunk  # noqa: E402
from models import ACCEPTED, REFUSED, Row, build, draw_images, plain  # noqa: E402
from references.vpt import hooked  # noqa: E402

TEXT = """# Which timm models take prompts

`vit_trunk(model)` makes a trunk of any timm `VisionTransformer` or `Eva`. These were tried, each small (three blocks of width 48), with
random weights, in float64:

- *without prompts*: the largest difference between `encode_prompted(trunk, images).pooled` and what the model itself pools;
- *with prompts*: the largest difference, with two prompts at every layer that replace those of the layer before, to the model's own forward
  pass with the same prompts slipped in by hooks; features have entries around 1, and the prompts moved each model's by more than 0.001.

| Model | Family | Class | Prefix tokens | Pooling | Without prompts | With prompts |
|---|---|---|---|---|---|---|
{accepted}

## Refused

A `TypeError` gives the reason. For convolutional networks there is `PadPrompts`.

| Model | Family | Reason |
|---|---|---|
{refused}

This page is written by `docs/make_model_table.py`; `tests/backbones/test_timm.py` fails when the two disagree.
"""


def accepted_line(row: Row) -> str:
    """Measure one model."""
    model = build(row)
    trunk, images = vit_trunk(model), draw_images(model)
    tokens = torch.randn(
        trunk.depth, 2, trunk.dim, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )
    layers = dict(enumerate(tokens))

    expected, (prompted, _) = plain(model, images), hooked(model, images, layers, replace=True)
    without = (encode_prompted(trunk, images).pooled - expected).abs().max().item()
    pooled = encode_prompted(trunk, images, PromptStream(layers, True)).pooled
    if (pooled - expected).abs().max() < 1e-3:
        raise RuntimeError(f"{row.name}: prompts do nothing.")
    difference = (pooled - prompted).abs().max().item()
    pooling = (
        f"{model.global_pool}, norm after"
        if not isinstance(model.fc_norm, torch.nn.Identity)
        else model.global_pool
    )
    cells = (
        f"`{row.name}`",
        row.family,
        f"`{type(model).__name__}`",
        trunk.prefix,
        pooling,
        f"{without:.0e}",
        f"{difference:.0e}",
    )
    return f"| {' | '.join(str(cell) for cell in cells)} |".replace("0e+00", "0")


def refused_line(row: Row) -> str:
    """Ask for the reason."""
    try:
        vit_trunk(build(row))
    except TypeError as error:
        reason = str(error).partition("(")[2].rpartition(")")[0].partition(";")[0]
        return f"| `{row.name}` | {row.family} | {reason} |"
    raise RuntimeError(f"{row.name} was not refused.")


if __name__ == "__main__":
    torch.set_num_threads(1)
    page = TEXT.format(
        accepted="\n".join(map(accepted_line, ACCEPTED)),
        refused="\n".join(map(refused_line, REFUSED)),
    )
    (ROOT / "docs" / "reference" / "models.md").write_text(page)
