/* What lessons ask of the tier board: marks on windows, frames around its parts, guesses, and a state that comes back.
 * Loaded with the first lesson, after the board's own scripts. Knows windows and tiers; knows no lesson. */
(function (root) {
  "use strict";

  const { TIER, Trace } = root.QEvictTrace;
  const Draw = root.QEvictDraw;
  const QEvictView = root.QEvictView;
  const { el, setText } = QEvictView.parts;
  const board = QEvictView.prototype;
  const drawLanes = board._drawLanes;
  const LANES = ["full", "quant", "evicted"];
  const GAP = 23; // px between the middles of two badges side by side
  const WIDE = 40; // the same, where they say what was guessed

  const copy = (list) => (list ? list.slice() : null);

  Object.assign(board, {
    /** Everything that `restore` needs to bring this very view back. */
    snapshot() {
      const { trace, index, row, speed, stopAtPromotion, showRegret, cursor, lesson, message } = this;
      const scroll = root.scrollY;
      const chosen = Boolean(this._rowChosen);
      return { trace, index, row, chosen, speed, stopAtPromotion, showRegret, cursor, lesson, message, scroll, loop: copy(this.loop), zoom: copy(this.zoom) };
    },

    restore(state) {
      this.unhighlight();
      this.showTrace(state.trace);
      this._rowChosen = state.chosen;
      this.row = state.row;
      if (state.index >= 0) this.seek(state.index);
      this.index = state.index;
      Object.assign(this, { stopAtPromotion: state.stopAtPromotion, showRegret: state.showRegret, message: state.message });
      this.setSpeed(state.speed);
      this.setLoop(state.loop);
      this.zoom = copy(state.zoom);
      this._point(state.cursor);
      this._takeMoves(false);
      if (state.lesson) this.highlight(state.lesson.marks, state.lesson.parts);
      root.scrollTo({ top: state.scroll, behavior: "instant" });
      this._invalidate("layout", "all");
    },

    /** Shows a trace that is in memory already; at none of its steps yet. */
    showTrace(trace) {
      this.pause();
      if (this.trace === trace) return;
      this._reset();
      this.liveHead = false;
      this.trace = trace;
      this._afterEvents();
      this._invalidate("layout", "all");
    },

    /** Marks windows of the shown row ([{window, label}]) and frames parts of the board. */
    highlight(marks, parts) {
      this.unhighlight();
      this.lesson = { marks: marks || [], parts: parts || [], guesses: [], answers: null };
      this.host.classList.toggle("qe-marked", this.lesson.marks.some((mark) => mark.label));
      this._invalidate("layout", "all");
      this.lesson.unseen = this.lesson.parts.length > 0;
    },

    /** Brings the first framed part into view, once all is drawn and its place is known. */
    _showFramed() {
      const { lesson, ui } = this;
      lesson.unseen = false;
      const nodes = lesson.parts.map((part) => this._part(part)).filter((node) => node && node.offsetParent);
      if (!nodes.length) return;
      const { top, bottom } = nodes[0].getBoundingClientRect();
      const last = ui.transport.getBoundingClientRect().top; // it covers what lies under it
      const down = bottom > last ? Math.min(bottom - last + 8, top - 8) : Math.min(0, top - 8);
      if (down) root.scrollBy({ top: down, behavior: "instant" });
    },

    /** What was guessed, by mark: "full", "quant", "evicted" or nothing. */
    guess(guesses) {
      if (!this.lesson) return;
      this.lesson.guesses = guesses.slice();
      this._invalidate("board");
    },

    /** Compares the guesses with what happened, and says so at the marks. */
    reveal(answers) {
      if (!this.lesson) return;
      this.lesson.answers = answers.slice();
      this._invalidate("board");
    },

    unhighlight() {
      for (const node of this.host.querySelectorAll(".qe-framed")) node.classList.remove("qe-framed");
      for (const node of this.host.querySelectorAll(".qe-marks")) node.remove();
      this.host.classList.remove("qe-marked");
      this.lesson = null;
    },

    _drawLanes(p) {
      drawLanes.call(this, p);
      if (this.lesson) this._placeLesson(p);
    },

    _placeLesson(p) {
      const { ui, lesson } = this;
      for (const part of lesson.parts) {
        const node = this._part(part);
        if (node) node.classList.add("qe-framed");
      }
      let box = ui.lanes.querySelector(".qe-marks");
      if (!box) {
        box = el("div", "qe-marks", ui.lanes, { "aria-hidden": "true" });
        el("div", "qe-mark-row", box);
        for (const part of lesson.parts) if (LANES.includes(part)) el("div", `qe-mark-lane qe-mark-${part}`, box);
      }
      LANES.forEach((part, lane) => {
        const frame = box.querySelector(`.qe-mark-${part}`);
        if (frame) Object.assign(frame.style, { top: `${lane * this.laneHeight}px`, height: `${this.laneHeight}px` });
      });
      this._placeMarks(box.firstChild, p);
    },

    _placeMarks(parent, p) {
      const { lesson, axis, trace } = this;
      let before = -1e9; // middle of the badge to the left
      const order = lesson.marks.map((_, i) => i).sort((a, b) => lesson.marks[a].window - lesson.marks[b].window);
      for (const i of order) {
        const mark = lesson.marks[i];
        const node = parent.querySelector(`[data-mark="${i}"]`) || this._badge(parent, i, mark.label);
        const begun = mark.window < trace.board.count && mark.window >= axis.z0 && mark.window < axis.z1;
        node.hidden = !begun;
        if (!begun) continue;
        const move = this.moves.get(mark.window);
        const tier = move && p < 0.5 ? move.from : trace.board.at(this.row, mark.window);
        const x = axis.x(mark.window) + axis.width(mark.window) / 2;
        const { top, height } = this._barOf(tier);
        before = Math.max(x, before + (lesson.guesses.some(Boolean) ? WIDE : GAP) * this.scale);
        node.style.left = `${x}px`;
        node.style.top = `${top}px`;
        node.style.setProperty("--qe-bar-width", `${axis.width(mark.window) + 8}px`);
        node.style.setProperty("--qe-bar-height", `${height + 8}px`);
        node.style.setProperty("--qe-shift", `${before - x}px`);
        this._tellBadge(node, mark.label, lesson.guesses[i], lesson.answers && lesson.answers[i]);
      }
    },

    _badge(parent, i, label) {
      const node = el("div", `qe-mark${label ? "" : " qe-mark-plain"}`, parent, { "data-mark": String(i) });
      el("b", "", node);
      return node;
    },

    _tellBadge(node, label, guess, answer) {
      const known = Boolean(answer && guess);
      const sign = known ? (answer === guess ? " ✓" : " ✗") : guess ? ` ${{ full: "F", quant: "Q", evicted: "E" }[guess]}` : "";
      setText(node.firstChild, label ? label + sign : "");
      node.classList.toggle("qe-mark-right", known && answer === guess);
      node.classList.toggle("qe-mark-wrong", known && answer !== guess);
    },

    _barOf(tier) {
      const { laneHeight } = this;
      const full = Math.round(laneHeight * 0.7);
      const height = Math.round(tier === TIER.QUANT ? full * 0.42 : tier === TIER.EVICTED ? full * 0.3 : full);
      const base = (Draw.laneOf(tier) + 1) * laneHeight - Math.round(laneHeight * 0.14);
      return { top: base - height, height };
    },

    _part(name) {
      const { ui } = this;
      const parts = {
        legend: ui.legend,
        lanes: ui.lanes,
        memory: ui.mem.parentNode,
        fmm: ui.fmm.canvas.closest(".qe-curve"),
        churn: ui.churn.canvas.closest(".qe-curve"),
        atlas: ui.atlas,
        text: ui.textBox,
        transport: ui.transport,
      };
      return parts[name];
    },
  });

  QEvictView.readTrace = (lines) => new Trace().addLines(lines);
})(window);
