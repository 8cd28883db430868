"""Does a configuration make sense as a whole? What no type can say: references, reach, proportion.

An error is what could only fail or never act; a warning is what works, though hardly as meant.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from ipaddress import ip_address
from urllib.parse import urlsplit

from headrace.config.ladders import ladders
from headrace.config.levers import levers
from headrace.config.measured import envelopes
from headrace.config.problem import Problem, warning
from headrace.config.problem import unknown as _unknown
from headrace.config.scaling import groups, most, scaling
from headrace.config.schema import AdminKeySpec, EngineTokenizerSpec, Settings
from headrace.model.budget import Unit
from headrace.model.deployment import (
    ClassSpec,
    Defer,
    LaneSpec,
    OrganisationSpec,
    PoolSpec,
    TenantSpec,
)
from headrace.model.meter import GAP_EDGES_NS
from headrace.model.slo import Indicator, Slo
from headrace.policy.catalog import PlaneConfig
from headrace.policy.fairness.costs import MoneyCost
from headrace.units import MICRO, NS_PER_MS, PS_PER_NS, ms


def problems(settings: Settings) -> list[Problem]:
    """Return everything that does not fit, errors and warnings, in the order of the schema."""
    found: list[Problem] = []
    for question in _QUESTIONS:
        found.extend(question(settings))
    return found


def _unique(settings: Settings) -> Iterator[Problem]:
    plane, at = settings.deployment, "$.deployment"
    models: list[tuple[str, str]] = []
    for i, model in enumerate(plane.models):
        models.append((f"{at}.models[{i}].name", model.name))
        models.extend(
            (f"{at}.models[{i}].aliases[{j}]", name) for j, name in enumerate(model.aliases)
        )
        models.extend(
            (f"{at}.models[{i}].adapters[{j}]", name) for j, name in enumerate(model.adapters)
        )
    yield from _twice("model, alias or adapter", models)
    for word, path, names in (
        ("pool", f"{at}.pools", [one.name for one in plane.pools]),
        ("class", f"{at}.classes", [one.name for one in plane.classes]),
        ("lane", f"{at}.lanes", [one.name for one in plane.lanes]),
        ("organisation", f"{at}.organisations", [one.name for one in plane.organisations]),
        ("tenant", f"{at}.tenants", [one.name for one in plane.tenants]),
        ("SLO", f"{at}.slos", [one.name for one in plane.slos]),
        ("upstream", "$.upstreams", [one.name or "" for one in settings.upstreams if one.name]),
        ("key", "$.keys", [one.name for one in settings.keys]),
        ("admin key", "$.admin.keys", [one.name for one in _admin_keys(settings)]),
    ):
        yield from _twice(word, [(f"{path}[{i}].name", name) for i, name in enumerate(names)])
    hashes = [(f"$.keys[{i}].hash", key.hash) for i, key in enumerate(settings.keys)]
    admins = _admin_keys(settings)
    hashes += [(f"$.admin.keys[{i}].hash", key.hash) for i, key in enumerate(admins)]
    yield from _twice("hash of a key", hashes)


def _admin_keys(settings: Settings) -> tuple[AdminKeySpec, ...]:
    return () if settings.admin is None else settings.admin.keys


def _twice(word: str, named: Iterable[tuple[str, str]]) -> Iterator[Problem]:
    seen: dict[str, str] = {}
    for path, name in named:
        if name in seen:
            yield Problem(path=path, message=f"{word} `{name}` is already at `{seen[name]}`")
        else:
            seen[name] = path


def _references(settings: Settings) -> Iterator[Problem]:
    plane = settings.deployment
    models = {one.name: None for one in plane.models}
    adapters = {name: None for one in plane.models for name in one.adapters}
    classes = {one.name: None for one in plane.classes}
    for i, pool in enumerate(plane.pools):
        at = f"$.deployment.pools[{i}]"
        yield from _unknown(f"{at}.model", "model", pool.model, models)
        for j, name in enumerate(pool.classes):
            yield from _unknown(f"{at}.classes[{j}]", "class", name, classes)
    lanes = {one.name: None for one in plane.lanes}
    for i, spec in enumerate(plane.classes):
        yield from _unknown(f"$.deployment.classes[{i}].lane", "lane", spec.lane, lanes)
    organisations = {one.name: None for one in plane.organisations}
    for i, tenant in enumerate(plane.tenants):
        at = f"$.deployment.tenants[{i}]"
        whose = tenant.organisation
        yield from _unknown(f"{at}.organisation", "organisation", whose, organisations)
        for j, name in enumerate(tenant.models):
            yield from _unknown(f"{at}.models[{j}]", "model", name, models | adapters)
        for j, name in enumerate(tenant.classes):
            yield from _unknown(f"{at}.classes[{j}]", "class", name, classes)
    pools = {one.name: None for one in plane.pools}
    for i, upstream in enumerate(settings.upstreams):
        yield from _unknown(f"$.upstreams[{i}].pool", "pool", upstream.pool, pools)
        if not _is_place(upstream.url):
            message = f"`{upstream.url}` has no host, or a port that is none"
            yield Problem(path=f"$.upstreams[{i}].url", message=message)
    cost = plane.fairness.cost
    for name in cost.models if isinstance(cost, MoneyCost) else ():
        yield from _unknown("$.deployment.fairness.cost.models", "model", name, models)
    yield from _taken(settings)


def _is_place(url: str) -> bool:
    try:
        parts = urlsplit(url)
        port, host = parts.port, parts.hostname or ""
        return bool(host) and port != 0 and bool(host if ":" in host else host.encode("idna"))
    except ValueError:
        return False


def _taken(settings: Settings) -> Iterator[Problem]:
    """Yield engines that are called as another replica is without being told to."""
    counts = Counter(upstream.pool for upstream in settings.upstreams)
    sizes = {pool.name: counts[pool.name] or most(pool) for pool in settings.deployment.pools}
    unnamed: set[str] = set()
    for pool, size in sizes.items():
        unnamed |= {f"{pool}-{nth}" for nth in range(size)}
    nth_of: Counter[str] = Counter()
    for upstream in settings.upstreams:
        if upstream.name is not None:
            unnamed.discard(f"{upstream.pool}-{nth_of[upstream.pool]}")
        nth_of[upstream.pool] += 1
    for i, upstream in enumerate(settings.upstreams):
        if upstream.name in unnamed:
            message = f"a replica without a name of its own is called `{upstream.name}` already"
            yield Problem(path=f"$.upstreams[{i}].name", message=message)


def _objectives(settings: Settings) -> Iterator[Problem]:
    plane = settings.deployment
    tenants = {one.name: None for one in plane.tenants}
    slos = {one.name: None for one in plane.slos}
    for i, slo in enumerate(plane.slos):
        at = f"$.deployment.slos[{i}]"
        yield from _population(plane, slo, f"{at}.population", tenants)
        yield from _gap_thresholds(plane, slo, at)
    for i, sla in enumerate(plane.slas):
        at = f"$.deployment.slas[{i}]"
        yield from _unknown(f"{at}.customer", "tenant", sla.customer, tenants)
        for j, name in enumerate(sla.slos):
            yield from _unknown(f"{at}.slos[{j}]", "SLO", name, slos)
    for i, key in enumerate(settings.keys):
        yield from _unknown(f"$.keys[{i}].tenant", "tenant", key.tenant, tenants)


def _population(
    plane: PlaneConfig, slo: Slo, at: str, tenants: Collection[str]
) -> Iterator[Problem]:
    who = slo.population
    yield from _unknown(
        f"{at}.slo_class", "class", who.slo_class, [one.name for one in plane.classes]
    )
    yield from _unknown(f"{at}.tenant", "tenant", who.tenant, tenants)
    yield from _unknown(f"{at}.model", "model", who.model, [one.name for one in plane.models])
    pools = [one for one in plane.pools if who.model in (None, one.model)]
    revisions = [one.revision for one in pools]
    yield from _unknown(f"{at}.model_revision", "revision", who.model_revision, revisions)
    yield from _unknown(f"{at}.region", "region", who.region, [one.region for one in pools])


def _gap_thresholds(plane: PlaneConfig, slo: Slo, at: str) -> Iterator[Problem]:
    """Warn of gaps that are counted by whole buckets: exact only at an edge or at the class's."""
    wanted = slo.population.slo_class
    bounds = {ms(one.itl_ms) for one in plane.classes if wanted in (None, one.name)}
    for i, objective in enumerate(slo.objectives):
        limit = ms(objective.threshold_ms)
        if objective.indicator is Indicator.GAP and limit not in GAP_EDGES_NS and bounds != {limit}:
            below = max((edge for edge in GAP_EDGES_NS if edge < limit), default=0) // NS_PER_MS
            yield warning(
                f"{at}.objectives[{i}].threshold_ms",
                f"{objective.threshold_ms:g} ms is neither the class's itl_ms nor an edge of a "
                f"bucket: only gaps up to {below} ms count as met",
            )


def _supply(settings: Settings) -> Iterator[Problem]:
    plane = settings.deployment
    serving: dict[str, list[PoolSpec]] = {}
    for pool in plane.pools:
        serving.setdefault(pool.model, []).append(pool)
    for i, model in enumerate(plane.models):
        if model.name not in serving:
            yield Problem(
                path=f"$.deployment.models[{i}]", message=f"model `{model.name}` has no pool"
            )
    unserved = {
        (model.name, one.name)
        for model in plane.models
        for one in plane.classes
        if model.name in serving
        and all(pool.classes and one.name not in pool.classes for pool in serving[model.name])
    }
    if unserved:
        yield from _unserved(plane, unserved)


def _pools(settings: Settings) -> Iterator[Problem]:
    """Tell of what a pool says in vain."""
    plane = settings.deployment
    revisions = {model.name: model.revision for model in plane.models}
    for i, pool in enumerate(plane.pools):
        at = f"$.deployment.pools[{i}]"
        if pool.role != "both":
            yield Problem(path=f"{at}.role", message="split pools are not served yet; use `both`")
        own = revisions.get(pool.model, pool.revision)
        if pool.revision != own:
            yield warning(
                f"{at}.revision",
                f"model `{pool.model}` is of revision `{own}`: whoever asks for it is sent here too "
                f"and gets `{pool.revision}`",
            )


def _parts(settings: Settings) -> Iterator[Problem]:
    """Refuse parts that cannot be had: a minimum above its maximum, or minimums of more than there is."""
    plane = settings.deployment
    for word in ("lanes", "classes", "organisations", "tenants"):
        one: LaneSpec | ClassSpec | OrganisationSpec | TenantSpec
        for i, one in enumerate(getattr(plane, word)):
            if one.minimum > one.maximum:
                yield Problem(
                    path=f"$.deployment.{word}[{i}].minimum",
                    message=f"{one.minimum:g} is above the maximum, {one.maximum:g}",
                )
    told: set[str] = set()
    for where, minimums in _minimums(plane):
        total = sum(round(minimum * MICRO) for _, minimum in minimums)
        if total > MICRO and minimums[-1][0] not in told:
            told.add(minimums[-1][0])
            yield Problem(
                path=minimums[-1][0],
                message=f"minimums {where} add up to {total / MICRO:g}, of 1 that there is",
            )


def _budgets(settings: Settings) -> Iterator[Problem]:
    """Refuse budgets that are there twice, and budgets in money that some tokens would not count for."""
    plane = settings.deployment
    every = tuple(one.name for one in plane.models)
    unpriced = {
        name for one in plane.models if one.price is None for name in (one.name, *one.adapters)
    }
    for i, tenant in enumerate(plane.tenants):
        at = f"$.deployment.tenants[{i}].budgets"
        yield from _twice(
            "budget", [(f"{at}[{j}]", one.name) for j, one in enumerate(tenant.budgets)]
        )
        for j, one in enumerate(tenant.budgets):
            if one.unit is not Unit.USD:
                continue
            free = next((name for name in tenant.models or every if name in unpriced), None)
            if free is not None:
                message = f"model `{free}`, which it may use, has no `price`: it would be free"
                yield Problem(path=f"{at}[{j}]", message=message)


_Minimums = list[tuple[str, float]]
"""Of nodes that share one part: where each is declared, and what it is."""


def _minimums(plane: PlaneConfig) -> Iterator[tuple[str, _Minimums]]:
    """Yield the minimums of each set of siblings in the tree of shares, where there are any."""
    at = "$.deployment"
    lanes = [(f"{at}.lanes[{i}].minimum", one.minimum) for i, one in enumerate(plane.lanes)]
    groups: dict[str | None, _Minimums] = {None: [one for one in lanes if one[1]]}
    for i, spec in enumerate(plane.classes):
        if spec.minimum:
            found = groups.setdefault(spec.lane, [])
            found.append((f"{at}.classes[{i}].minimum", spec.minimum))
    for lane, minimums in groups.items():
        if minimums:
            yield "of lanes and classes" if lane is None else f"in lane `{lane}`", minimums
    for spec in plane.classes:
        yield from _tenant_minimums(plane, spec)


def _tenant_minimums(plane: PlaneConfig, slo_class: ClassSpec) -> Iterator[tuple[str, _Minimums]]:
    """Yield the minimums of a class's organisations and tenants, and of each organisation's tenants."""
    at = "$.deployment"
    index = {one.name: i for i, one in enumerate(plane.organisations)}
    groups: dict[str | None, _Minimums] = {}
    there: set[str] = set()
    for i, tenant in enumerate(plane.tenants):
        whose = tenant.organisation
        if not tenant.may_use(slo_class):
            continue
        if whose in index:
            there.add(whose)
        if tenant.minimum:
            minimum = (f"{at}.tenants[{i}].minimum", tenant.minimum)
            groups.setdefault(whose, []).append(minimum)
    for name in sorted(there, key=index.__getitem__):
        spec = plane.organisations[index[name]]
        if spec.minimum:
            minimum = (f"{at}.organisations[{index[name]}].minimum", spec.minimum)
            groups.setdefault(None, []).append(minimum)
    for whose, minimums in groups.items():
        where = "" if whose is None else f"organisation `{whose}`, "
        yield f"in {where}class `{slo_class.name}`", minimums


def _unserved(plane: PlaneConfig, unserved: set[tuple[str, str]]) -> Iterator[Problem]:
    """Yield classes that a tenant lists and nothing serves; warn of each other gap, once."""
    every = tuple(one.name for one in plane.models)
    names = {one.name for one in plane.classes}
    free = {one.name for one in plane.classes if one.lane is None}
    told: set[tuple[str, str]] = set()
    for i, tenant in enumerate(plane.tenants):
        models = tenant.models or every
        for j, name in enumerate(tenant.classes):
            if name in names and all((model, name) in unserved for model in models):
                told.update((model, name) for model in models)
                yield Problem(
                    path=f"$.deployment.tenants[{i}].classes[{j}]",
                    message=f"class `{name}` is served by no pool of a model it may use",
                )
    for i, tenant in enumerate(plane.tenants):
        open_to = {
            (model, name)
            for model, name in unserved - told
            if model in (tenant.models or every) and name in (tenant.classes or free)
        }
        told |= open_to
        for model, name in sorted(open_to):
            message = f"it may use class `{name}` of model `{model}`, which no pool serves"
            yield warning(f"$.deployment.tenants[{i}]", message)
        if told >= unserved:
            return


def _lanes(settings: Settings) -> Iterator[Problem]:
    """Warn of classes that nobody may use, and of tenants that may use none: lanes must be named."""
    plane = settings.deployment
    named = {name for tenant in plane.tenants for name in tenant.classes}
    for i, spec in enumerate(plane.classes):
        if spec.lane is not None and spec.name not in named:
            message = f"it is of lane `{spec.lane}`, and no tenant names it: nobody may use it"
            yield warning(f"$.deployment.classes[{i}]", message)
    if any(spec.lane is None for spec in plane.classes):
        return
    for i, tenant in enumerate(plane.tenants):
        if not tenant.classes:
            message = "it names no class, and each belongs to a lane: it may use none"
            yield warning(f"$.deployment.tenants[{i}]", message)


def _proportion(settings: Settings) -> Iterator[Problem]:
    """Warn of limits that make each other pointless."""
    plane = settings.deployment
    limits = {model.name: model.context_limit for model in plane.models}
    for i, tenant in enumerate(plane.tenants):
        least = min((limits.get(name, 0) for name in tenant.models), default=min(limits.values()))
        if tenant.tpm_limit is not None and tenant.tpm_limit < least:
            yield warning(
                f"$.deployment.tenants[{i}].tpm_limit",
                f"{tenant.tpm_limit} tokens per minute never admit a request of the full context "
                f"of {least}",
            )
    window_ns = ms(plane.window.prefill_ms)
    for i, pool in enumerate(plane.pools):
        profile = plane.window.stepped(pool).profile
        budget = profile.token_budget
        step_ns = profile.step_ps(0, 0, budget, budget**2) // PS_PER_NS
        if window_ns < step_ns:
            yield warning(
                "$.deployment.window.prefill_ms",
                f"{plane.window.prefill_ms:g} ms is less than one full step of pool `{pool.name}`, "
                f"{step_ns / NS_PER_MS:.1f} ms",
            )
        if limits.get(pool.model, 0) > profile.kv_capacity_tokens:
            yield warning(
                f"$.deployment.pools[{i}].profile",
                f"its KV pool of {profile.kv_capacity_tokens} tokens is smaller than the context "
                f"limit of `{pool.model}`, {limits[pool.model]}",
            )


def _exposure(settings: Settings) -> Iterator[Problem]:
    """Warn of what is harmless on this machine only."""
    server = settings.server
    if is_local(server.host):
        return
    if not settings.keys:
        yield warning("$.server.host", f"open to the network at {server.host} without any key")
    if server.trusted_replay:
        yield warning(
            "$.server.trusted_replay", "any caller on the network may set the length of answers"
        )


def _admin(settings: Settings) -> Iterator[Problem]:
    """Refuse an admin listener that anybody may use, or that nobody can."""
    admin = settings.admin
    if admin is None:
        return
    if admin.open and admin.keys:
        yield Problem(path="$.admin.open", message="with `open`, no key is ever asked for")
    elif admin.open and not is_local(admin.host):
        yield Problem(
            path="$.admin.open",
            message=f"only a loopback address may be open without a key, not {admin.host}",
        )
    elif not admin.open and not admin.keys:
        yield Problem(
            path="$.admin",
            message="give `keys` (see `headrace key new --admin`), or `open: true` on loopback",
        )
    server = settings.server
    if admin.port and (admin.host, admin.port) == (server.host, server.port):
        yield Problem(path="$.admin.port", message=f"port {admin.port} is the traffic's own")


def is_local(host: str) -> bool:
    """Return whether an address is this machine's own."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _token_counts(settings: Settings) -> Iterator[Problem]:
    """Yield tokenizers of models that are unknown, have one already, or whose engines have none."""
    spec, at = settings.token_counts, "$.token_counts.models"
    if spec is None:
        return
    models = {one.name: None for one in settings.deployment.models}
    yield from _twice(
        "tokenizer of", [(f"{at}[{i}].model", s.model) for i, s in enumerate(spec.models)]
    )
    pools = {pool.name: pool.model for pool in settings.deployment.pools}
    real = {pools.get(upstream.pool) for upstream in settings.upstreams}
    started = {one.pool for one in settings.groups}
    real |= {
        pool.model
        for pool in settings.deployment.pools
        if not pool.replicas or pool.name in started  # they come later
    }
    for i, one in enumerate(spec.models):
        yield from _unknown(f"{at}[{i}].model", "model", one.model, models)
        if isinstance(one, EngineTokenizerSpec) and one.model in models and one.model not in real:
            message = f"no upstream serves `{one.model}`, and emulated replicas count nothing"
            yield Problem(path=f"{at}[{i}].kind", message=message)


def _deferred(settings: Settings) -> Iterator[Problem]:
    """Warn of classes that are always deferred where nothing is."""
    for i, spec in enumerate(settings.deployment.classes):
        if spec.defer is Defer.ALWAYS and settings.jobs is None:
            message = (
                "there is no queue to defer to (`jobs.file`): its requests are answered at once"
            )
            yield warning(f"$.deployment.classes[{i}].defer", message)


_QUESTIONS: tuple[Callable[[Settings], Iterator[Problem]], ...] = (
    _unique,
    _references,
    _objectives,
    _supply,
    _pools,
    _parts,
    _budgets,
    _lanes,
    _proportion,
    levers,
    envelopes,
    _exposure,
    _admin,
    _token_counts,
    _deferred,
    ladders,
    scaling,
    groups,
)
