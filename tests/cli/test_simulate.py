"""`headrace simulate` from the outside: tables, files, several runs, errors in one line."""

import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from headrace.adapters.journal.ring import segment_paths
from headrace.cli import main
from headrace.report.summary import Summary
from tests.cli.scenarios import small

Output = pytest.CaptureFixture[str]
EXAMPLES = Path(__file__).parents[2] / "examples"
QUIET = ("faults:\n", "noise_percent: 0\nfaults:\n")


def summaries(text: str | bytes) -> list[Summary]:
    """Return the runs of a report."""
    told = msgspec.json.decode(text, type=Summary | list[Summary])
    return [told] if isinstance(told, Summary) else told


def test_a_run_is_told_in_tables(tmp_path: Path, capsys: Output) -> None:
    assert main(["simulate", small(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert err == "small seed 0 load 1: 120 requests\n"
    first, *_ = out.splitlines()
    assert first == "tenant_first, gates on  (small, seed 0)"
    for word in ("GOODPUT", "ATTAINED", "OFFERED", "Objectives", "Engines", "Little's law"):
        assert word in out


def test_json_goes_to_a_file_or_is_printed_alone(tmp_path: Path, capsys: Output) -> None:
    scenario, file = small(tmp_path), tmp_path / "report.json"
    assert main(["simulate", scenario, "--json", str(file)]) == 0
    assert "GOODPUT" in capsys.readouterr().out
    assert main(["simulate", scenario, "--json", "-"]) == 0
    printed = capsys.readouterr().out
    assert printed == file.read_text()
    (one,) = summaries(printed)
    assert (one.scenario, one.seed, one.total.offered) == ("small", 0, 120)
    assert sum(one.total.entry.values()) == 120


def test_each_seed_is_a_run_on_a_trace_of_its_own(tmp_path: Path, capsys: Output) -> None:
    seeds = ["--seed", "3", "--seed", "4"]
    assert main(["simulate", small(tmp_path), *seeds, "--json", "-"]) == 0
    runs = summaries(capsys.readouterr().out)
    assert [run.seed for run in runs] == [3, 4]
    assert len({run.trace_hash for run in runs}) == 2


def test_the_scenarios_seed_is_the_default(tmp_path: Path, capsys: Output) -> None:
    assert main(["simulate", small(tmp_path, ("name: small", "name: small\nseed: 7"))]) == 0
    assert capsys.readouterr().err == "small seed 7 load 1: 120 requests\n"


def test_each_load_offers_the_same_requests_so_much_faster(tmp_path: Path, capsys: Output) -> None:
    html = tmp_path / "sweep.html"
    loads = ["--load", "1", "--load", "2.5"]
    assert main(["simulate", small(tmp_path), *loads, "--json", "-", "--html", str(html)]) == 0
    out, err = capsys.readouterr()
    one, two = summaries(out)
    assert one.total.work_ns == two.total.work_ns
    assert one.span_ns == pytest.approx(2.5 * two.span_ns, rel=1e-6)
    assert err.splitlines() == [
        "small seed 0 load 1: 120 requests",
        "small seed 0 load 2.5: 120 requests",
        f"report: {html}",
    ]
    page = html.read_text()
    assert "load, times the scenario&#x27;s own" in page
    assert "offered work, GPU-s/s</text>" not in page


def test_other_policies_run_beside_on_the_same_trace(tmp_path: Path, capsys: Output) -> None:
    beside = ["--beside", "no_control", "--beside", "fifo-wait"]
    assert main(["simulate", small(tmp_path), *beside, "--json", "-"]) == 0
    runs = summaries(capsys.readouterr().out)
    assert [run.label for run in runs] == [
        "tenant_first, gates on",
        "fifo, gates off",
        "tenant_first, gates on, fifo wait",
    ]
    assert len({run.trace_hash for run in runs}) == 1
    assert main(["simulate", small(tmp_path), *beside]) == 0
    out = capsys.readouterr().out
    assert "offered requests" in out
    assert "not comparable" not in out


def test_several_traces_are_shown_apart(tmp_path: Path, capsys: Output) -> None:
    seeds = ["--seed", "1", "--seed", "2", "--beside", "no_control"]
    assert main(["simulate", small(tmp_path), *seeds]) == 0
    heads = [line for line in capsys.readouterr().out.splitlines() if line.startswith("small, ")]
    assert [head.rpartition(" ")[0] for head in heads] == [
        "small, seed 1, trace",
        "small, seed 2, trace",
    ]


def test_the_report_is_one_html_file_of_the_same_bytes(tmp_path: Path) -> None:
    pages = [tmp_path / "one.html", tmp_path / "two.html"]
    for page in pages:
        assert main(["simulate", small(tmp_path), "--html", str(page)]) == 0
    text = pages[0].read_text()
    assert text == pages[1].read_text()
    assert text.lower().startswith("<!doctype html>")
    assert "://" not in text.replace("http://www.w3.org", "")


def test_journal_and_decision_log_are_written_and_verified(tmp_path: Path, capsys: Output) -> None:
    journal, log = tmp_path / "journal", tmp_path / "decisions.jsonl"
    kept = ["--journal", str(journal), "--decisions", str(log)]
    assert main(["simulate", small(tmp_path), *kept, "--beside", "no_control"]) == 0
    assert len(segment_paths(journal)) == 2  # before the restart and after it, of the first run
    capsys.readouterr()
    assert main(["verify", str(journal)]) == 0
    assert main(["decisions", "verify", str(log)]) == 0
    replayed, remade = capsys.readouterr().out.splitlines()
    assert replayed.endswith("replay to the same effects")
    assert remade.endswith("decisions follow from their evidence")


def test_a_folder_with_a_journal_is_left_alone(tmp_path: Path, capsys: Output) -> None:
    scenario, journal = small(tmp_path), tmp_path / "journal"
    assert main(["simulate", scenario, "--journal", str(journal)]) == 0
    before = [path.read_bytes() for path in segment_paths(journal)]
    capsys.readouterr()
    assert main(["simulate", scenario, "--journal", str(journal)]) == 2
    assert capsys.readouterr() == ("", f"headrace: {journal}: holds a journal already\n")
    assert [path.read_bytes() for path in segment_paths(journal)] == before


def test_step_by_step_gives_the_same_report(tmp_path: Path, capsys: Output) -> None:
    outputs = []
    for flags in ([], ["--step-by-step"]):
        assert main(["simulate", small(tmp_path), "--json", "-", *flags]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]


def test_a_replica_is_up_no_longer_than_the_run(tmp_path: Path, capsys: Output) -> None:
    """A batch deadline an hour away is no hour of idling."""
    calm = small(tmp_path, ("faults:\n", "drain_s: 7200\nfaults:\n"))
    assert main(["simulate", calm, "--json", "-"]) == 0
    (run,) = summaries(capsys.readouterr().out)
    assert run.engines.busy_share is not None
    assert run.engines.busy_share > 0.5


# Traces on disk ----------------------------------------------------------------------------------

ROWS = [
    {"format": "headrace.trace", "version": 1},
    {"at_ns": 0, "input_tokens": 300, "output_tokens": 20},
    {"at_ns": 50_000_000, "input_tokens": 9_000, "output_tokens": 500, "tenant": "b"},
    {"at_ns": 90_000_000, "input_tokens": 40, "output_tokens": 5},
]


def on_disk(folder: Path, trace: str, *changes: tuple[str, str]) -> str:
    """Write a scenario that reads a trace file."""
    file = small(folder, *changes)
    text = Path(file).read_text()
    head, _, _ = text.partition("mix:")
    Path(file).write_text(f"{head}trace: {trace}\n")
    return file


def write_trace(path: Path) -> None:
    """Write three rows in our own format."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in ROWS).encode()))


def test_a_trace_is_found_beside_the_scenario_or_in_the_data_folder(
    tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    near.mkdir()
    far.mkdir()
    monkeypatch.setenv("HEADRACE_DATA", str(far))
    file = on_disk(near, "{path: traces/mine.jsonl.gz}")
    write_trace(far / "traces" / "mine.jsonl.gz")
    assert main(["simulate", file, "--json", "-"]) == 0
    (run,) = summaries(capsys.readouterr().out)
    assert run.total.offered == 3
    assert {(group.tenant, group.offered) for group in run.by_tenant} == {("a", 2), ("b", 1)}

    write_trace(near / "traces" / "mine.jsonl.gz")
    capped = on_disk(near, "{path: traces/mine.jsonl.gz, first: 2, input_max: 500, output_max: 9}")
    assert main(["simulate", capped, "--json", "-"]) == 0
    (run,) = summaries(capsys.readouterr().out)
    assert (run.total.offered, run.total.input_tokens, run.total.output_tokens) == (2, 800, 18)


@pytest.mark.parametrize("data", [None, "/no/such/folder"])
def test_a_missing_trace_is_told_with_the_way_to_name_it(
    capsys: Output, monkeypatch: pytest.MonkeyPatch, data: str | None
) -> None:
    monkeypatch.delenv("HEADRACE_DATA", raising=False)
    if data is not None:
        monkeypatch.setenv("HEADRACE_DATA", data)
    assert main(["simulate", str(EXAMPLES / "azure_conv.yaml")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    places = f"{EXAMPLES}/traces" + (f" or {data}/traces" if data else "")
    assert err == (
        f"headrace: traces/azure2023_conv.csv.gz: no such trace in {places}; "
        "HEADRACE_DATA names the folder of public traces\n"
    )


# Errors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "line", "message"),
    [
        (("rows: 120", "rosw: 120"), 12, "unknown field `rosw` at `$.mix` (did you mean `rows`?)"),
        (("rate: 40", "rate: -1"), 16, "at `$.mix.sources[0].arrivals.rate`"),
        (("kind: poisson, rate: 40", "kind: poison, rate: 40"), 16, "unknown kind 'poison'"),
        (("model: m,", "model: lama,"), 4, "unknown model `lama` at `$.deployment.pools[0].model`"),
        (("tenant: b", "tenant: bb"), 18, "unknown tenant `bb` at `$.mix.sources[1].tenant`"),
        (("slo_class: batch", "slo_class: bach"), 19, "unknown slo_class `bach`"),
        (("{kind: crash, replica: 1", "{kind: crash, replica: 2"), 23, "there are 2, counted from"),
        (("kind: leavers", "kind: leaver"), 24, "unknown kind 'leaver' at `$.faults[1].kind`"),
        (("profile: h100-8b-tp1", "profile: h1000"), 4, "unknown profile 'h1000'"),
    ],
)
def test_a_wrong_scenario_is_told_with_its_line(
    tmp_path: Path, capsys: Output, change: tuple[str, str], line: int, message: str
) -> None:
    file = small(tmp_path, change)
    assert main(["simulate", file]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    found = [text for text in err.splitlines() if message in text]
    assert found, err
    assert all(text.startswith(f"headrace: {file}:{line}: ") for text in found)


def test_unknown_tenants_to_assign_are_told(tmp_path: Path, capsys: Output) -> None:
    file = small(tmp_path, ("mix:\n", "assign: {tenants: {a: 1, c: 2}}\nmix:\n"))
    assert main(["simulate", file]) == 2
    assert capsys.readouterr().err == (
        f"headrace: {file}:11: unknown name `c` at `$.assign.tenants.c`\n"
    )


def test_a_scenario_offers_one_thing(tmp_path: Path, capsys: Output) -> None:
    file = small(tmp_path, ("mix:\n", "trace: {path: x}\nmix:\n"))
    assert main(["simulate", file]) == 2
    assert "expected either trace or mix" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--load", "0"], "Must be >= 0.001"),
        (["--load", "1", "--load", "-3"], "Must be >= 0.001"),
        (["--load", "1e-300"], "Must be >= 0.001"),
        (["--load", "nan"], "Must be <= 1000"),
        (["--load", "1001"], "Must be <= 1000"),
        (["--beside", "magic"], "magic"),
        (["--seed", "x"], "x"),
    ],
)
def test_a_wrong_flag_is_told(
    tmp_path: Path, capsys: Output, flags: list[str], message: str
) -> None:
    assert main(["simulate", small(tmp_path), *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_load_beside_the_scenarios_own_is_bounded_as_a_whole(
    tmp_path: Path, capsys: Output
) -> None:
    file = small(tmp_path, ("name: small", "name: small\nload: 0.01"))
    assert main(["simulate", file, "--load", "0.01"]) == 2
    assert capsys.readouterr().err == (
        "headrace: load 0.01 times the scenario's own 0.01: expected 0.001 to 1000 in all\n"
    )
    assert main(["simulate", small(tmp_path, ("name: small", "name: small\nload: 1e-9"))]) == 2
    assert ":2: " in capsys.readouterr().err


LATE = {
    "headrace": (
        '{"format":"headrace.trace","version":1}\n'
        '{"at_ns":0,"input_tokens":8,"output_tokens":8}\n'
        '{"at_ns":9000000000000000000,"input_tokens":8,"output_tokens":8}\n'
    ),
    "azure": (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-01-01 00:00:00,8,8\n"
        "2093-01-01 00:00:00,8,8\n"
    ),
    "mooncake": (
        '\n{"timestamp":0,"input_length":8,"output_length":8}\n'
        '{"timestamp":8000000000000,"input_length":8,"output_length":8}\n'
    ),
    "arena": "arrival_s,tenant,input_length,output_length\n0,a,8,8\n9000000000,a,8,8\n",
}


@pytest.mark.parametrize("kind", list(LATE))
def test_an_instant_that_no_trace_has_is_told_with_its_line(
    tmp_path: Path, capsys: Output, kind: str
) -> None:
    (tmp_path / "trace").write_text(LATE[kind])
    file = on_disk(tmp_path, f"{{path: trace, format: {{kind: {kind}}}}}")
    assert main(["simulate", file]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"headrace: {tmp_path / 'trace'}:3: ")


def test_requests_far_apart_take_no_time(tmp_path: Path) -> None:
    row = '{"at_ns":%d,"input_tokens":8,"output_tokens":8}\n'
    head = '{"format":"headrace.trace","version":1}\n'
    (tmp_path / "trace").write_text(head + row % 0 + row % (9 * 365 * 86_400 * 10**9))
    began = time.process_time()
    assert main(["simulate", on_disk(tmp_path, "{path: trace}"), "--load", "1"]) == 0
    assert time.process_time() - began < 5


PREFIXES = (
    ("output_max: 200}", "output_max: 200}\n      prefix: {tokens: 512, chunk_tokens: %d}"),
    ("output: 60}", "output: 60}\n      prefix: {tokens: 512, chunk_tokens: %d}"),
)


@pytest.mark.parametrize(
    ("sizes", "at", "message"),
    [
        ((256, 512), 23, "chunks of 512 tokens beside chunks of 256: a replica knows one size"),
        ((8, 8), 18, "expected a multiple of 16, the tokens of a KV block"),
    ],
)
def test_prefix_chunks_that_no_replica_knows_are_told(
    tmp_path: Path, capsys: Output, sizes: tuple[int, int], at: int, message: str
) -> None:
    changes = [(old, new % size) for (old, new), size in zip(PREFIXES, sizes, strict=True)]
    file = small(tmp_path, *changes)
    assert main(["simulate", file]) == 2
    err = capsys.readouterr().err
    assert f"headrace: {file}:{at}: {message} at `$.mix.sources[" in err


@pytest.mark.parametrize(("sizes", "message"), [((32, 64), "of 32 and of 64"), ((8, 8), "of 8")])
def test_prefix_chunks_of_a_trace_are_asked_too(
    tmp_path: Path, capsys: Output, sizes: tuple[int, int], message: str
) -> None:
    rows = [
        f'{{"at_ns":0,"input_tokens":100,"output_tokens":8,"prefix":[1],"prefix_tokens":{size}}}'
        for size in sizes
    ]
    (tmp_path / "trace").write_text(
        "\n".join(['{"format":"headrace.trace","version":1}', *rows, ""])
    )
    assert main(["simulate", on_disk(tmp_path, "{path: trace}")]) == 2
    assert f"prefixes in chunks {message}" in capsys.readouterr().err


def test_a_terminal_that_lacks_characters_gets_question_marks(tmp_path: Path) -> None:
    file = small(tmp_path, ("name: small", "name: 'Stra\u00dfe \u6c34'"))
    start = "from headrace.cli import main; raise SystemExit(main())"
    command = [sys.executable, "-c", start, "simulate", file]
    environ = {**os.environ, "PYTHONIOENCODING": "ascii"}
    for flags in ([], ["--seed", "1", "--seed", "2"]):
        done = subprocess.run([*command, *flags], env=environ, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
        assert b"Stra?e ?" in done.stdout
        assert b"Traceback" not in done.stderr


def test_a_missing_scenario_is_told(capsys: Output) -> None:
    assert main(["simulate", "no/such.yaml"]) == 2
    assert capsys.readouterr() == ("", "headrace: no/such.yaml: no such file or directory\n")


def test_the_examples_that_need_no_data_run(capsys: Output) -> None:
    assert main(["simulate", str(EXAMPLES / "hog.yaml"), "--json", "-"]) == 0
    (run,) = summaries(capsys.readouterr().out)
    shares = {str(group.tenant): group.attained_offered or 0.0 for group in run.by_tenant}
    assert shares["conforming"] > 0.85 > shares["hog"]
