// Reads {"rows": [wire line], "seeks": [step]} from stdin, walks the trace every way, and prints a digest of the
// board's cells after each stop. Python compares them with engine.trace.Board.
import { createRequire } from "node:module";
import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";

const { Board, Trace, TIER } = createRequire(import.meta.url)("../../assets/js/tier_trace.js");
const { rows, seeks } = JSON.parse(readFileSync(0, "utf8"));

function digest(board) {
  const hash = createHash("sha256");
  for (let r = 0; r < board.rows; r++) {
    // Python keeps as many columns as have ever begun; EMPTY beyond them says nothing.
    const row = Array.from(board.cells.subarray(r * board.cap, (r + 1) * board.cap));
    while (row.length && row[row.length - 1] === TIER.EMPTY) row.pop();
    hash.update(Buffer.from(row)).update("|");
  }
  return `${board.eventId}:${board.seqLen}:${hash.digest("hex")}`;
}

const events = rows.map((row) => JSON.parse(row));
const board = new Board(events[0]);
const forward = events.map((event) => (board.forward(event), digest(board)));

const trace = new Trace().addLines(rows.join("\n"));
const last = trace.steps.length - 1;
const steps = [];
for (let i = 0; i <= last; i++) (trace.seek(i), steps.push(digest(trace.board)));
const back = [];
let walked = 0;
for (let i = last; i >= 0; i--) {
  if (trace.seek(i)) walked++;
  back.push(digest(trace.board));
}
const sought = seeks.map((i) => (trace.seek(i), digest(trace.board)));
const started = process.hrtime.bigint();
for (let i = 0; i < 40; i++) trace.seek((i * 37) % (last + 1));
const seekMs = Number(process.hrtime.bigint() - started) / 1e6 / 40;
const scores = [...trace.scores.values()].flat().length;
console.log(
  JSON.stringify({ forward, steps, back: back.reverse(), sought, walked, seekMs, scores, text: trace.textOf(0),
    history: trace.history(0, 3), points: trace.scoreHistory(1, 0).length, late: trace.late.size })
);
