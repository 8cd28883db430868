"""Do the envelopes of a pool say anything of what runs in it?"""

from collections.abc import Iterator
from datetime import UTC, datetime

from headrace.config.problem import Problem, warning
from headrace.config.schema import Settings
from headrace.model.envelope import Origin, mixes, told
from headrace.policy.envelopes import reading


def envelopes(settings: Settings) -> Iterator[Problem]:
    """Warn of envelopes that fit nothing, and that came from the simulator where engines are real."""
    plane = settings.deployment
    real = settings.real
    for i, pool in enumerate(plane.pools):
        at = f"$.deployment.pools[{i}]"
        known = mixes(pool.envelopes)
        if pool.mix and known and pool.mix not in known:
            message = f"no envelope of mix `{pool.mix}`; there are: {', '.join(known)}"
            yield warning(f"{at}.mix", message)
        if not pool.envelopes:
            continue
        found = reading(plane, pool)
        if found.origin is Origin.DECLARED:
            yield warning(f"{at}.envelopes", "not read: `work_rate` is given, and wins")
        elif found.origin is Origin.DEFAULT:
            message = f"none is of this model and hardware: a replica counts as {found.work_rate:g}"
            yield warning(f"{at}.envelopes", message)
        elif found.origin is Origin.LOWEST:
            yield warning(
                f"{at}.envelopes", f"a replica counts as {found.work_rate:.4g}: {told(found)}"
            )
        elif pool.name in real and found.envelope and _simulated(found.envelope.fingerprint.engine):
            message = "measured in the simulator, and its engines are real"
            yield warning(f"{at}.envelopes", message)


def day(at_s: int) -> str:
    """Return the day of an instant in seconds since 1970, as people write it: an age without a clock."""
    return datetime.fromtimestamp(at_s, UTC).date().isoformat()


def _simulated(engine: str) -> bool:
    return engine.startswith("emulated")
