"""What an engine is told of a request's rank, each in its own terms; and what a caller cannot tell it."""

import json
from typing import Any

import pytest
from msgspec.structs import replace

from headrace.adapters.engines.kinds import KINDS, Feature, Priority
from headrace.adapters.engines.outgoing import Marks, edited, marked
from headrace.model.effect import Dispatch
from headrace.model.engine import EngineKind
from headrace.ports.engine import Route
from headrace.units import NS_PER_S, InstantNs, ms
from tests.adapters.test_outgoing import ask, dispatch

NOW = InstantNs(10 * NS_PER_S)
SOON = replace(dispatch(), deadline=InstantNs(11 * NS_PER_S), gap_ns=ms(80))
LATER = replace(dispatch(), deadline=InstantNs(90 * NS_PER_S))
HOPELESS = replace(dispatch(), deadline=InstantNs(9 * NS_PER_S), relegated=True)
RANKED = (EngineKind.VLLM, EngineKind.SGLANG)


def sent(route: Route, marks: Marks, **fields: Any) -> dict[str, Any]:
    """Return what an engine gets of a request."""
    body = {"model": "m", **fields}
    told: dict[str, Any] = json.loads(
        edited(ask(route, json.dumps(body).encode()), dispatch(), "m", marks)
    )
    return told


def marks(one: Dispatch, priority: Priority | None, *, metadata: bool = False) -> Marks:
    """Return a request's marks."""
    return marked(one, NOW, priority=priority, metadata=metadata)


@pytest.mark.parametrize("kind", RANKED)
def test_who_is_due_sooner_is_run_first_and_who_is_too_late_last(kind: EngineKind) -> None:
    how = KINDS[kind].priority
    assert how is not None
    numbers = [sent(Route.CHAT, marks(one, how))["priority"] for one in (SOON, LATER, HOPELESS)]
    assert sorted(numbers, reverse=not how.lower_first) == numbers


@pytest.mark.parametrize("route", Route)
def test_a_caller_does_not_raise_itself(route: Route) -> None:
    assert "priority" not in sent(route, marks(SOON, None), priority=-100)
    ours = sent(Route.CHAT, marks(SOON, Priority(lower_first=True)), priority=-100)
    assert ours["priority"] == 11_000


@pytest.mark.parametrize("route", [one for one in Route if one is not Route.EMBEDDINGS])
def test_metadata_joins_the_callers_own_and_is_not_overridden(route: Route) -> None:
    told = sent(
        route,
        marks(SOON, None, metadata=True),
        vllm_xargs={"theirs": [1, 2], "headrace_tenant": "another"},
    )["vllm_xargs"]
    assert told == {
        "theirs": [1, 2],
        "headrace_tenant": "t",
        "headrace_class": "c",
        "headrace_way": '[[1,"c",4,7],[3,"t",1,9]]',
        "headrace_left_ms": 1_000,
        "headrace_gap_ms": 80,
        "headrace_relegated": 0,
    }


@pytest.mark.parametrize("route", Route)
def test_a_caller_says_nothing_in_our_name(route: Route) -> None:
    theirs = {"theirs": 1, "headrace_way": '[[3,"me",1000,0]]'}
    told = sent(route, marks(SOON, None), vllm_xargs=theirs)
    assert told["vllm_xargs"] == {"theirs": 1}


def test_metadata_that_is_no_object_is_the_engines_to_refuse() -> None:
    told = sent(Route.CHAT, marks(SOON, None, metadata=True), vllm_xargs=[1])
    assert told["vllm_xargs"] == [1]


def test_who_reads_neither_gets_neither() -> None:
    lacking = [kind for kind, one in KINDS.items() if not one.has(Feature.METADATA)]
    assert EngineKind.OPENAI in lacking
    told = sent(Route.CHAT, marks(SOON, None), max_tokens=1)
    assert told == {"model": "m", "max_tokens": 1}
