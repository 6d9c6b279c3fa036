// The operator's page: the host, what was refused and why, the nodes, and the sandboxes of all teams.
//
// What is shown of a sandbox are figures and its log; its files and its terminal are its team's. Figures of the host are those
// of the metrics, whose text is read here. The list is bounded by `SHOWN`: the largest come first.

import { bounded } from './agent.js'
import { BASE, encoded, Failure, isAborted, items, MARK, reason, send, withQuery } from './api.js'
import { button, bytes, confirm, dialog, facts, field, fill, input, make, nameElement, note, number, poll, row, select, setText, shown, stateElement, table, timeElement, trouble } from './ui.js'

const EVERY_MS = 3000
// Rows on the page, of whatever the answer brings.
const SHOWN = 200
const LISTED = 20_000
const NODES = 500
const LOG_LINES = 500
const METRICS_MAX = 4 * 1024 * 1024

/** Samples of a text in the format of Prometheus: the value by name and labels, as they are written. */
export function samplesOf(text) {
  const samples = new Map()
  for (const line of text.split('\n')) {
    const found = /^([a-z_]+(?:\{[^}]*\})?) (\S+)/u.exec(line)
    if (found) samples.set(found[1], found[2] === 'inf' ? Infinity : Number(found[2]))
  }
  return samples
}

/** The values of one label of a series, with their samples. */
export function byLabel(samples, name, label) {
  const values = []
  for (const [key, value] of samples) {
    const found = key.startsWith(`${name}{`) && new RegExp(`[{,]${label}="([^"]*)"`, 'u').exec(key)
    if (found) values.push([found[1], value])
  }
  return values
}

/** Those that match a text and a state, the largest of the order first. */
export function chosen(sandboxes, { text, state, order }) {
  const sizes = {
    cpu: (one) => number(one.usage?.cpu_percent) * number(one.cpu_count),
    memory: (one) => number(one.usage?.memory_used_bytes),
    disk: (one) => number(one.usage?.disk_used_bytes ?? one.kept_bytes),
    age: (one) => -Date.parse(one.started_at) || 0,
  }
  const size = sizes[order] ?? sizes.cpu
  return sandboxes
    .filter((one) => !state || one.state === state)
    .filter((one) => !text || [one.id, one.team, one.template].some((part) => typeof part === 'string' && part.toLowerCase().includes(text)))
    .sort((one, other) => size(other) - size(one))
}

/** What is left on a node that drains: its host can be restarted when the first number is 0. */
function leftText({ sandboxes, left }) {
  const inMemory = number(left.running) + number(left.paused_in_memory)
  const onDisk = number(left.paused_on_disk)
  return `${Math.max(number(sandboxes), inMemory)} left${onDisk > 0 ? `, ${onDisk} paused on disk` : ''}`
}

/** The state of a node, which may be away while it drains. */
export function nodeState(one) {
  if (!one.draining_at) return one.state
  return one.state === 'connected' ? 'draining' : `draining, ${one.state}`
}

/** What is said of a node in each column; its name and its state are elements of their own. */
export function nodeTexts(one) {
  const known = (value, text) => (typeof value === 'number' && Number.isFinite(value) ? text(value) : '–')
  const of = (whole, text) => (number(whole) > 0 ? ` of ${text(whole)}` : '')
  return {
    version: one.version ? shown(one.version, 40) : '–',
    sandboxes: one.draining_at && one.left ? leftText(one) : known(one.sandboxes, (count) => `${count}${of(one.max_sandboxes, String)}`),
    memory: known(one.memory_available_bytes, (free) => `${bytes(free)} free${of(one.memory_bytes, bytes)}`),
    disk: known(one.disk_available_bytes, (free) => `${bytes(free)} free`),
    cores: known(one.cores, String),
    pressure: known(one.pressure, (share) => `${share} %`),
  }
}

async function metrics(signal) {
  const response = await fetch(`${BASE}/operator-api/metrics`, { headers: MARK, signal, cache: 'no-store' })
  const read = await bounded(response, METRICS_MAX)
  if (!response.ok) throw new Failure(response.status, 'the figures of the host cannot be read')
  return samplesOf(new TextDecoder().decode(read.bytes))
}

function counts(pairs) {
  const known = pairs.filter(([, value]) => value > 0)
  if (!known.length) return 'none'
  return known.map(([name, value]) => `${value} ${shown(name.replaceAll('_', ' '), 40)}`).join(', ')
}

function hostFacts(samples) {
  const of = (name) => samples.get(`ringfence_${name}`)
  const floor = (name) => (of(name) > 0 ? ` (${bytes(of(name))} are kept free)` : '')
  const both = (what) => number(of(`egress_${what}`)) + number(of(`ingress_${what}`))
  const most = of('capacity_max_sandboxes')
  return facts([
    ['Sandboxes', `${counts(byLabel(samples, 'ringfence_sandboxes', 'state'))}${Number.isFinite(most) ? `, ${most} at most` : ''}`],
    ['Kept ready', counts(byLabel(samples, 'ringfence_pool_sandboxes', 'state'))],
    ['Memory available', `${bytes(of('host_memory_available_bytes'))}${floor('capacity_memory_floor_bytes')}`],
    ['Disk available', `${bytes(of('host_disk_available_bytes'))}${floor('capacity_disk_floor_bytes')}`],
    ['Paused on disk', bytes(of('paused_disk_bytes'))],
    ['Creates', counts(byLabel(samples, 'ringfence_creates_total', 'outcome'))],
    ['Ends', counts(byLabel(samples, 'ringfence_sandbox_ends_total', 'reason'))],
    ['Throttled', `${number(of('sandboxes_throttled'))} now, ${number(of('sandbox_throttles_total'))} since the start`],
    ['Stopped by the disk', `${number(of('sandboxes_disk_stopped'))} now, ${number(of('sandbox_disk_stops_total'))} since the start`],
    ['Requests limited', `${number(of('api_requests_limited_total'))}`],
    ['Network', `${bytes(both('received_bytes_total'))} received, ${bytes(both('sent_bytes_total'))} sent by all sandboxes since the start`],
    ['Connections', `${number(of('client_connections'))} of clients, ${number(of('proxy_connections'))} to sandboxes`],
    ['Errors of the database', `${number(of('store_errors_total'))}`],
  ])
}

async function showLog(id, signal) {
  const { value } = await send('GET', withQuery(`operator-api/sandboxes/${encoded(id)}/logs`, { limit: LOG_LINES }), { signal })
  const lines = items(value, LOG_LINES).map((entry) => {
    const extra = entry.fields && typeof entry.fields === 'object' ? Object.entries(entry.fields) : []
    const told = extra.map(([name, text]) => ` ${shown(name, 60)}=${shown(text, 300)}`).join('')
    return `${shown(entry.at, 40)} ${shown(entry.level, 10)} ${shown(entry.message, 1000)}${told}`
  })
  await dialog({
    title: ['Log of ', nameElement(id, 60)],
    content: [lines.length ? make('pre', { className: 'log', tabIndex: 0, role: 'log', 'aria-label': `Log of ${shown(id, 60)}`, textContent: lines.join('\n') }) : note('The log has no entries.')],
    action: null,
    cancel: 'Close',
    isWide: true,
  })
}

export async function mount(root, context) {
  const { signal } = context
  const order = select([['cpu', 'CPU'], ['memory', 'Memory'], ['disk', 'Disk'], ['age', 'Age']], 'cpu', { name: 'order' })
  const state = select(
    [['', 'All'], ...['running', 'paused', 'building', 'pooled', 'stopping'].map((one) => [one, one])],
    '',
    { name: 'state' },
  )
  const text = input({ type: 'search', name: 'text', maxLength: 200, placeholder: 'id, team, template' })
  const host = make('div')
  const problem = make('div')
  const status = make('p', { className: 'state-line' })
  const { element, body } = table('Sandboxes of all teams', ['Sandbox', 'Team', 'Template', 'State', ['CPU', 'number'], ['Memory', 'number'], ['Disk', 'number'], ['Started', 'number'], 'Actions'])
  let all = []
  const nodes = table('Nodes', ['Node', 'State', 'Version', ['Sandboxes', 'number'], ['Memory', 'number'], ['Disk', 'number'], ['Cores', 'number'], ['Pressure', 'number'], 'Last seen'])

  root.append(
    make('div', { className: 'head' }, make('h1', { tabIndex: -1, textContent: 'Host' })),
    host,
    make('h2', { textContent: 'Nodes' }),
    nodes.element,
    make('h2', { textContent: 'Sandboxes of all teams' }),
    make(
      'form',
      { className: 'bar', role: 'search', 'aria-label': 'Filter sandboxes', onsubmit: (event) => event.preventDefault() },
      field('Text', text),
      field('State', state),
      field('Largest first by', order),
    ),
    problem,
    status,
    element,
  )

  async function act(id, what) {
    try {
      await what()
    } catch (error) {
      if (!isAborted(error)) context.say(`${shown(id, 60)}: ${reason(error)}.`)
    }
  }

  async function kill(id) {
    const isKilled = await confirm(['End ', nameElement(id, 60), '?'], 'Everything in the sandbox is lost. Its team sees that the operator ended it.', 'End sandbox', () =>
      send('DELETE', `operator-api/sandboxes/${encoded(id)}`, { signal }),
    )
    if (isKilled) {
      context.say(`${shown(id, 60)} has ended.`)
      refresh()
    }
  }

  const nodeRows = new Map()
  function nodeRow(one) {
    const id = String(one.id)
    if (!nodeRows.has(id)) {
      const cells = {}
      for (const name of ['name', 'state', 'version', 'sandboxes', 'memory', 'disk', 'cores', 'pressure', 'seen']) cells[name] = make('span')
      const { name, state, version, sandboxes, memory, disk, cores, pressure, seen } = cells
      const about = make('div', { className: 'soft', textContent: shown(id, 80) })
      cells.row = row(make('span', {}, name, about), state, version, ...[sandboxes, memory, disk, cores, pressure].map((cell) => [cell, 'number']), seen)
      nodeRows.set(id, cells)
    }
    const cells = nodeRows.get(id)
    const drawn = { name: nameElement(one.name, 60), state: stateElement(nodeState(one)), seen: ['connected', 'taking over'].includes(one.state) ? 'now' : timeElement(one.seen_at) }
    for (const [name, element] of Object.entries(drawn)) if (cells[name].textContent !== (element.textContent ?? element)) cells[name].replaceChildren(element)
    for (const [name, text] of Object.entries(nodeTexts(one))) setText(cells[name], text)
    return cells.row
  }

  function drawNodes(list) {
    fill(nodes.body, ...list.map(nodeRow))
    const kept = new Set(list.map((one) => String(one.id)))
    for (const id of nodeRows.keys()) if (!kept.has(id)) nodeRows.delete(id)
  }

  const rows = new Map()
  function rowOf(one) {
    const id = String(one.id)
    if (!rows.has(id)) {
      const cells = { state: make('span'), cpu: make('span'), memory: make('span'), disk: make('span'), age: make('span') }
      cells.row = row(
        shown(id, 60),
        nameElement(one.team || '–', 60),
        nameElement(one.template, 60),
        cells.state,
        [cells.cpu, 'number'],
        [cells.memory, 'number'],
        [cells.disk, 'number'],
        [cells.age, 'number'],
        make(
          'span',
          { className: 'buttons' },
          button('Log', () => act(id, () => showLog(id, signal)), { 'aria-label': `Log of ${shown(id, 60)}` }),
          button('End', () => act(id, () => kill(id)), { className: 'is-danger', 'aria-label': `End ${shown(id, 60)}` }),
        ),
      )
      rows.set(id, cells)
    }
    const cells = rows.get(id)
    const told = one.is_node_away ? `${one.state} (node away)` : one.state
    if (cells.shownState !== told) {
      cells.shownState = told
      fill(cells.state, stateElement(told))
    }
    setText(cells.cpu, one.usage ? `${number(one.usage.cpu_percent).toFixed(0)} % of ${number(one.cpu_count)}` : '–')
    setText(cells.memory, one.usage ? `${bytes(one.usage.memory_used_bytes)} of ${number(one.memory_mb)} MiB` : '–')
    setText(cells.disk, one.usage ? bytes(one.usage.disk_used_bytes) : one.kept_bytes ? bytes(one.kept_bytes) : '–')
    const age = timeElement(one.started_at)
    if (cells.age.textContent !== age.textContent) cells.age.replaceChildren(age)
    return cells.row
  }

  function draw() {
    const found = chosen(all, { text: text.value.trim().toLowerCase(), state: state.value, order: order.value })
    const drawn = found.slice(0, SHOWN)
    fill(body, ...drawn.map(rowOf))
    const kept = new Set(drawn.map((one) => String(one.id)))
    for (const id of rows.keys()) if (!kept.has(id)) rows.delete(id)
    const more = found.length > drawn.length ? `; the first ${drawn.length} are shown` : ''
    setText(status, `${found.length} of ${all.length} sandboxes${more}`)
    element.hidden = !drawn.length
  }
  for (const control of [order, state]) control.addEventListener('change', draw)
  text.addEventListener('input', draw)

  const refresh = poll(signal, EVERY_MS, async () => {
    try {
      const [list, known, samples] = await Promise.all([send('GET', 'operator-api/sandboxes', { signal }), send('GET', 'operator-api/nodes', { signal }), metrics(signal)])
      all = items(list.value, LISTED)
      drawNodes(items(known.value, NODES))
      fill(host, hostFacts(samples))
      fill(problem)
      draw()
    } catch (error) {
      if (!isAborted(error)) fill(problem, trouble(error, () => refresh()))
      throw error
    }
  })
}
