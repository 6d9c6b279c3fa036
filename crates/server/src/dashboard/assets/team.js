// The team: how many sandboxes it runs and starts, over time.

import { get, isAborted, items, now, path, reason, send, withQuery } from './api.js'
import { plot } from './plot.js'
import { bytes, duration, facts, fill, make, nameElement, number, poll, row, select, setText, moment, shown, table } from './ui.js'

const EVERY_MS = 10_000
const SAMPLES_MAX = 20_000
const LIMITS_MAX = 50
const count = (value) => String(value)
const mebibytes = (value) => bytes(value * 1024 * 1024)
// What each limit is called, and how its values are written.
const LIMITS = new Map([
  ['sandboxes', ['Sandboxes that run', count]],
  ['cpuCount', ['Cores of all sandboxes', count]],
  ['memoryMB', ['Memory of all sandboxes', mebibytes]],
  ['pausedSandboxes', ['Paused sandboxes', count]],
  ['pausedDiskMB', ['Disks of paused sandboxes', mebibytes]],
  ['templateDiskMB', ['Templates and snapshots', mebibytes]],
  ['builds', ['Builds at the same time', count]],
  ['templateCpuCount', ['Cores of one template', count]],
  ['templateMemoryMB', ['Memory of one template', mebibytes]],
  ['maxLifetimeSeconds', ['Time that a sandbox runs', (value) => duration(value * 1000)]],
  ['createsPerMinute', ['Creates per minute', count]],
  ['requestsPerSecond', ['Requests per second', count]],
])

/** A limit as a row: one that is reached says so in words. */
function limitRow(one) {
  const [title, text] = LIMITS.get(one.name) ?? [shown(one.name, 80), count]
  const isReached = typeof one.limit === 'number' && number(one.used) >= one.limit && one.limit > 0
  const used = typeof one.used === 'number' ? text(number(one.used)) : '–'
  return row(title, [isReached ? `${used}, all of it` : used, 'right'], [typeof one.limit === 'number' ? text(number(one.limit)) : 'no limit', 'right'])
}

export async function mount(root, context) {
  const { team } = context.session
  const range = select([['3600', '1 hour'], ['43200', '12 hours'], ['86400', '1 day'], ['604800', '7 days']], '3600', { 'aria-label': 'Range of the plots' })
  const about = make('div')
  const status = make('p', { className: 'state-line' })
  const running = plot('Sandboxes that run', { text: (value) => String(Math.round(value)), top: (largest) => Math.max(largest, 1) })
  const started = plot('Sandboxes started per second', { text: (value) => value.toFixed(2), top: (largest) => Math.max(largest, 0.1) })
  const limits = table('Limits', ['What', ['In use', 'right'], ['At most', 'right']])
  limits.element.hidden = true
  root.append(
    make('div', { className: 'head' }, make('h1', { tabIndex: -1, textContent: 'Team' })),
    about,
    make('div', { className: 'head section' }, make('h2', { textContent: 'Use' }), range),
    status,
    make('div', { className: 'plots' }, running.element, started.element),
    make('h2', { textContent: 'Limits' }),
    limits.element,
  )
  const api = `${path('teams', team.id)}/metrics`
  const refresh = poll(context.signal, EVERY_MS, async () => {
    try {
      const end = Math.floor(now() / 1000)
      const start = end - Number(range.value)
      const list = items(await get(withQuery(api, { start, end }), { signal: context.signal }), SAMPLES_MAX)
      const most = await get(withQuery(`${api}/max`, { start, end, metric: 'concurrent_sandboxes' }), { signal: context.signal })
      const { headers } = await send('GET', 'api/v2/sandboxes?limit=1', { signal: context.signal })
      const points = (value) => [list.map((one) => [Date.parse(one.timestamp), number(value(one))])]
      const allowed = items(await get(path('teams', team.id, 'limits'), { signal: context.signal }), LIMITS_MAX)
      limits.element.hidden = false
      limits.body.replaceChildren(...allowed.map(limitRow))
      running.draw(points((one) => one.concurrentSandboxes), [start * 1000, end * 1000])
      started.draw(points((one) => one.sandboxStartRate), [start * 1000, end * 1000])
      setText(status, list.length ? '' : 'There are no samples in this range.')
      fill(
        about,
        facts([
          ['Name', nameElement(team.name, 100)],
          ['Id', make('code', { textContent: shown(team.id, 80) })],
          ['Running now', shown(headers.get('x-total-running') ?? '–', 20)],
          ['Most at once in this range', String(number(most?.value))],
          ['Requests left', headers.get('ratelimit-remaining') ? `${shown(headers.get('ratelimit-remaining'), 20)} of ${shown(headers.get('ratelimit-limit') ?? '?', 20)}` : 'no limit is told'],
          ['Session ends', moment(context.session.expiresAt)],
        ]),
      )
    } catch (error) {
      if (!isAborted(error)) setText(status, `Not current: ${reason(error)}.`)
      throw error
    }
  })
  range.addEventListener('change', () => refresh())
}
