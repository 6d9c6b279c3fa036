// The list of the sandboxes of the team, live while the page is visible.
//
// One page of the API is shown at a time, so what is drawn is bounded however many sandboxes there are, and one request has
// the use of all of them. Rows are kept from one answer to the next: the focus, a selection and the small plots stay. A text is
// looked for in further pages too, up to `SEARCHED`, and then less often.

import { encoded, get, isAborted, items, now, reason, send, withQuery } from './api.js'
import { createSandbox, kill } from './create.js'
import { spark } from './plot.js'
import { button, bytes, confirm, duration, field, fill, input, link, make, metadataElement, nameElement, note, number, poll, row, select, setText, shown, stateElement, table, timeElement, trouble } from './ui.js'

const PAGE = 100
const SEARCHED = 10_000
const EVERY_MS = 3000
const SEARCH_EVERY_MS = 30_000

/** Whether a text is in what a row shows of a sandbox. */
export function matches(sandbox, text) {
  if (!text) return true
  const metadata = Object.entries(sandbox.metadata ?? {}).map(([name, value]) => `${name}=${value}`)
  return [sandbox.sandboxID, sandbox.alias, sandbox.templateID, ...metadata].some((one) => typeof one === 'string' && one.toLowerCase().includes(text))
}

/** The parameter of the API for pairs `name=value` with commas or `&` between them. */
export function metadataFilter(text) {
  const pairs = text.split(/[,&\n]/u).map((pair) => pair.trim()).filter(Boolean)
  return pairs
    .map((pair) => {
      const at = pair.indexOf('=')
      return at < 0 ? encoded(pair) : `${encoded(pair.slice(0, at))}=${encoded(pair.slice(at + 1))}`
    })
    .join('&')
}

function href(id) {
  return `/dashboard/sandboxes/${encoded(id)}`
}

/** A row of the table, which takes new values. */
class Row {
  constructor(id, changed) {
    this.id = id
    this.box = make('input', { type: 'checkbox', 'aria-label': `Select ${shown(id, 60)}`, onchange: changed })
    this.name = link(href(id), shown(id, 60))
    this.alias = make('bdi')
    this.template = make('span')
    this.state = make('td')
    this.end = make('td', { className: 'number', 'data-name': 'Ends in' })
    this.age = make('td', { className: 'number', 'data-name': 'Started' })
    this.metadata = make('td')
    this.cpu = spark('CPU')
    this.memory = spark('Memory')
    this.cpuText = make('span', { textContent: '–' })
    this.memoryText = make('span', { textContent: '–' })
    this.element = row([this.box, 'pick'], '')
    this.element.replaceChildren(
      make('td', { className: 'pick' }, this.box),
      make('th', { scope: 'row' }, this.name, make('span', { className: 'id' }, this.alias)),
      this.state,
      make('td', { 'data-name': 'CPU' }, make('span', { className: 'use' }, this.cpu.element, this.cpuText)),
      make('td', { 'data-name': 'Memory' }, make('span', { className: 'use' }, this.memory.element, this.memoryText)),
      this.age,
      this.end,
      this.metadata,
    )
    this.seen = ''
  }

  update(sandbox) {
    const facts = JSON.stringify([sandbox.state, sandbox.alias, sandbox.templateID, sandbox.metadata])
    if (facts !== this.seen) {
      this.seen = facts
      this.sandbox = sandbox
      setText(this.alias, shown(sandbox.alias || sandbox.templateID, 80))
      fill(this.state, stateElement(sandbox.state))
      fill(this.metadata, metadataElement(sandbox.metadata))
    }
    setText(this.end, sandbox.state === 'running' ? duration(Date.parse(sandbox.endAt) - now()) : '–')
    const age = timeElement(sandbox.startedAt)
    if (this.age.textContent !== age.textContent) this.age.replaceChildren(age)
  }

  measure(sample) {
    if (!sample || this.last === sample.timestamp) return
    this.last = sample.timestamp
    const cpu = number(sample.cpuUsedPct)
    this.cpu.push(cpu / 100)
    this.memory.push(number(sample.memUsed) / Math.max(number(sample.memTotal), 1))
    setText(this.cpuText, `${Math.round(cpu)} %`)
    setText(this.memoryText, bytes(sample.memUsed))
  }
}

export async function mount(root, context) {
  const query = new URLSearchParams(location.search)
  const state = select([['', 'All'], ['running', 'Running'], ['paused', 'Paused']], query.get('state') ?? '', { name: 'state' })
  const text = input({ type: 'search', name: 'text', maxLength: 200, value: query.get('text') ?? '', placeholder: 'id, template, metadata' })
  const metadata = input({ name: 'metadata', maxLength: 2000, value: query.get('metadata') ?? '', placeholder: 'purpose=review' })
  const template = input({ name: 'template', maxLength: 200, value: query.get('template') ?? '', placeholder: 'base' })
  const all = make('input', { type: 'checkbox', 'aria-label': 'Select all shown sandboxes' })
  const status = make('p', { className: 'state-line', role: 'status' })
  const problem = make('div')
  const killButton = button('Kill selected', killSelected, { className: 'is-danger', disabled: true })
  const previous = button('Previous', () => turn(-1), { disabled: true })
  const next = button('Next', () => turn(1), { disabled: true })
  const turning = make('div', { className: 'buttons', hidden: true }, previous, next)
  const { element, body } = table('Sandboxes', [['', 'pick'], 'Sandbox', 'State', 'CPU', 'Memory', 'Started', 'Ends in', 'Metadata'])
  element.classList.add('cards')
  element.querySelector('thead th').replaceWith(make('td', { className: 'pick' }, all))
  const empty = make('div', { hidden: true })
  // Tokens of the pages before this one and of this one.
  let tokens = ['']
  let after = ''
  const rows = new Map()

  root.append(
    make('div', { className: 'head' }, make('h1', { tabIndex: -1, textContent: 'Sandboxes' }), make('div', { className: 'buttons' }, button('Create sandbox', () => createSandbox(context), { className: 'is-main' }))),
    make(
      'form',
      {
        className: 'bar',
        role: 'search',
        'aria-label': 'Filter sandboxes',
        onsubmit: (event) => {
          event.preventDefault()
          filter()
        },
      },
      make('div', { className: 'is-wide' }, field('Text', text)),
      field('State', state),
      field('Template', template),
      make('div', { className: 'is-wide' }, field('Metadata', metadata)),
      make('button', { type: 'submit', textContent: 'Filter' }),
    ),
    problem,
    make('div', { className: 'bar' }, killButton, status),
    element,
    empty,
    turning,
  )
  for (const one of root.querySelectorAll('.bar .is-wide')) one.firstChild.classList.add('is-wide'), one.replaceWith(one.firstChild)
  state.addEventListener('change', filter)
  all.addEventListener('change', () => {
    for (const one of rows.values()) one.box.checked = all.checked
    selected()
  })

  function filter() {
    tokens = ['']
    const address = withQuery('/dashboard/sandboxes', { text: text.value.trim(), state: state.value, template: template.value.trim(), metadata: metadata.value.trim() })
    history.replaceState(null, '', address)
    refresh()
  }

  function turn(by) {
    if (by > 0 && after) tokens.push(after)
    if (by < 0 && tokens.length > 1) tokens.pop()
    rows.clear()
    body.replaceChildren()
    element.scrollIntoView({ block: 'nearest' })
    refresh()
  }

  function picked() {
    return [...rows.values()].filter((one) => one.box.checked)
  }

  function selected() {
    const count = picked().length
    killButton.disabled = count === 0
    setText(killButton, count ? `Kill ${count} selected` : 'Kill selected')
    all.checked = count > 0 && count === rows.size
    all.indeterminate = count > 0 && count < rows.size
  }

  async function killSelected() {
    const chosen = picked()
    let ended = 0
    const what = chosen.length === 1 ? [nameElement(chosen[0].id, 60)] : [`${chosen.length} sandboxes`]
    await confirm('Kill the selected sandboxes?', ['Their processes end and their files are removed: ', ...what, '.'], 'Kill', async () => {
      // One after the other: the limits of the API are for everybody.
      for (const one of chosen) {
        try {
          await kill(one.id)
        } catch (error) {
          // Gone by itself meanwhile.
          if (error.status !== 404) throw error
        }
        ended += 1
        one.box.checked = false
      }
    })
    if (ended) context.say(`${ended} ended.`)
    selected()
    refresh()
  }

  async function load() {
    const wanted = text.value.trim().toLowerCase()
    const found = []
    let token = tokens.at(-1)
    let looked = 0
    let requests = 0
    for (;;) {
      const address = withQuery('api/v2/sandboxes', {
        limit: PAGE,
        nextToken: token,
        state: state.value,
        template: template.value.trim(),
        metadata: metadataFilter(metadata.value),
      })
      const { value, headers } = await send('GET', address, { signal: context.signal })
      requests += 1
      const page = items(value, PAGE).filter((one) => typeof one.sandboxID === 'string')
      looked += page.length
      found.push(...page.filter((one) => matches(one, wanted)))
      token = headers.get('x-next-token') ?? ''
      if (!token || !wanted || found.length >= PAGE || looked >= SEARCHED) break
      setText(status, `Looking … ${looked} sandboxes so far`)
    }
    return { found: found.slice(0, PAGE), token, looked, requests }
  }

  function draw({ found, token, looked }) {
    after = token
    const present = new Set(found.map((one) => one.sandboxID))
    for (const id of rows.keys()) if (!present.has(id)) rows.delete(id)
    for (const sandbox of found) {
      if (!rows.has(sandbox.sandboxID)) rows.set(sandbox.sandboxID, new Row(sandbox.sandboxID, selected))
      rows.get(sandbox.sandboxID).update(sandbox)
    }
    fill(body, ...found.map((one) => rows.get(one.sandboxID).element))
    const isFiltered = text.value.trim() || state.value || template.value.trim() || metadata.value.trim()
    element.hidden = found.length === 0
    empty.hidden = found.length > 0
    if (!found.length) {
      const words = isFiltered ? 'No sandbox matches this filter.' : tokens.length > 1 ? 'There are no further sandboxes.' : 'No sandbox is there yet. Create one here, by the API, or with an SDK.'
      if (empty.textContent !== words) empty.replaceChildren(note(words))
    }
    previous.disabled = tokens.length === 1
    next.disabled = !token
    turning.hidden = previous.disabled && next.disabled
    const page = tokens.length > 1 || token ? `, page ${tokens.length}` : ''
    const searched = text.value.trim() && looked > found.length ? ` of ${looked} looked at` : ''
    setText(status, `${found.length} shown${searched}${page}.`)
    selected()
  }

  async function measure() {
    const running = [...rows.values()].filter((one) => one.sandbox?.state === 'running').map((one) => one.id)
    if (!running.length) return
    const value = await get(withQuery('sandboxes/metrics', { sandbox_ids: running.join(',') }), { signal: context.signal })
    for (const id of running) rows.get(id)?.measure(value?.sandboxes?.[id])
  }

  const refresh = poll(context.signal, EVERY_MS, async () => {
    try {
      const loaded = await load()
      draw(loaded)
      problem.replaceChildren()
      await measure().catch((error) => {
        if (isAborted(error) || error.status === 401) throw error
      })
      return loaded.requests > 1 ? SEARCH_EVERY_MS : 0
    } catch (error) {
      if (isAborted(error)) throw error
      // What is shown stays, and says that it is old.
      if (rows.size) setText(status, `Not current: ${reason(error)}.`)
      else problem.replaceChildren(trouble(error, () => refresh()))
      throw error
    }
  })
}
