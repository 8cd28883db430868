"""May this request enter?

Four gates look at frozen evidence: contract, budget, memory, deadline (ADM-1). The caller's own
faults are looked at first, because they are cheap and set the status when several gates fail. Knows
nothing of queues or replicas but what the evidence says.
"""

from enum import StrEnum
from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType

from headrace.model.decision import Admit, Decision, Gate, Reason, Reject, Verdict
from headrace.model.evidence import ArrivalFacts, EntryEvidence, LengthFacts, ReplicaView, WaitFacts
from headrace.policy.admission.balances import (
    at_least_a_second,
    balanced_after,
    over,
    over_limits,
)
from headrace.units import MICRO, NS_PER_MS, NS_PER_S, DurationNs, time_for


class GateMode(StrEnum):
    """Which gates refuse, and which only record: three common choices by one word."""

    ENFORCE = "enforce"
    """All refuse."""
    AUDIT = "audit"
    """The deadline gate only records: our own forecast refuses nobody."""
    OBSERVE = "observe"
    """All but the contract gate only record, limits of tenants among them. Whoever finds no ready
    replica at all is still refused."""


class Mode(StrEnum):
    """What one gate does with a request that fails it."""

    ENFORCE = "enforce"
    """Refuses it."""
    AUDIT = "audit"
    """Records that it would have, and lets it pass unless nobody can serve it."""


class Modes(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What each gate does; one that says nothing goes by the common word, `mode`."""

    contract: Mode | None = None
    """Keys, models, classes, lengths. None: it refuses."""
    budget: Mode | None = None
    """The tenant's own limits. None: it refuses, unless `mode` is observe."""
    memory: Mode | None = None
    """Whether it fits into a replica at all. None: it refuses, unless `mode` is observe."""
    deadline: Mode | None = None
    """Whether its bounds would hold. None: it refuses if `mode` is enforce."""


_AUDITED: dict[GateMode, frozenset[Gate]] = {
    GateMode.ENFORCE: frozenset(),
    GateMode.AUDIT: frozenset({Gate.DEADLINE}),
    GateMode.OBSERVE: frozenset({Gate.BUDGET, Gate.MEMORY, Gate.DEADLINE}),
}
"""The gates that only record, by the common word."""
_NEVER_SERVED = frozenset(
    {Reason.TENANT_UNKNOWN, Reason.MODEL_UNKNOWN, Reason.INPUT_EMPTY, Reason.NO_READY_REPLICA}
)
"""Reasons for which nobody could answer: refused in any mode."""


class Wait(StrEnum):
    """Which queue the deadline gate believes in."""

    FAIR = "fair"
    """The wait the fair queue will give: own share of the backlog."""
    FIFO = "fifo"
    """The whole backlog; refuses conforming tenants because of a hog. For comparison."""


class Length(StrEnum):
    """Who gets in where not all can: prompts of every length alike, or whoever fits."""

    FAIR = "fair"
    """While a tenant's longest tenth is let in much less often than the rest, the rest leaves room for
    one of it."""
    GREEDY = "greedy"
    """Whoever fits: past capacity those are the short ones."""


class Gates(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The four gates and their margins."""

    mode: GateMode = GateMode.ENFORCE
    """Which gates refuse, in one word. enforce: all four."""
    modes: Modes = Modes()
    """What single gates do instead."""
    wait: Wait = Wait.FAIR
    margin_ms: Annotated[float, Meta(ge=0, le=60_000)] = 50.0
    """Taken off each slack. 50: a few decode steps of a full batch."""
    wait_margin: Annotated[float, Meta(ge=0, le=4)] = 0.25
    """Share of the predicted wait added as uncertainty. 0.25: what a measured rate drifts within a
    first-token bound."""
    prefill_margin: Annotated[float, Meta(ge=0, le=4)] = 0.05
    """Share of its own predicted prefill added. 0.05: what profiles are off; more would shut out prompts
    whose prefill alone takes most of the bound."""
    length: Length = Length.FAIR
    """Whether a short prompt leaves room for a long one, while those are behind."""
    revision: str = "gates-2"

    def decide(self, evidence: EntryEvidence) -> Decision:
        """Return the decision with every verdict reached, its numbers and the slack (ADM-1..3)."""
        verdicts: list[Verdict] = [contract(evidence)]
        if not self.refuses(verdicts[-1], evidence):
            verdicts.append(budget(evidence))
        view = nearest(evidence.replicas)
        wait = predicted_wait(evidence, self.wait, view)
        slack = self._slack(evidence, wait, view)
        if not self.refuses(verdicts[-1], evidence):
            verdicts += [memory(evidence), self._deadline(evidence, slack, view)]
        refused = next((v for v in verdicts if self.refuses(v, evidence)), None)
        if refused is None:
            over = tuple(one.name for one in evidence.budget.windows if one.warned)
            return Admit(slack_ns=slack, wait_ns=wait, verdicts=tuple(verdicts), over_soft=over)
        assert refused.reason is not None
        late = -refused.margin
        return Reject(
            reason=refused.reason,
            gate=refused.gate,
            slack_ns=slack,
            retry_after_ns=retry_after(refused.reason, evidence, slack, late),
            verdicts=tuple(verdicts),
        )

    def refuses(self, verdict: Verdict, evidence: EntryEvidence) -> bool:
        """Return whether a verdict turns the request away; what nobody can serve, in any mode."""
        if verdict.reason is None:
            return False
        if self.mode_of(verdict.gate) is Mode.ENFORCE or verdict.reason in _NEVER_SERVED:
            return True
        impossible = not evidence.contract.served or evidence.fan_out < 1
        return verdict.gate is Gate.CONTRACT and impossible

    def mode_of(self, gate: Gate) -> Mode:
        """Return what a gate does."""
        own: Mode | None = getattr(self.modes, gate)
        if own is not None:
            return own
        return Mode.AUDIT if gate in _AUDITED[self.mode] else Mode.ENFORCE

    def audited(self) -> frozenset[Gate]:
        """Return the gates that only record."""
        return frozenset(gate for gate in Gate if self.mode_of(gate) is Mode.AUDIT)

    def summary(self) -> str:
        """Return the modes of all gates in a word, or as `audit:` and the gates that only record."""
        audited = self.audited()
        for word, gates in _AUDITED.items():
            if gates == audited:
                return word
        return "audit:" + "+".join(gate for gate in Gate if gate in audited)

    def _slack(self, evidence: EntryEvidence, wait: DurationNs, view: ReplicaView | None) -> int:
        """Return D - now - forecast - U (ADM-3); no deadline leaves the bound of a day."""
        prefill = view.prefill_ns if view is not None else evidence.demand.prefill_ns
        uncertain = int(wait * self.wait_margin + prefill * self.prefill_margin)
        margin = round(self.margin_ms * NS_PER_MS) + uncertain + evidence.input_margin_ns
        bound = _NO_BOUND if evidence.ttft_ns is None else evidence.ttft_ns
        return bound - evidence.route_ns - wait - prefill - evidence.first_ns - margin

    def _deadline(self, evidence: EntryEvidence, slack: int, view: ReplicaView | None) -> Verdict:
        """Return whether first token and gaps would hold, for it and for those running."""
        if not evidence.ready and (evidence.arrival is UNSET or slack < 0):
            return Verdict(gate=Gate.DEADLINE, reason=Reason.NO_READY_REPLICA)
        bound = _NO_BOUND if evidence.ttft_ns is None else evidence.ttft_ns
        left = self._budget_for_queue(evidence, bound, view)
        if left < 0:
            return Verdict(
                gate=Gate.DEADLINE,
                reason=Reason.DEADLINE_IMPOSSIBLE,
                measured=bound - left,
                threshold=bound,
            )
        step = evidence.mean_ns or evidence.gap_ns
        if evidence.first_ns > step:  # no engine steps that fast, even alone
            return Verdict(
                gate=Gate.DEADLINE,
                reason=Reason.DEADLINE_IMPOSSIBLE,
                measured=evidence.first_ns,
                threshold=step,
            )
        if slack < 0:
            return Verdict(
                gate=Gate.DEADLINE,
                reason=Reason.DEADLINE_QUEUE,
                measured=bound - slack,
                threshold=bound,
            )
        # Whoever can wait is held back by the dispatch window until the steps are short enough.
        harmed = step_bound_broken(evidence) if slack < _CAN_WAIT else None
        if harmed is not None:
            return harmed
        less = self._room_missing(evidence, slack, view)
        if less is not None:
            return Verdict(
                gate=Gate.DEADLINE,
                reason=Reason.LENGTH_SHARE,
                measured=bound + less,
                threshold=bound,
            )
        return Verdict(gate=Gate.DEADLINE, reason=None, measured=bound - slack, threshold=bound)

    def _room_missing(
        self, evidence: EntryEvidence, slack: int, view: ReplicaView | None
    ) -> int | None:
        """Return by how much a long prompt in its place would be late, while those are behind; else None.

        All lengths that ask for the same room are let in equally often, for none chooses when it comes.
        An engine that does nothing takes anybody. For prompts that need nearly all of the bound for
        themselves nobody makes room: the engine would have to be empty each time.
        """
        facts, bound = evidence.lengths, evidence.ttft_ns
        if facts is None or bound is None or view is None or facts.is_long:
            return None
        if self.length is not Length.FAIR or not is_behind(facts):
            return None
        if not (evidence.wait.backlog_ns or view.prefill_left_ns or view.decodes):
            return None
        if facts.long_alone_ns > bound * LONG_ALONE:
            return None
        more = max(0, facts.long_prefill_ns - view.prefill_ns)
        late = more + int(more * self.prefill_margin) - slack
        return late if late > 0 else None

    def _budget_for_queue(
        self, evidence: EntryEvidence, bound: int, view: ReplicaView | None
    ) -> int:
        """Return B_queue = D - T_route - T_prefill - T_first - margin of an empty system (ADM-2).

        Below zero not even an empty system could meet the bound: refuse at once. A prefix that the
        nearest replica holds counts; what the others hold does not.
        """
        margin = round(self.margin_ms * NS_PER_MS) + evidence.input_margin_ns
        alone = evidence.demand.prefill_ns
        if view is not None and view.cached_tokens:
            alone = min(alone, view.prefill_ns)
        return bound - evidence.route_ns - alone - evidence.first_ns - margin


LONG_KEPT, LONG_OF = 3, 4
"""The least admission rate of a tenant's longest tenth over that of all, before the others make room."""
LONG_ALONE = 0.85
"""Share of the first-token bound that the prefill of one of these may take alone for that to be worth it."""
OF_THE_MOMENT = frozenset(
    {Reason.DEADLINE_QUEUE, Reason.GAP_BOUND, Reason.TPOT_BOUND, Reason.LENGTH_SHARE}
)
"""Reasons for which it would have been let in at another moment: whether lengths fare alike shows there."""
_NO_BOUND = 86_400 * NS_PER_S
_CAN_WAIT = 10 * NS_PER_S
"""Slack beyond which steps that are too long at this moment say nothing about its own start."""


def contract(evidence: EntryEvidence) -> Verdict:
    """Return whether the caller may ask for this at all."""
    facts, given = evidence.contract, evidence.demand.input_tokens
    asked = evidence.max_output or 0
    whole = given + max(1, asked)
    measured = threshold = 0
    limit: str | UnsetType = UNSET
    if not facts.tenant_known:
        reason = Reason.TENANT_UNKNOWN
    elif not facts.model_known:
        reason = Reason.MODEL_UNKNOWN
    elif not facts.model_allowed:
        reason = Reason.MODEL_NOT_ALLOWED
    elif not facts.class_allowed:
        reason = Reason.CLASS_NOT_ALLOWED
    elif facts.lacking is not None:
        reason, limit = Reason.FEATURE_UNSUPPORTED, facts.lacking.value
    elif given <= 0:
        reason, measured, threshold = Reason.INPUT_EMPTY, given, 1
    elif asked > facts.output_limit:
        reason, measured, threshold = Reason.OUTPUT_TOO_LONG, asked, facts.output_limit
    elif whole > facts.context_limit:
        reason, measured, threshold = Reason.CONTEXT_TOO_LONG, whole, facts.context_limit
    elif not 0 < evidence.fan_out <= facts.fan_out_limit:
        reason, measured = Reason.FAN_OUT_UNSUPPORTED, evidence.fan_out
        threshold = facts.fan_out_limit
    else:
        return _CONTRACT_KEPT
    return Verdict(
        gate=Gate.CONTRACT, reason=reason, measured=measured, threshold=threshold, limit=limit
    )


_CONTRACT_KEPT = Verdict(gate=Gate.CONTRACT, reason=None)


def budget(evidence: EntryEvidence) -> Verdict:
    """Return whether the tenant's own limits allow it: tokens, budgets, concurrency, rate, queue.

    What waiting cannot cure comes first, so that nobody is asked to come again in vain.
    """
    facts = evidence.budget
    if (spent := over_limits(facts)) is not None:
        return spent
    if evidence.own_queued >= evidence.own_queue_bound:
        return over(Reason.TENANT_QUEUE_FULL, evidence.own_queued + 1, evidence.own_queue_bound)
    need = facts.tokens_needed
    left = need if facts.tokens_left is None else facts.tokens_left
    return Verdict(gate=Gate.BUDGET, reason=None, measured=need, threshold=left)


def memory(evidence: EntryEvidence) -> Verdict:
    """Return whether prompt plus reserved output fit the block pool of some replica at all.

    A pool that is full now makes it wait, not fail; the dispatch window holds it back until its
    blocks are free.
    """
    need, room = evidence.demand.kv_blocks, evidence.blocks_largest
    fits = need <= room or not evidence.ready
    reason = None if fits else Reason.KV_TOO_LARGE
    return Verdict(gate=Gate.MEMORY, reason=reason, measured=need, threshold=room)


def predicted_wait(evidence: EntryEvidence, kind: Wait, view: ReplicaView | None) -> DurationNs:
    """Return the wait that the queue will give this request (design: fair wait).

    Prefill in flight at the nearest replica (`view`), plus min(backlog, own work ahead * backlogged
    weights / own weight) at the fleet's measured work rate. Gating on the whole backlog would
    refuse conforming tenants because of a hog. While nothing is ready, the queue begins to move when the
    next group is expected (p90), at what that will do; what waits beside ready ones moves faster from then on.
    """
    facts = evidence.wait
    pending, rate = view.prefill_left_ns if view is not None else 0, facts.rate_micro
    if not evidence.ready and evidence.arrival is not UNSET:
        pending, rate = evidence.arrival.p90_ns, evidence.arrival.rate_micro
    if not rate:
        return DurationNs(pending)
    ahead = _ahead(facts, kind)
    if not evidence.ready or evidence.arrival is UNSET:
        return DurationNs(pending + time_for(ahead, rate))
    return DurationNs(pending + _drained(ahead, rate, evidence.arrival, evidence.arrival.p90_ns))


def _ahead(facts: WaitFacts, kind: Wait) -> int:
    """Return the queued work that is served before a newcomer."""
    if kind is Wait.FIFO:
        return facts.backlog_ns
    share = facts.own_ahead_ns * facts.weights // facts.own_weight
    return min(facts.backlog_ns, share + facts.debt_ns)


def _drained(ahead: int, rate: int, arrival: ArrivalFacts, at_ns: int) -> int:
    """Return when queued work is over, if a group that is on its way begins at `at_ns` to do its part."""
    alone = time_for(ahead, rate)
    if alone <= at_ns:
        return alone
    more = arrival.rate_micro * arrival.success_ppm // MICRO
    return at_ns + time_for(max(0, ahead - rate * at_ns // MICRO), rate + more)


def is_behind(facts: LengthFacts) -> bool:
    """Return whether a tenant's longest tenth is let in much less often than all together."""
    kept = facts.long_admitted * facts.offered * LONG_OF
    return kept < facts.admitted * facts.long_offered * LONG_KEPT


def step_bound_broken(evidence: EntryEvidence) -> Verdict | None:
    """Return a refusal if on every candidate the steps with the newcomer break a promise (ADM-1).

    Its own or another's: on each gap, or on the mean time per token.
    """
    worst: Verdict | None = None
    for view in evidence.replicas:
        bound, reason, step = _tightest(view, evidence.gap_ns), Reason.GAP_BOUND, view.step_ns
        if step <= bound:
            bound, reason, step = view.mean_bound_ns, Reason.TPOT_BOUND, view.mean_step_ns
        if step <= bound or not (view.decodes or view.pending_prefill_ns):
            return None
        worst = Verdict(gate=Gate.DEADLINE, reason=reason, measured=step, threshold=bound)
    return worst


def _tightest(view: ReplicaView, own: int) -> int:
    return own if view.tightest_gap_ns is None else min(own, view.tightest_gap_ns)


def retry_after(
    reason: Reason, evidence: EntryEvidence, slack: int, late: int = 0
) -> DurationNs | None:
    """Return when repeating can succeed, honestly; None where it cannot (RET-1).

    A queue drains at least by what was missing (`slack`), or by what a longer prompt misses (`late`).
    Never shortened.
    """
    match reason:
        case Reason.NO_READY_REPLICA if evidence.arrival is not UNSET:
            return at_least_a_second(evidence.arrival.p50_ns)
        case Reason.TENANT_QUEUE_FULL | Reason.NO_READY_REPLICA:
            wait = predicted_wait(evidence, Wait.FAIR, nearest(evidence.replicas))
            return at_least_a_second(wait)
        case Reason.DEADLINE_QUEUE:
            return at_least_a_second(_until_in_time(evidence, -slack))
        case Reason.LENGTH_SHARE:
            return at_least_a_second(late)
        case Reason.GAP_BOUND | Reason.TPOT_BOUND:
            return at_least_a_second(until_shorter(evidence))
        case _:
            return balanced_after(reason, evidence.budget)


def _until_in_time(evidence: EntryEvidence, late: int) -> int:
    """Return when a queue is shorter by what a request was late.

    With a group on its way it may be so as soon as that is there (p50): what it had to be counted on for is p90.
    """
    arrival, rate = evidence.arrival, evidence.wait.rate_micro
    if arrival is UNSET or not evidence.ready or not rate or late <= arrival.p50_ns:
        return late
    ahead = _ahead(evidence.wait, Wait.FAIR)
    surely = _drained(ahead, rate, arrival, arrival.p90_ns)
    likely = _drained(ahead, rate, arrival, arrival.p50_ns)
    return max(arrival.p50_ns, late - (surely - likely))


def until_shorter(evidence: EntryEvidence) -> int:
    """Return when enough of what makes the steps too long is over, at the replica where that is first.

    Prefill in flight is over when it is computed. Streams end one after the other, all within the time
    that an answer takes: so great a part of them must as their part of the step is too long.
    """
    soonest: int | None = None
    for view in evidence.replicas:
        excess = view.step_ns - _tightest(view, evidence.gap_ns)
        excess = max(excess, view.mean_step_ns - view.mean_bound_ns)
        streams = view.decode_extra_ns
        share = min(max(0, excess), streams)
        answer = evidence.demand.output_p50 * view.step_ns
        ended = answer * share // streams if streams else 0
        wait = max(view.prefill_left_ns, ended)
        soonest = wait if soonest is None else min(soonest, wait)
    return soonest or 0


def nearest(views: tuple[ReplicaView, ...]) -> ReplicaView | None:
    """Return the candidate with the least time to a first token: pending prefill plus own."""
    best: ReplicaView | None = None
    least = 0
    for view in views:
        time = view.prefill_left_ns + view.prefill_ns
        if best is None or time < least or (time == least and view.replica < best.replica):
            best, least = view, time
    return best
