"""The API's page tells of every error there is, and of no other."""

import re
from pathlib import Path

from headrace.gateway.errors import EDGES, REASONS

PAGE = Path(__file__).parents[2] / "docs" / "api.md"


def test_page_lists_every_status_and_code_that_can_be_answered() -> None:
    faces = [*REASONS.values(), *EDGES.values()]
    told = set(
        re.findall(r"^\| (\d{3}) \| `(\w+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    )

    assert told == {(str(face.status), face.code) for face in faces}
