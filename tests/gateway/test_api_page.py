"""The API's page tells of every error there is, and of no other."""

import inspect
import re
from pathlib import Path

from headrace.gateway import intake, wishes
from headrace.gateway.errors import EDGES, REASONS
from headrace.gateway.jobs.desk import JOBS
from headrace.gateway.outlook import LADDER
from headrace.ports.engine import Route

PAGE = Path(__file__).parents[2] / "docs" / "api.md"


def test_page_lists_every_path_that_callers_ask() -> None:
    told = set(
        re.findall(r"^\| `(\w+) (/v1/[^?`]+)", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    )
    paths = {*(("POST", route.value) for route in Route), ("GET", "/v1/models"), ("GET", LADDER)}
    assert told >= paths | {("GET", f"{JOBS}ID"), ("DELETE", f"{JOBS}ID")}


def test_page_lists_every_header_that_is_read() -> None:
    told = PAGE.read_text(encoding="utf-8")
    for module in (intake, wishes):
        read = re.findall(r'b"(x-[a-z0-9-]+)"', inspect.getsource(module))
        assert read
        for name in read:
            assert f"`{name.replace('x-gateway-', 'x-llm-d-')}`" in told, name


def test_page_lists_every_status_and_code_that_can_be_answered() -> None:
    faces = [*REASONS.values(), *EDGES.values()]
    told = set(
        re.findall(r"^\| (\d{3}) \| `(\w+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    )

    assert told == {(str(face.status), face.code) for face in faces}
