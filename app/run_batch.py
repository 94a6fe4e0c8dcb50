"""Runs of one model that share the device: whoever waits next joins while there is room, whoever ends leaves.

The queue's order holds: a run that can't join is waited for, nobody is let in before it. Knows the batch, the
driver and rows' bytes; knows no store and no users.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, Protocol

from app.run_driver import Driver, Feed
from app.run_state import Run
from app.settings import Settings
from engine.host import free_memory_bytes
from engine.trace import EndEvent, TraceEvent

if TYPE_CHECKING:
    from engine.generate_batch import Batch, Row

log = logging.getLogger("qevict.runs")

SPARE = 0.9
"""Share of the free memory that a joining run may take."""
MEGABYTE = 2**20


class Waiting(Protocol):
    """The queue, as a batch sees it."""

    def beside(self, run: Run) -> Run | None:
        """The next run, if it may share the device with `run`; it stays in the queue."""

    def take_out(self, run: Run) -> bool:
        """Makes a waiting run an active one; False if it waits no more."""

    def ended(self, run: Run, how: EndEvent | Exception) -> None:
        """Says that an active run has ended."""


class BatchDrive:
    """Drives a first run and those that join it until all have ended. For the queue's worker thread."""

    def __init__(self, driver: Driver, settings: Settings, queue: Waiting) -> None:
        self._driver = driver
        self._settings = settings
        self._queue = queue
        self._feeds: dict[Hashable, Feed] = {}
        self._prepared: tuple[Run, Row] | None = None

    def drive(self, first: Run) -> None:
        """Returns when nobody is left."""
        try:
            loaded = self._driver.load(first)
            if first.stop_why:
                self._queue.ended(first, EndEvent(first.stop_why, {}))
                return
            row = self._driver.row(first, loaded)
        except Exception as error:
            self._queue.ended(first, error)
            return
        from engine.generate_batch import Batch

        batch = Batch(loaded)
        self._add(batch, first, row)
        try:
            while batch:
                self._let_in(batch, first, loaded)
                self._round(batch)
        finally:
            batch.close()

    def _let_in(self, batch: Batch, first: Run, loaded: Any) -> None:
        while len(batch) < self._settings.batch:
            run = self._queue.beside(first)
            if run is None:
                return
            try:
                row = self._row(run, loaded)
            except Exception as error:
                if self._queue.take_out(run):
                    self._queue.ended(run, error)
                continue
            if not self._has_room(batch, row, loaded):
                return
            self._prepared = None
            if self._queue.take_out(run):
                log.info("run %s joins %d others", run.run_id, len(batch), extra={"run": run.run_id})
                self._add(batch, run, row)

    def _row(self, run: Run, loaded: Any) -> Row:
        """A waiting run's row, kept until there is room for it."""
        if self._prepared is None or self._prepared[0] is not run:
            self._prepared = (run, self._driver.row(run, loaded))
        return self._prepared[1]

    def _has_room(self, batch: Batch, row: Row, loaded: Any) -> bool:
        bound = self._settings.batch_mb * MEGABYTE
        if bound:
            return batch.needed_bytes + row.needed_bytes() <= bound
        free = _free_bytes(str(loaded.device))
        # What other rows hold is gone from the free memory already, but for prompts that are still being read.
        return free is None or batch.reading_bytes + row.needed_bytes() <= SPARE * free

    def _add(self, batch: Batch, run: Run, row: Row) -> None:
        run.state = "running"
        self._feeds[run.session] = Feed(run, self._settings.max_run_seconds)
        batch.add(run.session, row, run.watched_row, run.should_stop)

    def _round(self, batch: Batch) -> None:
        over: list[Hashable] = []
        for key, event in batch.round():
            if key not in over and self._take(self._feeds[key], event):
                over.append(key)
        for key in over:
            batch.drop(key)
            self._feeds.pop(key)

    def _take(self, feed: Feed, event: TraceEvent | Exception) -> bool:
        """Whether the run has ended."""
        if isinstance(event, Exception):
            self._queue.ended(feed.run, event)
            return True
        try:
            end = feed.take(event)
        except Exception as error:
            self._queue.ended(feed.run, error)
            return True
        if end is not None:
            self._queue.ended(feed.run, end)
        return end is not None


def _free_bytes(device: str) -> int | None:
    """Memory that a run could take on a device, or None where nothing tells."""
    if device.startswith("cuda"):
        import torch

        free, _ = torch.cuda.mem_get_info(torch.device(device))
        spare = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free) + int(spare)
    return free_memory_bytes() if device == "cpu" else None
