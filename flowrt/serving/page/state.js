// What the page computes from states of the server: rates, layouts, texts. Pure: touches no document, so that it runs anywhere.

export const ROLES = ["front_end", "monitor", "prefill", "attention", "trampoline", "forwarder", "experts"];
export const REQUEST_SECONDS = 30;
export const CURVE_SECONDS = 60;
export const WINDOW = 5;

/** The states of the last minute, `now` being the latest. None of before: a hidden page asks for no states, and another server counts anew. */
export function keptStates(history, now) {
  const isOfThisServer = history.length > 0 && history.at(-1).seconds <= now.seconds;
  return [...(isOfThisServer ? history.filter((each) => each.seconds >= now.seconds - CURVE_SECONDS - WINDOW) : []), now];
}

/** Rates between two states of the server. The earlier one may be missing: then all are 0. */
export function ratesBetween(before, now) {
  const seconds = before ? now.seconds - before.seconds : 0;
  const rate = (later, earlier) => (seconds > 0 ? Math.max(0, later - earlier) / seconds : 0);
  const former = new Map((before?.processes ?? []).map((each) => [each.name, each]));
  const sent = new Map((before?.edges ?? []).map((each) => [`${each.source} ${each.target}`, each]));
  return {
    tokens: rate(now.num_generation_tokens, before?.num_generation_tokens ?? 0),
    promptTokens: rate(now.num_prompt_tokens, before?.num_prompt_tokens ?? 0),
    busy: new Map(now.processes.map((each) => {
      const earlier = former.get(each.name);
      return [each.name, earlier ? Math.min(1, rate(each.busy_seconds, earlier.busy_seconds)) : 0];
    })),
    edges: now.edges.map((each) => {
      const earlier = sent.get(`${each.source} ${each.target}`);
      const bytes = earlier ? rate(each.num_bytes, earlier.num_bytes) : 0;
      const messages = earlier ? rate(each.num_messages, earlier.num_messages) : 0;
      return { source: each.source, target: each.target, transport: each.transport, bytes, messages };
    }),
  };
}

/** Points of the curves over time: tokens/s, and the mean milliseconds to a first token and between two; null where there was none. Each is
 * taken over the last WINDOW states. */
export function curvesOf(history) {
  return history.map((now, at) => {
    const before = at ? history[Math.max(0, at - WINDOW)] : null;
    const mean = (name) => {
      const count = before ? now[name].count - before[name].count : 0;
      return count > 0 ? (1000 * (now[name].seconds - before[name].seconds)) / count : null;
    };
    return { seconds: now.seconds, tokens: ratesBetween(before, now).tokens, first: mean("first_tokens"), gap: mean("later_tokens") };
  });
}

/** Deaths of processes between two states, as far as the states show them: { seconds, name }. */
export function deathsOf(history) {
  return history.slice(1).flatMap((now, at) => {
    const former = new Map(history[at].processes.map((each) => [each.name, each]));
    const died = now.processes.filter((each) => {
      const earlier = former.get(each.name);
      return earlier && (each.num_restarts > earlier.num_restarts || (earlier.is_up && !each.is_up)) && earlier.is_up;
    });
    return died.map((each) => ({ seconds: now.seconds, name: each.name }));
  });
}

/** One line between two processes for the edges both ways. */
export function linesOf(edges) {
  const lines = new Map();
  for (const edge of edges) {
    if (edge.source === edge.target) continue;
    const [a, b] = [edge.source, edge.target].sort(byRole);
    const line = lines.get(`${a} ${b}`) ?? { a, b, bytes: 0, messages: 0, transports: new Set() };
    line.bytes += edge.bytes;
    line.messages += edge.messages;
    line.transports.add(edge.transport);
    lines.set(`${a} ${b}`, line);
  }
  return [...lines.values()];
}

/** Pixels: the widest line is 10, and area grows with bytes, so that slow links stay visible. */
export function lineWidth(bytes, most) {
  return bytes > 0 && most > 0 ? 1 + 9 * Math.sqrt(bytes / most) : 1;
}

/** Boxes of processes in columns by role. Processes without edges are left out: they take no part in the dataflow. */
export function layoutGraph(processes, edges, width) {
  const linked = new Set(edges.flatMap((edge) => [edge.source, edge.target]));
  const shown = processes.filter((each) => linked.has(each.name) || each.num_pages > 0);
  const columns = new Map();
  for (const each of [...shown].sort((a, b) => byRole(a.name, b.name))) {
    columns.set(each.role, [...(columns.get(each.role) ?? []), each]);
  }
  const count = Math.max(1, columns.size);
  const tall = Math.max(1, ...[...columns.values()].map((each) => each.length));
  const hasHosts = shown.some((each) => each.host);
  const boxWidth = Math.max(60, Math.min(170, (width - 34 * (count - 1) - 4) / count));
  const boxHeight = hasHosts ? 54 : 40;
  const step = boxHeight + (tall > 24 ? 6 : 18);
  const height = tall * step;
  const boxes = new Map();
  [...columns.values()].forEach((column, at) => {
    const x = count === 1 ? (width - boxWidth) / 2 : 2 + (at * (width - boxWidth - 4)) / (count - 1);
    column.forEach((each, row) => {
      const y = ((row + 0.5) * height) / column.length - boxHeight / 2;
      boxes.set(each.name, { process: each, x, y, width: boxWidth, height: boxHeight });
    });
  });
  return { boxes, height };
}

/** The path of a line between two boxes: across, or an arc beside a column. */
export function linePath(from, to) {
  const [left, right] = from.x <= to.x ? [from, to] : [to, from];
  const [y0, y1] = [left.y + left.height / 2, right.y + right.height / 2];
  if (left.x === right.x) {
    const x = left.x + left.width;
    return `M${x} ${y0}C${x + 30} ${y0} ${x + 30} ${y1} ${x} ${y1}`;
  }
  const [x0, x1] = [left.x + left.width, right.x];
  const bend = (x1 - x0) / 2;
  return `M${x0} ${y0}C${x0 + bend} ${y0} ${x1 - bend} ${y1} ${x1} ${y1}`;
}

/** Pairs of each layer and expert since an earlier state, and the sum. */
export function expertCounts(before, now) {
  const earlier = new Map((before?.experts ?? []).map((each) => [each.layer, each.num_pairs]));
  const layers = now.experts.map((each) => ({
    layer: each.layer,
    counts: each.num_pairs.map((count, expert) => Math.max(0, count - (earlier.get(each.layer)?.[expert] ?? 0))),
  }));
  return { layers, total: layers.reduce((sum, each) => sum + each.counts.reduce((a, b) => a + b, 0), 0) };
}

/** 0 to 1: a count beside the largest of its layer. */
export function heat(count, counts) {
  const most = Math.max(...counts);
  return most > 0 ? count / most : 0;
}

/** Bars of the latest requests: [from, to, kind] in seconds before now, oldest first. */
export function requestBars(state, most) {
  const start = state.seconds - REQUEST_SECONDS;
  const shown = state.requests.filter((each) => (each.ended ?? state.seconds) >= start).sort((a, b) => a.arrived - b.arrived).slice(-most);
  return shown.map((each) => {
    const end = each.ended ?? state.seconds;
    const first = each.first_token ?? end;
    const placed = each.placed ?? first;
    const failed = each.reason === "error" || each.reason === "abort";
    const bars = [[each.arrived, placed, "waiting"], [placed, first, "prefill"], [first, end, failed ? "failed" : "decode"]];
    if (failed && end === first) bars.push([Math.max(each.arrived, end - 0.15), end, "failed"]);
    const parts = bars.map(([from, to, kind]) => [Math.max(from, start) - start, Math.max(to, start) - start, kind]);
    return { request: each, parts: parts.filter(([from, to]) => to > from) };
  });
}

/** A line of the event stream of a response: its text, a part of its reasoning, an error, or its usage. */
export function readEvent(line) {
  if (!line.startsWith("data:")) return {};
  const data = line.slice(5).trim();
  if (data === "[DONE]") return { done: true };
  const event = JSON.parse(data);
  if (event.error) return { error: event.error.message };
  const choice = event.choices?.[0];
  const thought = choice?.delta?.reasoning_content;
  const text = choice?.text ?? choice?.delta?.content ?? "";
  return { text, reason: choice?.finish_reason ?? null, usage: event.usage ?? null, ...(thought ? { thought } : {}) };
}

/** The style of a process: "" for one that works well. */
export function processClass(process) {
  if (!process.is_up) return "down";
  return process.state === "up" ? "" : "suspect";
}

export function bytesText(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (bytes >= 1024 && at < units.length - 1) [bytes, at] = [bytes / 1024, at + 1];
  return `${bytes >= 100 || at === 0 ? Math.round(bytes) : bytes.toFixed(1)} ${units[at]}`;
}

export function percentText(share) {
  return `${Math.round(100 * share)} %`;
}

export function numberText(value) {
  return value >= 100 || Number.isInteger(value) ? Math.round(value).toLocaleString("en") : value.toFixed(1);
}

function byRole(a, b) {
  const place = (name) => {
    const at = ROLES.indexOf(name.replace(/\.\d+$/, ""));
    return at < 0 ? ROLES.length : at;
  };
  return place(a) - place(b) || a.localeCompare(b, "en", { numeric: true });
}
