"""Where in the tree of shares does a queue stand? Lane, class, organisation, tenant, user (FAIR-4).

Not every level is there on every path: a class without a lane stands beside the lanes, a tenant without
an organisation beside the organisations of its class.
"""

from enum import IntEnum

from msgspec import Struct

from headrace.model.ids import ClassName
from headrace.units import MICRO

ROOT = ""
SEPARATOR = "\x1f"
"""Between the names in a key: no name has it."""
UNTOLD = ""
"""The user that all requests are for that tell none, where a tenant's users have parts of its own."""


class Level(IntEnum):
    """What a node of the tree stands for, from the root down."""

    LANE = 0
    """Traffic of its own kind, as an operator's or a safety check's: apart from everybody's."""
    CLASS = 1
    ORGANISATION = 2
    TENANT = 3
    USER = 4


class Step(Struct, frozen=True, gc=False):
    """One node on the way from the root to a queue."""

    level: Level
    name: str
    key: str
    """What it is known by: its name behind its parent's key."""
    weight: int = 1
    minimum: int = 0
    """Share of its parent's service that it gets first, in millionths; 0: no such right."""
    maximum: int = MICRO
    """Share of it beyond which others go first, in millionths."""


Path = tuple[Step, ...]
"""The way to a queue: at least one step."""


class Link(Struct, frozen=True, gc=False):
    """What a path's step is made of, before it is known under whom it stands."""

    level: Level
    name: str
    weight: int = 1
    minimum: int = 0
    maximum: int = MICRO


class Band(IntEnum):
    """By which rule a node went before its siblings."""

    MINIMUM = 0
    """It was under its minimum."""
    FAIR = 1
    """Its counter was the least."""
    CAPPED = 2
    """It was over its maximum, and nobody within theirs had urgent work."""


class Term(Struct, frozen=True, gc=False):
    """Why a node went before its siblings: one level of a turn."""

    level: Level
    name: str
    counter: int
    least: int
    """Least counter of the siblings that compete; its own, if it is the least or alone."""
    weight: int
    band: Band
    ahead: int
    """How far its turn stands ahead of its counter by boost, in service / weight."""


def path(*links: Link) -> Path:
    """Return the way along these nodes, from the root down."""
    way: Path = ()
    for link in links:
        way = step_down(way, link)
    return way


def step_down(way: Path, link: Link) -> Path:
    """Return a way with one more node at its end."""
    # The level tells apart what may share a name: a tenant and an organisation, say.
    key = f"{way[-1].key if way else ROOT}{SEPARATOR}{int(link.level)}{link.name}"
    step = Step(link.level, link.name, key, link.weight, link.minimum, link.maximum)
    return (*way, step)


def parent_of(key: str) -> str:
    """Return the key of the node that another stands below."""
    return key[: key.rindex(SEPARATOR)]


def is_lane(key: str) -> bool:
    """Return whether a node is a lane."""
    return key.startswith(_LANE) and SEPARATOR not in key[1:]


_LANE = f"{SEPARATOR}{int(Level.LANE)}"


def class_of(key: str) -> ClassName:
    """Return the name of the class that a class's node stands for."""
    return ClassName(key[key.rindex(SEPARATOR) + 2 :])


def to_tenant(way: Path) -> Path:
    """Return a path as far as its tenant: to its end, or to where its users part."""
    return way[:-1] if way[-1].level is Level.USER and len(way) > 1 else way


def tenant_key(way: Path) -> str:
    """Return the key of a path's tenant."""
    return to_tenant(way)[-1].key


def tenant_parent(way: Path) -> str:
    """Return the key of the node that a path's tenant stands under."""
    before = to_tenant(way)[:-1]
    return before[-1].key if before else ROOT


def class_key(way: Path) -> str:
    """Return the key of a path's class."""
    return next((step.key for step in way if step.level is Level.CLASS), way[0].key)
