"""Accessibility of every tab, light and dark, by axe-core, fetched for the test and never part of the project."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.server import ServerProcess

BOARD = "qeBoards.get('qe-live-board')"
VERSION = "4.10.3"


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed, so axe-core cannot be fetched")
    folder = tmp_path_factory.mktemp("axe")
    try:
        done = subprocess.run(
            [npm, "pack", "--silent", f"axe-core@{VERSION}"], cwd=folder, capture_output=True, text=True, timeout=120
        )
    except subprocess.TimeoutExpired:
        pytest.skip("axe-core could not be fetched in time")
    packed = next(folder.glob("axe-core-*.tgz"), None)
    if done.returncode or packed is None:
        pytest.skip(f"axe-core could not be fetched: {done.stderr.strip()[-200:]}")
    with tarfile.open(packed) as archive:
        script = archive.extractfile("package/axe.min.js")
        if script is None:
            pytest.skip("axe-core's package holds no script")
        return script.read().decode("utf-8")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    command = ("-m", "tests.browser.made_up_server", "8", "40")
    with ServerProcess(tmp_path_factory.mktemp("access"), command) as running:
        yield running


def _faults(page: Any) -> list[str]:
    # A colour on its way from one theme to the other is neither's.
    page.wait_for_function("!document.getAnimations().some((one) => one instanceof CSSTransition)", timeout=15_000)
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']}).then((result) => result.violations)")
    return [
        f"{fault['id']}: {node['html'][:160]} {node['failureSummary'][:300]}"
        for fault in found
        if fault["impact"] in ("serious", "critical")
        for node in fault["nodes"][:4]
    ]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_nothing_serious(browser: Any, server: ServerProcess, axe: str, theme: str, artifacts: Path) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 720})
    try:
        page.goto(f"{server.url}?__theme={theme}")
        page.wait_for_function(f"window.qeBoards && {BOARD} && {BOARD}.index >= 0", timeout=60_000)
        page.evaluate(axe)
        faults = {"first paint": _faults(page)}
        page.click("#qe-run")
        page.wait_for_function(f"{BOARD}.source && {BOARD}.trace.end", timeout=60_000)
        for fold in ("Cache", "Generation", "Model"):
            page.get_by_text(fold, exact=True).first.click()
        page.wait_for_timeout(600)
        faults["live"] = _faults(page)
        board = page.locator("#qe-live-board .qe")
        board.locator("[data-term='promotion']").first.click()
        page.wait_for_selector(".qe-pop", state="visible")
        faults["glossary"] = _faults(page)
        page.keyboard.press("Escape")
        board.get_by_role("button", name="Notes 0").click()
        board.locator(".qe-notes button").last.click()
        board.locator(".qe-notes textarea").fill("Here <b>it</b> comes back.")
        faults["note form"] = _faults(page)
        board.locator(".qe-notes [type='submit']").click()
        board.get_by_role("button", name="Notes 1").wait_for()
        board.get_by_role("button", name="Present", exact=True).click()
        page.wait_for_function(f"{BOARD}.presenting")
        board.get_by_role("button", name="Notes 1").click()
        page.wait_for_selector(".qe-notes li", state="visible")
        faults["notes and presenter"] = _faults(page)
        page.keyboard.press("Escape")
        page.get_by_role("tab", name="Lessons").click()
        page.wait_for_function("window.qeLessons && qeLessons.at", timeout=60_000)
        for place in ([0, 0], [2, 1], [3, 1], [5, 4], [6, 0]):
            page.evaluate("(place) => qeLessons.go(...place)", place)
            page.wait_for_function("(place) => String(qeLessons.at) === String(place)", arg=place)
            page.keyboard.press("2")
            page.wait_for_timeout(300)
            faults[f"lesson {place}"] = _faults(page)
        page.get_by_role("tab", name="Replays").click()
        page.wait_for_selector("button.qe-open", timeout=30_000)
        faults["sessions"] = _faults(page)
        page.locator("button.qe-open").first.click()
        page.wait_for_function("qeBoards.get('qe-replay-board') && qeBoards.get('qe-replay-board').index > 0")
        page.wait_for_timeout(600)
        faults["replay"] = _faults(page)
        page.get_by_role("tab", name="About").click()
        page.wait_for_timeout(600)
        faults["about"] = _faults(page)
        page.screenshot(path=str(artifacts / f"about-{theme}-1280.png"))
    finally:
        page.close()
    assert {place: found for place, found in faults.items() if found} == {}
