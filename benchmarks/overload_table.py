"""The overload figures as text: what each cell came to, and what one limit for all of them is worth."""

from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from benchmarks.cells import KINDS, Cell, Settings
from headrace.policy.admission.gates import Length

Tables = Mapping[str, Mapping[str, Sequence[Cell]]]
"""By how often refused callers ask again, then by mix: its cells by load."""
LEGEND = """\
Work: GPU-seconds a second of requests that met their bounds, mean over seeds. The best limits are known in
hindsight: for each cell the setting with the most work, by kind (requests inside, requests waiting for a first
token, prompt tokens a second); a * marks the least or the most that was tried. long/all: how often the longest
tenth of the prompts is let in, over all."""
SINGLE = """\
One setting for all cells: its work over that of the best setting of any kind in the same cell, both on the
first seed; here the cell in which that is least."""


class Worst(Struct, frozen=True):
    """The cell in which one setting falls furthest behind the best of all settings."""

    of_best: float
    cell: str


def worst_cells(table: Mapping[str, Sequence[Cell]], swept: Settings) -> dict[str, Worst]:
    """Return, for each setting, its worst cell: work over that of the best setting there."""
    return {
        f"{kind} {setting:g}": min(
            (
                Worst(cell.swept[kind, setting] / max(*cell.swept.values(), 1e-9), place(mix, cell))
                for mix, row in table.items()
                for cell in row
            ),
            key=lambda one: one.of_best,
        )
        for kind, setting in swept
    }


def place(mix: str, cell: Cell) -> str:
    """Return a cell's name."""
    return f"{mix} {cell.load:g}x"


def text(tables: Tables, swept: Settings) -> str:
    """Return all tables with what their columns mean."""
    lines = [LEGEND]
    for name, table in tables.items():
        lines += ["", f"Callers ask {name}:", *_cells(table)]
    lines += ["", SINGLE, *_single(tables, swept)]
    return "\n".join(lines)


def _cells(table: Mapping[str, Sequence[Cell]]) -> Iterator[str]:
    heads = "".join(f"{'best ' + kind:>18}" for kind in KINDS)
    yield f"{'cell':<14}{'fair':>7}{'greedy':>8}{heads}  long/all: fair, greedy"
    for mix, row in table.items():
        for cell in row:
            limits = "".join(
                f"{cell.best_work(kind):>9.3f} {_shown(cell, kind):>8}" for kind in KINDS
            )
            ours = f"{cell.work(Length.FAIR):>7.3f}{cell.work(Length.GREEDY):>8.3f}"
            long = f"{cell.longest(Length.FAIR):>14.2f}{cell.longest(Length.GREEDY):>8.2f}"
            yield f"{place(mix, cell):<14}{ours}{limits}{long}"


def _shown(cell: Cell, kind: str) -> str:
    """Return the best setting of a kind, marked where a wider sweep might have found a better one."""
    best, tried = cell.best[kind][0], [setting for name, setting in cell.swept if name == kind]
    return f"({best:g}{'*' if best in (min(tried), max(tried)) else ''})"


def _single(tables: Tables, swept: Settings) -> Iterator[str]:
    found = {name: worst_cells(table, swept) for name, table in tables.items()}
    yield f"{'setting':<16}" + "".join(f"{name:<26}" for name in found)
    for kind, setting in swept:
        name = f"{kind} {setting:g}"
        each = (f"{one[name].of_best:.2f}  {one[name].cell:<20}" for one in found.values())
        yield (f"{name:<16}" + "".join(each)).rstrip()
