"use strict";
(() => {
  const tip = document.getElementById("tip");
  const show = (text, x, y) => {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(4, Math.min(x + 14, innerWidth - box.width - 8)) + "px";
    tip.style.top = (y + 18 + box.height > innerHeight ? y - box.height - 10 : y + 18) + "px";
  };
  const hide = () => { tip.hidden = true; };

  // Tooltips of everything that carries one, by mouse and by keyboard.
  document.addEventListener("mousemove", (event) => {
    if (event.target.id === "gantt-canvas") return;
    const owner = event.target.closest("[data-tip]");
    owner ? show(owner.dataset.tip, event.clientX, event.clientY) : hide();
  });
  document.addEventListener("focusin", (event) => {
    const owner = event.target.closest("[data-tip]");
    if (!owner) return;
    const box = owner.getBoundingClientRect();
    show(owner.dataset.tip, box.left, box.bottom);
  });
  document.addEventListener("focusout", hide);
  addEventListener("scroll", hide, { passive: true });

  // Copy buttons. A file opened from disk may have no clipboard permission: select instead.
  for (const button of document.querySelectorAll("button[data-copy]")) {
    const label = button.textContent;
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(button.dataset.copy);
      } catch {
        const area = document.createElement("textarea");
        area.value = button.dataset.copy;
        document.body.append(area);
        area.select();
        document.execCommand("copy");
        area.remove();
      }
      button.textContent = "Copied";
      document.getElementById("said").textContent = `${label}: copied`;
      setTimeout(() => { button.textContent = label; }, 1200);
    });
  }

  // Paper has no clicks: what is folded is opened for printing, and closed again.
  const folded = () => document.querySelectorAll("details:not([open])");
  let opened = [];
  addEventListener("beforeprint", () => { opened = [...folded()]; for (const part of opened) part.open = true; });
  addEventListener("afterprint", () => { for (const part of opened) part.open = false; opened = []; });
  addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });

  // Sorting: by the number in data-value where there is one, else by text.
  const key = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value);
  };
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => head.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...table.tBodies[0].rows];
      rows.sort((a, b) => {
        const [x, y] = [key(a, column), key(b, column)];
        const order = typeof x === "number" ? x - y : x.localeCompare(y);
        return down ? -order : order;
      });
      table.tBodies[0].append(...rows);
    }));
  }

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const significant = (values) => values.map((value) => (value === null ? null : String(+value.toPrecision(3))));
  const axis = (label) => ({
    label, stroke: () => css("--soft"), grid: { stroke: () => css("--line"), width: 1 }, ticks: { stroke: () => css("--line"), width: 1 },
    values: (_, values) => significant(values),
  });

  // A dashed line across a chart at one value of an axis.
  const limit = (axis, value) => (chart) => {
    const { ctx, bbox } = chart;
    const at = chart.valToPos(value, axis, true);
    const [start, length] = axis === "x" ? [bbox.left, bbox.width] : [bbox.top, bbox.height];
    if (at < start || at > start + length) return;
    ctx.save();
    ctx.strokeStyle = css("--mark");
    ctx.lineWidth = 2 * devicePixelRatio;
    ctx.setLineDash([5 * devicePixelRatio, 4 * devicePixelRatio]);
    ctx.beginPath();
    if (axis === "x") { ctx.moveTo(at, bbox.top); ctx.lineTo(at, bbox.top + bbox.height); }
    else { ctx.moveTo(bbox.left, at); ctx.lineTo(bbox.left + bbox.width, at); }
    ctx.stroke();
    ctx.restore();
  };

  // Keeps a chart as wide as its holder, and in the page's colours.
  function follow(chart, holder, height) {
    new ResizeObserver(() => chart.setSize({ width: holder.clientWidth, height })).observe(holder);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => chart.redraw());
    chart.over.addEventListener("mouseleave", hide);
  }

  const allocated = document.getElementById("memory-data");
  if (allocated) memory(JSON.parse(allocated.textContent));

  // Memory of some ranks over the step.
  function memory(data) {
    const [holder, height] = [document.getElementById("memory-chart"), 280];
    const heaviest = (line) => line.rank === data.heaviest;
    const line = (of) => ({
      stroke: () => css(heaviest(of) ? "--c-compute" : "--c-recompute"), width: heaviest(of) ? 2 : 1,
      paths: uPlot.paths.stepped({ align: 1 }), points: { show: false },
    });
    const values = (chart) => {
      const { left, top, idx } = chart.cursor;
      if (left < 0 || idx === null) return hide();
      const box = chart.over.getBoundingClientRect();
      const rows = data.lines.map((of) => `pipeline rank ${of.rank}: ${of.gib[idx]} GiB`).reverse();
      show([`${significant([data.seconds[idx]])} s`, ...rows].join("\n"), box.left + left, box.top + top);
    };
    const chart = new uPlot({
      width: holder.clientWidth, height,
      scales: { x: { time: false }, y: { range: (_, low, high) => [0, 1.06 * Math.max(high, data.usable)] } },
      legend: { show: false },
      cursor: { points: { show: false }, y: false, drag: { x: true, y: false } },
      axes: [axis("time in the step, s"), { ...axis("allocated, GiB"), size: 64 }],
      series: [{}, ...data.lines.map(line)],
      hooks: { draw: [limit("y", data.usable)], setCursor: [values] },
    }, [data.seconds, ...data.lines.map((of) => of.gib)], holder);
    follow(chart, holder, height);
  }

  const trained = document.getElementById("loss-data");
  if (trained) loss(JSON.parse(trained.textContent));

  // The loss of every step.
  function loss(losses) {
    const [holder, height] = [document.getElementById("loss-chart"), 280];
    const value = (chart) => {
      const { left, top, idx } = chart.cursor;
      if (left < 0 || idx === null) return hide();
      const box = chart.over.getBoundingClientRect();
      show(`step ${idx}\nloss ${losses[idx].toFixed(4)}`, box.left + left, box.top + top);
    };
    const chart = new uPlot({
      width: holder.clientWidth, height,
      scales: { x: { time: false } },
      legend: { show: false },
      cursor: { y: false, drag: { x: true, y: false } },
      axes: [{ ...axis("step"), incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 1e5, 1e6] }, { ...axis("loss"), size: 64 }],
      series: [{}, { stroke: () => css("--c-compute"), width: 2 }],
      hooks: { setCursor: [value] },
    }, [losses.map((_, step) => step), losses], holder);
    follow(chart, holder, height);
  }

  const searched = document.getElementById("pareto-data");
  if (searched) pareto(JSON.parse(searched.textContent));

  // Strategies by time and memory. Rows of `points`: memory in GiB, seconds, 1 if on the edge plus 2 if found, indices of
  // the values of the axes, indices of the words of the strategy.
  function pareto(data) {
    performance.mark("pareto");
    const holder = document.getElementById("pareto-chart");
    const [points, first] = [data.points, 3];
    const chosen = data.axes.map(() => "");
    const shown = (row) => chosen.every((value, axis) => value === "" || row[first + axis] === Number(value));
    const strategy = (row) => row.slice(first + data.axes.length).map((word) => data.words[word]).join(" ");
    const series = () => {
      const column = (keep) => points.map((row) => (shown(row) && keep(row) ? row[1] : null));
      return [points.map((row) => row[0]), column((row) => row[2] < 2), column((row) => row[2] & 1), column((row) => row[2] & 2)];
    };
    const dots = (size, colour) => ({
      paths: () => null,
      points: { show: true, size, stroke: () => css(colour), fill: () => css(colour) },
    });
    const point = (chart) => {
      const { left, top } = chart.cursor;
      let [nearest, least] = [null, 12 * 12];
      for (const row of left < 0 ? [] : points) {
        if (!shown(row)) continue;
        const [dx, dy] = [chart.valToPos(row[0], "x") - left, chart.valToPos(row[1], "y") - top];
        if (dx * dx + dy * dy < least) [nearest, least] = [row, dx * dx + dy * dy];
      }
      if (!nearest) return hide();
      const box = chart.over.getBoundingClientRect();
      show(`${strategy(nearest)}\n${nearest[1]} s · ${nearest[0]} GiB`, box.left + left, box.top + top);
    };
    const height = 360;
    // What is more than four times as slow as the fastest decides nothing and is not shown.
    const fastest = Math.min(...points.map((row) => row[1]));
    const slowest = Math.min(4 * fastest, Math.max(...points.map((row) => row[1])));
    const chart = new uPlot({
      width: holder.clientWidth, height,
      scales: { x: { time: false }, y: { range: (_, low, high) => [Math.max(low, 0.95 * fastest), Math.min(high, 1.02 * slowest)] } },
      legend: { show: false },
      cursor: { points: { show: false }, y: false, x: false, drag: { x: true, y: true } },
      axes: [axis("peak memory, GiB"), { ...axis("step time, s"), size: 64 }],
      series: [
        {}, dots(3, "--c-recompute"),
        { stroke: () => css("--c-compute"), width: 1.5, spanGaps: true, points: { show: true, size: 5, fill: () => css("--c-compute") } },
        dots(9, "--good"),
      ],
      hooks: {
        draw: [limit("x", data.usable), () => performance.measure("pareto drawn", "pareto")],
        setCursor: [point],
      },
    }, series(), holder);
    data.axes.forEach(({ name, values }, at) => {
      if (values.length < 2) return;
      const order = values.map((value, index) => [value, index]);
      order.sort(([a], [b]) => (typeof a === "number" ? a - b : a.localeCompare(b)));
      const [label, select] = [document.createElement("label"), document.createElement("select")];
      for (const [value, index] of [["all", ""], ...order]) select.add(new Option(value, index));
      select.addEventListener("input", () => { chosen[at] = select.value; chart.setData(series()); });
      label.append(`${name} `, select);
      document.getElementById("pareto-filters").append(label);
    });
    follow(chart, holder, height);
  }

  const source = document.getElementById("gantt-data");
  if (source) gantt(JSON.parse(source.textContent));

  // The Gantt. Times are in tenths of a microsecond.
  function gantt(data) {
    const canvas = document.getElementById("gantt-canvas");
    const picker = document.getElementById("gantt-micro-batch");
    const context = canvas.getContext("2d");
    const LEFT = 44, ROW = data.ranks.length > 24 ? 18 : 28;
    const MAIN = ROW - 9, THIN = 3;
    const height = data.ranks.length * ROW;
    // Set once: a height that changed while drawing would call the resize observer again.
    canvas.style.height = height + "px";
    let [from, to] = [0, data.end];
    let followed = null, drag = null, moved = false;
    const rows = data.ranks.map(() => []);
    for (const event of data.events) rows[event[0]].push(event);

    const family = (kind, stream) => {
      if (stream !== 0) return "--g-comm";
      if (kind === "F") return "--g-f";
      if (kind === "B") return "--g-b";
      if (kind === "I") return "--g-i";
      if (kind === "W") return "--g-w";
      return "--g-opt";
    };
    const time = (t) => {
      const s = t / 1e7;
      return s >= 1 ? s.toFixed(3) + " s" : s >= 1e-3 ? (s * 1e3).toFixed(2) + " ms" : (s * 1e6).toFixed(1) + " µs";
    };
    // The axis of time under the rows: a chart without lines.
    const [unit, scale] = data.end >= 1e7 ? ["s", 1e7] : data.end >= 1e4 ? ["ms", 1e4] : ["µs", 10];
    const decimals = (step) => [0, 1, 2, 3, 4, 5].find((n) => Math.abs(step * 10 ** n % 1 - 0.5) > 0.499) ?? 6;
    // A time at the right edge, where its text would be cut, has none.
    const whole = (chart, t) => chart.valToPos(t, "x") < chart.over.clientWidth - 14;
    const empty = { size: LEFT, values: () => [], grid: { show: false }, ticks: { show: false } };
    const [holder, AXIS] = [document.getElementById("gantt-axis"), 64];
    const ruler = new uPlot({
      width: holder.clientWidth, height: AXIS, padding: [0, 0, 0, 0],
      scales: { x: { time: false }, y: { range: [0, 1] } },
      legend: { show: false }, cursor: { show: false },
      axes: [{
        ...axis(`time in the step, ${unit}`), size: 34, labelSize: 20, grid: { show: false },
        values: (chart, times, __, ___, step) => times.map((t) => (whole(chart, t) ? t.toFixed(decimals(step)) : null)),
      }, empty],
      series: [{}, { show: false }],
    }, [[0, data.end / scale], [null, null]], holder);
    follow(ruler, holder, AXIS);
    const width = () => canvas.clientWidth;
    const x = (t) => LEFT + ((t - from) / (to - from)) * (width() - LEFT);
    const top = (event) => event[0] * ROW + (event[1] === 0 ? 0 : MAIN + 1 + (event[1] - 1) * (THIN + 1));
    const tall = (event) => (event[1] === 0 ? MAIN : THIN);

    function draw() {
      const ratio = devicePixelRatio || 1;
      canvas.width = width() * ratio;
      canvas.height = height * ratio;
      context.setTransform(ratio, 0, 0, ratio, 0, 0);
      context.font = "11px system-ui, sans-serif";
      context.textBaseline = "middle";
      const [soft, track, card] = [css("--soft"), css("--track"), css("--card")];
      data.ranks.forEach((rank, row) => {
        context.fillStyle = track;
        context.fillRect(LEFT, row * ROW, width() - LEFT, MAIN);
        context.fillStyle = soft;
        context.fillText("pp " + rank, 0, row * ROW + MAIN / 2);
      });
      const colours = new Map();
      const colour = (event) => {
        const name = family(data.kinds[event[2]], event[1]);
        if (!colours.has(name)) colours.set(name, css(name));
        return colours.get(name);
      };
      context.save();
      context.beginPath();
      context.rect(LEFT, 0, width() - LEFT, height);
      context.clip();
      for (const event of data.events) {
        if (event[5] > to || event[5] + event[6] < from) continue;
        const [left, right] = [x(event[5]), x(event[5] + event[6])];
        context.globalAlpha = followed !== null && event[4] !== followed ? 0.18 : 1;
        context.fillStyle = colour(event);
        const wide = right - left;
        context.fillRect(left, top(event), Math.max(wide - (wide > 3 ? 0.7 : 0), 0.5), tall(event));
        if (event[1] === 0 && wide > 22 && event[4] >= 0) {
          context.fillStyle = card;
          context.fillText(event[4], left + 4, top(event) + MAIN / 2 + 0.5);
        }
      }
      context.restore();
      ruler.setScale("x", { min: from / scale, max: to / scale });
    }

    const at = (event) => {
      const box = canvas.getBoundingClientRect();
      const [px, py] = [event.clientX - box.left, event.clientY - box.top];
      const row = Math.floor(py / ROW);
      if (px < LEFT || !rows[row]) return null;
      const t = from + ((px - LEFT) / (width() - LEFT)) * (to - from);
      const slack = ((to - from) / (width() - LEFT)) * 1.5;
      return rows[row].find((e) =>
        t >= e[5] - slack && t <= e[5] + e[6] + slack && py >= top(e) - 1 && py <= top(e) + tall(e) + 1) || null;
    };
    const describe = (e) => {
      const part = (name, value) => (value < 0 ? "" : `\n${name} ${value}`);
      return `${data.kinds[e[2]]} on pipeline rank ${data.ranks[e[0]]}` + part("stage", e[3]) + part("micro-batch", e[4]) +
        `\n${time(e[5])} + ${time(e[6])}`;
    };
    const zoom = (factor, centre) => {
      const span = Math.min(data.end, Math.max((to - from) * factor, 100));
      const share = (centre - from) / (to - from);
      from = Math.max(0, Math.min(centre - share * span, data.end - span));
      to = from + span;
      draw();
    };
    const pan = (shift) => {
      const span = to - from;
      from = Math.max(0, Math.min(from + shift, data.end - span));
      to = from + span;
      draw();
    };
    const pick = (microBatch) => {
      followed = microBatch;
      picker.value = microBatch === null ? "" : microBatch;
      draw();
    };
    const middle = () => (from + to) / 2;
    const reset = () => { [from, to] = [0, data.end]; draw(); };

    canvas.addEventListener("mousemove", (event) => {
      if (drag !== null) {
        moved = moved || Math.abs(event.clientX - drag) > 3;
        if (moved) {
          pan(((drag - event.clientX) / (width() - LEFT)) * (to - from));
          drag = event.clientX;
        }
        return;
      }
      const hit = at(event);
      canvas.style.cursor = hit ? "pointer" : "default";
      hit ? show(describe(hit), event.clientX, event.clientY) : hide();
    });
    canvas.addEventListener("mouseleave", hide);
    canvas.addEventListener("mousedown", (event) => { drag = event.clientX; moved = false; });
    addEventListener("mouseup", () => { drag = null; });
    canvas.addEventListener("click", (event) => {
      if (moved) return;
      const hit = at(event);
      pick(hit && hit[4] >= 0 && hit[4] !== followed ? hit[4] : null);
    });
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      const box = canvas.getBoundingClientRect();
      const t = from + ((event.clientX - box.left - LEFT) / (width() - LEFT)) * (to - from);
      zoom(event.deltaY > 0 ? 1.25 : 0.8, t);
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => {
      const actions = {
        "+": () => zoom(0.7, middle()), "=": () => zoom(0.7, middle()), "-": () => zoom(1.4, middle()),
        "0": reset, Escape: () => pick(null),
        ArrowLeft: () => pan(-(to - from) / 8), ArrowRight: () => pan((to - from) / 8),
      };
      if (!actions[event.key]) return;
      event.preventDefault();
      actions[event.key]();
    });
    picker.addEventListener("input", () => pick(picker.value === "" ? null : Number(picker.value)));
    const buttons = { in: () => zoom(0.6, middle()), out: () => zoom(1.6, middle()), reset };
    for (const button of document.querySelectorAll("[data-gantt]")) {
      button.addEventListener("click", buttons[button.dataset.gantt]);
    }

    document.getElementById("gantt-tools").hidden = false;
    const names = new Map([["--g-f", "forward"], ["--g-b", "backward"], ["--g-i", "input gradient"],
      ["--g-w", "weight gradient"], ["--g-opt", "optimizer and other"], ["--g-comm", "communication"]]);
    const used = new Set(data.events.map((e) => family(data.kinds[e[2]], e[1])));
    for (const [variable, name] of names) {
      if (!used.has(variable)) continue;
      const item = document.createElement("span");
      const swatch = document.createElement("i");
      swatch.className = "swatch";
      swatch.style.background = `var(${variable})`;
      item.append(swatch, name);
      document.getElementById("gantt-legend").append(item);
    }
    new ResizeObserver(draw).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
    draw();
  }
})();
