/* Showing a board to others, and following who shows it: position, layer, pointer and notes, not a pixel more.
 * A page has one stream: a follower's carries the run's own messages too. Comes after tier_notes. */
(function (root) {
  "use strict";

  const QEvictView = root.QEvictView;
  const { el, setText } = QEvictView.parts;
  const board = QEvictView.prototype;
  const { _action, _address, _build, _close, _reset, _transport, destroy } = board;
  const LOOK = 100; // ms between two looks at what has to be told
  const ALIVE = 15000; // ms after which the same place is told again
  const OWN_WAY = ["seek", "step", "play", "goLive", "setRow", "setLoop", "_zoomTo"]; // one of these, and a follower looks around alone
  const HEADERS = { "Content-Type": "application/json" };

  Object.assign(board, {
    /** Opens what belongs to a stored session beside its trace: its notes, and who presents it. */
    async join(base, sid) {
      const address = `${base}/s/${encodeURIComponent(sid)}`;
      this._leave();
      const { trace } = this;
      const answer = await fetch(address).catch(() => null);
      const info = answer && answer.ok ? await answer.json() : { yours: false };
      if (trace !== this.trace || this.destroyed) return;
      this.openNotes(address, info.yours);
      this._enterRoom({ address, mine: info.yours, sid });
      if (new URL(root.location.href).searchParams.get("s") === sid) this.followPresenter();
    },

    /** The same for a class: its lessons are followed, and it has no notes. */
    joinClass(lessons, code, asks) {
      this._leave();
      this._enterRoom({ address: `qe/class/${code}`, mine: asks, lessons });
      if (!asks) this.followPresenter();
    },

    _enterRoom(room) {
      this.room = room;
      this.moreKeys = [...(this.notes ? this.moreKeys : []), ...(room.mine ? [["B", "view.key_present"]] : []), ["J", "view.key_follow"]];
      this._buildRoom();
      this._told = setInterval(() => this._tell(), LOOK);
      const bye = () => this.stopPresenting();
      root.addEventListener("pagehide", bye);
      this._goodbye = () => root.removeEventListener("pagehide", bye);
    },

    _leave() {
      if (!this.room) return;
      this.stopPresenting();
      this.followed = null;
      clearInterval(this._told);
      this._goodbye();
      this._hangUp();
      for (const name of OWN_WAY) delete this[name];
      for (const node of this.host.querySelectorAll(".qe-room-part")) node.remove();
      this.room = null;
    },

    _buildRoom() {
      const { ui } = this;
      for (const node of this.host.querySelectorAll(".qe-room-part")) node.remove();
      ui.present = el("button", "qe-room-part qe-toggle", null, { type: "button", "aria-pressed": "false", title: this._t("view.present_hint") });
      ui.present.addEventListener("click", () => this._presents());
      ui.rejoin = el("button", "qe-room-part qe-toggle qe-live", null, { type: "button", "aria-pressed": "false" });
      ui.rejoin.addEventListener("click", () => this._rejoins());
      ui.keys.before(ui.rejoin, ui.present);
      ui.roomSaid = el("div", "qe-room-part qe-hidden", this.host, { role: "status" });
      this._invalidate("transport");
    },

    _build() {
      _build.call(this);
      if (this.room) this._buildRoom();
    },

    // A lesson's steps bring traces of their own: a class outlasts them.
    _reset() {
      if (this.room && !this.room.lessons) this._leave();
      _reset.call(this);
    },

    destroy() {
      this._leave();
      destroy.call(this);
    },

    _transport() {
      _transport.call(this);
      if (!this.room) return;
      const { ui, followed, presenting } = this;
      ui.present.setAttribute("aria-pressed", String(Boolean(presenting)));
      setText(ui.present, presenting ? this._t("view.presenting", { n: presenting.followers }) : this._t("view.present"));
      const on = Boolean(followed && followed.on);
      ui.rejoin.hidden = !on;
      ui.present.hidden = on || !this.room.mine;
      ui.rejoin.setAttribute("aria-pressed", String(on && !followed.paused));
      setText(ui.rejoin, this._t(on && followed.paused ? "view.rejoin" : "view.following"));
      if (ui.roomTold !== `${on} ${on && followed.paused}`) {
        ui.roomTold = `${on} ${on && followed.paused}`;
        setText(ui.roomSaid, on ? this._t(followed.paused ? "view.follow_paused" : "view.following") : "");
      }
    },

    // ---- presenting -----------------------------------------------------------------------------------------------

    _presents() {
      return this.presenting ? this.stopPresenting() : this.present();
    },

    async present() {
      const { room } = this;
      if (!room || !room.mine || this.presenting) return;
      const answer = await fetch(`${room.address}/present`, { method: "POST", headers: HEADERS, body: "{}" }).catch(() => null);
      if (room !== this.room) return;
      const said = answer ? await answer.json().catch(() => ({})) : {};
      if (!answer || !answer.ok) return this._say(said.detail || this._t("view.lost"));
      if (this.followed) this.followed = null;
      this._hangUp();
      this.presenting = { token: said.token, followers: 0, told: "", at: 0, busy: false };
      this._tell();
      this._invalidate("transport");
    },

    stopPresenting() {
      const { presenting, room } = this;
      if (!presenting) return;
      this.presenting = null;
      fetch(`${room.address}/present`, { method: "DELETE", headers: HEADERS, body: JSON.stringify({ token: presenting.token }), keepalive: true }).catch(() => {});
      this._invalidate("transport");
    },

    /** Where this board stands, as `app/presenter_place.py` reads it. */
    _place() {
      const { trace, room, zoom } = this;
      const step = trace.steps[this.index];
      const place = {
        r: step ? Math.max(0, step.r) : 0,
        row: this.row,
        live: Boolean(this.source && this.liveHead && !trace.end),
        playing: Boolean(this.playing),
        regret: this.showRegret,
        marks: this.notesShown !== false,
        cursor: this.cursor,
        zoom: zoom && zoom.map((w) => Math.max(0, Math.round(w))),
      };
      const { lessons } = room;
      if (lessons && lessons.at) Object.assign(place, { lesson: lessons.lesson.id, step: lessons.step.name });
      return place;
    },

    /** Tells the server where the presenter stands, where that has changed; one request at a time, the newest place. */
    async _tell() {
      const { presenting, room, followed } = this;
      if (followed) return this._keepFollowing();
      if (!presenting || presenting.busy) return;
      const place = JSON.stringify(this._place());
      if (place === presenting.told && performance.now() - presenting.at < ALIVE) return;
      Object.assign(presenting, { busy: true, told: place, at: performance.now() });
      const body = JSON.stringify({ token: presenting.token, ...JSON.parse(place) });
      const answer = await fetch(`${room.address}/present`, { method: "PUT", headers: HEADERS, body }).catch(() => null);
      presenting.busy = false;
      if (presenting !== this.presenting) return;
      if (answer && answer.ok) {
        const { followers } = await answer.json();
        if (followers !== presenting.followers) this._invalidate("transport");
        presenting.followers = followers;
      } else if (answer && (answer.status === 403 || answer.status === 404)) {
        this.presenting = null;
        this._say(this._t("view.present_ended"));
        this._invalidate("transport");
      } else presenting.told = ""; // tried again at the next look
    },

    _say(why) {
      this.message = why;
      this._invalidate("status");
    },

    // ---- following ------------------------------------------------------------------------------------------------

    followPresenter() {
      if (this.followed || this.presenting) return;
      this.followed = { on: false, paused: false, state: null, applying: 0 };
      for (const name of OWN_WAY) {
        this[name] = (...values) => {
          this._ownWay();
          return board[name].apply(this, values);
        };
      }
      if (this.stream) {
        this._close();
        this._open();
      }
      this._keepFollowing();
    },

    _ownWay() {
      const { followed } = this;
      if (!followed || !followed.on || followed.applying || followed.paused) return;
      followed.paused = true;
      this._invalidate("transport");
    },

    _rejoins() {
      const { followed } = this;
      if (!this.room || this.presenting) return;
      if (!followed) return this.followPresenter();
      if (!followed.on) return;
      followed.paused = !followed.paused;
      this._invalidate("transport");
      if (!followed.paused) this._apply();
    },

    /** A run's stream, with what the presenter does in between. */
    _address(after) {
      if (!this.followed || !this.room || this.room.lessons) return _address.call(this, after);
      return `${this.room.address}/present/events?run=true${after.replace("?", "&")}`;
    },

    /** Sees to it that there is one stream, and that a place which was ahead of the run is reached. */
    _keepFollowing() {
      const { followed, stream } = this;
      if (root.document.hidden) return;
      const wanted = stream || this._followStream;
      if (!wanted && performance.now() - (this._calledAt || -1e9) > 2000) {
        this._calledAt = performance.now();
        this._followStream = new EventSource(`${this.room.address}/present/events`);
        this._hear(this._followStream);
      } else if (stream && this._followStream) {
        this._hangUp();
      } else if (stream && !stream.followed) {
        this._hear(stream);
      } else if (this._followStream && this._followStream.readyState === EventSource.CLOSED) {
        this._hangUp();
      }
      const { state } = followed;
      if (followed.on && !followed.paused && followed.ahead && this.trace.steps.some((step) => step.r >= state.r)) this._apply();
    },

    _hear(stream) {
      stream.followed = true;
      stream.addEventListener("present", (message) => this._take(JSON.parse(message.data)));
    },

    _hangUp() {
      if (this._followStream) this._followStream.close();
      this._followStream = null;
    },

    _close() {
      this._hangUp();
      _close.call(this);
    },

    _take(state) {
      const { followed } = this;
      if (!followed) return;
      if (followed.on !== state.on) followed.paused = false;
      const { notes } = followed;
      Object.assign(followed, { on: state.on, state, notes: state.notes });
      if (state.on && this.notes && notes !== state.notes) this.readNotes();
      if (state.on && !followed.paused) this._apply();
      this._invalidate("transport");
    },

    async _apply() {
      const { followed, room } = this;
      const { state } = followed;
      followed.applying++;
      try {
        if (room.lessons) await this._toLesson(room.lessons, state);
        if (this.followed !== followed || followed.state !== state || !this.trace.meta) return;
        if (state.row !== this.row) this.setRow(state.row);
        if (JSON.stringify(state.zoom) !== JSON.stringify(this._place().zoom)) this._zoomTo(state.zoom);
        this._toEvent(state);
        if (this.notes) this.showNotes(state.marks);
        if (this.showRegret !== state.regret) this._flip("showRegret");
        if (state.cursor !== this.cursor) this._point(state.cursor, state.row, null);
      } finally {
        followed.applying--;
      }
    },

    _toEvent(state) {
      const { trace, followed } = this;
      const last = trace.steps.length - 1;
      followed.ahead = last < 0 || trace.steps[last].r < state.r;
      if (state.live && this.source && !trace.end) {
        if (!this.liveHead) this.goLive();
        return;
      }
      if (last < 0) return;
      const later = trace.steps.findIndex((step) => step.r > state.r);
      const index = later < 0 ? last : Math.max(0, later - 1);
      if (index === this.index) return;
      this.pause();
      if (index === this.index + 1) this.step(1);
      else this.seek(index);
    },

    async _toLesson(lessons, state) {
      if (!lessons.data || !state.lesson) return;
      const lesson = lessons.data.lessons.findIndex((one) => one.id === state.lesson);
      const step = lesson < 0 ? -1 : lessons.data.lessons[lesson].steps.findIndex((one) => one.name === state.step);
      if (step >= 0 && (!lessons.at || String(lessons.at) !== String([lesson, step]))) await lessons.go(lesson, step).catch(() => {});
    },

    _action(event) {
      const own = { b: () => this._presents(), j: () => this._rejoins() };
      const key = event.key.toLowerCase();
      return (this.room && Object.hasOwn(own, key) && own[key]) || _action.call(this, event);
    },
  });
})(window);
