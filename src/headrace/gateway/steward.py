"""What may an operator change while requests run, and how is it undone?

Every change is checked like a configuration file, becomes one `ConfigChanged` event with a revision
of its own, and one audit line. Requests that are in end under the revision they began with. What
needs a restart is refused and named.
"""

from collections import Counter, deque
from collections.abc import Callable
from textwrap import shorten
from typing import Any, Protocol

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from headrace.config.changes import TOLD_MAX, Changes, changes, first
from headrace.config.check import problems
from headrace.config.problem import Problem, Severity
from headrace.config.schema import Settings
from headrace.gateway.audit import Audit, AuditLine, Outcome, written
from headrace.gateway.driver import Driver
from headrace.gateway.grants import Grant, Grants, minus, plus
from headrace.gateway.wanted import (
    PREVIOUS,
    ChangeRefusedError,
    PolicyChange,
    changed,
    same_policy,
    with_policy,
)
from headrace.model.event import ScaleFrozen
from headrace.policy.catalog import PlaneConfig, canonical, digest
from headrace.ports.clock import Clock

REVISIONS = 100
"""Revisions that can be rolled back to; the oldest go first, but for the newest of another policy."""
_WHAT_MAX = 200
FIXED = (
    "deployment.models",
    "deployment.pools",
    "deployment.fairness",
    "server",
    "admin",
    "upstreams",
    "groups",
    "token_counts",
    "emulator",
    "journal",
    "decision_log",
    "jobs",
)
"""What a running process cannot change: what it opened, started, or counts in."""


class Revision(Struct, frozen=True, kw_only=True):
    """One revision of the policy."""

    revision: int
    at: str
    who: str
    what: str
    """In at most 200 letters; the audit has all of it."""
    changes: dict[str, tuple[Any, Any]]
    more: int | UnsetType = UNSET
    """Changes beyond those that are told, if any."""


class Applied(Struct, frozen=True, kw_only=True):
    """What a change came to."""

    revision: int
    changes: dict[str, tuple[Any, Any]]
    """(old, new) by setting; empty if everything was so already."""
    more: int | UnsetType = UNSET
    """Changes beyond those that are told, if any."""
    warnings: tuple[str, ...] = ()
    """What works since the change, though hardly as meant."""
    dry_run: bool | UnsetType = UNSET
    """Nothing was changed: `revision` is the one that stays in force."""


class Follower(Protocol):
    """Who must know of a change beside the plane?"""

    def prepare(self, revision: int, config: bytes) -> None:
        """Hear of a revision before anything is decided under it."""
        ...

    def adopt(self, settings: Settings) -> None:
        """Go by new settings, now that the plane does."""
        ...


class Steward:
    """The one hand that changes a running gateway."""

    def __init__(  # noqa: PLR0913 - the neighbours it stands between
        self,
        driver: Driver,
        settings: Settings,
        clock: Clock,
        audit: Audit,
        follower: Follower,
        *,
        revision: int,
        told: Settings | None = None,
        grants: Grants | None = None,
    ) -> None:
        """Keep what the process starts with as the first revision.

        `told`: what the configuration file says, if an earlier process's policy goes on instead.
        `grants`: keys that were made while earlier processes ran; both settings have them.
        """
        self._driver, self._clock, self._audit, self._follower = driver, clock, audit, follower
        self.settings = settings
        self.grants = grants or Grants()
        """The keys that were made while it ran; they are in the settings."""
        self.frozen = False
        """Whether changes of policy and of scale are refused."""
        self.aside = False
        """Whether another process may have keys and record: then nothing may be changed here."""
        self.observing = False
        """Whether all may pass while the configuration only watches: then nothing may be changed,
        for neither of the two would be what was asked for."""
        self._kept: dict[int, PlaneConfig] = {revision: settings.deployment}
        told = told or settings
        self._source = digest(minus(told, self.grants.all).deployment)
        self.counts: Counter[tuple[str, str]] = Counter()
        """Changes that were asked for, by the first word of what they are called, and what came of them."""
        self.revisions: deque[Revision] = deque(maxlen=REVISIONS)
        """The newest last."""
        self._list(revision, "", "start", changes(told, settings))

    def change(self, who: str, asked: PolicyChange) -> Applied:
        """Change the policy, or roll it back; or tell what that would come to."""
        config, values = self.settings.deployment, asked.values()
        if asked.rollback is UNSET:
            wanted, what = changed(config, values), asked.what
        elif values:
            message = "Give `rollback` or new values, not both."
            raise ChangeRefusedError(400, "invalid_value", message)
        else:
            revision = self._earlier(asked.rollback)
            wanted, what = with_policy(config, self._kept[revision]), f"rollback to {revision}"
        settings, now = replace(self.settings, deployment=wanted), self._driver.revision
        if asked.expect not in (UNSET, now):
            message = f"Revision {now} is in force, not {asked.expect}."
            found = changes(self.settings, settings)
            raise ChangeRefusedError(409, "revision_differs", message, found)
        if not asked.dry_run:
            return self._apply(who, what, settings)
        found, warnings = self._checked(settings, even_frozen=True)
        some, more = first(found)
        return Applied(revision=now, changes=some, more=more, warnings=warnings, dry_run=True)

    def _earlier(self, asked: int | str) -> int:
        """Return the kept revision that is asked for, by number or as the newest that decides otherwise."""
        if asked in self._kept:
            return int(asked)
        if asked != PREVIOUS:
            message = f"Revision {asked} is not kept; see GET /policy."
            raise ChangeRefusedError(404, "revision_unknown", message)
        now = self.settings.deployment
        other = (n for n in reversed(self._kept) if not same_policy(self._kept[n], now))
        found = next(other, None)
        if found is None:
            message = "No revision with another policy is kept since the start."
            raise ChangeRefusedError(404, "revision_unknown", message)
        return found

    def reload(self, who: str, settings: Settings) -> Applied:
        """Go by what the configuration file says now; refused if some of it needs a restart.

        Keys made while it ran stay.
        """
        self.ready()
        source = digest(settings.deployment)
        settings = plus(settings, self.grants.all)
        found = changes(self.settings, settings)
        fixed = sorted(path for path in found if _is_fixed(path))
        if bool(settings.keys) is not bool(self.settings.keys):
            fixed.append("keys (from none to some, or from some to none)")
        if fixed:
            more = f" and {len(fixed) - TOLD_MAX} more" if len(fixed) > TOLD_MAX else ""
            message = f"Only a restart can change: {', '.join(fixed[:TOLD_MAX])}{more}."
            raise ChangeRefusedError(409, "needs_restart", message)
        return self._apply(who, "reload", settings, source=source)

    def grant(
        self, who: str, what: str, grants: tuple[Grant, ...], *, withdraws: bool = False
    ) -> Applied:
        """Go by these keys instead of those made so far; they are kept before they open anything.

        A change that only withdraws is made while changes are frozen, too.
        """

        def keep() -> None:
            try:
                self.grants.keep(grants)
            except OSError as error:
                message = f"The keys cannot be written: {error.strerror}."
                raise ChangeRefusedError(500, "internal_error", message) from None

        settings = plus(minus(self.settings, self.grants.all), grants)
        return self._apply(who, what, settings, keep=keep, even_frozen=withdraws)

    def freeze(self, who: str, *, frozen: bool) -> None:
        """Refuse, or allow again, changes of policy and of scale."""
        self.ready()
        if frozen is not self.frozen:
            self.frozen = frozen
            self._scale(frozen=frozen)
            self._note(who, "freeze" if frozen else "thaw", {"frozen": (not frozen, frozen)})

    def freeze_scale(self, who: str, *, frozen: bool) -> None:
        """Have all pools stay as they are, or scale again; what is going up or down goes on."""
        self.ready()
        if self.frozen and not frozen:
            raise ChangeRefusedError(409, "frozen", "All is frozen; thaw with POST /freeze.")
        if not self._driver.plane.settings.scaled:
            raise ChangeRefusedError(409, "nothing_scales", "No pool is configured to scale.")
        if frozen is not self._driver.plane.state.scale_frozen:
            self._scale(frozen=frozen)
            what = "scale freeze" if frozen else "scale thaw"
            self._note(who, what, {"scale_frozen": (not frozen, frozen)})

    def begin(self) -> None:
        """Freeze the scale with all else, if that was so in the process before."""
        if self.frozen:
            self._scale(frozen=True)

    def _scale(self, *, frozen: bool) -> None:
        """Tell the plane, whose own the scale is, and who keeps it through a restart."""
        plane = self._driver.plane
        if plane.settings.scaled and frozen is not plane.state.scale_frozen:
            self._driver.tell(ScaleFrozen(frozen))

    def drain(self, who: str) -> None:
        """Refuse newcomers from here on; who is in goes on. Only a restart ends it."""
        self.ready()
        if not self._driver.draining:
            self._driver.refuse_newcomers()
            self._note(who, "drain", {"draining": (False, True)})

    def _apply(
        self,
        who: str,
        what: str,
        settings: Settings,
        *,
        keep: Callable[[], None] | None = None,
        source: bytes | None = None,
        even_frozen: bool = False,
    ) -> Applied:
        """Go by other settings; `source`: of the file, if it is that which tells them.

        `keep` is called when nothing can refuse the change any more.
        """
        found, warnings = self._checked(settings, even_frozen=even_frozen)
        self._source = source or self._source
        if not found:
            return Applied(revision=self._driver.revision, changes={}, warnings=warnings)
        if keep is not None:
            keep()
        config, revision = settings.deployment, self._driver.revision + 1
        self._follower.prepare(revision, canonical(config))
        self._driver.reconfigure(config, revision, self._source)
        self.ready()
        self._follower.adopt(settings)
        self.settings = settings
        self._kept[revision] = config
        row = self._list(revision, who, what, found)
        self._forget()
        self._note(who, what, found)
        return Applied(revision=revision, changes=row.changes, more=row.more, warnings=warnings)

    def _checked(self, settings: Settings, *, even_frozen: bool) -> tuple[Changes, tuple[str, ...]]:
        """Return what other settings would change, and what is doubtful of them; refuses wrong ones."""
        self.ready()
        found = changes(self.settings, settings)
        if self.observing:
            message = (
                "Nothing is enforced while observing; only a restart changes what is observed."
            )
            raise ChangeRefusedError(409, "observing", message, found)
        if self.frozen and not even_frozen:
            message = "Changes are frozen; thaw with POST /freeze."
            raise ChangeRefusedError(409, "frozen", message, found)
        before = set(problems(self.settings))
        told = [one for one in problems(settings) if one not in before]
        wrong = [one for one in told if one.severity is Severity.ERROR]
        if wrong:
            raise ChangeRefusedError(400, "invalid_value", " ".join(map(_line, wrong)))
        warnings = tuple(map(_line, told))
        return found, warnings

    def _forget(self) -> None:
        """Keep what is shown, and the newest other policy: however many keys are made, it is a way back."""
        first, now = self.revisions[0].revision, self.settings.deployment
        others = [n for n in self._kept if not same_policy(self._kept[n], now)]
        back = others[-1] if others else first
        self._kept = {n: kept for n, kept in self._kept.items() if n >= first or n == back}

    def _list(self, revision: int, who: str, what: str, found: Changes) -> Revision:
        """Add a revision to those that are shown."""
        some, more = first(found)
        row = Revision(
            revision=revision,
            at=written(self._clock.wall()),
            who=who,
            what=shorten(what, _WHAT_MAX, placeholder=" ..."),
            changes=some,
            more=more,
        )
        self.revisions.append(row)
        return row

    def wall(self) -> int:
        """Return the time of its revisions and audit: seconds since the epoch."""
        return self._clock.wall()

    def ready(self) -> None:
        """Refuse every change if none can be made here."""
        if self.aside:
            message = "Another process serves on; ask again over a new connection."
            raise ChangeRefusedError(503, "handed_over", message)
        if self._driver.broken is not None:
            raise ChangeRefusedError(503, "internal_error", "The gateway has failed and is ending.")

    def refused(self, who: str, what: str, error: ChangeRefusedError) -> None:
        """Write down what was asked for and not made; nothing that only the asker's words would tell."""
        self._note(who, what, error.found, error.code)

    def _note(self, who: str, what: str, found: Changes, why: str | None = None) -> None:
        some, more = first(found)
        outcome = Outcome.MADE if why is None else Outcome.REFUSED
        self.counts[what.partition(" ")[0], outcome] += 1
        line = AuditLine(
            at=written(self._clock.wall()),
            who=who,
            what=what,
            outcome=outcome,
            why=UNSET if why is None else why,
            old={path: old for path, (old, _) in some.items()},
            new={path: new for path, (_, new) in some.items()},
            more=more,
            revision=self._driver.revision,
        )
        self._audit.put(line)


def _is_fixed(path: str) -> bool:
    return any(path == name or path.startswith((f"{name}.", f"{name}[")) for name in FIXED)


def _line(problem: Problem) -> str:
    return f"{problem.message} at `{problem.path}`."


Reread = Callable[[], Settings]
"""Reads the configuration anew; raises ConfigError, or OSError."""
