// Data from the server: JSON by `get`, columns of numbers by `load`, live events by `listen`.

export async function get(path, parameters = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    for (const each of [value].flat()) if (each !== undefined && each !== null && each !== "") query.append(name, each);
  }
  return checked(await fetch(`api/${path}?${query}`));
}

// Post JSON.
export const send = async (path, parameters, content) => checked(await fetch(link(path, parameters), { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(content) }));

async function checked(answer) {
  if (!answer.ok) {
    const text = await answer.text();
    let message = text;
    try { message = JSON.parse(text).error; } catch { /* not JSON: the text says it */ }
    throw new Error(message || `${answer.status}`);
  }
  return answer.json();
}

export const link = (path, parameters) => {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) for (const each of [value].flat()) if (each !== undefined && each !== "") query.append(name, each);
  return `api/${path}?${query}`;
};

// run -> name -> {generation, steps: Float64Array, values: Float64Array}. NaN: absent. Infinity: not finite.
const cache = new Map();
const waiting = new Map(); // run -> {names, promise}

export const cached = (run, name) => cache.get(run)?.get(name);
export const forget = (run) => cache.delete(run);

// Names requested within a moment share one request.
export function load(run, names) {
  let batch = waiting.get(run);
  if (!batch) {
    batch = { names: new Set() };
    batch.promise = new Promise((resolve, reject) => setTimeout(() => {
      waiting.delete(run);
      fetchColumns(run, [...batch.names]).then(resolve, reject);
    }, 15));
    waiting.set(run, batch);
  }
  for (const name of names) batch.names.add(name);
  return batch.promise;
}

async function fetchColumns(run, names) {
  if (!cache.has(run)) cache.set(run, new Map());
  const columns = cache.get(run);
  const byLength = new Map();
  for (const name of names) {
    const have = columns.get(name);
    const key = have ? `${have.generation}/${have.steps.length}` : "";
    if (!byLength.has(key)) byLength.set(key, []);
    byLength.get(key).push(name);
  }
  await Promise.all([...byLength].map(async ([key, group]) => {
    const [generation, after] = key ? key.split("/") : ["", "0"];
    const answer = await fetch(link("series", { run, name: group, generation, after }));
    if (!answer.ok) throw new Error(`the numbers of ${run} cannot be read: ${await answer.text()}`);
    const start = Number(answer.headers.get("x-start"));
    const count = Number(answer.headers.get("x-columns"));
    const all = new Float64Array(await answer.arrayBuffer());
    const rows = all.length / count;
    group.forEach((name, index) => {
      const have = start ? columns.get(name) : undefined;
      columns.set(name, {
        generation: answer.headers.get("x-generation"),
        steps: joined(have?.steps, all.subarray(0, rows)),
        values: joined(have?.values, all.subarray((index + 1) * rows, (index + 2) * rows)),
      });
    });
  }));
}

function joined(old, more) {
  if (!old) return more;
  if (!more.length) return old;
  const whole = new Float64Array(old.length + more.length);
  whole.set(old);
  whole.set(more, old.length);
  return whole;
}

export function listen({ runs, changed, state }) {
  const source = new EventSource("api/events");
  source.addEventListener("runs", (event) => runs(JSON.parse(event.data)));
  source.addEventListener("changed", (event) => changed(JSON.parse(event.data)));
  source.onopen = () => state(true);
  source.onerror = () => state(false);
}
