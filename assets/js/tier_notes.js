/* Notes on windows and events of a stored run: pins on lanes, atlas and timeline, a caption, a panel to write them in.
 * What a note says comes from people: textContent only. Comes after the board's own scripts, when there are notes to
 * show or may be; knows an address to keep them at, and nothing of who follows. */
(function (root) {
  "use strict";

  const QEvictView = root.QEvictView;
  const { el, setText } = QEvictView.parts;
  const board = QEvictView.prototype;
  const { _action, _build, _reset, _tip, _transport } = board;
  const KEYS = [["M", "view.key_note"], ["N", "view.key_notes"], ["U", "view.key_undo"]];
  const TEXT_CHARS = 500;
  const CAPTIONS = 3;
  const GAP = 1.55; // widths of a letter between two pins side by side

  const firstWindow = (note) => (note.windows.length ? note.windows[0] : -1);
  const byPlace = (a, b) => a.r - b.r || a.row - b.row || firstWindow(a) - firstWindow(b) || a.id - b.id;

  Object.assign(board, {
    /** Shows the notes kept at `address`/marks; without one, those in the trace, to read only. */
    async openNotes(address, editable) {
      this.notesAt = address;
      this.editable = Boolean(editable);
      this.notes = [];
      this.notesShown = true;
      this.noteUndo = this.noteEdit = null;
      this.moreKeys = editable ? KEYS : KEYS.slice(1, 2);
      this._buildNotes();
      if (address) return this.readNotes();
      const marks = this.trace.marks.map((mark, i) => ({ id: i, r: mark.r, row: mark.l, windows: mark.w, text: mark.text, author: mark.by }));
      return this._takeNotes(marks);
    },

    async readNotes() {
      const address = this.notesAt;
      const answer = await fetch(`${address}/marks`).catch(() => null);
      if (!answer || !answer.ok) return;
      const { marks } = await answer.json();
      if (address === this.notesAt && this.notes) this._takeNotes(marks);
    },

    showNotes(on) {
      if (this.notesShown === on || !this.notes) return;
      this.notesShown = on;
      this._pinKey = "";
      this._drawNotes();
      this._invalidate("transport");
    },

    closeNotes() {
      for (const node of this.host.querySelectorAll(".qe-note-part")) node.remove();
      this.notes = this.notesAt = null;
      this.moreKeys = [];
    },

    _takeNotes(list) {
      this.notes = list.slice().sort(byPlace);
      this.notes.forEach((note, i) => (note.number = i + 1));
      this._pinKey = "";
      this._drawNotes();
      this._noteTable();
      this._invalidate("transport");
    },

    _reset() {
      if (this.notes) this.closeNotes();
      _reset.call(this);
    },

    _build() {
      _build.call(this);
      if (this.notes) {
        this._buildNotes();
        this._takeNotes(this.notes);
      }
    },

    _buildNotes() {
      const { ui, host } = this;
      for (const node of host.querySelectorAll(".qe-note-part")) node.remove();
      ui.noteStrip = el("div", "qe-note-part qe-note-strip", null);
      ui.lanes.before(ui.noteStrip);
      ui.notePins = el("div", "qe-note-part qe-note-pins", ui.atlas);
      ui.noteLine = el("div", "qe-note-part qe-note-line", ui.transport);
      ui.noteCaption = el("div", "qe-note-part qe-note-caption", ui.transport, { role: "status" });
      ui.noteButton = el("button", "qe-note-part qe-toggle", null, { type: "button", "aria-expanded": "false" });
      ui.noteButton.addEventListener("click", () => this._openPanel(ui.notePanel.hidden));
      ui.keys.before(ui.noteButton);
      ui.tipNote = el("b", "qe-note-part qe-tip-note", ui.tip, { dir: "auto" });
      ui.noteTable = el("table", "qe-note-part qe-hidden", host);
      ui.notePanel = el("div", "qe-note-part qe-sheet qe-notes", host, { role: "dialog", "aria-label": this._t("view.notes") });
      ui.notePanel.hidden = true;
      ui.notePanel.addEventListener("keydown", (event) => this._panelKey(event));
      ui.overlayCanvas.ondblclick = ui.lanesCanvas.ondblclick = () => this.cursor !== null && this._write();
      this._pinKey = "";
    },

    // ---- what is shown --------------------------------------------------------------------------------------------

    _where(note) {
      const parts = note.windows.map((w) => this._t("view.window", { w }));
      if (parts.length) parts.push(this._rowName(note.row));
      return [...parts, this._t("view.event", { r: note.r })].join(" · ");
    },

    _transport() {
      _transport.call(this);
      if (!this.notes) return;
      const { ui, trace } = this;
      setText(ui.noteButton, this._t("view.notes_count", { n: this.notes.length }));
      ui.noteButton.hidden = !this.editable && !this.notes.length;
      const step = trace.steps[this.index];
      const here = step && this.notesShown ? this.notes.filter((note) => note.r === step.r) : [];
      const key = here.map((note) => [note.number, note.text]).join("\n");
      if (ui.noteCaption.dataset.key !== key) {
        ui.noteCaption.dataset.key = key;
        ui.noteCaption.replaceChildren();
        for (const note of here.slice(0, CAPTIONS)) {
          const line = el("p", "", ui.noteCaption, { dir: "auto" });
          this._pin(note, "", line, "span");
          el("span", "", line).textContent = note.text;
        }
        ui.noteCaption.hidden = !here.length;
      }
      this._pins();
    },

    _pin(note, place, parent, tag) {
      const kind = note.windows.length ? "window" : "event";
      const pin = el(tag || "button", `qe-pin qe-pin-${kind} ${place}`, parent, tag ? { "aria-hidden": "true" } : { type: "button", tabindex: "-1" });
      pin.textContent = String(note.number);
      if (tag) return pin;
      pin.setAttribute("aria-label", `${note.number}, ${this._where(note)}: ${note.text}`);
      pin.addEventListener("click", () => this._show(note));
      return pin;
    },

    /** Places the pins anew where anything that moves them has changed. */
    _pins() {
      const { ui, axis, trace, notes, group, bandHeight } = this;
      const last = trace.steps.length - 1;
      if (!axis || last < 0 || (!notes.length && this._pinKey === "none")) return;
      const begun = Math.min(trace.board.count, 1 + Math.max(-1, ...notes.flatMap((note) => note.windows)));
      const line = [ui.slider.offsetLeft, ui.slider.offsetWidth];
      const key = [axis.left, axis.right, axis.z0, axis.z1, axis.total, this.row, begun, group, bandHeight, this.scale, trace.steps[last].r, ...line].join();
      if (key === this._pinKey) return;
      this._pinKey = notes.length ? key : "none";
      const shown = this.notesShown ? notes : [];
      for (const part of [ui.noteStrip, ui.notePins, ui.noteLine]) part.replaceChildren();
      const onWindows = shown.filter((note) => note.windows.length);
      ui.noteStrip.hidden = !onWindows.length;
      ui.transport.classList.toggle("qe-noted", shown.length > 0);
      const [first, end] = axis.range(begun);
      const strip = [];
      for (const note of onWindows) {
        for (const w of note.windows) {
          if (w < first || w >= end) continue;
          const x = axis.x(w) + axis.width(w) / 2;
          if (note.row === this.row) strip.push([x, this._pin(note, "", ui.noteStrip)]);
          const pin = this._pin(note, "qe-pin-small", ui.notePins);
          pin.style.left = `${x}px`;
          pin.style.top = `${Math.floor(note.row / group) * bandHeight + bandHeight / 2}px`;
        }
      }
      this._spread(strip);
      const most = Math.max(1, last);
      this._spread(
        shown.map((note) => {
          const later = trace.steps.findIndex((step) => step.r > note.r);
          const index = later < 0 ? last : Math.max(0, later - 1);
          return [line[0] + 8 + (index / most) * (line[1] - 16), this._pin(note, "", ui.noteLine)];
        })
      );
    },

    /** Pins side by side, each as near to its place as the one to the left lets it. */
    _spread(pins) {
      let before = -1e9;
      for (const [x, pin] of pins.sort((a, b) => a[0] - b[0])) {
        const wide = parseFloat(getComputedStyle(pin).fontSize) * (GAP + 0.5 * (pin.textContent.length - 1));
        before = Math.max(x, before + wide);
        pin.style.left = `${before}px`;
        pin.style.setProperty("--qe-shift", `${x - before}px`);
      }
    },

    _tip() {
      _tip.call(this);
      if (!this.notes) return;
      const here = this.notes.filter((note) => note.row === this._tipRow && note.windows.includes(this.cursor));
      setText(this.ui.tipNote, here.map((note) => `${note.number}  ${note.text}`).join("\n"));
      if (!this.ui.tip.hidden) this._placeTip();
    },

    _noteTable() {
      const { noteTable } = this.ui;
      noteTable.replaceChildren();
      if (!this.notes.length) return;
      el("caption", "", noteTable).textContent = this._t("view.notes");
      const body = el("tbody", "", noteTable);
      for (const note of this.notes) {
        const line = el("tr", "", body);
        el("th", "", line, { scope: "row" }).textContent = String(note.number);
        el("td", "", line).textContent = this._where(note);
        el("td", "", line, { dir: "auto" }).textContent = note.text;
      }
    },

    /** Goes to where a note stands, and opens it in the panel. */
    _show(note) {
      this._user(() => this.seekEvent(note.r));
      if (note.windows.length) this.setRow(note.row);
      this.noteChosen = note.id;
      this._openPanel(true);
    },

    // ---- the panel ------------------------------------------------------------------------------------------------

    _openPanel(open) {
      const { ui } = this;
      ui.notePanel.hidden = !open;
      ui.noteButton.setAttribute("aria-expanded", String(open));
      if (!open) this.noteEdit = null;
      this._drawNotes();
      if (!open) return this.host.focus({ preventScroll: true });
      const node = ["textarea", "[aria-current]", "button"].map((what) => ui.notePanel.querySelector(what)).find(Boolean);
      node.focus({ preventScroll: true });
      node.scrollIntoView({ block: "nearest" });
    },

    _drawNotes() {
      const { ui } = this;
      const panel = ui.notePanel;
      ui.noteButton.setAttribute("aria-pressed", String(!panel.hidden));
      if (panel.hidden) return;
      const button = (parent, words, act) => {
        const made = el("button", "qe-toggle", parent, { type: "button" });
        made.textContent = words;
        made.addEventListener("click", act);
        return made;
      };
      const written = panel.querySelector("textarea");
      const draft = written && this.noteEdit ? written.value : null;
      panel.replaceChildren();
      const head = el("div", "qe-notes-head", panel);
      el("b", "", head).textContent = this._t("view.notes");
      button(head, this._t("view.notes_show"), () => this.showNotes(!this.notesShown)).setAttribute("aria-pressed", String(this.notesShown));
      button(head, this._t("view.close"), () => this._openPanel(false));
      const list = el("ol", "", panel);
      for (const note of this.notes) {
        const item = el("li", "", list);
        const go = button(item, "", () => this._show(note));
        this._pin(note, "", go, "span");
        go.append(` ${this._where(note)}`);
        if (note.id === this.noteChosen) go.setAttribute("aria-current", "true");
        el("p", "", item, { dir: "auto" }).textContent = note.text;
        if (!this.editable) continue;
        const tools = el("div", "", item);
        button(tools, this._t("view.note_edit"), () => this._write(note)).setAttribute("aria-label", `${this._t("view.note_edit")} ${note.number}`);
        button(tools, this._t("view.note_delete"), () => this._remove(note)).setAttribute("aria-label", `${this._t("view.note_delete")} ${note.number}`);
      }
      if (!this.notes.length) el("p", "qe-note", panel).textContent = this._t("view.notes_none");
      if (this.noteSaid) el("p", "qe-note", panel, { role: "status" }).textContent = this.noteSaid;
      if (this.noteUndo) button(panel, this._t("view.note_undo"), () => this._undo());
      if (this.noteEdit) this._form(panel, button, draft);
      else if (this.editable) button(panel, this._t("view.note_add", { where: this._where(this._target()) }), () => this._write());
    },

    _form(panel, button, draft) {
      const note = this.noteEdit;
      const form = el("form", "qe-note-form", panel);
      const label = el("label", "", form);
      el("span", "", label).textContent = this._where(note);
      const field = el("textarea", "", label, { rows: "3", maxlength: String(TEXT_CHARS), dir: "auto" });
      field.value = draft === null ? note.text : draft;
      const save = button(form, this._t("view.note_save"), () => {});
      save.type = "submit";
      button(form, this._t("view.note_cancel"), () => this._openPanel(false));
      form.addEventListener("submit", (event) => {
        event.preventDefault();
        this._save(field.value.trim());
      });
    },

    _panelKey(event) {
      if (event.key === "Escape") {
        event.preventDefault();
        event.stopPropagation();
        this._openPanel(false);
      } else if (event.key === "Enter" && !event.shiftKey && event.target.tagName === "TEXTAREA" && !event.isComposing) {
        event.preventDefault();
        this._save(event.target.value.trim());
      }
    },

    // ---- writing --------------------------------------------------------------------------------------------------

    /** What a new note would be about: the window that is pointed at, else the event. */
    _target() {
      const step = this.trace.steps[this.index] || { r: 0 };
      const window = this.cursor !== null && this.cursor >= 0 ? this.cursor : null;
      const row = window === null ? 0 : this._tipRow;
      return { id: 0, r: step.r, row, windows: window === null ? [] : [window], text: "" };
    },

    /** Opens the form for a note, or for what is pointed at; there, the note that stands there already. */
    _write(note) {
      if (!this.editable) return this._openPanel(true);
      const wanted = note || this._target();
      const same = (one) => String(one.windows) === String(wanted.windows) && one.row === wanted.row && (wanted.windows.length > 0 || one.r === wanted.r);
      this.pause();
      this.noteSaid = "";
      this.noteEdit = null; // else an unsent text would go into this note
      this._drawNotes();
      this.noteEdit = note || this.notes.find(same) || wanted;
      this.noteChosen = this.noteEdit.id;
      this._openPanel(true);
    },

    async _send(method, path, body) {
      const options = { method, headers: { "Content-Type": "application/json" }, body: body && JSON.stringify(body) };
      const answer = await fetch(`${this.notesAt}/marks${path}`, options).catch(() => null);
      if (answer && answer.ok) return answer.json();
      const why = answer ? (await answer.json().catch(() => ({}))).detail || String(answer.status) : this._t("view.lost");
      this.noteSaid = this._t("view.note_failed", { why });
      this._drawNotes();
      return null;
    },

    async _save(text) {
      const note = this.noteEdit;
      if (!text || !note) return;
      const { r, row, windows } = note;
      const kept = await (note.id ? this._send("PUT", `/${note.id}`, { text }) : this._send("POST", "", { r, row, windows, text }));
      if (!kept || !this.notes) return;
      this.noteSaid = "";
      this.noteEdit = null;
      this.noteChosen = note.id || kept.id;
      await this.readNotes();
      this._openPanel(false);
    },

    async _remove(note) {
      if (!(await this._send("DELETE", `/${note.id}`))) return;
      this.noteUndo = note;
      this.noteSaid = this._t("view.note_deleted", { n: note.number });
      await this.readNotes();
      this._openPanel(true);
    },

    async _undo() {
      const note = this.noteUndo;
      if (!note) return;
      const { r, row, windows, text, author } = note;
      const kept = await this._send("POST", "", { r, row, windows, text, author });
      if (!kept) return;
      this.noteUndo = null;
      this.noteSaid = "";
      this.noteChosen = kept.id;
      await this.readNotes();
    },

    _action(event) {
      const own = {
        m: () => this._write(),
        n: () => this._openPanel(this.ui.notePanel.hidden),
        u: () => this._undo(),
        Escape: this.notes && !this.ui.notePanel.hidden ? () => this._openPanel(false) : null,
      };
      const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
      return (this.notes && Object.hasOwn(own, key) && own[key]) || _action.call(this, event);
    },
  });
})(window);
