/* Painters of the tier board's atlas: all rows, what lies above them, their names and the token axis. */
(function (root) {
  "use strict";

  const { TIER } = root.QEvictTrace;
  const { NAMES, OVERHANG, QUANT_HEIGHT } = root.QEvictDraw;
  const { ease, cross, promptLine, column } = root.QEvictDraw.parts;

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
        if (heights[list[i + 2]] > heights[tier]) { // a lower bar does not cover what stood there
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

  Object.assign(root.QEvictDraw, { atlas, overlay, frame });
})(window);
