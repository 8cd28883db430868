"""Do ladders of lesser forms lead anywhere, and did anybody agree to them?"""

from collections.abc import Iterable, Iterator

from headrace.config.problem import Problem, warning
from headrace.config.schema import Settings
from headrace.model.deployment import ClassSpec, TenantSpec
from headrace.model.ladder import LEVEL_MAX, LadderSpec
from headrace.policy.catalog import PlaneConfig


def ladders(settings: Settings) -> Iterator[Problem]:
    """Yield smaller models that are none or serve nobody, and consent that nothing comes of."""
    plane = settings.deployment
    for i, spec in enumerate(plane.classes):
        if spec.degrade is not None:
            yield from _ladder(settings, spec, f"$.deployment.classes[{i}].degrade")
    for i, tenant in enumerate(plane.tenants):
        mine = [spec for spec in plane.classes if tenant.may_use(spec) and spec.degrade is not None]
        if tenant.degrade and not mine:
            message = (
                "none of its classes has a ladder (`classes[].degrade`): it is served as asked"
            )
            yield warning(f"$.deployment.tenants[{i}].degrade", message)


def _ladder(settings: Settings, spec: ClassSpec, at: str) -> Iterator[Problem]:
    assert spec.degrade is not None, "it has one"
    plane = settings.deployment
    agreed = [one for one in plane.tenants if one.degrade and one.may_use(spec)]
    if not agreed:
        message = "no tenant agreed to less (`tenants[].degrade`): its requests are served as asked"
        yield warning(at, message)
    elif spec.degrade.defer and (lacking := _no_later(settings, spec.degrade, agreed)) is not None:
        yield warning(f"{at}.defer", f"{lacking}: what no step can save is refused")
    name = spec.degrade.model
    if name is None:
        return
    if name not in {model.name for model in plane.models}:
        yield Problem(path=f"{at}.model", message=f"unknown model `{name}`")
    elif not _is_served(plane, name, spec):
        yield Problem(path=f"{at}.model", message=f"no pool of `{name}` serves `{spec.name}`")
    elif agreed and not any(_may_get(plane, one, name) for one in agreed):
        message = f"no tenant that agreed to level 3 may use `{name}`"
        yield warning(f"{at}.model", message)


def _no_later(settings: Settings, ladder: LadderSpec, agreed: Iterable[TenantSpec]) -> str | None:
    """Return why nobody's request is ever put off at the end of a ladder; None: some may be."""
    if settings.jobs is None:
        return "there is no queue to defer to (`jobs.file`)"
    if all(one.degrade < ladder.level for one in agreed):
        return "no tenant agreed to all of the ladder"
    return None


def _is_served(plane: PlaneConfig, model: str, spec: ClassSpec) -> bool:
    mine = (pool for pool in plane.pools if pool.model == model)
    return any(not pool.classes or spec.name in pool.classes for pool in mine)


def _may_get(plane: PlaneConfig, tenant: TenantSpec, model: str) -> bool:
    spec = next(one for one in plane.models if one.name == model)
    return tenant.degrade == LEVEL_MAX and tenant.may_ask(spec, model)
