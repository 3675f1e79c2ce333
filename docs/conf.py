"""How the documentation is built: ``sphinx-build -W --keep-going -b html docs docs/_build``. Nothing here needs the network."""

import sys
from importlib.metadata import version as installed_version
from pathlib import Path

from sphinx.util.inspect import signature as own_signature
from sphinx.util.inspect import stringify_signature

project = "fedprompt"
author = "The fedprompt authors"
copyright = author
version = release = installed_version("fedprompt")

sys.path.insert(0, str(Path(__file__).parent / "extensions"))
extensions = [
    "formulas",
    "notebook",
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
html_math_renderer = "svg"
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "**.ipynb"]
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_selector = (
    "div:not(.highlight-text) > div.highlight > pre"  # not on printed outputs
)
default_role = "literal"  # the library writes `argument` in single backticks

html_theme = "furo"
html_title = "fedprompt"
html_show_copyright = False
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["pages.css"]

autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_mock_imports = [
    "flwr"
]  # an extra, which asks for older packages than Sphinx does
napoleon_attr_annotations = False  # shapes stand in the signature and in the text
python_maximum_signature_line_length = 88

# Every name of this library must resolve; names of other libraries are not linked, because that would need the network.
nitpicky = True
nitpick_ignore_regex = [
    ("py:class", r"(jaxtyping|torch|numpy|nn|collections|os|typing)\..*"),
    ("py:class", r"flwr\..*"),
    ("py:class", r"Tensor|ndarray|fedprompt\.data\.features\.MapStyle"),
    (
        "py:class",
        r"fedprompt\.(interfaces|freezing|exchange\.(cohort|receiving))\.(Value|Mean|Model|Client)",
    ),  # type variables
]

# What a reader writes instead of where Python finds it.
SPELLINGS = {
    "~collections.abc.Mapping[str, ~torch.Tensor | ~fedprompt.interfaces.Weighted]": "~fedprompt.Message",
    "~collections.abc.Mapping[str, ~fedprompt.interfaces.Weighted]": "~fedprompt.Payload",
    "~torch._C.Generator": "torch.Generator",
    "~numpy.random._generator.Generator": "numpy.random.Generator",
    "~torch.nn.modules.module.Module": "nn.Module",
    "~torch.nn.parameter.Parameter": "nn.Parameter",
    "~torch.dtype": "torch.dtype",
}


def spell(app, what, name, thing, options, signature, returns):
    """Shorten a signature; a protocol has none, because nobody makes one."""
    if what == "class" and getattr(thing, "_is_protocol", False):
        return "", returns
    if (
        what == "class" and signature == "(*args: Any, **kwargs: Any)"
    ):  # that of a base which is an extra, and mocked
        signature = stringify_signature(
            own_signature(thing.__init__, bound_method=True),
            show_return_annotation=False,
            unqualified_typehints=True,
        )
    for long, short in SPELLINGS.items():
        signature, returns = (
            text and text.replace(long, short) for text in (signature, returns)
        )
    return signature, returns


def setup(app):
    """Register the spelling of signatures."""
    app.connect("autodoc-process-signature", spell)
