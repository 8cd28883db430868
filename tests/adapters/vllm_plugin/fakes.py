"""vLLM's request, waiting queues and scheduler, as far as the plug-in reads them."""

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from headrace.adapters.vllm_plugin.guests import Guests
from headrace.adapters.vllm_plugin.turning import Sizes
from headrace.model.ids import ClassName, TenantId
from headrace.model.paths import Level, Link, Path, path
from headrace.model.told import Told
from headrace.policy.fairness.costs import Linear
from headrace.policy.fairness.line import LATE_NS, Line
from headrace.policy.ordering.orders import Order, TenantFirst
from headrace.units import NS_PER_MS, NS_PER_S, DurationNs, InstantNs

RATES = Linear(uncached=10, cached=1, output=30)
"""So that every charge can be read off its kind."""
TOKEN_NS = 1_000
BEGIN = InstantNs(1_000 * NS_PER_S)


class Request:
    """vLLM's, with counts in place of tokens."""

    def __init__(
        self,
        request_id: str,
        prompt: int = 10,
        *,
        priority: int = 0,
        arrival_time: float = 0.0,
        extra: Mapping[str, object] | None = None,
    ) -> None:
        self.request_id, self.priority, self.arrival_time = request_id, priority, arrival_time
        self.sampling_params = SimpleNamespace(extra_args=extra)
        self.num_prompt_tokens = prompt
        self.num_computed_tokens = self.num_output_tokens = self.num_preemptions = 0
        self.is_prefill_chunk = False
        self.status: Any = "waiting"

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens

    def __repr__(self) -> str:
        return self.request_id


class OwnQueue:
    """vLLM's waiting queues: first come first served, or the least priority first."""

    def __init__(self, policy: str = "fcfs") -> None:
        self.policy = policy
        self.waiting: list[Request] = []

    def line(self) -> list[Request]:
        """Return who waits, first in line first."""
        if self.policy == "fcfs":
            return list(self.waiting)
        return sorted(self.waiting, key=lambda one: (one.priority, one.arrival_time))

    def add_request(self, request: Any) -> None:
        assert request not in self.waiting, "it is there already"
        self.waiting.append(request)

    def prepend_request(self, request: Any) -> None:
        assert request not in self.waiting, "it is there already"
        self.waiting.insert(0, request)

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        for request in requests:
            self.prepend_request(request)

    def peek_request(self) -> Any:
        return self.line()[0]

    def pop_request(self) -> Any:
        first = self.line()[0]
        self.waiting.remove(first)
        return first

    def remove_requests(self, requests: Iterable[Any]) -> None:
        gone = set(requests)
        self.waiting = [one for one in self.waiting if one not in gone]


class Pool:
    """KV blocks."""

    def __init__(self, blocks: int) -> None:
        self.num_gpu_blocks = self.free = blocks

    def get_num_free_blocks(self) -> int:
        return self.free


class Cache:
    """vLLM's KV cache manager: what a request would find, by its name."""

    def __init__(self, blocks: int) -> None:
        self.block_pool = Pool(blocks)
        self.found: dict[str, int] = {}
        self.looked: list[str] = []
        self.usage = 0.0

    def get_computed_blocks(self, request: Request) -> tuple[None, int, int]:
        self.looked.append(request.request_id)
        return None, self.found.get(request.request_id, 0), 0


SIZES = Sizes(
    budget=512,
    slots=16,
    chunk=0,
    adaptive=False,
    cuts=True,
    block_tokens=16,
    least_block=16,
    groups=1,
    capacity=16_000,
    decode_tokens=1,
)


def scheduler(
    *running: Request, sizes: Sizes = SIZES, blocks: int = 1_000, waiting: Iterable[Request] = ()
) -> Any:
    """Return a scheduler with these requests, as it is set up."""
    return SimpleNamespace(
        running=list(running),
        waiting=list(waiting),
        max_num_scheduled_tokens=sizes.budget,
        max_num_active_reqs=sizes.slots,
        adaptive_long_prefill_threshold=sizes.adaptive,
        scheduler_config=SimpleNamespace(long_prefill_token_threshold=sizes.chunk),
        kv_cache_manager=Cache(blocks),
        get_request_counts=lambda: (len(running), 0),
    )


def way(tenant: str = "t", weight: int = 1) -> Path:
    """Return where a tenant of one class stands."""
    return path(Link(Level.CLASS, "chat", 2), Link(Level.TENANT, tenant, weight))


def told(
    tenant: str = "t",
    *,
    left_ms: int = 1_000,
    gap_ms: int = 50,
    relegated: bool = False,
    counters: tuple[int, int] = (0, 0),
    weight: int = 1,
) -> dict[str, object]:
    """Return the metadata of a request, as it travels."""
    return dict(
        Told(
            tenant=TenantId(tenant),
            slo_class=ClassName("chat"),
            way=way(tenant, weight),
            counters=counters,
            left_ns=DurationNs(left_ms * NS_PER_MS),
            gap_ns=DurationNs(gap_ms * NS_PER_MS),
            relegated=relegated,
        ).scalars()
    )


def guests(order: Order | None = None) -> Guests:
    """Return nobody yet."""
    return Guests(Line(order or TenantFirst(), RATES, TOKEN_NS), LATE_NS)
