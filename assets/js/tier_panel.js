/* The words and figures of QEvictView: legend, status, lane labels, memory, curves, transport, spoken text. */
(function (root) {
  "use strict";

  const { TIER } = root.QEvictTrace;
  const Draw = root.QEvictDraw;
  const { el, icon, setText, percent, bytes, kindOf } = root.QEvictView.parts;
  const MEMORY = ["sink", "local", "full", "codes", "metadata", "shadow"];

  Object.assign(root.QEvictView.prototype, {
    _t(key, values) {
      const text = this.texts[key] === undefined ? key : this.texts[key];
      return values ? text.replace(/\{(\w+)\}/g, (all, name) => (name in values ? values[name] : all)) : text;
    },

    _tierName(tier) {
      const bits = this.trace.meta ? this.trace.meta.bits : 2;
      return this._t(`view.${Draw.NAMES[tier] || "sink"}`, { bits });
    },

    _rowValues(row) {
      const { rows, num_layers: layers } = this.trace.meta;
      const heads = Math.max(1, Math.round(rows / layers));
      return { layer: Math.floor(row / heads), head: row % heads, heads };
    },

    _rowName(row) {
      if (!this.trace.meta) return "";
      const values = this._rowValues(row);
      return this._t(values.heads > 1 ? "view.row_head" : "view.row", values);
    },

    _rowShort(row) {
      const values = this._rowValues(row);
      return this._t("view.row_short", values) + (values.heads > 1 ? `·${values.head}` : "");
    },

    _legend() {
      const { ui, trace } = this;
      const meta = trace.meta || { bits: 2, sink_tokens: 5, kv_dtype: "" };
      const values = { bits: meta.bits, n: meta.sink_tokens, dtype: meta.kv_dtype };
      ui.legend.replaceChildren();
      for (const name of Draw.NAMES) {
        const item = el("span", "qe-key", ui.legend);
        el("i", `qe-swatch qe-is-${name}`, item, { "aria-hidden": "true" });
        el("b", "", item, { "data-term": name }).textContent = this._t(`view.${name}`, values);
        el("span", "qe-note", item).textContent = this._t(`view.${name}_note`, values);
      }
    },

    _status() {
      const { ui, trace } = this;
      const step = trace.steps[this.index];
      const note = trace.error
        ? trace.error.msg
        : this.lost && !trace.end
          ? this._t("view.lost")
          : trace.progress
            ? this._t(`view.stage_${trace.progress.stage}`, trace.progress)
            : this.message || (step ? "" : this._t(trace.end ? `view.ended_${trace.end.why}` : trace.meta ? "view.reading" : "view.idle", { n: trace.meta && trace.meta.prompt_tokens }));
      setText(ui.note, note);
      ui.note.hidden = !note;
      ui.note.setAttribute("role", trace.error ? "alert" : "status");
      ui.note.classList.toggle("qe-alarm", Boolean(trace.error || this.lost || this.failed));
      const slow = trace.progress && trace.progress.stage !== "queue";
      ui.progress.hidden = !slow;
      if (slow) {
        ui.progress.setAttribute("aria-label", note);
        ui.progress.max = trace.progress.total;
        ui.progress.value = trace.progress.done;
      }
      if (!step) return;
      const values = { r: step.r, t: trace.board.seqLen };
      setText(ui.where, `${this._t("view.event", values)} · ${this._t("view.token", values)}`);
      const counts = step.counts;
      ui.counts.hidden = !counts;
      setText(ui.firstRouting, counts ? "" : this._t("view.first_routing"));
      const words = [];
      if (counts) {
        ["promoted", "demoted", "evicted_count", "aged"].forEach((name, i) => {
          setText(ui.countNodes[i], String(counts[i]));
          words.push([this._t(`view.${name}`), counts[i]].join(" "));
        });
      }
      const meta = trace.meta;
      const parts = [meta.model, meta.policy, meta.backend];
      if (step.ms !== null) parts.push(this._t("view.routing_ms", { ms: step.ms.toFixed(1) }));
      if (trace.end && this.index === trace.steps.length - 1) parts.push(this._t(`view.ended_${trace.end.why}`));
      ui.facts.title = parts.join(" · ");
      setText(ui.facts, ui.facts.title);
      this._announce(`${ui.where.textContent}. ${words.join(", ")}`);
    },

    /** Speaks at most once in 1.5 s, so that a fast run does not flood a screen reader. */
    _announce(text) {
      this._speech = text;
      if (this._liveTimer) return;
      setText(this.ui.live, text);
      this._liveTimer = setTimeout(() => {
        this._liveTimer = 0;
        if (this._speech !== this.ui.live.textContent && !this.destroyed) {
          setText(this.ui.live, this._speech);
          this._table();
        }
      }, 1500);
      this._table();
    },

    _table() {
      const { ui, trace } = this;
      const step = trace.steps[this.index];
      if (!step) return;
      ui.caption.textContent = this._t("view.table", { row: this._rowName(this.row), r: step.r });
      ui.tableBody.replaceChildren();
      const list = trace.rowMoves(this.index, this.row).slice(0, 200);
      for (const move of list) {
        const line = el("tr", "", ui.tableBody);
        const [a, b] = trace.span(move.window);
        el("td", "", line).textContent = `${move.window}, ${this._t("view.tokens", { a, b: b - 1 })}`;
        el("td", "", line).textContent = this._tierName(move.from);
        el("td", "", line).textContent = this._tierName(move.to);
      }
      if (!list.length) el("td", "", el("tr", "", ui.tableBody), { colspan: "3" }).textContent = this._t("view.table_none");
    },

    _panel() {
      const { ui, trace, row } = this;
      const step = trace.steps[this.index];
      if (!step) return;
      const { meta, board } = trace;
      const n = [0, 0, 0, 0, 0, 0];
      for (let w = 0; w < board.count; w++) n[board.at(row, w)]++;
      const share = meta.num_layers / meta.rows;
      const lines = [
        [this._t("view.windows", { n: n[TIER.FULL] }), bytes(n[TIER.FULL] * meta.full_window_bytes * share), this._t("view.recent_count", { n: n[TIER.LOCAL] })],
        [this._t("view.windows", { n: n[TIER.QUANT] }), bytes(n[TIER.QUANT] * meta.quant_window_bytes * share)],
        [this._t("view.windows", { n: n[TIER.EVICTED] }), bytes(0)],
      ];
      ui.laneLabels.forEach((label, lane) => {
        setText(label.children[0], this._tierName(lane + 2));
        setText(label.children[1], lines[lane][2] || "");
        setText(label.children[2], lines[lane].slice(0, 2).join("\u2002"));
      });
      setText(ui.rowName, this._rowName(row));
      const here = { promoted: 0, demoted: 0, evicted: 0, aged: 0 };
      for (const move of trace.rowMoves(this.index, row)) here[kindOf(move.from, move.to)]++;
      setText(ui.rowMoves, this._t("view.moves_here", here));
      const names = { row: this._rowName(row), full: n[2], local: n[1], quant: n[3], evicted: n[4], bits: meta.bits };
      ui.lanesCanvas.setAttribute("aria-label", this._t("view.lanes_label", names));
      ui.atlasCanvas.setAttribute("aria-label", this._t("view.atlas_label", { windows: board.count, rows: meta.rows }));
      setText(ui.atlasTitle, this._t(this.group > 1 ? "view.atlas_grouped" : "view.atlas", { n: this.group }));
      this._memory(step);
      this._curves(step);
      if (this.cursor !== null) this._tip();
    },

    _memory(step) {
      const { ui, trace } = this;
      const { meta } = trace;
      const m = step.memory;
      const extent = Math.max(meta.full_kv_bytes, m.fullKv, m.budget, m.persistent, 1);
      const at = (value) => `${((100 * value) / extent).toFixed(3)}%`;
      ui.memFull.style.width = at(m.fullKv);
      let left = 0;
      const words = [];
      MEMORY.forEach((name, i) => {
        ui.memParts[i].style.left = at(left);
        ui.memParts[i].style.width = at(m[name]);
        left += m[name];
        const word = this._t(`view.mem_${name}`, { bits: meta.bits });
        setText(ui.memWords[i].children[1], word);
        setText(ui.memWords[i].children[2], bytes(m[name]));
        words.push(`${word} ${bytes(m[name])}`);
      });
      ui.memBudget.style.left = at(m.budget);
      const values = { used: bytes(m.persistent), full: bytes(m.fullKv), share: percent(m.persistent / Math.max(1, m.fullKv), 0), dtype: meta.kv_dtype };
      setText(ui.memText, this._t("view.memory_of", values));
      const over = m.persistent - m.budget;
      setText(ui.memLimit, over > 0 && m.budget ? this._t("view.memory_over", { over: bytes(over) }) : this._t("view.memory_budget", { budget: bytes(m.budget) }));
      ui.memLimit.classList.toggle("qe-alarm", over > 0 && m.budget > 0);
      ui.mem.setAttribute("aria-label", `${ui.memText.textContent}. ${ui.memLimit.textContent}. ${words.join(", ")}`);
    },

    _curves(step) {
      const { ui, trace } = this;
      const off = !trace.meta.reference || trace.meta.reference === "none";
      ui.curves.hidden = off;
      ui.noReference.hidden = !off;
      if (off) return;
      const horizon = (trace.meta.settings || {}).horizon || Math.max(32, ...[...trace.late.values()].slice(0, 4).map((late) => late.h));
      const planned = Math.ceil((trace.meta.planned_tokens - trace.meta.prompt_tokens) / trace.meta.window_size);
      const count = trace.end ? trace.steps.length - 1 : Math.max(planned, trace.steps.length - 1);
      const known = { fmm: null, churn: null };
      const lists = { fmm: [], fp: [], churn: [] };
      for (const item of trace.steps) {
        const late = trace.late.get(item.r);
        if (!late) continue;
        lists.fmm.push({ i: item.index, v: late.fmm });
        lists.fp.push({ i: item.index, v: late.fmm_fp });
        if (item.index <= this.index) known.fmm = { i: item.index, v: late.fmm, late };
        if (late.churn !== null) {
          lists.churn.push({ i: item.index, v: late.churn });
          if (item.index <= this.index) known.churn = { i: item.index, v: late.churn, late };
        }
      }
      const tell = (chart, note, shown, points, under, color, format) => {
        const value = shown ? format(shown.v) : this._t("view.no_value");
        setText(chart.value, value);
        chart.value.classList.toggle("qe-faint", !shown);
        const pending = shown ? shown.i : 0;
        const waits = pending < this.index || !shown;
        const parts = note ? [note] : [];
        if (shown && note && shown.late.h < horizon) parts[0] = this._t("view.short_horizon", { n: shown.late.h, h: horizon });
        if (shown && under) parts.unshift(this._t("view.fmm_fp", { value: percent(shown.late.fmm_fp), bits: trace.meta.bits }));
        if (shown) parts.unshift(this._t("view.of_event", { r: shown.late.r }));
        const sub = parts.join(" · ");
        const short = parts.slice(0, 2).join(" · ");
        setText(chart.sub, short);
        setText(chart.more, sub.slice(short.length));
        chart.line.title = sub;
        setText(chart.pending, waits ? this._t(trace.end ? "view.ended_first" : "view.pending") : "");
        const top = Math.max(1e-6, ...points.map((point) => point.v), ...(under || []).map((point) => point.v)) * 1.4;
        const height = Math.round(52 * Math.min(1.3, this.scale));
        if (!chart.width) chart.width = chart.canvas.parentNode.clientWidth;
        const { width } = chart;
        if (width < 8) return;
        this._size(chart.canvas, width, height);
        Draw.curve(chart.canvas.getContext("2d"), {
          width, height, points, under, count, top, shown, now: this.index, color,
          pending: waits ? pending : null, colors: this.colors,
        });
        chart.canvas.setAttribute("aria-label", `${chart.name.textContent}: ${value} ${sub}`);
      };
      tell(ui.fmm, this._t("view.fmm_sub", { h: horizon }), known.fmm, lists.fmm, lists.fp, this.colors.full, (v) => percent(v));
      tell(ui.churn, "", known.churn, lists.churn, null, this.colors.quant, (v) => v.toFixed(4));
    },

    _transport() {
      const { ui, trace } = this;
      const last = trace.steps.length - 1;
      ui.slider.max = String(Math.max(0, last));
      if (document.activeElement !== ui.slider || Number(ui.slider.value) !== this.index) ui.slider.value = String(Math.max(0, this.index));
      const step = trace.steps[this.index];
      if (step) {
        const text = this._t("view.position_value", { r: step.r, i: this.index + 1, n: last + 1 });
        ui.slider.setAttribute("aria-valuetext", text);
        setText(ui.position, `${step.r} / ${trace.steps[last].r}`);
      }
      if (this._playShown !== Boolean(this.playing)) {
        this._playShown = Boolean(this.playing);
        icon(ui.play, this.playing ? "pause" : "play");
        ui.play.setAttribute("aria-label", this._t(this.playing ? "view.pause" : "view.play"));
        ui.play.title = ui.play.getAttribute("aria-label");
      }
      const running = Boolean(this.source && !trace.end);
      ui.goLive.hidden = !running;
      ui.goLive.setAttribute("aria-pressed", String(running && this.liveHead));
      setText(ui.goLive, this._t(this.liveHead ? "view.live" : "view.go_live"));
      ui.loop.setAttribute("aria-pressed", String(Boolean(this.loop)));
      const ranged = this.loop && this.loop.length;
      const name = (i) => (trace.steps[Math.min(i, last)] || { r: i }).r;
      setText(ui.loop, ranged ? this._t("view.loop_range", { a: name(this.loop[0]), b: name(this.loop[1]) }) : this._t("view.loop"));
      ui.stop.setAttribute("aria-pressed", String(this.stopAtPromotion));
      ui.regret.setAttribute("aria-pressed", String(this.showRegret));
      ui.regret.hidden = !trace.meta || trace.meta.reference === "none";
      for (const [button, dead] of [[ui.first, this.index <= 0], [ui.back, this.index <= 0], [ui.forward, this.index >= last], [ui.last, this.index >= last]]) {
        button.setAttribute("aria-disabled", String(dead));
      }
    },
  });
})(window);
