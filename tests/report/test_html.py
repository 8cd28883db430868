"""One file that needs nothing else, is well formed, and is the same to the byte."""

import re
from html.parser import HTMLParser

import pytest
from msgspec.structs import replace

from headrace.model.ids import TenantId
from headrace.report.beside import NOT_COMPARABLE
from headrace.report.html import RUNS_MAX, html_report
from headrace.report.run import RunRecord, ServiceSample
from headrace.report.summary import summarise
from headrace.report.sweep import by_load, sweep_point
from headrace.units import NS_PER_S, InstantNs
from tests.report.making import Pair, lost, refused, run, served

VOID = {"meta", "br"}


class Reader(HTMLParser):
    """Reads a page strictly: every element is closed in order, every id is used once."""

    def __init__(self) -> None:
        """Start outside of everything."""
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.named: list[str] = []
        self.tags: dict[str, int] = {}
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Open an element."""
        self.tags[tag] = self.tags.get(tag, 0) + 1
        told = dict(attrs)
        assert len(told) == len(attrs), f"{tag} says an attribute twice"
        assert not {name for name in told if name.startswith("on") or name in {"src", "href"}}
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.named += (told.get("aria-labelledby") or "").split()
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Open and close one."""
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        """Close the innermost element."""
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Keep what is read."""
        self.text += data


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    assert len(set(reader.ids)) == len(reader.ids)
    assert set(reader.named) <= set(reader.ids)
    return reader


def pairs(late: int) -> list[Pair]:
    found = [
        served(i, at_s=i / 10, tenant="ab"[i % 2], gaps_ms=(20, 30, 90), input_tokens=i + 1)
        for i in range(40 - late)
    ]
    found += [lost(i, at_s=i / 10, tenant="b", slo_class="batch") for i in range(40 - late, 40)]
    return [*found, refused(40, at_s=4), refused(41, at_s=4, reason=None)]


def samples() -> list[ServiceSample]:
    return [
        ServiceSample(
            at=InstantNs(second * NS_PER_S),
            work_ns={TenantId(f"t{i}"): second * 1_000_000 * i for i in range(12)},
            waiting={},
        )
        for second in range(200)
    ]


def runs() -> list[RunRecord]:
    return [
        run(pairs(5), samples=samples()),
        run(pairs(0), label="<script>alert('x') & \"more\"", samples=samples()),
    ]


def test_the_page_is_well_formed_and_names_every_chart() -> None:
    told = runs()
    points = [sweep_point(one, load) for one in told for load in (0.5, 1.0)]
    points += [replace(point, seed=7, work_goodput=point.work_goodput / 2) for point in points]
    reader = read(html_report("A <title> & more", told, points))
    assert reader.tags["svg"] > 10
    assert reader.tags["h1"] == 1
    assert "script" not in reader.tags
    for words in ("Goodput against load", "Met of offered", "42 requests offered", "all others"):
        assert words in reader.text


@pytest.mark.parametrize("trace_hash", ["cafe" * 16, "beef" * 16])
def test_the_page_needs_nothing_else(trace_hash: str) -> None:
    told = [runs()[0], replace(runs()[1], trace_hash=trace_hash)]
    page = html_report("t", told, [sweep_point(one) for one in told])
    assert "://" not in page
    assert not re.search(r"url\(|@import|<script|<link|<img|xmlns", page)
    assert (NOT_COMPARABLE.capitalize() in page) is (trace_hash != told[0].trace_hash)


def test_the_same_runs_give_the_same_bytes() -> None:
    assert html_report("t", runs()) == html_report("t", runs())


@pytest.mark.parametrize(
    "record",
    [
        run([]),
        run([refused(0)]),
        run([lost(0)], span_s=0),
        run([served(0, gaps_ms=())]),
        run([served(0, gaps_ms=(60_000,))], samples=samples()[:1]),
        run([served(0, prefill_ms=0, queue_ms=0)], samples=samples()[:2]),
    ],
    ids=["nobody", "refused", "lost", "one token", "one long gap", "at once"],
)
def test_a_page_of_little_is_a_page(record: RunRecord) -> None:
    read(html_report("little", [record]))


def test_a_page_of_nothing_is_a_page() -> None:
    assert read(html_report("nothing", [])).tags["h1"] == 1


def test_runs_of_one_label_are_told_apart_by_seed() -> None:
    told = [replace(run(pairs(0)), seed=seed, trace_hash=f"{seed}") for seed in (3, 4)]
    text = read(html_report("t", told)).text
    assert "tenant_first, seed 3" in text
    assert "tenant_first, seed 4" in text


def test_more_runs_than_can_be_told_apart_are_refused() -> None:
    with pytest.raises(AssertionError, match="9 runs on one page"):
        html_report("t", [run([])] * (RUNS_MAX + 1))


def test_points_of_a_sweep_group_by_label_then_load_then_seed() -> None:
    point = sweep_point(run(pairs(0)))
    assert point.load == point.work_rate
    told = by_load([replace(point, load=load, seed=s) for load in (2.0, 1.0) for s in (1, 0)])
    assert list(told) == ["tenant_first"]
    assert list(told["tenant_first"]) == [1.0, 2.0]
    assert [p.seed for p in told["tenant_first"][1.0]] == [0, 1]


def test_a_point_carries_both_attainments_and_its_denominators() -> None:
    summary = summarise(run(pairs(5)))
    point = sweep_point(summary)
    assert (point.offered, point.admitted, point.met) == (42, 40, 35)
    assert point.attained_offered == summary.total.attained_offered
    assert point.attained_admitted == summary.total.attained_admitted
