"""Write ``docs/reference/models.md``, a table of the timm models that accept prompts.

The models are those of the tests. Run ``python docs/make_model_table.py`` from any folder.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "helpers")]

import torch  # noqa: E402

from fedprompt import PromptStream, encode_prompted, vit_trunk  # noqa: E402
from models import ACCEPTED, REFUSED, Row, build, draw_images, plain  # noqa: E402
from references.vpt import hooked  # noqa: E402

TEXT = """# timm models that accept prompts

`vit_trunk(model)` makes a trunk from any timm `VisionTransformer` or `Eva`. The table lists the
models of the tests. Each is small (three blocks of width 48), with random weights in float64.

- *Without prompts*: the largest difference between the pooled features of
  `encode_prompted(trunk, images)` and those of the model.
- *With prompts*: the largest difference to the model's own forward pass with the same prompts
  inserted by hooks. There are two prompts at every layer, which replace those of the previous
  layer. The entries of the features are around 1, and prompts change them by more than 0.001.

| Model | Family | Class | Prefix tokens | Pooling | Without prompts | With prompts |
|---|---|---|---|---|---|---|
{accepted}

## Refused models

Other models are refused by a `TypeError` with the reason. For convolutional networks there is
{{class}}`~fedprompt.PadPrompts`.

| Model | Family | Reason |
|---|---|---|
{refused}

`docs/make_model_table.py` writes this page, and `tests/backbones/test_timm.py` fails if its models
are not those of the tests.
"""


def accepted_line(row: Row) -> str:
    """Return the row of a measured model."""
    model = build(row)
    trunk, images = vit_trunk(model), draw_images(model)
    tokens = torch.randn(
        trunk.depth,
        2,
        trunk.dim,
        generator=torch.Generator().manual_seed(2),
        dtype=torch.float64,
    )
    layers = dict(enumerate(tokens))

    expected, (prompted, _) = (
        plain(model, images),
        hooked(model, images, layers, replace=True),
    )
    without = (encode_prompted(trunk, images).pooled - expected).abs().max().item()
    pooled = encode_prompted(trunk, images, PromptStream(layers, True)).pooled
    if (pooled - expected).abs().max() < 1e-3:
        raise RuntimeError(f"{row.name}: prompts have no effect.")
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
    """Return the row of a refused model, with the reason."""
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
