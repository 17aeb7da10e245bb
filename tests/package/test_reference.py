"""docs/reference/api.md is what the routes say, and says something about each."""

from __future__ import annotations

import re
from pathlib import Path

from pagoda.server.reference import reference

DOCUMENT = Path(__file__).parents[2] / "docs/reference/api.md"


def test_the_api_reference_is_up_to_date() -> None:
    expected = reference()
    assert DOCUMENT.read_text("utf-8") == expected, (
        "make it again: python -m pagoda.server.reference > docs/reference/api.md"
    )


def test_every_route_and_field_has_a_meaning() -> None:
    text = reference()
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        title, _, rest = section.partition("\n\n")
        is_route = title.split()[0] in ("GET", "POST", "DELETE")
        assert not is_route or not rest.startswith("|"), f"{title} has no description"
        for row in re.findall(r"^\| `.+$", rest, re.MULTILINE):
            assert row.split(" | ")[-1].strip(" |"), f"{title}: {row}"
