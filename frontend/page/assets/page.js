"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const sections = document.getElementById("sections");
  const charts = []; // drawn again when the theme or the width changes

  // ---- small helpers --------------------------------------------------------------------------
  const el = (tag, attributes = {}, ...children) => {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (value === null || value === undefined || value === false) continue;
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (name === "style") node.style.cssText = value;
      else node.setAttribute(name, value === true ? "" : value);
    }
    for (const child of children.flat(9)) if (child !== null && child !== undefined) node.append(child);
    return node;
  };
  const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const dark = () => root.dataset.theme === "dark";
  const num = (n) => (n === null || n === undefined ? "–" : n.toLocaleString("en-US"));
  const digits = (n, d = 3) => (n === 0 ? "0" : Math.abs(n) >= 1e15 || Math.abs(n) < 1e-4 ? n.toExponential(1) :
    n.toLocaleString("en-US", { maximumSignificantDigits: d }));
  const many = (n, noun) => `${num(n)} ${noun}${n === 1 ? "" : "s"}`;
  const bytes = (n) => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let i = 0;
    while (Math.abs(n) >= 1024 && i < 4) { n /= 1024; i += 1; }
    return `${i ? n.toFixed(n < 10 ? 2 : 1) : n} ${units[i]}`;
  };
  const time = (s) => (s === 0 ? "0 s" : s < 1e-3 ? `${digits(s * 1e6)} µs` : s < 1 ? `${digits(s * 1e3)} ms` : `${digits(s)} s`);
  const flop = (n) => {
    const units = ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"];
    let i = 0;
    while (Math.abs(n) >= 1000 && i < 5) { n /= 1000; i += 1; }
    return `${digits(n)} ${units[i]}`;
  };
  const percent = (x) => `${(100 * x).toFixed(1)}\u00a0%`;
  const escaped = (s) => String(s).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);

  // Blue and orange first; all of them differ in lightness too (after Okabe and Ito).
  const LIGHT = ["#1f6fb8", "#d9780a", "#7b5ea7", "#3a9a86", "#b8477f", "#8a7a1f", "#5f6f80"];
  const DARK = ["#5aa9ee", "#f2a33c", "#b79ae0", "#5cc4ae", "#e88bb6", "#d6c65a", "#93a5b7"];
  const color = (i) => (dark() ? DARK : LIGHT)[i % LIGHT.length];
  const STRIPES = { symbol: "rect", dashArrayX: [1, 0], dashArrayY: [3, 5], rotation: -Math.PI / 4, symbolSize: 1 };
  const stripes = () => ({ ...STRIPES, color: dark() ? "rgba(0,0,0,.45)" : "rgba(255,255,255,.65)" });
  const hatch = (ink, ground) => {
    const canvas = document.createElement("canvas");
    canvas.width = canvas.height = 8;
    const pen = canvas.getContext("2d");
    if (ground) { pen.fillStyle = ground; pen.fillRect(0, 0, 8, 8); }
    pen.strokeStyle = ink; pen.lineWidth = 1.2;
    pen.beginPath();
    for (const x of [-8, 0, 8]) { pen.moveTo(x, 8); pen.lineTo(x + 8, 0); }
    pen.stroke();
    return { image: canvas, repeat: "repeat" };
  };

  // ---- parts of every section -----------------------------------------------------------------
  const jumps = document.getElementById("jumps");
  const jump = (id, short) => jumps.append(el("a", { href: `#${id}` }, short));
  const section = (id, title, short, lead) => {
    const made = el("section", { id, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title` }, title),
      lead ? el("p", { class: "lead" }, lead) : null);
    sections.append(made);
    jump(id, short);
    return made;
  };
  const table = (head, rows, caption, how = "") => {
    // A column is text if its first value is; numbers stand at the right.
    const text = head.map((_, i) => rows.some((r) => r[i] instanceof Node || (typeof r[i] === "string" && !/^([-+–]?[\d.,]|–$)/.test(r[i]))));
    text[0] = head[0] !== "#";
    return el("div", { class: `scroll ${how}`, tabindex: "0", role: "group", "aria-label": `${caption}, may scroll` }, el("table", { "aria-label": caption },
      el("thead", {}, el("tr", {}, head.map((h, i) => el("th", { scope: "col", class: text[i] ? "t" : null }, h)))),
      el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell, i) =>
        el(i ? "td" : "th", { class: text[i] ? "t" : "n", scope: i ? null : "row" }, typeof cell === "number" ? digits(cell, 4) : cell ?? "–")))))));
  };
  /** The first rows of a table in words, for those who do not see the chart of it. */
  const told = (shown, most) => {
    const head = [...shown.querySelectorAll("thead th")].map((h) => h.textContent);
    const rows = [...shown.querySelectorAll("tbody tr")];
    const said = rows.slice(0, most).map((row) => {
      const [first, ...rest] = [...row.children].map((cell) => cell.textContent);
      return `${first.startsWith(head[0]) ? "" : `${head[0]} `}${first}: ${rest.map((cell, i) => `${head[i + 1]} ${cell}`).join("; ")}.`;
    });
    return [...said, rows.length > most ? `${many(rows.length - most, "row")} more in the table.` : ""].join(" ");
  };
  let figures = 0;
  /** A chart with its title, unit and label, and the same numbers as a table and in words. */
  const figure = (parent, title, unit, height, option, shown, { note, legend, rows = 12 } = {}) => {
    const id = `figure-${figures += 1}-numbers`;
    const numbers = el("p", { id, hidden: true }, [note, told(shown, rows)].filter(Boolean).join(" "));
    const canvas = el("div", { class: "chart", role: "img", "aria-label": `${title}. ${unit}.`, "aria-describedby": id });
    shown.hidden = true;
    const name = (on) => { button.textContent = on ? "Chart" : "Table"; button.setAttribute("aria-label", `${button.textContent}: ${title}`); };
    const button = el("button", { type: "button", onclick: () => {
      const on = shown.hidden;
      name(on);
      shown.hidden = !on;
      canvas.hidden = on;
      if (!on) entry.draw();
    } });
    name(false);
    const made = el("figure", { "aria-label": title }, el("figcaption", {}, el("h3", {}, title), el("span", { class: "unit" }, unit), button),
      legend || null, canvas, numbers, shown);
    parent.append(made);
    const entry = { chart: null, draw() {
      if (canvas.hidden || !canvas.clientWidth) return;
      const tall = typeof height === "function" ? height(canvas.clientWidth) : height;
      canvas.style.height = `${tall}px`;
      entry.chart ??= echarts.init(canvas, null, { renderer: "canvas" });
      entry.chart.resize();
      entry.chart.setOption(withDefaults(option(canvas.clientWidth < 560, canvas.clientWidth)), { notMerge: true });
    } };
    charts.push(entry);
    seen.observe(canvas);
    canvas.entry = entry;
    return made;
  };
  const seen = new IntersectionObserver((found) => {
    for (const one of found) if (one.isIntersecting) { seen.unobserve(one.target); one.target.entry.draw(); }
  }, { rootMargin: "400px" });

  const withDefaults = (option) => {
    const ink = css("--ink"), soft = css("--soft"), line = css("--line"), card = css("--card");
    const axis = (a) => ({ ...a, nameTextStyle: { color: soft, fontSize: 12, ...a.nameTextStyle },
      axisLabel: { color: soft, fontSize: 12, hideOverlap: true, ...a.axisLabel }, axisLine: { lineStyle: { color: line }, ...a.axisLine },
      axisTick: { lineStyle: { color: line }, ...a.axisTick }, splitLine: { lineStyle: { color: line, opacity: .7 }, ...a.splitLine } });
    const all = (x) => (x === undefined ? x : Array.isArray(x) ? x.map(axis) : axis(x));
    return { animation: false, textStyle: { fontFamily: getComputedStyle(document.body).fontFamily, color: ink },
      aria: { enabled: true, label: { enabled: false } }, ...option,
      xAxis: all(option.xAxis), yAxis: all(option.yAxis),
      legend: option.legend ? { top: 0, left: 0, itemGap: 16, textStyle: { color: soft, fontSize: 12.5 }, itemWidth: 16, itemHeight: 12, ...option.legend } : undefined,
      tooltip: { confine: true, backgroundColor: card, borderColor: line, textStyle: { color: ink, fontSize: 12.5 }, ...option.tooltip } };
  };
  const shownText = (...lines) => lines.filter(Boolean).map((l, i) => (i ? escaped(l) : `<b>${escaped(l)}</b>`)).join("<br>");
  const legendOf = (items) => el("p", { class: "legend" }, items.map(([i, text, how]) => {
    const swatch = el("i", {});
    swatch.dataset.color = i; if (how) swatch.dataset.how = how;
    paint(swatch);
    return el("span", {}, swatch, text);
  }));
  const paint = (swatch) => {
    const own = color(Number(swatch.dataset.color)), how = swatch.dataset.how;
    swatch.style.background = how === "stripes" ? `repeating-linear-gradient(-45deg, ${own} 0 3px, ${css("--card")} 3px 5px)` :
      how === "hatch" ? `repeating-linear-gradient(-45deg, ${css("--soft")} 0 1.2px, transparent 1.2px 5px)` : own;
    swatch.style.border = how === "hatch" ? `1px solid ${css("--line")}` : "0";
  };

  // ---- program --------------------------------------------------------------------------------
  const describe = (closure, all) => {
    const kernels = closure.kernels;
    const facts = [["calls", num(closure.calls)], [closure.strip ? "calls inside" : "operators", num(closure.nodes)], ["inputs", num(closure.inputs)]];
    if (closure.saved_bytes) facts.push(["saved for backward, per call", bytes(closure.saved_bytes)]);
    if (kernels) facts.push(["kernel launches, per call", num(kernels.launches)], ["memory made, per call", bytes(kernels.made_bytes)]);
    const parts = [];
    if (closure.operators) {
      const lined = closure.operators.some((o) => o[2]);
      const rows = closure.operators.map((o, i) => [String(i + 1), el("code", {}, o[0]), el("code", {}, o[1]), ...(lined ? [o[2] ? el("code", {}, o[2]) : "–"] : [])]);
      const more = closure.num_operators > closure.operators.length ? `, the first ${num(closure.operators.length)}` : "";
      parts.push(el("div", {}, el("h4", {}, `${lined ? "Operators as captured" : "Operators"}${more}`),
        table(["#", "operator", "result", ...(lined ? ["your line"] : [])], rows, `Operators of ${closure.name}`)));
    }
    if (kernels) parts.push(el("div", {}, el("h4", {}, "Kernels"),
      table(["kernel", "launches"], kernels.rows.map(([name, n]) => [el("code", {}, name), n]), `Kernels of ${closure.name}`)));
    const body = closure.strip ? lane({ name: "inside", items: closure.strip }, all, false) : el("div", { class: parts.length > 1 ? "two" : "" }, parts);
    return el("div", {}, el("dl", { class: "facts", style: "margin-block:.5rem .8rem" }, facts.map(([k, v]) => el("div", {}, el("dt", {}, k), el("dd", {}, v)))), body);
  };
  const hue = (number, all) => {
    // A closure and its derivative have one colour: what is before the dot names both.
    const families = [...new Set(all.filter((c) => c.is_block).map((c) => c.name.split(".")[0]))];
    const found = families.indexOf(all[number].name.split(".")[0]);
    return found < 0 ? null : found;
  };
  const lane = (lane, all, back) => {
    const place = el("div", {});
    const calls = el("div", { class: "calls", role: "group", "aria-label": `${lane.name}, in order of execution` });
    let open = null;
    const show = (button, number, member, times) => {
      if (open) { open.setAttribute("aria-expanded", "false"); }
      place.replaceChildren();
      if (open === button) { open = null; return; }
      open = button;
      button.setAttribute("aria-expanded", "true");
      const closure = all[number], own = hue(number, all);
      const close = el("button", { type: "button", onclick: () => { show(button, number, member, times); button.focus(); }, "aria-label": `Close ${closure.name}` }, "Close");
      const at = member.paths.filter(Boolean).join(", ");
      const panel = el("div", { class: "closure", "data-hue": own ?? "" }, el("header", {}, el("h3", {}, el("code", {}, `@${closure.name}`)),
        el("span", { class: "unit", style: "color:var(--soft)" }, at ? `called at ${at}` : ""), close), describe(closure, all));
      tint(panel);
      place.append(panel);
    };
    lane.items.forEach((group, index) => {
      if (index) calls.append(el("span", { class: "arrow", "aria-hidden": "true" }, back ? "←" : "→"));
      const single = group.calls.length === 1;
      const boxes = group.calls.map((member) => {
        const closure = all[member.closure];
        const times = single ? group.times : 1;
        const button = el("button", { type: "button", class: `call${times > 1 ? " stack" : ""}`, "aria-expanded": "false", "data-hue": hue(member.closure, all) ?? "",
          onclick: () => show(button, member.closure, member, group.times) },
          el("b", {}, closure.name.replace(/\.(forward|backward)(_\d+)?$/, "$2"), times > 1 ? ` × ${num(times)}` : ""), el("small", {}, closure.strip ? many(closure.nodes, "call") : many(closure.nodes, "operator")));
        tint(button);
        return button;
      });
      calls.append(single ? el("div", { class: "group", style: group.times > 1 ? "flex-grow:6" : "" }, boxes) :
        el("div", { class: "group many", style: "flex-grow:6" }, boxes, el("b", { style: "align-self:center;padding:0 .4rem;white-space:nowrap" }, `× ${num(group.times)}`)));
    });
    return el("div", {}, el("div", { class: `lane${back ? " back" : ""}` }, el("span", { class: "name" }, lane.name), calls), place);
  };
  const tint = (node) => { if (node.dataset.hue !== "") node.style.setProperty("--c", color(Number(node.dataset.hue))); };
  if (data.program) {
    const p = data.program;
    const repeated = p.micro_batches > 1 ? ` This is one micro-batch; a step runs ${num(p.micro_batches)}, and adds up their gradients.` : "";
    const made = section("program", "The program", "Program", `${num(p.nodes)} graph nodes are held for ${num(p.nodes_if_inlined)}: each closure is compiled once and called. Select a box to open it.${repeated}`);
    p.lanes.forEach((one) => made.append(lane(one, p.closures, one.name === "backward")));
  }

  // ---- reuse ----------------------------------------------------------------------------------
  if (data.reuse) {
    const r = data.reuse;
    const apart = r.instances.filter((i) => i.state === "kept apart");
    const made = section("reuse", "What is shared", "Reuse", "A class and its constructor’s arguments propose what may share a closure; what the forward reads decides.");
    if (r.nothing_shared) made.append(el("p", { class: "callout" }, r.nothing_shared));
    if (r.keys.length) made.append(table(["block", "calls", "note"], r.keys.map((k) => [el("code", {}, k.key), k.num_calls, k.note || "one closure"]), "Blocks by key"));
    if (r.instances.length) {
      const place = el("div", {});
      const fill = (only) => place.replaceChildren(table(["where", "block", "shared", "why"], (only ? apart : r.instances).map((i) => [
        el("span", {}, el("code", {}, i.paths.join(", ") || "–"), i.count > 1 ? ` (${num(i.count)})` : ""), i.block,
        el("span", { class: `badge ${i.state.replace("kept ", "")}` }, i.state), i.why || (i.state === "shared" ? `like ${i.with}` : "the first of its kind")]), "Instances", "stacked"));
      const box = el("input", { type: "checkbox", onchange: () => fill(box.checked) });
      box.checked = apart.length > 0;
      made.append(el("label", { class: "switch" }, box, `only what was kept apart (${num(apart.length)} of ${many(r.instances.reduce((n, i) => n + i.count, 0), "instance")})`), place);
      fill(box.checked);
    }
  }

  // ---- compile time ---------------------------------------------------------------------------
  const sideStyle = (i) => (i ? { itemStyle: { color: color(i), decal: stripes() } } : { itemStyle: { color: color(0), decal: { symbol: "none" } } });
  const valueAxis = (name, narrow, more = {}) => ({ type: "value", name, nameLocation: "middle", nameGap: narrow ? 26 : 30, ...more });
  if (data.passes) {
    const p = data.passes;
    const made = section("passes", "Where compile time went", "Passes", p.sides.map((s) => `${s.name}: ${digits(s.cpu_s)} CPU s, ${digits(s.wall_s)} s on the clock, ${num(s.operators)} operators compiled, ${num(s.launches)} launches in a run`).join(". ") + ".");
    figure(made, "CPU time of each pass", "CPU seconds, child processes included", p.passes.length * (p.sides.length * 20 + 14) + 90, (narrow) => ({
      grid: { left: narrow ? 84 : 110, right: 60, top: p.sides.length > 1 ? 34 : 8, bottom: 44 },
      legend: p.sides.length > 1 ? { data: p.sides.map((s) => s.name) } : undefined,
      xAxis: valueAxis("CPU s", narrow), yAxis: { type: "category", data: p.passes, inverse: true, splitLine: { show: false } },
      tooltip: { trigger: "axis", axisPointer: { type: "shadow" }, formatter: (rows) => shownText(rows[0].name, ...rows.map((r) => {
        const row = p.sides[r.seriesIndex].rows[r.dataIndex];
        return `${r.seriesName}: ${digits(row.cpu_s)} CPU s, ${digits(row.wall_s)} s on the clock, ${num(row.nodes)} nodes after`;
      })) },
      series: p.sides.map((s, i) => ({ name: s.name, type: "bar", barMaxWidth: 18, barGap: "15%", data: s.rows.map((r) => r.cpu_s), ...sideStyle(i),
        label: { show: true, position: "right", color: css("--soft"), fontSize: 11.5, formatter: (x) => (x.value < .005 ? "" : digits(x.value, 3)) } })),
    }), table(["pass", ...p.sides.flatMap((s) => [`${s.name}, CPU s`, `${s.name}, s on the clock`, `${s.name}, nodes after`])],
      p.passes.map((name, i) => [name, ...p.sides.flatMap((s) => [digits(s.rows[i].cpu_s), digits(s.rows[i].wall_s), num(s.rows[i].nodes)])]), "Seconds per pass"));
  }
  if (data.depth) {
    const d = data.depth;
    const made = section("depth", "Over the depth of the model", "Depth", "How compiling grows with the number of layers.");
    const lines = (key, name) => (narrow) => ({
      grid: { left: narrow ? 56 : 68, right: 24, top: 36, bottom: 46 }, legend: { data: d.sides.map((s) => s.name) },
      xAxis: { ...valueAxis("layers", narrow, { nameGap: 28 }), minInterval: 1, min: 0 }, yAxis: valueAxis(name, narrow, { nameGap: narrow ? 40 : 50, min: 0 }),
      tooltip: { trigger: "axis", formatter: (rows) => shownText(`${rows[0].value[0]} layers`, ...rows.map((r) => `${r.seriesName}: ${digits(r.value[1])} ${name}`)) },
      series: d.sides.map((s, i) => ({ name: s.name, type: "line", data: d.layers.map((l, j) => [l, s.compiles[j][key]]), symbol: i ? "diamond" : "circle", symbolSize: 9,
        lineStyle: { width: 2.5, type: i ? "dashed" : "solid", color: color(i) }, itemStyle: { color: color(i) } })),
    });
    figure(made, "Compile time over layers", "CPU seconds, lower is better", 300, lines("cpu_s", "CPU s"),
      table(["layers", ...d.sides.flatMap((s) => [`${s.name}, CPU s`, `${s.name}, s on the clock`])], d.layers.map((l, i) => [num(l), ...d.sides.flatMap((s) => [digits(s.compiles[i].cpu_s), digits(s.compiles[i].wall_s)])]), "Compile time over layers"));
    figure(made, "Operators compiled over layers", "operators handed to the backend", 300, lines("operators", "operators"),
      table(["layers", ...d.sides.flatMap((s) => [`${s.name}, operators`, `${s.name}, nodes held`])], d.layers.map((l, i) => [num(l), ...d.sides.flatMap((s) => [num(s.compiles[i].operators), num(s.compiles[i].nodes)])]), "Operators over layers"));
  }
  if (data.steps) {
    const s = data.steps;
    const made = section("steps", "Time of a step", "Step", `${num(s.rows[0][4])} rounds, all ways in turn within each round. The bar is the median; the line goes from the fastest to the slowest round.`);
    if (s.noise) made.append(el("p", { class: "callout" }, `${s.noise[0].toUpperCase()}${s.noise.slice(1)}.`));
    const names = s.rows.map((r) => r[0]);
    figure(made, "One step", "milliseconds, lower is better", names.length * 40 + 60, (narrow) => ({
      grid: { left: 64, right: 90, top: 8, bottom: 44 }, xAxis: valueAxis("ms", narrow, { min: 0 }),
      yAxis: { type: "category", data: names, inverse: true, splitLine: { show: false } },
      tooltip: { trigger: "axis", axisPointer: { type: "shadow" }, formatter: (rows) => { const r = s.rows[rows[0].dataIndex]; return shownText(r[0], `median ${digits(r[2])} ms`, `fastest ${digits(r[1])} ms`, `slowest ${digits(r[3])} ms`, `${r[4]} rounds`); } },
      series: [{ type: "bar", barWidth: 20, data: s.rows.map((r) => ({ value: r[2], ...(r[0] === "eager" ? { itemStyle: { color: color(6) } } : sideStyle(r[0] === "late" ? 0 : 1)) })),
},
      { type: "custom", renderItem: (_, api) => {
        const y = api.coord([0, api.value(2)])[1], [a, b] = [api.coord([api.value(0), 0])[0], api.coord([api.value(1), 0])[0]], stroke = css("--ink");
        const line = (x1, y1, x2, y2) => ({ type: "line", shape: { x1, y1, x2, y2 }, style: { stroke, lineWidth: 1.5 } });
        return { type: "group", children: [{ type: "text", style: { text: `${digits(s.rows[api.value(2)][2])} ms`, x: b + 8, y, verticalAlign: "middle", fill: css("--soft"), fontSize: 12 } }, line(a, y, b, y), line(a, y - 6, a, y + 6), line(b, y - 6, b, y + 6)] };
      }, encode: { x: [0, 1], y: 2 }, data: s.rows.map((r, i) => [r[1], r[3], i]), silent: true, z: 5 }],
    }), table(["way", "fastest, ms", "median, ms", "slowest, ms", "rounds"], s.rows.map((r) => [r[0], digits(r[1], 4), digits(r[2], 4), digits(r[3], 4), num(r[4])]), "Time of a step"));
    made.append(el("h3", { style: "margin:1.2rem 0 .4rem" }, "Difference from eager"), table(["way", "largest output error, absolute", "largest gradient error, relative", "which is of"],
      s.errors.map(([name, output, gradient, worst]) => [name, output, gradient, worst ? el("code", {}, worst) : "–"]), "Difference from eager"));
  }

  // ---- arena ----------------------------------------------------------------------------------
  if (data.arena) {
    const a = data.arena;
    const over = a.lower_bound_bytes ? a.peak_bytes / a.lower_bound_bytes - 1 : 0;
    const made = section("arena", "Memory", "Memory", `${num(a.num_buffers)} buffers of ${num(a.num_launches)} launches in ${bytes(a.peak_bytes)}, ${percent(over)} above the largest sum of live bytes, which no plan can go below. ` +
      (a.left_out ? `Of these, ${num(a.boxes.length)} , the largest, are drawn. ` : "") + "Drag below the picture to look closer.");
    const unit = a.peak_bytes >= 2 ** 30 ? [2 ** 30, "GiB"] : a.peak_bytes >= 2 ** 20 ? [2 ** 20, "MiB"] : [2 ** 10, "KiB"];
    const legend = legendOf(a.kinds.map((k, i) => [i, k]).filter(([i]) => a.boxes.some((b) => b[4] === i)).map(([i, k]) => [[6, 3, 0, 1, 2][i], k, i === 3 ? "stripes" : null]));
    const at = (b) => a.names[a.calls[b[5]]] || "between";
    figure(made, "The arena", `time in launches, address in ${unit[1]}; above it, live bytes`, (w) => (w < 560 ? 460 : 560), (narrow) => {
      const left = narrow ? 52 : 68, zoom = { xAxisIndex: [0, 1], filterMode: "weakFilter" };
      const line = css("--card"), lined = a.boxes.length < 500;
      const fills = [color(6), color(3), color(0), hatch(css("--card"), color(1)), color(2)];
      return {
        grid: [{ left, right: 20, top: 14, height: narrow ? 80 : 110 }, { left, right: 20, top: narrow ? 130 : 160, bottom: 78 }],
        xAxis: [{ type: "value", min: 0, max: a.end, axisLabel: { show: false }, splitLine: { show: false } },
          { type: "value", gridIndex: 1, min: 0, max: a.end, name: "launches", nameLocation: "middle", nameGap: 24, splitLine: { show: false } }],
        yAxis: [{ type: "value", name: "live", nameLocation: "middle", nameGap: narrow ? 36 : 48, min: 0, max: a.peak_bytes * 1.08 / unit[0], splitNumber: 2, axisLabel: { formatter: (v) => digits(v, 3), showMaxLabel: false } },
          { type: "value", gridIndex: 1, name: `address, ${unit[1]}`, nameLocation: "middle", nameGap: narrow ? 36 : 48, min: 0, max: a.peak_bytes / unit[0], axisLabel: { formatter: (v) => digits(v, 3), showMaxLabel: false } }],
        dataZoom: [{ type: "inside", ...zoom, zoomOnMouseWheel: "ctrl", moveOnMouseWheel: false }, { type: "slider", ...zoom, height: 20, bottom: 10, borderColor: css("--line"), textStyle: { color: css("--soft") }, showDetail: false, brushSelect: false }],
        tooltip: { trigger: "item", formatter: (x) => {
          if (x.seriesType === "line") return shownText(`launch ${num(x.value[0])}`, `${digits(x.value[1], 4)} ${unit[1]} live`);
          const b = a.boxes[x.dataIndex];
          return shownText(at(b), `buffer made by ${a.launches[b[6]]}`, `${bytes(b[3])} at ${bytes(b[2])}`, `${a.kinds[b[4]]}, launches ${num(b[0])} to ${num(b[1])}`);
        } },
        series: [
          { type: "line", step: "end", showSymbol: false, data: a.live.map(([t, n]) => [t, n / unit[0]]), lineStyle: { width: 1.5, color: color(0) }, areaStyle: { color: color(0), opacity: .18 }, z: 3,
            markLine: { symbol: "none", silent: true, data: [
              { yAxis: a.peak_bytes / unit[0], lineStyle: { color: color(1), type: "solid", width: 1.5 }, label: { formatter: `arena ${bytes(a.peak_bytes)}`, position: "insideStartTop", color: css("--soft"), fontSize: 11 } },
              { yAxis: a.lower_bound_bytes / unit[0], lineStyle: { color: css("--ink"), type: "dashed", width: 1 }, label: { formatter: `lower bound ${bytes(a.lower_bound_bytes)}`, position: "insideEndTop", color: css("--soft"), fontSize: 11 } }] } },
          { type: "custom", xAxisIndex: 1, yAxisIndex: 1, encode: { x: [0, 1], y: [2, 3] }, clip: true, progressive: 0,
            data: a.boxes.map((b) => [b[0], b[1], b[2] / unit[0], (b[2] + b[3]) / unit[0], b[4]]),
            renderItem: (params, api) => {
              const [x, y] = api.coord([api.value(0), api.value(3)]), [x2, y2] = api.coord([api.value(1), api.value(2)]);
              const frame = params.coordSys;
              const shape = echarts.graphic.clipRectByRect({ x, y, width: Math.max(x2 - x, .6), height: Math.max(y2 - y, .5) }, frame);
              return shape && { type: "rect", shape, style: { fill: fills[api.value(4)], opacity: .88, stroke: lined ? line : null, lineWidth: lined ? .5 : 0 }, emphasis: { style: { opacity: 1, stroke: css("--ink"), lineWidth: 1.5 } } };
            },
            markLine: { symbol: "none", silent: true, label: { position: "insideEndTop", color: css("--soft"), fontSize: 11 }, lineStyle: { color: css("--ink"), type: "dashed", width: 1 },
              data: [...(a.backward === null ? [] : [{ xAxis: a.backward, label: { formatter: "backward →", position: "end", distance: 4, rotate: 0, align: "left" } }]),
                ...(a.arena_bytes < a.peak_bytes ? [{ yAxis: a.arena_bytes / unit[0], label: { formatter: "above: memory of gradients", position: "insideStartTop" } }] : [])] } }],
      };
    }, table(["call", "kind", "made by", "bytes", "address", "first launch", "last launch"], [...a.boxes].sort((p, q) => q[3] - p[3]).slice(0, 300).map((b) => [at(b), a.kinds[b[4]],
      el("code", {}, a.launches[b[6]]), bytes(b[3]), bytes(b[2]), num(b[0]), num(b[1] - 1)]), "The largest 300 buffers"), { note: `Peak ${bytes(a.peak_bytes)}, lower bound ${bytes(a.lower_bound_bytes)}. The largest buffers:`, legend, rows: 5 });
    if (a.outside.length) made.append(el("h3", { style: "margin:1.2rem 0 .4rem" }, "Outside the plan"), table(["what", "how many", "most at once"], a.outside.map(([what, n, most]) => [what, num(n), bytes(most)]), "Outside the plan"));
  }

  // ---- recompute ------------------------------------------------------------------------------
  if (data.recompute) {
    const r = data.recompute;
    const made = section("recompute", "Saved and computed again", "Recompute", "What one call of each closure keeps for its backward, and which of its operators the backward runs again.");
    made.append(table(["closure", "choice", "calls", "saved per call", "saved tensors", "computed again per call", "operators again"], r.choices.map((c) => [el("code", {}, `@${c.closure}`), c.choice, num(c.num_calls), bytes(c.saved_bytes),
      num(c.saved), flop(c.recomputed_flops), c.recomputed.map(([op, n]) => `${n} ${op}`).join(", ") || "nothing"]), "What is saved and computed again"));
    r.frontiers.filter((f) => f.points.length > 1).forEach((f) => {
      const chosen = r.choices.filter((c) => c.closure === f.closure);
      const scale = Math.max(...f.points.map((p) => p.saved_bytes)) >= 2 ** 20 ? [2 ** 20, "MiB"] : [2 ** 10, "KiB"];
      const spot = (p) => [p.saved_bytes / scale[0], p.extra_s * 1e3, p.extra_flops];
      figure(made, `What @${f.closure} could save`, `per call: ${scale[1]} saved, against predicted time of computing again`, 290, (narrow) => ({
        grid: { left: narrow ? 60 : 74, right: 30, top: 34, bottom: 46 }, legend: { data: ["possible", "chosen"] },
        xAxis: valueAxis(`saved per call, ${scale[1]}`, narrow, { nameGap: 28 }), yAxis: valueAxis("predicted, ms", narrow, { nameGap: narrow ? 42 : 52, min: 0 }),
        tooltip: { trigger: "item", formatter: (x) => shownText(x.seriesName, `${digits(x.value[0])} ${scale[1]} saved`, x.value[2] ? `${flop(x.value[2])} computed again` : "nothing heavy computed again", `${digits(x.value[1])} ms predicted`) },
        series: [{ name: "possible", type: "line", step: false, data: f.points.map(spot), symbolSize: 8, lineStyle: { color: color(0), width: 2 }, itemStyle: { color: color(0) } },
          { name: "chosen", type: "scatter", symbol: "diamond", symbolSize: 17, z: 5, itemStyle: { color: color(1), borderColor: css("--card"), borderWidth: 1.5 },
            data: f.points.filter((p) => chosen.some((c) => c.saved_bytes === p.saved_bytes)).map(spot) }],
      }), table(["saved per call", "computed again", "predicted time"], f.points.map((p) => [bytes(p.saved_bytes), flop(p.extra_flops), time(p.extra_s)]), `Frontier of ${f.closure}`));
    });
  }

  // ---- pipeline -------------------------------------------------------------------------------
  if (data.pipeline) {
    const p = data.pipeline, n = p.ranks.length;
    const made = section("pipeline", "The pipeline", "Pipeline", `${p.schedule}, ${many(p.stages.length, "stage")} on ${many(n, "rank")}, ${many(p.micro_batches, "micro-batch").replace("batchs", "batches")}: a step is predicted to take ${time(p.step_s)}, of which ranks wait ${percent(p.bubble)}.`);
    const kinds = p.kinds.filter(([k]) => p.slots.some((s) => s[3] === k));
    const shade = { F: 0, B: 1, I: 1, W: 3 };
    const unit = p.step_s < 1e-3 ? [1e6, "µs"] : p.step_s < 1 ? [1e3, "ms"] : [1, "s"];
    const gaps = [];
    p.ranks.forEach((_, rank) => {
      let end = 0;
      for (const s of p.slots.filter((x) => x[0] === rank).sort((x, y) => x[1] - y[1])) { if (s[1] > end + p.step_s * 1e-9) gaps.push([rank, end, s[1]]); end = Math.max(end, s[2]); }
      if (end < p.step_s * (1 - 1e-9)) gaps.push([rank, end, p.step_s]);
    });
    const rows = p.ranks.map((_, i) => `rank ${i}`);
    const legend = legendOf([...kinds.map(([k, text]) => [shade[k], text, k === "B" || k === "I" ? "stripes" : null]), [6, "bubble: the rank waits", "hatch"]]);
    const lefty = (narrow) => (narrow ? 56 : 74);
    figure(made, "The schedule", `time in ${unit[1]}, as predicted; in each box, stage . micro-batch`, Math.max(n * 40 + 100, 150), (narrow) => {
      const ink = css("--card"), gapFill = hatch(css("--soft")), striped = {};
      return {
        grid: { left: lefty(narrow), right: 20, top: 8, bottom: 78 }, xAxis: { type: "value", min: 0, max: p.step_s * unit[0], name: unit[1], nameLocation: "middle", nameGap: 24, axisLabel: { formatter: (v) => digits(v, 3) } },
        yAxis: { type: "category", data: rows, inverse: true, splitLine: { show: false } },
        dataZoom: [{ type: "inside", filterMode: "weakFilter", zoomOnMouseWheel: "ctrl", moveOnMouseWheel: false }, { type: "slider", filterMode: "weakFilter", height: 20, bottom: 10, showDetail: false, brushSelect: false, borderColor: css("--line") }],
        tooltip: { trigger: "item", formatter: (x) => { if (x.seriesIndex) { const s = p.slots[x.dataIndex]; return shownText(`${p.kinds.find((k) => k[0] === s[3])[1]} of stage ${s[4]}`, `micro-batch ${s[5]}, rank ${s[0]}`, `${time(s[1])} to ${time(s[2])}: ${time(s[2] - s[1])}`); } const g = gaps[x.dataIndex]; return shownText(`rank ${g[0]} waits`, time(g[2] - g[1])); } },
        series: [
          { type: "custom", encode: { x: [1, 2], y: 0 }, data: gaps.map((g) => [g[0], g[1] * unit[0], g[2] * unit[0]]), renderItem: (params, api) => {
            const a = api.coord([api.value(1), api.value(0)]), b = api.coord([api.value(2), api.value(0)]), tall = Math.min(30, api.size([0, 1])[1] * .82);
            const shape = echarts.graphic.clipRectByRect({ x: a[0], y: a[1] - tall / 2, width: b[0] - a[0], height: tall }, params.coordSys);
            return shape && { type: "rect", shape, style: { fill: gapFill, opacity: .55 } };
          } },
          { type: "custom", encode: { x: [1, 2], y: 0 }, data: p.slots.map((s) => [s[0], s[1] * unit[0], s[2] * unit[0]]), renderItem: (params, api) => {
            const s = p.slots[params.dataIndex];
            const a = api.coord([api.value(1), api.value(0)]), b = api.coord([api.value(2), api.value(0)]), tall = Math.min(30, api.size([0, 1])[1] * .82);
            const shape = echarts.graphic.clipRectByRect({ x: a[0], y: a[1] - tall / 2, width: Math.max(b[0] - a[0], .8), height: tall }, params.coordSys);
            if (!shape) return null;
            const text = p.stages.length > n ? `${s[4]}.${s[5]}` : String(s[5]);
            const own = color(shade[s[3]]);
            return { type: "group", children: [{ type: "rect", shape: { ...shape, r: 3 }, style: { fill: own, stroke: ink, lineWidth: 1 } },
              shape.width > text.length * 7 + 6 ? { type: "text", silent: true, style: { text, x: shape.x + shape.width / 2, y: shape.y + shape.height / 2, align: "center", verticalAlign: "middle", fontSize: 11.5, fontWeight: 600, fill: dark() || s[3] !== "F" ? "#10161d" : "#fff" } } : null,
              s[3] === "B" || s[3] === "I" ? { type: "rect", silent: true, shape: { x: shape.x, y: shape.y + shape.height - 5, width: shape.width, height: 5 }, style: { fill: striped.fill ??= hatch("#10161d") } } : null].filter(Boolean) };
          } }],
      };
    }, table(["rank", "action", "stage", "micro-batch", `start, ${unit[1]}`, `end, ${unit[1]}`], p.slots.map((s) => [num(s[0]), p.kinds.find((k) => k[0] === s[3])[1], num(s[4]), num(s[5]), digits(s[1] * unit[0], 4), digits(s[2] * unit[0], 4)]), "The schedule"), { note: `${p.ranks.map((r, i) => `Rank ${i} waits ${percent(r.bubble)}`).join(", ")}. The first actions:`, legend, rows: 5 });
    const top = Math.max(...p.ranks.map((r) => r.peak_bytes)), scale = top >= 2 ** 30 ? [2 ** 30, "GiB"] : top >= 2 ** 20 ? [2 ** 20, "MiB"] : [2 ** 10, "KiB"];
    const dashes = ["solid", "dashed", "dotted", [10, 3, 2, 3]];
    figure(made, "Memory of each rank", `${scale[1]} over time: parameters, gradients and micro-batches in flight, as predicted`, 260 + (n > 6 ? 40 : 0), (narrow) => ({
      grid: { left: lefty(narrow), right: 20, top: n > 6 ? 66 : 34, bottom: 44 }, legend: { data: rows, type: n > 12 ? "scroll" : "plain" },
      xAxis: { type: "value", min: 0, max: p.step_s * unit[0], name: unit[1], nameLocation: "middle", nameGap: 26, axisLabel: { formatter: (v) => digits(v, 3) } },
      yAxis: valueAxis(scale[1], narrow, { nameGap: narrow ? 40 : 50, min: 0 }),
      tooltip: { trigger: "axis", formatter: (found) => shownText(`at ${digits(found[0].value[0])} ${unit[1]}`, ...found.map((f) => `${f.seriesName}: ${digits(f.value[1])} ${scale[1]}`)) },
      series: p.ranks.map((r, i) => ({ name: rows[i], type: "line", step: "end", showSymbol: false, data: r.held.map(([t, b]) => [t * unit[0], b / scale[0]]), lineStyle: { width: 2, color: color(i), type: dashes[Math.floor(i / 2) % 4] }, itemStyle: { color: color(i) } })),
    }), table(["rank", "stages", "parameters", "gradients", "peak", "waits"], p.ranks.map((r, i) => [`rank ${i}`, r.stages.join(", "), bytes(r.parameter_bytes), bytes(r.gradient_bytes), bytes(r.peak_bytes), percent(r.bubble)]), "Memory of each rank"));
    made.append(el("h3", { style: "margin:1.2rem 0 .4rem" }, "Stages"), table(["stage", "rank", "calls", "from", "to", "work", "forward", "backward", "parameters", "saved per micro-batch", "most in flight"], p.stages.map((s) => [num(s.index), num(s.rank), num(s.num_blocks),
      el("code", {}, s.first || "–"), el("code", {}, s.last || "–"), flop(s.flops), time(s.forward_s), time(s.backward_s), bytes(s.parameter_bytes), bytes(s.saved_bytes), num(s.in_flight)]), "Stages"));
  }

  // ---- mesh -----------------------------------------------------------------------------------
  if (data.mesh) {
    const m = data.mesh;
    const made = section("mesh", "Over the mesh", "Mesh", `${m.mesh}: in a step a rank takes part in ${many(m.num_collectives, "collective")} of ${bytes(m.moved_bytes)}. The batch: ${m.batch.join("; ") || "none"}.`);
    made.append(table(["how it lies", "parameters"], m.layouts.map(([how, names]) => [how, el("code", {}, names)]), "What lies where", "stacked"));
    if (m.moved.length) made.append(table(["part of the program", "calls", "collectives of a call", "over", "bytes of a call", "launches until waited for"], m.moved.map((r) => [
      el("code", {}, r.part), num(r.num_calls), `${digits(r.count)} ${r.kind}`, r.axis, bytes(Math.round(r.num_bytes)), [...new Set(r.beside)].map(num).join(" to ") || "–"]), "Collectives"));
    if (m.memory.length) made.append(table(["a rank holds", "bytes"], m.memory.map(([what, n]) => [what, bytes(n)]), "Memory of a rank"));
    if (m.whole) made.append(el("p", { class: "callout" }, `On whole tensors on each rank, without a rule: ${m.whole}.`));
    if (m.table) made.append(el("h3", { style: "margin:1.2rem 0 .4rem" }, "What was chosen"), el("pre", { class: "command", tabindex: "0", style: "white-space:pre;overflow-x:auto" }, m.table));
  }
  if (data.predicted) {
    const p = data.predicted;
    const made = section("predicted", "Predicted and measured", "Measured", p.lead);
    const shown = { s: time, bytes, share: percent };
    made.append(table(["what", "predicted", "measured", "measured over predicted"], p.rows.map(([what, unit, a, b]) => [what, a === null ? "not predicted" : shown[unit](a),
      b === null ? "not measured" : shown[unit](b), a && b && unit !== "share" ? `${digits(b / a)}×` : "–"]), "Predicted and measured"));
  }

  if (data.about) jump("about", "Machine");

  // ---- theme, width, place --------------------------------------------------------------------
  const toggle = document.getElementById("theme");
  const wanted = matchMedia("(prefers-color-scheme: dark)");
  const use = (theme) => {
    root.dataset.theme = theme;
    toggle.textContent = theme === "dark" ? "Light" : "Dark";
    toggle.setAttribute("aria-label", `Use the ${theme === "dark" ? "light" : "dark"} theme`);
    document.querySelectorAll("[data-hue]").forEach(tint);
    document.querySelectorAll("[data-color]").forEach(paint);
    charts.forEach((c) => { if (c.chart) c.draw(); });
  };
  let chosen = false;
  toggle.addEventListener("click", () => { chosen = true; use(dark() ? "light" : "dark"); });
  wanted.addEventListener("change", () => { if (!chosen) use(wanted.matches ? "dark" : "light"); });
  use(wanted.matches ? "dark" : "light");
  let waiting = 0;
  addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(() => charts.forEach((c) => { if (c.chart) c.draw(); }), 120); });
  addEventListener("beforeprint", () => charts.forEach((c) => { if (!c.chart) c.draw(); }));
  const places = new IntersectionObserver((found) => {
    for (const one of found) if (one.isIntersecting) for (const link of jumps.children) {
      if (link.getAttribute("href") === `#${one.target.id}`) link.setAttribute("aria-current", "true"); else link.removeAttribute("aria-current");
    }
  }, { rootMargin: "-15% 0px -75% 0px" });
  document.querySelectorAll("main section").forEach((s) => places.observe(s));
})();
