/* QEvictView: the tier board in a page. Follows a live run over server-sent events, or plays a recorded trace.
 * Words come from `texts`; token text is untrusted and only ever becomes textContent. Needs tier_trace and
 * the painters before it; its parts come after it, in tier_frame and the like. */
(function (root) {
  "use strict";

  const { TIER, Trace, movesOf } = root.QEvictTrace;
  const COLORS = ["sink", "local", "full", "quant", "evicted", "paper", "panel", "line", "ink", "muted", "ring", "focus", "alarm"];
  const SPEEDS = [0.25, 0.5, 1, 2, 4];
  const BASE_INTERVAL = 900; // ms between two steps of a replay at speed 1
  const HIDDEN_CLOSE = 30000;
  const ICONS = {
    first: "M5 4h2.5v16H5zM20 4v16L9 12z",
    back: "M17 4v16L6 12z",
    play: "M6 4v16l13-8z",
    pause: "M6 4h4v16H6zM14 4h4v16h-4z",
    forward: "M7 4v16l11-8z",
    last: "M16.5 4H19v16h-2.5zM4 4v16l11-8z",
  };

  function el(tag, className, parent, attributes) {
    const node = document.createElement(tag);
    if (className) node.className = className;
    for (const name in attributes || {}) node.setAttribute(name, attributes[name]);
    if (parent) parent.appendChild(node);
    return node;
  }

  function icon(button, name) {
    const space = "http://www.w3.org/2000/svg";
    const svg = document.createElementNS(space, "svg");
    svg.setAttribute("viewBox", "0 0 24 24");
    svg.setAttribute("aria-hidden", "true");
    const path = document.createElementNS(space, "path");
    path.setAttribute("d", ICONS[name]);
    svg.appendChild(path);
    button.replaceChildren(svg);
  }

  function bytes(n) {
    const units = ["B", "kB", "MB", "GB", "TB"];
    let i = 0;
    for (; n >= 1000 && i < units.length - 1; i++) n /= 1000;
    return `${i && n < 99.95 ? n.toFixed(n < 9.995 ? 2 : 1) : Math.round(n)}\u00a0${units[i]}`;
  }

  const percent = (x, digits = 1) => `${(x * 100).toFixed(digits)}\u00a0%`;
  const setText = (node, text) => node.textContent !== text && (node.textContent = text);
  const kindOf = (from, to) =>
    to === TIER.EVICTED
      ? "evicted"
      : from === TIER.QUANT && to === TIER.FULL
        ? "promoted"
        : from === TIER.FULL && to === TIER.QUANT
          ? "demoted"
          : "aged";

  class QEvictView {
    constructor(host, options = {}) {
      this.host = host;
      this.options = options;
      this.texts = Object.assign({}, QEvictView.TEXTS, options.texts || {});
      this.trace = new Trace();
      this.index = -1;
      this.row = 0;
      this.liveHead = true;
      this.speed = 1;
      this.loop = null;
      this.stopAtPromotion = false;
      this.showRegret = false;
      this.cursor = null;
      this.zoom = null;
      this.moves = new Map();
      this.marks = [];
      this.memo = { key: "", cells: new Uint8Array(0) };
      this.dirty = new Set(["layout"]);
      this.motion = root.matchMedia("(prefers-reduced-motion: reduce)");
      this.scale = options.scale || (options.projector ? 1.35 : 1);
      this._off = [];
      this._build();
      this._listen();
      this._frame = this._frame.bind(this);
      this.setTheme(options.theme || "auto");
      QEvictView.active = QEvictView.active || this;
      this._invalidate("all");
    }

    // ---- public -------------------------------------------------------------------------------------------------

    /** Follows a run while it happens. The same run twice is the same view. */
    follow(baseUrl, sid) {
      const source = { base: String(baseUrl).replace(/\/$/, ""), sid: String(sid) };
      if (this.source && this.source.base === source.base && this.source.sid === source.sid) return;
      this._reset();
      this.source = source;
      this.message = this._t("view.waiting");
      this._open();
      this._invalidate("layout", "all");
    }

    /** Shows a recorded trace: NDJSON, one wire event a line. */
    load(ndjson) {
      this._reset();
      this.liveHead = false;
      try {
        this.trace.addLines(ndjson);
      } catch (error) {
        this.fail(error.message);
      }
      this._afterEvents();
      if (this.trace.steps.length) this.seek(0);
      this._invalidate("layout", "all");
      return this;
    }

    seek(i) {
      this.liveHead = false;
      this._go(i, false);
    }

    /** Says why a recorded run cannot be shown. */
    fail(why) {
      this._reset();
      this.failed = true;
      this.message = this._t("view.load_failed", { why });
      this._invalidate("layout", "all");
    }

    /** Goes to the step of routing event `id`, or the last one before it. */
    seekEvent(id) {
      const later = this.trace.steps.findIndex((step) => step.r > id);
      this.seek(later < 0 ? this.trace.steps.length - 1 : later - 1);
    }

    /** Shows the last step, and keeps following it while the run lives. */
    goLive() {
      this.pause();
      this.liveHead = true;
      this._go(this.trace.steps.length - 1, false);
    }

    step(by) {
      const next = this.index + by;
      this.liveHead = Boolean(this.source && !this.trace.end && by > 0 && next >= this.trace.steps.length - 1);
      this._go(next, true);
    }

    play(speed) {
      if (speed) this.setSpeed(speed);
      if (this.playing || !this.trace.steps.length) return;
      if (this.index >= this._bounds()[1]) this._go(this._bounds()[0], false);
      this.liveHead = false;
      this.playing = true;
      this._tick(BASE_INTERVAL / this.speed / 3);
      this._invalidate("transport");
    }

    pause() {
      clearTimeout(this._timer);
      this.playing = false;
      this._invalidate("transport");
    }

    setSpeed(speed) {
      this.speed = Math.min(4, Math.max(0.25, Number(speed) || 1));
      this.ui.speed.value = String(SPEEDS.reduce((a, b) => (Math.abs(b - this.speed) < Math.abs(a - this.speed) ? b : a)));
    }

    /** Chooses the row for good: the view no longer picks one by itself. */
    setRow(row) {
      this._rowChosen = true;
      this._showRow(row);
    }

    _showRow(row) {
      const rows = this.trace.meta ? this.trace.meta.rows : 1;
      const next = Math.min(rows - 1, Math.max(0, Math.round(row)));
      if (next === this.row) return;
      this.row = next;
      this._takeMoves(false);
      this._invalidate("all");
      this._emit("qe-row", { row: next });
      if (this.stream) this._watch();
    }

    /** Loops over steps [a, b]; nothing loops over all, null ends looping. */
    setLoop(range) {
      this.loop = range === null ? null : (range || []).slice().sort((a, b) => a - b);
      this._invalidate("transport");
    }

    /** "light", "dark" or "auto": then body.dark decides. */
    setTheme(theme) {
      this.theme = theme;
      const dark = theme === "dark" || (theme !== "light" && document.body.classList.contains("dark"));
      this.host.dataset.theme = dark ? "dark" : "light";
      const style = getComputedStyle(this.host);
      this.colors = {};
      for (const name of COLORS) this.colors[name] = style.getPropertyValue(`--qe-${name}`).trim() || "#888888";
      this._invalidate("all");
    }

    setScale(scale) {
      this.scale = Math.min(1.8, Math.max(0.8, scale));
      this._invalidate("layout", "all");
    }

    /** Projector mode: larger small print, a lower atlas. The scale is set apart. */
    setProjector(on) {
      this.options.projector = Boolean(on);
      this._invalidate("layout", "all");
    }

    setTexts(texts) {
      this.texts = Object.assign({}, QEvictView.TEXTS, texts || {});
      this.host.replaceChildren();
      this._build();
      this._textRow = null;
      this._invalidate("layout", "all");
    }

    destroy() {
      this._close();
      this.pause();
      cancelAnimationFrame(this._raf);
      clearTimeout(this._hiddenTimer);
      clearTimeout(this._liveTimer);
      for (const off of this._off) off();
      if (QEvictView.active === this) QEvictView.active = null;
      this.host.replaceChildren();
      this.host.classList.remove("qe");
      this.destroyed = true;
    }

    // ---- position -----------------------------------------------------------------------------------------------

    _bounds() {
      const last = this.trace.steps.length - 1;
      if (!this.loop || !this.loop.length) return [0, last];
      return [Math.min(this.loop[0], last), Math.min(this.loop[1], last)];
    }

    _go(i, animate) {
      const { trace } = this;
      const last = trace.steps.length - 1;
      if (last < 0) return;
      const next = Math.min(last, Math.max(0, i));
      const before = this.index;
      trace.seek(next);
      if (this.liveHead && next === last) trace.board.reach(trace.seqLen);
      this.index = next;
      if (next !== before || !this.moves.size) {
        this._backwards = before === next + 1;
        if (animate && !this.playing && !this.liveHead) this.duration = 650;
        this._takeMoves(animate && Math.abs(next - before) === 1 && before >= 0);
      }
      this._invalidate("all");
      if (next !== before) {
        const step = trace.steps[next];
        this._emit("qe-event", { index: next, event_id: step.r, seq_len: step.t });
      }
    }

    /** Moves of the row for the lanes, marks of all rows for the atlas. Backwards, the chips travel back. */
    _takeMoves(animate) {
      const { trace, row } = this;
      this.moves = new Map();
      this.marks = [];
      const back = animate && this._backwards;
      const step = trace.steps[this.index];
      if (!step) return;
      for (const move of trace.rowMoves(back ? this.index + 1 : this.index, row)) {
        const kind = kindOf(move.from, move.to);
        if (!back) this.moves.set(move.window, { from: move.from, to: move.to, kind });
        else this.moves.set(move.window, { from: move.to, to: move.from, kind: "aged" });
      }
      if (step.route && !back) {
        const moves = movesOf(step.route);
        for (let i = 0; i < moves.count; i++) {
          const kind = kindOf(moves.from[i], moves.to[i]);
          if (kind !== "aged") this.marks.push({ row: moves.row[i], window: moves.window[i], kind });
        }
      }
      this.started = animate && !this._reduced() ? performance.now() : -1e9;
    }

    _reduced() {
      const own = this.options.reducedMotion;
      return own === undefined || own === null ? this.motion.matches : own;
    }

    _tick(wait) {
      clearTimeout(this._timer);
      this._timer = setTimeout(() => {
        if (!this.playing) return;
        const [first, last] = this._bounds();
        const interval = BASE_INTERVAL / this.speed;
        if (this.index >= last || this.index < first) {
          if (!this.loop) {
            this.pause();
            this._emit("qe-end", { why: this.trace.end ? this.trace.end.why : "", summary: (this.trace.end || {}).summary });
            return;
          }
          this._go(first, false);
        } else {
          this.duration = Math.min(700, interval * 0.8);
          this._go(this.index + 1, true);
          if (this.stopAtPromotion && [...this.moves.values()].some((move) => move.kind === "promoted")) {
            this.pause();
            return;
          }
        }
        this._tick(interval);
      }, wait);
    }

    _emit(name, detail) {
      this.host.dispatchEvent(new CustomEvent(name, { detail, bubbles: true }));
    }
  }

  QEvictView.TEXTS = root.QEvictTexts || {};
  QEvictView.active = null;
  QEvictView.parts = { el, icon, setText, percent, bytes, kindOf, SPEEDS, HIDDEN_CLOSE };
  root.QEvictView = QEvictView;
})(window);
