// A log that grows: entries of a sandbox or of a build, read again while the page is visible.
//
// The API reads from a millisecond on, and several entries may share one: those that are shown already are left out by
// comparison. At most `LINES` are on the page, the newest ones. Every line is text of the sandbox.

import { get, isAborted, items, path, reason } from './api.js'
import { clockText, make, poll, setText, shown } from './ui.js'
import { shownLines } from './text.js'

const LINES = 1000
const LINE_MAX = 4000
const EVERY_MS = 2000
const FIELDS = 6

/** The entries that come after those that were seen. `seen` has the entries of the last millisecond, and is changed. */
export function fresh(entries, seen) {
  const out = []
  for (const entry of entries) {
    const at = Date.parse(entry.timestamp)
    if (!Number.isFinite(at) || at < seen.at) continue
    const text = JSON.stringify(entry)
    if (at > seen.at) {
      seen.at = at
      seen.texts.clear()
    } else if (seen.texts.has(text)) continue
    seen.texts.add(text)
    out.push(entry)
  }
  return out
}

/** One line of a log. */
export function lineElement(entry) {
  const level = ['debug', 'info', 'warn', 'error'].includes(entry.level) ? entry.level : 'info'
  const at = Date.parse(entry.timestamp)
  const extra = Object.entries(entry.fields ?? {}).filter(([name]) => !['logger', 'event_type'].includes(name)).slice(0, FIELDS)
  const text = make('span', { className: 'text', textContent: shownLines(String(entry.message ?? ''), LINE_MAX) })
  if (entry.step) text.prepend(make('span', { className: 'more', textContent: `[${shown(entry.step, 80)}] ` }))
  if (extra.length) text.append(make('span', { className: 'more', textContent: `  ${extra.map(([name, value]) => `${shown(name, 60)}=${shown(value, 200)}`).join(' ')}` }))
  return make('p', { className: `is-${level}` }, make('time', { textContent: clockText(at), title: shown(entry.timestamp, 40) }), make('span', { className: 'level', textContent: level }), text)
}

/**
 * Shows a log in `root`. `read(cursor)` has the entries from a millisecond on, or the newest when `cursor` is `null`, both
 * oldest first, `most` of them in one answer; `isOver` says that nothing more comes; `drawn(entry, line)` may add to a new line.
 * The result starts again, as for another filter.
 */
export function follow(root, context, { label, read, most = LINES, keep = () => true, isOver = () => false, none = 'Nothing was logged yet.', drawn = () => {} }) {
  const box = make('div', { className: 'log', role: 'log', 'aria-label': label, tabIndex: 0, 'aria-live': 'off' })
  const status = make('p', { className: 'state-line', textContent: 'Reading …' })
  root.append(status, box)
  let seen = { at: -Infinity, texts: new Set() }
  let dropped = false
  let generation = 0
  async function once() {
    const mine = generation
    try {
      const cursor = Number.isFinite(seen.at) ? seen.at : null
      const got = items(await read(cursor))
      if (mine !== generation) return 0
      const isOverNow = isOver()
      const entries = fresh(got, seen)
      // A millisecond with more entries than one answer has.
      if (cursor !== null && got.length >= most && !entries.length) seen.at += 1
      const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40
      for (const entry of entries.filter(keep)) {
        const line = lineElement(entry)
        box.append(line)
        drawn(entry, line)
      }
      while (box.childElementCount > LINES) {
        box.firstChild.remove()
        dropped = true
      }
      if (atEnd) box.scrollTop = box.scrollHeight
      box.hidden = box.childElementCount === 0
      setText(status, box.hidden ? none : `${box.childElementCount} lines${dropped ? ', the newest' : ''}${isOverNow ? '' : ', live'}.`)
      // There is more already.
      if (entries.length >= most - 1 && cursor !== null) setTimeout(() => run(), 100)
      return isOverNow && !entries.length ? 60_000 : 0
    } catch (error) {
      if (!isAborted(error)) setText(status, `Not current: ${reason(error)}.`)
      throw error
    }
  }
  const run = poll(context.signal, EVERY_MS, once)
  return () => {
    generation += 1
    seen = { at: -Infinity, texts: new Set() }
    dropped = false
    box.replaceChildren()
    setText(status, 'Reading …')
    run()
  }
}

/** Entries of the log, oldest first. */
export async function logPage(context, cursor, filter = {}) {
  const query = new URLSearchParams({ limit: '1000', direction: cursor === null ? 'backward' : 'forward' })
  if (cursor !== null) query.set('cursor', String(cursor))
  for (const [name, value] of Object.entries(filter)) if (value) query.set(name, value)
  const value = await get(`v2/${path('sandboxes', context.id)}/logs?${query}`, { signal: context.signal })
  const entries = Array.isArray(value?.logs) ? value.logs : []
  return cursor === null ? entries.reverse() : entries
}
