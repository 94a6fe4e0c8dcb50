/* What QEvictView tells of one window: its text, where it has been, its scores. Fetched when somebody first points
 * at one; a file that plays offline has it from the start. Token text is untrusted: textContent only. */
(function (root) {
  "use strict";

  const { TIER } = root.QEvictTrace;
  const { NAMES } = root.QEvictDraw;
  const { setText, percent } = root.QEvictView.parts;

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

  Object.assign(root.QEvictView.prototype, {
    _walk(by) {
      if (!this.trace.board || !this.trace.board.count) return;
      const from = this.cursor === null ? (by > 0 ? -2 : this.trace.board.count) : this.cursor;
      const next = Math.min(this.trace.board.count - 1, Math.max(-1, from + by));
      if (this.zoom && (next < this.zoom[0] || next >= this.zoom[1])) {
        const half = (this.zoom[1] - this.zoom[0]) / 2;
        this._zoomTo([next - half, next + half]);
      }
      this._point(next, this.row, null);
      setText(this.ui.live, `${this.ui.tipTitle.textContent}. ${this.ui.tipText.textContent}. ${this.ui.tipTier.textContent}`);
    },

    _tip() {
      const { ui, trace, cursor, index } = this;
      const step = trace.steps[index];
      if (!step || cursor === null || cursor >= trace.board.count) {
        ui.tip.hidden = true;
        return;
      }
      const row = this._tipRow;
      ui.tip.hidden = false;
      const { meta, board } = trace;
      const sink = cursor < 0;
      const [a, b] = sink ? [0, meta.sink_tokens] : trace.span(cursor);
      const name = sink ? this._t("view.window_sink") : this._t("view.window", { w: cursor });
      const tier = sink ? TIER.SINK : board.at(row, cursor);
      setText(ui.tipTitle, `${name} · ${this._rowName(row)} · ${this._tierName(tier)}`);
      const text = sink ? trace.pieces.slice(0, b).join("") : trace.textOf(cursor);
      setText(ui.tipText, text);
      const past = sink ? [] : trace.history(row, cursor).filter((move) => move.index <= index);
      const path = past.map((move) => this._t("view.history_event", { tier: this._tierName(move.to), r: move.r }));
      if (!sink && tier === TIER.FULL && this._ghosts(row).includes(cursor)) path.push(this._t("view.shadow_note", { bits: meta.bits }));
      const history = path.length ? this._t("view.history", { path: [this._tierName(TIER.LOCAL), ...path.slice(-5)].join(" → ") }) : sink ? "" : this._t("view.history_none");
      setText(ui.tipTier, `${this._t("view.tokens", { a, b: Math.min(b, board.seqLen) - 1 })}. ${history}`);
      ui.tipCanvas.hidden = sink;
      let score = "";
      if (!sink) {
        const points = trace.scoreHistory(row, cursor);
        const width = Math.round(250 * Math.min(1.4, this.scale));
        this._size(ui.tipCanvas, width, 58);
        const last = trace.steps[trace.steps.length - 1].r;
        const begun = trace.steps.find((item) => item.t > a);
        story(ui.tipCanvas.getContext("2d"), {
          width, height: 58, points, events: last, now: step.r, colors: this.colors,
          history: trace.history(row, cursor), begun: begun ? Math.max(0, begun.r - 1) : 0,
        });
        score = this._t(points.length ? "view.score" : "view.score_none");
        const late = trace.late.get(step.r);
        const missed = late && late.regret.find((item) => item[0] === row && item[1] === cursor);
        if (missed) score = this._t("view.regret_note", { mass: percent(missed[2]) });
      }
      setText(ui.tipScore, score);
      this._placeTip();
    },

    _placeTip() {
      const { ui, host, cursor, axis } = this;
      const box = host.getBoundingClientRect();
      const tip = ui.tip.getBoundingClientRect();
      const lanes = ui.lanes.getBoundingClientRect();
      const at = this._tipEvent || { x: lanes.left + (cursor < 0 ? axis.left : axis.x(cursor)), y: lanes.bottom - 8 };
      const x = Math.min(box.width - tip.width - 4, Math.max(4, at.x - box.left + 14));
      const below = at.y - box.top + 18;
      const fits = at.y + 18 + tip.height < root.innerHeight;
      ui.tip.style.left = `${x}px`;
      ui.tip.style.top = `${fits ? below : Math.max(4, at.y - box.top - tip.height - 12)}px`;
    },
  });
})(window);
