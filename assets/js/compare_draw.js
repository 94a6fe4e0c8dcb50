/* Painters of QEvictCompare: the lane of one system, its divergence per token, the shared axis; and how frames are
 * unpacked. Height says share, hue says precision, x says token. */
(function (root) {
  "use strict";

  const Draw = root.QEvictDraw;
  const Compare = root.QEvictCompare;
  const { setText, percent } = root.QEvictView.parts;
  const QUANT_HEIGHT = 0.42;

  /** Shares of all looks: [{t, windows, full, quant, sink}]; Uint8Array rows x windows, of the sink rows x 2. */
  function unpack(frames, rows) {
    const bytes = (text) => Uint8Array.from(atob(text), (sign) => sign.charCodeAt(0));
    let before = null;
    return frames.map((frame) => {
      const now = { t: frame.t, windows: frame.w, full: bytes(frame.f), quant: bytes(frame.q), sink: bytes(frame.s) };
      if (before) {
        const width = Math.min(before.windows, now.windows);
        for (const name of ["full", "quant"]) {
          for (let row = 0; row < rows; row++) {
            for (let w = 0; w < width; w++) now[name][row * now.windows + w] ^= before[name][row * before.windows + w];
          }
        }
        now.sink.forEach((_, i) => (now.sink[i] ^= before.sink[i]));
      }
      before = now;
      return now;
    });
  }

  Compare.unpack = unpack;

  Object.assign(Compare.prototype, {
    /** Mean shares of the shown layers at a look, 0..1: {full, quant} per window, {sink: [full, quant]}. */
    _mean(system, index) {
      const id = `${system.name} ${index} ${this.layer}`;
      const known = this.means.get(id);
      if (known) return known;
      const look = system.looks[Math.min(index, system.looks.length - 1)];
      const heads = Math.max(1, Math.round(system.rows / this.data.layers));
      const first = this.layer < 0 ? 0 : this.layer * heads;
      const last = this.layer < 0 ? system.rows : first + heads;
      const out = { full: new Float32Array(look.windows), quant: new Float32Array(look.windows) };
      for (const name of ["full", "quant"]) {
        for (let row = first; row < last; row++) {
          for (let w = 0; w < look.windows; w++) out[name][w] += look[name][row * look.windows + w];
        }
        for (let w = 0; w < look.windows; w++) out[name][w] /= 255 * (last - first);
      }
      out.sink = [0, 1].map((part) => {
        let sum = 0;
        for (let row = first; row < last; row++) sum += look.sink[row * 2 + part];
        return sum / (255 * (last - first));
      });
      if (this.means.size > 400) this.means.clear();
      this.means.set(id, out);
      return out;
    },

    /** New tokens that were predicted up to the shown look; at the last one all of them. */
    _steps(system) {
      if (this.index >= this.looks.length - 1) return system.kl.length;
      return Math.min(system.kl.length, this.looks[this.index].t - this.data.prompt_tokens);
    },

    _layout() {
      const { host, ui, data, scale } = this;
      host.style.setProperty("--qe-scale", String(scale));
      host.classList.toggle("qe-projector", Boolean(this.options.projector));
      const width = Math.floor(ui.lanes.clientWidth);
      this.width = width;
      this.axis = null;
      if (width < 200) return;
      const gutter = Math.round(Math.min(250, Math.max(220, width * 0.15)) * scale ** 0.9);
      host.style.setProperty("--qe-gutter", `${gutter}px`);
      const [z0, z1] = this.zoom || [0, this.total];
      const meta = { sink_tokens: data.sink_tokens, window_size: data.window_size };
      this.axis = new Draw.Axis(gutter, width - 10, meta, this.total, z0, z1);
      const top = host.getBoundingClientRect().top + root.scrollY;
      const rest = (root.innerHeight < 800 ? 106 : 180) * Math.min(1.3, scale);
      const room = (root.innerHeight - Math.min(top, 300) - rest) / this.lanes.length;
      this.height = Math.round(Math.min(190, Math.max(66 * scale, room)));
      this.klHeight = Math.round(Math.min(32, this.height * 0.25));
      for (const { canvas } of this.lanes) this._size(canvas, width, this.height);
      this._size(ui.axisCanvas, width, Math.round(20 * scale));
      this._brush();
    },

    _lane(lane) {
      const { axis, colors, width, height, klHeight } = this;
      const ctx = lane.canvas.getContext("2d");
      ctx.clearRect(0, 0, width, height);
      ctx.fillStyle = colors.line;
      ctx.fillRect(0, height - 1, width, 1);
      ctx.fillStyle = colors.panel;
      ctx.fillRect(axis.left, 0, axis.right - axis.left, klHeight);
      this._prompt(ctx, height);
      const mean = this._mean(lane.system, this.index);
      this._sink(ctx, mean.sink, klHeight + 4, height - 4);
      this._bars(ctx, mean, klHeight + 4, height - 4);
      if (this.free) this._ownText(ctx, lane.system, height);
      else this._divergence(ctx, lane.system);
      const sink = this.cursor === -1 && axis.sinkWidth;
      if (sink || (this.cursor !== null && this.cursor >= axis.z0 && this.cursor < axis.z1)) {
        const x = sink ? axis.left : axis.x(this.cursor);
        ctx.globalAlpha = 0.18;
        ctx.fillStyle = colors.focus;
        ctx.fillRect(x - 1, 0, Math.max(3, sink ? axis.sinkWidth + 2 : axis.cell), height);
        ctx.globalAlpha = 1;
      }
      const share = (values) => {
        let sum = 0;
        for (const value of values) sum += value;
        return values.length ? sum / values.length : 0;
      };
      const [full, quant] = [share(mean.full), share(mean.quant)];
      const shown = { full: percent(full, 0), quant: percent(quant, 0), evicted: percent(Math.max(0, 1 - full - quant), 0) };
      const t = this.looks[this.index].t;
      lane.canvas.setAttribute("aria-label", this._t("compare.lanes_label", { name: this._name(lane.system), t, ...shown }));
      lane.canvas.title = "";
      if (this.free) return setText(lane.figures, this._ownWords(lane.system));
      const steps = this._steps(lane.system);
      const kl = lane.system.kl.slice(0, steps);
      const agreed = lane.system.agrees.slice(0, steps).reduce((sum, one) => sum + one, 0);
      const words = steps
        ? this._t("compare.so_far", { kl: (kl.reduce((sum, one) => sum + one, 0) / steps).toFixed(3), agree: percent(agreed / steps, 0) })
        : this._t("compare.so_far_none");
      setText(lane.figures, words);
    },

    _prompt(ctx, height) {
      const { axis, colors, data } = this;
      const x = Math.round(axis.token(data.prompt_tokens)) - 0.5;
      if (x <= axis.start || x >= axis.right) return;
      ctx.save();
      ctx.setLineDash([3, 3]);
      ctx.strokeStyle = colors.muted;
      ctx.beginPath();
      ctx.moveTo(x, 0);
      ctx.lineTo(x, height);
      ctx.stroke();
      ctx.restore();
    },

    /** The first tokens in a cell of their own, as on the tier board; what a system does not hold of them is outlined. */
    _sink(ctx, [full, quant], top, base) {
      const { axis, colors } = this;
      if (!axis.sinkWidth) return;
      const tall = base - top;
      const [x, wide] = [axis.left, axis.sinkWidth];
      if (full + quant < 0.995) {
        ctx.strokeStyle = colors.evicted;
        ctx.lineWidth = 1;
        const low = Math.max(4, Math.round(tall * 0.14));
        ctx.strokeRect(x + 0.5, base - low + 0.5, wide - 1, low - 1);
      }
      const high = Math.round(full * tall);
      ctx.fillStyle = colors.sink;
      ctx.fillRect(x, base - high, wide, high);
      const coded = quant > 0.005 ? Math.max(2, Math.round(quant * tall * QUANT_HEIGHT)) : 0;
      if (coded) this._codes(ctx, x, base - high, wide, coded, !high);
    },

    /** Codes on top of `base`; slotted where they stand alone. */
    _codes(ctx, x, base, wide, high, alone) {
      ctx.fillStyle = this.colors.quant;
      if (alone && high >= 8) {
        const half = Math.floor((high - 2) / 2);
        ctx.fillRect(x, base - high, wide, half);
        ctx.fillRect(x, base - half, wide, half);
      } else ctx.fillRect(x, base - high, wide, high);
    },

    /** What is held of each window, stacked: codes below half height and slotted, full precision at its base. */
    _bars(ctx, mean, top, base) {
      const { axis, colors } = this;
      const tall = base - top;
      const count = mean.full.length;
      const [first, last] = axis.range(count);
      const step = axis.perColumn;
      for (let w = first - (first % step); w < last; w += step) {
        let full = 0;
        let quant = 0;
        const end = Math.min(last, w + step);
        const from = Math.max(first, w);
        for (let i = from; i < end; i++) {
          full += mean.full[i];
          quant += mean.quant[i];
        }
        full /= end - from;
        quant /= end - from;
        const x = Math.max(axis.start, axis.x(w));
        const wide = axis.thin ? Math.max(1, Math.min(axis.right, axis.x(w + step)) - x) : axis.width(w);
        const gone = 1 - full - quant;
        if (gone > 0.995 && axis.cell >= 5) {
          ctx.strokeStyle = colors.evicted;
          ctx.lineWidth = 1;
          const low = Math.max(4, Math.round(tall * 0.14));
          ctx.strokeRect(x + 0.5, base - low + 0.5, wide - 1, low - 1);
          continue;
        }
        if (gone > 0.005) {
          ctx.globalAlpha = 0.3 + 0.7 * gone;
          ctx.fillStyle = colors.evicted;
          ctx.fillRect(x, base, wide, 2);
          ctx.globalAlpha = 1;
        }
        const high = Math.round(full * tall);
        if (high) {
          ctx.fillStyle = colors.full;
          ctx.fillRect(x, base - high, wide, high);
        }
        const coded = quant > 0.005 ? Math.max(1, Math.round(quant * tall * QUANT_HEIGHT)) : 0;
        if (coded) this._codes(ctx, x, base - high, wide, coded, !high);
      }
    },

    /** KL of every new token at its place, square-root scale; a block on top where the likeliest token differs. */
    _divergence(ctx, system) {
      const { axis, colors, data, klHeight, most } = this;
      const steps = this._steps(system);
      const columns = new Map();
      const wide = Math.max(1, axis.cell / data.window_size);
      for (let i = 0; i < steps; i++) {
        const x = Math.round(axis.token(data.prompt_tokens + i + 1));
        if (x < axis.start || x >= axis.right) continue;
        const known = columns.get(x) || { kl: 0, missed: false };
        columns.set(x, { kl: Math.max(known.kl, system.kl[i]), missed: known.missed || system.agrees[i] === 0 });
      }
      const room = klHeight - 7;
      for (const [x, { kl, missed }] of columns) {
        const h = Math.max(1, Math.round(Math.sqrt(kl / most) * room));
        const w = Math.max(1, Math.floor(wide) - (wide >= 4 ? 1 : 0));
        ctx.fillStyle = missed ? colors.alarm : colors.muted;
        ctx.fillRect(x, klHeight - h, w, h);
        if (missed) ctx.fillRect(x - (w < 3 ? 1 : 0), 1, Math.max(3, w), 4);
      }
    },

    _axisLine() {
      const { axis, colors, data, scale, width } = this;
      const ctx = this.ui.axisCanvas.getContext("2d");
      const font = Math.round(11.5 * scale);
      const height = Math.round(20 * scale);
      ctx.clearRect(0, 0, width, height);
      ctx.font = `${font}px system-ui, sans-serif`;
      ctx.textBaseline = "middle";
      ctx.fillStyle = colors.muted;
      let step = 8;
      while ((step / data.window_size) * axis.cell < font * 6) step *= 2;
      const begin = data.sink_tokens + axis.z0 * data.window_size;
      const words = this._axisWords(ctx, font);
      ctx.textAlign = "center";
      for (let t = Math.ceil(begin / step) * step; ; t += step) {
        const x = axis.token(t);
        if (x > axis.right - font) break;
        ctx.fillRect(Math.round(x), 0, 1, 4);
        if (words.some(({ from, to }) => x > from - font * 1.4 && x < to + font * 1.4)) continue;
        ctx.fillText(String(t), Math.max(x, axis.left + font), height / 2 + 2);
      }
      ctx.textAlign = "right";
      ctx.fillText(this._t("compare.axis"), axis.left - 9, height / 2 + 2);
      ctx.textAlign = "left";
      for (const { from, name, mark } of words) {
        ctx.fillStyle = mark === undefined ? colors.ink : colors.alarm;
        if (mark !== undefined) this._flag(ctx, mark, 1, 4);
        ctx.fillText(name, from, height / 2 + 2);
      }
    },

    /** Words on the axis, with the room they take: where the prompt ends, and where texts first differ. */
    _axisWords(ctx, font) {
      const { axis, data } = this;
      const out = [];
      const put = (position, name, mark) => {
        const x = axis.token(position);
        if (x <= axis.start || x >= axis.right) return;
        const wide = ctx.measureText(name).width;
        const first = out[0];
        let from = Math.min(axis.right - wide, Math.max(axis.start, mark ? x + 8 : x - wide / 2));
        if (first && from < first.to + font) {
          // The prompt's end is left of the difference: there is always room on that side.
          first.from = Math.max(axis.left, Math.min(first.from, from - font - (first.to - first.from)));
          first.to = first.from + ctx.measureText(first.name).width;
        }
        out.push({ from, to: from + wide, name, mark: mark ? x : undefined });
      };
      put(data.prompt_tokens, this._t("view.prompt_end"), false);
      const first = this.free ? this._firstDifference() : null;
      if (first !== null) put(data.prompt_tokens + first, this._t("compare.legend_first"), true);
      return out;
    },
  });
})(window);
