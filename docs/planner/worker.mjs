// Python in a Worker, so that the page stays alive while the planner searches. `manifest.json` names the files to
// unpack; the build command wrote it.
import { loadPyodide } from "./pyodide/pyodide.mjs";

const tell = (text, share = 0) => postMessage({ kind: "progress", text, share });
let plan = null;

async function fetched(name) {
  const answer = await fetch(name);
  if (!answer.ok) throw new Error(`${name}: ${answer.status}; build the page with python -m benchmarks.planner_page`);
  return answer;
}

async function load() {
  tell("loading Python", 0.1);
  const python = await loadPyodide({ indexURL: new URL("./pyodide/", import.meta.url).href });
  tell("loading the planner", 0.6);
  const { packages } = await (await fetched("manifest.json")).json();
  const folder = python.runPython("import site; site.getsitepackages()[0]");
  const archives = await Promise.all(packages.map(async (name) => (await fetched(`packages/${name}`)).arrayBuffer()));
  for (const archive of archives) python.unpackArchive(archive, "zip", { extractDir: folder });
  tell("starting the planner", 0.8);
  plan = python.pyimport("browser_plan").Session();
}

onmessage = ({ data: values }) => {
  const began = performance.now();
  try {
    const text = JSON.stringify(values);
    const quick = plan.same_layout(text);
    if (quick) postMessage({ kind: "answer", quick: true, html: quick });
    const answer = plan.answered(text, (what, done, total) => tell(`${what}: ${done} of ${total}`, done / total));
    const [html, json] = answer.toJs();
    answer.destroy();
    postMessage({ kind: "answer", html, json, seconds: (performance.now() - began) / 1000 });
  } catch (error) {
    postMessage({ kind: "failed", text: String(error) });
  }
};

load().then(() => postMessage({ kind: "ready" }), (error) => postMessage({ kind: "failed", text: String(error) }));
