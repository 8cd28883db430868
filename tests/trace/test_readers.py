"""Files of other people are read exactly, or refused with file, line and what was expected."""

import gzip
from pathlib import Path

import pytest

from headrace.trace import lines
from headrace.trace.azure import read_azure
from headrace.trace.lines import TraceError
from headrace.trace.mooncake import read_mooncake
from headrace.trace.read import read_trace
from headrace.trace.tables import read_arena, read_lengths
from headrace.units import DurationNs

AZURE = b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
ARENA = b"arrival_s,tenant,input_length,output_length\n"


def write(tmp_path: Path, content: bytes, name: str = "trace") -> Path:
    path = tmp_path / name
    path.write_bytes(content)
    return path


def test_azure_times_are_exact_to_the_last_digit(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        AZURE + b"2023-11-16 23:59:59.9999999,374,44\r\n"
        b"2023-11-17 00:00:00.0000001,396,109\r\n"
        b"2023-11-17 00:00:00.000000102,1,1\r\n"
        b"2024-03-01T00:00:00+00:00,5,6",
    )
    rows = read_azure(path)
    leap_days = 105 * 86_400 * 10**9
    assert [row.at for row in rows] == [0, 200, 202, leap_days + 100]
    assert [(row.input_tokens, row.output_tokens) for row in rows[:2]] == [(374, 44), (396, 109)]
    assert rows[0].max_tokens is None
    assert rows[0].tenant is None


def test_zero_lengths_count_as_one(tmp_path: Path) -> None:
    rows = read_azure(write(tmp_path, AZURE + b"2023-11-16 18:00:00,0,0\n"))
    assert (rows[0].input_tokens, rows[0].output_tokens) == (1, 1)


@pytest.mark.parametrize(
    ("content", "line", "expected"),
    [
        (b"", 1, "expected the header TIMESTAMP"),
        (b"time,in,out\n", 1, "expected the header TIMESTAMP"),
        (AZURE + b"2023-11-16 18:00:00,1\n", 2, "expected TIMESTAMP,ContextTokens"),
        (AZURE + b"\n2023-11-16 24:00:00,1,1\n", 3, "expected TIMESTAMP,ContextTokens"),
        (AZURE + b"2023-11-16 18:00:00,-1,1\n", 2, "expected TIMESTAMP,ContextTokens"),
        (AZURE + b"2023-02-29 18:00:00,1,1\n", 2, "no such day: 2023-02-29"),
        (AZURE + b"2023-11-16 18:00:00,1,1\n2023-11-16 17:59:59,1,1\n", 3, "by time"),
    ],
)
def test_azure_problem_names_file_line_and_expectation(
    tmp_path: Path, content: bytes, line: int, expected: str
) -> None:
    path = write(tmp_path, content)
    with pytest.raises(TraceError, match=expected) as caught:
        read_azure(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert (caught.value.path, caught.value.line) == (path, line)


def test_mooncake_row_keeps_blocks_session_and_model(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        b'{"timestamp": 1000, "input_length": 1025, "output_length": 0, "hash_ids": [0, 7, 9],'
        b' "session_id": 4, "model": "m", "priority": 2}\n'
        b'{"created_time": 1000.5, "input_tokens": 6, "output_tokens": 7}\n',
    )
    first, second = read_mooncake(path)
    assert (first.at, first.input_tokens, first.output_tokens) == (0, 1025, 1)
    assert (first.prefix, first.prefix_tokens) == ((0, 7, 9), 512)
    assert (first.session, first.model) == ("4", "m")
    assert (second.at, second.input_tokens, second.output_tokens) == (500_000, 6, 7)
    assert (second.prefix, second.prefix_tokens, second.session) == ((), 0, None)


def test_mooncake_arrivals_are_spread_on_request(tmp_path: Path) -> None:
    row = b'{"timestamp": %d, "input_length": 1, "output_length": 1}\n'
    path = write(tmp_path, b"".join(row % at for at in (0, 0, 0, 3000, 3000, 3999)))
    rows = read_mooncake(path, spread_ns=DurationNs(3_000_000_000))
    assert [row.at / 1e9 for row in rows] == [0, 1, 2, 3, 3.4995, 3.999]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (b"{", "truncated"),
        (b'{"input_length":1,"output_length":1}', "expected timestamp or created_time"),
        (b'{"timestamp":0,"output_length":1}', "expected input_length or input_tokens"),
        (b'{"timestamp":0,"input_length":1}', "expected output_length or output_tokens"),
        (b'{"timestamp":0,"input_length":-1,"output_length":1}', r"\$.input_length"),
        (b'{"timestamp":"0","input_length":1,"output_length":1}', r"\$.timestamp"),
        (b'{"timestamp":1e999,"input_length":1,"output_length":1}', "out of range"),
        (b'{"timestamp":0,"input_length":9,"output_length":1,"hash_ids":[-1]}', "hash_ids"),
        (b'{"timestamp":0,"input_length":9,"output_length":1,"hash_ids":[1,2]}', "block size"),
        (b'{"schema":"dynamo.agentic_mooncake","version":2}', "agentic Mooncake"),
        (b'{"timestamp":0,"input_length":1,"output_length":1,"wait_for":[]}', "agentic"),
        (b'{"timestamp":-1,"input_length":1,"output_length":1}', "expected rows by time"),
        (b'{"model":"\xff"}', "Invalid UTF-8"),
    ],
)
def test_mooncake_problem_names_file_line_and_expectation(
    tmp_path: Path, row: bytes, expected: str
) -> None:
    path = write(tmp_path, b'{"timestamp":0,"input_length":1,"output_length":1}\n' + row + b"\n")
    with pytest.raises(TraceError, match=expected) as caught:
        read_mooncake(path)
    assert str(caught.value).startswith(f"{path}:2: ")


def test_arena_rows_have_tenants_and_times_rounded_once(tmp_path: Path) -> None:
    path = write(tmp_path, ARENA + b"1.5,t13,13,0\n1.70793754160099873,t2,36,137\n")
    first, second = read_arena(path)
    assert (first.at, first.tenant, first.output_tokens) == (0, "t13", 1)
    assert (second.at, second.tenant) == (207_937_542, "t2")


@pytest.mark.parametrize(
    ("content", "line", "expected"),
    [
        (b"arrival_s,tenant\n", 1, "header with input_length,output_length"),
        (ARENA + b"0,t,1\n", 2, "expected 4 cells, not 3"),
        (ARENA + b"nan,t,1,1\n", 2, "arrival_s in seconds, not 'nan'"),
        (ARENA + b"0,t,1,x\n", 2, "count of tokens, not 'x'"),
        (ARENA + b"1,t,1,1\n0.5,t,1,1\n", 3, "expected rows by time"),
    ],
)
def test_arena_problem_names_file_line_and_expectation(
    tmp_path: Path, content: bytes, line: int, expected: str
) -> None:
    path = write(tmp_path, content)
    with pytest.raises(TraceError, match=expected) as caught:
        read_arena(path)
    assert caught.value.line == line


def test_lengths_are_found_by_column_name(tmp_path: Path) -> None:
    path = write(tmp_path, b"id,output_length,input_length\nx,54,3772\ny,156,0\n")
    assert read_lengths(path) == [(3772, 54), (1, 156)]


def test_compressed_file_reads_like_the_plain_one(tmp_path: Path) -> None:
    content = AZURE + b"2023-11-16 18:00:00.5,1,2\n2023-11-16 18:00:01.5,3,4\n"
    plain = read_trace("azure", write(tmp_path, content))
    assert read_trace("azure", write(tmp_path, gzip.compress(content), "trace.gz")) == plain


def test_byte_order_mark_is_no_part_of_the_header(tmp_path: Path) -> None:
    assert read_azure(write(tmp_path, b"\xef\xbb\xbf" + AZURE)) == []


def test_file_that_cannot_be_read_or_unpacked_is_a_trace_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="missing: cannot be read"):
        read_azure(tmp_path / "missing")
    with pytest.raises(TraceError, match="Not a gzipped file"):
        read_azure(write(tmp_path, b"plain", "plain.gz"))
    whole = gzip.compress(AZURE)
    with pytest.raises(TraceError, match="cannot be read"):
        read_azure(write(tmp_path, whole[:-9], "cut.gz"))
    broken = bytearray(whole)
    broken[20] ^= 0xFF
    with pytest.raises(TraceError, match="cannot be read"):
        read_azure(write(tmp_path, bytes(broken), "broken.gz"))


def test_endless_line_and_endless_file_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gzip.open(tmp_path / "long.gz", "wb", compresslevel=1) as file:
        file.write(AZURE)
        file.write(bytes(lines.LINE_BYTES_MAX + 2))
    with pytest.raises(TraceError, match=r"long.gz:2: line longer than 16777216 bytes"):
        read_azure(tmp_path / "long.gz")
    monkeypatch.setattr(lines, "LINES_MAX", 2)
    with pytest.raises(TraceError, match=":3: more than 2 lines"):
        read_azure(write(tmp_path, AZURE + b"2023-11-16 18:00:00,1,2\n" * 2))


def test_unknown_kind_and_option_are_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path, AZURE)
    with pytest.raises(TraceError, match="trace kind 'azur': Invalid value 'azur'"):
        read_trace("azur", path)
    with pytest.raises(TraceError, match="unknown field `spread`"):
        read_trace("mooncake", path, {"spread": True})
    with pytest.raises(TraceError, match=r"\$.block_tokens"):
        read_trace("mooncake", path, {"block_tokens": 0})


def test_every_kind_reaches_its_reader(tmp_path: Path) -> None:
    row = b'{"timestamp":0,"input_length":1,"output_length":1,"hash_ids":[1]}\n'
    moon = read_trace("mooncake", write(tmp_path, row * 2), {"block_tokens": 16, "spread_ms": 10})
    assert [(row.at, row.prefix_tokens) for row in moon] == [(0, 16), (5_000_000, 16)]
    assert read_trace("azure", write(tmp_path, AZURE)) == []
    assert read_trace("arena", write(tmp_path, ARENA)) == []
    header = b'{"format":"headrace.trace","version":1}\n'
    assert read_trace("headrace", write(tmp_path, header)) == []
