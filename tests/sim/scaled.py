"""Small runs of a pool that scales: starts as long as a test likes, on a trace that it makes."""

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec.structs import replace

from headrace.model.deployment import ClassSpec
from headrace.model.ids import ClassName, TenantId
from headrace.model.scaling import ScaleRecord
from headrace.model.scaling_spec import Scaling
from headrace.model.stages import Spread, StageTimes
from headrace.sim.faults import Fault
from headrace.sim.scenario import Scenario
from headrace.trace.row import TraceRow
from headrace.units import InstantNs, Tokens, seconds
from tests.sim.scenes import Ran, deployment, run, scenario

GIVEN, MADE = 8_000, 100
"""Tokens of each request, in and out."""


def starts(whole_s: float, *, success: float = 1.0) -> StageTimes:
    """Return stages that take so long together, always."""
    none, most = Spread(0.0, 0.0), Spread(whole_s - 1.0, whole_s - 1.0)
    return StageTimes(
        node_held=none, image=none, weights=most, ranks=none, compile_cache=none, warm=none,
        unattributed=none, register=Spread(1.0, 1.0), wake=Spread(2.0, 2.0), success=success,
    )  # fmt: skip


def scaled(
    settings: Scaling,
    *,
    replicas: int = 1,
    faults: Sequence[Fault] = (),
    classes: tuple[ClassSpec, ...] | None = None,
    **more: Any,
) -> Scenario:
    """Return a scenario of one pool that scales."""
    plain = deployment(replicas)
    (pool,) = plain.pools
    config = replace(plain, pools=(replace(pool, scaling=settings),))
    if classes is not None:
        config = replace(config, classes=classes)
    return scenario(config=config, faults=faults, **more)


def steady(
    spans: Iterable[tuple[float, float, float]], slo_class: str = "chat", given: int = GIVEN
) -> list[TraceRow]:
    """Return evenly spaced requests: (from, to, requests per second), seconds."""
    rows = []
    for begin, end, rate in spans:
        count = int((end - begin) * rate)
        rows += [_row(begin + nth / rate, slo_class, given) for nth in range(count)]
    return sorted(rows, key=lambda row: row.at)


def _row(at_s: float, slo_class: str, given: int) -> TraceRow:
    return TraceRow(
        at=InstantNs(seconds(at_s)),
        input_tokens=Tokens(given),
        output_tokens=Tokens(MADE),
        tenant=TenantId("a"),
        slo_class=ClassName(slo_class),
    )


def records(ran: Ran) -> list[ScaleRecord]:
    """Return what the scaler decided, tick by tick."""
    return [one for one in ran.decisions if isinstance(one, ScaleRecord)]


__all__ = ["records", "run", "scaled", "starts", "steady"]
