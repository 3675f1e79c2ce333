"""How the documentation is built: ``sphinx-build -W --keep-going -b html docs docs/_build``. Nothing here needs the network."""

from importlib.metadata import version as installed_version

from sphinx.util.inspect import signature as own_signature
from sphinx.util.inspect import stringify_signature

project = "fedprompt"
author = "The fedprompt authors"
copyright = author
version = release = installed_version("fedprompt")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_enable_extensions = ["dollarmath"]
exclude_patterns = ["_build"]
default_role = "literal"  # the library writes `argument` in single backticks

html_theme = "furo"
html_title = "fedprompt"
html_show_copyright = False
html_copy_source = False

autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_mock_imports = ["flwr"]  # an extra, which asks for older packages than Sphinx does
napoleon_attr_annotations = False  # shapes stand in the signature and in the text
python_maximum_signature_line_length = 88

# Every name of this library must resolve; names of other libraries are not linked, because that would need the network.
nitpicky = True
nitpick_ignore_regex = [
    ("py:class", r"(jaxtyping|torch|numpy|nn|collections|matplotlib|os|typing)\..*"),
    ("py:class", r"flwr\..*"),
    ("py:class", r"Tensor|ndarray|fedprompt\.features\.MapStyle"),
    ("py:class", r"fedprompt\.(interfaces|freezing|exchange\.(cohort|receiving))\.(Value|Mean|Model|Client)"),  # type variables
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
    if what == "class" and signature == "(*args: Any, **kwargs: Any)":  # that of a base which is an extra, and mocked
        signature = stringify_signature(
            own_signature(thing.__init__, bound_method=True), show_return_annotation=False, unqualified_typehints=True
        )
    for long, short in SPELLINGS.items():
        signature, returns = (text and text.replace(long, short) for text in (signature, returns))
    return signature, returns


def setup(app):
    """Register the spelling of signatures."""
    app.connect("autodoc-process-signature", spell)
