"""What is a whole group, is it ready, and what does it hold?

A replica of TP x PP ranks serves when all of them do, or not at all (SCALE-6). Its readiness is derived
from its ranks each time somebody asks, and stored nowhere; what it holds is counted whatever its state.
A group never changes: each move returns the next one, and an illegal move fails loudly.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from headrace.model.ids import PoolName, ReplicaName
from headrace.units import DurationNs, InstantNs, ceil_div, elapsed

_Degree = Annotated[int, Meta(ge=1, le=1_024)]


class GroupShape(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many ranks a replica has, one GPU each, and how they lie on nodes."""

    tp: _Degree = 1
    """Tensor parallel ranks of a stage. They talk in every layer, so they share a node."""
    pp: _Degree = 1
    """Pipeline stages."""
    ranks_per_node: _Degree = 8
    """GPUs of a node. 8: an HGX board."""

    def __post_init__(self) -> None:
        """Refuse a stage that no node could hold."""
        if self.tp > self.ranks_per_node:
            raise ValueError(f"tp {self.tp} does not fit one node of {self.ranks_per_node}")

    @property
    def gpus(self) -> int:
        """Ranks, and so GPUs, of the whole group."""
        return self.tp * self.pp

    @property
    def nodes(self) -> int:
        """The fewest nodes that hold it: stages are not split."""
        return ceil_div(self.pp, self.ranks_per_node // self.tp)

    def stage_of(self, rank: int) -> int:
        """Return the pipeline stage of a rank: ranks are counted stage by stage."""
        return rank // self.tp


class Domain(StrEnum):
    """What fails at once, from small to large."""

    NODE = "node"
    RACK = "rack"
    ZONE = "zone"
    REGION = "region"


class Place(Struct, frozen=True, kw_only=True):
    """Where a rank runs."""

    node: str
    rack: str | None = None
    zone: str = ""
    region: str = ""

    def within(self, domain: Domain) -> str:
        """Return the domain's name, told apart from those of other zones; an unknown rack is its node's."""
        match domain:
            case Domain.REGION:
                return self.region
            case Domain.ZONE:
                return f"{self.region}/{self.zone}"
            case Domain.RACK if self.rack is not None:
                return f"{self.region}/{self.zone}/{self.rack}"
            case _:
                return f"{self.region}/{self.zone}/{self.rack or ''}/{self.node}"


LIVES = 3
"""Starts after which a group that is lost is given up."""


def place_in(domain: str, kind: Domain, node: str) -> Place:
    """Return a place in a domain, which is written as `Place.within` has it; `node` where it names none."""
    parts = domain.split("/")
    match kind:
        case Domain.REGION:
            return Place(node=node, region=domain)
        case Domain.ZONE:
            return Place(node=node, region=parts[0], zone="/".join(parts[1:]))
        case _:
            region, zone, rack, *rest = [*parts, "", "", ""][: max(4, len(parts))]
            return Place(node="/".join(rest) or node, region=region, zone=zone, rack=rack or None)


def emptiest(open_to: Iterable[Place], kind: Domain, taken: Iterable[Place]) -> Place:
    """Return the place, of at least one, whose domain has the fewest of those taken."""
    there = [one.within(kind) for one in taken]
    return min(open_to, key=lambda one: there.count(one.within(kind)))


def fullest(taken: Iterable[Place], kind: Domain) -> str | None:
    """Return the domain that has the most, the first by name; None: nothing is taken."""
    there = [one.within(kind) for one in taken]
    return min(there, key=lambda one: (-there.count(one), one), default=None)


class RankPhase(StrEnum):
    """Whether a rank has its GPU."""

    ASKED = "asked"
    PLACED = "placed"
    LOST = "lost"
    """It is gone, or its node is, though nobody asked."""
    RELEASED = "released"


RANK_MOVES: dict[RankPhase, frozenset[RankPhase]] = {
    RankPhase.ASKED: frozenset({RankPhase.PLACED, RankPhase.RELEASED}),
    RankPhase.PLACED: frozenset({RankPhase.LOST, RankPhase.RELEASED}),
    RankPhase.LOST: frozenset({RankPhase.PLACED, RankPhase.RELEASED}),
    RankPhase.RELEASED: frozenset(),
}
"""From each phase, those that may follow. A lost rank may be placed anew; a released one is over."""


class Rank(Struct, frozen=True, kw_only=True):
    """One rank, as far as it is known. None: nobody tells, which is neither good nor bad."""

    phase: RankPhase = RankPhase.ASKED
    since: InstantNs
    """When it came into this phase: what was proved before that was proved of another life."""
    place: Place | None = None
    communicator: bool | None = None
    """Whether its collectives are set up and answer."""
    loaded: bool | None = None
    """Whether it has its shard of the weights."""
    revision: str | None = None
    """Of the weights that it has."""
    healthy: bool | None = None
    """Its GPU, its links and its kernels, where somebody watches them."""

    @property
    def held(self) -> bool:
        """Whether it holds a GPU."""
        return self.phase is RankPhase.PLACED


class Life(StrEnum):
    """What is wanted of a group. Whether it can serve is another question: see `lacks`."""

    WANTED = "wanted"
    """It is to serve, from when it is ready."""
    STANDBY = "standby"
    """It is kept asleep with all that it needs, to serve within seconds."""
    DRAINING = "draining"
    """It takes nothing new; what runs there is to finish."""
    STOPPING = "stopping"
    OVER = "over"
    """Nothing of it is left."""


LIFE_MOVES: dict[Life, frozenset[Life]] = {
    Life.WANTED: frozenset({Life.DRAINING, Life.STOPPING, Life.OVER}),
    Life.STANDBY: frozenset({Life.WANTED, Life.STOPPING, Life.OVER}),
    Life.DRAINING: frozenset({Life.WANTED, Life.STANDBY, Life.STOPPING, Life.OVER}),
    Life.STOPPING: frozenset({Life.OVER}),
    Life.OVER: frozenset(),
}
"""From each, those that may follow. A drain is called off when demand returns; a stop is not."""


class GroupStep(StrEnum):
    """What was told of a group. Also a metric label: a closed list."""

    COMING = "coming"
    """It has come to a stage of its start."""
    READY = "ready"
    """It made a correct token: it is about to serve."""
    ASLEEP = "asleep"
    """It could serve within seconds of being woken."""
    LOST = "lost"
    """It went though nobody asked, and is being started again."""
    REFUSED = "refused"
    """Nothing of it was placed: it is over."""
    GIVEN_UP = "given_up"
    """It was lost too often: it is over."""
    STOPPING = "stopping"
    STOPPED = "stopped"
    """Nothing of it is left, as it was asked for."""


class Ail(StrEnum):
    """What may be amiss with a group that is there. Also a metric label: a closed list."""

    KERNEL_FALLBACK = "kernel_fallback"
    """A slower kernel stands in for one that it should run."""
    SLOW_COLLECTIVE = "slow_collective"
    """Its ranks wait for each other, or for a link."""
    BAD_RANK = "bad_rank"
    """One of its ranks is not well: it serves nothing, as if it lacked that one."""


GROUP_OVER = frozenset({GroupStep.REFUSED, GroupStep.GIVEN_UP, GroupStep.STOPPED})
"""After these a group is there no more, and holds nothing."""


class Proof(Struct, frozen=True, kw_only=True):
    """A token that a group made for somebody who knew what it had to be."""

    at: InstantNs
    revision: str
    """Of the model that made it."""
    shape: GroupShape
    """Of the group that made it."""
    correct: bool


class RankGroup(Struct, frozen=True, kw_only=True):
    """One group as it stands."""

    name: ReplicaName
    pool: PoolName
    shape: GroupShape
    revision: str
    """Which weights it is to serve."""
    asked_at: InstantNs
    ranks: tuple[Rank, ...]
    """By number, all of them, from when it was asked for."""
    life: Life = Life.WANTED
    proof: Proof | None = None
    """The last one."""

    @property
    def gpus_held(self) -> int:
        """GPUs it holds, ready or not: what it costs."""
        return sum(rank.held for rank in self.ranks)

    @property
    def is_partial(self) -> bool:
        """Whether it holds some of what it needs, and not all."""
        return 0 < self.gpus_held < len(self.ranks)

    @property
    def missing_since(self) -> InstantNs | None:
        """Since when a rank of it has been without a place; None: all have theirs."""
        return min((rank.since for rank in self.ranks if not rank.held), default=None)

    def domains(self, domain: Domain) -> frozenset[str]:
        """Return the domains of a kind that it stands on: the loss of any one is its own."""
        return frozenset(
            rank.place.within(domain) for rank in self.ranks if rank.held and rank.place is not None
        )


class Lack(StrEnum):
    """Why a group serves nothing. Also a metric label: a closed list, in the order of coming up."""

    LIFE = "life"
    """It is not to serve."""
    RANKS = "ranks"
    """Not all of them have their place."""
    TOPOLOGY = "topology"
    """A stage is spread over nodes, or nobody knows where its ranks are."""
    SHARDS = "shards"
    COMMUNICATOR = "communicator"
    REVISION = "revision"
    """Its ranks hold other weights than wanted."""
    HEALTH = "health"
    TOKEN = "token"  # noqa: S105 - no secret
    """It has made no correct token as it stands: at this shape, of this revision, by these ranks."""


def lacks(group: RankGroup) -> tuple[Lack, ...]:
    """Return all that keeps a group from serving; nothing: it is ready.

    What a rank says against itself counts. What nobody tells of it does not: the token that a group
    must have made took its shards, its collectives and all of its ranks.
    """
    ranks, proof = group.ranks, group.proof
    placed = len(ranks) == group.shape.gpus and all(rank.held for rank in ranks)
    found = {
        Lack.LIFE: group.life is not Life.WANTED,
        Lack.RANKS: not placed,
        Lack.TOPOLOGY: placed and not _is_laid_out(group),
        Lack.SHARDS: any(rank.loaded is False for rank in ranks),
        Lack.COMMUNICATOR: any(rank.communicator is False for rank in ranks),
        Lack.REVISION: any(rank.revision not in (None, group.revision) for rank in ranks),
        Lack.HEALTH: any(rank.healthy is False for rank in ranks),
        Lack.TOKEN: proof is None or not _proves(proof, group),
    }
    return tuple(lack for lack, holds in found.items() if holds)


def is_ready(group: RankGroup) -> bool:
    """Return whether it serves: one whole group of capacity, or none (SCALE-6)."""
    return not lacks(group)


def capacity(groups: Iterable[RankGroup]) -> int:
    """Return how many whole groups serve: what admission may open for."""
    return sum(is_ready(group) for group in groups)


def gpus_held(groups: Iterable[RankGroup]) -> int:
    """Return the GPUs that groups hold, whatever their state: what is paid for."""
    return sum(group.gpus_held for group in groups)


def overdue(group: RankGroup, now: InstantNs, limit_ns: DurationNs) -> bool:
    """Return whether a group has lacked a rank for longer than is borne: it is to be released."""
    if group.life in (Life.STOPPING, Life.OVER) or group.missing_since is None:
        return False
    return elapsed(group.missing_since, now) >= limit_ns


def _is_laid_out(group: RankGroup) -> bool:
    """Return whether each stage is on one node, and no node has more ranks than it can."""
    stages: dict[int, set[str]] = {}
    load: dict[str, int] = {}
    for number, rank in enumerate(group.ranks):
        if rank.place is None:
            return False
        node = rank.place.within(Domain.NODE)
        stages.setdefault(group.shape.stage_of(number), set()).add(node)
        load[node] = load.get(node, 0) + 1
    tight = all(len(nodes) == 1 for nodes in stages.values())
    return tight and max(load.values()) <= group.shape.ranks_per_node


def _proves(proof: Proof, group: RankGroup) -> bool:
    right = proof.correct and proof.revision == group.revision and proof.shape == group.shape
    return right and all(proof.at >= rank.since for rank in group.ranks)


def asked(
    name: ReplicaName, pool: PoolName, shape: GroupShape, revision: str, now: InstantNs
) -> RankGroup:
    """Return a group that was just asked for: all of its ranks, none with a place."""
    ranks = tuple(Rank(since=now) for _ in range(shape.gpus))
    return RankGroup(
        name=name, pool=pool, shape=shape, revision=revision, asked_at=now, ranks=ranks
    )


def moved(
    group: RankGroup, rank: int, phase: RankPhase, now: InstantNs, place: Place | None = None
) -> RankGroup:
    """Return the group with a rank in its next phase; nothing is known of it yet.

    `place`: where, for one that is placed. Raises `ValueError` for a move that is not in `RANK_MOVES`,
    a rank that is not there, or a place for a rank that has none.
    """
    before = _rank(group, rank)
    if phase not in RANK_MOVES[before.phase]:
        raise ValueError(f"{group.name}: rank {rank} cannot go from {before.phase} to {phase}")
    if place is not None and phase is not RankPhase.PLACED:
        raise ValueError(f"{group.name}: rank {rank} is {phase} and has no place")
    return _with(group, rank, Rank(phase=phase, since=now, place=place))


def told(
    group: RankGroup, rank: int, *,
    communicator: bool | None = None, loaded: bool | None = None, revision: str | None = None,
    healthy: bool | None = None,
) -> RankGroup:  # fmt: skip
    """Return the group with what was told of a rank; None: nothing was, and what is known stays.

    Raises `ValueError` for a rank that has no place: what is told is of a life that is over.
    """
    before = _rank(group, rank)
    if not before.held:
        raise ValueError(f"{group.name}: rank {rank} is {before.phase} and tells nothing")
    news = {
        "communicator": communicator, "loaded": loaded, "revision": revision, "healthy": healthy,
    }  # fmt: skip
    known = {field: value for field, value in news.items() if value is not None}
    return _with(group, rank, replace(before, **known))


def advanced(group: RankGroup, life: Life) -> RankGroup:
    """Return the group in the next part of its life; raises `ValueError` for one not in `LIFE_MOVES`."""
    if life not in LIFE_MOVES[group.life]:
        raise ValueError(f"{group.name} cannot go from {group.life} to {life}")
    return replace(group, life=life)


def _rank(group: RankGroup, number: int) -> Rank:
    if not 0 <= number < len(group.ranks):
        raise ValueError(f"{group.name} has no rank {number}")
    return group.ranks[number]


def _with(group: RankGroup, number: int, rank: Rank) -> RankGroup:
    ranks = (*group.ranks[:number], rank, *group.ranks[number + 1 :])
    return replace(group, ranks=ranks)
