"""The list of stored comparisons, and the links of one: as HTML, every word escaped.

Titles and model names come from people. Knows a comparison's row and the texts; knows no store and no component.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from app.compare_lines import system_label
from app.compare_record import EXPORTS
from app.result_table import format_bytes, format_share
from app.texts import text

if TYPE_CHECKING:
    from app.comparisons import ComparisonInfo

COLUMNS = ("systems", "text", "mode", "budget", "model", "state", "date", "actions")
PICK_JS = """
element.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-act]");
  if (button) trigger("select", { ...button.dataset });
});
"""
"""Fires `select` with what a pressed button is to do, `act`, and with whom, `name`: for the list and the table."""


def recent_html(found: Sequence[ComparisonInfo], lang: str, *, shown: str = "", asked: str = "") -> str:
    """The list, newest first; empty where there is nothing to list.

    Args:
        shown: the comparison that is on the board. asked: the one whose deletion waits for a yes.
    """
    if not found:
        return ""
    head = "".join(f'<th scope="col">{escape(text(lang, f"compare.list_{name}"))}</th>' for name in COLUMNS)
    body = "".join(_row(info, lang, shown=info.id == shown, asked=info.id == asked) for info in found)
    return (
        f'<section class="qe-cmp-recent"><h3>{escape(text(lang, "compare.recent"))}</h3><div class="qe-scroll">'
        f'<table class="qe-table qe-cmp-list"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        "</section>"
    )


def _row(info: ComparisonInfo, lang: str, *, shown: bool, asked: bool) -> str:
    names = ", ".join(system_label(name, lang) for name in info.systems)
    state = text(lang, f"replays.state_{info.state}")
    cells = (info.title, text(lang, f"compare.mode_{info.mode}"), _budget(info.request, lang), info.model)
    here = ' aria-current="true"' if shown else ""
    return (
        f'<tr{here}><th scope="row">{escape(names)}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        + f'<td><span class="qe-state qe-state-{escape(info.state)}">{escape(state)}</span></td>'
        + f"<td>{escape(_date(info.created))}</td><td>{_actions(info, names, lang, asked=asked)}</td></tr>"
    )


def _actions(info: ComparisonInfo, names: str, lang: str, *, asked: bool) -> str:
    named = f"{names}, {_date(info.created)}"
    if asked:
        sentence = escape(text(lang, "compare.delete_ask"))
        yes = _button("delete", info.id, text(lang, "replays.delete_yes"), named)
        return f"<span>{sentence}</span> {yes} {_button('keep', info.id, text(lang, 'replays.delete_no'), named)}"
    return (
        _button("open", info.id, text(lang, "replays.open_session"), named)
        + " "
        + _button("ask", info.id, text(lang, "replays.delete"), named)
    )


def _button(act: str, comparison: str, words: str, named: str) -> str:
    return (
        f'<button type="button" class="qe-open" data-act="{act}" data-name="{escape(comparison)}" '
        f'aria-label="{escape(f"{words}: {named}")}">{escape(words)}</button>'
    )


def _budget(request: dict[str, Any], lang: str) -> str:
    if request.get("match_to"):
        return text(lang, "compare.list_matched", name=system_label(str(request["match_to"]), lang))
    budget = request.get("budget")
    for kind, value in budget.items() if isinstance(budget, dict) else ():
        if isinstance(value, (int, float)):
            if kind == "share":
                return format_share(value)
            return format_bytes(value, lang) if kind == "total_bytes" else text(lang, "compare.list_tokens", n=value)
    return ""


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, tz=UTC).astimezone().strftime("%Y-%m-%d %H:%M")


def links_html(comparison: str, lang: str, *, kept: bool) -> str:
    """Links to a comparison's files, and to itself where it is kept."""
    cid = quote(comparison, safe="")
    files = "".join(
        f'<a href="qe/compare/{cid}/export.{kind}?lang={lang}" download>'
        f"{escape(text(lang, f'compare.file_{kind}'))}</a>"
        for kind in EXPORTS
    )
    share = f'<a class="qe-cmp-link" href="?c={cid}">{escape(text(lang, "compare.link"))}</a>' if kept else ""
    return f'<div class="qe-links"><strong>{escape(text(lang, "replays.download"))}</strong>{files}{share}</div>'
