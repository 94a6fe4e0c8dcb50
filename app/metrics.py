"""Counts for those who run a server, in the text format that Prometheus reads.

Knows numbers and their names; knows neither runs nor routes.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0, 300.0, 1800.0)

HELP = {
    "qevict_runs_total": ("counter", "Runs that have ended, by how."),
    "qevict_tokens_total": ("counter", "Tokens that have been generated."),
    "qevict_refused_total": ("counter", "Runs that were not taken, by why."),
    "qevict_run_seconds": ("histogram", "From a run's turn to its end."),
    "qevict_wait_seconds": ("histogram", "From a run's start to its turn."),
    "qevict_request_seconds": ("histogram", "From a request to the first byte of its answer, by status."),
    "qevict_running": ("gauge", "Runs that have the device now."),
    "qevict_waiting": ("gauge", "Runs in the queue."),
    "qevict_followers": ("gauge", "Event streams that are open on running sessions."),
    "qevict_memory_bytes": ("gauge", "Memory that this process has in use."),
    "qevict_store_ok": ("gauge", "1 while sessions can be stored."),
    "qevict_up_seconds": ("gauge", "Time since the server was started."),
    "qevict_info": ("gauge", "1, with the version as a label."),
}

Labels = tuple[tuple[str, str], ...]


class Metrics:
    """Counters and histograms of one server. Safe from any thread."""

    def __init__(self) -> None:
        self._counters: dict[tuple[str, Labels], float] = {}
        self._histograms: dict[tuple[str, Labels], list[float]] = {}
        self._lock = threading.Lock()

    def count(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Adds to a counter."""
        key = (name, tuple(sorted(labels.items())))
        with self._lock:
            self._counters[key] = self._counters.get(key, 0.0) + amount

    def observe(self, name: str, seconds: float, **labels: str) -> None:
        """Adds one observation to a histogram."""
        key = (name, tuple(sorted(labels.items())))
        with self._lock:
            # One count for each bound, one for what lies beyond, then the sum.
            cells = self._histograms.setdefault(key, [0.0] * (len(SECONDS) + 2))
            cells[bisect_left(SECONDS, seconds)] += 1
            cells[-1] += seconds

    def text(self, gauges: Mapping[str, float | tuple[float, Mapping[str, str]]]) -> str:
        """Everything, with gauges that were read just now."""
        with self._lock:
            counters = dict(self._counters)
            histograms = {key: list(cells) for key, cells in self._histograms.items()}
        lines: list[str] = []
        for name, (kind, said) in HELP.items():
            lines += [f"# HELP {name} {said}", f"# TYPE {name} {kind}"]
            if kind == "counter":
                found = [(labels, value) for (key, labels), value in counters.items() if key == name]
                lines += [_line(name, labels, value) for labels, value in sorted(found)]
            elif kind == "histogram":
                for (key, labels), cells in sorted(histograms.items()):
                    if key == name:
                        lines += _histogram(name, labels, cells)
            elif name in gauges:
                reading = gauges[name]
                value, extra = reading if isinstance(reading, tuple) else (reading, {})
                lines.append(_line(name, tuple(extra.items()), value))
        return "\n".join(lines) + "\n"


def _histogram(name: str, labels: Labels, cells: Sequence[float]) -> Iterable[str]:
    total = 0.0
    for bound, count in zip((*SECONDS, float("inf")), cells, strict=False):
        total += count
        shown = "+Inf" if bound == float("inf") else f"{bound:g}"
        yield _line(f"{name}_bucket", (*labels, ("le", shown)), total)
    yield _line(f"{name}_sum", labels, cells[-1])
    yield _line(f"{name}_count", labels, total)


def _line(name: str, labels: Labels, value: float) -> str:
    inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels)
    return f"{name}{{{inside}}} {value:.10g}" if inside else f"{name} {value:.10g}"


def _escaped(text: str) -> str:
    return re.sub(r"[\x00-\x1f]", " ", text).replace("\\", r"\\").replace('"', r"\"")


def memory_bytes() -> float:
    """Memory that this process has in use; its peak where the system does not tell more."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return float(int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    except (OSError, ValueError, IndexError):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return float(peak if sys.platform == "darwin" else peak * 1024)
