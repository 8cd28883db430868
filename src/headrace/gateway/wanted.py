"""What does an operator ask of the policy, and what would it come to?

New values for parts of it, or an earlier revision's. They go over the present ones setting by setting and
are held against the types of the configuration; what they mean together is checked where they are made.
"""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import fields, replace

from headrace.config.changes import Changes
from headrace.policy.catalog import POLICY, PlaneConfig

PREVIOUS = "previous"
Values = dict[str, Any]
_Policy = msgspec.defstruct(
    "_Policy",
    [(field.name, field.type) for field in fields(PlaneConfig) if field.name in POLICY],
    frozen=True,
    kw_only=True,
)


class PolicyChange(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `POST /policy` asks for: new values, or an earlier revision's."""

    admission: Values | UnsetType = UNSET
    ordering: Values | UnsetType = UNSET
    """With another `kind`, its other settings are that kind's defaults."""
    routing: Values | UnsetType = UNSET
    prediction: Values | UnsetType = UNSET
    output_budget: Values | UnsetType = UNSET
    window: Values | UnsetType = UNSET
    rollback: int | Literal["previous"] | UnsetType = UNSET
    """Take the policy of this revision again, as a new revision; `previous`: of the newest other one."""
    expect: int | UnsetType = UNSET
    """Change nothing unless this revision is in force: two operators do not undo each other."""
    dry_run: bool = False
    """Tell what it would come to, and change nothing."""

    def values(self) -> Values:
        """Return the new values by part."""
        return {name: told for name in POLICY if (told := getattr(self, name)) is not UNSET}

    @property
    def what(self) -> str:
        """What it is called in the audit."""
        return "policy" if self.rollback is UNSET else f"rollback to {self.rollback}"


class ChangeRefusedError(Exception):
    """A change that is not made; becomes an answer, not a traceback."""

    def __init__(self, status: int, code: str, message: str, found: Changes | None = None) -> None:
        """Hold the answer; `found`: what it would have changed, if it was a change that makes sense."""
        super().__init__(message)
        self.status, self.code, self.found = status, code, found or {}


def changed(config: PlaneConfig, values: Values) -> PlaneConfig:
    """Return the configuration with new values; refuses those that no configuration could have."""
    old = {name: msgspec.to_builtins(getattr(config, name)) for name in POLICY}
    try:
        new = msgspec.convert(_over(old, values), _Policy)
    except (ValueError, ArithmeticError) as error:
        raise ChangeRefusedError(400, "invalid_value", str(error)) from None
    return with_policy(config, new)


def with_policy(config: PlaneConfig, source: Any) -> PlaneConfig:
    """Return the configuration with the policy of another one."""
    return replace(config, **{name: getattr(source, name) for name in POLICY})


def same_policy(one: PlaneConfig, other: PlaneConfig) -> bool:
    """Return whether two configurations decide alike, whomever they decide for."""
    return all(getattr(one, name) == getattr(other, name) for name in POLICY)


def _over(old: Values, new: Values) -> Values:
    """Return the old values with the new ones in their place, part by part."""
    merged = {**old, **new}
    for name, value in new.items():
        before = old.get(name)
        if isinstance(value, dict) and isinstance(before, dict):
            other = value.get("kind", before.get("kind")) != before.get("kind")
            merged[name] = value if other else _over(before, value)
    return merged
