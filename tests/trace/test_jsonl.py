"""Our own files give back what was written, byte for byte the same each time."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import convert
from msgspec.structs import replace

from headrace.trace import jsonl
from headrace.trace.jsonl import read_jsonl, write_jsonl
from headrace.trace.lines import TraceError
from headrace.trace.row import AT_MAX, ID_MAX, TOKENS_MAX, TraceRow, trace_hash
from headrace.units import InstantNs, Tokens

HEADER = b'{"format":"headrace.trace","version":1}\n'
ROW = TraceRow(at=InstantNs(7), input_tokens=Tokens(3), output_tokens=Tokens(4))

counts = st.integers(1, TOKENS_MAX)
names = st.none() | st.text(max_size=8)


@st.composite
def any_row(draw: st.DrawFn) -> TraceRow:
    """Draw a row anywhere inside the bounds."""
    given_tokens, made = draw(counts), draw(counts)
    chunk = draw(st.integers(1, given_tokens))
    prefix = draw(st.lists(st.integers(0, ID_MAX), max_size=min(4, given_tokens // chunk)))
    fields = {
        "at_ns": draw(st.integers(0, AT_MAX)),
        "input_tokens": given_tokens,
        "output_tokens": made,
        "max_tokens": draw(st.none() | st.integers(made, TOKENS_MAX)),
        "tenant": draw(names),
        "slo_class": draw(names),
        "model": draw(names),
        "prefix": prefix,
        "prefix_tokens": chunk if prefix else 0,
        "session": draw(names),
    }
    return convert(fields, TraceRow)


@given(st.lists(any_row(), max_size=5), st.sampled_from(["t.jsonl", "t.jsonl.gz"]))
def test_rows_come_back_as_written(rows: list[TraceRow], name: str) -> None:
    rows.sort(key=lambda row: row.at)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        write_jsonl(path, rows)
        first = path.read_bytes()
        back = read_jsonl(path)
        write_jsonl(path, back)
        assert path.read_bytes() == first
    assert back == rows
    assert trace_hash(back) == trace_hash(rows)


def test_file_is_plain_json_without_defaults(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_jsonl(path, [ROW])
    assert path.read_bytes() == HEADER + b'{"at_ns":7,"input_tokens":3,"output_tokens":4}\n'


@pytest.mark.parametrize(
    ("content", "line", "expected"),
    [
        (b"", 1, 'expected the header {"format":"headrace.trace","version":1}'),
        (b'{"format":"headrace.trace","version":2}\n', 1, "expected the header"),
        (HEADER + b'{"at_ns":7,"input_tokens":3}\n', 2, "missing required field `output_tokens`"),
        (HEADER + b'{"at_ns":7,"input_tokens":0,"output_tokens":4}\n', 2, "$.input_tokens"),
        (HEADER + b'{"at_ns":7,"inputs":0}\n', 2, "unknown field `inputs`"),
        (
            HEADER + b'{"at_ns":7,"input_tokens":3,"output_tokens":4,"max_tokens":3}\n',
            2,
            "output_tokens 4 exceeds max_tokens 3",
        ),
        (
            HEADER + b'{"at_ns":7,"input_tokens":3,"output_tokens":4,"tenant":"\xff"}',
            2,
            "Invalid UTF-8",
        ),
        (
            HEADER + b'{"at_ns":7,"input_tokens":3,"output_tokens":4}\n'
            b'{"at_ns":6,"input_tokens":3,"output_tokens":4}\n',
            3,
            "expected rows by time",
        ),
    ],
)
def test_problem_names_file_line_and_expectation(
    tmp_path: Path, content: bytes, line: int, expected: str
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(content)
    with pytest.raises(TraceError) as caught:
        read_jsonl(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert expected in str(caught.value)


def test_writer_refuses_what_the_reader_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.jsonl"
    with pytest.raises(TraceError, match=r"t.jsonl:3: .*expected rows by time"):
        write_jsonl(path, [ROW, replace(ROW, at=InstantNs(6))])
    monkeypatch.setattr(jsonl, "LINE_BYTES_MAX", 40)
    with pytest.raises(TraceError, match=r"t.jsonl:2: line longer than 40 bytes"):
        write_jsonl(path, [ROW])
