"""What the parts of one server share.

Knows how they are put together; knows no page and no route.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from app.analysis_runs import AnalysisRuns
from app.analysis_sources import AnalysisSources
from app.compare_runs import CompareRuns
from app.comparisons import ComparisonInfo, Comparisons
from app.events import Bus
from app.housekeeping import Housekeeping
from app.presenter import Presentations
from app.runs import RunManager
from app.sessions import SessionInfo, Sessions
from app.settings import Settings
from app.visitors import Access, Signature, current_visitor


@dataclass(frozen=True, slots=True)
class AppContext:
    """One server's settings, store, bus and runs, who may do what, and what visitors' cookies are signed with."""

    settings: Settings
    sessions: Sessions
    bus: Bus
    runs: RunManager
    access: Access
    signature: Signature
    housekeeping: Housekeeping
    compares: CompareRuns
    comparisons: Comparisons
    presentations: Presentations
    diagnoses: AnalysisRuns
    analysis: AnalysisSources

    def listed(self, limit: int = 200, offset: int = 0) -> list[SessionInfo]:
        """Stored sessions that the current visitor is shown, newest first."""
        return self.sessions.list(limit, offset, self.access.listed_user)

    def listed_comparisons(self, limit: int = 200, offset: int = 0) -> list[ComparisonInfo]:
        """Stored comparisons that the current visitor is shown, newest first."""
        return self.comparisons.list(limit, offset, self.access.listed_user)

    def close(self) -> None:
        """Ends runs as "interrupted", ends all streams, writes what is left, makes the last copy."""
        self.runs.close()
        self.bus.close()
        self.presentations.close()
        self.housekeeping.close()
        if self.sessions.close():
            self.housekeeping.save()


def create_context(settings: Settings, **parts: Any) -> AppContext:
    """Puts a server's parts together; opens nothing yet. `parts` go to `RunManager`: engine, loader, options."""
    access = Access(settings.list_sessions)
    sessions = Sessions(
        settings.database,
        wait_seconds=settings.store_wait_seconds,
        max_backlog=settings.ring_size,
        demand=access.demand,
    )
    bus = Bus(settings.ring_size, sessions.events, sessions.catch_up)
    runs = RunManager(settings, sessions, bus, visitor=current_visitor, demand=access.demand, **parts)
    signature = Signature(settings.data_dir, settings.secret)
    comparisons = Comparisons(sessions)
    housekeeping = Housekeeping(settings, sessions, comparisons=comparisons)
    compares = CompareRuns(runs, bus, store=comparisons, visitor=current_visitor)
    presentations = Presentations()
    diagnoses = AnalysisRuns(runs, bus)
    analysis = AnalysisSources(settings, sessions, diagnosis=diagnoses.found)
    return AppContext(
        settings,
        sessions,
        bus,
        runs,
        access,
        signature,
        housekeeping,
        compares,
        comparisons,
        presentations,
        diagnoses,
        analysis,
    )
