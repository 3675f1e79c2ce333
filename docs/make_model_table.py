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

from fedprompt import PromptStream, encode_prompted, vit_trunk  # noqa: E402
from models import ACCEPTED, REFUSED, Row, build, draw_images, plain  # noqa: E402
from references.hooks import hooked_blocks  # noqa: E402
from towers import OPEN_CLIP, TRANSFORMERS, Tower, build_tower, tower_images  # noqa: E402

TEXT = """# Models that accept prompts

`vit_trunk(model)` makes a trunk from any timm `VisionTransformer` or `Eva`, from the image towers
of open_clip, and from ViT, DeiT, DINOv2, DINOv3, CLIP and SigLIP of transformers. The tables list
the models of the tests. Each is small (two or three blocks), with random weights in float64.

When you make a trunk, it is compared with your model on one image, because your model may differ
from its class: in its dtypes, hooks, replaced methods, quantized layers or adapters. What cannot be
right is an error with the remedy.

- *Without prompts*: the largest difference between the pooled features of
  `encode_prompted(trunk, images)` and those of the model.
- *With prompts*: the largest difference to the model's own forward pass with the same prompts
  inserted by hooks. There are two prompts at every layer, which replace those of the previous
  layer. The entries of the features are around 1, and prompts change them by more than 0.001.

## timm

| Model | Family | Class | Prefix tokens | Pooling | Without prompts | With prompts |
|---|---|---|---|---|---|---|
{accepted}

## open_clip

Pass the image tower, `vit_trunk(clip_model.visual)`. The names are those of open_clip's
configurations. The class of a tower that wraps timm is that of the timm model.

| Model | Family | Class | Prefix tokens | Features | Without prompts | With prompts |
|---|---|---|---|---|---|---|
{open_clip}

## transformers

| Model | Family | Class | Prefix tokens | Features | Without prompts | With prompts |
|---|---|---|---|---|---|---|
{transformers}

## Refused models

Other models are refused by a `TypeError` with the reason. {{doc}}`/how-to/write-a-trunk` shows how
to support a transformer. For convolutional networks and for attention within windows, use
{{class}}`~fedprompt.PadPrompts`.

| Model | Family | Reason |
|---|---|---|
{refused}

`docs/make_model_table.py` writes this page, and `tests/backbones/test_trunks.py` fails if its
models are not those of the tests.
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
        hooked_blocks(
            lambda: plain(model, images),
            model.blocks,
            layers,
            prefix=trunk.prefix,
            replace=True,
        ),
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


def tower_line(row: Tower) -> str:
    """Return the row of a measured tower of open_clip or transformers."""
    model = build_tower(row)
    trunk, images = vit_trunk(model), tower_images()
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randn(
        trunk.depth, 2, trunk.dim, generator=generator, dtype=torch.float64
    )
    layers = dict(enumerate(tokens))
    expected = row.forward(model, images)
    prompted, _ = hooked_blocks(
        lambda: row.forward(model, images),
        row.blocks(model),
        layers,
        prefix=trunk.prefix,
        replace=True,
    )
    without = (encode_prompted(trunk, images).pooled - expected).abs().max().item()
    pooled = encode_prompted(trunk, images, PromptStream(layers, True)).pooled
    if (pooled - expected).abs().max() < 1e-3:
        raise RuntimeError(f"{row.name}: prompts have no effect.")
    projected = trunk.num_features != trunk.dim
    inner = (
        model.trunk if row.library == "open_clip" and hasattr(model, "trunk") else model
    )
    cells = (
        f"`{row.name}`",
        row.family,
        f"`{type(inner).__name__}`",
        trunk.prefix,
        "projected" if projected else "as wide as tokens",
        f"{without:.0e}",
        f"{(pooled - prompted).abs().max().item():.0e}",
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
        open_clip="\n".join(map(tower_line, OPEN_CLIP)),
        transformers="\n".join(map(tower_line, TRANSFORMERS)),
        refused="\n".join(map(refused_line, REFUSED)),
    )
    (ROOT / "docs" / "reference" / "models.md").write_text(page)
