"""Pages as a viewer of GitHub's Markdown shows them, which knows no roles and no directives."""

import re
from pathlib import Path

import pytest
import write_pages
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]
VIEWER = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
READ = {page.relative_to(ROOT).as_posix(): page for page in write_pages.pages()}
WRITTEN = [name for name in READ if not name.startswith("docs/reference/")]
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
TARGET = re.compile(r'(?:src|srcset|href)="([^"]+)"')


def parsed(page):
    """Yield the blocks of a page, and the parts of its lines, with the token before each part."""
    for block in VIEWER.parse(page.read_text()):
        yield block, None
        for before, part in zip(
            [None, *(block.children or ())], block.children or (), strict=False
        ):
            yield part, before


def sections(page):
    """Return the names by which links find the headings of a page."""
    found, opened = [], False
    for token, _ in parsed(page):
        if opened and token.type == "inline":
            name = re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", token.content).strip().lower())
            name = name.replace(" ", "-")
            found.append(f"{name}-{found.count(name)}" if name in found else name)
        opened = token.type == "heading_open"
    return found


@pytest.mark.parametrize("name", WRITTEN)
def test_no_role_directive_or_comment_is_seen(name):
    for token, before in parsed(READ[name]):
        if token.type == "fence":
            assert not token.info.startswith("{"), token.info
        elif token.type == "html_block":  # Markdown is not read there
            rest = COMMENT.sub("", token.content)
            assert not re.search(r"\]\(|\*\*|`", rest), token.content
            assert "<!--" not in token.content or not rest.strip(), token.content
        elif token.type == "text":
            assert not re.search(r"<!--|-->|^:::|^\([\w-]+\)=$|^\{#", token.content), token.content
            assert not re.search(r"\{[\w:-]+\}$", token.content), f"role: {token.content}"
        elif token.type == "code_inline" and before is not None:
            assert not before.content.endswith("}"), f"role: {before.content}`{token.content}`"
        elif token.type == "link_close":
            assert before.type != "link_open", "a link without words"


@pytest.mark.parametrize("name", WRITTEN)
def test_comments_do_not_divide_cells_and_formulas_keep_their_signs(name):
    text = READ[name].read_text()
    assert not [each for each in COMMENT.findall(text) if "|" in each]
    assert "$$" not in text, "write a block ```math"
    prose = re.sub(r"^```.*?^```$|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)
    for formula in re.findall(r"\$[^$\s](?:[^$\n]*[^$\s])?\$", prose):
        assert not re.search(r"\\[^A-Za-z]|\*", formula), f"Markdown reads these signs: {formula}"


@pytest.mark.parametrize("name", READ)
def test_links_and_images_lead_somewhere(name):
    page, targets = READ[name], []
    for token, _ in parsed(page):
        if token.type in ("link_open", "image"):
            targets.append(token.attrGet("href") or token.attrGet("src") or "")
        elif token.type.startswith("html"):
            targets += TARGET.findall(token.content)
    for target in targets:
        path, _, section = target.partition("#")
        if not path.startswith(("https:", "http:", "mailto:")):
            file = page.parent / path if path else page
            assert file.exists(), target
            assert not section or section in sections(file), target


def test_figures_tables_and_notebooks_are_those_of_the_records_and_pages():
    for path, text in write_pages.texts().items():
        assert path.read_text() == text, f"{path}: run python docs/write_pages.py"
