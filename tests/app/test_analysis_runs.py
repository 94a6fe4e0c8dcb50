"""Diagnoses that the page asks for, in the queue of runs."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr

from app.analysis_results import ResultsError
from app.analysis_runs import AnalysisRuns, DiagnosisRequest
from app.analysis_sources import AnalysisSources
from app.context import AppContext, create_context
from app.labels import Labels
from app.settings import Settings
from app.tabs.analysis import AnalysisTab
from engine.config import QEvictConfig
from tests.app.analysis_samples import DIAGNOSIS
from tests.app.fake_engine import FakeEngine, FakeLoader, FakeOptions


class _Words:
    def __call__(self, text: str, verbose: bool = True) -> dict[str, list[int]]:
        return {"input_ids": list(range(len(text.split())))}


class _Loader(FakeLoader):
    def __call__(self, name: str, **options: Any) -> Any:
        return SimpleNamespace(name=super().__call__(name, **options), tokenizer=_Words())


def _context_with(tmp_path: Path, diagnose: Any) -> tuple[AppContext, AnalysisRuns]:
    made = create_context(Settings(data_dir=tmp_path), engine=FakeEngine(), loader=_Loader(), options=FakeOptions)
    return made, AnalysisRuns(made.runs, made.bus, diagnose)


def _request(tokens: int = 20) -> DiagnosisRequest:
    return DiagnosisRequest("word " * 30, "a text", QEvictConfig(), tokens, 6)


def test_a_diagnosis_goes_through_the_queue_and_is_kept(tmp_path: Path) -> None:
    asked: list[Any] = []

    def diagnose(loaded: Any, ids: list[int], config: QEvictConfig, options: Any, *, progress: Any) -> dict[str, Any]:
        asked.append((len(ids), options.steps, options.live_policies))
        progress("reference", 1, 1)
        progress("live", 0, 1)
        return DIAGNOSIS

    made, runs = _context_with(tmp_path, diagnose)
    try:
        session = runs.start(_request())
        assert made.runs.wait(session, 30.0)
        assert asked == [(20, 6, ("R3",))]
        assert runs.found(session) == DIAGNOSIS and runs.standing(session).state == "ended"
        sources = AnalysisSources(Settings(data_dir=tmp_path), made.sessions, diagnosis=runs.found)
        assert sources.payload(f"diagnosis:{session}", "light", "en")["title"] == "Diagnosis made here"
        assert made.sessions.list() == []  # a diagnosis is no session
        long = runs.start(_request(tokens=500))
        made.runs.wait(long, 30.0)
        assert "30 tokens and 500 were asked for" in runs.standing(long).error
    finally:
        made.close()


def test_a_diagnosis_can_be_stopped_and_a_failed_one_says_why(tmp_path: Path) -> None:
    def endless(*_: Any, progress: Any) -> dict[str, Any]:
        while True:
            progress("reference", 1, 9)
            time.sleep(0.02)

    made, runs = _context_with(tmp_path, endless)
    try:
        session = runs.start(_request())
        until = time.monotonic() + 60
        while runs.standing(session).stage != "reference" and time.monotonic() < until:
            time.sleep(0.02)
        assert runs.stop(session)
        assert made.runs.wait(session, 30.0)
        assert runs.found(session) is None and runs.standing(session).error == ""

        def broken(*_: Any, progress: Any) -> dict[str, Any]:
            raise ResultsError("it broke.")

        runs._diagnose = broken
        failed = runs.start(_request())
        assert made.runs.wait(failed, 30.0)
        assert runs.standing(failed).error == "it broke."
    finally:
        made.close()


def test_the_tab_follows_a_diagnosis_to_its_figures(tmp_path: Path) -> None:
    made, runs = _context_with(tmp_path, lambda *_, progress: DIAGNOSIS)
    try:
        object.__setattr__(made, "diagnoses", runs)
        session = runs.start(_request())

        async def last() -> list[Any]:
            with gr.Blocks():
                tab = AnalysisTab(made, Labels(), gr.State("en"))
            found: list[Any] = []
            async for update in tab._follow(session, (), "en"):
                found = update
            return found

        _, status, source, board, extra, run, stop = asyncio.run(last())
        assert board == {"source": f"diagnosis:{session}"} and extra[0][1] == board["source"] == source["value"]
        assert "Diagnosed" in status and run["interactive"] and not stop["interactive"]
    finally:
        made.close()
