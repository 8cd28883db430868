"""The public traces are read whole, and the built-in lengths resemble what they were made from."""

import math
from pathlib import Path

import pytest

from headrace.trace.builtin import ARXIV, AZURE_CONV, CHAT
from headrace.trace.generate import length_draw
from headrace.trace.mix import Empirical, Quantiles
from headrace.trace.read import read_trace
from headrace.trace.reshape import lengths_of
from headrace.trace.row import trace_hash
from headrace.trace.streams import stream
from headrace.trace.tables import read_lengths

pytestmark = pytest.mark.data


def test_azure_conversation_is_read_whole(data_dir: Path) -> None:
    rows = read_trace("azure", data_dir / "traces/azure2023_conv.csv.gz")
    assert len(rows) == 19_366
    # From 18:15:46.6805900 to 19:14:08.4025270.
    assert (rows[0].at, rows[1].at, rows[-1].at) == (0, 4_314_579_000, 3_501_721_937_000)
    assert (rows[-1].input_tokens, rows[-1].output_tokens) == (197, 183)
    assert sum(row.input_tokens for row in rows) == 22_361_870
    assert trace_hash(rows).startswith("ffeb0b9bfa013612")


def test_mooncake_conversation_is_read_whole(data_dir: Path) -> None:
    path = data_dir / "traces/mooncake_conversation.jsonl.gz"
    rows = read_trace("mooncake", path)
    assert (len(rows), rows[-1].at) == (12_031, 3_536_999_000_000)
    assert {row.prefix[0] for row in rows} == {0}
    assert rows[0].prefix == tuple(range(14))
    assert trace_hash(rows).startswith("e67162151d741b50")
    even = read_trace("mooncake", path, {"spread_ms": 3_000})
    assert [lengths_of([row]) for row in even] == [lengths_of([row]) for row in rows]
    assert [row.at for row in even] == sorted(row.at for row in even)
    assert even[0].at == 0
    assert 0 <= even[-1].at - rows[-1].at < 3_000_000_000
    assert len({row.at for row in even}) == len(rows)


def test_arena_and_lengths_are_read_whole(data_dir: Path) -> None:
    rows = read_trace("arena", data_dir / "traces/vtc_arena.csv.gz")
    assert (len(rows), len({row.tenant for row in rows})) == (1_500, 27)
    assert rows[-1].at == 600_000_000_000
    pairs = read_lengths(data_dir / "traces/arxiv_summarization_lengths.csv.gz")
    assert (len(pairs), pairs[0]) == (28_257, (3_772, 54))


@pytest.mark.parametrize(
    ("table", "file", "total", "below"),
    [
        (AZURE_CONV, "azure2023_conv.csv.gz", 8_000, None),
        (CHAT, "azure2023_conv.csv.gz", 8_000, 1_024),
        (ARXIV, "arxiv_summarization_lengths.csv.gz", None, None),
    ],
)
def test_builtin_lengths_resemble_the_trace(
    data_dir: Path, table: Quantiles, file: str, total: int | None, below: int | None
) -> None:
    path = data_dir / "traces" / file
    pairs = read_lengths(path) if total is None else lengths_of(read_trace("azure", path))
    real = Empirical(tuple(pairs), total_below=total, input_below=below).kept()
    draw, rng = length_draw(table), stream(1, "resemble")
    drawn = [draw(rng) for _ in real]
    for side in (0, 1):
        ours, theirs = sorted(p[side] for p in drawn), sorted(p[side] for p in real)
        assert math.fsum(ours) == pytest.approx(math.fsum(theirs), rel=0.04)
        for percent in (10, 50, 90, 99):
            place = len(real) * percent // 100
            assert ours[place] == pytest.approx(theirs[place], rel=0.06)
