"""What one run leaves behind for reports: who was offered what, how it ended, who did the work.

Made by the simulator and by the demo's callers alike, so that their figures compare.
"""

from msgspec import Struct

from headrace.model.effect import Concluded
from headrace.model.engine import Yielded
from headrace.model.ids import ClassName, PoolName, ReplicaName, RequestId, TenantId
from headrace.model.slo import FORMULA_REVISION, Slo
from headrace.units import DurationNs, InstantNs, Tokens, WorkNs


class Offered(Struct, frozen=True, kw_only=True, gc=False):
    """One offered request with its true length: the denominator, alike for every policy."""

    request: RequestId
    at: InstantNs
    tenant: TenantId
    slo_class: ClassName
    input_tokens: Tokens
    output_tokens: Tokens
    work_ns: WorkNs
    """Work of the true lengths as if nothing were cached."""


class ReplicaTotals(Struct, frozen=True, kw_only=True, gc=False):
    """What one replica did over the run."""

    name: ReplicaName
    pool: PoolName
    up_ns: DurationNs
    busy_ns: DurationNs
    steps: int
    prefill_tokens: Tokens
    output_tokens: Tokens
    preemptions: int
    prefix_tokens_queried: Tokens
    prefix_tokens_hit: Tokens
    yielded: Yielded = Yielded()
    """How requests gave way in it."""


class PoolTotals(Struct, frozen=True, kw_only=True, gc=False):
    """What one pool held over the run."""

    pool: PoolName
    gpu_ns: int
    """GPU time from when groups were placed until they were given back, ready or not."""
    serving_ns: int
    """Of it, that of replicas that were up."""
    asked: int = 0
    """Groups that were asked for."""
    rose: int = 0
    """Starts that ended ready."""
    moves_begun: int = 0
    """Streams of groups that drained that were to go on in another group."""
    moved: int = 0
    """Of these, those that did."""
    micro_usd: int | None = None
    """None: no price is declared."""


class Victim(Struct, frozen=True, kw_only=True, gc=False):
    """A request that gave way on its replica."""

    request: RequestId
    times: int
    paused_ns: DurationNs
    """From when it gave way to its next token, of all times together."""


class ServiceSample(Struct, frozen=True, kw_only=True):
    """Work served so far to each tenant, at one instant: for plots of shares over time."""

    at: InstantNs
    work_ns: dict[TenantId, int]
    waiting: dict[TenantId, int]
    """Requests each tenant has waiting: shares only compare while both are backlogged."""


class RunRecord(Struct, frozen=True, kw_only=True):
    """One run of one policy on one trace."""

    label: str
    """The policy in a few words, such as `tenant_first, gates on`."""
    scenario: str
    seed: int
    trace_hash: str
    """Identity of the offered population; runs only compare if it is equal (SLO-5)."""
    span_ns: DurationNs
    """From the first arrival to the last: the time that what was offered is per."""
    end_ns: InstantNs
    """When the last request ended."""
    offered: list[Offered]
    rows: list[Concluded]
    """One for each offered request, in order of ending."""
    replicas: list[ReplicaTotals] = []
    pools: list[PoolTotals] = []
    victims: list[Victim] = []
    samples: list[ServiceSample] = []
    slos: tuple[Slo, ...] = ()
    weights: dict[TenantId, int] = {}
    """Weights of tenants that are not 1: the fair shares that served work is held against."""
    cut_off: int = 0
    """Requests that had not ended when the run had to: on a replica they timed out, waiting they
    are recorded as if their callers had left."""
    formula: str = FORMULA_REVISION
