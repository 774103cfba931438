// Draws the charts and block graphs of the report from the JSON in #data. Text is set as text, never as markup.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  const TERM = { compute: "blue", recompute: "amber", tp_comm: "purple", cp_comm: "teal", dp_comm: "pink", pp_comm: "orange",
    bubble: "grey", optimizer: "green" };
  const MEMORY = { parameters: "blue", gradients: "teal", optimizer: "purple", activations: "amber", buffers: "grey" };
  const KIND = { forward: "blue", recompute: "amber", backward: "teal", "input gradients": "teal", "weight gradients": "purple" };
  const charts = [];

  const digits = (value) => String(Number(value.toPrecision(3)));
  function bytes(value, places) {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let at = 0;
    while (Math.abs(value) >= 1024 && at < units.length - 1) { value /= 1024; at += 1; }
    return (places && at ? value.toFixed(places) : digits(value)) + " " + units[at];
  }
  function seconds(value) {
    for (const [unit, scale] of [["s", 1], ["ms", 1e-3], ["us", 1e-6]])
      if (Math.abs(value) >= scale) return digits(value / scale) + " " + unit;
    return value ? digits(value * 1e9) + " ns" : "0";
  }
  const escape = (text) => String(text).replace(/[&<>"']/g, (c) => "&#" + c.charCodeAt(0) + ";");
  const axisText = () => ({ color: color("quiet"), fontSize: 12 });
  const tooltip = () => ({ backgroundColor: color("card"), borderColor: color("line"), confine: true,
    textStyle: { color: color("ink"), fontSize: 12.5 } });

  function chart(id, height, renderer, option) {
    const box = document.getElementById(id);
    box.style.height = height + "px";
    const made = echarts.init(box, null, { renderer });
    made.setOption({ animation: false, textStyle: { fontFamily: getComputedStyle(document.body).fontFamily }, ...option });
    charts.push(made);
    box.dataset.drawn = "yes";
  }
  function nothing(id) {
    const box = document.getElementById(id);
    box.textContent = "The plan holds no figures for this picture.";
    box.classList.add("quiet");
    box.dataset.drawn = "empty";
  }

  function drawTime() {
    if (!data.time.length) return nothing("time");
    const total = data.time.reduce((sum, t) => sum + t.seconds, 0);
    chart("time", 44, "svg", {
      grid: { left: 0, right: 0, top: 4, bottom: 8 },
      xAxis: { type: "value", max: total, show: false }, yAxis: { type: "category", data: [""], show: false },
      tooltip: { ...tooltip(), formatter: (p) => escape(p.seriesName) + "  <b>" + seconds(p.value) + "</b>, " +
        (100 * p.value / total).toFixed(1) + " %" },
      series: data.time.map((t) => ({ type: "bar", stack: "t", name: t.words, data: [t.seconds], barWidth: "100%",
        itemStyle: { color: color(TERM[t.term]), borderColor: color("card"), borderWidth: 0.5 } })),
    });
  }

  function drawMemory() {
    const { stages, terms, limit } = data.memory;
    if (!stages.length) return nothing("memory");
    const most = Math.max(limit || 0, ...stages.map((s) => s.total));
    const row = stages.length > 8 ? 17 : 32;
    // The totals are a series of no length at the end of the stack: a label that no bar can hide.
    const series = [...terms, ""].map((term) => ({
      type: "bar", stack: "m", name: term, barMaxWidth: 22, data: stages.map((s) => term ? s[term] : 0),
      itemStyle: { color: term ? color(MEMORY[term]) : "transparent" },
      label: term ? undefined : { show: true, position: "right", color: color("ink"), fontSize: 12, distance: 6,
        formatter: (p) => bytes(stages[p.dataIndex].total, 1) },
    }));
    if (limit) series[0].markLine = {
      symbol: "none", silent: true, data: [{ xAxis: limit }], lineStyle: { color: color("limit"), type: "solid", width: 1.5 },
      label: { formatter: "limit " + bytes(limit), position: "start", color: color("limit"), fontSize: 12 },
    };
    chart("memory", 64 + Math.max(2, stages.length) * row, "svg", {
      legend: { data: terms, left: 0, top: 0, icon: "roundRect", itemWidth: 11, itemHeight: 11, itemGap: 16, textStyle: axisText(), selectedMode: false },
      grid: { left: 58, right: 76, top: 44, bottom: 22 },
      xAxis: { type: "value", max: most, interval: step(most, 1024), axisLabel: { ...axisText(), formatter: (v) => bytes(v), showMaxLabel: false },
        splitLine: { lineStyle: { color: color("faint") } } },
      yAxis: { type: "category", inverse: true, data: stages.map((_, i) => holder + i), axisTick: { show: false },
        axisLine: { lineStyle: { color: color("line") } }, axisLabel: axisText() },
      tooltip: { ...tooltip(), trigger: "axis", axisPointer: { type: "none" }, formatter: (ps) => {
        const s = stages[ps[0].dataIndex];
        return "<b>" + holder + ps[0].dataIndex + "</b><br>" + terms.map((t) => t + "  " + bytes(s[t])).join("<br>") +
          "<br><b>total  " + bytes(s.total) + "</b>" + (limit ? "<br>limit  " + bytes(limit) : "");
      } },
      series,
    });
  }

  // A round distance of axis ticks in the base that the unit is counted in.
  function step(most, base) {
    const unit = base ** Math.max(0, Math.floor(Math.log(most) / Math.log(base)));
    const rough = most / unit / 6;
    const power = 10 ** Math.floor(Math.log10(rough));
    return unit * power * [1, 2, 5, 10].find((f) => f * power >= rough);
  }

  // What a row is: a stage, or a rank that holds several.
  const holder = data.timeline.chunks > 1 ? "rank " : "stage ";

  function drawTimeline() {
    const { events, stages, chunks, note } = data.timeline;
    document.getElementById("timeline-note").textContent = note;
    if (!events.length) return nothing("timeline");
    document.getElementById("legend-weights").hidden = !events.some((e) => e[1] === "weight gradients");
    const end = Math.max(...events.map((e) => e[4]));
    const row = stages > 8 ? 24 : 34;
    chart("timeline", 76 + row * stages, "canvas", {
      grid: { left: 58, right: 16, top: 6, bottom: 62, show: true, backgroundColor: color("idle"), borderWidth: 0 },
      xAxis: { type: "value", min: 0, max: end, axisLabel: { ...axisText(), formatter: seconds, showMaxLabel: true, hideOverlap: true },
        splitLine: { show: false }, axisLine: { show: true, lineStyle: { color: color("line") } } },
      yAxis: { type: "category", inverse: true, data: Array.from({ length: stages }, (_, i) => holder + i),
        axisTick: { show: false }, axisLine: { show: false }, axisLabel: axisText(),
        splitLine: { show: true, lineStyle: { color: color("card"), width: 4 } } },
      dataZoom: [{ type: "inside", filterMode: "weakFilter" }, { type: "slider", filterMode: "weakFilter", height: 18, bottom: 10,
        labelFormatter: seconds, textStyle: axisText(), borderColor: color("line"), brushSelect: false }],
      tooltip: { ...tooltip(), formatter: (p) => { const e = events[p.dataIndex];
        const part = chunks > 1 ? ", chunk " + e[5] : "";
        return holder + e[0] + part + ", micro-batch " + e[2] + "<br><b>" + escape(e[1]) + "  " + seconds(e[4] - e[3]) +
          "</b><br>from " + seconds(e[3]) + " to " + seconds(e[4]); } },
      series: [{ type: "custom", encode: { x: [2, 3], y: 0 }, data: events.map((e) => [e[0], e[2], e[3], e[4]]), clip: true,
        renderItem: (params, api) => {
          const e = events[params.dataIndex];
          const a = api.coord([e[3], e[0]]), b = api.coord([e[4], e[0]]);
          const height = api.size([0, 1])[1] - 8;
          const area = params.coordSys;
          const box = echarts.graphic.clipRectByRect(
            { x: a[0], y: a[1] - height / 2, width: Math.max(b[0] - a[0], 0.6), height },
            { x: area.x, y: area.y, width: area.width, height: area.height });
          if (!box) return null;
          const gap = box.width > 5 ? 0.5 : 0;
          const label = String(e[2]);
          return { type: "rect", shape: { ...box, width: box.width - gap }, // Earlier chunks are lighter.
            style: { fill: color(KIND[e[1]] || "grey"), opacity: chunks > 1 ? 0.5 + 0.5 * e[5] / (chunks - 1) : 1 },
            textContent: box.width > 5 + 7 * label.length && e[1] !== "recompute"
              ? { style: { text: label, fill: "#fff", fontSize: 11 } } : undefined,
            textConfig: { position: "inside" } };
        } }],
    });
  }

  const SVG = "http://www.w3.org/2000/svg";
  const ruler = document.createElement("canvas").getContext("2d");
  function width(text, font) {
    ruler.font = font + " " + getComputedStyle(document.body).fontFamily;
    return ruler.measureText(text).width;
  }
  function add(parent, tag, attributes, text) {
    const made = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (text !== undefined) made.textContent = text;
    parent.appendChild(made);
    return made;
  }
  function placementColor(placement) {
    const dim = /^S\((\d+)\)$/.exec(placement);
    return "var(--" + (dim ? "s" + (dim[1] % 5) : placement === "P" ? "p" : "r") + ")";
  }
  const shorten = (text) => text.length > 34 ? text.slice(0, 32) + "…" : text;

  function layOut(block) {
    const graph = new dagre.graphlib.Graph();
    graph.setGraph({ rankdir: "TB", nodesep: 22, ranksep: 22, edgesep: 14, marginx: 6, marginy: 6 });
    graph.setDefaultEdgeLabel(() => ({}));
    for (const node of block.nodes) {
      const lines = node.lines.filter(Boolean);
      const widest = Math.max(width(shorten(node.title), "600 12.5px"), ...lines.map((l) => width(shorten(l), "11px")));
      graph.setNode(node.id, { node, lines, width: widest + 22, height: 12 + 16 + 14 * lines.length });
    }
    // Residual connections may bend; the main road should be straight.
    for (const [a, b] of block.links) graph.setEdge(a, b, { weight: graph.node(a).node.kind === "input" ? 1 : 3 });
    dagre.layout(graph);
    return graph;
  }

  // Of nodes and of bends of edges: the layout's own size leaves out edges that run outside all nodes.
  function bounds(graph) {
    const points = graph.edges().flatMap((e) => graph.edge(e).points);
    for (const id of graph.nodes()) {
      const { x, y, width: w, height: h } = graph.node(id);
      points.push({ x: x - w / 2, y: y - h / 2 }, { x: x + w / 2, y: y + h / 2 });
    }
    const xs = points.map((p) => p.x), ys = points.map((p) => p.y);
    const left = Math.min(...xs) - 8, top = Math.min(...ys) - 8;
    return { left, top, w: Math.max(...xs) + 8 - left, h: Math.max(...ys) + 8 - top };
  }

  function drawBlock(block, index) {
    const box = document.getElementById("graph-" + index);
    const graph = layOut(block);
    const { left, top, w, h } = bounds(graph);
    const svg = add(box, "svg", { viewBox: [left, top, w, h].join(" "), width: w, height: h, role: "img" });
    add(svg, "title", {}, "graph of " + block.name);
    // Shrink to fit, but never so far that labels can't be read: then the box scrolls.
    svg.style.width = Math.max(Math.min(w, box.clientWidth - 16), 0.62 * w) + "px";
    svg.style.height = "auto";
    for (const edge of graph.edges()) drawEdge(svg, graph, edge);
    for (const id of graph.nodes()) drawNode(svg, graph.node(id));
    box.dataset.drawn = String(block.nodes.length);
  }

  function drawEdge(svg, graph, edge) {
    const ends = [graph.node(edge.v).node, graph.node(edge.w).node];
    const middle = ends.find((n) => n.kind === "collective");
    const style = middle ? " sent" + (middle.only ? " backward" : "") : "";
    const p = graph.edge(edge).points;
    let path = "M" + p[0].x + "," + p[0].y;
    for (let i = 1; i < p.length - 1; i += 1) {
      const to = i < p.length - 2 ? { x: (p[i].x + p[i + 1].x) / 2, y: (p[i].y + p[i + 1].y) / 2 } : p[i + 1];
      path += " Q" + p[i].x + "," + p[i].y + " " + to.x + "," + to.y;
    }
    if (p.length === 2) path += " L" + p[1].x + "," + p[1].y;
    add(svg, "path", { d: path, class: "wire" + style });
    const last = p[p.length - 1], before = p[p.length - 2];
    const angle = Math.atan2(last.y - before.y, last.x - before.x) * 180 / Math.PI;
    add(svg, "path", { d: "M0,0L-7,-3.5L-7,3.5Z", class: "tip" + style,
      transform: "translate(" + last.x + "," + last.y + ") rotate(" + angle + ")" });
  }

  function drawNode(svg, { node, lines, x, y, width: w, height: h }) {
    const group = add(svg, "g", { transform: "translate(" + (x - w / 2) + "," + (y - h / 2) + ")" });
    const shape = { op: "box" + (node.main ? " main" : ""), input: "input", collective: "pill " + (node.only || "") }[node.kind];
    const rect = add(group, "rect", { width: w, height: h, rx: node.kind === "op" ? 5 : 12, class: shape });
    if (node.kind === "op") {
      rect.style.fill = placementColor(node.placement);
      if (node.placement === "R*") { rect.style.stroke = "var(--quiet)"; rect.style.strokeDasharray = "3 2"; }
      if (node.heat > 0.01) add(group, "rect", { x: 5, y: h - 4, width: (w - 10) * node.heat, height: 3, class: "warm" });
    }
    const center = { x: w / 2, "text-anchor": "middle" };
    add(group, "text", { ...center, y: 18, class: "title" }, shorten(node.title));
    lines.forEach((line, i) => add(group, "text", { ...center, y: 32 + 14 * i, class: "under" }, shorten(line)));
    add(group, "title", {}, node.tip || node.title);
  }

  function drawRouting() {
    const { steps, panels } = data.routing;
    const box = document.getElementById("routing");
    if (!box) return;
    if (!panels.length) { box.dataset.drawn = "empty"; return; }
    const colors = ["blue", "orange", "teal", "purple", "green"], height = 110;
    chart("routing", 30 + height * panels.length, "svg", {
      tooltip: { ...tooltip(), trigger: "axis", renderMode: "richText" },
      axisPointer: { link: [{ xAxisIndex: "all" }] },
      title: panels.map((p, i) => ({ text: p.title, top: height * i, left: 0,
        textStyle: { color: color("ink"), fontSize: 12.5, fontWeight: "normal" } })),
      grid: panels.map((_, i) => ({ left: 64, right: 12, top: 24 + height * i, height: height - 48 })),
      xAxis: panels.map((_, i) => ({ type: "category", gridIndex: i, data: steps, axisLabel: axisText() })),
      yAxis: panels.map((_, i) => ({ type: "value", gridIndex: i, scale: true, axisLabel: axisText(), splitNumber: 2 })),
      series: panels.flatMap((p, i) => p.lines.map(([name, values], k) => ({ type: "line", name, data: values,
        xAxisIndex: i, yAxisIndex: i, symbolSize: 4, itemStyle: { color: color(colors[k % colors.length]) } }))),
    });
  }

  function draw() {
    for (const made of charts.splice(0)) made.dispose();
    drawTime();
    drawMemory();
    drawTimeline();
    drawRouting();
  }
  draw();
  data.blocks.forEach(drawBlock);
  window.addEventListener("resize", () => charts.forEach((made) => made.resize()));
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  document.documentElement.dataset.drawn = "all";
})();
