"""Open every built page in headless Chromium without a network, and report broken places.

    sphinx-build -b html docs docs/_build
    python docs/check_pages.py docs/_build --screenshots /tmp/shots

Each page is opened 1440 and 390 pixels wide. The script reports code blocks that are cut or wider
than 88 columns (100 for whole files), pages that scroll sideways, raw formulas, missing images,
files from other hosts, and links to pages or headings that do not exist. It installs nothing. It
needs Chromium (``apt-get install chromium``), and its exit status is 2 without it.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import threading
from argparse import ArgumentParser
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

WIDTHS = (1440, 390)
THEMES = {"light": (), "dark": ("--force-dark-mode",)}  # with flags of Chromium
COLUMNS = 88
LONGEST = 600.0  # seconds for all pages
SHOWN = (
    "index",
    "getting-started/first-federation",
    "getting-started/promptfl-with-clip",
    "how-to/several-gpus",
    "methods/fedotp",
    "methods/gallery/fedprox",
    "results/gallery-digits",
    "reference/aggregation",
    "how-to/fewer-bytes",
)

# The harness has the same address as the pages, so that the browser lets it read their frames.
HARNESS = """<!doctype html><title>checking</title><script type="module">
const {pages, widths, columns} = await (await fetch("/__job__")).json();
const found = [], raw = /\\$[^$ ][^$]*\\$|\\\\\\(|\\\\\\[|\\\\[a-z]{3,}\\b/;
function inspect(page, width, frame) {
  const doc = frame.contentDocument, view = frame.contentWindow;
  const say = (problem, text) => found.push([page, width, problem, text.trim().slice(0, 100)]);
  for (const fold of doc.querySelectorAll("details")) fold.open = true;
  for (const pre of doc.querySelectorAll("pre")) {
    const lines = pre.innerText.split("\\n");
    const widest = lines.reduce((a, b) => a.length > b.length ? a : b, "");
    const hidden = pre.scrollWidth > pre.clientWidth + 1;
    const scrolls = ["auto", "scroll"].includes(view.getComputedStyle(pre).overflowX);
    const source = page.startsWith("_modules/");
    const wide = width === widths[0];
    // Files of the gallery have 100 columns and a smaller font.
    const limit = pre.closest(".whole-file") ? 100 : columns;
    if (pre.closest(".highlight-text")) continue;  // the exact output of a command wraps
    if (widest.length > limit && !source && wide) say("over " + limit + " columns", widest);
    if (hidden && !scrolls) say("cut code block", widest);
    else if (hidden && widest.length <= limit && wide) say("code block scrolls", widest);
  }
  const root = doc.documentElement;
  if (root.scrollWidth > root.clientWidth + 1) say("page scrolls sideways", root.scrollWidth + "");
  const article = doc.querySelector("article") || doc.body;
  const walker = doc.createTreeWalker(article, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode;
    if (node.parentElement.closest("pre, code, script, style")) continue;
    if (raw.test(node.data)) say("raw formula", node.data);
  }
  for (const code of doc.querySelectorAll(".formula > code")) say("raw formula", code.innerText);
  for (const image of doc.images)
    if (image.complete && !image.naturalWidth) say("missing image", image.src);
  for (const {name} of view.performance.getEntriesByType("resource"))
    if (!name.startsWith(location.origin) && !name.startsWith("data:")) say("other host", name);
}
for (const width of widths) {
  const frame = document.createElement("iframe");
  frame.style.cssText = `width: ${width}px; height: 900px; border: 0`;
  document.body.append(frame);
  for (const page of pages) {
    await new Promise(done => { frame.onload = done; frame.src = "/" + page; });
    inspect(page, width, frame);
  }
  frame.remove();
}
await fetch("/__found__", {method: "POST", body: JSON.stringify(found)});
</script><body></body>"""


class Page(HTMLParser):
    """Links and ids of one page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect the link and the id of a tag."""
        for name, value in attrs:
            if name == "id" and value:
                self.ids.add(value)
            if name == "href" and tag == "a" and value:
                self.links.append(value)


def dead_links(folder: Path, names: list[str]) -> list[tuple[str, str]]:
    """Return each dead link between pages, with its page."""
    pages = {name: Page((folder / name).read_text(encoding="utf-8")) for name in names}
    dead = []
    for name, page in pages.items():
        for link in page.links:
            if urlsplit(link).scheme or link.startswith("//"):
                continue
            target, anchor = urldefrag(urljoin(f"/{name}", link))
            target, anchor = unquote(target).lstrip("/"), unquote(anchor)
            if target in pages:
                if anchor and anchor not in pages[target].ids:
                    dead.append((name, link))
            elif not (folder / target).is_file():
                dead.append((name, link))
    return dead


class Handler(SimpleHTTPRequestHandler):
    """Server of the pages, the harness and its job, which also receives the findings."""

    job: bytes = b""
    found: tuple[list, ...] = ()
    finished = threading.Event()

    def log_message(self, *arguments: object) -> None:
        """Write no log."""

    def do_GET(self) -> None:
        """Send the harness, its job, or a file."""
        own = {
            "/__check__": (HARNESS.encode(), "text/html"),
            "/__job__": (self.job, "application/json"),
        }
        if self.path not in own:
            super().do_GET()
            return
        body, kind = own[self.path]
        self.send_response(200)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        """Receive the findings."""
        type(self).found = tuple(
            json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        )
        self.send_response(204)
        self.end_headers()
        self.finished.set()


def launch(browser: str, profile: str, *arguments: str) -> subprocess.Popen:
    """Start Chromium with a new profile, without access to other hosts."""
    flags = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        f"--user-data-dir={profile}",
    ]
    alone = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
    return subprocess.Popen(
        [browser, *flags, alone, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def shoot(browser: str, profile: str, address: str, folder: Path) -> None:
    """Save screenshots of some pages at each width, in the light and the dark theme."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, width, theme in product(SHOWN, WIDTHS, THEMES):
        picture = folder / f"{name.replace('/', '-')}-{width}-{theme}.png"
        launch(
            browser,
            profile,
            f"--window-size={width},1400",
            *THEMES[theme],
            "--hide-scrollbars",
            f"--screenshot={picture}",
            f"{address}/{name}.html",
        ).wait(120)


def main() -> int:
    """Check the folder of the command line, and return the exit status."""
    parser = ArgumentParser(
        description="Check the built documentation in headless Chromium"
    )
    parser.add_argument("folder", type=Path, help="folder of the built pages")
    parser.add_argument(
        "--screenshots",
        type=Path,
        help="folder for screenshots of some pages at both widths, light and dark",
    )
    args = parser.parse_args()
    browser = next(
        filter(
            None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
        ),
        None,
    )
    if browser is None:
        print("Chromium is needed: apt-get install chromium", file=sys.stderr)
        return 2

    names = sorted(
        page.relative_to(args.folder).as_posix() for page in args.folder.rglob("*.html")
    )
    Handler.job = json.dumps(
        {"pages": names, "widths": WIDTHS, "columns": COLUMNS}
    ).encode()
    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(Handler, directory=str(args.folder))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        chromium = launch(
            browser,
            profile,
            "--window-size=1500,1000",
            "--remote-debugging-port=0",
            f"{address}/__check__",
        )
        finished = Handler.finished.wait(LONGEST)
        chromium.terminate()
        chromium.wait(30)
        if args.screenshots:
            shoot(browser, profile, address, args.screenshots)
    server.shutdown()
    if not finished:
        print(f"Chromium did not finish within {LONGEST:.0f} s.", file=sys.stderr)
        return 2

    problems = [
        f"{page} at {width} pixels: {problem}: {text}"
        for page, width, problem, text in Handler.found
    ]
    problems += [
        f"{page}: dead link: {link}" for page, link in dead_links(args.folder, names)
    ]
    print(*problems, f"{len(names)} pages, {len(problems)} problems", sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
