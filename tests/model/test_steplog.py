"""The records of the step log survive being written, and stay short."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from headrace.model.steplog import Alive, Arrived, Ended, Head, Line, Note, Step
from headrace.units import InstantNs

NUMBERS = st.integers(0, 2**53)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
LEFT = st.none() | st.integers(-(2**40), 2**40)
ROWS = st.builds(
    Arrived,
    n=NUMBERS,
    request=NAMES,
    at_ns=NUMBERS,
    tenant=NAMES,
    slo_class=NAMES,
    prompt_tokens=NUMBERS,
    left_ms=LEFT,
    relegated=st.booleans(),
    marked=st.booleans(),
)
ENDS = st.builds(Ended, n=NUMBERS, reason=NAMES, output_tokens=NUMBERS, cached_tokens=NUMBERS)
LIVING = st.builds(Alive, arrived=ROWS, started=st.booleans(), running=st.booleans())
HEADS = st.builds(
    Head,
    engine=NAMES,
    mode=st.sampled_from(["enforce", "passive"]),
    started_unix_ms=NUMBERS,
    block_tokens=NUMBERS,
    blocks=NUMBERS,
    ordering=NAMES,
    batching=NAMES,
    running_limit=NUMBERS,
    token_budget=NUMBERS,
    alive=st.lists(LIVING, max_size=3).map(tuple),
)
MANY = st.lists(NUMBERS, max_size=5).map(tuple)
STEPS = st.builds(
    Step,
    step=NUMBERS,
    at_ns=NUMBERS,
    schedule_ns=NUMBERS,
    took_ns=st.none() | NUMBERS,
    running=NUMBERS,
    waiting=NUMBERS,
    budget=NUMBERS,
    chunk=st.none() | NUMBERS,
    limit=NUMBERS,
    free_blocks=NUMBERS,
    arrived=st.lists(ROWS, max_size=3).map(tuple),
    started=MANY,
    resumed=MANY,
    preempted=MANY,
    decodes=MANY,
    prefills=st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), max_size=3).map(tuple),
    ended=st.lists(ENDS, max_size=3).map(tuple),
    proposed=st.none() | st.tuples(NUMBERS, st.none() | NUMBERS, NUMBERS),
)
LINES = HEADS | STEPS | st.builds(Note, at_ns=NUMBERS, text=NAMES)


@given(line=LINES)
def test_a_line_that_was_written_reads_the_same(line: Head | Step | Note) -> None:
    content = msgspec.json.encode(line)
    assert msgspec.json.decode(content, type=Line) == line
    assert b"\n" not in content


def test_a_step_of_nothing_new_is_short() -> None:
    line = Step(step=7, at_ns=InstantNs(5), decodes=(1, 2))
    assert msgspec.json.encode(line) == b'{"kind":"step","step":7,"at_ns":5,"decodes":[1,2]}'
