// The page's side of the planner: shows what the Worker answers, and asks again when a field of the form changes.
// The question is in the address (?run=deepseek_v3&gpu=H100&gpus=2048), so that a plan can be linked.
const FIRST = { run: "deepseek_v3", gpu: "H100", gpus: "2048" };
// What depends on a field: asked again with the usual values of the new run or GPU.
const DEPENDENT = {
  run: ["global_batch", "seq", "tp", "cp", "pp", "vpp", "ep", "etp", "sequences", "recompute"],
  gpu: ["domain", "nic", "format"],
};
const main = document.querySelector("main");
const status = document.getElementById("status");
let waiting = null, busy = true, ready = false, data = null;

const worker = new Worker("worker.mjs", { type: "module" });
worker.onerror = (event) => say(`The planner could not start: ${event.message || "a file is missing"}. ` +
  "Build the page with `python -m benchmarks.planner_page OUT`, and serve the folder over HTTP.", true);
worker.onmessage = ({ data: message }) => {
  if (message.kind === "progress") return say(message.text, false, message.share);
  if (message.kind === "failed") { busy = false; return say(message.text, true); }
  if (message.kind === "ready") { ready = true; busy = false; return next(); }
  show(message);
};

function say(text, wrong = false, share = 0) {
  status.hidden = !text;
  status.className = wrong ? "wrong" : "";
  status.querySelector("span").textContent = text;
  status.querySelector("i").style.width = `${100 * share}%`;
}

function ask(values) {
  waiting = values;
  if (ready && !busy) next();
}

function next() {
  if (!waiting) return;
  const values = waiting;
  waiting = null;
  busy = true;
  worker.postMessage(values);
}

function show({ html, json, quick, seconds }) {
  const scroll = window.scrollY, field = document.activeElement?.name;
  main.innerHTML = html;
  main.classList.toggle("asking", Boolean(quick));
  for (const element of main.querySelectorAll("form.ask input, form.ask select")) listen(element);
  main.querySelector("form.ask")?.addEventListener("submit", (event) => { event.preventDefault(); changed(); });
  const wanted = field && main.querySelector(`[name="${field}"]`);
  if (wanted) wanted.focus({ preventScroll: true });
  window.scrollTo(0, scroll);
  if (quick) return say("the same layout under the new numbers; searching again");
  data = json;
  if (data) offerData();
  document.title = main.querySelector("h1").firstChild.textContent;
  document.body.dataset.seconds = seconds.toFixed(2);
  document.body.dataset.answers = Number(document.body.dataset.answers || 0) + 1;
  say("");
  busy = false;
  next();
}

function offerData() {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([data], { type: "application/json" }));
  link.download = "plan.json";
  link.textContent = "this plan as JSON";
  const line = document.createElement("p");
  line.className = "note";
  line.append(link, `, as moefold plan --json prints it`);
  main.append(line);
}

function listen(element) {
  element.addEventListener("change", () => changed(element.name));
  if (element.type === "range") element.addEventListener("input", () => {
    element.parentNode.querySelector("output").textContent = element.value;
  });
}

function changed(name) {
  const values = Object.fromEntries(new FormData(main.querySelector("form.ask")));
  for (const other of DEPENDENT[name] ?? []) delete values[other];
  history.replaceState(null, "", "?" + new URLSearchParams(values));
  say("planning");
  main.classList.add("asking");
  ask(values);
}

ask({ ...FIRST, ...Object.fromEntries(new URLSearchParams(location.search)) });
