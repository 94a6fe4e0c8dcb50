"""Compressed documents between runs: one bounded store for each loaded model, one shelf in it for each visitor.

Where visitors do not see each other's sessions they do not share snapshots either: how soon an answer begins
would tell one that another has asked about the same document. Knows `engine.prefix`; knows no run.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.prefix import PrefixStore, Snapshot

MEGABYTE = 2**20
ModelKey = tuple[str, str, str]
"""(name, device, dtype), as models are asked for."""


class Shelf(PrefixStore):
    """What one owner has in a store: nobody else's snapshots are found or counted."""

    def __init__(self, store: PrefixStore, owner: str) -> None:
        super().__init__(store.max_bytes)
        self._store = store
        self._owner = owner + "/"

    def get(self, key: str) -> Snapshot | None:
        """The owner's snapshot, now the most recently used one."""
        found = self._store.get(self._owner + key)
        if found is None:
            self.misses += 1
        else:
            self.hits += 1
        return found

    def add(self, key: str, snapshot: Snapshot) -> None:
        """Keeps a snapshot for the owner; what was used longest ago gives way, whosever it is."""
        self._store.add(self._owner + key, snapshot)

    @property
    def nbytes(self) -> int:
        """Bytes of the owner's snapshots."""
        return self._store.bytes_under(self._owner)


class Prefixes:
    """Stores by model. For one thread.

    Args:
        megabytes: bound of each store; 0 keeps nothing.
        private: whether each visitor has a shelf of their own; else there is one for all.
    """

    def __init__(self, megabytes: int, *, private: bool) -> None:
        self._max_bytes = megabytes * MEGABYTE
        self._private = private
        self._stores: dict[ModelKey, PrefixStore] = {}

    def shelf(self, model: ModelKey, user: str) -> PrefixStore | None:
        """Where this user's documents for this model are kept; None where nothing is to be kept."""
        if not self._max_bytes or (self._private and not user):
            return None
        store = self._stores.setdefault(model, PrefixStore(self._max_bytes))
        return Shelf(store, user if self._private else "")

    def keep_only(self, is_loaded: Callable[[str, str, str], bool]) -> None:
        """Lets the snapshots of models go that are loaded no more."""
        self._stores = {model: store for model, store in self._stores.items() if is_loaded(*model)}

    @property
    def nbytes(self) -> int:
        """Bytes of all snapshots."""
        return sum(store.nbytes for store in self._stores.values())
