// The explorer of runs. What comes from a store is only ever written as text (textContent), never as markup.
"use strict";
(async () => {
  const unpack = async id => {
    const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), c => c.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  };
  const make = (tag, text, more) => Object.assign(document.createElement(tag), {textContent: text ?? ""}, more);
  const data = JSON.parse(await unpack("data"));
  const at = Object.fromEntries(data.columns.map((name, i) => [name, 5 + i]));
  const shown = Object.entries(data.scores);
  const describe = (settings) => Object.entries(settings).map(([k, v]) => `${k}=${v}`).join(" ");
  const words = data.settings.map((one, i) => `${data.methods[i]} ${describe(one)}`.toLowerCase());
  const heads = ["", "run", "status", "setting", "seed", ...shown.map(([, title]) => title)];
  const value = (row, column) => column < 5 ? [null, row[0], row[1], data.methods[row[2]], row[3]][column]
    : row[at[shown[column - 5][0]]];
  const byId = new Map(data.rows.map(row => [row[0], row]));
  let rows = data.rows, sort = [0, 1], written = 0, target = null;
  const chosen = new Set();

  const box = document.getElementById("explorer");
  box.textContent = "";
  const filter = make("input", "", {type: "search", placeholder: "filter, such as: EF21 seed=1 bytes<20%"});
  filter.setAttribute("aria-label", "filter runs");
  const count = make("span", "", {className: "faint"});
  const bar = make("div");
  const yAxis = make("select"), xAxis = make("select");
  yAxis.setAttribute("aria-label", "what curves show");
  xAxis.setAttribute("aria-label", "against what");
  const metrics = data.curveColumns.filter(name => !["epoch", "step", "bytes", "seconds"].includes(name));
  const first = ["test_on_acc", "test_on_ppl", "test_on_loss"].find(name => metrics.includes(name));
  for (const name of metrics) yAxis.append(make("option", name, {value: name, selected: name === first}));
  for (const name of ["epoch", "step", "seconds", "bytes"].filter(name => data.curveColumns.includes(name)))
    xAxis.append(make("option", name, {value: name}));
  const all = make("button", "choose the filtered (first 40)"), none = make("button", "choose none");
  bar.append(make("span", "draw "), yAxis, make("span", " over "), xAxis, make("span", " "), all, none);
  const plot = make("div", "", {id: "plot", hidden: true}), detail = make("div"), list = make("div", "", {id: "list"});
  const table = make("table"), head = make("tr"), body = make("tbody");
  heads.forEach((title, i) => {
    const th = make("th"), button = make("button", title, {className: "head"});
    button.onclick = () => { sort = [i, sort[0] === i ? -sort[1] : 1]; select(); };
    if (i) th.append(button);
    head.append(th);
  });
  table.append(make("thead"), body);
  table.tHead.append(head);
  list.append(table);
  box.append(filter, make("span", " "), count, bar, plot, detail, list);

  const text = v => v == null ? "-" : typeof v === "number" && !Number.isInteger(v) ? v.toPrecision(4) : String(v);
  // Accuracies and shares in percent, bytes with units; everything else as it is.
  const spoken = (name, v) => {
    if (typeof v !== "number") return text(v);
    if (/_acc$/.test(name)) return `${(100 * v).toFixed(1)} %`;
    if (name === "bytes.ratio" || /\.(fwd|bwd)_ratio$/.test(name)) return `${(100 * v).toPrecision(3)} %`;
    const counted = /^bytes\.|_per_step$|^boundary\.|^gradients\.(?!rate|kept|places|.*\.rate$)|_up$|_down$/.test(name);
    if (!counted || v < 0) return text(v);
    const unit = v < 1e3 ? 0 : Math.min(4, Math.floor(Math.log10(v) / 3));
    return `${unit ? (v / 1000 ** unit).toPrecision(3) : v} ${["B", "kB", "MB", "GB", "TB"][unit]}`;
  };
  const line = row => {
    const tr = make("tr", "", {className: (chosen.has(row[0]) ? "chosen" : "") + (row[0] === target ? " target" : "")});
    const tick = make("input", "", {type: "checkbox", checked: chosen.has(row[0])});
    tick.setAttribute("aria-label", `draw run ${row[0]}`);
    tick.onchange = () => { chosen[tick.checked ? "add" : "delete"](row[0]); tr.className = tick.checked ? "chosen" : ""; draw(); };
    const cell = make("td"), link = make("a", row[0], {href: "#" + encodeURIComponent(row[0])});
    cell.append(tick);
    const named = make("td");
    named.append(link);
    const state = make("td"), badge = make("span", row[1], {className: "badge"});
    if (/^[a-z]+$/.test(row[1])) badge.classList.add(row[1]);
    state.append(badge);
    tr.append(cell, named, state, make("td", data.methods[row[2]]), make("td", text(row[3])),
              ...shown.map(([name]) => make("td", spoken(name, row[at[name]]))));
    return tr;
  };
  const more = () => {  // rows on demand: a slice is written when the end of the last one comes into view
    body.append(...rows.slice(written, written + 100).map(line));
    written += 100;
  };
  list.onscroll = () => { if (written < rows.length && list.scrollTop + list.clientHeight > list.scrollHeight - 400) more(); };
  const numbers = [["seed", row => row[3]], ...data.columns.map(name => [name, row => row[at[name]]])];
  const titled = Object.fromEntries(shown.map(([name, title]) => [name, title]));
  // "bytes<20%" or "bytes<0.2" compares the first column of numbers with that in its name or heading
  const compare = word => {
    const found = word.match(/^([^<>]+?)(<=|>=|<|>)(-?[\d.]+(?:e-?\d+)?)(%?)$/);
    if (!found) return null;
    const [, key, sign, digits, percent] = found, edge = Number(digits) / (percent ? 100 : 1);
    const named = numbers.filter(([name]) => `${name} ${titled[name] ?? ""}`.toLowerCase().includes(key));
    const column = named.find(([name]) => titled[name]) ?? named[0];
    if (!column) return () => false;
    return row => {
      const x = column[1](row);
      return x != null && (sign === "<" ? x < edge : sign === ">" ? x > edge : sign === "<=" ? x <= edge : x >= edge);
    };
  };
  const select = () => {
    const wanted = (filter.value.toLowerCase().match(/"[^"]+"|\S+/g) ?? []).map(word => word.replaceAll('"', ""));
    const tests = wanted.map(word => compare(word) ?? (row =>
      `${row[0]} ${row[1]} seed=${row[3]} `.toLowerCase().includes(word) || words[row[2]].includes(word)));
    const keep = data.rows.filter(row => tests.every(test => test(row)));
    const [column, way] = sort;
    rows = column ? [...keep].sort((a, b) => {
      const [x, y] = [value(a, column), value(b, column)];
      return x == null ? 1 : y == null ? -1 : (x < y ? -1 : x > y ? 1 : 0) * way;
    }) : keep;
    [...head.children].forEach((th, i) => i && i === column ? th.setAttribute("aria-sort", way > 0 ? "ascending" : "descending")
      : th.removeAttribute("aria-sort"));
    count.textContent = `${rows.length} of ${data.rows.length} runs`;
    body.textContent = ""; written = 0; list.scrollTop = 0; more();
    remember();
  };
  // What is seen stands in the address: a run, or the filter, the order, the axes and the chosen runs.
  let quiet = true;
  const remember = () => {
    if (quiet || target) return;
    const kept = new URLSearchParams({f: filter.value, s: sort.join(), x: xAxis.value, y: yAxis.value,
      c: [...chosen].slice(0, 40).join()});
    history.replaceState(null, "", `#!${kept}`);
  };
  const recall = () => {
    if (!location.hash.startsWith("#!")) return;
    const kept = new URLSearchParams(location.hash.slice(2));
    filter.value = kept.get("f") ?? "";
    const [column, way] = (kept.get("s") ?? "0,1").split(",").map(Number);
    if (column >= 0 && column < heads.length) sort = [column, way < 0 ? -1 : 1];
    for (const [box, key] of [[xAxis, "x"], [yAxis, "y"]]) if (kept.get(key)) box.value = kept.get(key);
    for (const id of (kept.get("c") ?? "").split(",")) if (byId.has(id)) chosen.add(id);
  };
  let plotly = null;
  const colours = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#666666", "#8c564b"];
  // One colour a setting; of several seeds with the same x the mean, and a band of one standard deviation.
  const traced = (kind, ids, colour, x, y) => {
    const name = data.methods[kind], safe = name.replace(/[<>&]/g, ""), runs = ids.map(id => data.curves[id]);
    const hover = who => `%{y:.5g} at %{x}<extra>${safe} (${who})</extra>`;
    const alike = runs.every(run => run[x].length === runs[0][x].length);
    if (runs.length < 2 || !alike)
      return runs.map((run, i) => ({x: run[x], y: run[y], name, legendgroup: name, showlegend: !i, mode: "lines+markers",
        marker: {size: 4}, line: {color: colour}, hovertemplate: hover(ids[i].replace(/[^\w-]/g, ""))}));
    const mean = (column, i) => runs.reduce((sum, run) => sum + run[column][i], 0) / runs.length;
    const xs = runs[0][x].map((_, i) => mean(x, i)), ys = runs[0][y].map((_, i) => mean(y, i));
    const sd = ys.map((m, i) => Math.sqrt(runs.reduce((sum, run) => sum + (run[y][i] - m) ** 2, 0) / (runs.length - 1)));
    const band = {x: [...xs, ...[...xs].reverse()], y: [...ys.map((m, i) => m + sd[i]), ...ys.map((m, i) => m - sd[i]).reverse()],
      fill: "toself", fillcolor: colour + "33", line: {width: 0}, mode: "lines", hoverinfo: "skip", legendgroup: name, showlegend: false};
    return [band, {x: xs, y: ys, name: `${name} (${runs.length} seeds)`, legendgroup: name, mode: "lines+markers",
      marker: {size: 4}, line: {color: colour}, hovertemplate: hover(`${runs.length} seeds`)}];
  };
  const draw = async () => {
    remember();
    plot.hidden = !chosen.size;
    if (!chosen.size) return;
    if (!plotly) {
      const script = make("script");
      script.text = await unpack("plotly");
      document.head.append(script);
      plotly = window.Plotly;
    }
    const [x, y] = [xAxis, yAxis].map(one => data.curveColumns.indexOf(one.value));
    const groups = new Map();
    for (const id of chosen) if (data.curves[id]) {
      const kind = byId.get(id)[2];
      groups.set(kind, [...(groups.get(kind) ?? []), id]);
    }
    const traces = [...groups].flatMap(([kind, ids], i) => traced(kind, ids, colours[i % colours.length], x, y));
    const ink = getComputedStyle(document.body).color;
    plotly.react(plot, traces, {margin: {t: 20, r: 10}, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: {color: ink}, xaxis: {title: {text: xAxis.value}, gridcolor: "#8884"},
      yaxis: {title: {text: yAxis.value}, gridcolor: "#8884"}, showlegend: groups.size <= 12,
      hovermode: "closest",
      legend: {orientation: "h", y: -0.2}}, {responsive: true, displaylogo: false});
  };
  const open = () => {
    target = location.hash.startsWith("#!") ? null : decodeURIComponent(location.hash.slice(1));
    const row = byId.get(target);
    detail.textContent = "";
    if (!row) { target = null; return; }
    const block = make("details", "", {open: true});
    block.append(make("summary", `run ${row[0]}: ${row[1]}; ${data.methods[row[2]]}, seed ${row[3]}`));
    if (row[4]) block.append(make("p", row[4]));
    block.append(make("p", `folder ${data.store}/${row[0]}   (commsweep show ${row[0]} --store ${data.store})`, {className: "faint"}));
    const lines = [`seed = ${row[3]}`, ...Object.entries(data.settings[row[2]]).map(([k, v]) => `${k} = ${v}`),
                   ...data.columns.map(name => [name, row[at[name]]]).filter(([, v]) => v != null)
                     .map(([k, v]) => `${k} = ${spoken(k, v)}`)];
    block.append(make("pre", lines.join("\n")));
    const own = data.curves[row[0]];
    if (own) {
      const scroll = make("div", "", {className: "wide"}), t = make("table"), h = make("tr");
      h.append(...data.curveColumns.map(name => make("th", name)));
      t.append(h);
      own[0].forEach((_, i) => { const r = make("tr"); r.append(...own.map((column, k) => make("td", spoken(data.curveColumns[k], column[i])))); t.append(r); });
      scroll.append(t);
      block.append(scroll);
    }
    detail.append(block);
    if (!chosen.size) { chosen.add(row[0]); draw(); }
    box.scrollIntoView();
    select();
  };
  filter.oninput = select;
  yAxis.onchange = xAxis.onchange = draw;
  all.onclick = () => { rows.slice(0, 40).forEach(row => chosen.add(row[0])); select(); draw(); };
  none.onclick = () => { chosen.clear(); select(); draw(); };
  addEventListener("hashchange", open);
  recall();
  select();
  open();
  quiet = false;
  if (chosen.size) draw();
  // Tables of the report: a heading sorts by the number that a cell begins with, else by its text.
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((th, i) => {
      let way = -1;
      const key = row => {
        const said = row.cells[i].querySelector("summary")?.textContent ?? row.cells[i].textContent;
        const number = parseFloat(said.replaceAll(",", ""));
        return Number.isNaN(number) ? said : number;
      };
      th.onclick = () => {
        way = -way;
        const sorted = [...table.tBodies[0].rows].sort((a, b) => {
          const [x, y] = [key(a), key(b)];
          return (typeof x === typeof y ? (x < y ? -1 : x > y ? 1 : 0) : typeof x === "number" ? -1 : 1) * way;
        });
        table.tBodies[0].append(...sorted);
        heads.forEach(other => other.removeAttribute("aria-sort"));
        th.setAttribute("aria-sort", way > 0 ? "ascending" : "descending");
      };
      th.tabIndex = 0;
      th.onkeydown = event => { if (event.key === "Enter") th.click(); };
    });
  }
  document.documentElement.dataset.ready = "yes";
})();
