"""A page that says something about a mechanism has the measure of the mechanism beside it."""

import re
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[2] / "docs" / "results"
RECORD = re.compile(r"<!-- record ([\w-]+/[\w-]+); (.*?)(?:; ([^-].*?))? -->")
GUIDES = "distance of the guides, of their first norm"
SELECTED = ("predictions that the next group changes", "effective groups")
NONE = "the violation of the plans yet"


def records(text):
    return [(place, rows, column or "") for place, rows, column in RECORD.findall(text)]


def missing(page):
    """Return claims without their measure: in a sentence, or on the page of a table."""
    lines, found = page.splitlines(), []
    measured = records(page)
    for line in lines:
        beside = measured if line.startswith("|") else records(line)
        for place, rows, _ in records(line):
            for row in re.findall(r"FedL2G-[lf]", rows):
                has = [c for p, r, c in beside if (p, r) == (place, row)]
                if not any(c.startswith(GUIDES) for c in has):
                    found.append(f"{place}; {row}: {GUIDES}")
            if "one group" in rows and not any(
                p == place and c.startswith(SELECTED) for p, _, c in measured
            ):
                found.append(f"{place}; {rows}: selections")
            plans = any(column.startswith("violation") for *_, column in beside)
            named = re.search("FedOTP.* - .*FedOTP|Transport, mass", rows)
            if named and NONE not in page and not plans:
                found.append(f"{place}; {rows}: violation of the plans")
    return found


@pytest.mark.parametrize("page", sorted(RESULTS.glob("*.md")), ids=lambda path: path.stem)
def test_a_claim_about_a_mechanism_has_its_measure(page):
    assert missing(page.read_text(encoding="utf-8")) == []


def test_a_shortened_sentence_is_noticed():
    whole = (RESULTS / "gallery-networks.md").read_text(encoding="utf-8")
    shorter = re.sub(r" Their guides moved by .*? learned guides\.", "", whole)
    assert f"mnist/networks; FedL2G-f: {GUIDES}" in missing(shorter)
    assert missing(shorter).count(f"mnist/networks; FedL2G-l: {GUIDES}") > 1
    assert missing("<!-- record clip/domains; FedOTP - FedOTP (average) -->1<!-- end -->") != []
    assert missing("<!-- record a/b; SGPT - SGPT, one group; worst -->1<!-- end -->") != []
