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
  const filter = make("input", "", {type: "search", placeholder: "filter, such as: EF21 seed=1 finished"});
  filter.setAttribute("aria-label", "filter runs");
  const count = make("span", "", {className: "faint"});
  const bar = make("div");
  const yAxis = make("select"), xAxis = make("select");
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
    const th = make("th", title);
    th.onclick = () => { sort = [i, sort[0] === i ? -sort[1] : 1]; select(); };
    head.append(th);
  });
  table.append(make("thead"), body);
  table.tHead.append(head);
  list.append(table);
  box.append(filter, make("span", " "), count, bar, plot, detail, list);

  const text = v => v == null ? "-" : typeof v === "number" && !Number.isInteger(v) ? v.toPrecision(4) : String(v);
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
              ...shown.map(([name]) => make("td", text(row[at[name]]))));
    return tr;
  };
  const more = () => {  // rows on demand: a slice is written when the end of the last one comes into view
    body.append(...rows.slice(written, written + 100).map(line));
    written += 100;
  };
  list.onscroll = () => { if (written < rows.length && list.scrollTop + list.clientHeight > list.scrollHeight - 400) more(); };
  const select = () => {
    const wanted = (filter.value.toLowerCase().match(/"[^"]+"|\S+/g) ?? []).map(word => word.replaceAll('"', ""));
    const keep = data.rows.filter(row => wanted.every(word =>
      `${row[0]} ${row[1]} seed=${row[3]} `.toLowerCase().includes(word) || words[row[2]].includes(word)));
    const [column, way] = sort;
    rows = column ? [...keep].sort((a, b) => {
      const [x, y] = [value(a, column), value(b, column)];
      return x == null ? 1 : y == null ? -1 : (x < y ? -1 : x > y ? 1 : 0) * way;
    }) : keep;
    [...head.children].forEach((th, i) => i && i === column ? th.setAttribute("aria-sort", way > 0 ? "ascending" : "descending")
      : th.removeAttribute("aria-sort"));
    count.textContent = `${rows.length} of ${data.rows.length} runs`;
    body.textContent = ""; written = 0; list.scrollTop = 0; more();
  };
  let plotly = null;
  const draw = async () => {
    plot.hidden = !chosen.size;
    if (!chosen.size) return;
    if (!plotly) {
      const script = make("script");
      script.text = await unpack("plotly");
      document.head.append(script);
      plotly = window.Plotly;
    }
    const [x, y] = [xAxis, yAxis].map(one => data.curveColumns.indexOf(one.value));
    const traces = [...chosen].filter(id => data.curves[id]).map(id => {
      const row = byId.get(id), name = `${data.methods[row[2]]}, seed ${row[3]}`;
      return {x: data.curves[id][x], y: data.curves[id][y], name, mode: "lines+markers", marker: {size: 4},
              hovertemplate: `%{y:.5g} at %{x}<extra>${name.replace(/[<>&]/g, "")} (${id.replace(/[^\w-]/g, "")})</extra>`};
    });
    const ink = getComputedStyle(document.body).color;
    plotly.react(plot, traces, {margin: {t: 20, r: 10}, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: {color: ink}, xaxis: {title: {text: xAxis.value}, gridcolor: "#8884"},
      yaxis: {title: {text: yAxis.value}, gridcolor: "#8884"}, showlegend: traces.length <= 12,
      hovermode: "closest",
      legend: {orientation: "h", y: -0.2}}, {responsive: true, displaylogo: false});
  };
  const open = () => {
    target = decodeURIComponent(location.hash.slice(1));
    const row = byId.get(target);
    detail.textContent = "";
    if (!row) return;
    const block = make("details", "", {open: true});
    block.append(make("summary", `run ${row[0]}: ${row[1]}; ${data.methods[row[2]]}, seed ${row[3]}`));
    if (row[4]) block.append(make("p", row[4]));
    block.append(make("p", `folder ${data.store}/${row[0]}   (commsweep show ${row[0]} --store ${data.store})`, {className: "faint"}));
    const lines = [`seed = ${row[3]}`, ...Object.entries(data.settings[row[2]]).map(([k, v]) => `${k} = ${v}`),
                   ...data.columns.map(name => [name, row[at[name]]]).filter(([, v]) => v != null).map(([k, v]) => `${k} = ${v}`)];
    block.append(make("pre", lines.join("\n")));
    const own = data.curves[row[0]];
    if (own) {
      const scroll = make("div", "", {className: "wide"}), t = make("table"), h = make("tr");
      h.append(...data.curveColumns.map(name => make("th", name)));
      t.append(h);
      own[0].forEach((_, i) => { const r = make("tr"); r.append(...own.map(column => make("td", text(column[i])))); t.append(r); });
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
  select();
  open();
  document.documentElement.dataset.ready = "yes";
})();
