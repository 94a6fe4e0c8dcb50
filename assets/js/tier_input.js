/* How one moves QEvictView: keys, pointer, touch, and the zoom brush. Keys are never taken while somebody writes. */
(function (root) {
  "use strict";

  const QEvictView = root.QEvictView;
  const Draw = root.QEvictDraw;
  const { SPEEDS, HIDDEN_CLOSE } = QEvictView.parts;

  function typing(node) {
    if (!node || !node.closest) return false;
    if (node.closest("textarea, select, [contenteditable=''], [contenteditable=true], [role=textbox], [role=combobox]")) return true;
    return node.tagName === "INPUT";
  }

  Object.assign(root.QEvictView.prototype, {
    _on(target, name, act, options) {
      target.addEventListener(name, act, options);
      this._off.push(() => target.removeEventListener(name, act, options));
    },

    _listen() {
      const { host } = this;
      this._on(document, "keydown", (event) => this._key(event));
      this._on(host, "pointerdown", () => (QEvictView.active = this));
      this._on(host, "focusin", () => (QEvictView.active = this));
      this._on(root, "pagehide", () => this._close());
      this._on(root, "pageshow", () => this._open());
      this._on(root, "resize", () => this._invalidate("layout", "all"));
      this._on(this.motion, "change", () => this._invalidate("all"));
      this._on(document, "visibilitychange", () => {
        clearTimeout(this._hiddenTimer);
        if (document.hidden) {
          this._hiddenTimer = setTimeout(() => this._close(), HIDDEN_CLOSE);
        } else {
          this._open();
          this.memo.key = "";
          this._invalidate("events", "all");
        }
      });
      const sizes = new ResizeObserver(() => {
        const width = Math.floor(this.ui.lanes.clientWidth);
        if (width && width !== this.width) this._invalidate("layout", "all");
      });
      sizes.observe(host);
      this._off.push(() => sizes.disconnect());
      const themes = new MutationObserver(() => this.theme === "auto" && this.setTheme("auto"));
      themes.observe(document.body, { attributes: true, attributeFilter: ["class"] });
      this._off.push(() => themes.disconnect());
      this._pointers();
    },

    _pointers() {
      const { host } = this;
      let down = null;
      const where = (event) => {
        const lanes = event.target === this.ui.lanesCanvas;
        if (!lanes && event.target !== this.ui.overlayCanvas) return null;
        if (!this.axis || !this.trace.board) return null;
        const box = event.target.getBoundingClientRect();
        const window = this.axis.pick(event.clientX - box.left, this.trace.board.count);
        const band = Math.max(0, Math.floor((event.clientY - box.top - Draw.OVERHANG) / this.bandHeight));
        return { lanes, window, row: lanes ? this.row : Math.min(this.trace.meta.rows - 1, band * this.group) };
      };
      this._on(host, "pointermove", (event) => {
        if (this._dragging) return this._dragging(event);
        const hit = where(event);
        if (hit) this._point(hit.window, hit.row, event);
        else if (this.cursor !== null && !event.target.closest(".qe-tip, .qe-tokens")) this._point(null);
      });
      this._on(host, "pointerleave", () => this._point(null));
      this._on(host, "pointerdown", (event) => {
        down = where(event) && { x: event.clientX, y: event.clientY };
        this._grab(event);
      });
      this._on(root, "pointerup", (event) => {
        this._dragging = null;
        if (!down || this.destroyed) return;
        const dx = event.clientX - down.x;
        const dy = event.clientY - down.y;
        down = null;
        if (event.pointerType === "touch" && Math.abs(dx) > 45 && Math.abs(dx) > 2 * Math.abs(dy)) {
          this._user(() => this.step(dx < 0 ? 1 : -1));
          return;
        }
        const hit = where(event);
        if (hit && Math.abs(dx) + Math.abs(dy) < 8) {
          if (!hit.lanes) this.setRow(hit.row);
          this._point(hit.window, null, event);
        }
      });
      this._on(host, "dblclick", (event) => {
        if (event.target.closest(".qe-brush")) this._zoomTo(null);
      });
      this._on(
        host,
        "wheel",
        (event) => {
          const hit = (event.ctrlKey || event.metaKey || event.shiftKey) && where(event);
          if (!hit || hit.window === null) return;
          event.preventDefault();
          this._zoomBy((event.deltaY || event.deltaX) > 0 ? 1.25 : 0.8, hit.window);
        },
        { passive: false }
      );
    },

    _key(event) {
      if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || this.destroyed) return;
      const target = event.target;
      const inside = this.host.contains(target);
      if (!this.host.offsetParent && getComputedStyle(this.host).position !== "fixed") return;
      if (!inside) {
        const plain = target.tagName === "BUTTON" && target.getAttribute("role") !== "tab";
        if (!plain && target !== document.body && target !== document.documentElement) return;
        const active = QEvictView.active;
        if (active && active !== this && active.host.isConnected && active.host.offsetParent) return;
      }
      if (target !== this.ui.slider && typing(target)) return;
      const button = target.closest("button, summary, a");
      if (button && (event.key === " " || event.key === "Enter")) return;
      const act = this._action(event);
      if (!act) return;
      event.preventDefault();
      QEvictView.active = this;
      act();
    },

    _action(event) {
      const back = () => this._user(() => this.step(-1));
      const forward = () => this._user(() => this.step(1));
      const faster = (by) => this.setSpeed(SPEEDS[Math.min(4, Math.max(0, SPEEDS.indexOf(Number(this.ui.speed.value)) + by))]);
      const closed = !this.ui.sheet;
      const actions = {
        ArrowLeft: back,
        PageUp: back,
        ArrowRight: forward,
        PageDown: forward,
        ArrowUp: () => this.setRow(this.row - 1),
        ArrowDown: () => this.setRow(this.row + 1),
        Home: () => this._user(() => this.seek(0)),
        End: () => this._user(() => this._toEnd()),
        " ": () => (this.playing ? this.pause() : this.play()),
        "[": () => faster(-1),
        "]": () => faster(1),
        l: () => this.setLoop(this.loop ? null : []),
        L: () => this._range(),
        p: () => this._flip("stopAtPromotion"),
        r: () => this._flip("showRegret"),
        ",": () => this._walk(-1),
        ".": () => this._walk(1),
        "+": () => this._zoomBy(0.7, this.cursor),
        "=": () => this._zoomBy(0.7, this.cursor),
        "-": () => this._zoomBy(1.4, this.cursor),
        0: () => this._zoomTo(null),
        "?": () => this._sheet(closed),
        Escape: closed && this.cursor === null ? null : () => (closed ? this._point(null) : this._sheet(false)),
      };
      const { key } = event;
      return Object.hasOwn(actions, key) ? actions[key] : actions[key.toLowerCase()];
    },

    _range() {
      if (this.loop && this.loop.length) this.setLoop(null);
      else if (this._loopStart === undefined || this._loopStart === null) this._loopStart = this.index;
      else {
        this.setLoop([this._loopStart, this.index]);
        this._loopStart = null;
      }
    },

    _brush() {
      const { ui, axis, total } = this;
      const plain = (axis.right - axis.start) / total;
      ui.brush.hidden = !this.zoom && plain >= Draw.THIN;
      ui.brush.style.marginLeft = `${axis.start}px`;
      ui.brush.style.width = `${axis.right - axis.start}px`;
      const [a, b] = this.zoom || [0, total];
      ui.brushPart.style.left = `${(100 * a) / total}%`;
      ui.brushPart.style.width = `${(100 * (b - a)) / total}%`;
    },

    _zoomTo(range) {
      if (!this.axis) return;
      if (range) {
        const span = Math.min(this.total, Math.max(16, range[1] - range[0]));
        const start = Math.min(this.total - span, Math.max(0, range[0]));
        range = span >= this.total ? null : [start, start + span];
      }
      this.zoom = range;
      this._invalidate("layout", "all");
    },

    _zoomBy(factor, around) {
      const [a, b] = this.zoom || [0, this.total];
      const mid = around === null || around < a || around > b ? (a + b) / 2 : around;
      this._zoomTo([mid - (mid - a) * factor, mid + (b - mid) * factor]);
    },

    _grab(event) {
      if (!event.target.closest(".qe-brush")) return;
      event.preventDefault();
      const box = this.ui.brush.getBoundingClientRect();
      const at = (e) => ((e.clientX - box.left) / box.width) * this.total;
      const start = at(event);
      const [a, b] = this.zoom || [0, this.total];
      if (this.zoom && start > a && start < b) this._dragging = (e) => this._zoomTo([a + at(e) - start, b + at(e) - start]);
      else this._dragging = (e) => this._zoomTo([Math.min(start, at(e)), Math.max(start, at(e))]);
    },
  });
})(window);
