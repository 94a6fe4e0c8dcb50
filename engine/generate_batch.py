"""Several runs of one model decoded together: the weights are read once for all of them.

    batch = Batch(loaded)
    batch.add("a", make_row(loaded, "Once upon a time", config, options))
    batch.add("b", make_row(loaded, "The baker's book", other_config, options))
    while batch:
        for key, event in batch.round():
            ...                          # the same events that each run alone would send

Every run keeps a cache, a budget, a length, a seed and an end of its own: a row attends to its own cache
alone, so there is no padding, nothing is shared but the forward, and a row that comes or goes leaves the
others as they are. Prompts are read one chunk a round, between the others' tokens. Knows runs and the
model; knows no queue, no server.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.adapter import cache_keyword
from engine.config import QEvictConfig
from engine.errors import OutOfMemoryError
from engine.generate import numbered
from engine.models import LoadedModel
from engine.prefix import PrefixStore
from engine.rope import find_rotary
from engine.row_layer import attends_alone, beside_each_other
from engine.run import WAITING, Run
from engine.run_options import RunOptions
from engine.trace import Progress, TraceEvent


class Row(Protocol):
    """A run that a batch can feed."""

    cache: Any
    together: bool
    wanted: int
    ids: list[int]
    new_tokens: int

    def events(
        self, watched_row: Callable[[], int] | None, should_stop: Callable[[], bool] | None
    ) -> Iterator[TraceEvent]: ...

    def fed_with(self, logits: Tensor, seconds: float, rows: int) -> None: ...

    def needed_bytes(self) -> int: ...


def make_row(
    loaded: LoadedModel,
    prompt: str,
    config: QEvictConfig | None = None,
    options: RunOptions | None = None,
    *,
    session: str = "",
    policy: str = "qevict",
    document: str = "",
    prefixes: PrefixStore | None = None,
) -> Row:
    """A run as `generate.generate` would begin it, to be added to a batch.

    Raises:
        PromptError, BudgetError, BackendError, UnsupportedModelError: before any work.
    """
    return Run(loaded, prompt, config or QEvictConfig(), options or RunOptions(), session, policy, document, prefixes)


@dataclass(slots=True)
class _Entry:
    key: Hashable
    row: Row
    events: Iterator[TraceEvent]
    seq: int = 0
    reading: bool = True
    """Whether its prompt is still being read."""


class Batch:
    """Runs that are decoded together. For one thread.

    Args:
        loaded: the model of all of them.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._entries: list[_Entry] = []
        # Such a rotation is chosen by the longest row, so that a short one would get another's.
        self._rotation_grows = getattr(find_rotary(loaded.model), "rope_type", "default") in ("dynamic", "longrope")

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def reading_bytes(self) -> int:
        """Bytes that prompts which are still being read may yet take, an upper bound."""
        return sum(entry.row.needed_bytes() for entry in self._entries if entry.reading)

    @property
    def needed_bytes(self) -> int:
        """Most bytes that all rows take together."""
        return sum(entry.row.needed_bytes() for entry in self._entries)

    def add(
        self,
        key: Hashable,
        row: Row,
        watched_row: Callable[[], int] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> None:
        """Puts a run in, at any time between two rounds; its first event comes in the next one."""
        row.together = True
        self._entries.append(_Entry(key, row, row.events(watched_row, should_stop)))

    def drop(self, key: Hashable) -> None:
        """Takes a run out without its end."""
        for entry in [entry for entry in self._entries if entry.key == key]:
            self._remove(entry)

    def close(self) -> None:
        """Takes all runs out."""
        for entry in list(self._entries):
            self._remove(entry)

    def round(self) -> Iterator[tuple[Hashable, TraceEvent | Exception]]:
        """One chunk of every prompt that is being read and one token of every other run.

        Yields (key, event). An exception in an event's place is that run's end; the others go on, unless the
        device ran out of memory in a forward that was shared. A run must not be dropped while its event is handled
        by the caller; before the next round is early enough.
        """
        for entry in list(self._entries):
            yield from self._until_waiting(entry)
        waiting = [entry for entry in self._entries if not entry.reading]
        if not waiting:
            return
        try:
            self._feed(waiting)
        except Exception as error:
            for entry in waiting:
                self._remove(entry)
                yield entry.key, self._named(entry, error)

    def _until_waiting(self, entry: _Entry) -> Iterator[tuple[Hashable, TraceEvent | Exception]]:
        while True:
            try:
                event = next(entry.events, None)
            except Exception as error:
                self._remove(entry)
                yield entry.key, self._named(entry, error)
                return
            if event is None:
                self._remove(entry)
                return
            if event is WAITING:
                entry.reading = False
                return
            yield entry.key, numbered(event, entry.seq)
            entry.seq += 1
            if isinstance(event, Progress) and event.stage == "prefill" and event.done < event.total:
                return

    def _named(self, entry: _Entry, error: Exception) -> Exception:
        if not isinstance(error, torch.OutOfMemoryError | MemoryError):
            return error
        loaded = self._loaded
        return OutOfMemoryError(
            f"{loaded.label} ran out of memory on {loaded.device} with a prompt of {len(entry.row.ids)} tokens, "
            "beside other runs: try again, or take a shorter prompt."
        )

    def _remove(self, entry: _Entry) -> None:
        self._entries = [one for one in self._entries if one is not entry]
        close = getattr(entry.events, "close", None)
        if close is not None:
            close()

    def _feed(self, entries: Sequence[_Entry]) -> None:
        """Feeds every run the token that it wants: together where all layers are ours, else one by one."""
        shared = [entry.row for entry in entries if self._can_share(entry.row.cache)]
        for row in (entry.row for entry in entries if not self._can_share(entry.row.cache)):
            self._forward([row], row.cache)
        if len(shared) == 1:
            self._forward(shared, shared[0].cache)
        elif shared:
            self._forward(shared, beside_each_other([row.cache for row in shared]))

    def _can_share(self, cache: Any) -> bool:
        return not self._rotation_grows and attends_alone(cache)

    @torch.inference_mode()
    def _forward(self, rows: Sequence[Row], cache: Any) -> None:
        began = time.perf_counter()
        model = self._loaded.model
        device = rows[0].cache.device
        at = [int(row.cache.get_seq_length(row.cache.managed_layers[0])) for row in rows]
        output = model(
            input_ids=torch.tensor([[row.wanted] for row in rows], device=device),
            position_ids=torch.tensor(at, device=device)[:, None],
            use_cache=True,
            logits_to_keep=1,
            **{cache_keyword(model): cache},
        )
        logits = output.logits[:, -1].float()
        if logits.is_cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        for number, row in enumerate(rows):
            row.fed_with(logits[number], seconds, len(rows))
