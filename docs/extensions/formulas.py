"""Render formulas as SVG while the documentation is built, so that pages need no network."""

from html import escape
from xml.etree import ElementTree

import ziamath
from docutils import nodes
from sphinx.util import logging

# Draw paths instead of symbols, because the ids of symbols would repeat on a page.
ziamath.config.svg2 = False
PIXELS = 16.0
logger = logging.getLogger(__name__)


def to_svg(latex: str, *, inline: bool) -> str:
    """Render one formula in the size and on the baseline of the surrounding text."""
    formula = ziamath.Latex(latex, size=PIXELS, inline=inline, color="currentColor")
    svg = formula.svgxml()
    _, top, width, height = map(float, svg.attrib["viewBox"].split())
    svg.attrib |= {
        "role": "img",
        "aria-label": latex,
        "width": f"{width / PIXELS:.4f}em",
        "height": f"{height / PIXELS:.4f}em",
    }
    if inline:
        svg.attrib["style"] = f"vertical-align: {-(top + height) / PIXELS:.4f}em"
    return ElementTree.tostring(svg, encoding="unicode")


def visit(self, node: nodes.Element) -> None:
    """Write the SVG of a formula instead of its source."""
    latex = node.astext()
    inline = isinstance(node, nodes.math)
    try:
        svg = to_svg(latex, inline=inline)
    except Exception as error:
        logger.warning("cannot render the formula %s: %s", latex, error, location=node)
        svg = f"<code>{escape(latex)}</code>"
    tag = "span" if inline else "div"
    self.body.append(f'<{tag} class="formula">{svg}</{tag}>')
    raise nodes.SkipNode


def setup(app) -> dict[str, bool]:
    """Register the renderer ``svg``."""
    app.add_html_math_renderer("svg", (visit, None), (visit, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
