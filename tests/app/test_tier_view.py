"""The tier board as a component: its value, its files, its words."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from app.api import create_router
from app.context import create_context
from app.settings import Settings
from app.tier_view import IDLE, TierView, board_files, board_texts
from visuals.replay import ASSETS, page_script, script_json


@pytest.mark.parametrize(
    ("value", "sent"),
    [
        (None, IDLE),
        ("", IDLE),
        ("[1]", IDLE),
        ('{"mode": "live", "sid": "a"}', {"mode": "live", "sid": "a"}),
        (
            {"mode": "replay", "sid": "", "src": "qe/first", "r": 3},
            {"mode": "replay", "sid": "", "src": "qe/first", "r": 3},
        ),
    ],
)
def test_values_reach_the_browser_as_objects(value: Any, sent: dict[str, Any]) -> None:
    board = TierView(elem_id="qe-test-board", render=False)
    assert board.postprocess(value) == sent
    assert board.preprocess(sent) == sent
    assert board.preprocess(None) == IDLE


def test_files_exist_and_change_their_address_with_their_content() -> None:
    files = board_files()
    for address in files["styles"]:
        path, _, version = address.removeprefix("qe/static/").partition("?v=")
        assert (ASSETS / path).is_file()
        assert len(version) == 12
    (script,) = files["scripts"]
    version = hashlib.sha256(page_script(with_texts=False).encode()).hexdigest()[:12]
    assert script == f"qe/static/js/board.js?v={version}"


def test_the_script_is_served_as_it_was_announced(tmp_path: Path) -> None:
    context = create_context(Settings(data_dir=tmp_path))
    app = FastAPI()
    app.include_router(create_router(context))
    with TestClient(app) as client:
        answer = client.get("/" + board_files()["scripts"][0])
        assert answer.headers["content-type"].startswith("text/javascript")
        assert "immutable" in answer.headers["cache-control"]
        assert answer.text == page_script(with_texts=False)
    context.close()


def test_both_languages_travel_with_the_component() -> None:
    board = TierView(render=False)
    assert script_json(board_texts()) in board.js_on_load
    assert board_texts()["en"]["view.full"] == "Full"
    assert set(board_texts()["zh"]) == set(board_texts()["en"])
