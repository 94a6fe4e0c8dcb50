/* QEvictCompare: two to four systems one above the other on one token axis, with one legend and one transport.
 * What each system holds of a window is drawn as a share of its tokens, so that systems which choose by token or by
 * head stand beside those which choose by window. Keys, zoom and colours are the tier board's own. Token text is
 * untrusted and only ever becomes textContent. Needs the
 * board's scripts before it; compare_draw, compare_free and compare_input come after it. */
(function (root) {
  "use strict";

  const Board = root.QEvictView;
  const { el, icon, setText, percent, SPEEDS } = Board.parts;
  const KEYS = [
    ["← →  PgUp PgDn", "view.key_step"],
    ["↑ ↓", "compare.key_row"],
    ["Home End", "view.key_ends"],
    ["Space", "view.key_play"],
    ["[ ]", "view.key_speed"],
    ["L", "view.key_loop"],
    [", .", "view.key_window"],
    ["+ - 0", "view.key_zoom"],
    ["N", "compare.key_new"],
    ["D", "compare.key_first"],
    ["Esc", "view.key_close"],
    ["?", "view.key_sheet"],
  ];
  const BORROWED = ["_t", "_on", "_key", "_sheet", "_user", "_size", "_zoomTo", "_zoomBy", "_brush", "_grab", "_reduced", "setTheme", "setScale", "setProjector"];

  class QEvictCompare {
    constructor(host, options = {}) {
      this.host = host;
      this.options = options;
      this.texts = options.texts || {};
      this.data = null;
      this.index = 0;
      this.layer = -1; // -1 is all of them
      this.speed = 1;
      this.loop = false;
      this.cursor = null;
      this.zoom = null;
      this.scale = options.scale || 1;
      this.motion = root.matchMedia("(prefers-reduced-motion: reduce)");
      this.means = new Map();
      this._off = [];
      this._frame = this._frame.bind(this);
      this._build();
      this._listen();
      this.setTheme("auto");
    }

    // ---- public -------------------------------------------------------------------------------------------------

    /** A view in a page that has `qeBoards`, whose words follow the page's language. */
    static attach(host, board) {
      const page = document.documentElement;
      const words = () => board.texts[page.lang.slice(0, 2)] || board.texts.en;
      const scale = parseFloat(getComputedStyle(page).getPropertyValue("--qe-scale")) || 1;
      const projector = document.body.classList.contains("qe-projector");
      const boards = (root.qeBoards = root.qeBoards || new Map());
      if (boards.has(board.id)) boards.get(board.id).destroy();
      const view = new QEvictCompare(host, { texts: words(), scale, projector });
      boards.set(board.id, view);
      const languages = new MutationObserver(() => view.setTexts(words()));
      languages.observe(page, { attributes: true, attributeFilter: ["lang"] });
      view._off.push(() => languages.disconnect());
      return view;
    }

    /** Fetches and shows a comparison; the same one twice is shown once, an empty id shows nothing. */
    async open(sid) {
      if (sid === this.sid) return;
      this.sid = sid;
      if (!sid) return this.load(null);
      try {
        const answer = await fetch(`qe/compare/${encodeURIComponent(sid)}`);
        const data = await answer.json();
        if (!answer.ok) throw new Error(data.detail || String(answer.status));
        if (sid === this.sid) this.load(data);
      } catch (error) {
        if (sid === this.sid) this.fail(error.message);
      }
    }

    /** Shows a comparison as the server sends it; null shows nothing. */
    load(data) {
      this.pause();
      this.message = "";
      this.data = data && data.systems.some((system) => system.frames.length) ? data : null;
      this.free = Boolean(this.data) && data.mode === "free";
      if (this.data) {
        for (const system of data.systems) {
          system.looks = QEvictCompare.unpack(system.frames, system.rows);
          system.frames = [];
        }
        // In free mode a system may end before the others: the transport goes as far as the longest.
        this.looks = data.systems.reduce((most, { looks }) => (looks.length > most.length ? looks : most), []);
        this.last = data.prompt_tokens + Math.max(data.new_tokens, data.longest || 0);
        this.total = Math.max(1, Math.ceil((this.last - data.sink_tokens) / data.window_size));
        this.most = Math.max(1e-9, ...data.systems.flatMap((system) => system.kl));
      }
      this.index = this.data ? this.looks.length - 1 : 0;
      this.layer = -1;
      this.zoom = this.cursor = null;
      this.means = new Map();
      this._systems();
      this._invalidate("layout", "all");
      Board.active = this;
    }

    fail(why) {
      this.load(null);
      this.message = this._t("compare.load_failed", { why });
      this._invalidate("all");
    }

    seek(i) {
      if (!this.data) return;
      this.index = Math.min(this.looks.length - 1, Math.max(0, Math.round(i)));
      this._invalidate("all");
    }

    step(by) {
      this.seek(this.index + by);
    }

    play() {
      if (!this.data || this.playing) return;
      if (this.index >= this.looks.length - 1) this.seek(0);
      this.playing = true;
      this._tick();
      this._invalidate("all");
    }

    pause() {
      clearTimeout(this._timer);
      this.playing = false;
      if (this.ui) this._invalidate("all");
    }

    setSpeed(speed) {
      this.speed = Number(speed) || 1;
      this.ui.speed.value = String(this.speed);
    }

    /** Layer -1 is the mean of all. */
    setRow(layer) {
      if (!this.data) return;
      const layers = this.data.layers;
      this.layer = layer < -1 ? layers - 1 : layer >= layers ? -1 : layer;
      this._invalidate("all");
    }

    setTexts(texts) {
      this.texts = texts || {};
      this.host.replaceChildren();
      this._build();
      this._systems();
      this._invalidate("layout", "all");
    }

    destroy() {
      this.pause();
      cancelAnimationFrame(this._raf);
      for (const off of this._off) off();
      if (Board.active === this) Board.active = null;
      this.host.replaceChildren();
      this.destroyed = true;
    }

    // ---- parts --------------------------------------------------------------------------------------------------

    _build() {
      const { host } = this;
      const ui = (this.ui = {});
      host.classList.add("qe", "qe-cmp");
      host.tabIndex = 0;
      host.setAttribute("role", "group");
      host.setAttribute("aria-label", this._t("compare.label"));
      ui.message = el("div", "qe-message qe-alarm", host, { role: "alert" });
      ui.legend = el("div", "qe-legend", host);
      ui.signs = el("span", "qe-cmp-signs", ui.legend);
      ui.note = el("span", "qe-note qe-cmp-note", ui.legend);
      ui.where = el("b", "qe-cmp-where", ui.legend, { "aria-live": "polite" });
      ui.lanes = el("div", "qe-cmp-lanes", host);
      ui.axisCanvas = el("canvas", "qe-cmp-axis", host, { "aria-hidden": "true" });
      ui.brush = el("div", "qe-brush", host, { title: this._t("view.zoom") });
      ui.brushPart = el("div", "", ui.brush);
      this._transport();
      ui.text = el("section", "qe-cmp-read", host, { "aria-label": this._t("compare.text") });
      const head = el("div", "qe-text-head", ui.text);
      el("b", "", head).textContent = this._t("compare.text");
      el("span", "qe-note", head).textContent = this._t("compare.text_note");
      ui.generated = el("div", "qe-tokens qe-generated", ui.text, { dir: "auto", tabindex: "0", role: "region", "aria-label": this._t("compare.text") });
      ui.tip = el("div", "qe-tip", host, { role: "tooltip" });
      ui.tip.hidden = true;
      this._keySheet();
    }

    _transport() {
      const { ui } = this;
      const bar = (ui.transport = el("div", "qe-transport", this.host, { role: "toolbar", "aria-label": this._t("view.position") }));
      const button = (name, act) => {
        const made = el("button", "qe-icon", bar, { type: "button", "aria-label": this._t(`view.${name}`), title: this._t(`view.${name}`) });
        icon(made, name);
        made.addEventListener("click", act);
        return made;
      };
      ui.first = button("first", () => this._user(() => this.seek(0)));
      ui.back = button("back", () => this._user(() => this.step(-1)));
      ui.play = button("play", () => (this.playing ? this.pause() : this.play()));
      ui.forward = button("forward", () => this._user(() => this.step(1)));
      ui.last = button("last", () => this._user(() => this.seek(Infinity)));
      ui.slider = el("input", "qe-slider", bar, { type: "range", min: "0", max: "0", step: "1", "aria-label": this._t("view.position") });
      ui.slider.addEventListener("input", () => this._user(() => this.seek(Number(ui.slider.value))));
      ui.position = el("span", "qe-position", bar);
      ui.rows = el("select", "qe-speed", bar, { "aria-label": this._t("compare.rows"), title: this._t("compare.rows") });
      ui.rows.addEventListener("change", () => this.setRow(Number(ui.rows.value)));
      ui.speed = el("select", "qe-speed", bar, { "aria-label": this._t("view.speed"), title: this._t("view.speed") });
      for (const speed of SPEEDS) el("option", "", ui.speed, { value: String(speed) }).textContent = `${speed}×`;
      ui.speed.value = String(this.speed);
      ui.speed.addEventListener("change", () => this.setSpeed(ui.speed.value));
      ui.loop = el("button", "qe-toggle", bar, { type: "button", "aria-pressed": "false" });
      ui.loop.textContent = this._t("view.loop");
      ui.loop.addEventListener("click", () => this._loop());
      ui.news = el("button", "qe-toggle", bar, { type: "button", "aria-pressed": "false" });
      ui.news.textContent = this._t("compare.zoom_new");
      ui.news.addEventListener("click", () => this._zoomNew());
      ui.toFirst = el("button", "qe-toggle", bar, { type: "button" });
      ui.toFirst.textContent = this._t("compare.to_first");
      ui.toFirst.addEventListener("click", () => this._user(() => this._toFirst()));
      ui.keys = el("button", "qe-icon", bar, { type: "button", "aria-label": this._t("view.keys"), title: this._t("view.keys") });
      ui.keys.textContent = "?";
      ui.keys.addEventListener("click", () => this._sheet(true));
      this._playShown = undefined;
    }

    _keySheet() {
      const { ui } = this;
      ui.sheet = el("div", "qe-sheet", this.host, { role: "dialog", "aria-label": this._t("view.keys") });
      ui.sheet.hidden = true;
      el("b", "", ui.sheet).textContent = this._t("view.keys");
      const list = el("dl", "", ui.sheet);
      for (const [keys, key] of KEYS) {
        const name = el("dt", "", list);
        for (const part of keys.split(/\s+/)) el("kbd", "", name).textContent = part;
        el("dd", "", list).textContent = this._t(key);
      }
      ui.sheetClose = el("button", "qe-toggle", ui.sheet, { type: "button" });
      ui.sheetClose.textContent = this._t("view.close");
      ui.sheetClose.addEventListener("click", () => this._sheet(false));
    }

    /** The marks of this mode: what bars mean, and what stands in the strip above them. */
    _legend() {
      const { ui, data } = this;
      this.host.classList.toggle("qe-cmp-free", this.free);
      const strip = this.free ? ["same", "own", "first"] : ["kl", "miss"];
      ui.signs.replaceChildren();
      for (const name of ["sink", "full", "quant", "evicted", ...strip]) {
        const item = el("span", "qe-key", ui.signs);
        el("i", `qe-swatch qe-is-${name}`, item, { "aria-hidden": "true" });
        const words = name === "sink" ? this._t("view.sink") : this._t(`compare.legend_${name}`);
        el(strip.includes(name) ? "span" : "b", "", item).textContent = words;
        if (name === "sink") el("span", "qe-note", item).textContent = this._t("compare.sink_note", { n: data.sink_tokens });
      }
      setText(ui.note, this._t("compare.legend_note"));
      ui.note.title = this._t("compare.share_note");
      ui.text.hidden = this.free; // the page shows every text whole
      ui.toFirst.hidden = !this.free || this._firstDifference() === null;
    }

    /** One lane per system: its name and figures in the gutter, a canvas beside. */
    _systems() {
      const { ui, data } = this;
      ui.lanes.replaceChildren();
      ui.generated.replaceChildren();
      ui.rows.replaceChildren();
      this.lanes = [];
      this.host.classList.toggle("qe-cmp-none", !data);
      if (!data) return;
      this._legend();
      for (const system of data.systems) {
        const box = el("div", "qe-cmp-lane", ui.lanes);
        const side = el("div", "qe-cmp-side", box);
        const name = el("b", "", side);
        name.textContent = this._name(system);
        const marks = el("span", "qe-cmp-marks", side);
        el("span", `qe-badge qe-keeps-${system.keeps}`, marks).textContent = this._t(`compare.keeps_${system.keeps}`);
        el("span", "qe-note", marks).textContent = this._t("compare.of_full", { share: percent(system.share) });
        if (system.simulated) {
          const mark = el("span", "qe-badge qe-simulated", marks, { title: this._t("compare.simulated_hint") });
          mark.textContent = this._t("compare.simulated");
        }
        const figures = el("span", "qe-note", side);
        const canvas = el("canvas", "", box, { role: "img" });
        this.lanes.push({ system, canvas, figures });
      }
      el("option", "", ui.rows, { value: "-1" }).textContent = this._t("compare.all_layers");
      for (let layer = 0; layer < data.layers; layer++) {
        el("option", "", ui.rows, { value: String(layer) }).textContent = this._t("compare.layer", { layer });
      }
      const { prompt_tokens: prompt } = data;
      this.tokens = data.pieces.slice(prompt).map((piece, i) => {
        const node = el("span", "qe-tok", ui.generated);
        node.textContent = piece;
        node.dataset.w = String(this._window(prompt + i));
        const missed = data.systems.filter((system) => i > 0 && system.agrees[i - 1] === 0);
        if (missed.length) {
          node.classList.add("qe-cmp-differs");
          node.title = this._t("compare.would_differ", { names: missed.map((system) => this._name(system)).join(", ") });
        }
        return node;
      });
    }

    _name(system) {
      return system.key ? this._t(system.key) : system.name;
    }

    _window(position) {
      return Math.floor((position - this.data.sink_tokens) / this.data.window_size);
    }

    // ---- drawing ------------------------------------------------------------------------------------------------

    _invalidate(...what) {
      this.dirty = this.dirty || new Set();
      for (const name of what) this.dirty.add(name);
      if (!this._raf && !this.destroyed) this._raf = requestAnimationFrame(this._frame);
    }

    _frame() {
      this._raf = 0;
      const { dirty, ui } = this;
      this.dirty = new Set();
      setText(ui.message, this.message || "");
      ui.message.hidden = !this.message;
      if (!this.data) return;
      if (dirty.has("layout")) this._layout();
      if (!this.axis) return;
      for (const lane of this.lanes) this._lane(lane);
      this._axisLine();
      this._words();
    }

    _words() {
      const { ui, data } = this;
      const last = this.looks.length - 1;
      const t = this.index === last ? this.last : this.looks[this.index].t;
      const row = this.layer < 0 ? this._t("compare.all_layers") : this._t("compare.layer", { layer: this.layer });
      setText(ui.where, `${row} · ${this._t("compare.at_token", { t })}`);
      setText(ui.position, this._t("compare.look", { i: this.index + 1, n: last + 1 }));
      ui.slider.max = String(last);
      ui.slider.value = String(this.index);
      ui.slider.setAttribute("aria-valuetext", `${ui.where.textContent}, ${ui.position.textContent}`);
      ui.rows.value = String(this.layer);
      ui.loop.setAttribute("aria-pressed", String(this.loop));
      ui.news.setAttribute("aria-pressed", String(Boolean(this.zoom)));
      if (this._playShown !== Boolean(this.playing)) {
        this._playShown = Boolean(this.playing);
        icon(ui.play, this.playing ? "pause" : "play");
        ui.play.setAttribute("aria-label", this._t(this.playing ? "view.pause" : "view.play"));
        ui.play.title = ui.play.getAttribute("aria-label");
      }
      for (const [button, dead] of [[ui.first, this.index <= 0], [ui.back, this.index <= 0], [ui.forward, this.index >= last], [ui.last, this.index >= last]]) {
        button.setAttribute("aria-disabled", String(dead));
      }
      const known = t - data.prompt_tokens;
      this.tokens.forEach((node, i) => (node.hidden = i >= known));
    }

  }

  for (const name of BORROWED) QEvictCompare.prototype[name] = Board.prototype[name];
  root.QEvictCompare = QEvictCompare;
})(window);
