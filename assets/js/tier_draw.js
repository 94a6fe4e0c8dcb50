/* Painters of the tier board: lanes, atlas, marks, curves, on 2D canvases.
 * Height says bytes, hue says precision, x says time. They get numbers and colours, and keep no state of a run. */
(function (root) {
  "use strict";

  const { TIER } = root.QEvictTrace;
  const NAMES = ["sink", "local", "full", "quant", "evicted"];
  const QUANT_HEIGHT = 0.42;
  const OVERHANG = 8; // px that marks may stand out above and below the atlas
  const THIN = 3; // narrower windows are summed into columns

  /** The shared x axis: a sink cell, then windows z0..z1 of `total`. */
  class Axis {
    constructor(left, right, meta, total, z0, z1) {
      this.left = left;
      this.right = right;
      this.total = total;
      this.z0 = z0;
      this.z1 = z1;
      const tokens = meta.sink_tokens / meta.window_size;
      const span = right - left;
      this.sinkWidth = meta.sink_tokens ? Math.round(Math.min(22, Math.max(4, (span / (z1 - z0 + tokens)) * tokens))) : 0;
      this.start = left + (this.sinkWidth ? this.sinkWidth + 4 : 0);
      this.cell = (right - this.start) / (z1 - z0);
      this.thin = this.cell < THIN;
      this.perColumn = this.thin ? Math.ceil(THIN / this.cell) : 1;
      this.gap = this.thin ? 0 : this.cell >= 14 ? 3 : this.cell >= 6 ? 2 : 1;
      this.meta = meta;
    }

    x(window) {
      return Math.round(this.start + (window - this.z0) * this.cell);
    }

    width(window) {
      return Math.max(1, this.x(window + 1) - this.x(window) - this.gap);
    }

    token(position) {
      return this.start + ((position - this.meta.sink_tokens) / this.meta.window_size - this.z0) * this.cell;
    }

    /** Window under x; -1 is the sink, null is nothing. */
    pick(x, count) {
      if (x < this.left || x > this.right) return null;
      if (x < this.start) return this.sinkWidth ? -1 : null;
      const window = Math.floor(this.z0 + (x - this.start) / this.cell);
      return window < count ? window : null;
    }

    range(count) {
      return [Math.max(0, Math.floor(this.z0)), Math.min(count, Math.ceil(this.z1))];
    }
  }

  const ease = (p) => (p < 0.5 ? 4 * p * p * p : 1 - (-2 * p + 2) ** 3 / 2);
  const laneOf = (tier) => (tier <= TIER.FULL ? 0 : tier === TIER.QUANT ? 1 : 2);

  function laneShape(tier, laneHeight) {
    const full = Math.round(laneHeight * 0.7);
    const height = tier === TIER.QUANT ? full * QUANT_HEIGHT : tier === TIER.EVICTED ? full * 0.3 : full;
    const base = (laneOf(tier) + 1) * laneHeight - Math.round(laneHeight * 0.14);
    return { base, height: Math.round(height) };
  }

  function bar(ctx, x, width, base, height, tier, color) {
    if (tier === TIER.EVICTED) {
      if (width < 3) {
        ctx.fillStyle = color;
        ctx.fillRect(x, base - height, 1, height);
        return;
      }
      ctx.strokeStyle = color;
      ctx.lineWidth = 1;
      ctx.strokeRect(x + 0.5, base - height + 0.5, width - 1, height - 1);
      return;
    }
    ctx.fillStyle = color;
    if (tier === TIER.QUANT && height >= 8) {
      const half = Math.floor((height - 2) / 2);
      ctx.fillRect(x, base - height, width, half);
      ctx.fillRect(x, base - half, width, half);
    } else {
      ctx.fillRect(x, base - height, width, height);
    }
  }

  function cross(ctx, x, y, size) {
    ctx.beginPath();
    ctx.moveTo(x - size, y - size);
    ctx.lineTo(x + size, y + size);
    ctx.moveTo(x + size, y - size);
    ctx.lineTo(x - size, y + size);
    ctx.stroke();
  }

  function promptLine(ctx, axis, colors, promptTokens, height) {
    const x = Math.round(axis.token(promptTokens)) - 0.5;
    if (x <= axis.start || x >= axis.right) return;
    ctx.save();
    ctx.setLineDash([3, 3]);
    ctx.strokeStyle = colors.muted;
    ctx.globalAlpha = 0.6;
    ctx.lineWidth = 1;
    ctx.beginPath();
    ctx.moveTo(x, 0);
    ctx.lineTo(x, height);
    ctx.stroke();
    ctx.restore();
  }

  /** Three lanes of one row. `moves`: Map window -> {from, to, kind}; `p` how far they have come, 0..1. */
  function lanes(ctx, s) {
    const { axis, board, row, colors, laneHeight, width, moves, p, ghosts } = s;
    const tint = NAMES.map((name) => colors[name]);
    ctx.clearRect(0, 0, width, laneHeight * 3);
    for (let lane = 0; lane < 3; lane++) {
      ctx.fillStyle = lane === 1 ? colors.panel : colors.paper;
      ctx.fillRect(0, lane * laneHeight, width, laneHeight);
      ctx.fillStyle = tint[lane + 2];
      ctx.fillRect(0, lane * laneHeight + 2, 5, laneHeight - 4);
    }
    ctx.fillStyle = colors.line;
    for (const y of [0, laneHeight * 3 - 1]) ctx.fillRect(0, y, width, 1);
    if (axis.sinkWidth && board.seqLen) {
      const shape = laneShape(TIER.SINK, laneHeight);
      bar(ctx, axis.left, axis.sinkWidth, shape.base, shape.height, TIER.SINK, tint[0]);
    }
    promptLine(ctx, axis, colors, s.promptTokens, laneHeight * 3);
    const [first, last] = axis.range(board.count);
    if (axis.thin) thinLanes(ctx, s, tint, first, last);
    else {
      for (let tier = TIER.SINK; tier <= TIER.EVICTED; tier++) {
        const shape = laneShape(tier, laneHeight);
        for (let w = first; w < last; w++) {
          if (board.at(row, w) === tier && !moves.has(w)) {
            bar(ctx, axis.x(w), axis.width(w), shape.base, shape.height, tier, tint[tier]);
          }
        }
      }
      const shape = laneShape(TIER.QUANT, laneHeight);
      ctx.save();
      ctx.setLineDash([2, 2]);
      ctx.strokeStyle = tint[TIER.QUANT];
      ctx.lineWidth = 1;
      for (const w of ghosts) {
        if (w < first || w >= last) continue;
        const wide = Math.max(2, axis.width(w) - 1);
        ctx.strokeRect(axis.x(w) + 0.5, shape.base - shape.height + 0.5, wide, shape.height - 1);
      }
      ctx.restore();
    }
    if (s.cursor !== null && s.cursor !== undefined) column(ctx, axis, colors, s.cursor, laneHeight * 3);
    for (const story of ["aged", "evicted", "demoted", "promoted"]) {
      for (const [w, move] of moves) if (move.kind === story && w >= first && w < last) chip(ctx, s, tint, w, move, p);
    }
  }

  function thinLanes(ctx, s, tint, first, last) {
    const { axis, board, row, laneHeight, moves } = s;
    const step = axis.perColumn;
    for (let w = first - (first % step); w < last; w += step) {
      const counts = [0, 0, 0, 0, 0, 0];
      const end = Math.min(last, w + step);
      for (let i = Math.max(first, w); i < end; i++) if (!moves.has(i)) counts[board.at(row, i)]++;
      const x = axis.x(w);
      const wide = Math.max(1, axis.x(w + step) - x);
      let lift = 0;
      for (const tier of [TIER.LOCAL, TIER.FULL, TIER.QUANT, TIER.EVICTED]) {
        if (!counts[tier]) continue;
        const shape = laneShape(tier, laneHeight);
        const height = Math.max(1, Math.round((shape.height * counts[tier]) / step));
        ctx.fillStyle = tint[tier];
        ctx.globalAlpha = tier === TIER.EVICTED ? 0.55 : 1;
        ctx.fillRect(x, shape.base - height - (tier === TIER.FULL ? lift : 0), wide, height);
        if (tier === TIER.LOCAL) lift = height;
      }
      ctx.globalAlpha = 1;
    }
  }

  /** One window on its way. It keeps the colour of where it comes from until half-way. */
  function chip(ctx, s, tint, w, move, p) {
    const { axis, laneHeight, colors } = s;
    const from = laneShape(move.from, laneHeight);
    const to = laneShape(move.to, laneHeight);
    const t = ease(p);
    const base = Math.round(from.base + (to.base - from.base) * t);
    const height = Math.round(from.height + (to.height - from.height) * t);
    const tier = t < 0.5 ? move.from : move.to;
    const moving = p < 1;
    const promoted = move.kind === "promoted";
    const grow = promoted ? 2 : moving && !axis.thin ? 1 : 0;
    const x = axis.x(w) - grow;
    const width = Math.max(promoted ? 5 : 3, axis.width(w) + 2 * grow);
    if (moving && laneOf(move.from) !== laneOf(move.to)) {
      ctx.globalAlpha = 0.16 * (1 - t);
      ctx.fillStyle = tint[move.from];
      ctx.fillRect(x, Math.min(from.base, base) - height, width, Math.abs(base - from.base) + height);
      ctx.globalAlpha = 1;
    }
    if (moving && tier === TIER.EVICTED) {
      ctx.fillStyle = colors.paper;
      ctx.fillRect(x, base - height, width, height);
    }
    bar(ctx, x, width, base, height, tier, tint[tier]);
    if (promoted) {
      ctx.strokeStyle = colors.ring;
      ctx.lineWidth = 2;
      ctx.strokeRect(x - 1, base - height - 1, width + 2, height + 2);
    } else if (move.kind === "demoted") {
      ctx.strokeStyle = tint[TIER.QUANT];
      ctx.lineWidth = 1.5;
      ctx.strokeRect(x - 1.5, base - height - 1.5, width + 3, height + 3);
    } else if (move.kind === "evicted" && s.marks) {
      ctx.strokeStyle = tint[TIER.EVICTED];
      ctx.lineWidth = 1.5;
      cross(ctx, x + width / 2, to.base - to.height - 7, 3);
    }
  }

  function column(ctx, axis, colors, window, height) {
    const x = window < 0 ? axis.left : axis.x(window);
    const width = window < 0 ? axis.sinkWidth : Math.max(1, axis.x(window + 1) - x - axis.gap);
    ctx.globalAlpha = 0.16;
    ctx.fillStyle = colors.focus;
    ctx.fillRect(x - 1, 0, width + 2, height);
    ctx.globalAlpha = 0.9;
    ctx.fillRect(x - 2, 0, 1, height);
    ctx.fillRect(x + width + 1, 0, 1, height);
    ctx.globalAlpha = 1;
  }

  /** All rows. Keeps what it drew in `memo`, so that the next call paints only what differs. Returns cells painted. */
  function atlas(ctx, s, memo) {
    const { axis, board, group, bandHeight, height, width, colors } = s;
    const bands = Math.ceil(board.rows / group);
    const [first, last] = axis.range(board.cap);
    const fresh = memo.key !== s.key || memo.cells.length !== board.cells.length;
    if (fresh) {
      memo.key = s.key;
      memo.cells = new Uint8Array(board.cells.length).fill(TIER.EMPTY);
      ctx.clearRect(0, 0, width, height);
      if (axis.sinkWidth && board.seqLen) {
        ctx.fillStyle = colors.sink;
        for (let b = 0; b < bands; b++) ctx.fillRect(axis.left, b * bandHeight + 1, axis.sinkWidth, bandHeight - 2);
      }
    }
    const blocks = group > 1 || axis.thin;
    const step = axis.perColumn;
    const stale = new Set();
    const paint = [[], [], [], [], [], []];
    let changed = 0;
    for (let r = 0; r < board.rows; r++) {
      const base = r * board.cap;
      for (let w = first; w < last; w++) {
        const now = board.cells[base + w];
        if (now === memo.cells[base + w]) continue;
        changed++;
        if (blocks) stale.add(Math.floor(r / group) * 65536 + Math.floor(w / step));
        else paint[now].push(r, w, memo.cells[base + w]);
      }
    }
    memo.cells.set(board.cells);
    if (blocks) for (const id of stale) block(ctx, s, Math.floor(id / 65536), (id % 65536) * step);
    else cells(ctx, s, paint);
    return changed;
  }

  function cells(ctx, s, paint) {
    const { axis, bandHeight, colors } = s;
    const full = bandHeight - 2;
    const heights = [full, full, full, Math.max(2, Math.round(full * QUANT_HEIGHT)), bandHeight < 8 ? 1 : 2, 0];
    for (let tier = 0; tier < paint.length; tier++) {
      const list = paint[tier];
      for (let i = 0; i < list.length; i += 3) {
        if (list[i + 2] !== TIER.EMPTY) {
          ctx.clearRect(axis.x(list[i + 1]), list[i] * bandHeight, axis.width(list[i + 1]), bandHeight);
        }
      }
      if (tier === TIER.EMPTY) continue;
      ctx.fillStyle = colors[NAMES[tier]];
      for (let i = 0; i < list.length; i += 3) {
        const h = heights[tier];
        ctx.fillRect(axis.x(list[i + 1]), (list[i] + 1) * bandHeight - 1 - h, axis.width(list[i + 1]), h);
      }
    }
  }

  /** Several rows or windows in one bar: stacked by tier, as high as their mean bytes. */
  function block(ctx, s, band, w) {
    const { axis, board, group, bandHeight, colors } = s;
    const counts = [0, 0, 0, 0, 0, 0];
    const lastRow = Math.min(board.rows, (band + 1) * group);
    const lastWindow = Math.min(board.cap, w + axis.perColumn);
    for (let r = band * group; r < lastRow; r++) for (let i = w; i < lastWindow; i++) counts[board.at(r, i)]++;
    const total = (lastRow - band * group) * (lastWindow - w);
    const x = Math.max(axis.start, axis.x(w));
    const wide = Math.max(1, Math.min(axis.right, axis.x(w + axis.perColumn)) - x - axis.gap);
    ctx.clearRect(x, band * bandHeight, wide, bandHeight);
    let y = (band + 1) * bandHeight - 1;
    if (counts[TIER.EVICTED]) {
      ctx.fillStyle = colors.evicted;
      ctx.globalAlpha = 0.35 + (0.65 * counts[TIER.EVICTED]) / total;
      ctx.fillRect(x, y - 1, wide, 1);
      ctx.globalAlpha = 1;
    }
    for (const tier of [TIER.QUANT, TIER.FULL, TIER.LOCAL]) {
      if (!counts[tier]) continue;
      const share = (counts[tier] / total) * (tier === TIER.QUANT ? QUANT_HEIGHT : 1);
      const h = Math.max(1, share * (bandHeight - 2));
      ctx.fillStyle = colors[NAMES[tier]];
      ctx.fillRect(x, y - h, wide, h);
      y -= h;
    }
  }

  /** What lies above the atlas: chosen row, cursor, the marks of this event, regret. */
  function overlay(ctx, s) {
    const { axis, group, bandHeight, height, width, colors, marks, p, row, cursor } = s;
    ctx.clearRect(0, 0, width, height + 2 * OVERHANG);
    ctx.save();
    ctx.translate(0, OVERHANG);
    promptLine(ctx, axis, colors, s.promptTokens, height);
    if (cursor !== null && cursor !== undefined) column(ctx, axis, colors, cursor, height);
    const [first, last] = axis.range(65536);
    const place = (mark) => {
      const x = axis.x(mark.window);
      return [x, Math.floor(mark.row / group) * bandHeight, Math.max(3, axis.width(mark.window))];
    };
    const crowded = axis.thin && marks.length > 300; // then only the promotions are marked, and small
    const fade = s.reduced ? 0.8 : Math.max(0.45, 1 - p * 0.55);
    ctx.strokeStyle = colors.evicted;
    ctx.lineWidth = 1.25;
    ctx.globalAlpha = fade;
    for (const mark of marks) {
      if (crowded || mark.kind !== "evicted" || mark.window < first || mark.window >= last) continue;
      const [x, y, w] = place(mark);
      cross(ctx, x + w / 2, y + bandHeight / 2 - 1, Math.min(3, bandHeight / 3));
    }
    ctx.globalAlpha = 1;
    ctx.strokeStyle = colors.quant;
    ctx.lineWidth = 1.5;
    for (const mark of marks) {
      if (crowded || mark.kind !== "demoted" || mark.window < first || mark.window >= last) continue;
      const [x, y, w] = place(mark);
      ctx.strokeRect(x - 1.5, y + 0.5, w + 3, bandHeight - 1);
    }
    for (const mark of marks) {
      if (mark.kind !== "promoted" || mark.window < first || mark.window >= last) continue;
      const [x, y, w] = place(mark);
      const swell = crowded || s.reduced ? 0 : 5 * (1 - ease(Math.min(1, p)));
      ctx.fillStyle = colors.full;
      if (crowded) {
        ctx.fillRect(x, y + 1, w, bandHeight - 2);
        continue;
      }
      ctx.fillRect(x - 1, y, w + 2, bandHeight);
      ctx.strokeStyle = colors.ring;
      ctx.lineWidth = 2;
      ctx.strokeRect(x - 2 - swell, y - 1 - swell, w + 4 + 2 * swell, bandHeight + 2 + 2 * swell);
    }
    ctx.fillStyle = colors.alarm;
    for (const [r, w] of s.regret || []) {
      if (w < first || w >= last) continue;
      const [x, y, wide] = place({ row: r, window: w });
      ctx.beginPath();
      ctx.moveTo(x + wide / 2, y + bandHeight);
      ctx.lineTo(x + wide / 2 - 5, y);
      ctx.lineTo(x + wide / 2 + 5, y);
      ctx.fill();
    }
    ctx.strokeStyle = colors.ink;
    ctx.lineWidth = 1.5;
    const y = Math.floor(row / group) * bandHeight;
    ctx.strokeRect(axis.left - 3, y - 0.5, axis.right - axis.left + 5, bandHeight + 1);
    ctx.restore();
  }

  /** Row names in the gutter and token numbers below the atlas. */
  function frame(ctx, s) {
    const { axis, board, group, bandHeight, height, width, colors, row, font, rowName } = s;
    ctx.clearRect(0, 0, width, height + s.axisHeight);
    ctx.font = `${font}px system-ui, sans-serif`;
    ctx.textBaseline = "middle";
    ctx.textAlign = "right";
    const chosen = Math.floor(row / group);
    const bands = Math.ceil(board.rows / group);
    const every = [1, 2, 5, 10, 20, 50].find((n) => n * bandHeight >= font * 1.3) || 100;
    for (let b = 0; b < bands; b++) {
      const near = Math.abs(b - chosen) < every;
      if (b !== chosen && (near || b % every)) continue;
      ctx.fillStyle = b === chosen ? colors.ink : colors.muted;
      ctx.font = `${b === chosen ? "700 " : ""}${font}px system-ui, sans-serif`;
      ctx.fillText((b === chosen ? "▸ " : "") + rowName(b === chosen ? row : b * group), axis.left - 9, Math.max(font * 0.55, (b + 0.5) * bandHeight + 1));
    }
    ctx.textAlign = "center";
    ctx.fillStyle = colors.muted;
    ctx.font = `${font}px system-ui, sans-serif`;
    const perPixel = axis.meta.window_size / axis.cell;
    const step = niceStep(perPixel * font * 7);
    const y = height + s.axisHeight / 2 + 2;
    const prompt = axis.token(s.promptTokens);
    const half = prompt > axis.start + 60 && prompt < axis.right - 60 ? ctx.measureText(s.promptName).width / 2 + 4 : 0;
    const startToken = axis.meta.sink_tokens + axis.z0 * axis.meta.window_size;
    for (let t = Math.ceil(startToken / step) * step; ; t += step) {
      const x = t === 0 && axis.z0 === 0 ? axis.left : axis.token(t);
      if (x > axis.right - font) break;
      ctx.fillRect(Math.round(x), height + 1, 1, 4);
      if (half && Math.abs(x - prompt) < half + font * 1.6) continue;
      ctx.fillText(String(t), Math.max(x, axis.left + font / 2), y);
    }
    ctx.textAlign = "right";
    ctx.fillText(s.axisName, axis.left - 9, y);
    if (half) {
      ctx.textAlign = "center";
      ctx.fillStyle = colors.ink;
      ctx.fillText(s.promptName, prompt, y);
    }
  }

  function niceStep(rough) {
    let step = 8;
    while (step < rough) step *= 2;
    return step;
  }

  function hatch(ctx, x, width, height, color) {
    ctx.save();
    ctx.beginPath();
    ctx.rect(x, 0, width, height);
    ctx.clip();
    ctx.strokeStyle = color;
    ctx.lineWidth = 1;
    ctx.globalAlpha = 0.55;
    ctx.beginPath();
    for (let at = x - height; at < x + width; at += 6) {
      ctx.moveTo(at, height);
      ctx.lineTo(at + height, 0);
    }
    ctx.stroke();
    ctx.restore();
  }

  /** A curve over events. `points`: [{i, v}]; `under`: a second, dashed one; hatched from `pending` to `now`. */
  function curve(ctx, s) {
    const { width, height, points, under, count, now, pending, color, colors } = s;
    ctx.clearRect(0, 0, width, height);
    const pad = 4;
    const x = (i) => pad + (i / Math.max(1, count)) * (width - 2 * pad);
    const top = s.top || 1;
    const y = (v) => height - pad - (Math.min(v, top) / top) * (height - 2 * pad - 2);
    ctx.fillStyle = colors.line;
    ctx.fillRect(0, height - 1, width, 1);
    if (pending !== null && now > pending) hatch(ctx, x(pending), Math.max(2, x(now) - x(pending)), height - 1, colors.muted);
    const trace = (list, dash, widthOfLine, until) => {
      ctx.setLineDash(dash);
      ctx.lineWidth = widthOfLine;
      ctx.lineJoin = "round";
      ctx.beginPath();
      let started = false;
      for (const point of list) {
        if (point.v === null || (until ? point.i > now : point.i < now)) continue;
        if (started) ctx.lineTo(x(point.i), y(point.v));
        else ctx.moveTo(x(point.i), y(point.v));
        started = true;
      }
      ctx.stroke();
      ctx.setLineDash([]);
    };
    ctx.strokeStyle = color;
    if (under) trace(under, [3, 3], 1.25, true);
    trace(points, [], 2.25, true);
    ctx.globalAlpha = 0.25;
    trace(points, [], 2.25, false);
    ctx.globalAlpha = 1;
    ctx.fillStyle = colors.muted;
    ctx.fillRect(Math.round(x(now)), 0, 1, height - 1);
    const shown = s.shown;
    if (shown) {
      ctx.fillStyle = color;
      ctx.beginPath();
      ctx.arc(x(shown.i), y(shown.v), 3.5, 0, 7);
      ctx.fill();
    }
  }

  /** Tier strip and score line of one window over events. */
  function story(ctx, s) {
    const { width, height, history, points, events, now, colors } = s;
    ctx.clearRect(0, 0, width, height);
    const x = (r) => 2 + (r / Math.max(1, events)) * (width - 4);
    const strip = 8;
    let tier = TIER.LOCAL;
    let from = s.begun;
    const fill = (until) => {
      ctx.fillStyle = colors[NAMES[tier]];
      const h = tier === TIER.QUANT ? strip * 0.5 : tier === TIER.EVICTED ? 2 : strip;
      ctx.fillRect(x(from), height - h, Math.max(1, x(until) - x(from)), h);
    };
    for (const move of history) {
      fill(move.r);
      tier = move.to;
      from = move.r;
    }
    fill(events);
    const room = height - strip - 6;
    if (points.length) {
      const logs = points.map((point) => Math.log10(point.score));
      const low = Math.min(...logs) - 0.05;
      const high = Math.max(...logs) + 0.05;
      const y = (v) => 3 + room - ((v - low) / (high - low)) * room;
      ctx.strokeStyle = ctx.fillStyle = colors.ink;
      ctx.lineWidth = 1.5;
      ctx.beginPath();
      points.forEach((point, i) => ctx[i ? "lineTo" : "moveTo"](x(point.r), y(logs[i])));
      ctx.stroke();
      for (let i = 0; i < points.length; i++) ctx.fillRect(x(points[i].r) - 1.5, y(logs[i]) - 1.5, 3, 3);
    }
    ctx.fillStyle = colors.muted;
    ctx.fillRect(Math.round(x(now)), 0, 1, height);
  }

  root.QEvictDraw = { Axis, NAMES, OVERHANG, THIN, lanes, atlas, overlay, frame, curve, story, laneOf };
})(window);
