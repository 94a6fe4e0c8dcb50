/* QEvictAnalysis: the figures of one source as cards, each with its formula, its numbers, and both as files.
 * Plotly draws; it is fetched from this server with the first figure. Texts of results, names and token text are
 * untrusted: they only ever become textContent, or numbers of a figure that the server has made. */
(function (root) {
  "use strict";

  const SIZE = 1200; // pixels of a downloaded picture's width, drawn twice as fine
  const CELLS = /^[=+\-@\t\r]/; // what a spreadsheet would take for a formula

  function el(tag, attributes, ...inside) {
    const node = document.createElement(tag);
    for (const name in attributes || {}) {
      if (name === "text") node.textContent = attributes[name];
      else if (name.startsWith("on")) node.addEventListener(name.slice(2), attributes[name]);
      else node.setAttribute(name, attributes[name]);
    }
    node.append(...inside);
    return node;
  }

  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  let script = null;
  function plotly(src) {
    script =
      script ||
      new Promise((done, failed) => {
        const onload = () => done(root.Plotly);
        const onerror = () => {
          script = null;
          failed(new Error(src));
        };
        document.head.appendChild(Object.assign(document.createElement("script"), { src, onload, onerror }));
      });
    return script;
  }

  class QEvictAnalysis {
    constructor(host, board) {
      this.host = host;
      this.board = board;
      this.source = "";
      this.asked = 0;
      this.data = null;
      this.opened = new Set();
      this.seen = new IntersectionObserver((entries) => this._seen(entries), { rootMargin: "400px" });
      this.sizes = new ResizeObserver((entries) => this._resized(entries));
      host.classList.add("qe-ana");
      this.status = el("p", { class: "qe-page-status", role: "status" });
      this.body = el("div", {});
      host.replaceChildren(this.status, this.body);
      this.look = this._look();
      const changed = () => {
        const look = this._look();
        const old = this.look;
        this.look = look;
        if (!this.source || (look.theme === old.theme && look.lang === old.lang && look.scale === old.scale)) return;
        if (look.theme === old.theme && look.lang === old.lang) this._show();
        else this._fetch();
      };
      this.observer = new MutationObserver(changed);
      this.observer.observe(document.documentElement, { attributes: true, attributeFilter: ["lang", "style"] });
      this.observer.observe(document.body, { attributes: true, attributeFilter: ["class"] });
    }

    static attach(host, board) {
      return (root.qeAnalysis = new QEvictAnalysis(host, board));
    }

    /** Shows a source; the same one with the same turn is left as it is. */
    open(source, turn) {
      if (source === this.source && turn === this.turn) return;
      if (source !== this.source) this.opened.clear();
      this.source = source;
      this.turn = turn;
      if (source) this._fetch();
      else this._clear("");
    }

    _look() {
      const page = document.documentElement;
      return {
        theme: document.body.classList.contains("dark") ? "dark" : "light",
        lang: page.lang.slice(0, 2) in this.board.texts ? page.lang.slice(0, 2) : "en",
        scale: parseFloat(page.style.getPropertyValue("--qe-scale")) || 1,
      };
    }

    _t(key, values) {
      const words = this.board.texts[this.look.lang] || {};
      let found = words["analysis." + key] || key;
      for (const name in values || {}) found = found.split("{" + name + "}").join(String(values[name]));
      return found;
    }

    async _fetch() {
      const turn = ++this.asked;
      this.ready = false;
      this.status.textContent = this._t("loading");
      const query = new URLSearchParams({ source: this.source, theme: this.look.theme, lang: this.look.lang });
      try {
        const answer = await fetch("qe/analysis?" + query);
        const data = await answer.json();
        if (!answer.ok) throw new Error(data.detail || String(answer.status));
        if (turn !== this.asked) return;
        this.data = data;
        this._show();
      } catch (error) {
        if (turn === this.asked) this._clear(this._t("failed", { why: error.message }));
      }
    }

    _clear(sentence) {
      this.data = null;
      this._drop();
      this.body.replaceChildren();
      this.status.textContent = sentence;
    }

    _drop() {
      this.seen.disconnect();
      this.sizes.disconnect();
      for (const plot of this.body.querySelectorAll(".qe-ana-plot")) if (root.Plotly) root.Plotly.purge(plot);
    }

    _show() {
      const data = this.data;
      if (!data) return;
      const at = root.scrollY;
      this._drop();
      this.status.textContent = data.cards.length ? "" : this._t("nothing");
      this.body.replaceChildren(this._head(data), ...this._groups(data));
      for (const plot of this.body.querySelectorAll(".qe-ana-plot")) this.seen.observe(plot);
      root.scrollTo(root.scrollX, at);
      this.ready = true;
    }

    _head(data) {
      const facts = el("dl", { class: "qe-ana-facts" });
      for (const [name, value] of data.facts) facts.append(el("div", {}, el("dt", { text: name }), el("dd", { text: value })));
      const head = el("div", { class: "qe-ana-head" }, el("h2", { text: data.title }), facts);
      if (data.notes.length) {
        const list = el("ul", {});
        for (const note of data.notes) list.append(el("li", { text: note }));
        const long = data.notes.length > 2;
        head.append(long ? this._fold("setup", this._t("setup"), list) : list);
      }
      if (data.cards.length > 4) {
        const list = el("ul", { class: "qe-ana-list" });
        for (const card of data.cards) {
          const link = el("a", { href: "#" + this._id(card), text: card.title, onclick: (event) => this._jump(event, card) });
          list.append(el("li", {}, link));
        }
        head.append(this._fold("jump", this._t("jump") + " (" + data.cards.length + ")", list));
      }
      return head;
    }

    _jump(event, card) {
      event.preventDefault(); // the page's address belongs to its tabs
      const title = document.getElementById(this._id(card));
      title.scrollIntoView({ block: "start" });
      title.focus();
    }

    _id(card) {
      return "qe-ana-" + this.data.cards.indexOf(card);
    }

    _groups(data) {
      const parts = [];
      for (const name in data.groups) {
        const cards = data.cards.filter((card) => card.group === name);
        if (!cards.length) continue;
        const grid = el("div", { class: "qe-ana-grid" }, ...cards.map((card) => this._card(card)));
        parts.push(el("section", {}, el("h3", { text: data.groups[name] }), grid));
      }
      return parts;
    }

    _card(card) {
      const id = this._id(card);
      const height = Math.round((card.figure.layout.height || 340) * Math.max(1, this.look.scale * 0.9));
      const plot = el("div", { class: "qe-ana-plot", role: "img", "aria-label": card.title + ". " + card.reads, "data-wait": this._t("loading") });
      plot.style.height = height + "px";
      plot.card = card;
      const button = (kind, act) =>
        el("button", {
          type: "button",
          class: "qe-ana-button",
          "data-kind": kind,
          "aria-label": this._t(kind + "_of", { title: card.title }),
          text: this._t(kind),
          onclick: act,
        });
      return el(
        "article",
        { class: "qe-ana-card", "aria-labelledby": id, "data-card": card.id },
        el(
          "div",
          { class: "qe-ana-top" },
          el("h4", { id, tabindex: "-1", text: card.title }),
          el("span", { class: "qe-ana-files" }, button("png", () => this._png(card)), button("csv", () => this._csv(card))),
        ),
        el("p", { class: "qe-ana-reads", text: card.reads + (card.note ? " " + card.note : "") }),
        plot,
        this._numbers(card),
      );
    }

    _fold(key, name, ...inside) {
      const fold = el("details", { class: "qe-ana-fold" }, el("summary", { text: name }), ...inside);
      fold.open = this.opened.has(key);
      fold.addEventListener("toggle", () => (fold.open ? this.opened.add(key) : this.opened.delete(key)));
      return fold;
    }

    _numbers(card) {
      const inside = el("div", { class: "qe-ana-inside" });
      const fold = this._fold(card.id, this._t("open"), inside);
      // A table of some thousand lines is made when somebody looks at it.
      const fill = () => {
        if (!fold.open || inside.childElementCount) return;
        inside.append(
          el("p", { class: "qe-ana-formula" }, el("strong", { text: this._t("formula") }), " ", card.formula),
          el("p", { class: "qe-ana-code", text: this._t("code", { file: card.code }) }),
          this._table(card),
        );
        if (card.more) inside.append(el("p", { text: this._t("more", { count: card.more }) }));
      };
      fold.addEventListener("toggle", fill);
      fill();
      return fold;
    }

    _table(card) {
      const name = this._t("numbers", { title: card.title });
      const head = el("tr", {}, ...card.columns.map((column) => el("th", { scope: "col", text: column })));
      const lines = card.rows.map((row) =>
        el("tr", {}, ...row.map((cell) => el("td", { class: typeof cell === "number" ? "qe-ana-number" : "", text: shown(cell) }))),
      );
      const table = el("table", { class: "qe-ana-table" }, el("thead", {}, head), el("tbody", {}, ...lines));
      return el("div", { class: "qe-ana-scroll", tabindex: "0", role: "region", "aria-label": name }, table);
    }

    // ---- plots --------------------------------------------------------------------------------------------------

    async _seen(entries) {
      const plots = entries.filter((entry) => entry.isIntersecting).map((entry) => entry.target);
      for (const plot of plots) this.seen.unobserve(plot);
      if (!plots.length) return;
      try {
        const Plotly = await plotly(this.board.files[1]);
        for (const plot of plots) if (plot.isConnected) await this._draw(Plotly, plot);
      } catch (error) {
        this.status.textContent = this._t("failed", { why: error.message });
      }
    }

    async _draw(Plotly, plot) {
      const layout = this._layout(plot.card, this.look.scale);
      layout.title = { text: "" };
      layout.margin = { ...layout.margin, t: 14 };
      layout.width = plot.clientWidth;
      layout.height = plot.clientHeight;
      const config = { displayModeBar: false, displaylogo: false, showTips: false, doubleClick: "reset" };
      await Plotly.newPlot(plot, copy(plot.card.figure.data), layout, config);
      plot.drawn = plot.clientWidth;
      this.sizes.observe(plot);
    }

    _layout(card, scale) {
      const layout = copy(card.figure.layout);
      const size = Math.round(13 * scale);
      layout.font = { ...layout.font, size };
      for (const axis of [layout.xaxis, layout.yaxis]) if (axis && axis.title) axis.title.font = { size };
      return layout;
    }

    _resized(entries) {
      for (const { target } of entries) {
        if (!target.clientWidth || Math.abs(target.clientWidth - target.drawn) < 2) continue;
        target.drawn = target.clientWidth;
        root.Plotly.relayout(target, { width: target.clientWidth });
      }
    }

    // ---- files --------------------------------------------------------------------------------------------------

    _name(card, ending) {
      return "qevict-" + card.id.replace(/[^A-Za-z0-9.-]+/g, "-").slice(0, 80) + "." + ending;
    }

    async _png(card) {
      try {
        const Plotly = await plotly(this.board.files[1]);
        const layout = this._layout(card, 1.25);
        const height = Math.round((layout.height || 420) * 1.45);
        layout.title = { text: plain(card.title), x: 0.02, xanchor: "left", font: { size: 22 } };
        const source = plain(this.data.title + (card.note ? " · " + card.note : ""));
        layout.margin = { ...layout.margin, t: 96 };
        layout.annotations = (layout.annotations || []).concat({
          text: source, x: 0, y: 1, yshift: 12, xref: "paper", yref: "paper", xanchor: "left", yanchor: "bottom", showarrow: false, font: { size: 14 },
        });
        const size = { format: "png", width: SIZE, height, scale: 2 };
        const url = await Plotly.toImage({ data: copy(card.figure.data), layout, config: {} }, size);
        this._save(url, this._name(card, "png"));
      } catch (error) {
        this.status.textContent = this._t("failed", { why: error.message });
      }
    }

    _csv(card) {
      const lines = [card.columns, ...card.rows].map((row) => row.map(quoted).join(","));
      // The mark at the beginning tells a spreadsheet that this is UTF-8.
      const url = URL.createObjectURL(new Blob(["\ufeff" + lines.join("\r\n") + "\r\n"], { type: "text/csv;charset=utf-8" }));
      this._save(url, this._name(card, "csv"));
      setTimeout(() => URL.revokeObjectURL(url), 10000);
    }

    _save(href, download) {
      const link = el("a", { href, download });
      document.body.append(link);
      link.click();
      link.remove();
    }
  }

  const copy = (value) => JSON.parse(JSON.stringify(value));

  function shown(cell) {
    if (cell === null || cell === "") return "–";
    if (typeof cell !== "number") return String(cell);
    if (Number.isInteger(cell)) return cell.toLocaleString("en-US");
    return Math.abs(cell) >= 0.001 && Math.abs(cell) < 1e6 ? String(Number(cell.toFixed(4))) : cell.toPrecision(3);
  }

  function quoted(cell) {
    if (cell === null) return "";
    if (typeof cell === "number") return String(cell);
    const text = CELLS.test(cell) ? "'" + cell : cell;
    return /[",\r\n]/.test(text) ? '"' + text.replace(/"/g, '""') + '"' : text;
  }

  root.QEvictAnalysis = QEvictAnalysis;
})(window);
