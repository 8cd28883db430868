"""State, resolved configuration and the effects of the event at hand: what the steps work on."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Never

from headrace.model.budget import NOTHING, Take
from headrace.model.decision import Gate, Reason
from headrace.model.deployment import (
    ClassSpec,
    LaneSpec,
    ModelSpec,
    OrganisationSpec,
    TenantSpec,
)
from headrace.model.effect import Concluded, Effect
from headrace.model.engine import Usage
from headrace.model.evidence import ReplicaView
from headrace.model.ids import (
    ClassName,
    DecisionId,
    ModelName,
    PoolName,
    ReplicaName,
    RequestId,
    TenantId,
)
from headrace.model.meter import NO_STREAM, StreamTiming
from headrace.model.paths import SEPARATOR, UNTOLD, Level, Link, Path, path, step_down
from headrace.model.profile import Profile
from headrace.model.request import Request
from headrace.model.slo import Moments, Outcome, indicators, misses
from headrace.plane.fleet import PoolFacts, PrefixIndex, pool_facts, serves
from headrace.plane.rate import Rate
from headrace.plane.scale_state import ScaledPool
from headrace.plane.state import Live, ModelState, Phase, PlaneState
from headrace.policy.admission.gates import Mode
from headrace.policy.catalog import PlaneConfig, decode
from headrace.policy.envelopes import reading
from headrace.policy.fairness.costs import Price
from headrace.policy.fairness.shares import Rules, Shares
from headrace.units import MICRO, DurationNs, InstantNs, Tokens, WorkNs, ms


class Resolved:
    """The configuration as the steps look things up in it; derived, never frozen."""

    def __init__(self, config: PlaneConfig) -> None:
        """Index the configuration by name."""
        self.config = config
        self.order = config.ordering
        self.refuses_over_limits = config.admission.mode_of(Gate.BUDGET) is Mode.ENFORCE
        self.models: dict[str, ModelSpec] = {}
        for model in config.models:
            for name in model.names:
                self.models[name] = model
        self.classes = {ClassName(spec.name): spec for spec in config.classes}
        self.first = _first(config)
        self.tenants = {TenantId(spec.name): spec for spec in config.tenants}
        window, believed = config.window, config.routing.prefix_reliability
        self.pools = {
            PoolName(spec.name): pool_facts(
                window.stepped(spec),
                window.reach_ms(),
                window.kv_reserve,
                believed,
                reading(config, spec).work_rate,
            )
            for spec in config.pools
        }
        self.scaled = {
            PoolName(spec.name): ScaledPool.of(config, spec)
            for spec in config.pools
            if spec.scaling is not None
        }
        by_model: defaultdict[ModelName, list[PoolFacts]] = defaultdict(list)
        for facts in self.pools.values():
            by_model[ModelName(facts.spec.model)].append(facts)
        self.pools_of = dict(by_model)
        first = {ModelName(spec.model): spec.profile for spec in reversed(config.pools)}
        self.prices: dict[ModelName, Price] = {
            model: config.fairness.price(model, first[model]) for model in self.pools_of
        }
        """By the profile as declared: counters outlive a change of how steps are filled."""
        self.rules = {model: self._rules(price) for model, price in self.prices.items()}
        self.starve_ns = {
            name: None if spec.expire or spec.starve_ms is None else ms(spec.starve_ms)
            for name, spec in self.classes.items()
        }
        self.lanes = {spec.name: spec for spec in config.lanes}
        self.organisations = {spec.name: spec for spec in config.organisations}
        self._ways: dict[tuple[TenantId, ClassName], Path] = {}
        self.stale_after_ns = config.stale_after_ns()
        self.route_ns = ms(window.route_ms)
        self.bounds = {name: spec.bounds(None, None) for name, spec in self.classes.items()}
        """What each class promises a request that asks for no tighter bounds."""
        self._serving: dict[tuple[ModelName, ClassName], dict[PoolName, PoolFacts]] = {}
        self._sharing: dict[tuple[ModelName, ClassName], frozenset[ClassName]] = {}
        self._rivals: dict[tuple[ModelName, ClassName], frozenset[ClassName]] = {}
        self._served: dict[PoolName, frozenset[ClassName]] = {}
        self._scaling: dict[tuple[ModelName, ClassName], tuple[PoolName, ...]] = {}
        self.laddered = frozenset(
            model for model in self.pools_of if any(self.has_ladder(model, n) for n in self.classes)
        )
        """Models that some class may be given less of."""

    def class_of(self, asked: ClassName | None, tenant: TenantSpec | None) -> ClassName:
        """Return the class asked for, else the tenant's default, else the first that is open to all."""
        if asked is not None:
            return asked
        if tenant is not None and tenant.classes:
            return ClassName(tenant.classes[0])
        return self.first

    def way(self, tenant: TenantSpec, slo_class: ClassName, user: str | None) -> Path:
        """Return where in the share tree a request of a tenant in a class stands."""
        name = TenantId(tenant.name)
        way = self._ways.get((name, slo_class))
        if way is None:
            way = self._ways[name, slo_class] = path(*self._links(tenant, slo_class))
        if not tenant.by_user:
            return way
        return step_down(way, Link(Level.USER, UNTOLD if user is None else user))

    def _links(self, tenant: TenantSpec, slo_class: ClassName) -> Iterator[Link]:
        spec = self.classes[slo_class]
        if spec.lane is not None:
            yield _link(Level.LANE, self.lanes[spec.lane])
        yield _link(Level.CLASS, spec)
        if tenant.organisation is not None:
            yield _link(Level.ORGANISATION, self.organisations[tenant.organisation])
        yield _link(Level.TENANT, tenant)

    def declares(self, key: str) -> bool:
        """Return whether a node of the share tree stands where it is declared."""
        names = {Level(int(each[0])): each[1:] for each in key.split(SEPARATOR)[1:]}
        lane, slo_class = names.get(Level.LANE), names.get(Level.CLASS)
        organisation, tenant = names.get(Level.ORGANISATION), names.get(Level.TENANT)
        if slo_class is None:
            return lane is None or lane in self.lanes
        within = self.classes.get(ClassName(slo_class))
        if within is None or within.lane != lane:
            return False
        if tenant is None:
            return organisation is None or organisation in self.organisations
        spec = self.tenants.get(TenantId(tenant))
        if spec is None or spec.organisation != organisation:
            return False
        return spec.by_user or Level.USER not in names

    def _rules(self, price: Price) -> Rules:
        fairness = self.config.fairness
        aging, boost, memory = fairness.exceptions(price)
        return Rules(aging=aging, boost=boost, boost_ns=ms(fairness.boost_ms), memory=memory)

    def serving(self, model: ModelName, slo_class: ClassName) -> dict[PoolName, PoolFacts]:
        """Return the pools of a model that serve a configured class, in their order."""
        found = self._serving.get((model, slo_class))
        if found is None:
            found = {
                PoolName(facts.spec.name): facts
                for facts in self.pools_of.get(model, ())
                if slo_class in self.classes and serves(facts, slo_class)
            }
            if slo_class in self.classes:
                self._serving[model, slo_class] = found
        return found

    def has_ladder(self, model: ModelName, slo_class: ClassName) -> bool:
        """Return whether requests of a class for a model may be given less."""
        spec = self.classes.get(slo_class)
        return (
            spec is not None and spec.degrade is not None and bool(self.serving(model, slo_class))
        )

    def pool_for(self, model: ModelName, slo_class: ClassName) -> PoolFacts | None:
        """Return the first pool of a model that serves a class: the one demand is predicted on."""
        return next(iter(self.serving(model, slo_class).values()), None)

    def rivals(self, model: ModelName, slo_class: ClassName) -> frozenset[ClassName]:
        """Return the classes that share a pool with this one, itself included."""
        found = self._rivals.get((model, slo_class))
        if found is None:
            mine = self.serving(model, slo_class)
            found = self._rivals[model, slo_class] = frozenset(
                name for name in self.classes if mine.keys() & self.serving(model, name).keys()
            )
        return found

    def served_by(self, pool: PoolName) -> frozenset[ClassName]:
        """Return the classes that a pool serves."""
        found = self._served.get(pool)
        if found is None:
            facts = self.pools[pool]
            found = self._served[pool] = frozenset(n for n in self.classes if serves(facts, n))
        return found

    def scaling(self, model: ModelName, slo_class: ClassName) -> tuple[PoolName, ...]:
        """Return those of a model's pools for a class that scale."""
        found = self._scaling.get((model, slo_class))
        if found is None:
            serving = self.serving(model, slo_class)
            found = self._scaling[model, slo_class] = tuple(n for n in serving if n in self.scaled)
        return found

    def sharing(self, model: ModelName, slo_class: ClassName) -> frozenset[ClassName]:
        """Return the classes that can go nowhere if this one cannot: served by its pools only."""
        found = self._sharing.get((model, slo_class))
        if found is None:
            others = [f for f in self.pools_of[model] if not serves(f, slo_class)]
            found = self._sharing[model, slo_class] = frozenset(
                name for name in self.classes if not any(serves(f, name) for f in others)
            )
        return found


def _first(config: PlaneConfig) -> ClassName:
    """Return the first class of no lane; the first of all where every one has a lane."""
    spec = next((one for one in config.classes if one.lane is None), config.classes[0])
    return ClassName(spec.name)


def _link(level: Level, spec: LaneSpec | ClassSpec | OrganisationSpec | TenantSpec) -> Link:
    """Return the node of the share tree that somebody declared."""
    minimum, maximum = round(spec.minimum * MICRO), round(spec.maximum * MICRO)
    return Link(level, spec.name, spec.weight, minimum, max(1, maximum))


NO_RULES = Rules()
Survey = tuple[RequestId | None, dict[ReplicaName, ReplicaView]]
NOT_SURVEYED: Survey = (None, {})


class Machine:
    """One plane's state and what the present event makes it want."""

    settings: Resolved
    """The resolved configuration; there is none before the first `ConfigChanged`."""

    def __init__(self, state: PlaneState) -> None:
        """Take over a state, fresh or thawed."""
        self.state = state
        self.out: list[Effect] = []
        self.surveyed = NOT_SURVEYED
        """The request just decided on and the replicas as seen for it, until anything is booked:
        most are sent in the same breath, and need not be looked at twice."""
        self.configured = False
        self.prefixes: dict[ModelName, PrefixIndex] = {}
        if state.config:
            self.configure(Resolved(decode(state.config)))

    def __getattr__(self, name: str) -> Never:
        """Tell what is wrong where there are no settings; a property would be asked too often."""
        assert name != "settings", "the first event must be ConfigChanged"
        raise AttributeError(name)

    def configure(self, resolved: Resolved) -> None:
        """Decide by a configuration from here on; models it adds start empty."""
        self.settings, self.configured = resolved, True
        for model in resolved.config.models:
            name = ModelName(model.name)
            known = self.state.models.get(name)
            if known is None:
                known = self.state.models[name] = ModelState()
            self.state.ledger.share_out(name, resolved.rules.get(name, NO_RULES))
            self.prefixes[name] = PrefixIndex(known.fleet.replicas.values())
        for name, known in self.state.models.items():
            before, known.rates = known.rates, {}
            for facts in resolved.pools_of.get(name, ()):
                pool = PoolName(facts.spec.name)
                known.rates[pool] = before.get(pool) or Rate.starting(facts.work_rate)

    def ignore(self, kind: str) -> None:
        """Count an event that has no effect."""
        self.state.ignored[kind] = self.state.ignored.get(kind, 0) + 1

    def next_decision(self) -> DecisionId:
        """Return a fresh decision id."""
        self.state.decisions += 1
        return DecisionId(self.state.decisions)

    def shares(self, model: ModelName) -> Shares:
        """Return a model's share tree; the ledger alone charges it."""
        return self.state.ledger.shares[model]

    def starve_ns(self, slo_class: ClassName) -> DurationNs | None:
        """Return how long a class's requests let others pass; one that ends the hopeless needs no bound."""
        return self.settings.starve_ns[slo_class]

    def spec_of(self, live: Live) -> ClassSpec:
        """Return the class a live request belongs to."""
        return self.settings.classes[live.slo_class]

    def conclude(
        self,
        live: Live,
        now: InstantNs,
        outcome: Outcome,
        *,
        reason: Reason | None = None,
        usage: Usage | None = None,
        timing: StreamTiming = NO_STREAM,
    ) -> None:
        """End an admitted request: settle its quota, learn its length, write its row.

        Its flight, if it had one, was closed before, and it waits in no queue.
        """
        live.advance(Phase.ENDED)
        request, state = live.request, self.state
        del state.live[request.id]
        billed = _billed(usage, live.made, request)
        state.ledger.settle(request.id, self._used(live, billed), now)
        if outcome is Outcome.SUCCESS and usage is not None:
            config = self.settings.config
            config.input_prediction.learn(state.inputs, live.model, request, usage.input_tokens)
            if live.lesser is None:  # a limit of ours tells nothing of how long answers would be
                self._learn_output(live, usage)
        moments = Moments(
            arrived_at=live.entry.arrived_at,
            decided_at=live.entry.arrived_at,
            dispatched_at=live.dispatched_at,
            ended_at=now,
            first_decode_ns=live.first_ns,
        )
        seen = indicators(moments, timing)
        entered = not request.deferred or live.replica is not None
        row = Concluded(
            request=request.id,
            tenant=request.tenant,
            slo_class=live.slo_class,
            model=live.model,
            entry=live.entry,
            admitted=entered,
            reason=reason,
            outcome=outcome if entered else None,
            bounds=live.bounds,
            replica=live.replica,
            usage=usage,
            indicators=seen,
            timing=timing if seen is not None else None,
            missed=misses(seen, live.bounds) if seen is not None else (),
            work_ns=self._served_work(live, usage),
            ended_at=now,
            level=0 if live.lesser is None else live.lesser.level,
            deferred=request.deferred,
        )
        self.out.append(row)
        state.accounts.conclude(state.accounts.tally(request.tenant, live.slo_class), row)
        self.count_over(row, repeat=request.repeat)

    def count_over(self, row: Concluded, *, repeat: bool) -> None:
        """Count a request that is over for one of the pools that scale and might have served it.

        One that was put aside was in no hurry; of one that came again, the first try counts.
        """
        if row.deferred or repeat:
            return
        pools = self.settings.scaling(row.model, row.slo_class)
        if pools and self.settings.classes[row.slo_class].ttft_ms is not None:
            books = self.state.pools[pools[row.request % len(pools)]]
            books.over += 1
            books.met += row.met

    def _learn_output(self, live: Live, usage: Usage) -> None:
        prediction, request = self.settings.config.prediction, live.request
        groups = prediction.groups_of(
            request.tenant, live.slo_class, live.model, request.input_tokens
        )
        prediction.learn(self.state.outputs, groups, usage.output_tokens)

    def _served_work(self, live: Live, usage: Usage | None) -> WorkNs:
        """Return the work of what the engine says it did, as if nothing were cached."""
        if usage is None:
            return WorkNs(0)
        return self._profile(live).work_ns(usage.input_tokens, 0, usage.output_tokens)

    def _used(self, live: Live, usage: Usage | None) -> Take:
        """Return what a request took of its tenant's budgets."""
        if usage is None:
            return NOTHING
        cached = min(usage.cached_tokens, usage.input_tokens)
        given, output = usage.input_tokens, usage.output_tokens
        tokens = Tokens(given + output)
        spec = self.settings.tenants.get(live.request.tenant)
        if spec is None or not spec.budgets:  # nobody counts the rest
            return Take(tokens=tokens)
        return Take(
            tokens=tokens,
            work_ns=self._profile(live).work_ns(given - cached, cached, output),
            micro_usd=self.settings.models[live.model].cost(given, cached, output),
        )

    def _profile(self, live: Live) -> Profile:
        """Return the profile that a live request is predicted on."""
        facts = self.settings.pool_for(live.model, live.slo_class)
        if facts is None:  # its class lost its pool while it ran
            facts = self.settings.pools_of[live.model][0]
        return facts.spec.profile


def _billed(usage: Usage | None, made: int, request: Request) -> Usage | None:
    """Return the tokens to settle on: the engine's count, else what the caller was sent."""
    if usage is not None or not made:
        return usage
    return Usage(
        input_tokens=request.input_tokens,
        cached_tokens=Tokens(0),
        output_tokens=Tokens(made),
        tells_cached=False,
    )
