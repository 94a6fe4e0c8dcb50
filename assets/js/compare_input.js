/* How one moves QEvictCompare: keys, pointer, zoom, play; and what the pointer is told. */
(function (root) {
  "use strict";

  const Board = root.QEvictView;
  const { el, percent, SPEEDS } = Board.parts;
  const INTERVAL = 700; // ms between two looks at speed 1

  Object.assign(root.QEvictCompare.prototype, {
    _listen() {
      const { host } = this;
      this._on(document, "keydown", (event) => this._key(event));
      this._on(host, "pointerdown", () => (Board.active = this));
      this._on(host, "focusin", () => (Board.active = this));
      this._on(root, "resize", () => this._invalidate("layout", "all"));
      const sizes = new ResizeObserver(() => {
        const width = Math.floor(this.ui.lanes.clientWidth);
        if (width && width !== this.width) this._invalidate("layout", "all");
      });
      sizes.observe(host);
      const themes = new MutationObserver(() => this.setTheme("auto"));
      themes.observe(document.body, { attributes: true, attributeFilter: ["class"] });
      this._off.push(() => sizes.disconnect(), () => themes.disconnect());
      const under = (event) => {
        if (!this.axis || event.target.tagName !== "CANVAS") return null;
        return this.axis.pick(event.clientX - event.target.getBoundingClientRect().left, this.total);
      };
      this._on(host, "pointermove", (event) => {
        if (this._dragging) return this._dragging(event);
        const own = event.target.dataset && event.target.dataset.w;
        this._point(own === undefined ? under(event) : Number(own), event);
      });
      this._on(host, "pointerleave", () => this._point(null));
      this._on(host, "pointerdown", (event) => this._grab(event));
      this._on(root, "pointerup", () => (this._dragging = null));
      this._on(host, "dblclick", (event) => event.target.closest(".qe-brush") && this._zoomTo(null));
      this._on(
        host,
        "wheel",
        (event) => {
          const window = event.ctrlKey || event.metaKey || event.shiftKey ? under(event) : null;
          if (window === null) return;
          event.preventDefault();
          this._zoomBy((event.deltaY || event.deltaX) > 0 ? 1.25 : 0.8, window);
        },
        { passive: false }
      );
    },

    _action(event) {
      if (!this.data) return null;
      const back = () => this._user(() => this.step(-1));
      const forward = () => this._user(() => this.step(1));
      const faster = (by) => this.setSpeed(SPEEDS[Math.min(SPEEDS.length - 1, Math.max(0, SPEEDS.indexOf(this.speed) + by))]);
      const closed = this.ui.sheet.hidden;
      const actions = {
        ArrowLeft: back,
        PageUp: back,
        ArrowRight: forward,
        PageDown: forward,
        ArrowUp: () => this.setRow(this.layer - 1),
        ArrowDown: () => this.setRow(this.layer + 1),
        Home: () => this._user(() => this.seek(0)),
        End: () => this._user(() => this.seek(Infinity)),
        " ": () => (this.playing ? this.pause() : this.play()),
        "[": () => faster(-1),
        "]": () => faster(1),
        l: () => this._loop(),
        ",": () => this._walk(-1),
        ".": () => this._walk(1),
        "+": () => this._zoomBy(0.7, this.cursor),
        "=": () => this._zoomBy(0.7, this.cursor),
        "-": () => this._zoomBy(1.4, this.cursor),
        0: () => this._zoomTo(null),
        n: () => this._zoomNew(),
        d: () => this._user(() => this._toFirst()),
        "?": () => this._sheet(closed),
        Escape: closed && this.cursor === null ? null : () => (closed ? this._point(null) : this._sheet(false)),
      };
      const { key } = event;
      return Object.hasOwn(actions, key) ? actions[key] : actions[key.toLowerCase()];
    },

    _loop() {
      this.loop = !this.loop;
      this._invalidate("all");
    },

    /** The new tokens with a little of the prompt, or all. */
    _zoomNew() {
      this._zoomTo(this.zoom ? null : [this._window(this.data.prompt_tokens) - 2, this.total]);
    },

    _walk(by) {
      const [a, b] = this.zoom || [0, this.total];
      const from = this.cursor === null ? (by > 0 ? Math.ceil(a) - 1 : Math.floor(b)) : this.cursor;
      const least = this.axis && this.axis.sinkWidth && !this.zoom ? -1 : 0;
      this._point(Math.min(this.total - 1, Math.max(least, from + by)));
    },

    _tick() {
      clearTimeout(this._timer);
      this._timer = setTimeout(() => {
        if (!this.playing || this.destroyed) return;
        if (this.index >= this.looks.length - 1) {
          if (!this.loop) return this.pause();
          this.seek(0);
        } else this.step(1);
        this._tick();
      }, INTERVAL / this.speed);
    },

    /** Puts the cursor on a window, null takes it away; `event` says where the pointer is. */
    _point(window, event) {
      if (window === this.cursor && !event) return;
      if (!this.data || window === undefined) window = null;
      const moved = window !== this.cursor;
      this.cursor = window;
      if (moved) {
        for (const node of this.tokens || []) node.classList.toggle("qe-lit", window !== null && node.dataset.w === String(window));
        this._invalidate("all");
      }
      this._tip(event);
    },

    _tip(event) {
      const { ui, data, cursor, axis } = this;
      ui.tip.hidden = cursor === null || !data || !axis;
      if (ui.tip.hidden) return;
      const sink = cursor < 0;
      const from = sink ? 0 : data.sink_tokens + cursor * data.window_size;
      const to = sink ? data.sink_tokens : Math.min(this.last, from + data.window_size);
      ui.tip.replaceChildren();
      const title = el("b", "", ui.tip);
      const name = sink ? this._t("view.sink") : this._t("view.window", { w: cursor });
      title.textContent = `${name} · ${this._t("view.tokens", { a: from, b: to - 1 })}`;
      el("q", "qe-tip-text", ui.tip).textContent = data.pieces.slice(from, to).join("");
      const list = el("dl", "qe-cmp-tip", ui.tip);
      for (const system of data.systems) {
        const mean = this._mean(system, this.index);
        const [full, quant] = sink ? mean.sink : [mean.full[cursor] || 0, mean.quant[cursor] || 0];
        el("dt", "", list).textContent = this._name(system);
        const held = cursor < mean.full.length;
        const own = this.free && to > data.prompt_tokens ? this._textOf(system, from, to) : null;
        const cell = el("dd", "", list);
        el("span", "", cell).textContent = held
          ? this._t("compare.tip_share", { full: percent(full, 0), quant: percent(quant, 0), evicted: percent(Math.max(0, 1 - full - quant), 0) })
          : "–";
        if (own) el("q", "", cell).textContent = own;
      }
      const box = this.host.getBoundingClientRect();
      const x = event ? event.clientX - box.left : axis.x(cursor);
      const y = event ? event.clientY - box.top : ui.lanes.offsetTop + 20;
      const wide = ui.tip.offsetWidth;
      const high = ui.tip.offsetHeight;
      ui.tip.style.left = `${Math.max(4, Math.min(x + 16, box.width - wide - 6))}px`;
      ui.tip.style.top = `${Math.max(4, y + 20 + high > root.innerHeight - box.top ? y - high - 16 : y + 20)}px`;
    },
  });
})(window);
