// The terminal of a sandbox: a shell on a PTY of the agent, drawn by rows.
//
// Output is hostile (see `vt.js`) and so is the clipboard: what is pasted cannot end the program's paste mode, and several
// lines for a program that would run them at once are shown first. Nothing is connected again by itself: a shell that is
// gone, or a stream that has no end, is said, and the next attempt is a button. A terminal that is left ends its shell, which
// would otherwise run, and be counted, where nobody sees it.
//
// Drawing takes place once per frame and touches rows that changed. The rows on the page are those in view, whatever is in
// the history; native scrolling moves a spacer below them.

import { AgentError, call, fromBase64, stream, toBase64 } from './agent.js'
import { make, shown } from './text.js'
import { BOLD, DEFAULT, FAINT, HIDDEN, INVERSE, ITALIC, Screen, STRIKE, TRUE_COLOUR, UNDERLINE } from './vt.js'

// Bytes of one SendInput, and of all that wait to be sent.
const INPUT_CHUNK = 16 * 1024
const INPUT_MAX = 1024 * 1024
// Replies of the terminal wait only while little does, so that a program cannot fill the queue.
const REPLY_QUEUE_MAX = 4096
// Output between two moments at which the page may draw and take keys.
const BURST = 128 * 1024
const ANNOUNCE_MS = 1000
const ANNOUNCED_LINES = 20
const ANNOUNCED_LENGTH = 2000
const PREVIEW_LINES = 12

// Keys and pasted text, without a page.

const CURSOR_KEYS = new Map([['ArrowUp', 'A'], ['ArrowDown', 'B'], ['ArrowRight', 'C'], ['ArrowLeft', 'D'], ['End', 'F'], ['Home', 'H']])
const TILDE_KEYS = new Map([
  ['Insert', 2], ['Delete', 3], ['PageUp', 5], ['PageDown', 6], ['F5', 15], ['F6', 17], ['F7', 18], ['F8', 19], ['F9', 20],
  ['F10', 21], ['F11', 23], ['F12', 24],
])
const FIRST_KEYS = new Map([['F1', 'P'], ['F2', 'Q'], ['F3', 'R'], ['F4', 'S']])
const CONTROLS = new Map([
  [' ', 0], ['@', 0], ['2', 0], ['[', 27], ['3', 27], ['\\', 28], ['4', 28], [']', 29], ['5', 29], ['^', 30], ['6', 30], ['_', 31],
  ['/', 31], ['7', 31], ['?', 127], ['8', 127],
])

/**
 * What a key sends to the program, or `null` for a key whose text comes by the input of the page, or that belongs to the
 * browser. `modes` has `applicationCursor`.
 */
export function encodeKey({ key, ctrlKey, altKey, shiftKey, metaKey, isAltGraph }, modes) {
  if (metaKey) return null
  const modifiers = 1 + (shiftKey ? 1 : 0) + (altKey ? 2 : 0) + (ctrlKey ? 4 : 0)
  const escape = altKey ? '\x1b' : ''
  if (CURSOR_KEYS.has(key)) {
    const final = CURSOR_KEYS.get(key)
    if (modifiers > 1) return `\x1b[1;${modifiers}${final}`
    return `\x1b${modes.applicationCursor ? 'O' : '['}${final}`
  }
  if (FIRST_KEYS.has(key)) return modifiers > 1 ? `\x1b[1;${modifiers}${FIRST_KEYS.get(key)}` : `\x1bO${FIRST_KEYS.get(key)}`
  if (TILDE_KEYS.has(key)) return modifiers > 1 ? `\x1b[${TILDE_KEYS.get(key)};${modifiers}~` : `\x1b[${TILDE_KEYS.get(key)}~`
  if (key === 'Backspace') return `${escape}${ctrlKey ? '\x08' : '\x7f'}`
  if (key === 'Enter') return `${escape}\r`
  if (key === 'Tab') return shiftKey ? '\x1b[Z' : `${escape}\t`
  if (key === 'Escape') return `${escape}\x1b`
  // With AltGr, and with Alt where it composes, the key is a character of the layout.
  if ([...key].length !== 1 || isAltGraph || key > '\x7e') return null
  if (ctrlKey) {
    const lower = key.toLowerCase()
    if (lower >= 'a' && lower <= 'z') return escape + String.fromCharCode(lower.charCodeAt(0) - 96)
    return CONTROLS.has(key) ? escape + String.fromCharCode(CONTROLS.get(key)) : null
  }
  return altKey ? escape + key : null
}

/** Text as it is typed: lines end with a carriage return, and there is no control character but the tab. */
export function typed(text) {
  // The C1 set as well: some programs take U+009B for the beginning of a sequence.
  return text.replace(/\r\n?|\n/gu, '\r').replace(/[\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]/gu, '')
}

/**
 * Pasted text as it is sent, and whether to ask first. With bracketed paste the program knows what was pasted, and nothing
 * in the text can end that. Without it a line end runs a command.
 */
export function preparePaste(text, isBracketed) {
  // The whole sequence goes, so that no rest of it is pasted. What remains has no escape character in any case.
  const content = typed(text.replace(/(?:\x1b\[|\x9b)20[01]~/gu, ''))
  return {
    text: isBracketed && content ? `\x1b[200~${content}\x1b[201~` : content,
    content,
    isAsked: !isBracketed && content.includes('\r'),
  }
}

/** Lines of a paste for the question, with everything hidden in them as escapes. */
export function preview(content) {
  const lines = content.split('\r')
  const out = lines.slice(0, PREVIEW_LINES).map((line) => shown(line, 200))
  if (lines.length > PREVIEW_LINES) out.push(`… (${lines.length - PREVIEW_LINES} more lines)`)
  return out.join('\n')
}

// Drawing.

/** The parts of a row, cut where the cursor is; `cursor` is a column or -1. */
export function rowParts(screen, line, cursor) {
  const runs = screen.runs(line)
  if (cursor < 0) return runs
  const parts = []
  let x = 0
  let isDrawn = false
  for (const run of runs) {
    if (cursor < run.x || cursor >= run.x + run.width) parts.push(run)
    else if (!run.isAscii) parts.push({ ...run, isCursor: true })
    else {
      const at = cursor - run.x
      const cuts = [[0, at, false], [at, at + 1, true], [at + 1, run.text.length, false]]
      for (const [from, to, isCursor] of cuts) {
        if (to > from) parts.push({ ...run, x: run.x + from, text: run.text.slice(from, to), width: to - from, isCursor })
      }
    }
    if (cursor >= run.x && cursor < run.x + run.width) isDrawn = true
    x = run.x + run.width
  }
  if (!isDrawn) {
    const style = { fg: DEFAULT, bg: DEFAULT, flags: 0 }
    if (cursor > x) parts.push({ x, text: ' '.repeat(cursor - x), width: cursor - x, style, isAscii: true })
    parts.push({ x: cursor, text: ' ', width: 1, style, isAscii: true, isCursor: true })
  }
  return parts
}

/** A colour beyond the sixteen that the style sheet has. */
export function cssColour(colour) {
  if (colour >= TRUE_COLOUR) return `#${(colour & 0xffffff).toString(16).padStart(6, '0')}`
  if (colour >= 232) return `rgb(${Array(3).fill(8 + (colour - 232) * 10)})`
  const level = (step) => (step === 0 ? 0 : 55 + step * 40)
  const cube = colour - 16
  return `rgb(${[level(Math.floor(cube / 36)), level(Math.floor(cube / 6) % 6), level(cube % 6)]})`
}

const FLAGS = [[BOLD, 'bold'], [FAINT, 'faint'], [ITALIC, 'italic'], [UNDERLINE, 'underline'], [HIDDEN, 'concealed'], [STRIKE, 'strike']]

function spanOf(part) {
  const span = make('span', { textContent: part.text })
  const { flags } = part.style
  // The cursor is drawn by the style sheet.
  const isInverse = (flags & INVERSE) !== 0
  const fg = isInverse ? part.style.bg : part.style.fg
  const bg = isInverse ? part.style.fg : part.style.bg
  const classes = FLAGS.filter(([flag]) => flags & flag).map(([, name]) => name)
  if (fg >= 16) span.style.color = cssColour(fg)
  else if (fg !== DEFAULT) classes.push(`fg-${fg}`)
  else if (isInverse) classes.push('fg-back')
  if (bg >= 16) span.style.backgroundColor = cssColour(bg)
  else if (bg !== DEFAULT) classes.push(`bg-${bg}`)
  else if (isInverse) classes.push('bg-text')
  if (!part.isAscii) classes.push(part.width === 2 ? 'wide' : 'cell')
  if (part.isCursor) classes.push('cursor')
  if (classes.length) span.className = classes.join(' ')
  return span
}

/** Rows on the page, for one screen. */
class View {
  constructor(screen) {
    this.screen = screen
    this.grid = make('div', { className: 'terminal-grid' })
    this.spacer = make('div', { className: 'terminal-spacer' }, this.grid)
    this.scroll = make('div', { className: 'terminal-scroll', tabIndex: -1 }, this.spacer)
    this.probe = make('span', { className: 'terminal-probe', 'aria-hidden': 'true', textContent: 'W'.repeat(100) })
    this.scroll.append(this.probe)
    this.cell = { width: 8, height: 16 }
    this.isFollowing = true
    // The line at the top, counted from the first that ever was.
    this.first = 0
    // Where `draw` left the page.
    this.placed = 0
    this.rows = []
    this.drawn = []
  }

  /** Columns and rows that fit. */
  measure() {
    const box = this.probe.getBoundingClientRect()
    // Not shown at all, as in a folded part of the page.
    if (box.width === 0 || this.scroll.clientHeight === 0) return null
    this.cell = { width: box.width / 100, height: box.height }
    return {
      columns: Math.max(Math.floor(this.scroll.clientWidth / this.cell.width), 2),
      rows: Math.max(Math.floor(this.scroll.clientHeight / this.cell.height), 1),
    }
  }

  get history() {
    return this.screen.isAlternate ? 0 : this.screen.historyLength
  }

  /** Lines before the oldest that there still is. */
  get gone() {
    return this.screen.scrolled - this.screen.historyLength
  }

  scrolled() {
    // The page tells of what `draw` did after more output may have come.
    if (Math.abs(this.scroll.scrollTop - this.placed) < 1) return
    const first = Math.round(this.scroll.scrollTop / this.cell.height)
    this.isFollowing = first >= this.history
    this.first = this.gone + first
  }

  /** Moves by lines; the event of the page tells the rest. */
  move(lines) {
    this.scroll.scrollTop += lines * this.cell.height
  }

  follow() {
    this.isFollowing = true
  }

  draw(hasFocus) {
    const { screen } = this
    const { history } = this
    // At the end of the page is the screen, also where a part of a row is left over.
    this.spacer.style.height = `${Math.ceil(history * this.cell.height) + this.scroll.clientHeight}px`
    const first = this.isFollowing ? history : Math.min(Math.max(this.first - this.gone, 0), history)
    const top = first * this.cell.height
    if (Math.abs(this.scroll.scrollTop - top) >= this.cell.height / 2 || this.isFollowing) this.scroll.scrollTop = top
    this.placed = this.scroll.scrollTop
    while (this.rows.length > screen.rows) this.rows.pop().remove()
    while (this.rows.length < screen.rows) {
      const row = make('div', { className: 'terminal-row' })
      this.rows.push(row)
      this.grid.append(row)
    }
    this.drawn.length = Math.min(this.drawn.length, screen.rows)
    for (let y = 0; y < screen.rows; y += 1) {
      const at = first + y
      const line = at < history ? screen.historyLine(at) : screen.line(at - history)
      const cursor = screen.cursorVisible && at - history === screen.cursor.y ? screen.cursor.x : -1
      const last = this.drawn[y]
      if (last && last.line === line && last.touched === line.touched && last.cursor === cursor && last.columns === screen.columns) continue
      this.drawn[y] = { line, touched: line.touched, cursor, columns: screen.columns }
      this.rows[y].replaceChildren(...rowParts(screen, line, cursor).map(spanOf))
    }
    this.grid.classList.toggle('is-focused', hasFocus)
    return { left: screen.cursor.x * this.cell.width, top: (history - first + screen.cursor.y) * this.cell.height }
  }

  /** Text of what is in view. */
  text() {
    return this.drawn.map(({ line }) => line.text(this.screen.columns)).join('\n').trimEnd()
  }
}

/** Says to screen readers what is new, now and then, and never more than a listener can follow. */
class Announcer {
  constructor(screen) {
    this.screen = screen
    this.element = make('div', { className: 'unseen', role: 'log', 'aria-live': 'polite', 'aria-label': 'Terminal output' })
    this.next = 0
    this.last = ''
    this.timer = null
  }

  changed() {
    this.timer ??= setTimeout(() => {
      this.timer = null
      this.say()
    }, ANNOUNCE_MS)
  }

  say() {
    const { screen } = this
    const current = screen.scrolled + screen.cursor.y
    const lines = []
    if (!screen.isAlternate) {
      const least = Math.max(this.next, current - ANNOUNCED_LINES)
      if (least > this.next) lines.push(`${least - this.next} more lines`)
      for (let at = least; at < current; at += 1) {
        const y = at - screen.scrolled
        const line = y < 0 ? screen.historyLine(screen.historyLength + y) : screen.line(y)
        if (line) lines.push(line.text(screen.columns))
      }
      this.next = current
    }
    lines.push(screen.text(screen.cursor.y))
    const text = lines.join('\n').slice(-ANNOUNCED_LENGTH).trim()
    if (text && text !== this.last) this.element.textContent = text
    this.last = text
  }

  stop() {
    clearTimeout(this.timer)
  }
}

/** Sends what was typed, in order: one request at a time, everything that waits in the next. */
class Inputs {
  constructor(send, failed) {
    this.send = send
    this.failed = failed
    this.chunks = []
    this.length = 0
    this.isSending = false
    this.isStopped = false
  }

  /** Whether there was room for it. */
  push(text) {
    const bytes = new TextEncoder().encode(text)
    if (this.isStopped || this.length + bytes.length > INPUT_MAX) return false
    this.chunks.push(bytes)
    this.length += bytes.length
    if (!this.isSending) this.#run()
    return true
  }

  #take() {
    const out = new Uint8Array(Math.min(this.length, INPUT_CHUNK))
    let at = 0
    let used = 0
    while (at < out.length) {
      const chunk = this.chunks[used]
      const taken = Math.min(chunk.length, out.length - at)
      out.set(chunk.subarray(0, taken), at)
      at += taken
      if (taken < chunk.length) this.chunks[used] = chunk.subarray(taken)
      else used += 1
    }
    this.chunks.splice(0, used)
    this.length -= out.length
    return out
  }

  async #run() {
    this.isSending = true
    try {
      while (this.length > 0 && !this.isStopped) await this.send(this.#take())
    } catch (error) {
      this.stop()
      this.failed(error)
    }
    this.isSending = false
  }

  stop() {
    this.isStopped = true
    this.chunks = []
    this.length = 0
  }
}

/** The reason of an error, as text that is safe to show. */
function reason(error) {
  if (error instanceof AgentError) return `${shown(error.message, 300)} (${shown(error.code, 40)})`
  return 'the sandbox cannot be reached'
}

/** What the end of a shell is called. */
export function ending(end) {
  const status = typeof end?.status === 'string' && end.status ? shown(end.status, 100) : `exit status ${Number(end?.exitCode) || 0}`
  return `The shell has ended: ${status}.`
}

function pause() {
  return new Promise((resume) => setTimeout(resume, 0))
}

class Terminal {
  constructor(root, context) {
    this.root = root
    this.context = context
    this.life = new AbortController()
    this.screen = new Screen(80, 24)
    this.view = new View(this.screen)
    this.announcer = new Announcer(this.screen)
    this.inputs = null
    // The stream of now; one that was replaced finds another here.
    this.session = null
    this.frame = 0
    this.sent = null
    this.isResizing = false
    this.build()
    this.listen()
  }

  get options() {
    return { user: this.user.value.trim(), headers: this.context.headers }
  }

  build() {
    this.user = make('input', { name: 'user', autocomplete: 'off', spellcheck: false, placeholder: 'default', size: 10, maxLength: 64 })
    this.directory = make('input', { name: 'directory', autocomplete: 'off', spellcheck: false, placeholder: 'home', size: 18, maxLength: 4096 })
    this.again = make('button', { type: 'button', textContent: 'Reconnect', hidden: true, onclick: () => this.reconnect() })
    this.copyButton = make('button', {
      type: 'button',
      textContent: 'Copy',
      title: 'Copy the selection, or what is on the screen',
      // A press of a button ends the selection.
      onmousedown: (event) => event.preventDefault(),
      onclick: () => this.copy(),
    })
    this.state = make('span', { className: 'terminal-state' })
    this.bar = make(
      'form',
      {
        className: 'terminal-bar',
        onsubmit: (event) => {
          event.preventDefault()
          this.open()
        },
      },
      make('label', {}, 'User ', this.user),
      make('label', {}, 'Directory ', this.directory),
      make('button', { type: 'submit', textContent: 'New shell' }),
      this.again,
      this.copyButton,
      this.state,
    )
    this.keys = make('textarea', {
      className: 'terminal-keys',
      autocapitalize: 'off',
      autocomplete: 'off',
      spellcheck: false,
      rows: 1,
      'aria-label': 'Terminal input. Control Shift Escape, or Shift F6, leaves the terminal.',
    })
    this.question = make('div', { className: 'terminal-question', role: 'alertdialog', 'aria-label': 'Paste several lines?', hidden: true })
    this.view.scroll.append(this.keys)
    this.root.replaceChildren(
      make(
        'section',
        { className: 'terminal', 'aria-label': `Terminal of the sandbox ${shown(this.context.sandbox, 80)}` },
        this.bar,
        this.question,
        this.view.scroll,
        make('p', {
          className: 'terminal-hint',
          textContent: 'Ctrl+Shift+Escape or Shift+F6 leaves the terminal, Shift+PageUp and Shift+PageDown scroll, Ctrl+Shift+V pastes.',
        }),
        this.announcer.element,
      ),
    )
  }

  listen() {
    const { signal } = this.life
    const on = (target, name, listener, options) => target.addEventListener(name, listener, { signal, ...options })
    on(this.keys, 'keydown', (event) => this.key(event))
    on(this.keys, 'input', (event) => event.isComposing || this.takeText())
    // Some browsers send the text of an input method as input afterwards, some do not; the first of the two takes it.
    on(this.keys, 'compositionend', () => setTimeout(() => this.takeText(), 0))
    on(this.keys, 'paste', (event) => {
      event.preventDefault()
      this.paste(event.clipboardData?.getData('text/plain') ?? '')
    })
    on(this.keys, 'focus', () => this.redraw())
    on(this.keys, 'blur', () => this.redraw())
    on(this.view.scroll, 'keydown', (event) => {
      // A selection holds the focus; the next key that types goes to the program again.
      if (event.target === this.keys || event.ctrlKey || event.metaKey || event.key === 'Shift' || event.key === 'Tab') return
      this.keys.focus()
      this.key(event)
    })
    on(this.view.scroll, 'mouseup', (event) => {
      if (event.button === 0 && document.getSelection()?.isCollapsed !== false) this.keys.focus({ preventScroll: true })
    })
    on(this.view.scroll, 'scroll', () => {
      this.view.scrolled()
      this.redraw()
    })
    on(this.view.scroll, 'wheel', (event) => {
      if (!this.screen.isAlternate) return
      event.preventDefault()
      const key = encodeKey({ key: event.deltaY < 0 ? 'ArrowUp' : 'ArrowDown' }, this.screen)
      if (event.deltaY) this.type(key.repeat(3))
    }, { passive: false })
    on(this.view.scroll, 'copy', (event) => {
      const text = this.selected()
      if (!text) return
      event.preventDefault()
      event.clipboardData.setData('text/plain', text)
    })
    // A page that goes away ends its shell as well.
    on(window, 'pagehide', () => this.end())
    this.observer = new ResizeObserver(() => this.fit())
    this.observer.observe(this.view.scroll)
    this.context.signal?.addEventListener('abort', () => this.stop(), { signal })
  }

  say(text) {
    this.state.textContent = text
    this.context.say?.(text)
  }

  redraw() {
    if (this.frame || this.life.signal.aborted) return
    this.frame = requestAnimationFrame(() => {
      this.frame = 0
      const cursor = this.view.draw(document.activeElement === this.keys)
      // Where input methods show what they compose.
      this.keys.style.left = `${cursor.left}px`
      this.keys.style.top = `${cursor.top + this.view.scroll.scrollTop}px`
    })
  }

  // The shell.

  open() {
    this.end()
    this.screen.write(new TextEncoder().encode('\x1bc'))
    const message = {
      process: {
        cmd: '/bin/bash',
        args: ['-i', '-l'],
        envs: { TERM: 'xterm-256color', LANG: 'C.UTF-8', LC_ALL: 'C.UTF-8' },
      },
      pty: { size: { cols: this.screen.columns, rows: this.screen.rows } },
    }
    const directory = this.directory.value.trim()
    if (directory) message.process.cwd = directory
    this.run('process.Process/Start', message, null)
  }

  reconnect() {
    const pid = this.session?.pid
    if (pid) this.run('process.Process/Connect', { process: { pid } }, pid)
  }

  async run(method, message, pid) {
    this.session?.controller.abort()
    this.inputs?.stop()
    const session = { controller: new AbortController(), pid, hasEnded: false, isOver: false, options: this.options }
    this.session = session
    this.again.hidden = true
    this.say('Connecting…')
    this.keys.focus({ preventScroll: true })
    let text = 'The connection to the shell has ended.'
    try {
      const events = stream(this.context.agent, method, message, { ...session.options, signal: session.controller.signal })
      let burst = 0
      for await (const { event } of events) {
        // A shell that was left while it began must end like any other.
        if (event?.start && Number.isInteger(event.start.pid)) this.began(session, event.start.pid)
        if (this.session !== session) return
        if (typeof event?.data?.pty === 'string') {
          const bytes = fromBase64(event.data.pty)
          // One message may be large, and the page must stay alive meanwhile.
          for (let at = 0; at < bytes.length; at += BURST) {
            const part = bytes.subarray(at, at + BURST)
            this.take(part)
            burst += part.length
            if (burst >= BURST) {
              burst = 0
              await pause()
              if (this.session !== session) return
            }
          }
        }
        if (event?.end) {
          session.hasEnded = true
          text = ending(event.end)
        }
      }
    } catch (error) {
      if (this.session !== session || session.controller.signal.aborted) return
      text = session.pid ? `The connection has ended: ${reason(error)}.` : `No shell: ${reason(error)}.`
      // What was there before is not there any more.
      if (error instanceof AgentError && error.code === 'not_found') session.hasEnded = true
    }
    if (this.session !== session) return
    session.isOver = true
    this.inputs?.stop()
    this.again.hidden = session.hasEnded || !session.pid
    this.say(text)
    this.redraw()
  }

  began(session, pid) {
    session.pid = pid
    if (this.session !== session) {
      this.kill(session)
      return
    }
    const send = (bytes) =>
      call(this.context.agent, 'process.Process/SendInput', { process: { pid }, input: { pty: toBase64(bytes) } }, {
        ...session.options,
        signal: session.controller.signal,
      })
    this.inputs = new Inputs(send, (error) => {
      // The end of the stream says more.
      if (this.session === session && !session.isOver && !session.controller.signal.aborted) this.say(`Input was not sent: ${reason(error)}.`)
    })
    this.say('Connected.')
    this.sent = null
    this.fit()
  }

  take(bytes) {
    this.screen.write(bytes)
    const replies = this.screen.takeReplies()
    if (replies && this.inputs && this.inputs.length < REPLY_QUEUE_MAX) this.inputs.push(replies)
    this.announcer.changed()
    this.redraw()
  }

  /** Ends the shell of now, if there is one. */
  end() {
    const { session } = this
    if (!session) return
    this.session = null
    this.inputs?.stop()
    this.inputs = null
    if (session.pid && !session.hasEnded) this.kill(session)
    // Without a process identity nothing can be ended yet: the stream goes on until it has one, see `began`.
    if (session.pid || session.hasEnded) session.controller.abort()
  }

  kill(session) {
    session.hasEnded = true
    const message = { process: { pid: session.pid }, signal: 'SIGNAL_SIGKILL' }
    // Gone already is as good.
    const ended = call(this.context.agent, 'process.Process/SendSignal', message, { ...session.options, keepalive: true }).catch(() => {})
    this.context.ending?.(ended)
    session.controller.abort()
  }

  /** Takes the size of the page, and tells the program the latest one. */
  fit() {
    const size = this.view.measure()
    if (size && (size.columns !== this.screen.columns || size.rows !== this.screen.rows)) this.screen.resize(size.columns, size.rows)
    this.redraw()
    this.tellSize()
  }

  async tellSize() {
    const { session } = this
    if (this.isResizing || !session?.pid || session.hasEnded) return
    this.isResizing = true
    try {
      for (;;) {
        const { columns, rows } = this.screen
        if (this.session !== session || this.sent === `${columns}x${rows}`) break
        this.sent = `${columns}x${rows}`
        await call(this.context.agent, 'process.Process/Update', { process: { pid: session.pid }, pty: { size: { cols: columns, rows } } }, {
          ...session.options,
          signal: session.controller.signal,
        })
      }
    } catch {
      // A shell that is gone says so by its stream.
    }
    this.isResizing = false
    // Another shell may have begun meanwhile.
    if (this.session !== session) this.tellSize()
  }

  // What is typed.

  type(text) {
    if (!text) return
    if (!this.inputs || this.inputs.isStopped) {
      this.say('No shell is connected.')
      return
    }
    if (!this.inputs.push(text)) this.say('The program takes no more input for now.')
    this.view.follow()
    this.redraw()
  }

  takeText() {
    const text = this.keys.value
    this.keys.value = ''
    this.type(typed(text))
  }

  key(event) {
    if (event.isComposing || event.keyCode === 229) return
    const { key } = event
    if ((key === 'Escape' && event.ctrlKey && event.shiftKey) || (key === 'F6' && event.shiftKey)) {
      event.preventDefault()
      this.copyButton.focus()
      return
    }
    if (event.shiftKey && !event.ctrlKey && !event.altKey && !this.screen.isAlternate && this.scrollKey(key)) {
      event.preventDefault()
      return
    }
    if (event.ctrlKey && event.shiftKey && key.toLowerCase() === 'c') {
      event.preventDefault()
      this.copy()
      return
    }
    // The browser pastes.
    if ((event.ctrlKey && event.shiftKey && key.toLowerCase() === 'v') || (event.shiftKey && key === 'Insert')) return
    const { ctrlKey, altKey, shiftKey, metaKey } = event
    const isAltGraph = event.getModifierState('AltGraph')
    const text = encodeKey({ key, ctrlKey, altKey, shiftKey, metaKey, isAltGraph }, this.screen)
    if (text === null) return
    event.preventDefault()
    this.type(text)
  }

  scrollKey(key) {
    const page = Math.max(this.screen.rows - 1, 1)
    const lines = { PageUp: -page, PageDown: page, Home: -Infinity, End: Infinity }[key]
    if (lines === undefined) return false
    if (lines === Infinity) this.view.follow()
    else if (lines === -Infinity) this.view.scroll.scrollTop = 0
    else this.view.move(lines)
    this.redraw()
    return true
  }

  paste(text) {
    if (text.length > INPUT_MAX) {
      this.say('The text is too long to paste.')
      return
    }
    const { text: sent, content, isAsked } = preparePaste(text, this.screen.bracketedPaste)
    if (!isAsked) {
      this.type(sent)
      return
    }
    const close = () => {
      this.question.hidden = true
      this.question.replaceChildren()
      this.keys.focus()
    }
    const yes = make('button', {
      type: 'button',
      textContent: 'Paste',
      onclick: () => {
        close()
        // Another program may read now, and know about pastes.
        this.type(preparePaste(content, this.screen.bracketedPaste).text)
      },
    })
    const no = make('button', { type: 'button', textContent: 'Cancel', onclick: close })
    this.question.onkeydown = (event) => {
      if (event.key === 'Escape') close()
    }
    this.question.replaceChildren(
      make('p', { textContent: 'The text has line ends, and the program may run each line as soon as it is pasted.' }),
      make('pre', { textContent: preview(content), tabIndex: 0, 'aria-label': 'Text to paste' }),
      yes,
      no,
    )
    this.question.hidden = false
    no.focus()
  }

  selected() {
    const selection = document.getSelection()
    if (!selection || selection.isCollapsed || !this.view.grid.contains(selection.anchorNode)) return ''
    return selection.toString().split('\n').map((line) => line.trimEnd()).join('\n')
  }

  async copy() {
    const text = this.selected() || this.view.text()
    try {
      await navigator.clipboard.writeText(text)
      this.context.say?.('Copied.')
    } catch {
      this.context.say?.('The browser does not allow this: select the text and copy it by hand.')
    }
  }

  stop() {
    if (this.life.signal.aborted) return
    this.life.abort()
    this.end()
    this.observer.disconnect()
    this.announcer.stop()
    cancelAnimationFrame(this.frame)
    this.root.replaceChildren()
  }
}

/**
 * Shows a terminal in `root`, with a new shell. `context` has `sandbox`, `agent` (the address of the agent), `signal`,
 * `say(text)`, and may have `headers` for every request and `ending(promise)`, which is told of a shell that is being ended. The function that it returns ends the shell and removes everything.
 */
export function mount(root, context) {
  const terminal = new Terminal(root, context)
  terminal.fit()
  terminal.open()
  return () => terminal.stop()
}
