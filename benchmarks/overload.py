"""Does goodput survive offered load far above capacity, whatever the mix of lengths (ADM-7)?

Five mixes on one emulated A100 at one to ten times what it can do, under one configuration of ours and
under limits that were tuned for each cell with hindsight: on requests inside, on requests that wait, on
prompt tokens a second. Goodput is in work: GPU-seconds of requests that met their bounds of 2 s to the
first token and 60 ms for each one after it. Once more with callers that repeat a refused request twice,
and with a tenant that keeps to its share beside a hog. `mixes`, `doors`, `cells` and `degrade` hold the parts.

HEADRACE_DATA names the folder of public traces; without it the engine is not held against published rows,
and lengths come from their tables.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from msgspec.structs import replace

from benchmarks import degrade, tenants
from benchmarks.cells import (
    BATCH,
    HASTY,
    KINDS,
    SOON,
    Cell,
    Settings,
    measure,
    settings,
    under_ours,
)
from benchmarks.doors import Forecast, open_door, stand
from benchmarks.harness import CLAIM_SEEDS, Claim, Result, at_least, at_most, interval95
from benchmarks.mixes import ENGINE, LOADS, Came, Load, capacity, mixes
from benchmarks.overload_table import text, worst_cells
from benchmarks.scenes import attainment_over_offered
from benchmarks.tenants import A, B, C
from headrace.policy.admission.gates import Length
from headrace.sim.faults import Repeaters
from headrace.trace.generate import generate
from headrace.trace.mix import Mix, Poisson, TenantSource
from headrace.trace.row import TraceRow
from headrace.units import NS_PER_S

Part = tuple[list[Claim], dict[str, Any]]
"""What one part claims, and what explains it."""
TUNING_SEEDS = (0, 1, 2, 3, 4)
TWICE = Repeaters(times=2)
SHORT_WARM_S = 60.0
FEW_LOADS = (2.0, 10.0)
"""Of the quick form, and of callers that ask again: their loads are multiples of what they first ask for."""


def run(quick: bool, seeds: Sequence[int] = CLAIM_SEEDS) -> Result:
    """Measure all; quick shows the direction only, at two loads, on a few settings and short spans."""
    seeds = seeds[:1] if quick else seeds
    known = {name: shorter(load) if quick else load for name, load in mixes().items()}
    rates = {
        name: capacity(load, TUNING_SEEDS[:1] if quick else TUNING_SEEDS)
        for name, load in known.items()
    }
    swept = settings(4 if quick else 1)
    detail: dict[str, Any] = {"capacity_rps": rates, "bounds": "first token 2 s, then 60 ms each"}
    claims, detail["published"] = published(quick)
    tables: dict[str, dict[str, list[Cell]]] = {}
    for name, repeaters in (("once", None), ("repeated twice", TWICE)):
        some = known if repeaters is None or not quick else {"conv": known["conv"]}
        loads = LOADS if repeaters is None and not quick else FEW_LOADS
        tables[name] = {
            mix: [measure(load, times, rates[mix], seeds, swept, repeaters) for times in loads]
            for mix, load in some.items()
        }
        found, detail[name] = held(tables[name], swept, name, quick=quick)
        claims += found
    found, detail["tenants"] = beside_hog(rates["conv"], seeds)
    claims += found
    some = {degrade.CLAIMED: known[degrade.CLAIMED]} if quick else known
    found, detail["degrade"] = degrade.measured(some, rates, seeds)
    return Result(
        name="overload",
        claims=claims + found,
        seeds=list(seeds),
        detail=detail,
        table=text(tables, swept),
    )


def shorter(load: Load) -> Load:
    """Return a mix that is offered for a part of the time; a warm-up of minutes is needed whole."""
    warm_s = load.warm_s if load.warm_s > SHORT_WARM_S else load.warm_s / 2
    return replace(load, warm_s=warm_s, span_s=load.span_s / 3)


# The published comparison --------------------------------------------------------------------------

ROWS = {
    8.0: (7.3, 8.1, 8.1),
    9.0: (1.4, 8.5, 8.8),
    10.0: (0.3, 8.7, 9.3),
    12.0: (0.2, 9.0, 10.2),
    16.0: (0.2, 8.8, 11.7),
}
"""Requests/s that met their bounds of so many offered: with no door, with a forecast from a report a second
old, and with the same plus what was let in since."""
REQUESTS = 2_500


def published(quick: bool) -> Part:
    """Hold the engine and its doors against the rows of the comparison they are from.

    Those are of one seed each, and where a queue only just grows without end, seeds differ by far: a row
    counts as off by what it lies outside of all that our seeds gave.
    """
    if tenants.data_dir() is None:
        return [], {"skipped": "HEADRACE_DATA is unset"}
    worst = 0.0
    table: dict[str, Any] = {}
    for rate, row in list(ROWS.items())[:: 4 if quick else 1]:
        traces = [published_trace(rate, seed) for seed in TUNING_SEEDS[: 3 if quick else 5]]
        found = [[met_rps(nth, rows) for rows in traces] for nth in range(3)]
        table[f"{rate:g}"] = {"row": row, "found": [interval95(each)._asdict() for each in found]}
        for each, wanted in zip(found, row, strict=True):
            off = max(0.0, min(each) - wanted, wanted - max(each))
            worst = max(worst, off / max(0.1 * wanted, 0.05 * rate))
    claim = at_most("published rows off by, of 10 % or .05 of the offered", worst, 1.0)
    return [claim], table


def met_rps(nth: int, rows: Sequence[TraceRow]) -> float:
    """Return the requests a second that meet their bounds behind the nth door of the comparison."""
    door = open_door() if nth == 0 else Forecast(ENGINE, local=nth == 2)
    return sum(stand(ENGINE, rows, door).met) * NS_PER_S / rows[-1].at


def published_trace(rate: float, seed: int) -> list[TraceRow]:
    """Return the conversations of the comparison."""
    source = TenantSource(tenant=A, arrivals=Poisson(rate), lengths=tenants.conv())
    return generate(Mix(sources=(source,), rows=REQUESTS), seed)


# Five mixes ----------------------------------------------------------------------------------------


def held(
    table: dict[str, list[Cell]], swept: Settings, name: str, *, quick: bool
) -> tuple[list[Claim], dict[str, Any]]:
    """Hold ours against the best limits of each cell, and against itself at lower loads."""
    cells = [cell for row in table.values() for cell in row]
    fair, greedy = Length.FAIR, Length.GREEDY
    own = [
        row[-1].work(length) / max(cell.work(length) for cell in row)
        for row in table.values()
        for length in Length
    ]
    limits = [cell.work(fair) / cell.best_work("inside", "waiting") for cell in cells]
    every = [cell.work(greedy) / cell.best_work(*KINDS) for cell in cells]
    longest = [cell.longest(fair) for cell in cells]
    wanted = (0.8, 0.75, 0.75, 0.3) if quick else (0.95, 0.85, 0.85, 0.4)
    claims = [
        at_least(f"{name}: work at 10x over own best, worst mix", min(own), wanted[0]),
        at_least(f"{name}: fair over the best cap of any cell, worst", min(limits), wanted[1]),
        at_least(f"{name}: greedy over the best limit of any, worst", min(every), wanted[2]),
        at_least(
            f"{name}: fair, admission of the longest tenth over all's", min(longest), wanted[3]
        ),
    ]
    single = worst_cells(table, swept)
    detail = {
        "cells": {mix: [shown(cell) for cell in row] for mix, row in table.items()},
        "worst_cell_of_each_setting": single,
        "worst_cell_of_best_setting": {
            kind: max(one.of_best for name, one in single.items() if name.startswith(kind))
            for kind in KINDS
        },
    }
    return claims, detail


def shown(cell: Cell) -> dict[str, Any]:
    """Return a cell with its denominators."""
    some = cell.ours[Length.FAIR]
    return {
        "load": cell.load,
        "offered": {
            "work": fmean(one.offered_work() for one in some),
            "requests": fmean(len(one.rows) / one.span_s for one in some),
        },
        **{f"ours_{length}": figures(each) for length, each in cell.ours.items()},
        **{kind: {"setting": best, **figures(each)} for kind, (best, each) in cell.best.items()},
    }


def figures(each: Sequence[Came]) -> dict[str, Any]:
    """Return what came of a cell, over seeds."""
    return {
        "work": interval95([one.work() for one in each])._asdict(),
        "requests": fmean(one.requests() for one in each),
        "attainment": fmean(one.attainment() for one in each),
        "admitted": fmean(one.let_in() for one in each),
        "admitted_by_tenth": [
            round(fmean(tenths), 3) for tenths in zip(*(one.deciles() for one in each), strict=True)
        ],
    }


# Tenants -------------------------------------------------------------------------------------------


def beside_hog(rate: float, seeds: Sequence[int]) -> Part:
    """Offer four times what the engine can do, nearly all of it by one tenant."""
    shares: dict[str, list[float]] = {A: [], B: [], C: []}
    for seed in seeds:
        rates = {A: (SOON, 1.5), B: (HASTY, 4 * rate - 3.0), C: (BATCH, 1.5)}
        sources = tuple(
            TenantSource(
                tenant=tenant, slo_class=name, arrivals=Poisson(each), lengths=tenants.conv()
            )
            for tenant, (name, each) in rates.items()
        )
        rows = generate(Mix(sources=sources, duration_s=tenants.HOG_S), seed)
        found = under_ours(rows, seed, Length.FAIR)
        for tenant, mine in shares.items():
            mine.append(attainment_over_offered(found, tenant))
    claim = at_least("beside a hog at 4x: attainment of A over offered", fmean(shares[A]), 0.95)
    return [claim], {tenant: interval95(mine)._asdict() for tenant, mine in shares.items()}
