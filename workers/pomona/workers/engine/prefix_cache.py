"""What was computed for tokens, kept for as long as nobody needs the room. Bookkeeping only: payloads are opaque.

Segments hold the KV of runs of tokens, in a radix tree. Snapshots hold auxiliary state (the recurrent state of hybrid
models) after exactly so many tokens. Nothing is pinned: what a match returned stays good when the cache lets it go.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from .radix import Node, RadixTree, Seg, Step

# A shorter rest of a leaf that must shrink is not worth the copy.
MIN_KEPT_TOKENS = 16

Snap = TypeVar("Snap")


@dataclass(frozen=True, slots=True)
class Part(Generic[Seg]):
    """The first `used_tokens` (>= 1) of a segment."""

    segment: Seg
    used_tokens: int


@dataclass(frozen=True, slots=True)
class Snapshot(Generic[Snap]):
    """The auxiliary state after the first `position` (>= 1) tokens."""

    position: int
    state: Snap


@dataclass(frozen=True, slots=True)
class Match(Generic[Seg, Snap]):
    """The first `length` tokens are held by `parts`, in order; only the last may be used in part.

    `snapshot` is the deepest one at or before `length`.
    """

    length: int
    parts: tuple[Part[Seg], ...]
    snapshot: Snapshot[Snap] | None


class PrefixCache(Generic[Seg, Snap]):
    """Sequences that begin alike share their beginning; the least recently used goes first."""

    def __init__(self) -> None:
        self._tree: RadixTree[Seg] = RadixTree()
        # Both in order of use, the oldest first. A path is used from its end to the top, so that a node always comes
        # before its ancestors: the first one is a leaf.
        self._used: OrderedDict[Node[Seg], None] = OrderedDict()
        self._snapshots: OrderedDict[Node[Seg], Snap] = OrderedDict()  # each at the end of its node

    @property
    def size(self) -> int:
        """KV tokens held."""
        return self._tree.size

    @property
    def slots(self) -> int:
        """Snapshots held."""
        return len(self._snapshots)

    def match(self, tokens: Sequence[int], limit: int) -> Match[Seg, Snap]:
        """What is held of the first `limit` tokens. Uses the path and the snapshot."""
        path = self._tree.walk(tuple(tokens[: max(0, limit)]))
        self._use(path)
        return Match(length(path), tuple(Part(step.node.segment, step.used) for step in path), self._deepest(path))

    def insert(self, tokens: Sequence[int], segment_from: Callable[[int], Seg | None]) -> bool:
        """Hold `tokens` whole; False where what was missing could not be had. Uses the path.

        `segment_from(start)` gives the segment of tokens[start:], or None; it is asked at most once, and only where
        `start` leading tokens are held and more are not. A segment of another length raises ValueError.
        """
        tokens = tuple(tokens)
        path = self._tree.walk(tokens)
        start = length(path)
        segment = segment_from(start) if start < len(tokens) else None
        if segment is not None:
            if segment.tokens != len(tokens) - start:
                raise ValueError(f"a segment of {segment.tokens} tokens cannot be tokens {start} to {len(tokens)}")
            path = self._ending_whole(path)
            leaf = self._tree.add(path[-1].node if path else None, tokens[start:], segment)
            path.append(Step(leaf, segment.tokens))
        self._use(path)
        return length(path) == len(tokens)

    def attach(self, tokens: Sequence[int], state: Snap) -> bool:
        """Put a snapshot after `tokens`, at least one: False where they are not held whole, or have one already.

        The one that is there stays. Uses the path and the snapshot where `tokens` are held.
        """
        path = self._tree.walk(tuple(tokens))
        if not path or length(path) < len(tokens):
            return False
        path = self._ending_whole(path)
        self._use(path)
        node = path[-1].node
        held = node in self._snapshots
        self._snapshots.setdefault(node, state)
        self._snapshots.move_to_end(node)
        return not held

    def shrink(self, tokens: int, slots: int) -> None:
        """Let go of the least recently used until at most `tokens` and `slots` are held.

        KV goes leaf by leaf, with its snapshot; of the last one no more is cut off its end than has to go. Then
        snapshots go, and their KV stays.
        """
        while self._used and self.size > tokens:
            self._free(next(iter(self._used)), self.size - tokens)
        while len(self._snapshots) > max(0, slots):
            self._snapshots.popitem(last=False)

    def clear(self) -> None:
        """Let go of everything at once: node by node, since dropping the tree would leave cycles to the collector."""
        self.shrink(0, 0)

    def check_invariants(self) -> None:
        self._tree.check_invariants()
        nodes = list(self._tree.nodes())
        order = {node: index for index, node in enumerate(self._used)}
        assert order.keys() == set(nodes)
        assert all(order[child] < order[node] for node in nodes for child in node.children.values())
        assert self._snapshots.keys() <= order.keys()

    def _use(self, path: Sequence[Step[Seg]]) -> None:
        for step in reversed(path):
            self._used[step.node] = None
            self._used.move_to_end(step.node)

    def _deepest(self, path: Sequence[Step[Seg]]) -> Snapshot[Snap] | None:
        position = length(path)
        for step in reversed(path):
            if step.whole and step.node in self._snapshots:
                self._snapshots.move_to_end(step.node)
                return Snapshot(position, self._snapshots[step.node])
            position -= step.used
        return None

    def _ending_whole(self, path: list[Step[Seg]]) -> list[Step[Seg]]:
        """The same path, its last node split where it ends. It must be used next: that puts the new node in order."""
        if not path or path[-1].whole:
            return path
        last = path[-1]
        return [*path[:-1], Step(self._tree.split(last.node, last.used), last.used)]

    def _free(self, leaf: Node[Seg], excess: int) -> None:
        """Free `excess` tokens of a leaf, or all of it."""
        self._snapshots.pop(leaf, None)
        keep = len(leaf.tokens) - excess
        if keep >= MIN_KEPT_TOKENS:
            self._tree.cut(leaf, keep)
        else:
            self._tree.remove(leaf)
            del self._used[leaf]


def length(path: Sequence[Step[Seg]]) -> int:
    """How many tokens a path holds."""
    return sum(step.used for step in path)
