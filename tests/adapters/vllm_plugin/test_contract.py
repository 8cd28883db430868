"""Is what the scheduler uses of vLLM there, in a release that it was tested with?"""

from abc import ABC, abstractmethod
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.adapters.vllm_plugin.contract import (
    CACHE,
    CONFIG,
    GROUPS,
    POOL,
    QUEUE,
    REQUEST,
    SCHEDULER,
    TESTED,
    fault,
    missing,
)
from headrace.adapters.vllm_plugin.queue import TurnQueue


def having(names: tuple[str, ...], **more: object) -> SimpleNamespace:
    return SimpleNamespace(**(dict.fromkeys(names) | more))


def whole() -> SimpleNamespace:
    """Return a scheduler with all that is used."""
    manager = having(CACHE, block_pool=having(POOL))
    return having(
        SCHEDULER,
        scheduler_config=having(CONFIG),
        kv_cache_config=having(GROUPS),
        kv_cache_manager=manager,
    )


class Known(ABC):
    """A queue of today."""

    @abstractmethod
    def add_request(self, request: object) -> None: ...
    @abstractmethod
    def __len__(self) -> int: ...


class Grown(Known):
    """One of tomorrow."""

    @abstractmethod
    def steal_requests(self) -> None: ...
    @abstractmethod
    def __contains__(self, request: object) -> bool: ...


def test_nothing_is_missing_where_all_is_there() -> None:
    assert missing(whole(), having(REQUEST), Known) == []


OWNERS: dict[str, tuple[tuple[str, ...], Any]] = {
    "scheduler": (SCHEDULER, lambda one: one),
    "scheduler_config": (CONFIG, lambda one: one.scheduler_config),
    "kv_cache_config": (GROUPS, lambda one: one.kv_cache_config),
    "kv_cache_manager": (CACHE, lambda one: one.kv_cache_manager),
    "block_pool": (POOL, lambda one: one.kv_cache_manager.block_pool),
}


@pytest.mark.parametrize(("owner", "name"), [(o, n) for o, (of, _) in OWNERS.items() for n in of])
def test_each_that_is_gone_is_named(owner: str, name: str) -> None:
    scheduler = whole()
    delattr(OWNERS[owner][1](scheduler), name)
    assert f"{owner}.{name}" in missing(scheduler, having(REQUEST), Known)


@pytest.mark.parametrize("name", REQUEST)
def test_each_field_of_a_request_that_is_gone_is_named(name: str) -> None:
    request = having(tuple(one for one in REQUEST if one != name))
    assert missing(whole(), request, Known) == [f"request.{name}"]


def test_nothing_at_all_is_no_crash() -> None:
    lacks = missing(object(), object(), object)
    assert len(lacks) == sum(map(len, (SCHEDULER, CONFIG, GROUPS, CACHE, POOL, REQUEST)))


def test_queue_that_must_do_more_is_told() -> None:
    lacks = missing(whole(), having(REQUEST), Grown)
    assert lacks == ["queue.__contains__ (new)", "queue.steal_requests (new)"]


def test_our_queue_does_all_that_vllms_must() -> None:
    assert all(name in vars(TurnQueue) for name in QUEUE)


def test_tested_release_that_lacks_nothing_is_no_fault() -> None:
    assert [fault(version, []) for version in TESTED] == [None] * len(TESTED)


def test_other_release_and_what_it_lacks_are_told() -> None:
    assert "9.9 is not among" in str(fault("9.9", []))
    assert "all that is used of it is there" in str(fault("9.9", []))
    assert "lacks scheduler.waiting, request.status" in str(
        fault(TESTED[0], ["scheduler.waiting", "request.status"])
    )
