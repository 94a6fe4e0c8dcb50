"""Boards as Gradio components: what an update that leaves a board alone may not take from it."""

from __future__ import annotations

import re

import gradio as gr
import pytest
from gradio.blocks import postprocess_update_dict

from app.analysis_view import AnalysisView, analysis_files, analysis_texts
from app.compare_view import CompareView, compare_files, compare_texts
from app.html_board import HtmlBoard
from app.tier_view import TierView, board_files, board_texts
from visuals.replay import script_json

BOARDS = [
    (TierView, board_files, board_texts),
    (CompareView, compare_files, compare_texts),
    (AnalysisView, analysis_files, analysis_texts),
]


@pytest.mark.parametrize(("made", "files", "texts"), BOARDS)
def test_a_board_that_is_mounted_after_a_skipped_update_has_its_words_and_files(made, files, texts) -> None:
    board = made(render=False)
    update = postprocess_update_dict(board, dict(gr.skip()))
    # Gradio gives the page these props in place of the board's own, and nothing else.
    assert set(update) == {"__type__", "props"}
    script = board.js_on_load
    assert script_json(files()) in script and script_json(texts()) in script
    assert set(re.findall(r"\bprops\b\.?(\w*)", script)) == {"value"}


def test_boards_of_one_kind_have_ids_of_their_own() -> None:
    named, plain = TierView(elem_id="qe-other", render=False), TierView(render=False)
    assert (named.elem_id, plain.elem_id) == ("qe-other", "qe-board")
    assert '"id":"qe-other"' in named.js_on_load and '"id":"qe-board"' in plain.js_on_load


def test_a_value_that_is_no_dict_shows_nothing() -> None:
    for made in (TierView, CompareView, AnalysisView):
        board: HtmlBoard = made(render=False)
        assert board.preprocess("<b>") == board.postprocess(None) == board.NOTHING
        assert board.postprocess('{"sid": "x"}') == {"sid": "x"}
