"""Provides groups as processes: places them, follows them until they are ready, starts them again.

One task a group, from when it is asked for until nothing of it is left.
"""

import asyncio
import logging
import socket
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from headrace.adapters.actuators.process.look import climb
from headrace.adapters.actuators.process.ranks import LOOK_S, Ranks
from headrace.adapters.actuators.process.records import Records
from headrace.model.engine import EngineKind
from headrace.model.group import Place
from headrace.model.ids import PoolName, ReplicaName
from headrace.ports.actuator import Group, GroupEvent, Listener, Stage
from headrace.ports.clock import Clock
from headrace.units import MIB, InstantNs, elapsed, seconds

KEPT = 1_000
"""Stage events that are kept to be read, of all groups together."""
HOST = "127.0.0.1"
_BACKOFF_S = 0.5, 30.0
"""Pause after the first life that failed, and the longest one; each is twice the one before."""
_HERE = (Place(node=socket.gethostname()),)
"""All of them are on this machine, and are lost with it."""
_log = logging.getLogger(__name__)

_Seconds = Annotated[float, Meta(gt=0, le=86_400)]


class Recipe(Struct, frozen=True, kw_only=True):
    """How a group of a pool is made."""

    command: Annotated[tuple[str, ...], Meta(min_length=1)]
    """The program and its arguments; in each, `{port}` is the group's port, `{rank}` a number from 0."""
    model: str
    """What the engine calls its model, as it is asked for a token."""
    kind: EngineKind | None = None
    """Which software it is; None: whoever talks to it finds out."""
    env: Mapping[str, str] = {}
    """Added to what is passed on of our own environment (`ranks.PASSED`)."""
    ranks: Annotated[int, Meta(ge=1, le=1_024)] = 1
    """Processes of a group. The first of them listens."""
    marks: Mapping[str, Stage] = {}
    """What the log shows once a stage is reached, for stages that no look from outside tells."""
    start_s: _Seconds = 120.0
    """Until it must be ready; one that is not by then gives back what it holds. 120: weights from a
    cold disk, and a first token."""
    stop_s: _Seconds = 10.0
    """From being asked to end until it is made to."""
    restarts: Annotated[int, Meta(ge=0, le=1_000)] = 5
    """How often it is started again within `window_s`; one that is lost more often is given up."""
    window_s: _Seconds = 600.0
    log_bytes: Annotated[int, Meta(ge=131_072)] = 4 * MIB
    """What is kept of the output of each rank."""


class _Held:
    """One group under way."""

    def __init__(self, name: ReplicaName, pool: PoolName, recipe: Recipe) -> None:
        self.name, self.pool, self.recipe = name, pool, recipe
        self.life, self.port = 1, 0
        self.stage = Stage.ASKED
        self.ranks: Ranks | None = None
        self.seen: set[Stage] = set()
        self.losses: deque[InstantNs] = deque(maxlen=recipe.restarts + 1)
        self.stop = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    async def stopped_within(self, wait_s: float) -> bool:
        """Wait to be told to stop; return whether that came."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self.stop.wait()
        return self.stop.is_set()


class ProcessActuator:
    """Made, and used, within the loop that it runs in, by the thread that lives as long as we do."""

    def __init__(self, clock: Clock, folder: Path, recipes: Mapping[PoolName, Recipe]) -> None:
        """Provide groups of these pools; first end what an earlier process left in `folder`.

        Raises OSError if records and logs cannot be written there.
        """
        self._clock, self._recipes = clock, recipes
        self._records = Records(folder)
        self.swept = self._records.sweep()
        """Processes that were left behind, and are no more."""
        if self.swept:
            _log.warning("ended %d processes of a gateway that is gone", len(self.swept))
        self._held: dict[ReplicaName, _Held] = {}
        self._ports: set[int] = set()
        self._falls: Counter[PoolName] = Counter()
        """Lives in a row, of whatever group, none of which became ready."""
        self._listener: Listener = lambda _: None
        self.record: deque[GroupEvent] = deque(maxlen=KEPT)
        """What groups went through, the newest last."""

    def connect(self, listener: Listener) -> None:
        """Say who listens."""
        self._listener = listener

    def start(self, name: ReplicaName, pool: PoolName, *, standby: bool = False) -> None:
        """Start a group of a pool that has a recipe."""
        assert name not in self._held, f"{name} is there"
        assert not standby, "a process has no sleep; the configuration is checked for that"
        held = self._held[name] = _Held(name, pool, self._recipes[pool])
        self._tell(held, Stage.ASKED)
        held.task = asyncio.get_running_loop().create_task(self._keep(held))

    def wake(self, name: ReplicaName) -> None:
        """Do nothing: none sleeps."""

    def stop(self, name: ReplicaName) -> None:
        """End a group's processes: asked first, then made to."""
        held = self._held.get(name)
        if held is not None and not held.stop.is_set():
            held.stop.set()
            self._tell(held, Stage.STOPPING)

    def groups(self) -> tuple[Group, ...]:
        """Return what is there."""
        return tuple(
            Group(
                name=held.name,
                pool=held.pool,
                stage=held.stage,
                url=f"http://{HOST}:{held.port}",
                kind=held.recipe.kind,
                model=held.recipe.model,
                ranks=held.recipe.ranks,
                running=0 if held.ranks is None else held.ranks.running,
                places=_HERE,
            )
            for held in self._held.values()
        )

    def log_path(self, name: ReplicaName) -> Path:
        """Return where the output of a group's first rank goes."""
        return self._records.log_path(name)

    async def close(self) -> None:
        """End every group; return once nothing is left of any."""
        for name in tuple(self._held):
            self.stop(name)
        tasks = [held.task for held in self._held.values() if held.task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)

    def kill(self) -> None:
        """Kill every process at once, for who has no time left."""
        for held in self._held.values():
            if held.ranks is not None:
                held.ranks.kill()

    # The life of a group ----------------------------------------------------------------------

    async def _keep(self, held: _Held) -> None:
        """Keep a group there until it is stopped, refused or given up."""
        try:
            last = await self._lives(held)
        except OSError as error:
            last = Stage.REFUSED, str(error)
        except Exception as error:  # noqa: BLE001 - our bug: this group is over, others go on
            _log.error("group %s is given up", held.name, exc_info=error)
            last = Stage.GIVEN_UP, "a bug of the gateway"
        if last[0] is Stage.REFUSED:
            self._falls[held.pool] += 1
        del self._held[held.name]
        self._records.over(held.name, held.recipe.ranks)
        self._tell(held, *last)

    async def _lives(self, held: _Held) -> tuple[Stage, str]:
        """Live one life after the other; return how the last one ended."""
        while not await held.stopped_within(self._pause_s(held)):
            why = await self._live(held)
            if held.stop.is_set():
                break
            self._falls[held.pool] += Stage.READY not in held.seen
            self._tell(held, Stage.LOST, why)
            held.losses.append(self._clock.now())
            if self._lost_too_often(held):
                times = f"{len(held.losses)} times in {held.recipe.window_s:g} s"
                return Stage.GIVEN_UP, f"lost {times}, last: {why}"
            held.life += 1
        return Stage.STOPPED, ""

    def _pause_s(self, held: _Held) -> float:
        """Return how long to wait before a life: for its own losses, and for what never starts in its pool.

        Whoever asks for another group as one is refused or given up must not be faster than that.
        """
        (first, most), times = _BACKOFF_S, max(len(held.losses), self._falls[held.pool])
        return min(most, first * 2 ** min(times - 1, 16)) if times else 0.0

    def _lost_too_often(self, held: _Held) -> bool:
        full = len(held.losses) > held.recipe.restarts
        return full and elapsed(held.losses[0], self._clock.now()) <= seconds(held.recipe.window_s)

    async def _live(self, held: _Held) -> str:
        """Live one life of a group; return why it ended, if nobody asked for that."""
        recipe, held.seen = held.recipe, set()
        held.port = self._free_port()
        ranks = held.ranks = Ranks(self._clock, self._records, held.name, recipe.log_bytes)
        climbing: asyncio.Task[None] | None = None
        try:
            for nth in range(recipe.ranks):
                self._place(held, ranks, nth)
            self._reached(held, Stage.PLACED)
            url = f"http://{HOST}:{held.port}"
            climbing = asyncio.get_running_loop().create_task(
                climb(url, recipe.model, self._clock, lambda stage: self._reached(held, stage))
            )
            return await self._watch(held, ranks, climbing)
        finally:
            if climbing is not None:
                climbing.cancel()
            await ranks.end(recipe.stop_s)
            held.ranks = None
            self._ports.discard(held.port)

    def _place(self, held: _Held, ranks: Ranks, nth: int) -> None:
        words = {"port": str(held.port), "rank": str(nth)}
        marks = {mark.encode(): stage for mark, stage in held.recipe.marks.items()}
        ranks.start(
            [_filled(part, words) for part in held.recipe.command],
            {name: _filled(value, words) for name, value in held.recipe.env.items()},
            tuple(marks),
            lambda mark: self._reached(held, marks[mark]),
        )

    async def _watch(self, held: _Held, ranks: Ranks, climbing: "asyncio.Task[None]") -> str:
        """Return why a life is over, once it is."""
        begun, limit = self._clock.now(), seconds(held.recipe.start_s)
        while not await held.stopped_within(LOOK_S):
            if why := ranks.fallen():
                return why
            if climbing.done():
                climbing.result()  # raises what it failed with
            if Stage.READY not in held.seen and elapsed(begun, self._clock.now()) > limit:
                return f"not ready after {held.recipe.start_s:g} s, but {held.stage}"
        return ""

    def _reached(self, held: _Held, stage: Stage) -> None:
        """Tell of a stage, once in a life."""
        whole = held.ranks is not None and held.ranks.running == held.recipe.ranks
        if stage not in held.seen and whole and not held.stop.is_set():
            held.seen.add(stage)
            if stage is Stage.READY:
                del self._falls[held.pool]
            self._tell(held, stage)

    def _tell(self, held: _Held, stage: Stage, why: str = "") -> None:
        held.stage = stage
        event = GroupEvent(
            group=held.name, life=held.life, stage=stage, at=self._clock.now(), why=why
        )
        self.record.append(event)
        self._listener(event)

    def _free_port(self) -> int:
        """Return a port that nobody listens on; whoever takes it first all the same ends that life."""
        while True:
            with socket.socket() as sock:
                sock.bind((HOST, 0))
                port: int = sock.getsockname()[1]
            if port not in self._ports:
                self._ports.add(port)
                return port


def _filled(text: str, words: Mapping[str, str]) -> str:
    """Put words in for their names; other braces stay, as JSON on a command line has them."""
    for name, word in words.items():
        text = text.replace(f"{{{name}}}", word)
    return text
