"""Who comes next: a queue that is fair between users, what one user may have in it, and how long it takes.

Knows users, addresses and measured times; knows no engine, no store.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from app.settings import Settings
from engine.errors import EngineError

Item = TypeVar("Item")

REMEMBERED = 4096
"""Users and addresses that are remembered when they have nothing in the queue."""


class QueueFullError(EngineError, RuntimeError):
    """Too many runs are waiting, or this user has too many."""


class FairQueue(Generic[Item]):
    """Users take turns: somebody's second run comes after everybody's first. Not safe from several threads.

    Every run gets the number of a turn: one more than its user's last one, but no turn that has passed. The lowest
    turn is next, within a turn whoever came first.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int, str, Item]] = []
        self._last_turn: OrderedDict[str, int] = OrderedDict()
        self._turn = 0
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, item: object) -> bool:
        return any(entry[3] is item for entry in self._waiting)

    def add(self, item: Item, user: str) -> None:
        """Puts an item in."""
        turn = max(self._turn, self._last_turn.get(user, -1) + 1)
        self._remember(user, turn)
        self._arrivals += 1
        self._waiting.append((turn, self._arrivals, user, item))
        self._waiting.sort(key=lambda entry: entry[:2])

    def pop(self) -> Item:
        """Takes the next item out."""
        turn, _, _, item = self._waiting.pop(0)
        self._turn = turn
        return item

    def remove(self, item: Item) -> None:
        """Takes an item out; its user's later ones move up by its turn."""
        index = next(index for index, entry in enumerate(self._waiting) if entry[3] is item)
        turn, _, user, _ = self._waiting.pop(index)
        self._waiting = sorted(
            ((t - 1 if u == user and t > turn else t, n, u, i) for t, n, u, i in self._waiting),
            key=lambda entry: entry[:2],
        )
        self._remember(user, self._last_turn.get(user, turn) - 1)

    def order(self) -> list[Item]:
        """All items, the next one first."""
        return [entry[3] for entry in self._waiting]

    def _remember(self, user: str, turn: int) -> None:
        self._last_turn[user] = turn
        self._last_turn.move_to_end(user)
        while len(self._last_turn) > REMEMBERED:
            self._last_turn.popitem(last=False)


class Limits:
    """What one user and one address may ask for. Not safe from several threads."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._starts: OrderedDict[str, deque[float]] = OrderedDict()

    def admit(self, user: str, address: str, present: Iterable[tuple[str, str]]) -> None:
        """Counts a start, given the (user, address) of all runs that wait or run.

        Raises:
            QueueFullError: a limit is reached; the text says which.
        """
        present = list(present)
        limits = self._settings
        if len(present) > limits.queue_length:
            raise QueueFullError(f"{len(present) - 1} runs are waiting already: try again later.")
        mine = sum(1 for who, _ in present if user and who == user)
        if limits.max_runs_per_user and mine >= limits.max_runs_per_user:
            raise QueueFullError(
                f"you have {mine} runs here already, and {limits.max_runs_per_user} is the most: "
                "wait for one to end, or stop it."
            )
        near = sum(1 for _, where in present if address and where == address)
        if limits.max_runs_per_address and near >= limits.max_runs_per_address:
            raise QueueFullError(f"{near} runs from your address are here already: try again when some have ended.")
        if limits.starts_per_minute and address:
            self._count_start(address)

    def _count_start(self, address: str) -> None:
        now = self._clock()
        starts = self._starts.setdefault(address, deque())
        while starts and now - starts[0] >= 60:
            starts.popleft()
        if len(starts) >= self._settings.starts_per_minute:
            raise QueueFullError(
                f"{len(starts)} runs were started from your address in a minute: "
                f"try again in {max(1, round(60 - (now - starts[0])))} seconds."
            )
        starts.append(now)
        self._starts.move_to_end(address)
        while len(self._starts) > REMEMBERED:
            self._starts.popitem(last=False)


class RunTimes:
    """How long runs take here, from those that have ended: seconds for each token that was asked for."""

    def __init__(self, keep: int = 16) -> None:
        self._rates: deque[float] = deque(maxlen=keep)

    def add(self, seconds: float, tokens: int) -> None:
        """Notes a run that went to its own end."""
        self._rates.append(seconds / max(1, tokens))

    def expect(self, tokens: int) -> float | None:
        """Seconds that a run of so many tokens will take, None before any has ended."""
        if not self._rates:
            return None
        rates = sorted(self._rates)
        return rates[len(rates) // 2] * max(1, tokens)


Group = tuple[str, ...]


def expected_wait(
    active: Sequence[tuple[Group, float | None]], waiting: Sequence[tuple[Group, float | None]], slots: int
) -> float | None:
    """Seconds until the last of `waiting` has its turn; None where a run's time is not known yet.

    Args:
        active: (group, seconds left) of those that have the device. waiting: (group, seconds), the next one first.
        slots: runs of one group that share the device; another group's waits until all have left.
    """
    now = 0.0
    holds: Group | None = active[0][0] if active else None
    ends: list[float] = []
    for _, left in active:
        if left is None:
            return None
        ends.append(left)
    for place, (group, seconds) in enumerate(waiting):
        if ends and group != holds:
            now, ends = max(now, *ends), []
        elif len(ends) >= slots:
            now = max(now, min(ends))
            ends.remove(min(ends))
        if place == len(waiting) - 1:
            return now
        if seconds is None:
            return None
        holds = group
        ends.append(now + seconds)
    return now
