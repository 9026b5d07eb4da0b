"""A radix tree over token ids: sequences that begin alike share what they have in common. What is stored is opaque."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, Self, TypeVar

# The first comparison of two runs; each next one is twice as long.
FIRST_COMPARED_TOKENS = 64

Tokens = tuple[int, ...]


class Segment(Protocol):
    """What is stored for a run of consecutive tokens, at least one."""

    @property
    def tokens(self) -> int: ...

    def split(self, at: int) -> tuple[Self, Self]:
        """The first `at` tokens and the rest; neither keeps the other's memory. This segment stays as it is."""
        ...


Seg = TypeVar("Seg", bound=Segment)


@dataclass(slots=True, eq=False)
class Node(Generic[Seg]):
    """The run `tokens` after what its ancestors hold. `siblings` are its parent's children, itself among them."""

    tokens: Tokens
    segment: Seg
    siblings: dict[int, Node[Seg]]
    children: dict[int, Node[Seg]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Step(Generic[Seg]):
    """A node on the way along some tokens, and how many of its own they share (>= 1)."""

    node: Node[Seg]
    used: int

    @property
    def whole(self) -> bool:
        return self.used == len(self.node.tokens)


class RadixTree(Generic[Seg]):
    """Children are keyed by their first token. `size` is the tokens that all nodes hold."""

    def __init__(self) -> None:
        self._top: dict[int, Node[Seg]] = {}
        self.size = 0

    def walk(self, tokens: Tokens) -> list[Step[Seg]]:
        """The nodes along `tokens`, from the top; only the last may be shared in part."""
        path: list[Step[Seg]] = []
        children, at = self._top, 0
        while at < len(tokens) and (node := children.get(tokens[at])) is not None:
            step = Step(node, shared(node.tokens, tokens, at))
            path.append(step)
            if not step.whole:
                break
            children, at = node.children, at + step.used
        return path

    def add(self, parent: Node[Seg] | None, tokens: Tokens, segment: Seg) -> Node[Seg]:
        """A new leaf below `parent` (None: at the top), where no child begins with the same token."""
        siblings = self._top if parent is None else parent.children
        assert tokens[0] not in siblings
        node = Node(tokens, segment, siblings)
        siblings[tokens[0]] = node
        self.size += len(tokens)
        return node

    def split(self, node: Node[Seg], at: int) -> Node[Seg]:
        """A new node for the first `at` tokens of `node`, which keeps the rest and all that is below."""
        head, rest = node.segment.split(at)
        upper = Node(node.tokens[:at], head, node.siblings)
        upper.siblings[upper.tokens[0]] = upper
        node.tokens, node.segment, node.siblings = node.tokens[at:], rest, upper.children
        node.siblings[node.tokens[0]] = node
        return upper

    def cut(self, leaf: Node[Seg], keep: int) -> None:
        """Keep the first `keep` (>= 1) tokens of a leaf only."""
        assert not leaf.children
        leaf.segment, _ = leaf.segment.split(keep)
        self.size -= len(leaf.tokens) - keep
        leaf.tokens = leaf.tokens[:keep]

    def remove(self, leaf: Node[Seg]) -> None:
        assert not leaf.children
        del leaf.siblings[leaf.tokens[0]]
        self.size -= len(leaf.tokens)

    def nodes(self) -> Iterator[Node[Seg]]:
        """All nodes, parents before children."""
        levels = [self._top]
        while levels:
            for node in levels.pop().values():
                yield node
                levels.append(node.children)

    def check_invariants(self) -> None:
        for key, node in self._top.items():
            assert key == node.tokens[0]
            assert node.siblings is self._top
        for node in self.nodes():
            assert node.segment.tokens == len(node.tokens) >= 1
            for key, child in node.children.items():
                assert key == child.tokens[0]
                assert child.siblings is node.children
        assert self.size == sum(len(node.tokens) for node in self.nodes())


def shared(run: Tokens, tokens: Tokens, start: int) -> int:
    """How many leading tokens `run` has in common with `tokens` from `start` on.

    Slices are compared, by doubling and then halving: no Python step a token, and no more than twice what is shared.
    """
    end = min(len(run), len(tokens) - start)
    low, high = 0, min(FIRST_COMPARED_TOKENS, end)
    while low < high and run[low:high] == tokens[start + low : start + high]:
        low, high = high, min(2 * high, end)
    while low < high:  # the first difference is at low or later, before high
        middle = (low + high) // 2
        if run[low : middle + 1] == tokens[start + low : start + middle + 1]:
            low = middle + 1
        else:
            high = middle
    return low
