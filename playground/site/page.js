// The page: reads the form, has a worker answer, shows the answer, and keeps the question in the address.

const FIRST = { model: 'llama3-70b', gpus: '512' };
// A key is pressed every 100 to 200 ms: a question that is still being typed is not searched for.
const PAUSE_MS = 250;

const at = (id) => document.getElementById(id);
const form = at('question');
let module;
let worker;
let busy = false;
let number = 0;
let started = 0;
let addresses = [];

const status = (text) => { at('status').textContent = text; };

async function compiled() {
  const address = new URL('playground_bg.wasm', import.meta.url);
  try {
    return await WebAssembly.compileStreaming(fetch(address));
  } catch {
    // A server that does not know the type of the file.
    return WebAssembly.compile(await (await fetch(address)).arrayBuffer());
  }
}

/** A worker that answers questions; the one before, which may still be searching, is ended. */
function hire() {
  worker?.terminate();
  worker = new Worker(new URL('worker.js', import.meta.url), { type: 'module' });
  worker.onmessage = ({ data }) => hear(data);
  worker.postMessage({ module });
  busy = false;
}

function hear(message) {
  if (message.presets && !at('model').options.length) {
    offer(message.presets);
    readAddress();
    ask();
  } else if (message.progress !== undefined) {
    at('progress').hidden = false;
    at('progress').value = message.progress;
  } else if (message.answer && message.number === number) {
    busy = false;
    at('progress').hidden = true;
    show(message.answer);
  } else if (message.fault) {
    at('progress').hidden = true;
    status('');
    mistake({ what: 'The planner stopped because of a fault of its own. Please report it with the address of this page.',
      place: message.fault });
    hire();
  }
}

function offer(presets) {
  const fill = (id, list, usual) => {
    for (const { name, summary } of list) {
      const option = new Option(summary ? `${name} – ${summary}` : name, name === usual ? '' : name);
      option.selected = name === usual;
      at(id).append(option);
    }
  };
  fill('model', presets.models);
  fill('cluster', presets.clusters, 'dgx-h100');
  fill('runtime', presets.runtimes.map(({ name }) => ({ name, summary: '' })), 'megatron-core');
}

/** The fields that are filled in. */
function fields() {
  const filled = [...new FormData(form)].filter(([, value]) => value.trim());
  return Object.fromEntries(filled);
}

function readAddress() {
  const given = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  const question = Object.keys(given).length ? given : FIRST;
  for (const field of form.elements) {
    if (!field.name) continue;
    const value = question[field.name] ?? '';
    // A preset may be named by its default's name, which the list has as the empty value.
    const options = [...(field.options ?? [])];
    const named = options.find((option) => option.value === value || option.text.split(' – ')[0] === value);
    field.value = field.options ? (named ?? options.find((option) => option.value === '') ?? options[0]).value : value;
  }
  at('pasting').open = Boolean(at('config').value);
  at('describing').open = Boolean(at('line').value);
}

const columns = () => {
  const probe = document.createElement('span');
  probe.textContent = '0'.repeat(100);
  probe.style.cssText = 'position:absolute;visibility:hidden';
  at('found').hidden = false;
  at('text').append(probe);
  const style = getComputedStyle(at('text'));
  const room = at('text').clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
  const count = Math.floor(room / (probe.getBoundingClientRect().width / 100));
  probe.remove();
  return Math.min(Math.max(count, 40), 120);
};

function ask() {
  const question = fields();
  history.replaceState(null, '', `#${new URLSearchParams(question)}`);
  if (busy) hire();
  busy = true;
  number += 1;
  started = performance.now();
  const shown = at('found').hidden;
  const width = columns();
  at('found').hidden = shown;
  at('found').classList.add('stale');
  status('Searching …');
  worker.postMessage({ question, number, columns: width });
}

function show(answer) {
  const { found } = answer;
  at('found').hidden = !found;
  at('found').classList.remove('stale');
  at('mistake').hidden = true;
  if (!found) {
    status('');
    mistake(answer.mistake);
    return;
  }
  addresses.forEach((address) => URL.revokeObjectURL(address));
  addresses = [];
  const keep = (id, file, type) => {
    at(id).parentElement.hidden = !file;
    if (!file) return;
    const address = URL.createObjectURL(new Blob([file.text], { type: `${type};charset=utf-8` }));
    addresses.push(address);
    Object.assign(at(id), { href: address, download: file.name, textContent: file.name });
  };
  keep('keep-plan', found.plan, 'application/yaml');
  keep('keep-report', found.report, 'text/html');
  keep('keep-json', { name: found.report.name.replace(/\.html$/, '.json'), text: found.json }, 'application/json');
  at('text').textContent = found.text;
  at('plan-section').hidden = !found.plan;
  at('plan').textContent = found.plan?.text ?? '';
  at('report').srcdoc = found.report.text;
  performance.mark('answer');
  const seconds = ((performance.now() - started) / 1000).toFixed(1);
  status(`${found.fits ? 'Found a plan' : 'No plan fits'}: answered in ${seconds} s.`);
}

function mistake(parts) {
  const list = at('mistake');
  list.replaceChildren();
  const names = { place: 'where', expected: 'expected', nearest: 'nearest', example: 'example' };
  const row = (name, text, style) => {
    const head = document.createElement('dt');
    head.className = style;
    head.textContent = name;
    const body = document.createElement('dd');
    body.textContent = text;
    list.append(head, body);
  };
  row('This question has no answer', parts.what, 'what');
  for (const [key, name] of Object.entries(names)) if (parts[key]) row(name, parts[key], '');
  list.hidden = false;
}

let pause;
form.addEventListener('input', () => {
  clearTimeout(pause);
  pause = setTimeout(ask, PAUSE_MS);
});
form.addEventListener('submit', (event) => event.preventDefault());
addEventListener('hashchange', () => { readAddress(); ask(); });
at('link').addEventListener('click', async () => {
  await navigator.clipboard.writeText(location.href);
  status('The link is copied.');
});
// The report is as tall as its text, so that the page scrolls and not a frame within it.
at('report').addEventListener('load', () => {
  const page = at('report').contentDocument;
  const fit = () => { at('report').style.height = `${page.documentElement.offsetHeight + 4}px`; };
  new ResizeObserver(fit).observe(page.documentElement);
});

module = await compiled();
hire();
