"""The three pools: request slots, KV tokens, auxiliary-state slots. Nothing runs that all three have not admitted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Need:
    """What one request takes of each pool while it is in: one slot, tokens, auxiliary slots."""

    kv_tokens: int
    aux_slots: int
    requests: int = 1

    def __post_init__(self) -> None:
        if min(self.kv_tokens, self.aux_slots, self.requests) < 0:
            raise ValueError(f"{self} is negative")


@dataclass(frozen=True, slots=True)
class PoolView:
    """A pool at one moment; used + evictable + free == capacity."""

    capacity: int = 0
    used: int = 0
    evictable: int = 0

    @property
    def free(self) -> int:
        return self.capacity - self.used - self.evictable


class Pool:
    """A counted resource. `used + evictable + free == capacity` at every moment."""

    def __init__(self, capacity: int = 0) -> None:
        self._used = 0
        self._evictable = 0
        self.resize(capacity)

    @property
    def limit(self) -> int:
        """What the share in force allows."""
        return self._limit

    @property
    def capacity(self) -> int:
        """The limit in force; while a lowered limit waits for its users to leave, what they still hold."""
        return max(self._limit, self._used)

    @property
    def room(self) -> int:
        """What can be taken: free, and what is kept only until somebody needs it."""
        return self.capacity - self._used

    @property
    def free(self) -> int:
        return self.room - self._evictable

    @property
    def used(self) -> int:
        return self._used

    @property
    def evictable(self) -> int:
        return self._evictable

    def keep(self, amount: int) -> None:
        """So much is evictable now; more than there is room for cannot be."""
        self._evictable = max(0, min(amount, self.room))

    def resize(self, capacity: int) -> None:
        if capacity < 0:
            raise ValueError(f"a pool cannot hold {capacity}")
        self._limit = capacity
        self.keep(self._evictable)

    def take(self, amount: int) -> None:
        """Take from what is free, then from what is evictable: whoever keeps that has to let it go."""
        if not 0 <= amount <= self.room:
            raise ValueError(f"cannot take {amount} of {self.room}")
        self._used += amount
        self.keep(self._evictable)

    def give(self, amount: int) -> None:
        if not 0 <= amount <= self._used:
            raise ValueError(f"cannot give back {amount} of {self._used} used")
        self._used -= amount

    def view(self) -> PoolView:
        return PoolView(self.capacity, self._used, self._evictable)


class Pools:
    """All three together: a need is taken whole or not at all."""

    def __init__(self, *, requests: int = 0, kv_tokens: int = 0, aux_slots: int = 0) -> None:
        self.requests = Pool(requests)
        self.kv_tokens = Pool(kv_tokens)
        self.aux_slots = Pool(aux_slots)

    def has_room(self, need: Need) -> bool:
        return (
            need.requests <= self.requests.room
            and need.kv_tokens <= self.kv_tokens.room
            and need.aux_slots <= self.aux_slots.room
        )

    def take(self, need: Need) -> None:
        if not self.has_room(need):
            raise ValueError(f"no room for {need}")
        self.requests.take(need.requests)
        self.kv_tokens.take(need.kv_tokens)
        self.aux_slots.take(need.aux_slots)

    def fits(self, need: Need) -> bool:
        """Whether the need could ever be met, with everybody else gone."""
        return (
            need.requests <= self.requests.limit
            and need.kv_tokens <= self.kv_tokens.limit
            and need.aux_slots <= self.aux_slots.limit
        )

    def give(self, need: Need) -> None:
        if need.requests > self.requests.used or need.kv_tokens > self.kv_tokens.used:
            raise ValueError(f"cannot give back {need}: more than is used")
        if need.aux_slots > self.aux_slots.used:
            raise ValueError(f"cannot give back {need}: more than is used")
        self.requests.give(need.requests)
        self.kv_tokens.give(need.kv_tokens)
        self.aux_slots.give(need.aux_slots)

    def resize(self, *, requests: int, kv_tokens: int, aux_slots: int) -> None:
        if min(requests, kv_tokens, aux_slots) < 0:
            raise ValueError("a pool cannot hold less than nothing")
        self.requests.resize(requests)
        self.kv_tokens.resize(kv_tokens)
        self.aux_slots.resize(aux_slots)
