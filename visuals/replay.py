"""A trace as a thing to keep: one HTML file that plays offline, a GIF, a PNG, a CSV.

The HTML holds the very scripts of the page and the very rows of the trace; the pictures are drawn here
with Pillow. Knows the trace and the palette; knows no model, no server, no session store.
"""

from __future__ import annotations

import base64
import csv
import gzip
import html
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from engine.errors import TraceError
from engine.trace import Keyframe, LateMetrics, RoutingEvent, RunMeta, Tier, TraceEvent
from engine.trace_board import Board
from visuals.palette import BAR_HEIGHTS, PALETTES, Palette, Theme, blend, rgb

ASSETS: Final = Path(__file__).resolve().parent.parent / "assets"
SCRIPTS: Final = (
    "tier_texts.js",
    "tier_trace.js",
    "tier_draw.js",
    "tier_atlas.js",
    "tier_chart.js",
    "tier_view.js",
    "tier_frame.js",
    "tier_stream.js",
    "tier_panel.js",
    "tier_build.js",
    "tier_input.js",
    "tier_window.js",
)
"""The scripts of the tier board, in the order in which they must run."""
LATE_SCRIPTS: Final = ("tier_sheet.js", "tier_tip.js")
NOTES_SCRIPT: Final = "tier_notes.js"
"""Come after the others: a page fetches them when they are asked for; a file has them, the notes if there are any."""
STYLES: Final = ("tier_view.css",)

PLAIN_LIMIT: Final = 250_000
"""Bytes of rows up to which the page holds them readable; longer ones are packed with gzip."""

PAGE_LIMIT: Final = 400_000
"""Bytes that a replay page should not pass; see `to_html`."""

_PAGE = """<!doctype html>
<html lang="{lang}">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
body {{ margin: 0; padding: 14px 22px; background: #FFFFFF; }}
body.dark {{ background: #0E1320; }}
h1 {{ font: 650 20px/1.3 system-ui, sans-serif; margin: 0 0 8px; color: #12151C; }}
body.dark h1 {{ color: #EEF1F7; }}
{style}
</style>
</head>
<body>
<h1>{title}</h1>
<main id="qe-replay"></main>
<script type="application/json" id="qe-trace">{trace}</script>
<script>
{script}
</script>
<script>
(function () {{
  var data = JSON.parse(document.getElementById("qe-trace").textContent);
  var wish = new URLSearchParams(location.search);
  if (wish.get("__theme") === "dark") document.body.classList.add("dark");
  var view = new QEvictView(document.getElementById("qe-replay"), {{
    texts: data.texts, lang: data.lang, projector: wish.has("projector")
  }});
  window.qeView = view;
  function show(ndjson) {{
    view.load(ndjson);
    if (view.openNotes) view.openNotes("");
    if (wish.has("l")) view.setRow(Number(wish.get("l")));
    if (wish.has("r")) view.seekEvent(Number(wish.get("r")));
  }}
  if (data.rows) return show(data.rows.join("\\n"));
  var packed = Uint8Array.from(atob(data.packed), function (c) {{ return c.charCodeAt(0); }});
  var stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  new Response(stream).text().then(show);
}})();
</script>
</body>
</html>
"""


@cache
def page_script(with_texts: bool = True) -> str:
    """All scripts of the tier board in one piece, as `lean_script` leaves them.

    A page on a server passes its own words, and fetches `LATE_SCRIPTS` when they are asked for: `with_texts=False`.
    """
    names = (*SCRIPTS, *LATE_SCRIPTS) if with_texts else SCRIPTS[1:]
    return "\n".join(lean_script((ASSETS / "js" / name).read_text("utf-8")) for name in names)


@cache
def page_style() -> str:
    """All styles of the tier board in one piece."""
    return "\n".join(_bare_lines((ASSETS / "css" / name).read_text("utf-8")) for name in STYLES)


_LITERAL: Final = re.compile(
    r"""(?P<text>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|`(?:\\.|[^`\\])*`)"""
    r"""|(?P<note>/\*.*?\*/|//[^\n]*)"""
    r"""|(?<=[=(,:!&|?\[])(?P<space>[ ]*)(?P<regex>/(?![*/])(?:\\.|\[(?:\\.|[^\]\\\n])*\]|[^/\\\n\[])+/[a-z]*)""",
    re.DOTALL,
)
_AROUND: Final = re.compile(
    r"[ \t]*(=>|[-+*/%&|<>=!?]*=+|&&|\|\||\?\?|[<>?:,;(){}\[\]|&*%]|(?<![-+])[ ][-+][ ](?![-+]))[ \t]*"
)


def lean_script(source: str) -> str:
    """JavaScript without comments and without the spaces and line ends that only people need.

    Enough for the scripts in `assets/js`, not for any script: a template literal may hold no other one and no line end,
    a regular expression must follow an operator or a bracket, and a loop must have a body.
    """
    return _leaner(_leaner(source))  # what a note parted comes together the second time


def _leaner(source: str) -> str:
    out: list[str] = []
    at = 0
    for found in _LITERAL.finditer(source):
        out.append(_squeezed_code(source[at : found.start()]))
        out.append(found["text"] or found["regex"] or "")
        at = found.end()
    out.append(_squeezed_code(source[at:]))
    lines = re.sub(r"(?<=[;{,(\[])\n", "", _bare_lines("".join(out)))  # there, a line end never ends a statement
    return re.sub(r"\n(?=[})\]])", "", lines)  # nor here: a bracket that closes ends it


def _squeezed_code(code: str) -> str:
    return re.sub(r"[;,]\s*(?=\})|,\s*(?=\))", "", _AROUND.sub(_squeezed, code))


def _squeezed(found: re.Match[str]) -> str:
    return found[1].strip()


def _bare_lines(source: str) -> str:
    source = re.sub(r"(?ms)^[ \t]*/\*.*?\*/[ \t]*$", "", source)
    lines = (line.strip() for line in source.splitlines())
    return "\n".join(line for line in lines if line)


def script_json(value: object) -> str:
    """JSON that may stand inside <script>: no `<`, no line separators that end a JavaScript string."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def to_html(rows: Iterable[bytes], title: str, texts: Mapping[str, str], lang: str) -> str:
    """One HTML page that replays `rows` (wire events, one each) with no server and no network, notes among them.

    `texts` are the words of the view by flat key ("view.full"); absent ones stay English. Token ids are left
    out, for the view shows texts alone. A page that would pass `PAGE_LIMIT` also leaves out the score events:
    the score lines of windows then know only the events at which they moved.
    """
    lines = [_without_ids(row) for row in rows]
    payload: dict[str, object] = {"texts": dict(texts), "lang": lang}
    if sum(map(len, lines)) <= PLAIN_LIMIT:
        payload["rows"] = [line.decode("utf-8") for line in lines]
    else:
        payload["packed"] = _pack(lines)
    noted = any(line.startswith(b'{"k":"mark"') for line in lines)
    page = _page(payload, title, lang, noted)
    if len(page.encode("utf-8")) > PAGE_LIMIT and "packed" in payload:
        payload["packed"] = _pack([line for line in lines if not line.startswith(b'{"k":"score"')])
        page = _page(payload, title, lang, noted)
    return page


def _without_ids(row: bytes) -> bytes:
    if not row.startswith(b'{"k":"tok"'):
        return row
    body = json.loads(row)
    body["i"] = []
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8")


def _pack(lines: Sequence[bytes]) -> str:
    return base64.b64encode(gzip.compress(b"\n".join(lines), 9, mtime=0)).decode("ascii")


def _page(payload: Mapping[str, object], title: str, lang: str, noted: bool) -> str:
    script = page_script()
    if noted:
        script += "\n" + lean_script((ASSETS / "js" / NOTES_SCRIPT).read_text("utf-8"))
    return _PAGE.format(
        lang=html.escape(lang, quote=True),
        title=html.escape(title),
        style=page_style(),
        script=script,
        trace=script_json(payload),
    )


_COLUMNS: Final = (
    *("event_id", "seq_len", "promotions", "demotions", "evictions", "aged", "route_ms"),
    *("sink_bytes", "local_bytes", "full_bytes", "code_bytes", "metadata_bytes", "shadow_bytes"),
    *("budget_bytes", "full_kv_bytes", "fmm", "fmm_history", "fmm_fp_only", "churn"),
    *("mass_full", "mass_quant", "mass_evicted", "followed_tokens"),
)


def to_csv(events: Iterable[TraceEvent]) -> str:
    """One line a routing event: counts, bytes, and the late metrics where they are known."""
    steps: list[RoutingEvent | Keyframe] = []
    late: dict[int, LateMetrics] = {}
    for event in events:
        if isinstance(event, RoutingEvent) or (isinstance(event, Keyframe) and not steps):
            steps.append(event)
        elif isinstance(event, LateMetrics):
            late[event.event_id] = event
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for step in steps:
        counts: list[object] = [""] * 5
        if isinstance(step, RoutingEvent):
            cost: object = "" if step.route_ms is None else round(step.route_ms, 3)
            counts = [step.promotions, step.demotions, step.evictions, step.aged, cost]
        known = late.get(step.event_id)
        metrics: list[object] = [""] * 8
        if known is not None:
            churn: object = "" if known.churn is None else known.churn
            metrics = [known.fmm, known.fmm_history, known.fmm_fp_only, churn, *known.mass_share, known.steps]
        writer.writerow([step.event_id, step.seq_len, *counts, *step.memory.to_list(), *metrics])
    return out.getvalue()


def to_png(events: Sequence[TraceEvent], event_index: int, *, row: int = 0, theme: Theme = "light") -> bytes:
    """The board after routing step `event_index` (0 = the first; negative counts from the end) as PNG bytes.

    Raises:
        TraceError: no meta event, no routing, or no such step.
    """
    frames = _Frames(events, row, theme)
    out = io.BytesIO()
    frames.image(frames.position(event_index)).save(out, "PNG", optimize=True)
    return out.getvalue()


def to_gif(
    events: Sequence[TraceEvent], *, row: int = 0, theme: Theme = "light", frame_ms: int = 160, max_frames: int = 120
) -> bytes:
    """The run as an animated GIF, one frame a routing step; of a longer run every n-th step is kept.

    Raises:
        TraceError: no meta event or no routing.
    """
    frames = _Frames(events, row, theme)
    stride = -(-len(frames.steps) // max_frames)
    chosen = list(range(0, len(frames.steps), stride))
    if chosen[-1] != len(frames.steps) - 1:
        chosen.append(len(frames.steps) - 1)
    template = Image.new("P", (1, 1))
    template.putpalette(frames.colors())
    images = [frames.image(i).quantize(palette=template, dither=Image.Dither.NONE) for i in chosen]
    out = io.BytesIO()
    times = [frame_ms] * (len(images) - 1) + [max(1500, frame_ms)]
    images[0].save(out, "GIF", save_all=True, append_images=images[1:], duration=times, loop=0, optimize=False)
    return out.getvalue()


class _Frames:
    """Draws the lanes of one row above the atlas of all rows, for any step."""

    WIDTH: Final = 1024
    LEFT: Final = 92
    LANE: Final = 52
    TOP: Final = 40

    def __init__(self, events: Sequence[TraceEvent], row: int, theme: Theme) -> None:
        metas = [event for event in events if isinstance(event, RunMeta)]
        if not metas:
            raise TraceError("the trace has no meta event, so its board cannot be drawn.")
        self.meta = metas[0]
        self.palette: Palette = PALETTES[theme]
        self.row = min(max(0, row), self.meta.rows - 1)
        self.steps: list[RoutingEvent | Keyframe] = []
        self.states: list[NDArray[np.uint8]] = []
        board = Board(self.meta)
        for event in events:
            board.forward(event)
            if isinstance(event, RoutingEvent) or (isinstance(event, Keyframe) and not self.steps):
                self.steps.append(event)
                self.states.append(board.tiers.copy())
        if not self.steps:
            raise TraceError("the trace has no routing event yet, so there is nothing to draw.")
        self.windows = self.states[-1].shape[1]
        self.band = max(4, min(10, 320 // self.meta.rows))
        self.font = ImageFont.load_default(15)
        self.small = ImageFont.load_default(12)

    def position(self, index: int) -> int:
        count = len(self.steps)
        if not -count <= index < count:
            raise TraceError(f"event index must be below {count}, got {index}.")
        return index % count

    def colors(self) -> list[int]:
        """A GIF palette: the tiers, the surfaces, and steps between them for the edges of letters."""
        p = self.palette
        names = [p.paper, p.panel, p.line, p.ink, p.muted, p.ring, *p.tiers.values()]
        names += [blend(p.ink, p.paper, share / 8) for share in range(1, 8)]
        flat = [value for color in names for value in rgb(color)]
        return flat + flat[:3] * (256 - len(names))

    def _x(self, window: int) -> int:
        start = self.LEFT + 14
        return start + round(window * (self.WIDTH - 12 - start) / max(1, int(self.windows)))

    def _bar(self, draw: ImageDraw.ImageDraw, x0: int, x1: int, base: int, height: int, tier: int) -> None:
        color = list(self.palette.tiers.values())[tier]
        right = max(x0, x1 - (2 if x1 - x0 > 4 else 1))
        if tier == Tier.EVICTED:
            draw.rectangle((x0, base - max(2, round(height * 0.3)), right, base), outline=color)
            return
        tall = max(2, round(height * BAR_HEIGHTS[list(self.palette.tiers)[tier]]))
        draw.rectangle((x0, base - tall, right, base), fill=color)
        if tier == Tier.QUANT and tall >= 8:
            draw.rectangle((x0, base - tall // 2 - 1, right, base - tall // 2), fill=self.palette.paper)

    def image(self, index: int) -> Image.Image:
        """The picture of one step, RGB."""
        p, step, tiers = self.palette, self.steps[index], self.states[index]
        atlas_top = self.TOP + 3 * self.LANE + 16
        image = Image.new("RGB", (self.WIDTH, atlas_top + self.meta.rows * self.band + 12), p.paper)
        draw = ImageDraw.Draw(image)
        moved = step.migrations if isinstance(step, RoutingEvent) else None
        words = f"event {step.event_id}   token {step.seq_len}"
        if isinstance(step, RoutingEvent):
            words += f"   promoted {step.promotions}   demoted {step.demotions}   evicted {step.evictions}"
        memory = step.memory
        words += f"   {memory.persistent / 1e6:.2f} of {memory.full_kv / 1e6:.2f} MB ({self.meta.kv_dtype})"
        draw.text((12, 11), words, fill=p.ink, font=self.font)
        names = ("Full", f"INT{self.meta.bits}", "Evicted")
        lane_of = {Tier.SINK: 0, Tier.LOCAL: 0, Tier.FULL: 0, Tier.QUANT: 1, Tier.EVICTED: 2}
        tint = list(p.tiers.values())
        for lane, name in enumerate(names):
            top = self.TOP + lane * self.LANE
            draw.rectangle((0, top, self.WIDTH, top + self.LANE - 1), fill=p.panel if lane == 1 else p.paper)
            draw.rectangle((0, top + 1, 4, top + self.LANE - 2), fill=tint[lane + 2])
            draw.text((12, top + 10), name, fill=p.ink, font=self.font)
            here = int((tiers[self.row] == lane + 2).sum())
            draw.text((12, top + 29), f"{here} win", fill=p.muted, font=self.small)
        full = self.LANE - 16
        if self.meta.sink_tokens:
            self._bar(draw, self.LEFT, self.LEFT + 9, self.TOP + self.LANE - 8, full, Tier.SINK)
        for window, tier in enumerate(tiers[self.row].tolist()):
            if tier != Tier.EMPTY:
                base = self.TOP + (lane_of[Tier(tier)] + 1) * self.LANE - 8
                self._bar(draw, self._x(window), self._x(window + 1), base, full, tier)
        for row in range(self.meta.rows):
            base = atlas_top + (row + 1) * self.band - 2
            if self.meta.sink_tokens:
                draw.rectangle((self.LEFT, base - self.band + 3, self.LEFT + 8, base), fill=p.sink)
            for window, tier in enumerate(tiers[row].tolist()):
                if tier == Tier.EMPTY:
                    continue
                tall = 0 if tier == Tier.EVICTED else round((self.band - 3) * BAR_HEIGHTS[list(p.tiers)[tier]])
                x0, x1 = self._x(window), max(self._x(window), self._x(window + 1) - 2)
                draw.rectangle((x0, base - tall, x1, base), fill=tint[tier])
        y = atlas_top + self.row * self.band
        draw.rectangle((self.LEFT - 3, y - 1, self.WIDTH - 10, y + self.band), outline=p.ink)
        draw.text((12, y - 4), f"row {self.row}", fill=p.ink, font=self.small)
        for move in moved if moved is not None else ():
            if move["move"] == (Tier.QUANT << 4 | Tier.FULL):
                x0, x1 = self._x(int(move["window"])) - 2, self._x(int(move["window"]) + 1)
                top = atlas_top + int(move["layer"]) * self.band
                draw.rectangle((x0, top - 1, x1, top + self.band), outline=p.ring, width=2)
                if move["layer"] == self.row:
                    draw.rectangle((x0, self.TOP + 6, x1, self.TOP + self.LANE - 6), outline=p.ring, width=2)
        return image
