// Uses the page as a person does, and writes down what is to be seen.
const key = (target, name) => target.dispatchEvent(new KeyboardEvent("keydown", {key: name, bubbles: true}));
const lit = (id) => [...document.querySelectorAll(`#${id} .lit .code`)].map((e) => e.textContent);
const pick = (select, value) => { select.value = value; select.dispatchEvent(new Event("change")); };
const found = {};
found.opened = [lit("pane-source"), document.getElementById("said").textContent];
const source = document.querySelector("#pane-source .lines");
const row = [...source.children].find((e) => e.querySelector(".number").textContent === "DOT_LINE");
found.cost = row.querySelector(".cost").textContent;
row.click();
found.source = lit("pane-source");
found.a = lit("pane-a");
found.said = document.getElementById("said").textContent;
pick(document.querySelector("#pane-b select"), "llvm");
found.llvm = lit("pane-b").length;
key(source, "Home"); key(source, "ArrowDown"); key(source, "Enter");
found.unlinked = [lit("pane-a").length, document.getElementById("said").textContent];
pick(document.getElementById("form"), "1");
const position = () => document.getElementById("position").textContent;
found.first = position();
key(document.body, "ArrowRight");
document.querySelector('[data-go="next"]').click();
found.third = position();
found.states = [...document.querySelectorAll(".operand .state")].map((e) => e.textContent);
found.spoken = [...document.querySelectorAll(".operand svg")].map((e) => e.getAttribute("aria-label"));
document.querySelector('[data-go="last"]').click();
found.last = position();
document.querySelector('[data-go="play"]').click();
found.unnamed = [...document.querySelectorAll("button, select, input")].filter(
  (e) => !e.closest("label") && !e.getAttribute("aria-label") && !e.textContent.trim()).length;
found.requests = performance.getEntriesByType("resource").map((e) => e.name);
found.rows = document.querySelectorAll("#rows tr").length;
found.roofline = document.querySelector("#roofline svg").getAttribute("aria-label");
setTimeout(() => {
  found.playing = position();
  found.address = location.hash;
  document.getElementById("visit").textContent = JSON.stringify(found);
}, 700);
