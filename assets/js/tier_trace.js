/* The trace in the browser: decodes wire events, keeps them, and moves a board forwards, backwards and by seek.
 * Mirrors engine/trace.py; a test holds the two equal. Knows no DOM, so that node can run it. */
(function (root) {
  "use strict";

  const TIER = Object.freeze({ SINK: 0, LOCAL: 1, FULL: 2, QUANT: 3, EVICTED: 4, EMPTY: 5 });
  const MEMORY = ["sink", "local", "full", "codes", "metadata", "shadow", "budget", "fullKv"];
  const MOVE_BYTES = 6;
  const SCORE_DECADES = 5;
  const MISSING = 4096;
  const WALK = 16; // steps that are walked one by one rather than rebuilt from a keyframe

  function bytesOf(base64) {
    const text = atob(base64);
    const out = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) out[i] = text.charCodeAt(i);
    return out;
  }

  function halfToNumber(bits) {
    const exponent = (bits >> 10) & 31;
    const fraction = bits & 1023;
    const sign = bits & 0x8000 ? -1 : 1;
    if (exponent === 0) return sign * fraction * 2 ** -24;
    if (exponent === 31) return fraction ? NaN : sign * Infinity;
    return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
  }

  function unpackCells(base64, rows, windows) {
    const raw = bytesOf(base64);
    const out = new Uint8Array(rows * windows);
    for (let i = 0; i < out.length; i++) out[i] = i & 1 ? raw[i >> 1] >> 4 : raw[i >> 1] & 15;
    return out;
  }

  function unpackMoves(base64) {
    const raw = bytesOf(base64);
    const count = Math.floor(raw.length / MOVE_BYTES);
    const moves = {
      count,
      row: new Uint8Array(count),
      from: new Uint8Array(count),
      to: new Uint8Array(count),
      window: new Uint16Array(count),
      score: new Float32Array(count),
    };
    for (let i = 0, at = 0; i < count; i++, at += MOVE_BYTES) {
      moves.row[i] = raw[at];
      moves.from[i] = raw[at + 1] >> 4;
      moves.to[i] = raw[at + 1] & 15;
      moves.window[i] = raw[at + 2] | (raw[at + 3] << 8);
      moves.score[i] = halfToNumber(raw[at + 4] | (raw[at + 5] << 8));
    }
    return moves;
  }

  const movesOf = (event) => event.moves || (event.moves = unpackMoves(event.b));
  const cellsOf = (event) => event.cells || (event.cells = unpackCells(event.b, event.rows, event.n));

  function memoryOf(list) {
    const out = {};
    MEMORY.forEach((name, i) => (out[name] = list[i]));
    out.persistent = out.sink + out.local + out.full + out.codes + out.metadata + out.shadow;
    return out;
  }

  function numWindows(seqLen, sinkTokens, windowSize) {
    return Math.max(0, Math.ceil((seqLen - sinkTokens) / windowSize));
  }

  /** A level byte of a score event as an absolute score; 0 means none. */
  function levelToScore(level, top) {
    return level ? top * 10 ** (((level - 255) * SCORE_DECADES) / 254) : 0;
  }

  /** The cells of one run. `cells[row * cap + window]`, EMPTY where no window has begun. */
  class Board {
    constructor(meta) {
      this.meta = meta;
      this.rows = meta.rows;
      this.cap = Math.max(1, meta.max_windows);
      this.cells = new Uint8Array(this.rows * this.cap).fill(TIER.EMPTY);
      this.reset();
    }

    reset() {
      this.cells.fill(TIER.EMPTY);
      this.eventId = -1;
      this.seqLen = 0;
      this.count = 0;
      this.index = -1;
    }

    at(row, window) {
      return this.cells[row * this.cap + window];
    }

    grow(count) {
      if (count <= this.cap) return;
      const cap = count + 64;
      const cells = new Uint8Array(this.rows * cap).fill(TIER.EMPTY);
      for (let r = 0; r < this.rows; r++) cells.set(this.cells.subarray(r * this.cap, (r + 1) * this.cap), r * cap);
      this.cells = cells;
      this.cap = cap;
    }

    reach(seqLen) {
      const count = numWindows(seqLen, this.meta.sink_tokens, this.meta.window_size);
      this.grow(count);
      const { cells, cap } = this;
      for (let r = 0; r < this.rows; r++) {
        const base = r * cap;
        for (let w = 0; w < count; w++) if (cells[base + w] === TIER.EMPTY) cells[base + w] = TIER.LOCAL;
        cells.fill(TIER.EMPTY, base + count, base + cap);
      }
      this.count = count;
      this.seqLen = seqLen;
    }

    forward(event) {
      if (event.k === "tok") {
        this.reach(event.t);
      } else if (event.k === "key") {
        this.reach(event.t);
        const cells = cellsOf(event);
        this.grow(event.n);
        for (let r = 0; r < event.rows; r++) {
          this.cells.set(cells.subarray(r * event.n, (r + 1) * event.n), r * this.cap);
        }
        this.eventId = event.r;
      } else if (event.k === "route") {
        this.reach(event.t);
        const moves = movesOf(event);
        for (let i = 0; i < moves.count; i++) this.cells[moves.row[i] * this.cap + moves.window[i]] = moves.to[i];
        this.eventId = event.r;
      }
    }

    backward(event, earlier) {
      const moves = movesOf(event);
      for (let i = moves.count - 1; i >= 0; i--) this.cells[moves.row[i] * this.cap + moves.window[i]] = moves.from[i];
      this.reach(earlier.t);
      this.eventId = earlier.r;
    }
  }

  /** All that is known of one run, and a board that stands at one of its steps. A step is one routing event. */
  class Trace {
    constructor() {
      this.meta = null;
      this.board = null;
      this.steps = [];
      this.late = new Map();
      this.scores = new Map();
      this.marks = [];
      this.pieces = [];
      this.seqLen = 0;
      this.last = -1;
      this.missing = new Set(); // numbers that were jumped over: what comes late is still taken
      this.progress = null;
      this.error = null;
      this.end = null;
      this.lastLate = -1;
      this._quantized = new Map();
    }

    /** Takes one decoded JSON object. False where it was seen already. */
    add(event) {
      if (event.s < 0) {
        // Passing: place in the queue, loading. It has no number, and what has begun outweighs it.
        if (event.k !== "prog" || this.meta) return false;
        this.progress = event.done < event.total ? event : null;
        return true;
      }
      if (event.s <= this.last && !this.missing.delete(event.s)) return false;
      for (let s = Math.max(this.last + 1, event.s - MISSING); s < event.s; s++) this.missing.add(s);
      this.last = Math.max(this.last, event.s);
      switch (event.k) {
        case "meta":
          this.meta = event;
          this.progress = null;
          this.board = new Board(event);
          this.pieces = (event.pieces || []).slice();
          this.seqLen = Math.max(this.seqLen, event.prompt_tokens);
          break;
        case "tok": {
          const first = event.t - event.p.length;
          event.p.forEach((piece, i) => (this.pieces[first + i] = piece));
          this.seqLen = Math.max(this.seqLen, event.t);
          break;
        }
        case "key":
        case "route":
          this._step(event);
          break;
        case "late":
          this.late.set(event.r, event);
          this.lastLate = Math.max(this.lastLate, event.r);
          break;
        case "score": {
          const list = this.scores.get(event.l) || [];
          list.push(event);
          this.scores.set(event.l, list);
          break;
        }
        case "mark":
          this.marks.push(event);
          break;
        case "prog":
          this.progress = event.done < event.total ? event : null;
          break;
        case "err":
          this.error = event;
          break;
        case "end":
          this.end = event;
          this.progress = null;
          break;
      }
      return true;
    }

    addLines(text) {
      for (const line of text.split("\n")) if (line.trim()) this.add(JSON.parse(line));
      return this;
    }

    _step(event) {
      const before = this.steps[this.steps.length - 1];
      this.progress = null;
      this.seqLen = Math.max(this.seqLen, event.t);
      if (event.k === "key" && before && before.r === event.r) {
        before.key = event;
        return;
      }
      if (before && event.r <= before.r) return;
      const isRoute = event.k === "route";
      this.steps.push({
        index: this.steps.length,
        r: event.r,
        t: event.t,
        route: isRoute ? event : null,
        key: isRoute ? null : event,
        joined: isRoute && (!before || event.r === before.r + 1),
        memory: memoryOf(event.mem),
        ms: isRoute ? event.ms : null,
        counts: isRoute ? event.c : null,
      });
    }

    /** Moves the board to step `index`, the shortest way. True where it only walked over neighbours. */
    seek(index) {
      const { board, steps } = this;
      let at = board.index;
      if (at === index) {
        board.reach(steps[index].t);
        return true;
      }
      if (at > index && at - index <= WALK) {
        for (; at > index && steps[at].joined; at--) board.backward(steps[at].route, steps[at - 1]);
        board.index = at;
        if (at === index) return true;
      }
      if (at >= 0 && at < index && index - at <= WALK && steps.slice(at + 1, index + 1).every((step) => step.joined)) {
        for (at++; at <= index; at++) this._enter(steps[at]);
        board.index = index;
        return true;
      }
      let anchor = index;
      while (anchor > 0 && !steps[anchor].key) anchor--;
      board.reset();
      for (let i = anchor; i <= index; i++) this._enter(steps[i]);
      board.index = index;
      return false;
    }

    _enter(step) {
      this.board.forward(step.key || step.route); // a keyframe heals what a lost stretch broke
    }

    /** The moves of step `index` in board row `row`: [{window, from, to, score}]. */
    rowMoves(index, row) {
      const step = this.steps[index];
      const out = [];
      if (!step || !step.route) return out;
      const moves = movesOf(step.route);
      for (let i = 0; i < moves.count; i++) {
        if (moves.row[i] === row) {
          out.push({ window: moves.window[i], from: moves.from[i], to: moves.to[i], score: moves.score[i] });
        }
      }
      return out;
    }

    /** The row in which most windows came back to Full; null where none did. */
    liveliestRow() {
      const counts = new Uint32Array(this.meta ? this.meta.rows : 0);
      for (const step of this.steps) {
        if (!step.route) continue;
        const moves = movesOf(step.route);
        for (let i = 0; i < moves.count; i++) {
          if (moves.from[i] === TIER.QUANT && moves.to[i] === TIER.FULL) counts[moves.row[i]]++;
        }
      }
      const most = Math.max(0, ...counts);
      return most ? counts.indexOf(most) : null;
    }

    /** What became of one window: [{index, r, from, to, score}], oldest first; the first keyframe counts as a move. */
    history(row, window) {
      const out = [];
      for (const step of this.steps) {
        if (step.route) {
          const moves = movesOf(step.route);
          for (let i = 0; i < moves.count; i++) {
            if (moves.row[i] === row && moves.window[i] === window) {
              out.push({ index: step.index, r: step.r, from: moves.from[i], to: moves.to[i], score: moves.score[i] });
            }
          }
        } else if (step.key && step.index === 0 && window < step.key.n && row < step.key.rows) {
          const to = cellsOf(step.key)[row * step.key.n + window];
          if (to !== TIER.EMPTY) out.push({ index: 0, r: step.r, from: TIER.LOCAL, to, score: NaN });
        }
      }
      return out;
    }

    /** Scores of one window: [{r, score}] from score events and from its moves, by event. */
    scoreHistory(row, window) {
      const points = new Map();
      for (const move of this.history(row, window)) if (move.score > 0) points.set(move.r, move.score);
      for (const event of this.scores.get(row) || []) {
        const levels = event.levels || (event.levels = bytesOf(event.b));
        const value = window < levels.length ? levelToScore(levels[window], event.top) : 0;
        if (value > 0) points.set(event.r, value);
      }
      return [...points].map(([r, score]) => ({ r, score })).sort((a, b) => a.r - b.r);
    }

    /** First step at which each window of a row was in the low-bit tier: Map window -> step index. */
    firstQuantized(row) {
      let found = this._quantized.get(row);
      if (!found) this._quantized.set(row, (found = { upTo: 0, map: new Map() }));
      for (; found.upTo < this.steps.length; found.upTo++) {
        const step = this.steps[found.upTo];
        if (step.key) {
          const cells = cellsOf(step.key);
          for (let w = 0; w < step.key.n; w++) {
            if (cells[row * step.key.n + w] === TIER.QUANT && !found.map.has(w)) found.map.set(w, found.upTo);
          }
        }
        for (const move of this.rowMoves(found.upTo, row)) {
          if (move.to === TIER.QUANT && !found.map.has(move.window)) found.map.set(move.window, found.upTo);
        }
      }
      return found.map;
    }

    /** Positions [first, last) of a window. */
    span(window) {
      const first = this.meta.sink_tokens + window * this.meta.window_size;
      return [first, first + this.meta.window_size];
    }

    textOf(window) {
      const [first, last] = this.span(window);
      let text = "";
      for (let p = first; p < last; p++) text += this.pieces[p] === undefined ? "" : this.pieces[p];
      return text;
    }
  }

  const api = { TIER, Board, Trace, numWindows, unpackCells, unpackMoves, halfToNumber, levelToScore, movesOf, cellsOf };
  if (typeof module === "object" && module.exports) module.exports = api;
  root.QEvictTrace = api;
})(typeof window === "undefined" ? globalThis : window);
