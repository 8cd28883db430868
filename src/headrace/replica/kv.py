"""Which KV blocks are free, held, or kept as prefix cache?

Counts are integers; nothing is kept for each block. Only prefixes have an identity: a radix tree of
extents, each a run of blocks under the ids of the prompt chunks they lie in. A request locks the
path to its prefix. Unlocked blocks stay until room is needed and then go from the ends of the least
recently used leaves, block by block, so that evicting once for many steps equals once a step.

Blocks outside the tree (rest of the prompt, output) belong to one request; it counts them itself.
"""

from heapq import heapify, heappop, heappush

from headrace.units import BLOCK_TOKENS

Ids = tuple[int, ...]


class Extent:
    """Blocks `start` to `end` of a prefix, on top of its parent's, which end at `start`."""

    __slots__ = ("children", "end", "ids", "locks", "parent", "serial", "start", "used_at")

    def __init__(
        self, parent: "Extent | None", start: int, end: int, ids: Ids, serial: int
    ) -> None:
        """Hang below `parent`; `ids` are the chunks that the blocks lie in, in order."""
        self.parent = parent
        self.start = start
        self.end = end
        self.ids = ids
        self.serial = serial
        self.children: dict[int, Extent] = {}
        self.locks = 0
        """Requests that use the extent or one below it."""
        self.used_at = 0


class Match:
    """The longest cached prefix of some ids."""

    __slots__ = ("blocks", "extent", "idle")

    def __init__(self, extent: Extent, blocks: int, idle: int) -> None:
        """Keep the deepest extent reached, the blocks matched, and how many nobody uses now."""
        self.extent = extent
        self.blocks = blocks
        self.idle = idle


class KvPool:
    """A pool of KV blocks with a prefix cache."""

    def __init__(self, blocks: int) -> None:
        """Start with `blocks` free."""
        self.total = blocks
        self.free = blocks
        self.evictable = 0
        """Blocks in the tree that nobody locks."""
        self._chunk = 0  # blocks of a prompt chunk; unknown until there are ids
        self.root = Extent(None, 0, 0, (), 0)
        self.root.locks = 1
        self._clock = 0  # counts releases
        self._serial = 0
        self._extents = 0
        self._leaves: list[tuple[int, int, Extent]] = []  # least recently used first, some stale

    def chunk_by(self, tokens: int) -> None:
        """Say how many tokens a chunk id stands for: once and for all."""
        chunk = tokens // BLOCK_TOKENS
        assert self._chunk in {0, chunk}, f"a pool knows one chunk size: {self._chunk=} {chunk=}"
        self._chunk = chunk

    def match(self, ids: Ids, limit: int) -> Match:
        """Return the longest cached prefix of at most `limit` blocks. Changes nothing."""
        node, at, idle, chunk = self.root, 0, 0, self._chunk
        while at < limit:
            first = at // chunk
            child = node.children.get(ids[first])
            if child is None:
                break
            end = min(child.end, (first + _common(child.ids, ids, first)) * chunk, limit)
            if not child.locks:
                idle += end - at
            node, at = child, end
            if end < child.end:
                break
        return Match(node, at, idle)

    def lock(self, found: Match) -> Extent:
        """Protect a match until `unlock`; return the extent that ends where it ends."""
        node, end = found.extent, found.blocks
        if end < node.end:
            node = self._split(node, end)
        above: Extent | None = node
        while above is not None and above is not self.root:
            if not above.locks:
                self.evictable -= above.end - above.start
            above.locks += 1
            above = above.parent
        return node

    def unlock(self, node: Extent) -> None:
        """Give up a lock; what nobody else locks becomes evictable, and is the latest used."""
        self._clock += 1
        above: Extent | None = node
        while above is not None and above is not self.root:
            above.locks -= 1
            if not above.locks:
                self.evictable += above.end - above.start
                above.used_at = self._clock
                if not above.children:
                    self._offer(above)
            above = above.parent

    def shared(self, node: Extent) -> int:
        """Return how many leading blocks of a locked path others use as well."""
        above: Extent | None = node
        while above is not None and above is not self.root:
            if above.locks > 1:  # and so are all above it
                return above.end
            above = above.parent
        return 0

    def clear(self) -> None:
        """Drop all that nobody locks."""
        self._evict(self.evictable)

    def take(self, blocks: int) -> None:
        """Allocate blocks, evicting for them; the caller has looked that there are enough."""
        short = blocks - self.free
        if short > 0:
            self._evict(short)
        self.free -= blocks

    def share(self, held: Extent, ids: Ids, blocks: int) -> Extent:
        """Make a request's first `blocks` blocks, now computed, part of the tree.

        `held` is what the request has locked so far; return what it has locked instead. Its own
        copies of what others have put there meanwhile are freed.
        """
        found = self.match(ids, blocks)
        node = self.lock(found)
        self.unlock(held)
        at, chunk = found.blocks, self._chunk
        self.free += at - held.end
        if at == blocks:
            return node
        last = (blocks - 1) // chunk + 1
        if node is not self.root and node.locks == 1 and not node.children:
            # Nobody else is here: a growing session stays one extent.
            node.ids = ids[node.start // chunk : last]
            node.end = blocks
            return node
        child = self._extent(node, at, blocks, ids[at // chunk : last])
        child.locks = 1
        return child

    def check(self, held: int) -> None:
        """Assert that free, cached and `held` blocks, those outside the tree, are all there are."""
        tree = idle = extents = 0
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            parent = node.parent
            assert parent is not None
            assert parent.end == node.start < node.end, "an extent must continue its parent"
            assert parent is self.root or parent.locks >= node.locks, "a lock must hold its path"
            assert parent.children[node.ids[0]] is node
            assert len(node.ids) == (node.end - 1) // self._chunk + 1 - node.start // self._chunk
            extents += 1
            tree += node.end - node.start
            idle += 0 if node.locks else node.end - node.start
            stack.extend(node.children.values())
        assert extents == self._extents, f"{extents=} {self._extents=}"
        assert idle == self.evictable, f"{idle=} {self.evictable=}"
        assert self.free >= 0, f"{self.free=}"
        assert self.free + tree + held == self.total, f"{self.free=} {tree=} {held=} {self.total=}"

    def _extent(self, parent: Extent, start: int, end: int, ids: Ids) -> Extent:
        """Hang a new extent below `parent`."""
        self._serial += 1
        self._extents += 1
        node = Extent(parent, start, end, ids, self._serial)
        parent.children[ids[0]] = node
        return node

    def _split(self, node: Extent, at: int) -> Extent:
        """Cut an extent at a block; it keeps the lower part, return the new upper one."""
        assert node.parent is not None
        chunk, first = self._chunk, node.start // self._chunk
        upper = self._extent(node.parent, node.start, at, node.ids[: (at - 1) // chunk + 1 - first])
        upper.locks, upper.used_at = node.locks, node.used_at
        node.ids = node.ids[at // chunk - first :]
        node.parent, node.start = upper, at
        upper.children[node.ids[0]] = node
        return upper

    def _offer(self, leaf: Extent) -> None:
        """Note an unlocked leaf for eviction; drop stale notes when they are the most."""
        if len(self._leaves) > 4 * self._extents + 64:
            self._leaves = [note for note in self._leaves if _is_current(note)]
            heapify(self._leaves)
        heappush(self._leaves, (leaf.used_at, leaf.serial, leaf))

    def _evict(self, blocks: int) -> None:
        """Free exactly `blocks` blocks of the prefix cache."""
        assert blocks <= self.evictable, f"{blocks=} {self.evictable=}"
        self.evictable -= blocks
        self.free += blocks
        while blocks:
            note = heappop(self._leaves)
            if not _is_current(note):
                continue
            leaf = note[2]
            size = leaf.end - leaf.start
            if size > blocks:
                leaf.end -= blocks
                first = leaf.start // self._chunk
                leaf.ids = leaf.ids[: (leaf.end - 1) // self._chunk + 1 - first]
                heappush(self._leaves, note)
                return
            blocks -= size
            parent = leaf.parent
            assert parent is not None
            del parent.children[leaf.ids[0]]
            leaf.parent = None
            self._extents -= 1
            if not parent.locks and not parent.children:
                self._offer(parent)


def _common(mine: Ids, ids: Ids, first: int) -> int:
    """Return how many of an extent's ids equal `ids` from `first` on."""
    size = len(mine)
    if ids[first : first + size] == mine:
        return size
    for nth, (one, other) in enumerate(zip(mine, ids[first:], strict=False)):
        if one != other:
            return nth
    return len(ids) - first


def _is_current(note: tuple[int, int, Extent]) -> bool:
    """Say whether a note still describes an unlocked leaf and the time of its last use."""
    used_at, _, node = note
    return (
        node.parent is not None and not node.locks and not node.children and node.used_at == used_at
    )
