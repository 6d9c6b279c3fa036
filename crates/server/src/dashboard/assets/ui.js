// Parts that all pages are made of: buttons, fields, tables, dialogs, times, and reads that are repeated.
//
// Strings from elsewhere come in as text and leave as text (`make`, `shown` of `text.js`). A dialog is the browser's own, so
// that the focus stays inside and goes back to what opened it. What happened is said once in the live region (`say`).

import { isAborted, now, reason } from './api.js'
import { make, nameElement, shown } from './text.js'

export { make, nameElement, shown }

const PAUSE_MAX_MS = 60_000

let live = null

/** The element that screen readers read whenever its text changes, and that everybody sees for a while. */
export function liveRegion() {
  live = make('div', { className: 'live', role: 'status', 'aria-live': 'polite' })
  return live
}

let hiding = 0

/** Says what happened. */
export function say(text) {
  if (!live) return
  live.textContent = ''
  // A text that is the same as before is said again.
  setTimeout(() => {
    live.textContent = text
    live.classList.toggle('is-shown', text !== '')
  }, 30)
  clearTimeout(hiding)
  hiding = setTimeout(() => live.classList.remove('is-shown'), 8000)
}

export function button(text, onclick, properties = {}) {
  return make('button', { type: 'button', textContent: text, onclick, ...properties })
}

/** A link to another page of the dashboard; `main.js` follows it without loading. */
export function link(href, content, properties = {}) {
  return make('a', { href, ...properties }, content)
}

let numbers = 0

/** A label with its control below it, and a hint. */
export function field(label, control, hint = '') {
  numbers += 1
  control.id ||= `field-${numbers}`
  const parts = [make('label', { htmlFor: control.id, textContent: label }), control]
  if (hint) {
    parts.push(make('p', { className: 'hint', id: `${control.id}-hint`, textContent: hint }))
    control.setAttribute('aria-describedby', `${control.id}-hint`)
  }
  return make('div', { className: 'field' }, ...parts)
}

export function input(properties = {}) {
  return make('input', { type: 'text', autocomplete: 'off', spellcheck: false, ...properties })
}

export function select(options, value, properties = {}) {
  const control = make('select', properties, ...options.map(([key, text]) => make('option', { value: key, textContent: text })))
  control.value = value
  return control
}

export function check(label, isChecked = false, properties = {}) {
  const control = make('input', { type: 'checkbox', checked: isChecked, ...properties })
  return { control, element: make('label', { className: 'check' }, control, ` ${label}`) }
}

/** A table in a box that scrolls sideways. `columns` are names, or `[name, class]`. */
export function table(caption, columns, rows = []) {
  const head = columns.map((column) => {
    const [name, kind] = Array.isArray(column) ? column : [column, '']
    return make('th', { scope: 'col', className: kind }, name || make('span', { className: 'unseen', textContent: 'Actions' }))
  })
  const body = make('tbody', {}, ...rows)
  const element = make(
    'div',
    { className: 'table', role: 'region', 'aria-label': caption, tabIndex: 0 },
    make('table', {}, make('caption', { className: 'unseen', textContent: caption }), make('thead', {}, make('tr', {}, ...head)), body),
  )
  return { element, body }
}

/** A row; the first cell is its header. Cells are text or elements, or `[content, class]`. */
export function row(...cells) {
  return make(
    'tr',
    {},
    ...cells.map((cell, at) => {
      const [content, kind] = Array.isArray(cell) ? cell : [cell, '']
      return make(at ? 'td' : 'th', at ? { className: kind } : { scope: 'row', className: kind }, content ?? '')
    }),
  )
}

/** Names with their values. */
export function facts(pairs) {
  return make('dl', { className: 'facts' }, ...pairs.map(([name, value]) => make('div', {}, make('dt', { textContent: name }), make('dd', {}, value ?? '–'))))
}

export function note(text, kind = '') {
  return make('p', { className: `notice ${kind}`, textContent: text })
}

/** A message about an error in the place of what could not be shown. */
export function trouble(error, again) {
  const box = make('div', { className: 'notice is-bad', role: 'alert' }, make('p', { textContent: `This cannot be shown: ${reason(error)}.` }))
  if (again) box.append(button('Try again', again))
  return box
}

/** Puts `children` in the place of all children, unless they are the same elements. */
export function fill(element, ...children) {
  const isSame = children.length === element.childNodes.length && children.every((child, at) => child === element.childNodes[at])
  if (!isSame) element.replaceChildren(...children)
}

/** Changes a text only when it differs, so that a selection and screen readers are left alone. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text
}

// Dialogs.

/**
 * A dialog with a form. `act` gets a function that tells progress and does what the button says; when it fails, the error is
 * shown and the dialog stays. The promise has what `act` returned, or `undefined` when the dialog was left.
 */
export function dialog({ title, content = [], action = 'OK', isDangerous = false, act = () => true, cancel = 'Cancel', isWide = false }) {
  return new Promise((done) => {
    let result
    let isBusy = false
    numbers += 1
    const heading = make('h2', { id: `dialog-${numbers}`, tabIndex: -1 }, ...[title].flat())
    const error = make('p', { className: 'error', role: 'alert' })
    const confirm = action && make('button', { type: 'submit', className: isDangerous ? 'is-danger' : 'is-main', textContent: action })
    const leave = button(cancel, () => element.close())
    const form = make('form', { noValidate: false }, heading, ...content, error, make('div', { className: 'buttons' }, ...(confirm ? [confirm] : []), leave))
    const element = make('dialog', { className: isWide ? 'is-wide' : '', 'aria-labelledby': heading.id }, form)
    form.addEventListener('submit', async (event) => {
      event.preventDefault()
      if (isBusy) return
      isBusy = true
      confirm.disabled = true
      error.textContent = ''
      try {
        result = await act((text) => {
          error.textContent = text
        })
        element.close()
      } catch (problem) {
        if (problem instanceof Invalid) error.textContent = problem.message
        else if (!isAborted(problem)) error.textContent = `Not done: ${reason(problem)}.`
        if (problem instanceof TypeError) console.error(problem)
      } finally {
        isBusy = false
        confirm.disabled = false
      }
    })
    const opener = document.activeElement
    element.addEventListener('close', () => {
      element.remove()
      if (!document.contains(document.activeElement) || document.activeElement === document.body) {
        const back = document.contains(opener) && !opener.disabled && opener !== document.body ? opener : document.querySelector('main h1')
        back?.focus()
      }
      done(result)
    })
    document.body.append(element)
    element.showModal()
    // The first thing to fill in, or the way out of what cannot be undone.
    const first = isDangerous ? leave : form.querySelector('input:not([type=hidden]), select, textarea') ?? confirm ?? leave
    first.focus()
  })
}

/** What a form of a dialog refuses by itself. */
export class Invalid extends Error {}

/** Asks before something that cannot be undone. Whether it was done. */
export async function confirm(title, text, action, act) {
  const isDone = await dialog({
    title,
    content: [make('p', {}, ...[text].flat())],
    action,
    isDangerous: true,
    act: async () => {
      await act()
      return true
    },
  })
  return isDone === true
}

/** Lines `name=value` of a text as an object. */
export function pairsOf(text, what) {
  const pairs = {}
  for (const line of text.split('\n')) {
    if (!line.trim()) continue
    const at = line.indexOf('=')
    if (at < 1) throw new Invalid(`${what}: a line must be name=value.`)
    Object.defineProperty(pairs, line.slice(0, at).trim(), { value: line.slice(at + 1).trim(), enumerable: true, configurable: true })
  }
  return pairs
}

/** Words of a text between white space and commas. */
export function wordsOf(text) {
  return text.split(/[\s,]+/u).filter(Boolean)
}

// Times and numbers.

/** A length of time, such as `3 h 20 min`. */
export function duration(ms) {
  const seconds = Math.max(0, Math.round(ms / 1000))
  if (seconds < 60) return `${seconds} s`
  const minutes = Math.floor(seconds / 60)
  if (minutes < 60) return minutes < 10 ? `${minutes} min ${seconds % 60} s` : `${minutes} min`
  const hours = Math.floor(minutes / 60)
  if (hours < 48) return `${hours} h ${minutes % 60} min`
  return `${Math.floor(hours / 24)} d ${hours % 24} h`
}

export function ago(text) {
  const at = Date.parse(text)
  return Number.isFinite(at) ? `${duration(now() - at)} ago` : '–'
}

const TIME = new Intl.DateTimeFormat(undefined, { dateStyle: 'medium', timeStyle: 'medium' })
const CLOCK = new Intl.DateTimeFormat(undefined, { hour: '2-digit', minute: '2-digit', second: '2-digit', hourCycle: 'h23' })

/** A moment as text; what is no time is shown as it is. */
export function moment(text) {
  const at = Date.parse(text)
  return Number.isFinite(at) ? TIME.format(at) : shown(text, 40)
}

export function clockText(ms) {
  return Number.isFinite(ms) ? CLOCK.format(ms) : '–'
}

/** An element with a moment, and how long ago that is. */
export function timeElement(text) {
  const at = Date.parse(text)
  if (!Number.isFinite(at)) return make('span', { textContent: '–' })
  return make('time', { dateTime: new Date(at).toISOString(), title: moment(text), textContent: ago(text) })
}

export function number(value) {
  return typeof value === 'number' && Number.isFinite(value) ? value : 0
}

export function bytes(value) {
  const size = number(value)
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB']
  const unit = size < 1024 ? 0 : Math.min(Math.floor(Math.log2(size) / 10), units.length - 1)
  const scaled = size / 1024 ** unit
  return `${unit && scaled < 100 ? scaled.toFixed(1) : Math.round(scaled)} ${units[unit]}`
}

/** Metadata as small labels; `most` bounds how many are drawn. */
export function metadataElement(metadata, most = 4) {
  const pairs = metadata && typeof metadata === 'object' ? Object.entries(metadata) : []
  const list = make('span', { className: 'pairs' })
  for (const [name, value] of pairs.slice(0, most)) {
    list.append(make('span', { className: 'pair' }, nameElement(name, 60), '=', nameElement(value, 80)))
  }
  if (pairs.length > most) list.append(make('span', { className: 'soft', textContent: `${pairs.length - most} more` }))
  return list
}

/** A state as a label with a colour and its name. */
export function stateElement(state) {
  const known = ['running', 'paused', 'ready', 'building', 'waiting', 'error', 'ended', 'delivered', 'failed'].includes(state) ? state : 'other'
  return make('span', { className: `state is-${known}`, textContent: shown(state, 20) })
}

/**
 * Runs `read` now and again, `everyMs` after it ended, while the page is visible; pauses grow while it fails. `read` may
 * return a longer pause. The result is a function that runs it at once.
 */
export function poll(signal, everyMs, read) {
  let timer = 0
  let isRunning = false
  let isWanted = false
  let failures = 0
  const again = (ms) => {
    clearTimeout(timer)
    if (!signal.aborted) timer = setTimeout(run, ms)
  }
  async function run() {
    if (signal.aborted) return
    if (isRunning) {
      isWanted = true
      return
    }
    clearTimeout(timer)
    if (document.hidden) return
    isRunning = true
    let pause = everyMs
    try {
      const longer = await read()
      failures = 0
      if (typeof longer === 'number') pause = Math.max(pause, longer)
    } catch (error) {
      if (signal.aborted) return
      if (!isAborted(error)) {
        failures += 1
        pause = Math.max(Math.min(everyMs * 2 ** failures, PAUSE_MAX_MS), (error.retryAfter ?? 0) * 1000)
        if (error instanceof TypeError || error instanceof ReferenceError) console.error(error)
      }
    } finally {
      isRunning = false
    }
    if (isWanted) {
      isWanted = false
      run()
    } else again(pause)
  }
  document.addEventListener('visibilitychange', () => !document.hidden && run(), { signal })
  signal.addEventListener('abort', () => clearTimeout(timer))
  run()
  return run
}
