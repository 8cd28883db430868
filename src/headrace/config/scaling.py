"""Can pools grow as they are declared to, and is what they cannot grow fast enough for covered?"""

from collections.abc import Iterator

from headrace.config.problem import Problem, warning
from headrace.config.schema import Settings
from headrace.model.decision import Gate
from headrace.model.deployment import Defer, PoolSpec
from headrace.model.scaling_spec import Cover, Scaling
from headrace.model.stages import ready_time
from headrace.policy.admission.gates import Mode
from headrace.units import to_seconds


def scaling(settings: Settings) -> Iterator[Problem]:
    """Yield limits that leave no room, bursts that nothing bridges, and covers that are none."""
    for i, pool in enumerate(settings.deployment.pools):
        if pool.scaling is not None:
            at = f"$.deployment.pools[{i}].scaling"
            yield from _room(at, pool, pool.scaling)
            yield from _bursts(at, pool, pool.scaling)
            yield from _covers(at, settings, pool.scaling)


def _room(at: str, pool: PoolSpec, spec: Scaling) -> Iterator[Problem]:
    gpus = spec.group_shape(pool.profile.hardware).gpus
    ceiling = spec.ceiling(gpus)
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
