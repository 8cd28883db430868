"""What Prometheus is told: read off the plane's state and the feed at each scrape.

Nothing that is gone has a series: no replica, no tenant that was never configured; and what is not
known has no sample. All that is kept here are a minute of shares and what counters that may be
corrected have shown. `take` reads on the event loop and is quick; adding up and writing out can be left to another thread.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from itertools import accumulate

from msgspec import Struct
from prometheus_client import generate_latest
from prometheus_client.core import Metric

from headrace import __version__
from headrace.adapters.engines.kv.publishing import PublishingEngine
from headrace.gateway import health
from headrace.gateway.driver import Driver
from headrace.gateway.fairness import Rising, Shares, Who, competing, counters, in_flight
from headrace.gateway.families import FAMILIES, PREFIX, exposed
from headrace.gateway.feed import Distribution, Feed
from headrace.gateway.jobs.clerk import Clerk
from headrace.gateway.jobs.office import Office
from headrace.gateway.labels import OTHER, SMALL_BYTES, Labels, kept, opened
from headrace.gateway.reading import Queues, fleet, waiting
from headrace.gateway.scale import standings
from headrace.model.engine import Snapshot
from headrace.model.ids import ModelName
from headrace.model.scaling import Standing
from headrace.model.slo import FORMULA_REVISION
from headrace.plane.accounts import Served, Tally
from headrace.plane.machine import Resolved
from headrace.policy.fairness.costs import revision
from headrace.ports.clock import Clock
from headrace.ports.job import OVER, State
from headrace.units import MICRO, NS_PER_S, InstantNs, to_seconds

Counts = Callable[[], Mapping[str, int]]


class Sheet:
    """The families of one scrape as they fill."""

    def __init__(self) -> None:
        """Start empty."""
        self._metrics: dict[str, Metric] = {}

    def put(self, name: str, value: float, *labels: str) -> None:
        """Add a sample."""
        family = FAMILIES[name]
        told = dict(zip(family.labels, labels, strict=True))
        self._metric(name).add_sample(exposed(name), told, value)

    def put_known(self, name: str, value: float | None, *labels: str) -> None:
        """Add a sample unless it is unknown."""
        if value is not None:
            self.put(name, value, *labels)

    def put_distribution(self, name: str, found: Distribution, label: str) -> None:
        """Add a histogram; one with edges below zero has no sum, which could fall."""
        family, metric = FAMILIES[name], self._metric(name)
        told = dict.fromkeys(family.labels, label)
        edges = [*(repr(edge / NS_PER_S) for edge in found.edges), "+Inf"]
        sums = list(accumulate(found.counts))
        full = PREFIX + name
        for edge, count in zip(edges, sums, strict=True):
            metric.add_sample(f"{full}_bucket", {**told, "le": edge}, count)
        if found.edges[0] >= 0:
            metric.add_sample(f"{full}_sum", told, to_seconds(found.sum))
            metric.add_sample(f"{full}_count", told, sums[-1])

    def metrics(self) -> list[Metric]:
        """Return the families that have a sample, in the order of the table."""
        return [self._metrics[name] for name in FAMILIES if name in self._metrics]

    def _metric(self, name: str) -> Metric:
        metric = self._metrics.get(name)
        if metric is None:
            family = FAMILIES[name]
            metric = self._metrics[name] = Metric(PREFIX + name, family.about, family.kind.value)
        return metric


class Sources(Struct, frozen=True, kw_only=True):
    """What others count."""

    refusals: Counts
    """Requests that the gateway refused itself, by reason."""
    ignored: Counts
    """Headers that were not believed."""
    token_counts: Callable[[], Mapping[tuple[str, str], int]]
    """Requests by model and what came of counting their tokens."""
    frozen: Callable[[], bool]
    denied: Callable[[], int]
    """Calls of the admin listener without a right key."""
    dropped: Mapping[str, Callable[[], int]]
    """By family, what a sink could not keep; only sinks that there are."""
    jobs: Office | None = None
    """What requests are deferred with."""
    changes: Callable[[], Mapping[tuple[str, str], int]] = dict
    """Changes asked of the admin listener, by what they are and what came of them."""


class Taken(Struct, frozen=True, kw_only=True):
    """Everything at one instant, on its way to Prometheus; whoever has it needs nothing else."""

    sheet: Sheet
    labels: Labels
    accounts: bytes
    live: Mapping[Who, Served]
    """What attempts that go on have had."""
    costs: Mapping[str, str]
    """Revision of each model's cost, the unit of service."""
    rising: Rising

    @property
    def small(self) -> bool:
        """Whether writing it out is over sooner than a thread is found."""
        return len(self.accounts) < SMALL_BYTES

    def metrics(self) -> list[Metric]:
        """Return every family with a sample; to be asked once."""
        accounts = opened(self.accounts)
        for who, tally in self.labels.tallies(accounts).items():
            _tally(self.sheet, tally, who)
        for whom, served in self.labels.served(accounts, self.live).items():
            _served(self.sheet, served, whom, self.rising, self.costs.get(whom[0], ""))
        return self.sheet.metrics()


class Metrics:
    """A collector for prometheus_client; in no registry, so nobody else's families join in."""

    def __init__(
        self, driver: Driver, feed: Feed, clock: Clock, sources: Sources, tenants_max: int
    ) -> None:
        """Read `driver` and `feed` whenever asked; `tenants_max` tenants get series of their own."""
        self._driver, self._feed, self._clock = driver, feed, clock
        self._sources, self._tenants_max = sources, tenants_max
        self._known: tuple[Resolved, Labels] | None = None
        self._shares = Shares()
        self._rising: tuple[object, Rising] = (None, Rising())

    def labels(self) -> Labels:
        """Return the labels of the configuration in force."""
        settings = self._driver.plane.settings
        if self._known is None or self._known[0] is not settings:
            self._known = (settings, Labels(settings.config, self._tenants_max))
        return self._known[1]

    def collect(self) -> list[Metric]:
        """Return every family with a sample, at one instant."""
        return self.take().metrics()

    def take(self) -> Taken:
        """Read what must be read at one instant."""
        sheet, labels = Sheet(), self.labels()
        now = max(self._driver.plane.state.now, self._clock.now())
        plane = self._driver.plane
        queues, live = waiting(plane), in_flight(plane)
        self._fed(sheet)
        self._warned(sheet, labels)
        self._left_out(sheet, labels)
        self._queues(sheet, labels, queues, now)
        self._levels(sheet, labels, now)
        self._tenants(sheet, labels)
        self._fair(sheet, labels, queues, live, now)
        self._replicas(sheet, now)
        self._process(sheet)
        self._shadow(sheet)
        self._scale(sheet)
        self._jobs(sheet, labels)
        return Taken(
            sheet=sheet,
            labels=labels,
            accounts=kept(plane.state.accounts),
            live=live,
            costs={
                model: one.revision for model, one in self._driver.plane.settings.prices.items()
            },
            rising=self._shown(),
        )

    def _shown(self) -> Rising:
        """Return what was shown in the present cost function's unit."""
        cost = self._driver.plane.settings.config.fairness
        if self._rising[0] != cost:
            self._rising = (cost, Rising())
        return self._rising[1]

    def _fed(self, sheet: Sheet) -> None:
        feed = self._feed
        for name, one in feed.classes.items():
            for family, found in one.distributions().items():
                if name != OTHER or any(found.counts):
                    sheet.put_distribution(family, found, name)
        for family, counts in (
            ("decisions", feed.decisions),
            ("edge_refused_requests", self._sources.refusals()),
            ("ignored_headers", self._sources.ignored()),
            ("ignored_events", self._driver.plane.state.ignored),
        ):
            for label, count in counts.items():
                sheet.put(family, count, label)
        for who, count in feed.audited.items():
            sheet.put("audited_refusals", count, *who)
        for which, count in self._sources.token_counts().items():
            sheet.put("token_counts", count, *which)
        for paying, paid in feed.spend.items():
            sheet.put("spend_usd", paid / MICRO, *paying)

    def _warned(self, sheet: Sheet, labels: Labels) -> None:
        """Show who went beyond soft limits; what has no label of its own is added up."""
        warned: Counter[tuple[str, str]] = Counter()
        for (tenant, budget), count in self._feed.over_soft.items():
            warned[labels.tenant(tenant), budget] += count
        for (label, budget), count in warned.items():
            sheet.put("soft_limit_requests", count, label, budget)

    def _left_out(self, sheet: Sheet, labels: Labels) -> None:
        """Show how much was left out of prompts; what has no label of its own is added up."""
        found: Counter[tuple[str, str]] = Counter()
        for (tenant, slo_class), count in self._feed.left_out.items():
            found[labels.tenant(tenant), labels.slo_class(slo_class)] += count
        for who, count in found.items():
            sheet.put("left_out_parts", count, *who)

    def _levels(self, sheet: Sheet, labels: Labels, now: InstantNs) -> None:
        """Show where each class stands on its ladder."""
        for model, known in self._driver.plane.state.models.items():
            for slo_class, one in known.standings.items():
                who = (model, labels.slo_class(slo_class))
                sheet.put("degrade_level", one.level, *who)
                for level, spent in enumerate(one.time_at(now)):
                    sheet.put("degrade_level_seconds", to_seconds(spent), *who, str(level))
                if one.recovered_ns is not None:
                    sheet.put("degrade_recovery_seconds", to_seconds(one.recovered_ns), *who)

    def _queues(self, sheet: Sheet, labels: Labels, queues: Queues, now: InstantNs) -> None:
        """Show who waits by model and class."""
        for (model, slo_class), found in queues.classes.items():
            label = labels.slo_class(slo_class)
            sheet.put("queued_requests", found.count, model, label)
            sheet.put("queued_work_seconds", to_seconds(found.work_ns), model, label)
            if found.oldest is not None:
                age = to_seconds(now - found.oldest)
                sheet.put("queue_age_seconds", age, model, label)
            if found.urgent is not None:
                slack = to_seconds(found.urgent - now)
                sheet.put("queue_earliest_slack_seconds", slack, model, label)

    def _tenants(self, sheet: Sheet, labels: Labels) -> None:
        """Show counters and what waits; what has no label of its own is added up."""
        plane = self._driver.plane
        state, prices = plane.state, plane.settings.prices
        # Counters of tenants without a label cannot be added up.
        for (model, tenant), value in counters(plane, labels.tenants()).items():
            if model in prices:  # else it has no pool any more
                cost = prices[model].revision
                sheet.put("tenant_virtual_service", value, model, tenant, cost)
        for model, known in state.models.items():
            for pool, rate in known.rates.items():
                sheet.put("work_rate", rate.micro() / MICRO, model, pool)
            waits: dict[str, tuple[int, int]] = {}
            for queue in known.backlog.queues.values():
                label = labels.tenant(queue.tenant)
                count, work = waits.get(label, (0, 0))
                waits[label] = (count + queue.size, work + queue.work)
            for label, (count, work) in waits.items():
                sheet.put("tenant_queued_requests", count, model, label)
                sheet.put("tenant_queued_work_seconds", to_seconds(work), model, label)

    def _fair(
        self,
        sheet: Sheet,
        labels: Labels,
        queues: Queues,
        live: dict[Who, Served],
        now: InstantNs,
    ) -> None:
        """Show who has waited long for a turn, and whose share strays."""
        plane, starving = self._driver.plane, dict[tuple[str, str], int]()
        for (model, tenant), since in queues.oldest.items():
            had = plane.state.accounts.served.get(model, {}).get(tenant)
            age = now - (since if had is None else max(since, had.turn_at))
            place = (str(model), labels.tenant(tenant))
            starving[place] = max(age, starving.get(place, 0))
        for place, longest in starving.items():
            sheet.put("tenant_starvation_seconds", to_seconds(longest), *place)
        standing = competing(plane, live, labels.tenants())
        for who, strayed in self._shares.deviations(standing, now).items():
            sheet.put("tenant_share_deviation", strayed, *who)

    def _replicas(self, sheet: Sheet, now: InstantNs) -> None:
        plane = self._driver.plane
        for pool, facts in plane.settings.pools.items():
            known = plane.state.models.get(ModelName(facts.spec.model))
            ready = 0 if known is None else known.fleet.ready.get(pool, 0)
            sheet.put("ready_replicas", ready, facts.spec.model, pool)
        for model, replica in fleet(plane.state.models):
            who = (model, replica.pool, replica.name)
            load = plane.state.ledger.loads[replica.incarnation]
            facts = plane.settings.pools[replica.pool]
            pending = to_seconds(load.pending_prefill_ns)
            sheet.put("replica_pending_prefill_seconds", pending, *who)
            sheet.put("replica_decodes", load.decodes, *who)
            sheet.put("replica_kv_blocks_reserved", load.blocks, *who)
            sheet.put("replica_kv_blocks_capacity", facts.blocks_total, *who)
            sheet.put("replica_expected_cached_tokens", replica.cached_expected, *who)
            sheet.put("replica_told_cached_tokens", replica.cached_told, *who)
            if replica.reliability is not None:
                sheet.put("replica_prefix_reliability", replica.reliability / MICRO, *who)
            report = replica.snapshot
            if report is None:
                continue
            age = now - report.observed_at
            sheet.put("replica_report_age_seconds", to_seconds(age), *who)
            if age <= plane.settings.stale_after_ns:
                _report(sheet, report, who)

        for engine in self._driver.engines:
            for signal in engine.missing:
                sheet.put("replica_signals_missing", 1, engine.pool, engine.name, signal)
            if isinstance(engine, PublishingEngine):
                _cache(sheet, engine)

    def _process(self, sheet: Sheet) -> None:
        driver, sources = self._driver, self._sources
        config = driver.plane.settings.config
        sheet.put("live_requests", driver.live)
        sheet.put("ready", health.ready(driver).status == health.OK)
        sheet.put("draining", driver.draining)
        sheet.put("frozen", sources.frozen())
        sheet.put("policy_revision", driver.revision)
        gates = config.admission
        ordering = str(config.ordering.__struct_config__.tag)
        cost = revision(config.fairness.cost)
        called = (
            str(driver.revision),
            gates.summary(),
            gates.wait,
            ordering,
            cost,
            FORMULA_REVISION,
        )
        sheet.put("policy_info", 1, *called)
        sheet.put("build_info", 1, __version__)
        sheet.put("admin_denied", sources.denied())
        for change, made in sources.changes().items():
            sheet.put("admin_changes", made, *change)
        for family, count in sources.dropped.items():
            sheet.put(family, count())

    def _shadow(self, sheet: Sheet) -> None:
        shadow = self._driver.shadow
        if shadow is None:
            return
        sheet.put("shadow_running", shadow.broken is None)
        for verdicts, count in shadow.found.verdicts.items():
            sheet.put("shadow_decisions", count, *verdicts)

    def _scale(self, sheet: Sheet) -> None:
        """Show the groups of pools that scale."""
        state, feed, hand = self._driver.plane.state, self._feed.scale, self._driver.hand
        if state.pools:
            sheet.put("scale_frozen", state.scale_frozen)
        for pool, books in state.pools.items():
            there = standings(self._driver, pool)
            for standing in Standing:
                sheet.put("groups", there[standing], pool, standing)
            sheet.put("group_gpus", sum(one.gpus for one in books.groups.values()), pool)
            sheet.put("group_gpu_seconds", to_seconds(feed.gpu_ns[pool]), pool)
            sheet.put("group_starts", books.risen, pool, "ready")
            sheet.put("group_starts", books.failed, pool, "failed")
            sheet.put("group_drains", hand.drains[pool], pool)
            sheet.put("group_drain_seconds", to_seconds(hand.drain_ns[pool]), pool)
        for pool, records in feed.last.items():
            sheet.put("desired_groups", records[-1].decision.desired, pool)
            demand = records[-1].evidence.demand
            sheet.put("urgent_work_rate", demand.urgent_micro / MICRO, pool, "first")
            sheet.put("urgent_work_rate", demand.retries_micro / MICRO, pool, "repeats")
        for family, counts in (
            ("scale_decisions", feed.reasons),
            ("scale_brakes", feed.brakes),
            ("scale_steps", feed.steps),
        ):
            for who, count in counts.items():
                sheet.put(family, count, *who)

    def _jobs(self, sheet: Sheet, labels: Labels) -> None:
        """Show deferred requests; tenants and classes without an own label are added up."""
        jobs = self._sources.jobs
        if jobs is None:
            return
        dispatcher = jobs.dispatcher
        waits: Counter[tuple[str, str]] = Counter()
        kept: Counter[tuple[str, str]] = Counter()
        for one in dispatcher.standing.tallies:
            slo_class = labels.slo_class(one.slo_class)
            if one.state is State.QUEUED:
                waits[labels.tenant(one.tenant), slo_class] += one.jobs
            elif one.state in OVER:
                kept[slo_class, one.state] += one.jobs
        for family, counts in (("deferred_queued", waits), ("deferred_kept", kept)):
            for who, count in counts.items():
                sheet.put(family, count, *who)
        running = dispatcher.running()
        for model, limit in dispatcher.limits().items():
            sheet.put("deferred_limit", limit, model)
            sheet.put("deferred_running", running[model], model)
        for state, count in dispatcher.ended.items():
            sheet.put("deferred_ended", count, state)
        sheet.put("deferred_returned", dispatcher.returned)
        sheet.put_known("deferred_oldest_seconds", jobs.age_s())
        self._batches(sheet, jobs.clerk)
        sheet.put("deferred_store_ok", jobs.trouble is None)

    def _batches(self, sheet: Sheet, clerk: Clerk) -> None:
        for stage, count in clerk.kept.batches.items():
            sheet.put("batches", count, stage)
        for to, count in clerk.lines.items():
            sheet.put("batch_lines", count, to)
        sheet.put("files", clerk.kept.files)
        sheet.put("files_bytes", clerk.kept.bytes)


class _Fixed:
    """Families read before, to be written out."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        return self._metrics


def text(taken: Taken) -> bytes:
    """Return it in Prometheus' text format; touches nothing else, so any thread may do it."""
    return generate_latest(_Fixed(taken.metrics()))


def _cache(sheet: Sheet, engine: PublishingEngine) -> None:
    """Show what an engine told of its KV cache."""
    who, heard = (engine.pool, engine.name), engine.heard
    sheet.put("engine_kv_blocks_held", engine.blocks, *who)
    sheet.put("engine_kv_blocks_stored", heard.stored, *who)
    sheet.put("engine_kv_blocks_removed", heard.removed, *who)
    sheet.put("engine_kv_event_gaps", heard.gaps, *who)
    for reset, count in heard.resets.items():
        sheet.put("engine_kv_resets", count, *who, reset)
    for reason, count in engine.unread.items():
        sheet.put("engine_kv_events_unread", count, *who, reason)


def _tally(sheet: Sheet, tally: Tally, who: tuple[str, str]) -> None:
    sheet.put("offered_requests", tally.offered, *who)
    sheet.put("offered_input_tokens", tally.input_tokens, *who)
    sheet.put("offered_predicted_output_tokens", tally.predicted_output, *who)
    sheet.put("offered_work_seconds", to_seconds(tally.offered_work_ns), *who)
    sheet.put("admitted_requests", tally.admitted, *who)
    sheet.put("deferred_requests", tally.deferred, *who)
    sheet.put("deferred_taken_up_requests", tally.taken_up, *who)
    sheet.put("left_before_admission_requests", tally.left_before, *who)
    sheet.put("dispatched_attempts", tally.attempts, *who)
    sheet.put("lent_turns", tally.lent, *who)
    sheet.put("relegated_requests", tally.relegated, *who)
    sheet.put("output_tokens", tally.output_tokens, *who)
    sheet.put("met_requests", tally.met, *who)
    sheet.put("met_output_tokens", tally.met_tokens, *who)
    sheet.put("met_work_seconds", to_seconds(tally.met_work_ns), *who)
    for reason, count in tally.rejected.items():
        sheet.put("rejected_requests", count, *who, reason)
    for level, count in tally.degraded.items():
        sheet.put("degraded_requests", count, *who, str(level))
    for outcome, count in tally.outcomes.items():
        sheet.put("ended_requests", count, *who, outcome)
    for reason, count in tally.ended_early.items():
        sheet.put("ended_early_requests", count, *who, reason)


def _served(sheet: Sheet, served: Served, who: tuple[str, str], rising: Rising, cost: str) -> None:
    sheet.put("service", rising.at_least(served.service, "service", *who, cost), *who, cost)
    for name, value in (
        ("served_input_tokens", served.uncached),
        ("served_cached_tokens", served.cached),
        ("served_output_tokens", served.output),
    ):
        sheet.put(name, rising.at_least(value, name, *who), *who)
    sheet.put("tenant_queue_emptied", served.emptied, *who)


def _report(sheet: Sheet, report: Snapshot, who: tuple[str, str, str]) -> None:
    """Show what a replica said of itself, as far as it tells."""
    sheet.put_known("replica_kv_blocks_used", report.kv_blocks_used, *who)
    sheet.put_known("replica_running", report.running, *who)
    sheet.put_known("replica_waiting", report.waiting, *who)
    sheet.put_known("replica_prefix_hit_tokens", report.prefix_tokens_hit, *who)
    sheet.put_known("replica_prefix_queried_tokens", report.prefix_tokens_queried, *who)
    sheet.put_known("replica_preemptions", report.preemptions, *who)
