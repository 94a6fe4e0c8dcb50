/* Painter of the tier board's lanes, and what all its painters share: the x axis, bars, signs.
 * Height says bytes, hue says precision, x says time. Painters get numbers and colours, and keep no state of a run. */
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

  const parts = { ease, cross, promptLine, column };
  root.QEvictDraw = { Axis, NAMES, OVERHANG, QUANT_HEIGHT, THIN, lanes, laneOf, parts };
})(window);
