"""`headrace policy`: the levers of a running gateway, off its admin listener.

The key is read from the environment alone: a command line is seen by everybody on the machine.
"""

import os
import sys
from collections.abc import Iterator
from typing import Annotated, Any, TypeVar

import msgspec
from cyclopts import Parameter
from msgspec import UNSET, Struct, UnsetType

from headrace.cli.errors import FAILED, OK, fail
from headrace.cli.listener import KEY_ENV, URL, UnreadableError, call
from headrace.cli.out import show as written
from headrace.config.errors import ConfigError, Fault, Origin
from headrace.gateway.steward import Applied, Revision
from headrace.gateway.wanted import PREVIOUS
from headrace.policy.catalog import POLICY

_PATH = "/policy"
_PLANE = "deployment."
_DEPTH = 2
"""Dots of a path; more belong to the name of a class or model."""

Url = Annotated[
    str, Parameter(help=f"Address of the admin listener; its key is read from {KEY_ENV}.")
]
AsJson = Annotated[bool, Parameter(name="--json", negative=(), help="Print JSON.")]
Expect = Annotated[int | None, Parameter(help="Change nothing unless this revision is in force.")]
DryRun = Annotated[
    bool,
    Parameter(name="--dry-run", negative=(), help="Tell what would change, and change nothing."),
]
T = TypeVar("T")


class Standing(Struct, frozen=True, kw_only=True):
    """The policy in force, as the listener tells it."""

    revision: int
    frozen: bool
    policy: dict[str, Any]
    revisions: list[Revision]


def show(*, url: Url = URL, as_json: AsJson = False) -> int:
    """Show each setting of the policy in force, as `set` takes it."""
    content = _asked(url)
    if content is None:
        return FAILED
    found = _decoded(content, Standing)
    if as_json:
        _print({"revision": found.revision, "frozen": found.frozen, "policy": found.policy})
        return OK
    written(f"revision {found.revision}{', changes are frozen' if found.frozen else ''}")
    for path, value in _leaves(found.policy, ""):
        written(f"{path} = {msgspec.json.encode(value).decode()}")
    return OK


def set_(
    *settings: Annotated[
        str, Parameter(help="PATH=VALUE, such as admission.margin_ms=80; VALUE as JSON, or a word.")
    ],
    url: Url = URL,
    expect: Expect = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> int:
    """Change settings of the policy, all or none, at once for every newcomer."""
    if not settings:
        return fail("name settings as PATH=VALUE; `headrace policy show` lists them")
    return _change(_values(settings), url, expect, dry_run=dry_run, as_json=as_json)


def rollback(
    revision: Annotated[
        int | None, Parameter(help="Whose policy; the last other one if none.")
    ] = None,
    /,
    *,
    url: Url = URL,
    expect: Expect = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> int:
    """Bring the policy of an earlier revision back, as a new revision."""
    asked = {"rollback": PREVIOUS if revision is None else revision}
    return _change(asked, url, expect, dry_run=dry_run, as_json=as_json)


def history(*, url: Url = URL, as_json: AsJson = False) -> int:
    """Show the revisions that can be rolled back to, the newest last."""
    content = _asked(url)
    if content is None:
        return FAILED
    revisions = _decoded(content, Standing).revisions
    if as_json:
        _print(revisions)
        return OK
    for one in revisions:
        written(f"{one.revision}  {one.at}  {one.who or '-'}  {one.what}")
        _tell(one.changes, one.more)
    return OK


def _change(
    asked: dict[str, Any], url: str, expect: int | None, *, dry_run: bool, as_json: bool
) -> int:
    """Ask for a change and tell what came of it."""
    if expect is not None:
        asked["expect"] = expect
    content = _asked(url, {**asked, "dry_run": dry_run})
    if content is None:
        return FAILED
    found = _decoded(content, Applied)
    if as_json:
        _print(found)
        return OK
    if not found.changes:
        written(f"it is so already: revision {found.revision}")
    elif dry_run:
        written(f"not changed, revision {found.revision} stays in force; it would be:")
    else:
        written(f"revision {found.revision}")
    _tell(found.changes, found.more)
    for warning in found.warnings:
        written(f"headrace: warning: {warning}", file=sys.stderr)
    return OK


def _asked(url: str, body: Any = None) -> bytes | None:
    """Return the listener's answer; None after telling why there is none."""
    try:
        return call(url, os.environ.get(KEY_ENV), _PATH, body)
    except UnreadableError as error:
        fail(str(error))
        return None


def _decoded(content: bytes, type_: type[T]) -> T:
    try:
        return msgspec.json.decode(content, type=type_)
    except msgspec.DecodeError as error:
        raise ConfigError(
            [Fault(Origin("flag --url"), f"no policy of a gateway: {error}")]
        ) from None


def _values(settings: tuple[str, ...]) -> dict[str, Any]:
    """Return settings as the body that asks for them; raises ConfigError for what is none."""
    values: dict[str, Any] = {}
    for one in settings:
        path, equals, text = one.partition("=")
        steps = path.removeprefix(_PLANE).split(".", _DEPTH)
        if not (equals and all(steps) and one.isprintable()):
            raise ConfigError([Fault(Origin(f"setting {path}"), "give PATH=VALUE")])
        if steps[0] not in POLICY:
            why = f"no part of the policy: {', '.join(POLICY)}"
            raise ConfigError([Fault(Origin(f"setting {path}"), why)])
        place = values
        for step in steps[:-1]:
            place = place.setdefault(step, {})
            if not isinstance(place, dict):
                raise ConfigError(
                    [Fault(Origin(f"setting {path}"), f"`{step}` has a value already")]
                )
        if steps[-1] in place:
            raise ConfigError([Fault(Origin(f"setting {path}"), "told twice")])
        place[steps[-1]] = _value(text)
    return values


def _value(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _leaves(value: dict[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    """Yield every setting by its path."""
    for name, below in value.items():
        if isinstance(below, dict) and below:
            yield from _leaves(below, f"{path}{name}.")
        else:
            yield f"{path}{name}", below


def _tell(changes: dict[str, tuple[Any, Any]], more: int | UnsetType) -> None:
    for path, both in changes.items():
        old, new = (msgspec.json.encode(one).decode() for one in both)
        written(f"  {path.removeprefix(_PLANE)}: {old} -> {new}")
    if more is not UNSET:
        written(f"  and {more} more")


def _print(value: Any) -> None:
    written(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
