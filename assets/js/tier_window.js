/* What QEvictView tells of one window, and the token text tinted by tier. Token text is untrusted: textContent only. */
(function (root) {
  "use strict";

  const { TIER } = root.QEvictTrace;
  const Draw = root.QEvictDraw;
  const { el, setText, percent } = root.QEvictView.parts;

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

    _point(window, row, event) {
      const known = window !== null && window !== undefined && this.trace.board && window < this.trace.board.count;
      const next = known ? window : null;
      const same = next === this.cursor && (row === undefined || row === this._tipRow);
      this.cursor = next;
      this._tipRow = row === null || row === undefined ? this.row : row;
      this._tipEvent = event ? { x: event.clientX, y: event.clientY } : null;
      if (!same) {
        this._invalidate("cursor");
        for (const node of this._lit || []) node.classList.remove("qe-lit");
        this._lit = next === null ? [] : (this._spans.get(next) || []).slice();
        for (const node of this._lit) node.classList.add("qe-lit");
      }
      if (next === null) this.ui.tip.hidden = true;
      else if (!same || this.ui.tip.hidden) this._tip();
      else this._placeTip();
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
        Draw.story(ui.tipCanvas.getContext("2d"), {
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

    _resetText() {
      const { ui } = this;
      this._spans = new Map();
      this._shown = 0;
      this._said = 0;
      this._nodes = [];
      this._textRow = null;
      this._tints = new Map();
      if (!ui || !ui.generated) return;
      ui.promptText.replaceChildren();
      ui.generated.replaceChildren();
    },

    /** Adds tokens that are new, hides those not yet said, tints windows that changed tier. */
    _text() {
      const { ui, trace } = this;
      const { meta, board } = trace;
      ui.textBox.hidden = ui.prompt.hidden = !meta || !trace.pieces.length;
      if (!meta || !board) return;
      setText(ui.promptName, this._t("view.prompt", { n: meta.prompt_tokens }));
      setText(ui.textNote, this._t("view.text_note", { row: this._rowName(this.row) }));
      this._append();
      const length = trace.steps.length ? board.seqLen : trace.seqLen;
      const said = Math.max(0, length - meta.prompt_tokens);
      if (said !== this._said) {
        for (let i = Math.min(said, this._said); i < Math.max(said, this._said); i++) {
          if (this._nodes[i]) this._nodes[i].hidden = i >= said;
        }
        this._said = said;
        if (this.liveHead || this.playing) ui.generated.scrollTop = 1e7;
      }
      if (this._textRow !== this.row) {
        this._textRow = this.row;
        this._tints.clear();
      }
      for (const [window, nodes] of this._spans) {
        const tier = window < 0 ? TIER.SINK : window < board.count ? board.at(this.row, window) : TIER.LOCAL;
        const tint = `${tier}:${nodes.length}`;
        if (this._tints.get(window) === tint) continue;
        this._tints.set(window, tint);
        for (const node of nodes) node.className = `qe-tok qe-t-${Draw.NAMES[tier] || "local"}`;
      }
    },

    _append() {
      const { ui, trace } = this;
      const { sink_tokens: sink, window_size: size, prompt_tokens: prompt } = trace.meta;
      const pieces = trace.pieces;
      if (this._shown >= pieces.length) return;
      const said = document.createDocumentFragment();
      const asked = document.createDocumentFragment();
      while (this._shown < pieces.length) {
        const p = this._shown;
        const window = p < sink ? -1 : Math.floor((p - sink) / size);
        let end = p + 1;
        if (p < prompt) end = Math.min(prompt, window < 0 ? sink : sink + (window + 1) * size, pieces.length);
        const node = el("span", "qe-tok", p < prompt ? asked : said, { "data-w": String(window), "data-p": String(p) });
        node.textContent = pieces.slice(p, end).join("");
        if (p >= prompt) {
          node.hidden = p - prompt >= this._said;
          this._nodes.push(node);
        }
        const list = this._spans.get(window);
        if (list) list.push(node);
        else this._spans.set(window, [node]);
        this._shown = end;
      }
      ui.promptText.appendChild(asked);
      ui.generated.appendChild(said);
    },
  });
})(window);
