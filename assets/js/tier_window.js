/* The window that QEvictView points at, and the token text tinted by tier. Token text is untrusted: textContent only. */
(function (root) {
  "use strict";

  const { TIER } = root.QEvictTrace;
  const Draw = root.QEvictDraw;
  const { el, setText } = root.QEvictView.parts;

  Object.assign(root.QEvictView.prototype, {
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
