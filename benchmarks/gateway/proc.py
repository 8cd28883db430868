"""What has a process and all it started used? Read from /proc, so Linux only."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

TICKS = os.sysconf("SC_CLK_TCK")
"""Ticks to a second of CPU time; 100 nearly everywhere, so measure a second or more."""


class Stat(Struct, frozen=True):
    """What we read of one process."""

    parent: int
    ticks: int
    """User and system time of all its threads."""


def parse_stat(text: str) -> Stat:
    """Return the figures in a /proc/PID/stat.

    The name stands in parentheses and may hold spaces and parentheses itself.
    """
    fields = text[text.rindex(")") + 1 :].split()
    return Stat(parent=int(fields[1]), ticks=int(fields[11]) + int(fields[12]))


def parse_pss(text: str) -> int:
    """Return the bytes of memory in a /proc/PID/smaps_rollup, what is shared divided by sharers."""
    for line in text.splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise ValueError("no Pss in smaps_rollup")


def family(table: Mapping[int, Stat], root: int) -> list[int]:
    """Return a process and all its descendants, as far as they are in the table."""
    found = [root] if root in table else []
    for one in found:  # grows as it is read
        found += [pid for pid, stat in table.items() if stat.parent == one]
    return found


def cpu_seconds(root: int) -> float:
    """Return the CPU time of a process and its descendants; those that ended are not counted."""
    table = _table()
    return sum(table[pid].ticks for pid in family(table, root)) / TICKS


def parse_waited(text: str) -> int:
    """Return the ns in a /proc/PID/schedstat that a thread was ready to run and did not."""
    return int(text.split()[1])


def waited_seconds(root: int) -> float:
    """Return how long the threads of a process and its descendants waited for a core."""
    waited = 0
    for pid in family(_table(), root):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):
                waited += parse_waited((task / "schedstat").read_text(encoding="ascii"))
    return waited / 1e9


def memory_bytes(root: int) -> int:
    """Return the memory of a process and its descendants."""
    return sum(
        parse_pss(Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii"))
        for pid in family(_table(), root)
    )


def _table() -> dict[int, Stat]:
    table = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208 - twice a second while the load runs
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
                    table[int(entry)] = parse_stat(file.read())
            except (FileNotFoundError, ProcessLookupError):
                continue  # ended meanwhile
    return table
