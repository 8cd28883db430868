"""The table of docs/engines.md, made of `KINDS`:   python -m tests.conformance.engines.table"""

from pathlib import Path

from headrace.adapters.engines.kinds import KINDS, Feature
from headrace.model.engine import EngineKind

PAGE = Path(__file__).parents[3] / "docs" / "engines.md"
BEGIN, END = "<!-- made by tests/conformance/engines/table.py -->", "<!-- end -->"


def table() -> str:
    """Return the rows: by feature, which kinds have it."""
    head = ["an engine", *(f"`{kind}`" for kind in EngineKind)]
    rows = [
        [str(feature), *("yes" if KINDS[kind].has(feature) else "no" for kind in EngineKind)]
        for feature in Feature
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def updated(page: str) -> str:
    """Return the page with the table as it should be."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
