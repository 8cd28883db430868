"""Why was this request treated as it was? A story in plain words, and every figure it was decided by.

Figures are rows of name, value, unit and meaning: what a later policy decides by needs rows of its
own and nothing else.
"""

from collections.abc import Iterator

from msgspec import UNSET

from headrace.model.budget import Unit, written_amount
from headrace.model.decision import Decision, Degrade, Gate, LetIn, Reason, RouteTerms, Verdict
from headrace.model.demand import Demand
from headrace.model.effect import Concluded
from headrace.model.evidence import EntryEvidence, EntryRecord, ReplicaView, RouteEvidence
from headrace.model.ladder import LEVEL_MAX
from headrace.model.paths import Band
from headrace.model.slo import Bounds, Indicator, Indicators, Outcome
from headrace.policy.admission.gates import Wait, nearest, predicted_wait
from headrace.policy.routing.seconds import is_open
from headrace.report.ladder import ladder_tables
from headrace.report.rows import Row, figures
from headrace.report.story import Entered, Sent, Story
from headrace.report.tables import Column, Table, render_all
from headrace.report.turn import turn_rows
from headrace.report.words import NONE, count, milliseconds, taken, yes
from headrace.units import MICRO, mib_ceil, to_seconds


def explained(story: Story) -> str:
    """Return a story for the terminal: what happened, then the figures."""
    return "\n".join(sentences(story)) + "\n\n" + render_all(tables(story))


def tables(story: Story) -> list[Table]:
    """Return the figures in the order in which they were decided by."""
    found: list[Table] = []
    if story.entered is not None:
        found += _entry_tables(story.entered)
    for sent in story.sent:
        found += [figures("Its turn", turn_rows(sent)), placements(sent)]
    if story.ended is not None:
        found += _outcome_tables(story.ended)
    return found


# In words ----------------------------------------------------------------------------------------


def sentences(story: Story) -> list[str]:
    """Return what happened, a sentence for each step."""
    found = [_entered(story.entered)] if story.entered is not None else []
    if story.entered is None:
        found.append(f"Request {story.request}.")
    found += [_sent(sent, _arrived_at(story)) for sent in story.sent]
    if story.ended is not None:
        found += _ended(story.ended)
    return found + [f"Note: {note}." for note in story.notes]


def _arrived_at(story: Story) -> int | None:
    if story.ended is not None:
        return story.ended.entry.arrived_at
    return None if story.entered is None else story.entered.record.at


def _entered(entered: Entered) -> str:
    record, decision = entered.record, entered.record.decision
    head = (
        f"Request {record.request_id} of tenant {record.tenant}, class {record.tenant_class}, "
        f"arrived at {to_seconds(record.at):,.3f} s of the gateway's clock."
    )
    number = f"(decision {record.decision_id}, policy revision {record.policy_revision})"
    if isinstance(decision, LetIn):
        spare = milliseconds(decision.slack_ns)
        slack = "" if record.evidence.ttft_ns is None else f", with {spare} ms of slack"
        form = lesser(decision, record) if isinstance(decision, Degrade) else ""
        return f"{head} It was admitted{slack}{form} {number}.{_recorded(decision)}"
    gate = "" if decision.gate is None else f" by the {decision.gate} gate"
    again = "repeating does not help"
    if decision.retry_after_ns is not None:
        again = f"repeating can help after {milliseconds(decision.retry_after_ns)} ms"
    less = _tried(record)
    return f"{head} It was refused{gate}: {plain(decision.reason)}{less}; {again} {number}."


def lesser(decision: Degrade, record: EntryRecord) -> str:
    """Return in what form a request is served, and why not as asked."""
    form, given = decision.lesser, record.evidence.demand.input_tokens
    less = f"{count(given)} tokens of its prompt"
    if record.ladder is not None and given == record.ladder.facts.input_tokens:
        less = "its whole prompt"
    limit = (
        "" if decision.max_output is None else f", at most {count(decision.max_output)} of answer"
    )
    model = f", by {form.model}" if form.level == LEVEL_MAX else ""
    why = "its class is at that level, since more comes in than can be served as asked"
    if decision.reason is not None:
        why = f"with more it would have been refused: {plain(decision.reason)}"
    return f", at level {form.level} of its ladder with {less}{limit}{model}: {why}"


def _tried(record: EntryRecord) -> str:
    """Return which lesser forms were tried in vain."""
    levels = [] if record.ladder is None else [str(one.level) for one in record.ladder.tried[1:]]
    if not levels:
        return ""
    return f", at level {' and '.join(levels)} of its ladder too"


def _recorded(decision: LetIn) -> str:
    """Return what gates that only record would have refused it for."""
    failed = [one for one in decision.verdicts if one.reason is not None]
    said = " and ".join(
        f"the {one.gate} gate ({plain(one.reason)})" for one in failed if one.reason
    )
    noted = f" Only recorded: {said} would have refused it." if said else ""
    over = ", ".join(decision.over_soft)
    return f"{noted} It goes beyond the soft limit of {over}." if over else noted


def _sent(sent: Sent, arrived_at: int | None) -> str:
    record, evidence = sent.record, sent.record.evidence
    after, waited = "", 0
    if arrived_at is not None:
        waited = record.at - arrived_at
        after = f" {milliseconds(waited)} ms after it arrived" if waited else " at once"
    relegated = sent.dispatch is not None and sent.dispatch.relegated
    late = ", though too late for its bound" if relegated else ""
    return (
        f"It was sent to {record.placement.replica}{after}{late}: {_why(evidence, waited)} "
        f"(decision {record.decision_id})."
    )


def _why(evidence: RouteEvidence, waited: int) -> str:
    """Return why it was this request's turn."""
    if evidence.score is not None and evidence.turn:
        return "it had the best score of those that a replica was open for"
    if evidence.lent:
        return "a tenant further under its share can wait, and lent its turn"
    if evidence.patient:
        return "nobody whose work is urgent wanted the turn"
    if not evidence.turn:  # alone, or in an order that knows no shares
        return "it was first in line" if waited else "nobody waited before it"
    if any(term.band is Band.MINIMUM for term in evidence.turn):
        return "it was under a minimum that its share has"
    if all(term.counter <= term.least for term in evidence.turn):
        return "nobody who competes is further under its share"
    return "it was first in order"


def _ended(row: Concluded) -> list[str]:
    if not row.admitted:
        return []  # said at the door
    assert row.outcome is not None
    why = "" if row.reason is None else f": {plain(row.reason)}"
    place = "" if row.replica is None else f" at {row.replica}"
    if row.outcome is Outcome.SUCCESS:
        missed = ", ".join(one.value for one in row.missed)
        bounds = f"and missed its bounds on {missed}" if missed else "and met every bound"
        if row.indicators is None:
            bounds = "without a token, which met no bound"
        return [f"It succeeded{place} {bounds}."]
    return [f"It ended with {plain(row.outcome)}{place}{why}."]


def plain(word: Reason | Outcome) -> str:
    """Return a reason or outcome as words."""
    return word.value.replace("_", " ")


# At the door -------------------------------------------------------------------------------------


def _entry_tables(entered: Entered) -> Iterator[Table]:
    evidence = entered.record.evidence
    yield figures("What it asks for", demand_rows(evidence.demand))
    yield gates(entered.record.decision)
    if entered.record.ladder is not None:
        yield from ladder_tables(entered.record.ladder)
    if not evidence.contract.tenant_known or not evidence.contract.model_known:
        return  # nothing else was looked at
    wait = _forecast(entered)
    yield figures("Its slack to the first token", slack_rows(entered.record, wait))
    yield figures("The wait that was forecast", wait_rows(evidence, wait))


def demand_rows(demand: Demand) -> Iterator[Row]:
    """Yield what a request was predicted to cost."""
    yield Row("input", count(demand.input_tokens), "tokens", f"by {demand.input_revision}")
    yield Row("output p50", count(demand.output_p50), "tokens", f"by {demand.output_revision}")
    yield Row("output p90", count(demand.output_p90), "tokens", "what memory is reserved for")
    kv = f"{count(mib_ceil(demand.kv_bytes))} MiB before rounding to blocks"
    yield Row("KV reserved", count(demand.kv_blocks), "blocks", kv)
    yield Row(
        "prefill alone", milliseconds(demand.prefill_ns), "ms", "the whole prompt, nothing cached"
    )
    yield Row(
        "work p50", milliseconds(demand.work_p50_ns), "ms", "GPU time, what queues are weighed by"
    )
    yield Row("work p90", milliseconds(demand.work_p90_ns), "ms")


_UNITS: dict[Gate, str] = {Gate.BUDGET: "tokens", Gate.MEMORY: "blocks", Gate.DEADLINE: "ms"}
_COUNTED = {
    Reason.CONCURRENCY: "requests",
    Reason.SESSIONS: "sessions",
    Reason.REQUEST_RATE: "requests",
    Reason.TENANT_QUEUE_FULL: "requests",
    Reason.FAN_OUT_UNSUPPORTED: "answers",
}


def gates(decision: Decision) -> Table:
    """Return every verdict that was reached, in order."""
    verdicts = decision.verdicts
    names = ("gate", "verdict", "measured", "threshold", "margin", "unit")
    left = {"gate", "verdict", "unit"}
    return Table(
        title="Gates",
        columns=tuple(Column(name, right=name not in left) for name in names),
        rows=tuple(_gate(verdict, decision) for verdict in verdicts),
        note="" if len(verdicts) == len(Gate) else "the other gates were not asked",
    )


def _gate(verdict: Verdict, decision: Decision) -> tuple[str, ...]:
    said = "passes" if verdict.reason is None else plain(verdict.reason)
    decided = None if isinstance(decision, LetIn) else decision.reason
    if verdict.reason is not None and verdict.reason is not decided:
        said += ", recorded"
    numbers = (verdict.measured, verdict.threshold, verdict.margin)
    if not any(numbers):
        return (verdict.gate, said, NONE, NONE, NONE, "")
    if verdict.reason is Reason.FEATURE_UNSUPPORTED:
        return (verdict.gate, said, NONE, NONE, NONE, str(verdict.limit))
    if verdict.limit is not UNSET:
        kind = Unit(verdict.limit.partition("/")[0])
        return (
            verdict.gate,
            said,
            *(written_amount(kind, number) for number in numbers),
            verdict.limit,
        )
    timed = verdict.gate is Gate.DEADLINE
    shown = [milliseconds(number) if timed else count(number) for number in numbers]
    unit = _UNITS.get(verdict.gate, "tokens")
    if verdict.reason is not None:
        unit = _COUNTED.get(verdict.reason, unit)
    return (verdict.gate, said, *shown, unit)


def _forecast(entered: Entered) -> int | None:
    """Return the wait that was forecast: as recorded, or by the gates of then; None: not told."""
    record = entered.record
    if isinstance(record.decision, LetIn):
        return record.decision.wait_ns
    if entered.config is None:
        return None
    evidence = record.evidence
    return predicted_wait(evidence, entered.config.admission.wait, nearest(evidence.replicas))


def slack_rows(record: EntryRecord, wait_ns: int | None) -> Iterator[Row]:
    """Yield what is taken off the first-token bound; what remains is the slack, exactly."""
    evidence, slack = record.evidence, record.decision.slack_ns
    if evidence.ttft_ns is None:
        yield Row("first-token bound", NONE, "", "its class has none")
        return
    view = nearest(evidence.replicas)
    prefill = evidence.demand.prefill_ns if view is None else view.prefill_ns
    place = "alone, as no replica is ready" if view is None else f"at {view.replica}, the nearest"
    yield Row("first-token bound", milliseconds(evidence.ttft_ns), "ms")
    yield Row("routing", taken(evidence.route_ns), "ms", "what the gateway itself adds")
    if wait_ns is not None:
        yield Row("queue", taken(wait_ns), "ms", "the wait that was forecast, below")
        yield Row("prefill", taken(prefill), "ms", place)
        yield Row("first decode step", taken(evidence.first_ns), "ms")
        short = evidence.input_margin_ns
        rest = evidence.ttft_ns - evidence.route_ns - wait_ns - prefill - evidence.first_ns - slack
        yield Row("input uncertainty", taken(short), "ms", "tokens the count may be short of")
        yield Row("other margins", taken(rest - short), "ms", "fixed, and a share of the forecast")
    yield Row("slack", milliseconds(slack), "ms", "below 0 the deadline gate refuses")


def wait_rows(evidence: EntryEvidence, wait_ns: int | None) -> Iterator[Row]:
    """Yield what the forecast wait is made of."""
    facts, view = evidence.wait, nearest(evidence.replicas)
    pending = 0 if view is None else view.prefill_left_ns
    yield Row(
        "prefill in flight", milliseconds(pending), "ms", "sent to the nearest replica before it"
    )
    yield Row(
        "backlog", milliseconds(facts.backlog_ns), "ms", "work that waits and shares its pools"
    )
    yield Row(
        "own work ahead",
        milliseconds(facts.own_ahead_ns),
        "ms",
        "of it, its tenant's with an earlier key",
    )
    weights = f"{facts.own_weight} of {facts.weights}"
    yield Row("weight", weights, "", "its tenant's, of those that compete")
    yield Row(
        "debt",
        milliseconds(facts.debt_ns),
        "ms",
        "work of others before its counter is the least again",
    )
    yield Row(
        "counter",
        count(evidence.tenant_counter),
        "",
        f"least of the others that wait: {count(evidence.least_counter)}",
    )
    rate = facts.rate_micro / MICRO
    yield Row("work rate", f"{rate:,.3f}", "s/s", f"of {evidence.ready} ready replicas")
    formula = "in flight + min(backlog, own ahead x weights / own weight + debt) / rate"
    if wait_ns is not None and wait_ns != predicted_wait(evidence, Wait.FAIR, view):
        formula = "in flight + the whole backlog / rate"
    yield Row("wait", NONE if wait_ns is None else milliseconds(wait_ns), "ms", formula)
    bound = f"of at most {evidence.own_queue_bound}"
    yield Row("own requests waiting", count(evidence.own_queued), "", bound)
    if (by := evidence.lengths) is not None:
        whole, long = by.admitted / by.offered, by.long_admitted / max(1, by.long_offered)
        mine = "; this is one of it" if by.is_long else ""
        yield Row(
            "longest tenth let in", f"{100 * long:.0f}", "%", f"of all: {100 * whole:.0f} %{mine}"
        )


# Its turn and its place --------------------------------------------------------------------------


_TERMS = ("queue", "interference", "KV", "stale", "prefix")


def placements(sent: Sent) -> Table:
    """Return what each replica would have cost, the chosen one first."""
    evidence, chosen = sent.record.evidence, sent.record.placement
    rows = [(chosen.replica, chosen.terms, f"chosen, {count(chosen.cached_tokens)} tokens cached")]
    for view in evidence.replicas:
        if view.replica != chosen.replica:
            terms = _terms(sent, view)
            if terms is not None:
                rows.append((view.replica, terms, _standing(evidence, view)))
    rest = "no other replica was open"
    if evidence.rest_bound_ns is not None:
        rest = f"no other has a queue below {milliseconds(evidence.rest_bound_ns)} ms"
    columns = ("replica", *_TERMS, "total", "")
    return Table(
        title="Where it went: cost by replica, in ms",
        columns=tuple(Column(name, right=name not in {"replica", ""}) for name in columns),
        rows=tuple((name, *_costs(terms), said) for name, terms, said in rows),
        note=rest,
    )


def _terms(sent: Sent, view: ReplicaView) -> RouteTerms | None:
    if sent.config is None:
        return None
    evidence = sent.record.evidence
    return sent.config.routing.terms(
        view, evidence.output_p50, evidence.blocks, sent.config.stale_after_ns()
    )


def _standing(evidence: RouteEvidence, view: ReplicaView) -> str:
    return "" if is_open(view, evidence.blocks, evidence.gap_ns) else "not open"


def _costs(terms: RouteTerms) -> tuple[str, ...]:
    """Return the terms as they add up."""
    return (
        milliseconds(terms.queue_ns),
        milliseconds(terms.interference_ns),
        milliseconds(terms.kv_ns),
        milliseconds(terms.staleness_ns),
        taken(terms.prefix_credit_ns),
        milliseconds(terms.total_ns),
    )


# How it ended ------------------------------------------------------------------------------------


def _outcome_tables(row: Concluded) -> Iterator[Table]:
    if row.indicators is not None:
        yield measures(row.indicators, row.bounds, row.missed)
    if row.admitted:
        yield figures("How it ended", outcome_rows(row))


def measures(seen: Indicators, bounds: Bounds, missed: tuple[Indicator, ...]) -> Table:
    """Return what was measured beside what was promised."""
    inferred = "inferred" if seen.inferred else ""
    tpot = seen.tpot_ns()
    rows: tuple[tuple[Indicator | None, str, float | None, int | None, str], ...] = (
        (None, "routing", seen.route_ns, None, ""),
        (None, "queue", seen.queue_ns, None, ""),
        (None, "prefill", seen.prefill_ns, None, inferred),
        (None, "first decode", seen.first_decode_ns, None, inferred),
        (Indicator.TTFT, "TTFT", seen.ttft_ns, bounds.ttft_ns, "the sum of these"),
        (Indicator.TPOT, "TPOT", tpot, bounds.tpot_ns, "mean after the first token"),
        (Indicator.MAX_STALL, "max stall", seen.max_stall_ns, bounds.stall_ns, "largest gap"),
        (Indicator.E2E, "E2E", seen.e2e_ns, bounds.e2e_ns, f"{count(seen.tokens)} tokens"),
    )
    return Table(
        title="What was measured, in ms",
        columns=(
            Column("", right=False),
            Column("measured"),
            Column("bound"),
            Column("", right=False),
            Column("", right=False),
        ),
        rows=tuple(
            (
                name,
                NONE if value is None else milliseconds(value),
                NONE if bound is None else milliseconds(bound),
                "MISSED" if one in missed else "met" if bound is not None else "",
                said,
            )
            for one, name, value, bound, said in rows
        ),
        note=f"{count(seen.gaps_over)} gaps above {milliseconds(bounds.gap_ns)} ms; gaps are judged pooled",
    )


def outcome_rows(row: Concluded) -> Iterator[Row]:
    """Yield what came of it."""
    yield Row("outcome", NONE if row.outcome is None else plain(row.outcome))
    yield Row("reason", NONE if row.reason is None else plain(row.reason))
    yield Row("goodput", yes(row.met), "", "succeeded inside every bound")
    if row.usage is not None:
        usage = row.usage
        cached = f"{count(usage.cached_tokens)} of them cached"
        yield Row("input", count(usage.input_tokens), "tokens", cached)
        yield Row("output", count(usage.output_tokens), "tokens", "by the engine's usage")
        yield Row("work", milliseconds(row.work_ns), "ms", "as if nothing had been cached")
