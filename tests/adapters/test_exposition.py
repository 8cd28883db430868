"""What an engine's load path tells: under old names and new, with and without `_total`, or not at all."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.adapters.engines.exposition import Load, load_of, load_of_slots
from headrace.adapters.engines.kinds import KINDS, Feature, Signal
from headrace.model.engine import EngineKind

PAGES = Path(__file__).parent / "pages"
VLLM = KINDS[EngineKind.VLLM]


def page(name: str) -> bytes:
    """Return a recorded page."""
    return PAGES.joinpath(name).read_bytes()


@pytest.mark.parametrize(
    ("kind", "name", "load"),
    [
        (
            EngineKind.VLLM,
            "vllm.txt",
            Load(
                running=9,
                waiting=4,
                kv_blocks_used=1_000,
                kv_blocks_total=4_000,
                preemptions=6,
                prefix_tokens_queried=5_000,
                prefix_tokens_hit=1_200,
            ),
        ),
        (
            EngineKind.VLLM,
            "vllm-old.txt",
            Load(
                running=2,
                waiting=0,
                kv_blocks_used=50,
                kv_blocks_total=100,
                preemptions=3,
                prefix_tokens_queried=700,
                prefix_tokens_hit=100,
            ),
        ),
        (
            EngineKind.SGLANG,
            "sglang.txt",
            Load(
                running=5,
                waiting=2,
                kv_blocks_used=2_500,
                kv_blocks_total=10_000,
                preemptions=7,
                prefix_tokens_queried=9_000,
                prefix_tokens_hit=4_000,
            ),
        ),
        (
            EngineKind.TRTLLM,
            "trtllm.txt",
            Load(
                running=3,
                waiting=1,
                kv_blocks_used=500,
                kv_blocks_total=2_000,
                preemptions=2,
                prefix_tokens_hit=320,
            ),
        ),
        (
            EngineKind.LLAMACPP,
            "llamacpp.txt",
            Load(running=2, waiting=3, prefix_tokens_queried=130, prefix_tokens_hit=90),
        ),
    ],
)
def test_a_page_is_read_by_the_names_of_its_kind(kind: EngineKind, name: str, load: Load) -> None:
    assert load_of(KINDS[kind], page(name)) == load


@pytest.mark.parametrize("kind", EngineKind)
def test_an_empty_page_tells_nothing_and_that_is_told(kind: EngineKind) -> None:
    told = load_of(KINDS[kind], b"# nothing\n")
    assert told == Load(missing=tuple(sorted(KINDS[kind].expected)))


def test_a_renamed_signal_is_missing_and_unknown_never_zero() -> None:
    renamed = page("vllm.txt").replace(b"num_requests_waiting", b"num_waiting_requests")
    told = load_of(VLLM, renamed)
    assert told.waiting is None
    assert told.missing == (Signal.WAITING,)
    assert told.running == 9


@pytest.mark.parametrize("value", [b"NaN", b"+Inf", b"-1", b"", b"five"])
def test_what_is_no_count_is_not_told(value: bytes) -> None:
    assert load_of(VLLM, b"vllm:num_requests_running " + value + b"\n").running is None


@pytest.mark.parametrize(
    "line",
    [
        b"vllm:num_requests_running 3",
        b'vllm:num_requests_running{model_name="a } 7 \\" b"} 3.0',
        b"vllm:num_requests_running{} 3 1700000000",
        b"vllm:num_requests_running\t3",
    ],
)
def test_lines_are_read_as_the_format_allows_them(line: bytes) -> None:
    other = b"vllm:num_requests_running_peak 8\nmy_vllm:num_requests_running 9\n"
    assert load_of(VLLM, other + line + b"\n").running == 3


def test_an_older_name_is_read_only_where_the_newer_is_not_there() -> None:
    both = b"vllm:prefix_cache_hits 5\nvllm:gpu_prefix_cache_hits_total 9\n"
    assert load_of(VLLM, both).prefix_tokens_hit == 5


@given(st.binary(max_size=300))
def test_no_page_breaks_the_scanner(content: bytes) -> None:
    for traits in KINDS.values():
        load_of(traits, content)


_NUMBERS = st.one_of(
    st.sampled_from([b"1e30", b"1e308", b"9" * 5_000, b"1e999", b"9007199254740993"]),
    st.integers(min_value=0).map(lambda number: b"%d" % number),
    st.floats().map(lambda number: repr(number).encode()),
)


@pytest.mark.parametrize("kind", EngineKind)
@given(data=st.data())
def test_whatever_a_page_counts_fits_a_journal_or_is_not_told(
    kind: EngineKind, data: st.DataObject
) -> None:
    traits = KINDS[kind]
    names = sorted(name for names in traits.names.values() for name in names)
    prefix = next(iter(traits.prefixes), "").encode()
    series = st.tuples(st.sampled_from(names or ["x"]), _NUMBERS)
    lines = [
        b'%s%s{rank="%d"} %s\n' % (prefix, name.encode(), rank, number)
        for rank, (name, number) in enumerate(data.draw(st.lists(series, max_size=20)))
    ]
    if (info := traits.cache_info) is not None:
        size, blocks = data.draw(_NUMBERS), data.draw(_NUMBERS)
        labels = (info.block_tokens.encode(), size, info.blocks.encode(), blocks)
        lines.append(prefix + info.name.encode() + b'{%s="%s",%s="%s"} 1\n' % labels)
    load = load_of(traits, b"".join(lines))
    counts = {
        name: told for name, told in msgspec.structs.asdict(load).items() if name != "missing"
    }
    assert all(told is None or 0 <= told <= 2**53 for told in counts.values())
    assert (Signal.RUNNING in load.missing) == (
        load.running is None and Signal.RUNNING in traits.expected
    )


def test_slots_tell_who_runs_and_no_more() -> None:
    body = b'[{"id":0,"is_processing":true},{"id":1,"is_processing":false,"n_ctx":9}]'
    assert load_of_slots(body) == Load(running=1, missing=(Signal.WAITING,))
    with pytest.raises(msgspec.DecodeError):
        load_of_slots(b'{"error":{"code":501}}')


def test_what_a_kind_says_it_has_is_said_how() -> None:
    for kind, traits in KINDS.items():
        assert traits.has(Feature.PRIORITY) == (traits.priority is not None), kind
        assert traits.has(Feature.ABORT_BY_ID) == (traits.abort is not None), kind
        assert traits.has(Feature.TOKENIZE) == (traits.tokenize is not None), kind
        assert traits.has(Feature.LOAD) == bool(traits.names), kind
        assert traits.has(Feature.KV_USE) == (Signal.KV_SHARE in traits.names), kind
        assert traits.expected <= traits.names.keys(), kind
