"""A gateway before an emulated engine, both processes of their own, and what the gateway recorded."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Self

from msgspec import Struct

from headrace.adapters.journal.ring import segments
from headrace.model.effect import Concluded
from headrace.model.slo import Indicators, Outcome
from headrace.plane.core import Plane
from headrace.plane.journal import Checkpoint, Record, Verified, frames, verify

MODEL = "judged"
_RUN = "import sys; from headrace.cli import main; sys.exit(main(sys.argv[1:]))"
_STOP_S = 60


class Served(Struct, frozen=True, kw_only=True):
    """A gateway that serves."""

    base: str
    """Without `/v1`."""
    admin: str
    """Host and port."""
    key: str
    journal: Path

    def metrics(self) -> "Counts":
        """Return what `/metrics` says now."""
        with closing(HTTPConnection(self.admin, timeout=_STOP_S)) as wire:
            wire.request("GET", "/metrics")
            return Counts.of(wire.getresponse().read().decode())


class Counts(Struct, frozen=True, kw_only=True):
    """What the gateway's metrics count, over all tenants and classes."""

    offered: int
    ended: int
    """Those that were let in and are over."""
    succeeded: int
    output_tokens: int
    ttft_mean_ms: float
    itl_mean_ms: float

    @classmethod
    def of(cls, text: str) -> Self:
        """Read them in Prometheus' text format, in a fraction of a millisecond."""
        lines = text.splitlines()

        def total(name: str, label: str = "") -> float:
            starts = (f"headrace_{name} ", f"headrace_{name}{{")
            found = (one for one in lines if one.startswith(starts) and label in one)
            return sum(float(one.rpartition(" ")[2]) for one in found)

        def mean_ms(name: str) -> float:
            return 1_000 * total(f"{name}_sum") / max(1, total(f"{name}_count"))

        return cls(
            offered=int(total("offered_requests_total")),
            ended=int(total("ended_requests_total")),
            succeeded=int(total("ended_requests_total", f'outcome="{Outcome.SUCCESS}"')),
            output_tokens=int(total("output_tokens_total")),
            ttft_mean_ms=mean_ms("ttft_seconds"),
            itl_mean_ms=mean_ms("itl_seconds"),
        )


@contextmanager
def _process(*told: str, lines: int) -> Iterator[list[str]]:
    """Run `headrace`; yield its greeting. It ends well, or this fails."""
    with subprocess.Popen(
        [sys.executable, "-c", _RUN, *told],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout is not None
        try:
            yield [process.stdout.readline() for _ in range(lines)]
        except BaseException:
            process.kill()
            raise
        process.terminate()
        _, err = process.communicate(timeout=_STOP_S)
        assert process.returncode == 0, err


@contextmanager
def serving(
    folder: Path, profile: str, engine: Sequence[str] = (), flags: Sequence[str] = ()
) -> Iterator[Served]:
    """Serve one engine of a profile behind a gateway, with a journal in `folder`."""
    journal = folder / "journal"
    with (
        _process(
            *("engine", "--port", "0", "--model", MODEL, "--profile", profile, *engine), lines=1
        ) as ready,
        _process(
            *("serve", "--port", "0", "--upstream", _found(r"(http://\S+)/v1", ready[0])),
            *("--profile", profile, "--model", MODEL, "--journal", str(journal)),
            *("--set", "admin.port=0", "--set", "admin.open=true"),
            *flags,
            lines=4,
        ) as greeting,
    ):
        yield Served(
            base=_found(r"(http://\S+)/v1", greeting[0]),
            admin=_found(r"http://(\S+);", greeting[1]),
            key=_found(r"(sk-hr-\S+),", greeting[2]),
            journal=journal,
        )


def _found(pattern: str, line: str) -> str:
    match = re.search(pattern, line)
    assert match, line
    return match[1]


def rows(journal: Path) -> list[Concluded]:
    """Return what became of every offered request, by replay of the journal, which must hold."""
    assert isinstance(verify(segments(journal)), Verified)
    plane: Plane | None = None
    found: list[Concluded] = []
    for content in segments(journal):
        for frame in frames(content):
            if isinstance(frame, Checkpoint) and plane is None:
                plane = Plane.thaw(frame.state)
            elif isinstance(frame, Record):
                assert plane is not None
                effects = plane.handle(frame.event, now=frame.now)
                found += [effect for effect in effects if isinstance(effect, Concluded)]
    return found


def seen(found: list[Concluded]) -> list[Indicators]:
    """Return the measured values of those that succeeded."""
    return [
        row.indicators
        for row in found
        if row.outcome is Outcome.SUCCESS and row.indicators is not None
    ]
