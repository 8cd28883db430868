"""What may an operator change while requests run, and how is it undone?

Every change is checked like a configuration file, becomes one `ConfigChanged` event with a revision
of its own, and one audit line. Requests that are in end under the revision they began with. What
needs a restart is refused and named.
"""

from collections import deque
from collections.abc import Callable
from textwrap import shorten
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from headrace.config.changes import TOLD_MAX, Changes, changes, first
from headrace.config.check import problems
from headrace.config.problem import Problem, Severity
from headrace.config.schema import Settings
from headrace.gateway.audit import Audit, AuditLine, written
from headrace.gateway.driver import Driver
from headrace.gateway.grants import Grant, Grants, minus, plus
from headrace.policy.admission.gates import GateMode, Length, Mode
from headrace.policy.catalog import POLICY, PlaneConfig, canonical, digest
from headrace.ports.clock import Clock

REVISIONS = 100
"""Revisions that can be rolled back to; the oldest go first."""
_WHAT_MAX = 200
FIXED = (
    "deployment.models",
    "deployment.pools",
    "deployment.fairness",
    "server",
    "admin",
    "upstreams",
    "token_counts",
    "emulator",
    "journal",
    "decision_log",
    "jobs",
)
"""What a running process cannot change: what it opened, started, or counts in."""


class ModesChange(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What single gates are to do; null goes by the common word again."""

    contract: Mode | UnsetType | None = UNSET
    budget: Mode | UnsetType | None = UNSET
    memory: Mode | UnsetType | None = UNSET
    deadline: Mode | UnsetType | None = UNSET


class AdmissionChange(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the gates that may change at once; bounds are those of the configuration."""

    margin_ms: float | UnsetType = UNSET
    wait_margin: float | UnsetType = UNSET
    prefill_margin: float | UnsetType = UNSET
    length: Length | UnsetType = UNSET
    mode: GateMode | UnsetType = UNSET
    modes: ModesChange | UnsetType = UNSET


class WindowChange(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the dispatch window that may change at once."""

    prefill_ms: float | UnsetType = UNSET


class PolicyChange(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `POST /policy` asks for: new values, or an earlier revision's."""

    admission: AdmissionChange | UnsetType = UNSET
    window: WindowChange | UnsetType = UNSET
    rollback: int | UnsetType = UNSET
    """Take the policy of this revision again, as a new revision."""
    expect: int | UnsetType = UNSET
    """Change nothing unless this revision is in force: two operators do not undo each other."""


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


class ChangeRefusedError(Exception):
    """A change that is not made; becomes an answer, not a traceback."""

    def __init__(self, status: int, code: str, message: str) -> None:
        """Hold the answer."""
        super().__init__(message)
        self.status, self.code = status, code


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
        self.revisions: deque[Revision] = deque(maxlen=REVISIONS)
        """The newest last."""
        self._list(revision, "", "start", changes(told, settings))

    def change(self, who: str, asked: PolicyChange) -> Applied:
        """Change the policy, or roll it back."""
        if asked.expect is not UNSET and asked.expect != self._driver.revision:
            message = f"Revision {self._driver.revision} is in force, not {asked.expect}."
            raise ChangeRefusedError(409, "revision_differs", message)
        now = self.settings.deployment
        if asked.rollback is UNSET:
            return self._apply(
                who, "policy", replace(self.settings, deployment=_changed(now, asked))
            )
        if asked.admission is not UNSET or asked.window is not UNSET:
            raise ChangeRefusedError(
                400, "invalid_value", "Give `rollback` or new values, not both."
            )
        kept = self._kept.get(asked.rollback)
        if kept is None:
            message = f"Revision {asked.rollback} is not kept; see GET /policy."
            raise ChangeRefusedError(404, "revision_unknown", message)
        back = replace(now, **{name: getattr(kept, name) for name in POLICY})
        what = f"rollback to {asked.rollback}"
        return self._apply(who, what, replace(self.settings, deployment=back))

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
            self._note(who, "freeze" if frozen else "thaw", {"frozen": (not frozen, frozen)})

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
        self.ready()
        if self.observing:
            message = (
                "Nothing is enforced while observing; only a restart changes what is observed."
            )
            raise ChangeRefusedError(409, "observing", message)
        if self.frozen and not even_frozen:
            raise ChangeRefusedError(409, "frozen", "Changes are frozen; thaw with POST /freeze.")
        found = changes(self.settings, settings)
        before = set(problems(self.settings))
        told = [one for one in problems(settings) if one not in before]
        wrong = [one for one in told if one.severity is Severity.ERROR]
        if wrong:
            raise ChangeRefusedError(400, "invalid_value", " ".join(map(_line, wrong)))
        warnings = tuple(map(_line, told))
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
        self._kept.pop(self.revisions[0].revision - 1, None)
        self._note(who, what, found)
        return Applied(revision=revision, changes=row.changes, more=row.more, warnings=warnings)

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

    def _note(self, who: str, what: str, found: Changes) -> None:
        some, more = first(found)
        line = AuditLine(
            at=written(self._clock.wall()),
            who=who,
            what=what,
            old={path: old for path, (old, _) in some.items()},
            new={path: new for path, (_, new) in some.items()},
            more=more,
            revision=self._driver.revision,
        )
        self._audit.put(line)


def _changed(config: PlaneConfig, asked: PolicyChange) -> PlaneConfig:
    """Return the configuration with new values, held against the bounds of the schema."""
    return replace(
        config,
        admission=_merged(config.admission, asked.admission, "admission"),
        window=_merged(config.window, asked.window, "window"),
    )


def _merged(part: Any, asked: Struct | UnsetType, name: str) -> Any:
    if asked is UNSET:
        return part
    values = _over(msgspec.to_builtins(part), msgspec.to_builtins(asked))
    try:
        return msgspec.convert(values, type(part))
    except msgspec.ValidationError as error:
        message = str(error).replace("`$.", f"`$.{name}.")
        raise ChangeRefusedError(400, "invalid_value", message) from None


def _over(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return the old values with the new ones in their place, part by part."""
    merged = {**old, **new}
    for name, value in new.items():
        if isinstance(value, dict):
            merged[name] = _over(old[name], value)
    return merged


def _is_fixed(path: str) -> bool:
    return any(path == name or path.startswith((f"{name}.", f"{name}[")) for name in FIXED)


def _line(problem: Problem) -> str:
    return f"{problem.message} at `{problem.path}`."


Reread = Callable[[], Settings]
"""Reads the configuration anew; raises ConfigError, or OSError."""
