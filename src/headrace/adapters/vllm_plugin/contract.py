"""Which fields and methods of vLLM's scheduler are used, and are they there?

vLLM calls the interface private. What is used of it stands here and nowhere else, is looked at when the
scheduler starts, and is held against each release by a test before that joins `TESTED`.
"""

from collections.abc import Iterable, Mapping
from typing import Any

TESTED = ("0.32.0",)
"""Releases that the tests have run in."""

SCHEDULER = (
    "waiting", "kv_holding_waiting", "running", "policy", "max_num_active_reqs", "max_num_running_reqs",
    "max_num_scheduled_tokens", "scheduler_config", "kv_cache_manager", "kv_cache_config", "block_size",
    "num_spec_tokens", "adaptive_long_prefill_threshold", "need_mamba_block_aligned_split", "schedule", "update_from_output", "add_request", "get_request_counts", "shutdown",
    "_preempt_request", "_free_request", "vllm_config",
)  # fmt: skip
CONFIG = (
    "long_prefill_token_threshold", "max_num_batched_tokens", "policy", "enable_chunked_prefill",
    "disable_chunked_mm_input",
)  # fmt: skip
GROUPS = ("kv_cache_groups",)
CACHE = ("block_pool", "get_computed_blocks", "usage")
POOL = ("num_gpu_blocks", "get_num_free_blocks")
REQUEST = (
    "request_id", "priority", "arrival_time", "status", "sampling_params", "num_prompt_tokens",
    "num_computed_tokens", "num_tokens", "num_output_tokens", "is_prefill_chunk", "num_preemptions",
)  # fmt: skip
QUEUE = frozenset(
    {
        "add_request", "pop_request", "peek_request", "prepend_request", "prepend_requests",
        "remove_request", "remove_requests", "__bool__", "__len__", "__iter__",
    }
)  # fmt: skip
"""What a waiting queue must be able to do: all of it, and no more."""


class UnsupportedError(RuntimeError):
    """This vLLM is none that the scheduler can run in; says why and what to do."""


def missing(scheduler: Any, request: Any, queue: type) -> list[str]:
    """Return what is used and is not there: on a scheduler, a request, and the queue's interface."""
    manager = getattr(scheduler, "kv_cache_manager", None)
    looked: Mapping[str, tuple[Any, Iterable[str]]] = {
        "scheduler": (scheduler, SCHEDULER),
        "scheduler_config": (getattr(scheduler, "scheduler_config", None), CONFIG),
        "kv_cache_config": (getattr(scheduler, "kv_cache_config", None), GROUPS),
        "kv_cache_manager": (manager, CACHE),
        "block_pool": (getattr(manager, "block_pool", None), POOL),
        "request": (request, REQUEST),
    }
    lacks = [
        f"{owner}.{name}"
        for owner, (thing, names) in looked.items()
        for name in names
        if not hasattr(thing, name)
    ]
    abstract: frozenset[str] = getattr(queue, "__abstractmethods__", frozenset())
    return lacks + [f"queue.{name} (new)" for name in sorted(abstract - QUEUE)]


def fault(version: str, lacks: list[str]) -> str | None:
    """Return what is wrong with a release, in a sentence; None if it was tested and lacks nothing."""
    if version in TESTED and not lacks:
        return None
    tested = ", ".join(TESTED)
    what = f"it lacks {', '.join(lacks)}" if lacks else "all that is used of it is there"
    return f"vLLM {version} is not among the releases this scheduler was tested with ({tested}); {what}"
