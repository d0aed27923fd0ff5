// Checks of what the live page computes. Run by test_page.py.
import assert from "node:assert/strict";
import * as state from "../../flowrt/serving/page/state.js";

const process = (name, busy = 0, more = {}) => ({ name, role: name.replace(/\.\d+$/, ""), is_up: true, state: "up", busy_seconds: busy, num_pages: 0, ...more });
const edge = (source, target, num_bytes) => ({ source, target, transport: "shm", num_messages: num_bytes / 10, num_bytes });
const at = (seconds, more = {}) => ({ seconds, num_generation_tokens: 0, num_prompt_tokens: 0, processes: [], edges: [], experts: [], requests: [], ...more });

{ // rates
  const before = at(10, { num_generation_tokens: 100, processes: [process("a.0", 1)], edges: [edge("a.0", "b.0", 1000)] });
  const now = at(12, { num_generation_tokens: 300, processes: [process("a.0", 2), process("b.0", 9)], edges: [edge("a.0", "b.0", 5000), edge("b.0", "a.0", 7)] });
  const rates = state.ratesBetween(before, now);
  assert.equal(rates.tokens, 100);
  assert.equal(rates.busy.get("a.0"), 0.5);
  assert.equal(rates.busy.get("b.0"), 0, "a new process has no rate yet");
  assert.deepEqual(rates.edges.map((each) => each.bytes), [2000, 0]);
  assert.equal(state.ratesBetween(null, now).tokens, 0);
  assert.equal(state.ratesBetween(now, now).tokens, 0, "two states of one moment");
  assert.equal(state.ratesBetween(at(1, { processes: [process("a.0", 5)] }), at(2, { processes: [process("a.0", 1)] })).busy.get("a.0"), 0, "a restart");
}

{ // states that are kept
  const ages = (history, now) => state.keptStates(history.map((seconds) => at(seconds)), at(now)).map((each) => each.seconds);
  assert.deepEqual(ages([], 5), [5]);
  assert.deepEqual(ages([4, 5], 5), [4, 5, 5]);
  assert.deepEqual(ages([1, 30, 64], 90), [30, 64, 90], "what the curves show, and the window before");
  assert.deepEqual(ages([1, 2, 3], 400), [400], "the page was hidden: what it saw before is no last minute");
  assert.deepEqual(ages([100, 101], 3), [3], "another server");
}

{ // curves over time, and deaths
  const times = (count, seconds) => ({ count, seconds });
  const states = [0, 1, 2].map((number) => at(10 + number, { num_generation_tokens: 100 * number, first_tokens: times(number && 2, number && 0.5), later_tokens: times(10 * number, 2 * number) }));
  const curves = state.curvesOf(states);
  assert.deepEqual(curves.map((each) => each.tokens), [0, 100, 100]);
  assert.deepEqual(curves.map((each) => each.first), [null, 250, 250], "over the last states together");
  assert.deepEqual(curves.map((each) => each.gap), [null, 200, 200]);
  assert.equal(state.curvesOf([states[1], at(12, { ...states[1], seconds: 12 })])[1].gap, null, "no token between two states");
  const [up, down] = [process("a.0"), process("a.0", 0, { is_up: false })];
  const seen = (seconds, shown, num_restarts = 0) => at(seconds, { processes: [{ ...shown, num_restarts }, { ...process("b.0"), num_restarts: 0 }] });
  assert.deepEqual(state.deathsOf([seen(1, up), seen(2, down), seen(3, down), seen(4, up, 1)]), [{ seconds: 2, name: "a.0" }], "one death, one mark");
  assert.deepEqual(state.deathsOf([seen(1, up), seen(2, up, 1)]), [{ seconds: 2, name: "a.0" }], "it was back before the next state");
  assert.deepEqual(state.deathsOf([seen(1, up)]), []);
}

{ // lines
  const lines = state.linesOf([{ source: "experts.0", target: "attention.0", bytes: 5, messages: 1, transport: "shm" }, { source: "attention.0", target: "experts.0", bytes: 7, messages: 2, transport: "zmq" }, { source: "experts.0", target: "experts.0", bytes: 9, messages: 1, transport: "inproc" }]);
  assert.equal(lines.length, 1);
  assert.deepEqual([lines[0].a, lines[0].b, lines[0].bytes, [...lines[0].transports]], ["attention.0", "experts.0", 12, ["shm", "zmq"]]);
  assert.equal(state.lineWidth(0, 0), 1);
  assert.equal(state.lineWidth(100, 100), 10);
  assert.ok(state.lineWidth(1, 100) > 1);
}

{ // processes
  assert.deepEqual(["up", "suspect", "starting"].map((shown) => state.processClass(process("a.0", 0, { state: shown }))), ["", "suspect", "suspect"]);
  assert.equal(state.processClass(process("a.0", 0, { is_up: false, state: "given up" })), "down");
}

for (const width of [320, 900]) { // layout
  const processes = ["experts.10", "experts.9", "attention.0", "front_end.0", "prefill.0"].map((name) => process(name));
  const edges = [edge("attention.0", "experts.10", 1), edge("experts.9", "attention.0", 1), edge("prefill.0", "attention.0", 1)];
  const { boxes, height } = state.layoutGraph(processes, edges, width);
  assert.deepEqual([...boxes.keys()], ["prefill.0", "attention.0", "experts.9", "experts.10"]);
  for (const box of boxes.values()) {
    assert.ok(box.x >= 0 && box.x + box.width <= width && box.y >= 0 && box.y + box.height <= height);
  }
  assert.ok(boxes.get("prefill.0").x + boxes.get("prefill.0").width <= boxes.get("attention.0").x);
  assert.ok(boxes.get("experts.9").y + 40 <= boxes.get("experts.10").y);
  assert.match(state.linePath(boxes.get("experts.9"), boxes.get("attention.0")), /^M[\d.]+ [\d.]+C/);
  assert.deepEqual([...state.layoutGraph([process("attention.0", 0, { num_pages: 5 })], [], width).boxes.keys()], ["attention.0"], "one group alone");
  assert.equal(state.layoutGraph([], [], width).boxes.size, 0);
}

{ // hosts
  const processes = [process("attention.0", 0, { host: "host.0" }), process("experts.0", 0, { host: "host.1" })];
  const { boxes, height } = state.layoutGraph(processes, [edge("attention.0", "experts.0", 1)], 400);
  assert.ok([...boxes.values()].every((box) => box.height === 54 && box.y + 54 <= height), "a third line has room");
}

{ // experts
  const before = at(1, { experts: [{ layer: 1, num_pairs: [5, 5] }] });
  const now = at(2, { experts: [{ layer: 1, num_pairs: [6, 9] }, { layer: 2, num_pairs: [1] }] });
  const { layers, total } = state.expertCounts(before, now);
  assert.deepEqual(layers, [{ layer: 1, counts: [1, 4] }, { layer: 2, counts: [1] }]);
  assert.equal(total, 6);
  assert.equal(state.expertCounts(null, now).total, 16);
  assert.deepEqual([state.heat(1, [1, 4]), state.heat(0, [0, 0])], [0.25, 0]);
}

{ // requests
  const request = (number, arrived, placed, first_token, ended, reason) => ({ number, arrived, placed, first_token, ended, reason });
  const now = at(100, { requests: [request(3, 95, 96, 97, null, null), request(1, 60, 60, 61, 69, "stop"), request(2, 60, 65, 68, 80, "stop"), request(4, 98, 98, null, 99, "error"), request(5, 99, null, null, null, null)] });
  const bars = state.requestBars(now, 10);
  assert.deepEqual(bars.map((each) => each.request.number), [2, 3, 4, 5], "the first ended too long ago");
  assert.deepEqual(bars[0].parts, [[0, 10, "decode"]], "cut at the left edge");
  assert.deepEqual(bars[1].parts, [[25, 26, "waiting"], [26, 27, "prefill"], [27, 30, "decode"]]);
  assert.equal(bars[2].parts.at(-1)[2], "failed");
  assert.deepEqual(bars[3].parts, [[29, 30, "waiting"]]);
  assert.deepEqual(state.requestBars(now, 2).map((each) => each.request.number), [4, 5]);
}

{ // events and texts
  assert.deepEqual(state.readEvent(": comment"), {});
  assert.deepEqual(state.readEvent("data: [DONE]\r"), { done: true });
  assert.equal(state.readEvent('data: {"error": {"message": "no"}}').error, "no");
  assert.equal(state.readEvent('data: {"choices": [{"text": "a"}]}').text, "a");
  assert.equal(state.readEvent('data: {"choices": [{"delta": {"content": "b"}, "finish_reason": "stop"}]}').reason, "stop");
  assert.equal(state.readEvent('data: {"choices": [{"delta": {"reasoning_content": "c"}}]}').thought, "c");
  assert.deepEqual(state.readEvent('data: {"choices": [], "usage": {"completion_tokens": 3}}'), { text: "", reason: null, usage: { completion_tokens: 3 } });
  assert.deepEqual([0, 999, 1536, 2.5e8, 3e12].map(state.bytesText), ["0 B", "999 B", "1.5 KiB", "238 MiB", "2.7 TiB"]);
  assert.deepEqual([state.numberText(3), state.numberText(3.14), state.numberText(12345.6), state.percentText(0.123)], ["3", "3.1", "12,346", "12 %"]);
}

console.log("all checks passed");
