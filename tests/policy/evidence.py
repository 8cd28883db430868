"""Evidence for deciders: an idle system and a small request, changed as a test needs it."""

from typing import Any

from headrace.model.demand import Demand
from headrace.model.evidence import (
    BudgetFacts,
    ContractFacts,
    EntryEvidence,
    LengthFacts,
    ReplicaView,
    RouteEvidence,
    WaitFacts,
)
from headrace.units import MICRO, NS_PER_MS, NS_PER_S

MS = NS_PER_MS
S = NS_PER_S


def view(name: str = "r0", **changes: Any) -> ReplicaView:
    """Return an idle replica: 100 ms of prefill for the newcomer, 12 ms steps."""
    given: dict[str, Any] = {
        "replica": name,
        "incarnation": 1,
        "pending_prefill_ns": 0,
        "behind_ns": 0,
        "prefill_left_ns": 0,
        "decodes": 0,
        "context_tokens": 0,
        "blocks_reserved": 0,
        "blocks_total": 1_000,
        "slots": 256,
        "cached_tokens": 0,
        "believed_tokens": 0,
        "prefill_ns": 100 * MS,
        "prefix_credit_ns": 0,
        "step_ns": 12 * MS,
        "decode_extra_ns": 0,
        "tightest_gap_ns": None,
        "window_ns": 150 * MS,
        "age_ns": 0,
        "last_used": 0,
    }
    return ReplicaView(**(given | changes))


def wanted(**changes: Any) -> Demand:
    given: dict[str, Any] = {
        "input_tokens": 1_000,
        "cached_tokens": 0,
        "output_p50": 200,
        "output_p90": 480,
        "prefill_ns": 100 * MS,
        "work_p50_ns": 20 * MS,
        "work_p90_ns": 30 * MS,
        "kv_blocks": 93,
        "kv_bytes": 1_480 * 131_072,
        "kv_byte_seconds": 1,
        "residency_ns": S,
    }
    return Demand(**(given | changes))


def contract(**changes: Any) -> ContractFacts:
    given: dict[str, Any] = {
        "tenant_known": True,
        "model_known": True,
        "model_allowed": True,
        "class_allowed": True,
        "context_limit": 8_192,
        "output_limit": 2_048,
        "fan_out_limit": 1,
    }
    return ContractFacts(**(given | changes))


def budget(**changes: Any) -> BudgetFacts:
    given: dict[str, Any] = {
        "tokens_needed": 1_480,
        "tokens_left": None,
        "tokens_limit": None,
        "tokens_wait_ns": 0,
        "requests_left": None,
        "requests_wait_ns": 0,
        "parallel_left": None,
    }
    return BudgetFacts(**(given | changes))


def wait(**changes: Any) -> WaitFacts:
    given: dict[str, Any] = {
        "backlog_ns": 0,
        "own_ahead_ns": 0,
        "debt_ns": 0,
        "weights": 1,
        "own_weight": 1,
        "rate_micro": MICRO,
    }
    return WaitFacts(**(given | changes))


def entry(**changes: Any) -> EntryEvidence:
    given: dict[str, Any] = {
        "demand": wanted(),
        "max_output": None,
        "fan_out": 1,
        "contract": contract(),
        "budget": budget(),
        "wait": wait(),
        "ttft_ns": 2 * S,
        "gap_ns": 80 * MS,
        "route_ns": 2 * MS,
        "first_ns": 7 * MS,
        "input_margin_ns": 0,
        "tenant_counter": 0,
        "least_counter": 0,
        "cost": "tokens-1",
        "own_queued": 0,
        "own_queue_bound": 1_000,
        "ready": 1,
        "blocks_largest": 1_000,
        "replicas": (view(),),
        "rest_bound_ns": None,
    }
    return EntryEvidence(**(given | changes))


def route(*views: ReplicaView, **changes: Any) -> RouteEvidence:
    given: dict[str, Any] = {
        "blocks": 93,
        "output_p50": 200,
        "gap_ns": 80 * MS,
        "turn": (),
        "key": 0,
        "score": None,
        "cost": "tokens-1",
        "lent": False,
        "patient": False,
        "replicas": views,
        "rest_bound_ns": None,
    }
    return RouteEvidence(**(given | changes))


def lengths(**changes: Any) -> LengthFacts:
    """Return the counts of a tenant whose long prompts are let in half as often as the mean."""
    given: dict[str, Any] = {
        "offered": 1_000,
        "admitted": 800,
        "long_offered": 100,
        "long_admitted": 40,
        "is_long": False,
        "long_prefill_ns": S,
        "long_alone_ns": S,
    }
    return LengthFacts(**(given | changes))
