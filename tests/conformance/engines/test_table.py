"""The page of engines says what the table says."""

from headrace.adapters.engines.kinds import KINDS
from tests.conformance.engines.table import PAGE, updated


def test_the_page_is_current() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == updated(page), "python -m tests.conformance.engines.table"


def test_the_page_names_every_metric_that_is_read() -> None:
    page = PAGE.read_text(encoding="utf-8")
    names = {name for one in KINDS.values() for names in one.names.values() for name in names}
    assert {name for name in names if f"`{name}`" not in page} == set()
