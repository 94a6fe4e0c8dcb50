/* How QEvictView follows a live run: server-sent events, their resume, and the filling of gaps. */
(function (root) {
  "use strict";

  const { Trace } = root.QEvictTrace;

  Object.assign(root.QEvictView.prototype, {
    _reset() {
      this._close();
      clearTimeout(this._timer);
      this.playing = false;
      this.source = null;
      this.trace = new Trace();
      this.index = -1;
      this.liveHead = true;
      this.zoom = null;
      this.loop = null;
      this.message = "";
      this.failed = false;
      this.lost = false;
      this.moves = new Map();
      this.marks = [];
      this.memo = { key: "", cells: new Uint8Array(0) };
      this.axis = null;
      this._held = null;
      this._lastGap = 0;
      this._ended = false;
      this._resetText();
    },

    /** Unless somebody chose a row: the liveliest of a recorded run; of a live one, where nothing is known yet, a middle one. */
    _firstRow() {
      const { rows } = this.trace.meta;
      if (this._rowChosen) this.row = Math.min(this.row, rows - 1);
      else this.row = (this.source ? null : this.trace.liveliestRow()) ?? rows >> 1;
      if (this.stream) this._watch();
    },

    _address(after) {
      return `${this.source.base}/s/${encodeURIComponent(this.source.sid)}/events${after}`;
    },

    _open() {
      if (!this.source || this.stream || this.trace.end || this.destroyed) return;
      const stream = (this.stream = new EventSource(this._address(this.trace.last >= 0 ? `?after=${this.trace.last}` : "")));
      stream.onmessage = (message) => {
        if (this.stream === stream) this._receive(JSON.parse(message.data));
      };
      stream.onopen = () => {
        this.lost = false;
        this._invalidate("status");
      };
      stream.onerror = () => {
        if (this.stream !== stream) return;
        this.lost = true;
        this._invalidate("status");
        if (stream.readyState === EventSource.CLOSED) {
          this._close();
          this._retry = setTimeout(() => this._open(), 2000);
        }
      };
    },

    /** Tells the run which row is looked at, so that its scores come first. */
    _watch() {
      const { base, sid } = this.source;
      fetch(`${base}/s/${encodeURIComponent(sid)}/row?row=${this.row}`, { method: "POST" }).catch(() => {});
    },

    _close() {
      clearTimeout(this._retry);
      if (this.stream) this.stream.close();
      this.stream = null;
    },

    _receive(event) {
      if (this._held) {
        this._held.push(event);
        return;
      }
      const { trace } = this;
      if (trace.last >= 0 && this._mustFill(event)) {
        this._held = [event];
        this._fill(event.s);
        return;
      }
      if (trace.add(event)) this._invalidate("events");
      if (trace.end) this._close();
    },

    /** Lost moves are fetched at once, anything else that was jumped over at most once in three seconds. */
    _mustFill(event) {
      const { trace } = this;
      const before = trace.steps[trace.steps.length - 1];
      const lostMoves = event.k === "route" && before && event.r > before.r + 1;
      const now = performance.now();
      if (!lostMoves && (event.s <= trace.last + 1 || now - this._lastGap < 3000)) return false;
      this._lastGap = now;
      return true;
    },

    async _fill(seq) {
      const { source } = this;
      let lines = "";
      try {
        const answer = await fetch(`${source.base}/s/${encodeURIComponent(source.sid)}/key?before=${seq}`);
        if (answer.ok) lines = await answer.text();
      } catch {
        lines = ""; // what is missing stays missing until the next keyframe
      }
      if (this.source !== source) return;
      const held = this._held || [];
      this._held = null;
      for (const line of lines.split("\n")) if (line.trim()) this.trace.add(JSON.parse(line));
      for (const event of held) this.trace.add(event);
      if (this.trace.end) this._close();
      this._invalidate("events");
    },

    /** Takes over what came in since the last frame. */
    _afterEvents() {
      const { trace } = this;
      const count = trace.steps.length;
      this.dirty.add("status");
      if (trace.end && !this._ended) {
        this._ended = true;
        this.message = "";
        if (this.source) this._emit("qe-end", { why: trace.end.why, summary: trace.end.summary });
      }
      if (!trace.meta) return;
      if (this._metaSeen !== trace.meta) {
        this._metaSeen = trace.meta;
        this._firstRow();
        this.dirty.add("layout").add("all");
        this.message = "";
        this._legend();
      }
      if (this.liveHead && count) {
        const fresh = count - 1 - this.index;
        if (fresh > 0) {
          const now = performance.now();
          const gap = this._lastStepAt ? now - this._lastStepAt : 700;
          this._lastStepAt = now;
          this.duration = Math.min(700, Math.max(120, gap * 0.9));
          this._go(count - 1, fresh === 1);
        } else {
          trace.board.reach(trace.seqLen);
        }
      }
      this.dirty.add("board").add("panel").add("text").add("transport");
    },
  });
})(window);
