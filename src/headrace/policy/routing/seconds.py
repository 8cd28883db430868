"""Which replica serves this request at the least cost in time?

cost = predicted queue work + interference of its running decodes + KV pressure + staleness - prefill
time saved by its cached prefix, all in ns (ROUTE-1). A replica is only eligible while its dispatch
window is open. Knows no tenants and no order: whose turn it is was decided before.
"""

from typing import Annotated

from msgspec import Meta, Struct

from headrace.model.decision import Placement, RouteTerms
from headrace.model.evidence import ReplicaView, RouteEvidence
from headrace.units import NS_PER_MS, NS_PER_S, DurationNs

UNBOUNDED = DurationNs(365 * 24 * 3_600 * NS_PER_S)
"""A dispatch window from which on nothing at all is held back."""


class Seconds(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Predicted seconds; the smallest wins, ties go to who was used longest ago."""

    prefix_reliability: Annotated[float, Meta(ge=0, le=1)] = 0.9
    """Share of a prefix expected cached that is counted on at a replica that has told nothing of its hits
    yet; from then on, the share that was there of late. 0.9: caches evict unseen."""
    stale_ms: Annotated[float, Meta(ge=0, le=60_000)] = 500.0
    """Cost of a replica whose last report is too old: unknown is neither zero nor full."""
    candidates: Annotated[int, Meta(ge=1, le=64)] = 8
    """Cheapest replicas that are looked at in full."""
    revision: str = "seconds-2"

    def terms(self, view: ReplicaView, output: int, blocks: int, stale_after_ns: int) -> RouteTerms:
        """Return the cost of one replica for a request of `output` tokens and `blocks` KV blocks.

        Interference: what its running decodes add to each of this request's steps, while they last.
        KV pressure: one step times k / (1 - k), k the share of the pool reserved with this request.
        """
        free_after = view.blocks_total - view.blocks_reserved - blocks
        used = view.blocks_reserved + blocks
        stale = view.age_ns is None or view.age_ns > stale_after_ns
        return RouteTerms(
            queue_ns=view.pending_prefill_ns,
            interference_ns=view.decode_extra_ns * output,
            kv_ns=view.step_ns * used // max(1, free_after),
            prefix_credit_ns=view.prefix_credit_ns,
            staleness_ns=round(self.stale_ms * NS_PER_MS) if stale else 0,
        )

    def choose(self, evidence: RouteEvidence, stale_after_ns: int) -> Placement | None:
        """Return where the request goes, or None: it keeps waiting."""
        best: tuple[int, int, str] | None = None
        chosen: Placement | None = None
        for view in evidence.replicas:
            if not is_open(view, evidence.blocks, evidence.gap_ns):
                continue
            terms = self.terms(view, evidence.output_p50, evidence.blocks, stale_after_ns)
            rank = (terms.total_ns, view.last_used, view.replica)
            if best is None or rank < best:
                best = rank
                chosen = Placement(
                    replica=view.replica,
                    incarnation=view.incarnation,
                    terms=terms,
                    cached_tokens=view.cached_tokens,
                )
        return chosen


FRONT = 4
"""Windows that a prompt may take, and be computed behind another or have another behind it. 4: most prompts."""


def is_long(prefill_ns: int, window_ns: int) -> bool:
    """Return whether a prompt is so long that it goes to an engine that prefills nothing, and alone."""
    return prefill_ns > FRONT * window_ns


def is_open(view: ReplicaView, blocks: int, gap_ns: int) -> bool:
    """Return whether a replica may be sent this request now (design: dispatch window).

    (i) prefill behind the prompt at the engine's front stays within the window, or is zero: without
    one that waits there, a step would go without prefill at each first token; (ii) the step with the
    newcomer holds the tightest running gap bound and its own, as the mean step does those on the mean; (iii) its reserved KV fits. An empty
    replica is open whatever its step takes: nobody is harmed and waiting would not help. A window
    without bound is open always: there the engine's own queue does the waiting.
    """
    if view.window_ns >= UNBOUNDED:
        return True
    if view.slots <= 0 or view.blocks_reserved + blocks > view.blocks_total:
        return False
    if not view.pending_prefill_ns and not view.decodes:
        return True
    if view.pending_prefill_ns and is_long(view.prefill_ns, view.window_ns):
        return False
    if view.behind_ns and view.behind_ns + view.prefill_ns > view.window_ns:
        return False
    return _keeps_pace(view, gap_ns)


def can_take_over(view: ReplicaView, blocks: int, gap_ns: int) -> bool:
    """Return whether a replica may go on with a stream that runs elsewhere now.

    As `is_open` for one that has no prompt left to compute; a window without bound changes nothing, as what it
    brings with it cannot wait without a place.
    """
    if view.slots <= 0 or view.blocks_reserved + blocks > view.blocks_total:
        return False
    return not view.decodes or _keeps_pace(view, gap_ns)


def _keeps_pace(view: ReplicaView, gap_ns: int) -> bool:
    """Return whether the step with one more stream holds the tightest bounds, its own among them."""
    tightest = gap_ns if view.tightest_gap_ns is None else min(gap_ns, view.tightest_gap_ns)
    return view.step_ns <= tightest and view.mean_step_ns <= view.mean_bound_ns
