"""Keys managed while the gateway runs, in the calls and field names of LiteLLM's proxy.

`key_alias` is a key's name and `team_id` a tenant. Limits are a tenant's: a key that is made without
`team_id` gets a tenant of its own, by its own name, to hold them. What cannot be done is refused, never
passed over. Keys of the configuration file are shown here and changed there.
"""

import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from headrace.config.schema import KeySpec
from headrace.gateway import money
from headrace.gateway.auth import KeyIndex, key_hash, minted
from headrace.gateway.grants import GRANTS_MAX, Grant
from headrace.gateway.limits import budgets
from headrace.gateway.steward import Steward
from headrace.gateway.wanted import ChangeRefusedError
from headrace.model.deployment import TenantSpec
from headrace.model.ids import TenantId
from headrace.plane.core import Plane

_PLAIN = ("models", "tpm_limit", "rpm_limit", "max_parallel_requests")
"""Limits that a tenant has under the same name."""
_LIMITS = (*_PLAIN, *money.NAMES)
_GENERATE = ("key_alias", "team_id", *_LIMITS)
_UPDATE = ("key", *_LIMITS)
_DELETE = ("keys", "key_aliases")
_WORDS = (("name", "key_alias"), ("tenant", "team_id"))
"""Our fields by the names that callers know."""
_NAME_BYTES = 6
DELETED_MAX = 1_000
"""Keys that one call withdraws. 1,000: every one of them is told in the answer and in the audit."""

Asked = Mapping[str, Any]
T = TypeVar("T")


class Keys:
    """What may be done to keys; each change is one of the steward's."""

    def __init__(self, steward: Steward, plane: Plane, wall: Callable[[], int]) -> None:
        """Change what the steward keeps; what was spent is in the plane's books. `wall`: in seconds."""
        self._steward, self._plane, self._wall = steward, plane, wall

    def generate(self, who: str, asked: Asked) -> dict[str, Any]:
        """Make a key, which the answer alone tells."""
        _refuse_others(asked, _GENERATE)
        if not self._steward.settings.keys:
            message = "No key is asked for here; only a restart with `keys` can change that."
            raise ChangeRefusedError(409, "needs_restart", message)
        if len(self._grants) >= GRANTS_MAX:
            message = f"{GRANTS_MAX} keys were made so; more belong into the configuration."
            raise ChangeRefusedError(409, "too_many_keys", message)
        limits = {name: asked[name] for name in _LIMITS if asked.get(name) is not None}
        name, team = asked.get("key_alias"), asked.get("team_id")
        if name is None:
            name = f"key-{secrets.token_hex(_NAME_BYTES)}"
        tenant = None
        if team is None:
            tenant = _tenant({"name": name}, limits)
        else:
            _refuse_limits(limits)
        key = minted()
        tenant_name = name if team is None else team
        spec = _as({"name": name, "tenant": tenant_name, "hash": key_hash(key)}, KeySpec)
        grants = (*self._grants, Grant(key=spec, tenant=tenant))
        applied = self._steward.grant(who, f"key generate {spec.name}", grants)
        return {"key": key, **self._shown(spec), "revision": applied.revision}

    def update(self, who: str, asked: Asked) -> dict[str, Any]:
        """Change the limits of a key that has a tenant of its own; null takes one away."""
        _refuse_others(asked, _UPDATE)
        (grant,) = self._granted([asked.get("key")])
        if grant.tenant is None:
            message = (
                f"The limits of key `{grant.key.name}` are those of tenant `{grant.key.tenant}`."
            )
            raise ChangeRefusedError(409, "not_its_own", message)
        told = {name: asked[name] for name in _LIMITS if name in asked}
        if told.get("models", ()) is None:
            told["models"] = ()
        tenant = _tenant(msgspec.to_builtins(grant.tenant), told)
        changed = replace(grant, tenant=tenant)
        grants = tuple(changed if one is grant else one for one in self._grants)
        applied = self._steward.grant(who, f"key update {grant.key.name}", grants)
        shown = self._shown(grant.key)
        return {"key": grant.key.name, **shown, "revision": applied.revision}

    def delete(self, who: str, asked: Asked) -> dict[str, Any]:
        """Withdraw keys, all or none, with the tenants that were made for them."""
        _refuse_others(asked, _DELETE)
        given = [asked[name] for name in _DELETE if asked.get(name) is not None]
        told = [one for some in given for one in _as(some, list[str])]
        if not 1 <= len(told) <= DELETED_MAX:
            message = f"Name from one to {DELETED_MAX} in `keys` and `key_aliases`."
            raise ChangeRefusedError(400, "invalid_value", message)
        gone = dict.fromkeys(one.key.name for one in self._granted(told))
        grants = tuple(one for one in self._grants if one.key.name not in gone)
        what = f"key delete {', '.join(gone)}"
        applied = self._steward.grant(who, what, grants, withdraws=True)
        return {"deleted_keys": list(gone), "revision": applied.revision}

    def info(self, asked: str | None) -> dict[str, Any]:
        """Return what is known of a key, given as itself or by its name; never the key."""
        (spec,) = self._known([asked])
        spent = money.spending(budgets(self._plane, TenantId(spec.tenant)), self._wall())
        return {"key": spec.name, "info": {**self._shown(spec), **spent}}

    @property
    def _grants(self) -> tuple[Grant, ...]:
        return self._steward.grants.all

    def _known(self, asked: Iterable[object]) -> list[KeySpec]:
        """Return the keys that are asked for, each as itself or by its alias."""
        keys = self._steward.settings.keys
        by_name, by_hash = {spec.name: spec for spec in keys}, KeyIndex(keys)
        found = []
        for one in asked:
            if not isinstance(one, str) or not one:
                message = "Name the key: itself, or its alias."
                raise ChangeRefusedError(400, "invalid_value", message)
            spec = by_hash.find(one.encode("utf-8", "replace")) or by_name.get(one)
            if spec is None:
                raise ChangeRefusedError(404, "key_not_found", "There is no such key.")
            found.append(spec)
        return found

    def _granted(self, asked: Iterable[object]) -> list[Grant]:
        """Return the keys that are asked for, all of which were made here."""
        grants = {grant.key.name: grant for grant in self._grants}
        found = []
        for spec in self._known(asked):
            if spec.name not in grants:
                message = (
                    f"Key `{spec.name}` is the configuration file's: change it there, then reload."
                )
                raise ChangeRefusedError(409, "in_the_file", message)
            found.append(grants[spec.name])
        return found

    def _shown(self, spec: KeySpec) -> dict[str, Any]:
        tenants = self._steward.settings.deployment.tenants
        tenant = next(one for one in tenants if one.name == spec.tenant)
        limits = {name: getattr(tenant, name) for name in _PLAIN} | money.shown(tenant)
        return {"key_alias": spec.name, "team_id": spec.tenant, **limits}


def _refuse_others(asked: Asked, names: tuple[str, ...]) -> None:
    """Refuse every field that says something we would not do."""
    for name, value in asked.items():
        says_nothing = value is None or value is False or value in ("", [], {})
        if name not in names and not says_nothing:
            message = f"`{name[:64]}` is not supported here; these are: {', '.join(names)}."
            raise ChangeRefusedError(400, "unsupported_parameter", message)


def _refuse_limits(limits: Asked) -> None:
    """Refuse limits for a key of a team; no models named are all of the team's."""
    for name, value in limits.items():
        if name != "models" or value != []:
            message = f"`{name}` is the tenant's: leave out `team_id` for one of its own."
            raise ChangeRefusedError(400, "invalid_value", message)


def _tenant(before: Asked, told: Asked) -> TenantSpec:
    """Return a tenant with what is told of it, each of its models once."""
    plain = {name: value for name, value in told.items() if name in _PLAIN}
    tenant = _as({**before, **plain}, TenantSpec)
    try:
        counted = money.budgets(tenant, told)
    except ValueError as error:
        raise ChangeRefusedError(400, "invalid_value", str(error)) from None
    return replace(tenant, models=tuple(dict.fromkeys(tenant.models)), budgets=counted)


def _as(value: Any, type_: type[T]) -> T:
    try:
        return msgspec.convert(value, type_)
    except msgspec.ValidationError as error:
        message = str(error)
        for ours, theirs in _WORDS:
            message = message.replace(f"`$.{ours}", f"`$.{theirs}")
        raise ChangeRefusedError(400, "invalid_value", message) from None
