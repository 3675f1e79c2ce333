"""Configuration of the documentation.

Build it with ``sphinx-build -W --keep-going -b html docs docs/_build``. No network is needed.
"""

import os
import re
import sys
from importlib.metadata import version as installed_version
from pathlib import Path

from docutils import nodes
from sphinx.util.inspect import signature as own_signature
from sphinx.util.inspect import stringify_signature
from sphinx.util.nodes import make_refnode

project = "fedprompt"
author = "The fedprompt authors"
copyright = author
version = release = installed_version("fedprompt")

sys.path.insert(0, str(Path(__file__).parent / "extensions"))
extensions = [
    "formulas",
    "gallery",
    "method_table",
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]

html_math_renderer = "svg"
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_fence_as_directive = ["math"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "**.ipynb", "results/tables/*.md"]
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
autodoc_mock_imports = ["flwr"]  # an extra that needs older packages than Sphinx
napoleon_attr_annotations = False  # shapes are in the signatures and in the text
python_maximum_signature_line_length = 88

# Every name of this library must resolve. Names of other libraries are not linked, because links
# would need the network.
nitpicky = True
nitpick_ignore_regex = [
    (
        "py:class",
        r"(jaxtyping|torch|numpy|nn|collections|matplotlib|os|pathlib|typing)\..*",
    ),
    ("py:class", r"flwr\..*"),
    ("py:class", r"Tensor|ndarray|fedprompt\.backbones\.features\._MapStyle"),
    # Type variables:
    ("py:class", r"fedprompt\.interfaces\.protocols\._(Value|Mean)"),
    (
        "py:class",
        r"fedprompt\.(backbones\.freezing|backbones\.trained_parts|sampling|wire\.receive)\._?(Model|Client)",
    ),
    ("py:class", r"fedprompt\.messages\.(parts\._?Entry|describe\.Description)"),
    ("py:class", r"fedprompt\.methods\.(setting\._Module|registry\._Make)"),
    (
        "py:class",
        r"fedprompt\.saved\.network\.PromptedNetwork",
    ),  # described at load_prompts
    # In signatures only:
    (
        "py:class",
        r"fedprompt\.backbones\.(preparation\.Preparation|pretrained\.Network)",
    ),
    (
        "py:class",
        r"fedprompt\.compare\.(trials\.Trial|problems\.Problem|classifier\.Predicted)",
    ),
    (
        "py:class",
        r"fedprompt\.(interfaces\.method\.Clients|saved\.saved_folder\.Description)",
    ),
    ("py:class", r"fedprompt\.methods\.whole_networks\.NetworkModel"),
    ("py:class", r"PIL\..*"),
    # Of the settings, without an entry of their own:
    (
        "py:class",
        r"fedprompt\.methods\.(setting\.Inputs|models\.Prompted(Classifier|Model))",
    ),
]

# Public spellings of types, by their full Python names.
MAPPING = "~collections.abc.Mapping"
SPELLINGS = {
    f"{MAPPING}[str, ~torch.Tensor | ~fedprompt.interfaces.Weighted]": "~fedprompt.Message",
    f"{MAPPING}[str, ~fedprompt.interfaces.Weighted]": "~fedprompt.Payload",
    "~torch._C.Generator": "torch.Generator",
    "~numpy.random._generator.Generator": "numpy.random.Generator",
    "~torch.nn.modules.module.Module": "nn.Module",
    "~torch.nn.parameter.Parameter": "nn.Parameter",
    "~torch.dtype": "torch.dtype",
}


def spell(app, what, name, thing, options, signature, returns):
    """Shorten a signature, and remove that of a protocol, which is never called."""
    if what == "class" and getattr(thing, "_is_protocol", False):
        return "", returns
    # A mocked base class, from an extra, hides the signature of the class.
    if what == "class" and signature == "(*args: Any, **kwargs: Any)":
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


def resolve(app, env, node, contnode):
    """Link a public name without its module, such as `weighted_mean` in a docstring."""
    if node.get("refdomain") != "py":
        return None
    name = node["reftarget"].rpartition(".")[2]
    python = env.get_domain("py")
    found = [full for full in python.objects if full.rpartition(".")[2] == name]
    places = {
        (python.objects[full].docname, python.objects[full].node_id) for full in found
    }
    if len(places) != 1:
        # In a signature, a type has the name that its file gives it.
        inner = node["reftarget"].startswith("fedprompt.")
        return contnode if "refexplicit" not in node and not inner else None
    ((page, anchor),) = places
    return make_refnode(app.builder, node["refdoc"], page, anchor, contnode, name)


def mend_backlinks(app, pagename, templatename, context, doctree):
    """Correct the links from the views of source files to the reference.

    `viewcode` assumes that all names of a file belong to one public module, such as `fedprompt`.
    """
    if not pagename.startswith("_modules/"):
        return
    objects = app.env.get_domain("py").objects

    def mend(match):
        parts = match[1].split(".")
        for start in range(len(parts)):
            suffix = "." + ".".join(parts[start:])
            found = {
                each.node_id
                for full, each in objects.items()
                if f".{full}".endswith(suffix)
            }
            if len(found) == 1:
                return f'#{found.pop()}"'
        return match[0]

    context["body"] = re.sub(r'#(fedprompt\.[\w.]+)"', mend, context["body"])


REPOSITORY = "https://github.com/fedprompt/fedprompt/blob/main"
LINK = re.compile(r"\]\(([\w./-]+)((?:#[\w-]+)?)\)")
CONTENTS = "\n\n```{{toctree}}\n:caption: {}\n:hidden:\n:glob:\n\n{}\n```\n"


def adapt(app, docname, source):
    """Change a page, as it is read in the repository, where the site differs.

    Links to files outside of the pages lead to the repository, or to the page of a method. The
    sections of the index are the contents of the site.
    """
    docs = Path(app.srcdir)

    def moved(match):
        path = Path(os.path.normpath(docs.joinpath(docname).parent / match[1]))
        if path.is_relative_to(docs) or not path.is_relative_to(docs.parent):
            return match[0]
        if path.parent == docs.parent / "fedprompt" / "methods":
            return f"](/methods/gallery/{path.stem}.md)"
        return f"]({REPOSITORY}/{path.relative_to(docs.parent).as_posix()}{match[2]})"

    (text,) = source
    if docname == "index":
        for section in text.split("\n## ")[1:]:
            pages = re.findall(r"^- \[.*?\]\(([\w/-]+)\.md\)", section, re.MULTILINE)
            text += CONTENTS.format(section.partition("\n")[0], "\n".join(pages))
    if docname == "methods/gallery":
        text += CONTENTS.format("Methods", "gallery/*")
    source[0] = LINK.sub(moved, text)


def polish(app, doctree, docname):
    """Link public names in code font, and break no line in short literals and intervals."""
    objects = app.env.get_domain("py").objects
    for literal in list(doctree.findall(nodes.literal)):
        text = literal.astext()
        if max(map(len, text.split()), default=0) <= 30:
            literal["classes"].append("short")
        name = text.removeprefix("fp.").removesuffix("()")
        places = [
            objects.get(f"fedprompt.{part}{name}") for part in ("", "interfaces.")
        ]
        place = next(filter(None, places), None)
        if place and not isinstance(literal.parent, (nodes.title, nodes.reference)):
            where = (app.builder, docname, place.docname, place.node_id)
            literal.replace_self(make_refnode(*where, literal.deepcopy(), name))
    for text in list(doctree.findall(nodes.Text)):
        if "± " in text and not isinstance(text.parent, nodes.literal_block):
            text.parent.replace(
                text, nodes.Text(text.replace("± ", "±\N{NO-BREAK SPACE}"))
            )


def setup(app):
    """Connect the functions that shorten signatures, resolve names and adapt pages."""
    app.connect("autodoc-process-signature", spell)
    app.connect("missing-reference", resolve)
    app.connect("html-page-context", mend_backlinks)
    app.connect("source-read", adapt)
    app.connect("doctree-resolved", polish)
