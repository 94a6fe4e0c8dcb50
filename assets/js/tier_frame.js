/* How QEvictView paints: what is stale, one frame for all of it, and the sizes that everything has. */
(function (root) {
  "use strict";

  const { TIER } = root.QEvictTrace;
  const Draw = root.QEvictDraw;

  Object.assign(root.QEvictView.prototype, {
    _invalidate(...what) {
      for (const name of what) this.dirty.add(name);
      if (!this._raf && !this.destroyed && this._frame) this._raf = requestAnimationFrame(this._frame);
    },

    _frame(now) {
      this._raf = 0;
      const { dirty } = this;
      if (dirty.has("events")) this._afterEvents();
      const bare = this.index < 0;
      if (this.host.classList.contains("qe-empty") !== bare) {
        this.host.classList.toggle("qe-empty", bare); // before the layout, which measures
        dirty.add("layout").add("all");
      }
      if (dirty.has("layout")) this._layout();
      const all = dirty.has("all");
      const p = Math.min(1, Math.max(0, (now - this.started) / (this.duration || 650)));
      const moving = p < 1;
      const board = all || dirty.has("board");
      if (this.width && this.axis && this.trace.meta) {
        if (board || moving || this._wasMoving) this._drawLanes(p);
        if (board) this._drawAtlas();
        const swells = this.duration > 350; // in a fast run the marks of the atlas stand still
        if (board || (swells && (moving || this._wasMoving)) || dirty.has("cursor")) this._drawOverlay(swells ? p : 1);
        if (dirty.has("cursor") && !board && !moving) this._drawLanes(p);
      }
      if (all || dirty.has("panel")) this._panel();
      if (all || dirty.has("text")) this._text();
      if (all || dirty.has("transport")) this._transport();
      if (all || dirty.has("status") || dirty.has("panel")) this._status();
      if (this.lesson && this.lesson.unseen && this.axis) this._showFramed();
      this.dirty = new Set();
      this._wasMoving = moving;
      if (moving && !document.hidden) this._invalidate("moving");
    },

    _layout() {
      const { ui, host, scale, trace } = this;
      host.style.setProperty("--qe-scale", String(scale));
      host.classList.toggle("qe-projector", Boolean(this.options.projector));
      const width = Math.floor(ui.lanes.clientWidth);
      this.width = width;
      host.classList.toggle("qe-narrow", width / scale < 900);
      host.classList.toggle("qe-snug", width / scale < 1010); // the transport must still stand in one row
      if (!width || !trace.meta) return;
      const { rows } = trace.meta;
      this.total = Math.max(trace.meta.max_windows, trace.board ? trace.board.count : 0, 1);
      const [z0, z1] = this.zoom || [0, this.total];
      const gutter = Math.round(Math.min(150, Math.max(126, width * 0.13)) * Math.sqrt(scale) * (scale > 1 ? 1.12 : 1));
      this.axis = new Draw.Axis(gutter, width - 10, trace.meta, this.total, z0, z1);
      const room = root.innerHeight;
      const tight = room < 800;
      host.classList.toggle("qe-tight", tight);
      host.style.setProperty("--qe-gutter", `${gutter}px`);
      this.laneHeight = Math.round((tight ? 56 : 66) * (this.options.projector && tight ? 1.05 : Math.min(scale, 1.3)));
      this.axisHeight = Math.round(20 * scale);
      const most = this.options.projector && tight ? Math.max(120, room * 0.22) : Math.max(240, room * (tight ? 0.34 : 0.36));
      this.group = Math.max(1, Math.ceil((rows * 8) / most));
      const bands = Math.ceil(rows / this.group);
      this.bandHeight = Math.max(8, Math.min(rows <= 8 ? 18 : 12, Math.floor(most / bands)));
      this.atlasHeight = bands * this.bandHeight;
      this._size(ui.lanesCanvas, width, this.laneHeight * 3);
      this._size(ui.frameCanvas, width, this.atlasHeight + this.axisHeight);
      this._size(ui.atlasCanvas, width, this.atlasHeight);
      this._size(ui.overlayCanvas, width, this.atlasHeight + 2 * Draw.OVERHANG);
      ui.overlayCanvas.style.top = `${-Draw.OVERHANG}px`;
      ui.atlas.style.height = `${this.atlasHeight + this.axisHeight}px`;
      ui.laneLabels.forEach((label, lane) => {
        label.style.top = `${lane * this.laneHeight}px`;
        label.style.height = `${this.laneHeight}px`;
        label.style.width = `${gutter - 6}px`;
      });
      this.memo.key = this._frameKey = "";
      ui.fmm.width = ui.churn.width = 0; // measured when next drawn
      this._brush();
      this.dirty.add("all");
    },

    _size(canvas, width, height) {
      const ratio = root.devicePixelRatio || 1;
      if (canvas.width === Math.round(width * ratio) && canvas.height === Math.round(height * ratio)) return;
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.width = `${width}px`;
      canvas.style.height = `${height}px`;
      canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
    },

    _ghosts(row) {
      const { board } = this.trace;
      const out = [];
      if (!this.trace.steps.length) return out;
      for (const [w, index] of this.trace.firstQuantized(row)) {
        if (index <= this.index && w < board.count && board.at(row, w) === TIER.FULL) out.push(w);
      }
      return out;
    },

    _drawLanes(p) {
      const { trace, axis, colors, laneHeight, width, row } = this;
      if (!trace.board) return;
      Draw.lanes(this.ui.lanesCanvas.getContext("2d"), {
        axis, colors, laneHeight, width, row, p,
        board: trace.board,
        moves: this.moves,
        ghosts: this._ghosts(row),
        marks: this.marks.length > 0,
        cursor: this.cursor,
        promptTokens: trace.meta.prompt_tokens,
      });
    },

    _drawAtlas() {
      const { trace, axis, colors, width, row, group, bandHeight } = this;
      if (!trace.board) return;
      if (trace.board.count > this.total) {
        this._layout();
        return this._invalidate("all");
      }
      const height = this.atlasHeight;
      const shared = { axis, colors, width, row, group, bandHeight, height, board: trace.board };
      const key = [width, height, axis.z0, axis.z1, this.host.dataset.theme, bandHeight, group, this.trace.board.seqLen > 0].join();
      Draw.atlas(this.ui.atlasCanvas.getContext("2d"), { ...shared, key }, this.memo);
      const frameKey = [key, row, this.scale].join();
      if (frameKey !== this._frameKey) {
        this._frameKey = frameKey;
        Draw.frame(this.ui.frameCanvas.getContext("2d"), {
          ...shared,
          axisHeight: this.axisHeight,
          font: Math.round(11.5 * this.scale * (this.options.projector ? 1.16 : 1)),
          rowName: (r) => this._rowShort(r),
          axisName: this._t("view.axis"),
          promptTokens: trace.meta.prompt_tokens,
          promptName: this._t("view.prompt_end"),
        });
      }
    },

    _drawOverlay(p) {
      const { trace, axis, colors, width, row, group, bandHeight } = this;
      const step = trace.steps[this.index];
      const late = this.showRegret && step ? trace.late.get(step.r) : null;
      Draw.overlay(this.ui.overlayCanvas.getContext("2d"), {
        axis, colors, width, row, group, bandHeight, p,
        height: this.atlasHeight,
        marks: this.marks,
        cursor: this.cursor,
        reduced: this._reduced(),
        regret: late ? late.regret : null,
        promptTokens: trace.meta.prompt_tokens,
      });
    },
  });
})(window);
