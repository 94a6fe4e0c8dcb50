"""Replay pages, pictures and tables made from a trace."""

from __future__ import annotations

import base64
import csv
import gzip
import io
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from engine.errors import TraceError
from engine.trace import LateMetrics, RoutingEvent, StepEvent, decode, encode
from tests.visuals.synthetic import NASTY, Plan, synthetic_events, synthetic_rows
from visuals.palette import PALETTES, rgb
from visuals.replay import ASSETS, PAGE_LIMIT, SCRIPTS, lean_script, page_script, to_csv, to_gif, to_html, to_png

SMALL = Plan(rows=6, prompt=300, events=10, full=4, quant=12, local=16, nasty=True)
LIVELY = Plan(events=200, prompt=2496, quant=150, full=40)


def payload(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="qe-trace">(.*?)</script>', page, re.S)
    assert found is not None
    data: dict[str, Any] = json.loads(found.group(1))
    return data


def test_page_holds_the_rows_and_nothing_breaks_out() -> None:
    rows = synthetic_rows(SMALL)
    page = to_html(rows, '</title><script>x()</script>"', {"view.full": "</script>"}, 'en"><x')
    assert page.count("</script>") == page.count("<script")
    assert NASTY not in page
    assert "<script>x()" not in page
    data = payload(page)
    assert data["texts"] == {"view.full": "</script>"}
    got = [decode(row) for row in data["rows"]]
    for kept, event in zip(got, synthetic_events(SMALL), strict=True):
        if isinstance(event, StepEvent):
            assert isinstance(kept, StepEvent)
            assert (kept.pieces, kept.seq_len, kept.ids) == (event.pieces, event.seq_len, [])
        else:
            assert encode(kept) == encode(event)


def test_page_names_no_other_address() -> None:
    page = to_html(synthetic_rows(SMALL), "t", {}, "en")
    assert set(re.findall(r"https?://[^\"'\s]*", page)) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"\b(src|href)\s*=\s*[\"']?(?!x onerror)\w", page.split('id="qe-trace"')[0])


@pytest.mark.parametrize("plan", [Plan(events=200, prompt=1000), LIVELY], ids=["usual", "lively"])
def test_two_hundred_events_fit(plan: Plan) -> None:
    page = to_html(synthetic_rows(plan), "t", {}, "en")
    assert len(page.encode()) <= PAGE_LIMIT
    lines = gzip.decompress(base64.b64decode(payload(page)["packed"])).split(b"\n")
    routes = [event for line in lines if isinstance(event := decode(line), RoutingEvent)]
    assert len(routes) == 200


def test_page_script_stays_small_and_whole() -> None:
    script = page_script(with_texts=False)
    assert len(script.encode()) <= 80_000
    for name in SCRIPTS[1:]:
        source = (ASSETS / "js" / name).read_text("utf-8")
        lean = lean_script(source)
        assert lean in script
        assert lean_script(lean) == lean
        for words in re.findall(r'"(?:[^"\\\n]|\\.)*"', source):
            assert words in lean
        assert _signs(lean) == _signs(re.sub(r"(?s)/\*.*?\*/|(?<!:)//[^\n]*", "", source))


def _signs(script: str) -> str:
    """What a browser reads: no spaces, and no sign before a bracket that ends the same thing."""
    return re.sub(r"[;,](?=\})|,(?=\))", "", re.sub(r"\s", "", script))


@pytest.mark.parametrize(
    ("source", "lean"),
    [
        ("const a = 1; // why\n", "const a=1;"),
        ('/* one\n two */\n  x("a // b  =  c");', 'x("a // b  =  c");'),
        ("a = b + +c - -d;", "a=b + +c - -d;"),
        ("return (x) => `${a + b}  =  ${c}`;", "return(x)=>`${a + b}  =  ${c}`;"),
        (r"s.replace(/ = \/\/ /g, '')", r"s.replace(/ = \/\/ /g,'')"),
        ("if (a in b) return c / d / e;", "if(a in b)return c / d / e;"),
        ("let x = y ? -1 : .5;", "let x=y?-1:.5;"),
    ],
)
def test_lean_scripts_lose_nothing_that_matters(source: str, lean: str) -> None:
    assert lean_script(source) == lean


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_lean_scripts_are_scripts(tmp_path: Path) -> None:
    (tmp_path / "all.js").write_text(page_script() + lean_script((ASSETS / "js/page.js").read_text("utf-8")), "utf-8")
    done = subprocess.run(["node", "--check", str(tmp_path / "all.js")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_csv_has_a_line_an_event() -> None:
    events = synthetic_events(SMALL)
    rows = list(csv.DictReader(io.StringIO(to_csv(events))))
    routes = {event.event_id: event for event in events if isinstance(event, RoutingEvent)}
    late = {event.event_id: event for event in events if isinstance(event, LateMetrics)}
    assert [int(row["event_id"]) for row in rows] == list(range(SMALL.events + 1))
    for row in rows[1:]:
        event = routes[int(row["event_id"])]
        assert int(row["promotions"]) == event.promotions
        assert int(row["evictions"]) == event.evictions
        assert int(row["metadata_bytes"]) == event.memory.metadata
        known = late.get(event.event_id)
        assert (row["fmm"] == "") == (known is None)
        if known is not None:
            assert float(row["fmm_fp_only"]) == pytest.approx(known.fmm_fp_only)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_png_shows_the_tiers(theme: Any) -> None:
    image = Image.open(io.BytesIO(to_png(synthetic_events(SMALL), 4, row=2, theme=theme))).convert("RGB")
    colors = {color for _, color in image.getcolors(1 << 20) or []}
    for name, color in PALETTES[theme].tiers.items():
        assert rgb(color) in colors, name


def test_png_differs_by_event_and_refuses_others() -> None:
    events = synthetic_events(SMALL)
    assert to_png(events, 1) != to_png(events, 2)
    assert to_png(events, -1) == to_png(events, SMALL.events)
    with pytest.raises(TraceError, match="event index"):
        to_png(events, SMALL.events + 1)
    with pytest.raises(TraceError, match="meta"):
        to_png(events[1:], 0)
    with pytest.raises(TraceError, match="no routing"):
        to_gif(events[:1])


def test_gif_moves() -> None:
    image = Image.open(io.BytesIO(to_gif(synthetic_events(SMALL))))
    assert getattr(image, "n_frames", 1) == SMALL.events + 1
    short = Image.open(io.BytesIO(to_gif(synthetic_events(SMALL), max_frames=4)))
    assert 3 <= getattr(short, "n_frames", 1) <= 5
