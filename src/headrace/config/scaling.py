"""Can pools grow as they are declared to, and is what they cannot grow fast enough for covered?"""

from collections.abc import Iterator

from headrace.config.problem import Problem, unknown, warning
from headrace.config.schema import Settings
from headrace.model.decision import Gate
from headrace.model.deployment import Defer, PoolSpec
from headrace.model.scaling_spec import Cover, Scaling
from headrace.model.scaling_spec import Mode as Act
from headrace.model.stages import ready_time
from headrace.policy.admission.gates import Mode
from headrace.units import to_seconds


def scaling(settings: Settings) -> Iterator[Problem]:
    """Yield limits that leave no room, bursts that nothing bridges, and covers that are none."""
    for i, pool in enumerate(settings.deployment.pools):
        if pool.scaling is not None:
            at = f"$.deployment.pools[{i}].scaling"
            yield from _startable(at, settings, pool, pool.scaling)
            yield from _room(at, pool, pool.scaling)
            yield from _bursts(at, pool, pool.scaling)
            yield from _covers(at, settings, pool.scaling)


def most(pool: PoolSpec) -> int:
    """Return the most replicas that a process can begin with: after others, as many as those wanted."""
    return pool.replicas if pool.scaling is None else max(pool.replicas, pool.scaling.max)


def groups(settings: Settings) -> Iterator[Problem]:
    """Yield groups of processes that are told of twice, of no pool, or that nobody could talk to."""
    pools = {one.name: None for one in settings.deployment.pools}
    placed, seen = {one.pool for one in settings.upstreams}, set[str]()
    for i, spec in enumerate(settings.groups):
        at = f"$.groups[{i}].pool"
        yield from unknown(at, "pool", spec.pool, pools)
        if spec.pool in placed:
            yield Problem(path=at, message=f"`{spec.pool}` has engines at addresses (`upstreams`)")
        if "/" in spec.pool:
            yield Problem(path=at, message="files are called by it: no `/` in the pool's name")
        if spec.pool in seen:
            yield Problem(path=at, message=f"how `{spec.pool}` is started is told twice")
        seen.add(spec.pool)
        if not any("{port}" in part for part in (*spec.command, *spec.env.values())):
            message = "`{port}` is in none of its arguments: it would listen where nobody looks"
            yield Problem(path=f"$.groups[{i}].command", message=message)


def _startable(at: str, settings: Settings, pool: PoolSpec, spec: Scaling) -> Iterator[Problem]:
    """Yield what nobody can start or stop, or put to sleep."""
    if spec.mode is Act.ACT and pool.name in {one.pool for one in settings.upstreams}:
        message = (
            "nobody can start or stop engines that are told of by their addresses (`upstreams`): set "
            "`mode: advise`, or say in `groups` how they are started"
        )
        yield Problem(path=f"{at}.mode", message=message)
    if spec.standby and pool.name in {one.pool for one in settings.groups}:
        yield Problem(path=f"{at}.standby", message="processes cannot be put to sleep")


def _room(at: str, pool: PoolSpec, spec: Scaling) -> Iterator[Problem]:
    gpus = spec.group_shape(pool.profile.hardware).gpus
    ceiling = spec.ceiling(gpus)
    domains = len(spec.domains)
    if spec.domains and spec.reserve >= domains:
        message = f"nothing is left when {spec.reserve} of {domains} `domains` are lost: no number of groups helps"
        yield warning(f"{at}.reserve", message)
    least = max([spec.min, *(one.groups for one in spec.floor)])
    if ceiling < max(1, least):
        message = (
            f"{spec.max_gpus} GPUs are enough for {ceiling} of the {max(1, least)} groups of {gpus} "
            "that are to be there"
        )
        yield Problem(path=f"{at}.max_gpus", message=message)
    elif not spec.min <= pool.replicas <= ceiling:
        yield warning(
            at.removesuffix("scaling") + "replicas",
            f"{pool.replicas} are there at first, of {spec.min} to {ceiling} that it scales between",
        )


def _bursts(at: str, pool: PoolSpec, spec: Scaling) -> Iterator[Problem]:
    hardware = pool.profile.hardware
    ready, wake = ready_time(spec.stages(hardware)), ready_time(spec.waking(hardware))
    if spec.uncovered(ready.p90_ns, wake.p90_ns):
        yield Problem(
            path=f"{at}.burst_horizon_s",
            message=(
                f"bursts of {spec.burst_horizon_s:g} s are over before a group is ready "
                f"({to_seconds(ready.p90_ns):.0f} s, p90): keep `standby` groups, set a `floor`, or name in "
                "`covers` what bridges them"
            ),
        )


def _covers(at: str, settings: Settings, spec: Scaling) -> Iterator[Problem]:
    plane = settings.deployment
    ladders = [one.degrade for one in plane.classes if one.degrade is not None]
    there = {
        Cover.WARM: spec.min > 0,
        Cover.ADMISSION: plane.admission.mode_of(Gate.DEADLINE) is Mode.ENFORCE,
        Cover.FALLBACK: any(one.model is not None for one in ladders),
        Cover.DEFER: any(one.defer is not Defer.NEVER for one in plane.classes),
    }
    lacking = {
        Cover.WARM: "`min` is 0: nothing is warm",
        Cover.ADMISSION: "the deadline gate only records: nothing is refused in time",
        Cover.FALLBACK: "no class falls back to another model (`classes[].degrade.model`)",
        Cover.DEFER: "no class may be put aside (`classes[].defer`)",
    }
    for i, cover in enumerate(spec.covers):
        if not there[cover]:
            yield Problem(path=f"{at}.covers[{i}]", message=lacking[cover])
