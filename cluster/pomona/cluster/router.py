"""Which owner gets the next request: a pure table of owners, their reported load and this gateway's own requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum


class OwnerPhase(Enum):
    """Whether an owner may be given new requests; only READY may."""

    LOADING = "loading"
    READY = "ready"
    SUSPECT = "suspect"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class OwnerRoute:
    """One owner as the head last described it; `seq` numbers its load reports within one incarnation."""

    worker_id: str
    model: str
    replica: int
    owner: int
    host: str
    incarnation: str
    address: str
    phase: OwnerPhase
    max_running_requests: int
    running: int
    waiting: int
    seq: int
    context_tokens: int

    def __post_init__(self) -> None:
        assert self.worker_id, "a route names its worker"
        assert min(self.max_running_requests, self.running, self.waiting, self.seq) >= 0, self

    def carries_same_report_as(self, other: OwnerRoute) -> bool:
        return (self.incarnation, self.seq) == (other.incarnation, other.seq)


@dataclass(frozen=True, slots=True)
class Assignment:
    """One request given to one owner; release it exactly once."""

    number: int
    worker_id: str
    address: str


@dataclass(slots=True)
class _Owner:
    route: OwnerRoute
    others: int  # requests at the owner that this gateway did not send, as of the last report
    last_assigned: int = 0  # assignment number; 0 is never


class RoutingTable:
    """The owners of all models and the assignments in flight.

    In-flight counts are kept by worker id, apart from the owners: a head that restarts may forget an owner for a
    moment while our streams at it go on.
    """

    def __init__(self) -> None:
        self._owners: dict[str, _Owner] = {}
        self._live: dict[int, str] = {}
        self._in_flight: Counter[str] = Counter()
        self._next_number = 1

    def apply(self, full: bool, routes: Iterable[OwnerRoute], removed: Iterable[str] = ()) -> None:
        """Takes whole routes; `full` forgets every owner that `routes` does not name."""
        fresh = {route.worker_id: self._updated(route) for route in routes}
        self._owners = fresh if full else self._owners | fresh
        for worker_id in removed:
            self._owners.pop(worker_id, None)

    def _updated(self, route: OwnerRoute) -> _Owner:
        known = self._owners.get(route.worker_id)
        if known is not None and route.carries_same_report_as(known.route):
            return _Owner(route, known.others, known.last_assigned)
        # The report counts our requests too; what is over came from other gateways.
        others = max(0, route.running + route.waiting - self._in_flight[route.worker_id])
        return _Owner(route, others, known.last_assigned if known else 0)

    def assign(self, model: str, exclude: frozenset[str] = frozenset()) -> Assignment | None:
        """The READY owner of `model` with most room, least recently assigned among equals; None if there is none.

        An owner without room is still given the request when nobody has any: it queues there.
        """
        ready = [owner for owner in self._ready(model) if owner.route.worker_id not in exclude]
        if not ready:
            return None
        chosen = min(ready, key=lambda owner: (-self._room(owner), owner.last_assigned, owner.route.worker_id))
        return self._record(chosen)

    def _ready(self, model: str) -> Iterable[_Owner]:
        for owner in self._owners.values():
            if owner.route.model == model and owner.route.phase is OwnerPhase.READY:
                yield owner

    def _room(self, owner: _Owner) -> int:
        return owner.route.max_running_requests - owner.others - self._in_flight[owner.route.worker_id]

    def _record(self, owner: _Owner) -> Assignment:
        number, worker_id = self._next_number, owner.route.worker_id
        self._next_number += 1
        self._live[number] = worker_id
        self._in_flight[worker_id] += 1
        owner.last_assigned = number
        return Assignment(number, worker_id, owner.route.address)

    def release(self, assignment: Assignment) -> None:
        """Ends an assignment, whether or not its owner is still in the table."""
        worker_id = self._live.pop(assignment.number, None)
        assert worker_id is not None, f"{assignment} was released twice"
        self._in_flight[worker_id] -= 1
        if not self._in_flight[worker_id]:
            del self._in_flight[worker_id]

    def models(self) -> list[str]:
        """Every model that has an owner in any phase, sorted."""
        return sorted({owner.route.model for owner in self._owners.values()})

    def ready(self, model: str) -> bool:
        return any(True for _ in self._ready(model))

    def routes(self) -> Mapping[str, OwnerRoute]:
        """The owners by worker id."""
        return {worker_id: owner.route for worker_id, owner in self._owners.items()}

    def in_flight(self, worker_id: str) -> int:
        """This gateway's requests at one worker."""
        return self._in_flight[worker_id]

    def check_invariants(self) -> None:
        assert Counter(self._live.values()) == self._in_flight, "in-flight counts match the live assignments"
        assert all(count > 0 for count in self._in_flight.values()), "no empty count is kept"
        for worker_id, owner in self._owners.items():
            assert worker_id == owner.route.worker_id
            assert owner.others >= 0
            assert owner.last_assigned < self._next_number
