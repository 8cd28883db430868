"""Rows refuse what no request can be, and a trace's hash tells traces apart."""

import os
import subprocess
import sys
from typing import Any

import pytest
from msgspec.structs import replace

from headrace.model.ids import ClassName, ModelName, TenantId
from headrace.trace.row import TraceRow, trace_hash
from headrace.units import InstantNs, Tokens

ROW = TraceRow(
    at=InstantNs(5),
    input_tokens=Tokens(700),
    output_tokens=Tokens(20),
    max_tokens=Tokens(30),
    tenant=TenantId("a"),
    slo_class=ClassName("chat"),
    model=ModelName("m"),
    prefix=(1, 2),
    prefix_tokens=512,
    session="s",
    optional=(Tokens(90), Tokens(10)),
    lowest=2,
)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"max_tokens": 19}, "exceeds max_tokens"),
        ({"prefix_tokens": 0}, "both or neither"),
        ({"prefix": ()}, "both or neither"),
        ({"input_tokens": 512}, "holds no 2 chunks"),
        ({"optional": (500, 200)}, "optional parts of 700 tokens leave nothing of 700"),
    ],
)
def test_impossible_request_is_refused(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        replace(ROW, **change)


def test_last_chunk_may_be_partial() -> None:
    assert replace(ROW, input_tokens=Tokens(513)).prefix == (1, 2)


@pytest.mark.parametrize(
    "change",
    [
        {"at": 6},
        {"input_tokens": 701},
        {"output_tokens": 21},
        {"max_tokens": 31},
        {"max_tokens": None},
        {"tenant": "b"},
        {"slo_class": None},
        {"model": "n"},
        {"prefix": (1, 3)},
        {"prefix_tokens": 511},
        {"session": None},
        {"optional": (10, 90)},
        {"optional": ()},
        {"lowest": 3},
    ],
)
def test_every_field_and_the_order_show_in_the_hash(change: dict[str, Any]) -> None:
    other = replace(ROW, **change)
    assert trace_hash([ROW]) != trace_hash([other])
    assert trace_hash([ROW, other]) != trace_hash([other, ROW])


def test_empty_trace_has_a_hash_of_its_own() -> None:
    assert trace_hash([]) != trace_hash([ROW])
    assert len(trace_hash([])) == 64


def test_hash_of_a_generated_trace_is_the_same_in_every_process() -> None:
    program = (
        "from headrace.trace.builtin import BIMODAL\n"
        "from headrace.trace.generate import generate\n"
        "from headrace.trace.mix import Gamma, Headroom, Mix, SharedPrefix, TenantSource\n"
        "from headrace.trace.row import trace_hash\n"
        "source = TenantSource(tenant='a', arrivals=Gamma(5, 2), lengths=BIMODAL,"
        " max_tokens=Headroom(), prefix=SharedPrefix(tokens=1024, groups=3))\n"
        "print(trace_hash(generate(Mix(sources=(source,), rows=200), 7)))\n"
    )
    hashes = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(hashes) == 1
    assert len(hashes.pop().strip()) == 64
