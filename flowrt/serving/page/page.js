// Draws the state of the server once a second, and sends a prompt.
import * as state from "/page/state.js";

const POLL_MS = 1000;
const RESPONSE_MS = 5000; // a server that does not respond for so long is shown as such
const CURVES = { tokens: "tokens/s", first: "ms to the first token (mean)", gap: "ms between tokens (mean)" };
const MAX_BARS = 24;
const SVG = "http://www.w3.org/2000/svg";
const at = (id) => document.getElementById(id);

let key = sessionStorage.getItem("key") ?? "";
let history = []; // states, the latest last
let cell = null; // [layer row, expert] under the cursor of the heat map
let answer = null; // the AbortController of the response in progress

function headers() {
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function poll() {
  if (!document.hidden) {
    try {
      const response = await fetch("/page/state", { headers: headers(), cache: "no-store", signal: AbortSignal.timeout(RESPONSE_MS) });
      if (response.ok) show(await response.json());
      else if (response.status === 401) askKey();
      else showHealth("bad", `HTTP ${response.status}`, await errorText(response));
    } catch (error) {
      showHealth("bad", "no connection", "The server does not respond.");
    }
  }
  setTimeout(poll, POLL_MS);
}

function askKey() {
  if (at("key-form").hidden) {
    at("key-form").hidden = false;
    at("key").focus();
  }
  showHealth("", "locked", key ? "This key is wrong." : "");
}

function show(now) {
  at("key-form").hidden = true;
  history = state.keptStates(history, now);
  const before = history.at(-2);
  const rates = state.ratesBetween(before, now);
  document.title = `${now.model} - flowrt`;
  at("model").textContent = now.model;
  showHealth(now.is_healthy ? "good" : "bad", now.is_healthy ? "healthy" : "unhealthy", now.problems.join("; "));
  showFigures(now, rates);
  drawGraph(now, rates);
  drawCurves();
  drawRequests(now);
  drawExperts();
  showProcesses(now, rates);
}

function showHealth(kind, text, problems) {
  at("health").className = `badge ${kind}`;
  setText(at("health"), text);
  setText(at("problems"), problems);
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text; // a screen reader reads changes
}

function showFigures(now, rates) {
  const failed = (now.num_ended.error ?? 0) + now.num_refused;
  const figures = {
    "tokens/s": state.numberText(rates.tokens),
    "prompt tokens/s": state.numberText(rates.promptTokens),
    "requests active": state.numberText(now.num_active),
    "waiting": state.numberText(now.num_waiting),
    "ended": state.numberText(Object.values(now.num_ended).reduce((a, b) => a + b, 0)),
    "failed or refused": state.numberText(failed),
  };
  at("figures").replaceChildren(...Object.entries(figures).map(([name, value]) => {
    const pair = document.createElement("div");
    pair.append(html("dt", name), html("dd", value));
    return pair;
  }));
}

function drawGraph(now, rates) {
  const picture = at("graph");
  const width = picture.clientWidth;
  const lines = state.linesOf(rates.edges);
  const { boxes, height } = state.layoutGraph(now.processes, now.edges, width);
  picture.setAttribute("height", height);
  picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const most = Math.max(0, ...lines.map((line) => line.bytes));
  const drawn = [];
  for (const line of lines) {
    const [from, to] = [boxes.get(line.a), boxes.get(line.b)];
    if (!from || !to) continue;
    const path = svg("path", { d: state.linePath(from, to), "stroke-width": state.lineWidth(line.bytes, most), class: line.bytes ? "" : "idle", "stroke-opacity": line.bytes ? 0.45 : 1 });
    path.append(svg("title", {}, `${line.a} and ${line.b}: ${state.bytesText(line.bytes)}/s, ${state.numberText(line.messages)} messages/s over ${[...line.transports].join(", ")}`));
    drawn.push(path);
  }
  for (const [name, box] of boxes) drawn.push(drawBox(name, box, rates.busy.get(name)));
  picture.replaceChildren(...drawn);
  const total = lines.reduce((sum, line) => sum + line.bytes, 0);
  setText(at("graph-legend"), `Lines are as thick as their bytes/s (now ${state.bytesText(total)}/s together, the most ${state.bytesText(most)}/s); the stronger the colour of a box, the busier its process.`);
}

function drawBox(name, box, busy) {
  const group = svg("g", { class: state.processClass(box.process) });
  const place = { x: box.x, y: box.y, width: box.width, height: box.height, rx: 6 };
  const text = box.process.is_up ? state.percentText(busy) : box.process.state;
  const label = box.width < 90 ? name.replace("attention", "attn").replace("front_end", "front") : name;
  const { host } = box.process;
  group.append(
    svg("title", {}, `${name}${host ? ` on ${host}` : ""}: ${box.process.state}${box.process.is_up ? `, ${text} busy` : ""}`),
    svg("rect", { ...place, class: "box" }),
    svg("rect", { ...place, class: "fill", "fill-opacity": box.process.is_up ? Math.min(0.85, busy) : 0 }),
    svg("text", { x: box.x + box.width / 2, y: box.y + 17, "text-anchor": "middle" }, label),
    svg("text", { x: box.x + box.width / 2, y: box.y + 32, "text-anchor": "middle", class: "busy-text" }, text),
    ...(host ? [svg("text", { x: box.x + box.width / 2, y: box.y + 46, "text-anchor": "middle", class: "host-text" }, host)] : []),
  );
  return group;
}

function drawCurves() {
  const [points, now, deaths] = [state.curvesOf(history), history.at(-1).seconds, state.deathsOf(history)];
  for (const [name, title] of Object.entries(CURVES)) {
    const picture = at(`curve-${name}`);
    const [width, height, top, bottom] = [picture.clientWidth, 96, 20, 80];
    picture.setAttribute("height", height);
    picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const x = (seconds) => width * (1 - (now - seconds) / state.CURVE_SECONDS);
    const values = points.map((each) => each[name]);
    const most = Math.max(...values.filter((value) => value !== null), 0);
    const y = (value) => (most ? bottom - ((bottom - top) * value) / most : bottom);
    let path = "";
    points.forEach((each, index) => {
      if (values[index] !== null) path += `${index && values[index - 1] !== null ? "L" : "M"}${x(each.seconds)} ${y(values[index])}`;
    });
    const latest = values.at(-1) ?? null;
    picture.replaceChildren(
      svg("title", {}, `${title}, in the last minute`),
      svg("line", { x1: 0, x2: width, y1: bottom, y2: bottom }),
      ...marksOf(deaths, x, top, bottom),
      svg("path", { d: path || "M0 0" }),
      svg("text", { x: 0, y: 12 }, title),
      svg("text", { x: width, y: 12, "text-anchor": "end", class: "latest" }, latest === null ? "none now" : state.numberText(latest)),
      svg("text", { x: 0, y: top + 10, class: "scale" }, most ? state.numberText(most) : ""),
      svg("text", { x: 0, y: height - 3, class: "scale" }, `${state.CURVE_SECONDS} s ago`),
      svg("text", { x: width, y: height - 3, "text-anchor": "end", class: "scale" }, "now"),
    );
  }
}

/** Lines where processes died. */
function marksOf(deaths, x, top, bottom) {
  return deaths.filter((each) => x(each.seconds) >= 0).map((each) => {
    const mark = svg("line", { x1: x(each.seconds), x2: x(each.seconds), y1: top, y2: bottom, class: "death" });
    mark.append(svg("title", {}, `${each.name} died`));
    return mark;
  });
}

function drawRequests(now) {
  const picture = at("requests");
  const [width, row, top] = [picture.clientWidth, 11, 4];
  const bars = state.requestBars(now, MAX_BARS);
  const height = top + Math.max(8, bars.length) * row + 18;
  picture.setAttribute("height", height);
  picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const x = (seconds) => (seconds / state.REQUEST_SECONDS) * width;
  const drawn = [];
  for (let seconds = 0; seconds <= state.REQUEST_SECONDS; seconds += 10) {
    const anchor = seconds === 0 ? "start" : seconds === state.REQUEST_SECONDS ? "end" : "middle";
    drawn.push(svg("line", { x1: x(seconds), x2: x(seconds), y1: 0, y2: height - 16 }));
    drawn.push(svg("text", { x: x(seconds), y: height - 3, "text-anchor": anchor }, seconds === state.REQUEST_SECONDS ? "now" : `${state.REQUEST_SECONDS - seconds} s ago`));
  }
  bars.forEach(({ request, parts }, at) => {
    const group = svg("g", {});
    const moved = request.num_moved ? `, moved ${request.num_moved} times` : "";
    group.append(svg("title", {}, `request ${request.number}: ${request.num_prompt_tokens} prompt tokens, ${request.num_tokens} tokens, ${request.reason ?? "in progress"}${moved}`));
    for (const [from, to, kind] of parts) {
      group.append(svg("rect", { x: x(from), y: top + at * row, width: Math.max(2, x(to) - x(from)), height: row - 3, rx: 2, class: kind }));
    }
    drawn.push(group);
  });
  const deaths = state.deathsOf(history);
  const since = (seconds) => x(seconds - now.seconds + state.REQUEST_SECONDS);
  drawn.push(...marksOf(deaths, since, 0, height - 16));
  for (const { seconds, name } of deaths) {
    const [place, isLate] = [since(seconds), since(seconds) > width / 2];
    if (place >= 0) drawn.push(svg("text", { x: place + (isLate ? -4 : 4), y: height - 20, "text-anchor": isLate ? "end" : "start", class: "death-name" }, name));
  }
  if (!bars.length) drawn.push(svg("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, `no request in the last ${state.REQUEST_SECONDS} s`));
  picture.replaceChildren(...drawn);
}

/** The counts of the last minute, or since the start where there are none. */
function shownExperts() {
  const recent = state.expertCounts(history[0], history.at(-1));
  return recent.total ? { ...recent, period: "in the last minute" } : { ...state.expertCounts(null, history.at(-1)), period: "since the start" };
}

function drawExperts() {
  if (!history.length) return;
  const canvas = at("experts");
  const { layers, period } = shownExperts();
  canvas.hidden = !layers.length;
  if (!layers.length) return setText(at("expert-cell"), "No process of this graph counts its experts.");
  const columns = Math.max(...layers.map((each) => each.counts.length));
  const scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const [left, above] = [26, 16]; // for the numbers of layers and of experts
  const size = (width - left) / columns;
  const tall = Math.max(6, Math.min(28, size, 420 / layers.length));
  const height = Math.ceil(above + tall * layers.length);
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.height = `${height}px`;
  const styles = getComputedStyle(document.documentElement);
  const [busy, faint, text, line] = ["--busy", "--faint", "--text", "--line"].map((name) => styles.getPropertyValue(name).trim());
  const drawing = canvas.getContext("2d");
  drawing.scale(scale, scale);
  drawing.font = "11px system-ui, sans-serif";
  drawing.textBaseline = "middle";
  const every = Math.ceil(14 / tall);
  drawing.fillStyle = faint;
  drawing.textAlign = "center";
  const step = [1, 2, 5, 10, 20, 50, 100].find((each) => each * size >= 24) ?? 200;
  for (let expert = 0; expert < columns; expert += step) drawing.fillText(String(expert), left + (expert + 0.5) * size, above / 2);
  drawing.textAlign = "start";
  drawing.translate(0, above);
  layers.forEach(({ layer, counts }, row) => {
    drawing.fillStyle = faint;
    if (row % every === 0) drawing.fillText(String(layer), 0, (row + 0.5) * tall);
    counts.forEach((count, expert) => {
      const place = [left + expert * size, row * tall, Math.max(1, size - 1), Math.max(1, tall - 1)];
      drawing.fillStyle = line;
      drawing.globalAlpha = 0.5;
      drawing.fillRect(...place);
      drawing.fillStyle = `rgb(${busy})`;
      drawing.globalAlpha = state.heat(count, counts);
      drawing.fillRect(...place);
      drawing.globalAlpha = 1;
    });
  });
  if (cell && document.activeElement === canvas) {
    drawing.strokeStyle = text;
    drawing.lineWidth = 2;
    drawing.strokeRect(left + cell[1] * size, cell[0] * tall, Math.max(3, size - 1), Math.max(3, tall - 1));
  }
  Object.assign(canvas.dataset, { left, above });
  showCell(layers, period);
}

function showCell(layers, period) {
  const row = cell && layers[cell[0]];
  if (!row || cell[1] >= row.counts.length) {
    return setText(at("expert-cell"), `Rows are layers, columns experts; the stronger the colour of a cell, the more tokens ${period}, beside the most of its layer. Point at a cell, or use the arrow keys.`);
  }
  const [count, mean] = [row.counts[cell[1]], row.counts.reduce((a, b) => a + b, 0) / row.counts.length];
  const times = mean ? `, ${(count / mean).toFixed(2)} times the mean` : "";
  setText(at("expert-cell"), `Layer ${row.layer}, expert ${cell[1]}: ${state.numberText(count)} tokens ${period}${times}.`);
}

function moveCell(event) {
  const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  const step = steps[event.key];
  if (!step || !history.length) return;
  event.preventDefault();
  const { layers } = shownExperts();
  const within = (value, count) => Math.max(0, Math.min(count - 1, value));
  const row = within((cell?.[0] ?? 0) + (cell ? step[0] : 0), layers.length);
  cell = [row, within((cell?.[1] ?? 0) + (cell ? step[1] : 0), layers[row]?.counts.length ?? 1)];
  drawExperts();
}

function pointAtCell(event) {
  const canvas = at("experts");
  if (!history.length) return;
  const { layers } = shownExperts();
  const [left, above] = [Number(canvas.dataset.left), Number(canvas.dataset.above)];
  const columns = Math.max(...layers.map((each) => each.counts.length));
  const row = Math.floor(((event.offsetY - above) / (canvas.clientHeight - above)) * layers.length);
  const expert = Math.floor(((event.offsetX - left) / (canvas.clientWidth - left)) * columns);
  cell = row >= 0 && row < layers.length && expert >= 0 ? [row, expert] : null;
  drawExperts();
}

function showProcesses(now, rates) {
  at("processes").closest("table").classList.toggle("one-host", !now.processes.some((each) => each.host));
  at("processes").replaceChildren(...now.processes.map((each) => {
    const row = document.createElement("tr");
    const name = html("th", each.name);
    name.scope = "row";
    const up = html("td", each.state);
    up.className = state.processClass(each);
    const group = each.num_pages > 0;
    const host = html("td", each.host);
    host.className = "host";
    row.append(
      name, host, up,
      html("td", state.percentText(rates.busy.get(each.name))),
      html("td", state.bytesText(each.resident_bytes)),
      html("td", String(each.num_restarts)),
      html("td", group ? `${each.num_running} + ${each.num_waiting} waiting` : ""),
      html("td", group ? `${each.num_pages - each.num_free_pages} of ${each.num_pages}` : ""),
    );
    return row;
  }));
}

async function send(event) {
  event.preventDefault();
  if (answer) return;
  answer = new AbortController();
  at("send").disabled = true;
  at("stop").disabled = false;
  const output = at("response");
  output.className = "";
  output.textContent = "";
  setText(at("response-figures"), "");
  try {
    await stream(output, answer.signal);
  } catch (error) {
    if (error.name !== "AbortError") showError(error.message);
  }
  answer = null;
  at("send").disabled = false;
  at("stop").disabled = true;
}

async function stream(output, signal) {
  const isChat = at("kind").value === "chat";
  const text = at("prompt").value;
  const body = {
    ...(isChat ? { messages: [{ role: "user", content: text }] } : { prompt: text }),
    max_tokens: Number(at("max-tokens").value),
    stream: true,
    stream_options: { include_usage: true },
  };
  const began = performance.now();
  const response = await fetch(isChat ? "/v1/chat/completions" : "/v1/completions", {
    method: "POST", signal, body: JSON.stringify(body), headers: { "content-type": "application/json", ...headers() },
  });
  if (response.status === 401) askKey();
  if (!response.ok) throw new Error(await errorText(response));
  let [first, rest, reason] = [null, "", null];
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const event of lines.map(state.readEvent)) {
      if (event.error) return showError(event.error);
      if (event.text || event.thought) {
        first ??= performance.now() - began;
        if (event.thought) output.append(html("em", event.thought));
        output.append(event.text);
        output.scrollTop = output.scrollHeight;
      }
      reason = event.reason ?? reason;
      if (event.usage) {
        const seconds = (performance.now() - began) / 1000;
        const start = first === null ? "" : `, the first after ${Math.round(first)} ms`;
        setText(at("response-figures"), `${event.usage.completion_tokens} tokens in ${seconds.toFixed(2)} s${start}; ended by ${reason}.`);
      }
    }
  }
}

function showError(text) {
  at("response").className = "error";
  at("response").append(text);
}

async function errorText(response) {
  const body = await response.json().catch(() => null);
  return body?.error?.message ?? `HTTP ${response.status}`;
}

function html(name, text) {
  const element = document.createElement(name);
  element.textContent = text;
  return element;
}

function svg(name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [attribute, value] of Object.entries(attributes)) element.setAttribute(attribute, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function redraw() {
  const now = history.at(-1);
  if (!now) return;
  drawGraph(now, state.ratesBetween(history.at(-2), now));
  drawCurves();
  drawRequests(now);
  drawExperts();
}

at("prompt-form").addEventListener("submit", send);
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) at("prompt-form").requestSubmit();
});
at("stop").addEventListener("click", () => answer?.abort());
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = at("key").value;
  sessionStorage.setItem("key", key);
});
at("experts").addEventListener("keydown", moveCell);
at("experts").addEventListener("pointermove", pointAtCell);
at("experts").addEventListener("pointerleave", () => { cell = null; drawExperts(); });
at("experts").addEventListener("focus", () => { cell ??= [0, 0]; drawExperts(); });
at("experts").addEventListener("blur", () => { cell = null; drawExperts(); });
addEventListener("resize", redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
poll();
