"""Directive ``method-table``: all methods of the gallery with their families and engines.

The rows are those of `fedprompt.methods.METHODS`. A method runs on Flower if it has a form, so each
method is made once, for a small setting of its first family.
"""

from typing import Any

import torch
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

import fedprompt as fp
from fedprompt import samples
from fedprompt.methods import METHODS, ClipSetting, Entry, Setting, VitSetting

FAMILIES = {
    "one model": "one network",
    "mixed models": "different networks",
    "CLIP": "CLIP",
}
HEADER = (
    "function",
    "method",
    "families",
    "one process",
    "ranks",
    "Flower",
    "hyperparameters",
)


def settings() -> dict[str, Setting]:
    """Make a small setting of each family."""
    images = torch.rand(4, 1, 16, 16)
    common: Any = {"rounds": 1, "steps": 1, "clients": range(2), "public": images}
    common["num_classes"] = 10
    small, large = (fp.vit_trunk(samples.vit(size)) for size in ("S", "B"))
    tower = fp.TextTower(samples.clip(), samples.tokenize)
    text = common | {
        "tower": tower,
        "class_names": samples.CLASS_NAMES,
        "num_classes": 24,
    }
    return {
        "one model": VitSetting(trunk=small, **common),
        "mixed models": VitSetting(trunks=[small, large], num_features=48, **common),
        "CLIP": ClipSetting(**text),
    }


def rows() -> list[tuple[str, ...]]:
    """Return the rows of the table, without its header."""
    made, found = settings(), []
    for entry in METHODS.values():
        method = entry.make(made[entry.families[0]])
        on_flower = "no" if method.form is None else "yes"
        file = entry.make.__module__.rpartition(".")[2]
        words = ", ".join(FAMILIES[each] for each in entry.families)
        title = f"{{doc}}`{entry.title} </methods/gallery/{file}>`"
        engines = ("yes", "yes", on_flower)
        found.append(
            (f"`{entry.name}`", title, words, *engines, hyperparameters(entry))
        )
    return found


def hyperparameters(entry: Entry) -> str:
    """Return the hyperparameters with their defaults."""
    return ", ".join(f"`{name}={value!r}`" for name, value in entry.defaults.items())


class MethodTable(SphinxDirective):
    """The table, as Markdown that MyST reads."""

    def run(self) -> list[nodes.Node]:
        """Return the nodes of the table."""
        lines = [HEADER, ("---",) * len(HEADER), *rows()]
        text = [f"| {' | '.join(cells)} |" for cells in lines]
        node = nodes.container(classes=["wide"])
        self.state.nested_parse(StringList(text, "METHODS"), self.content_offset, node)
        return [node]


def setup(app: Any) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("method-table", MethodTable)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
