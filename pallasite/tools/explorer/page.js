"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const element = (tag, kind, text) => {
    const made = document.createElement(tag);
    if (kind) made.className = kind;
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const short = (n) => {
    if (!n) return "";
    const prefixes = ["", "k", "M", "G", "T", "P"];
    let power = 0;
    while (Math.abs(n) >= 1000 && power < prefixes.length - 1) { n /= 1000; power += 1; }
    return `${Number(n.toPrecision(3))} ${prefixes[power]}`.trim();
  };

  // --- what is shown; the address keeps it ---

  const state = { view: 0, file: 0, cost: 0, a: "", b: "", at: -1, form: 0, step: 0 };
  const remember = () => {
    const parts = Object.entries(state).map(([key, value]) => `${key}=${encodeURIComponent(value)}`);
    history.replaceState(null, "", `#${parts.join("&")}`);
  };
  const recall = () => {
    for (const [key, value] of new URLSearchParams(location.hash.slice(1))) {
      if (!(key in state)) continue;
      state[key] = typeof state[key] === "number" ? Number(value) || 0 : value;
    }
    if (!data.views[state.view]) state.view = 0;
  };
  // A new page, or view, opens on its most expensive line; a shared address on its own.
  let unchosen = !new URLSearchParams(location.hash.slice(1)).has("at");
  const dearest = () => {
    const costs = Object.entries(view().costs);
    const kinds = [...(costs[0]?.[1] ?? [])].map((_, kind) => kind);
    const kind = kinds.find((each) => costs.some(([, amounts]) => amounts[each] > 0));
    if (kind === undefined) return -1;
    state.cost = kind;
    return Number(costs.reduce((best, each) => (each[1][kind] > best[1][kind] ? each : best))[0]);
  };
  const view = () => data.views[state.view];
  const shownGrid = () => view().grids[state.form] ?? view().grids[0];

  // --- lines ---

  const WORDS = new RegExp(
    "(%[\\w.$]+)|(\"(?:[^\"\\\\]|\\\\.)*\"|'(?:[^'\\\\]|\\\\.)*')|(#.*$|//.*$|;.*$)|" +
    "\\b(def|return|for|while|if|else|in|import|from|lambda|with|as|not|and|or|None|True|False|" +
    "kernel|pipeline|body|map|branch|cond|yield|load|store|dot|define|ret|br|call|phi|module|func)\\b", "g");
  const COMMENTS = { source: "#", llvm: ";" };
  const colored = (text, kind) => {
    const mark = COMMENTS[kind] ?? "//";
    const made = element("span", "code");
    let done = 0;
    for (const found of text.matchAll(WORDS)) {
      const [all, name, quoted, comment, word] = found;
      if (comment && !comment.startsWith(mark)) continue;
      made.append(text.slice(done, found.index));
      made.append(element("span", name ? "name" : quoted ? "text" : comment ? "comment" : "word", all));
      done = found.index + all.length;
    }
    made.append(text.slice(done) || " ");
    return made;
  };
  const line = (number, text, at, kind) => {
    const made = element("div", "line");
    made.setAttribute("role", "option");
    made.setAttribute("aria-selected", "false");
    made.append(element("span", "number", number));
    if (kind === "source") made.append(element("span", "cost"));
    made.append(colored(text, kind));
    if (at >= 0) made.dataset.at = at;
    return made;
  };

  class Pane {
    constructor(id, title) {
      this.root = $(id);
      this.title = title;
      this.list = this.root.querySelector(".lines");
      this.note = this.root.querySelector(".note");
      this.cursor = -1;
      this.list.addEventListener("click", (event) => {
        const row = event.target.closest(".line");
        if (row) { this.move([...this.list.children].indexOf(row)); choose(Number(row.dataset.at ?? -1), this); }
      });
      this.list.addEventListener("keydown", (event) => this.key(event));
    }
    fill(rows) {
      this.cursor = -1;
      rows.forEach((row, n) => { row.id = `${this.root.id}-${n}`; });
      this.list.removeAttribute("aria-activedescendant");
      this.list.replaceChildren(...rows);
    }
    move(to) {
      const rows = this.list.children;
      if (!rows.length) return;
      rows[this.cursor]?.classList.remove("here");
      this.cursor = Math.max(0, Math.min(to, rows.length - 1));
      const row = rows[this.cursor];
      row.classList.add("here");
      this.list.setAttribute("aria-activedescendant", row.id);
      row.scrollIntoView({ block: "nearest", inline: "nearest" });
    }
    key(event) {
      const page = Math.max(Math.floor(this.list.clientHeight / 20) - 1, 1);
      const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page };
      if (event.key in moves) this.move(this.cursor + moves[event.key]);
      else if (event.key === "Home") this.move(0);
      else if (event.key === "End") this.move(this.list.children.length - 1);
      else if (event.key === "Enter" || event.key === " ") {
        const row = this.list.children[this.cursor];
        if (row) choose(Number(row.dataset.at ?? -1), this);
      } else if (event.key === "Escape") choose(-1, this);
      else return;
      event.preventDefault();
    }
    light(at, from) {
      let count = 0, first = null;
      for (const row of this.list.children) {
        const lit = at >= 0 && Number(row.dataset.at ?? -1) === at;
        row.classList.toggle("lit", lit);
        row.setAttribute("aria-selected", String(lit));
        if (lit) { count += 1; first ??= row; }
      }
      if (first && this !== from) {
        this.list.scrollTop = first.offsetTop - this.list.offsetTop - this.list.clientHeight / 3;
      }
      return count;
    }
  }
  const source = new Pane("pane-source", "source");
  const panes = { a: new Pane("pane-a", "a"), b: new Pane("pane-b", "b") };

  const choose = (at, from) => {
    state.at = at;
    const said = $("said");
    $("clear").hidden = at < 0;
    if (at >= 0) {
      const [file] = data.places[at];
      if (file !== state.file) { state.file = file; $("file").value = file; fillSource(); }
    }
    source.light(at, from);
    const counts = Object.entries(panes).map(([key, pane]) => {
      const count = pane.light(at, from);
      return `${count} line${count === 1 ? "" : "s"} of ${state[key]}`;
    });
    if (at >= 0) {
      const [file, number] = data.places[at];
      said.textContent = `${data.sources[file].name}:${number} became ${counts.join(" and ")}.`;
    } else {
      said.textContent = from ? "This line has no source location." : "";
    }
    remember();
  };

  // --- source and stages ---

  const fillSource = () => {
    const file = data.sources[state.file];
    if (!file) { source.fill([]); return; }
    const numbers = new Map();
    data.places.forEach(([f, n], at) => { if (f === state.file) numbers.set(n, at); });
    source.fill(file.lines.map((text, n) => {
      const number = file.first + n;
      return line(number, text, numbers.get(number) ?? -1, "source");
    }));
    fillCosts();
  };
  const fillCosts = () => {
    const costs = view().costs, kind = state.cost;
    const total = Object.values(costs).reduce((sum, each) => sum + each[kind], 0);
    for (const row of source.list.children) {
      const amount = row.dataset.at === undefined ? 0 : costs[row.dataset.at]?.[kind] ?? 0;
      const cell = row.querySelector(".cost");
      cell.textContent = short(amount);
      cell.style.setProperty("--share", total ? `${(100 * amount) / total}%` : "0%");
    }
    const unsure = view().exact ? "" : "; some of it is data-dependent";
    const name = $("cost").selectedOptions[0].textContent;
    $("cost-note").textContent = `${short(total) || 0} ${name} in one call${unsure}`;
  };
  const fillStage = (key) => {
    const stage = view().stages.find((each) => each.name === state[key]);
    const pane = panes[key];
    pane.note.textContent = stage?.note ?? "";
    if (!stage) { pane.fill([]); return; }
    const places = [];
    for (const [count, at] of stage.runs) for (let n = 0; n < count; n += 1) places.push(at);
    pane.fill(stage.text.split("\n").map((text, n) => line(n + 1, text, places[n] ?? -1, stage.name)));
    pane.light(state.at, null);
  };
  const options = (select, names, chosen) => {
    select.replaceChildren(...names.map(([value, text]) => {
      const option = element("option", "", text);
      option.value = value;
      return option;
    }));
    select.value = chosen;
  };

  // --- grid ---

  const SVG = "http://www.w3.org/2000/svg";
  const drawn = (tag, attributes) => {
    const made = document.createElementNS(SVG, tag);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  };
  const starts = (operand, step) => operand.starts.map((column) => column[step]);
  const same = (operand, a, b) => operand.starts.every((column) => column[a] === column[b]);
  const stateOf = (operand, step, count, isEnd) => {
    if (operand.mode === "in") return step > 0 && same(operand, step, step - 1) ? "resident" : "read";
    if (step + 1 < count) return same(operand, step, step + 1) ? "carried" : "written";
    return isEnd ? "written" : "carried";
  };

  // An array is drawn by its last two dimensions; the others are the numbers of a slice.
  class Operand {
    constructor(operand) {
      this.operand = operand;
      this.card = element("div", "operand");
      this.card.append(element("h3", "", `${operand.name} ${operand.dtype}[${operand.shape.join(", ")}]`));
      this.text = element("p");
      this.card.append(this.text);
      if (!operand.starts) { this.text.textContent = operand.note; return; }
      const rank = operand.shape.length;
      const flat = (values, rest) => [rank > 1 ? values[rank - 2] : rest, rank ? values[rank - 1] : rest];
      this.flat = flat;
      [this.rows, this.columns] = flat(operand.shape, 1);
      [this.high, this.wide] = flat(operand.block, 1);
      const scale = 200 / Math.max(this.rows, this.columns, 1);
      const least = (size) => Math.max(size * scale, 14);
      [this.height, this.width] = [least(this.rows), least(this.columns)];
      this.svg = drawn("svg", { width: this.width + 2, height: this.height + 2,
        viewBox: `-1 -1 ${this.width + 2} ${this.height + 2}`, role: "img" });
      this.past = drawn("g", {});
      this.svg.append(this.past);
      this.rules();
      this.svg.append(drawn("rect", { class: "array", width: this.width, height: this.height }));
      this.block = drawn("rect", {});
      this.svg.append(this.block);
      this.card.append(this.svg);
    }
    rules() {
      const [down, across] = [this.rows / this.high, this.columns / this.wide];
      if (down > 64 || across > 64) return;
      for (let n = 1; n < down; n += 1) {
        const y = (n * this.high / this.rows) * this.height;
        this.svg.append(drawn("line", { class: "cell", x1: 0, x2: this.width, y1: y, y2: y }));
      }
      for (let n = 1; n < across; n += 1) {
        const x = (n * this.wide / this.columns) * this.width;
        this.svg.append(drawn("line", { class: "cell", y1: 0, y2: this.height, x1: x, x2: x }));
      }
    }
    box(at) {
      const [row, column] = this.flat(at, 0);
      const cut = (from, size, limit) => [Math.max(from, 0), Math.min(from + size, limit)];
      const [top, bottom] = cut(row, this.high, this.rows), [left, right] = cut(column, this.wide, this.columns);
      return { x: (left / this.columns) * this.width, y: (top / this.rows) * this.height,
        width: Math.max(((right - left) / this.columns) * this.width, 2),
        height: Math.max(((bottom - top) / this.rows) * this.height, 2) };
    }
    show(step, count, isEnd) {
      const { operand } = this;
      if (!operand.starts) return;
      const at = starts(operand, step), kind = stateOf(operand, step, count, isEnd);
      const slice = at.slice(0, -2);
      const seen = new Map();
      for (let n = 0; n < step; n += 1) {
        const before = starts(operand, n);
        if (slice.every((value, d) => value === before[d])) seen.set(before.join(), before);
      }
      this.past.replaceChildren(...[...seen.values()].map((each) => drawn("rect", { class: "past", ...this.box(each) })));
      this.block.setAttribute("class", `block ${kind}`);
      for (const [key, value] of Object.entries(this.box(at))) this.block.setAttribute(key, value);
      const ranges = at.map((from, d) => operand.block[d] === 1 ? `${from}` : `${from}:${from + operand.block[d]}`);
      const word = element("span", `state ${kind}`, kind);
      this.text.replaceChildren(word, ` [${ranges.join(", ")}]`);
      this.svg.setAttribute("aria-label", `${operand.name}: block at ${at.join(", ")}, ${kind}`);
    }
  }

  let operands = [], timer = null;
  const fillGrid = () => {
    const grid = shownGrid(), holder = $("operands");
    stop();
    options($("form"), view().grids.map((each, n) => [n, each.name]), view().grids.indexOf(grid));
    const is = !grid.note;
    $("player").hidden = !is;
    document.querySelector(".legend").hidden = !is;
    operands = [];
    if (!is) {
      holder.replaceChildren();
      $("position").textContent = "";
      $("grid-note").textContent = grid.note;
      return;
    }
    const count = grid.steps.length;
    const first = count < grid.total ? ` The first ${count} of ${grid.total} programs.` : "";
    $("grid-note").textContent = `Order: ${grid.order}.${first}`;
    operands = grid.operands.map((each) => new Operand(each));
    const scratch = grid.scratch.map((each) => {
      const card = element("div", "operand");
      card.append(element("h3", "", `${each.name} ${each.type}`));
      const text = element("p");
      text.append(element("span", "state resident", "resident"), " scratch");
      card.append(text);
      return card;
    });
    holder.replaceChildren(...operands.map((each) => each.card), ...scratch);
    $("step").max = count - 1;
    go(state.step);
  };
  const go = (to) => {
    const grid = shownGrid();
    if (grid.note) return;
    const count = grid.steps.length;
    state.step = Math.max(0, Math.min(to, count - 1));
    $("step").value = state.step;
    const ids = grid.steps[state.step].map((id, axis) => `i${axis}=${id}${grid.parallel[axis] ? "" : "*"}`);
    const starred = grid.parallel.every(Boolean) ? "" : "  (* sequential)";
    $("position").textContent = `step ${state.step + 1} of ${count}: ${ids.join(" ")}${starred}`;
    for (const each of operands) each.show(state.step, count, count === grid.total);
  };
  const stop = () => {
    clearInterval(timer);
    timer = null;
    const button = document.querySelector('[data-go="play"]');
    button.textContent = "Play";
    button.setAttribute("aria-pressed", "false");
  };
  const play = () => {
    if (timer) { stop(); remember(); return; }
    const last = shownGrid().steps.length - 1;
    if (state.step >= last) go(0);
    timer = setInterval(() => {
      if (state.step >= last) { stop(); remember(); } else go(state.step + 1);
    }, Number($("speed").value));
    const button = document.querySelector('[data-go="play"]');
    button.textContent = "Pause";
    button.setAttribute("aria-pressed", "true");
  };
  const acts = {
    first: () => go(0), back: () => go(state.step - 1), next: () => go(state.step + 1),
    last: () => go(Infinity), play,
  };
  const act = (name) => {
    if (shownGrid().note) return;
    if (name !== "play") stop();
    acts[name]();
    if (!timer) remember();
  };

  // --- all of a view ---

  const show = () => {
    const { stages, report, title, roofline } = view();
    const names = stages.map((each) => [each.name, each.name]);
    const known = (name) => stages.some((each) => each.name === name);
    if (!known(state.a)) state.a = known("import") ? "import" : stages[0]?.name ?? "";
    if (!known(state.b)) state.b = stages.filter((each) => each.runs.some(([, at]) => at >= 0)).at(-1)?.name ?? "";
    for (const key of ["a", "b"]) options(panes[key].root.querySelector("select"), names, state[key]);
    options($("file"), data.sources.map((each, n) => [n, each.file]), state.file);
    if (unchosen) { state.at = dearest(); unchosen = false; }
    $("cost").value = state.cost;
    fillSource();
    fillStage("a");
    fillStage("b");
    if (state.at >= 0 && data.places[state.at]) choose(state.at, null);
    fillGrid();
    const table = $("rows");
    table.querySelector("caption").textContent = title;
    table.tBodies[0].replaceChildren(...report.map(([heading, texts]) => {
      const row = element("tr"), head = element("th", "", heading);
      head.scope = "row";
      row.append(head, element("td", "", texts.join("\n")));
      return row;
    }));
    $("roofline").innerHTML = roofline;
  };

  const onChoice = (select, act) => select.addEventListener("change", () => { act(select.value); remember(); });
  onChoice($("view"), (value) => { Object.assign(state, { view: Number(value), a: "", b: "", form: 0, step: 0 }); unchosen = true; show(); });
  onChoice($("form"), (value) => { Object.assign(state, { form: Number(value), step: 0 }); fillGrid(); });
  onChoice($("file"), (value) => { state.file = Number(value); fillSource(); source.light(state.at, null); });
  onChoice($("cost"), (value) => { state.cost = Number(value); fillCosts(); });
  for (const key of ["a", "b"]) {
    onChoice(panes[key].root.querySelector("select"), (value) => { state[key] = value; fillStage(key); });
  }
  onChoice($("speed"), () => { if (timer) { stop(); play(); } });
  $("clear").addEventListener("click", () => choose(-1, null));
  $("step").addEventListener("input", (event) => { stop(); go(Number(event.target.value)); remember(); });
  for (const button of document.querySelectorAll("[data-go]")) {
    button.addEventListener("click", () => act(button.dataset.go));
  }
  document.addEventListener("keydown", (event) => {
    if (event.target.closest("select, input, .lines") || event.ctrlKey || event.metaKey || event.altKey) return;
    const keys = { ArrowRight: "next", ArrowLeft: "back", Home: "first", End: "last", " ": "play" };
    const name = keys[event.key];
    if (!name || (event.key === " " && event.target.closest("button, a"))) return;
    if ((name === "first" || name === "last") && !event.target.closest("#grid")) return;
    event.preventDefault();
    act(name);
  });

  recall();
  options($("view"), data.views.map((each, n) => [n, `${each.kernel} on ${each.target}`]), state.view);
  show();
})();
