// The files of a sandbox: a folder as a table, with uploads, downloads and a view of text.
//
// Names and contents are hostile: they are shown by `text.js`, and every action takes the name that is shown, joined to the
// folder that is shown, not a path that an answer brought along. What is shown is bounded (`SHOWN_MAX`, `VIEW_MAX`). Nothing
// is replaced or removed without a question in the page.

import { AgentError, bounded, call, failure } from './agent.js'
import { make, nameElement, shown, shownLines } from './text.js'

// Entries of one folder on the page.
export const SHOWN_MAX = 1000
// Bytes of a file that are shown.
export const VIEW_MAX = 1024 * 1024
// The longest part of a line that is laid out as one: a browser takes seconds for a line of a mebibyte, and no time for many.
const PIECE_MAX = 4000
const NAME_BYTES_MAX = 255

// Paths and contents, without a page.

/** The path of a name in a folder. */
export function joined(directory, name) {
  return directory.endsWith('/') ? `${directory}${name}` : `${directory}/${name}`
}

/** The folder that a path is in. */
export function parentOf(path) {
  const parts = path.replace(/\/+$/u, '')
  return parts.slice(0, parts.lastIndexOf('/')) || '/'
}

/** Why a name cannot be that of a file, or an empty string. */
export function nameProblem(name) {
  if (name === '') return 'A name is required.'
  if (name === '.' || name === '..') return 'This name stands for a folder.'
  if (name.includes('/')) return 'A name has no slash.'
  if (name.includes('\0')) return 'A name has no NUL character.'
  if (new TextEncoder().encode(name).length > NAME_BYTES_MAX) return `A name has at most ${NAME_BYTES_MAX} bytes.`
  return ''
}

/** Text of a file, or `null` for what is not text. With `isCut` the last character may be incomplete. */
export function textOfFile(bytes, isCut) {
  if (bytes.includes(0)) return null
  try {
    return new TextDecoder('utf-8', { fatal: true }).decode(bytes, { stream: isCut })
  } catch {
    return null
  }
}

/** A text as parts that a browser lays out one by one, `{ text, isBlock }`: a long line is blocks, which together are the line. */
export function pieces(text) {
  const parts = []
  const add = (from, to, isBlock) => to > from && parts.push({ text: text.slice(from, to), isBlock })
  let at = 0
  for (const { index, 0: line } of text.matchAll(new RegExp(`[^\\n]{${PIECE_MAX + 1},}\\n?`, 'g'))) {
    add(at, index, false)
    const end = index + line.length
    for (at = index; at < end; ) {
      let to = Math.min(at + PIECE_MAX, end)
      // Neither half of a character, nor the end of the line by itself.
      if (/[\ud800-\udbff]/.test(text[to - 1]) && to < end) to += 1
      if (text[to] === '\n') to += 1
      add(at, to, true)
      at = to
    }
  }
  add(at, text.length, false)
  return parts
}

/** A size as people read it; anything else than a number is nothing. */
export function sizeText(size) {
  // 64-bit numbers are strings in JSON, and zero is absent.
  const bytes = typeof size === 'string' && /^\d{1,19}$/u.test(size) ? Number(size) : typeof size === 'number' ? size : 0
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB']
  const unit = bytes < 1024 ? 0 : Math.min(Math.floor(Math.log2(bytes) / 10), units.length - 1)
  return `${unit ? (bytes / 1024 ** unit).toFixed(1) : bytes} ${units[unit]}`
}

/**
 * Entries as they are listed: folders first, then by name; those whose name cannot be joined to the folder are left out.
 * `more` counts what does not fit on the page.
 */
export function listed(answer, most = SHOWN_MAX) {
  const all = Array.isArray(answer?.entries) ? answer.entries : []
  const entries = all
    .filter((entry) => typeof entry?.name === 'string' && !nameProblem(entry.name))
    .map((entry) => ({ ...entry, isDirectory: entry.type === 'FILE_TYPE_DIRECTORY', isFile: entry.type === 'FILE_TYPE_FILE' }))
  const order = (one, other) => other.isDirectory - one.isDirectory || (one.name < other.name ? -1 : one.name > other.name ? 1 : 0)
  entries.sort(order)
  return { entries: entries.slice(0, most), more: Math.max(entries.length - most, 0) }
}

/** The address of a file for downloads and uploads. */
export function fileUrl(agent, path, user) {
  const query = new URLSearchParams({ path })
  if (user) query.set('username', user)
  return `${agent}/files?${query}`
}

function reason(error) {
  if (error instanceof AgentError) return `${shown(error.message, 300)} (${shown(error.code, 40)})`
  return 'the sandbox cannot be reached'
}

/** Sends a file with its progress, which `fetch` does not tell. */
function send(url, file, { signal, headers = {}, progressed }) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest()
    const stop = () => request.abort()
    request.open('POST', url)
    for (const [name, value] of Object.entries(headers)) request.setRequestHeader(name, value)
    request.upload.addEventListener('progress', (event) => event.lengthComputable && progressed(event.loaded, event.total))
    request.addEventListener('load', () => {
      if (request.status >= 200 && request.status < 300) resolve()
      // As an answer of `fetch`, so that errors are read in one place.
      else failure(new Response(request.responseText.slice(0, 64 * 1024), { status: Math.max(request.status, 400) })).then(reject)
    })
    request.addEventListener('error', () => reject(new Error('not reached')))
    request.addEventListener('abort', () => reject(new DOMException('stopped', 'AbortError')))
    request.addEventListener('loadend', () => signal.removeEventListener('abort', stop))
    signal.addEventListener('abort', stop)
    const form = new FormData()
    form.append('file', file, 'file')
    if (signal.aborted) reject(new DOMException('stopped', 'AbortError'))
    else request.send(form)
  })
}

class Files {
  constructor(root, context) {
    this.root = root
    this.context = context
    this.life = new AbortController()
    // The listing and the view of now; an answer for an earlier one is dropped.
    this.loading = null
    this.viewing = null
    this.directory = '/'
    this.question = null
    this.build()
    context.signal?.addEventListener('abort', () => this.stop(), { signal: this.life.signal })
  }

  get options() {
    return { user: this.user.value.trim(), headers: this.context.headers, signal: this.life.signal }
  }

  call(method, message, signal = this.life.signal) {
    return call(this.context.agent, `filesystem.Filesystem/${method}`, message, { ...this.options, signal })
  }

  say(text) {
    this.state.textContent = text
    this.context.say?.(text)
  }

  build() {
    this.path = make('input', { name: 'path', autocomplete: 'off', spellcheck: false, maxLength: 4096 })
    this.user = make('input', { name: 'user', autocomplete: 'off', spellcheck: false, placeholder: 'default', size: 10, maxLength: 64 })
    this.up = make('button', { type: 'button', textContent: 'Parent folder', onclick: () => this.list(parentOf(this.directory), true) })
    this.picker = make('input', {
      type: 'file',
      multiple: true,
      onchange: () => {
        const files = [...this.picker.files]
        this.picker.value = ''
        this.upload(files)
      },
    })
    this.state = make('p', { className: 'files-state' })
    this.panel = make('div', { className: 'files-panel' })
    this.heading = make('h3', { tabIndex: -1 })
    this.table = make('div', { className: 'files-table' })
    this.view = make('section', { className: 'files-view', 'aria-label': 'Content of a file', hidden: true })
    this.root.replaceChildren(
      make(
        'section',
        { className: 'files', 'aria-label': `Files of the sandbox ${shown(this.context.sandbox, 80)}` },
        make(
          'form',
          {
            className: 'files-bar',
            onsubmit: (event) => {
              event.preventDefault()
              this.list(this.path.value, true)
            },
          },
          make('label', {}, 'Folder ', this.path),
          make('label', {}, 'User ', this.user),
          make('button', { type: 'submit', textContent: 'Open' }),
          this.up,
          make('button', { type: 'button', textContent: 'New folder', onclick: () => this.makeDirectory() }),
          make('label', {}, 'Upload ', this.picker),
        ),
        this.state,
        this.panel,
        this.heading,
        this.table,
        this.view,
      ),
    )
  }

  // Questions in the page, one at a time.

  /** Shows a form, and takes the answer: `null` when it was cancelled, by another question too. */
  ask(label, yes, ...content) {
    this.question?.(null)
    const before = document.activeElement
    return new Promise((resolve) => {
      const close = (answer) => {
        if (this.question !== close) return
        this.question = null
        this.panel.replaceChildren()
        if (before?.isConnected) before.focus()
        resolve(answer)
      }
      this.question = close
      const cancel = make('button', { type: 'button', textContent: 'Cancel', onclick: () => close(null) })
      const form = make(
        'form',
        {
          className: 'files-question',
          role: 'alertdialog',
          'aria-label': label,
          onsubmit: (event) => {
            event.preventDefault()
            close(form)
          },
          onkeydown: (event) => event.key === 'Escape' && close(null),
        },
        ...content,
        make('button', { type: 'submit', textContent: yes }),
        cancel,
      )
      this.panel.replaceChildren(form)
      // What is destructive is not what Enter does.
      const field = form.querySelector('input')
      if (field) field.select()
      ;(field ?? cancel).focus()
    })
  }

  async askName(label, yes, name = '') {
    const field = make('input', { value: name, autocomplete: 'off', spellcheck: false, required: true })
    const answer = await this.ask(label, yes, make('label', {}, `${label} `, field))
    if (!answer) return null
    const problem = nameProblem(field.value)
    if (problem) this.say(problem)
    return problem ? null : field.value
  }

  /** Does something with the folder, and lists it again. */
  async change(what, action) {
    const { directory } = this
    try {
      await action()
      this.say(what)
    } catch (error) {
      if (this.life.signal.aborted || error.name === 'AbortError') return false
      this.say(`Failed: ${reason(error)}.`)
      return false
    }
    if (this.directory === directory) await this.list(directory, true, what)
    return true
  }

  /** Whether there is something at a path. */
  async exists(path) {
    try {
      await this.call('Stat', { path })
      return true
    } catch (error) {
      if (error instanceof AgentError && error.code === 'not_found') return false
      throw error
    }
  }

  // The folder.

  async list(path, isFocused = false, done = '') {
    this.loading?.abort()
    const loading = new AbortController()
    this.loading = loading
    this.say(done || 'Loading…')
    try {
      // An empty path is the home folder, and `~` is below it: the agent says where that is.
      const found = path.startsWith('/') ? path : (await this.call('Stat', { path }, loading.signal)).entry?.path
      if (typeof found !== 'string' || !found.startsWith('/')) throw new AgentError('internal', 'the agent named no folder')
      const answer = await this.call('ListDir', { path: found, depth: 1 }, loading.signal)
      if (this.loading !== loading) return
      this.closeView()
      this.directory = found
      this.path.value = found
      this.draw(answer)
      if (isFocused) this.heading.focus()
      if (!done) this.say('')
    } catch (error) {
      if (this.loading !== loading || loading.signal.aborted || this.life.signal.aborted) return
      const isLarge = error instanceof AgentError && error.code === 'resource_exhausted'
      this.say(isLarge ? 'The folder has too many entries to list here.' : `The folder cannot be listed: ${reason(error)}.`)
    }
  }

  draw(answer) {
    const { entries, more } = listed(answer)
    this.heading.replaceChildren(nameElement(this.directory, 4096))
    this.up.disabled = this.directory === '/'
    const body = make('tbody', {}, ...entries.map((entry) => this.row(entry)))
    const head = make('tr', {}, ...['Name', 'Size', 'Permissions', 'Modified', 'Actions'].map((textContent) => make('th', { scope: 'col', textContent })))
    const count = `${entries.length + more} ${entries.length + more === 1 ? 'entry' : 'entries'}`
    const table = make('table', {}, make('caption', { textContent: count }), make('thead', {}, head), body)
    this.table.replaceChildren(table)
    if (more) this.table.append(make('p', { textContent: `${more} more entries are not shown. Open a folder below, or use the terminal.` }))
  }

  row(entry) {
    const { name } = entry
    const path = joined(this.directory, name)
    const visible = shown(name)
    const action = (label, onclick) => make('button', { type: 'button', textContent: label, 'aria-label': `${label} ${visible}`, onclick })
    let title = nameElement(name)
    if (entry.isDirectory) title = make('button', { type: 'button', className: 'files-name', 'aria-label': `Open the folder ${visible}`, onclick: () => this.list(path, true) }, title, '/')
    else if (entry.isFile) title = make('button', { type: 'button', className: 'files-name', 'aria-label': `View ${visible}`, onclick: () => this.show(name, path) }, title)
    const cell = make('th', { scope: 'row' }, title)
    if (typeof entry.symlinkTarget === 'string' && entry.symlinkTarget) cell.append(' → ', nameElement(entry.symlinkTarget, 4096))
    const actions = make('td', { className: 'files-actions' })
    if (entry.isFile) {
      actions.append(
        make('a', { href: fileUrl(this.context.agent, path, this.options.user), download: visible, textContent: 'Download', 'aria-label': `Download ${visible}` }),
      )
    }
    actions.append(action('Rename', () => this.rename(name)), action('Remove', () => this.remove(entry)))
    const modified = typeof entry.modifiedTime === 'string' ? shown(entry.modifiedTime, 40).slice(0, 19).replace('T', ' ') : ''
    return make(
      'tr',
      {},
      cell,
      make('td', { className: 'files-size', textContent: entry.isFile ? sizeText(entry.size) : '' }),
      make('td', { textContent: shown(entry.permissions, 20) }),
      make('td', { textContent: modified }),
      actions,
    )
  }

  async makeDirectory() {
    const { directory } = this
    const name = await this.askName('Name of the new folder', 'Create')
    if (name !== null) await this.change('The folder was created.', () => this.call('MakeDir', { path: joined(directory, name) }))
  }

  async rename(name) {
    const { directory } = this
    const other = await this.askName('New name', 'Rename', name)
    if (other === null || other === name) return
    await this.change(`Renamed to ${shown(other)}.`, async () => {
      const destination = joined(directory, other)
      // The agent would replace it.
      if (await this.exists(destination)) throw new AgentError('already_exists', `${other} exists: remove it first`)
      await this.call('Move', { source: joined(directory, name), destination })
    })
  }

  async remove({ name, isDirectory, symlinkTarget }) {
    const { directory } = this
    const isTree = isDirectory && !symlinkTarget
    const text = make('p', {}, 'Remove ', nameElement(name), isTree ? ', and everything that is in it?' : '?')
    if (!(await this.ask(`Remove ${shown(name)}?`, 'Remove', text))) return
    await this.change(`Removed ${shown(name)}.`, () => this.call('Remove', { path: joined(directory, name) }))
  }

  async upload(files) {
    const { directory } = this
    let sent = 0
    for (const file of files) {
      const problem = nameProblem(file.name)
      if (problem) {
        this.say(`${shown(file.name)}: ${problem}`)
        continue
      }
      const path = joined(directory, file.name)
      try {
        if (await this.exists(path)) {
          const text = make('p', {}, nameElement(file.name), ' exists. Replace it?')
          if (!(await this.ask(`Replace ${shown(file.name)}?`, 'Replace', text))) continue
        }
        await this.sendOne(file, path)
        sent += 1
      } catch (error) {
        if (this.life.signal.aborted) return
        this.say(error.name === 'AbortError' ? 'The upload was cancelled.' : `${shown(file.name)} was not uploaded: ${reason(error)}.`)
        break
      }
    }
    if (sent > 0 && this.directory === directory) await this.list(directory, true, `${sent} of ${files.length} uploaded.`)
  }

  async sendOne(file, path) {
    const stopper = new AbortController()
    const progress = make('progress', { max: 1, value: 0, 'aria-label': `Upload of ${shown(file.name)}` })
    const cancel = make('button', { type: 'button', textContent: 'Cancel', 'aria-label': `Cancel the upload of ${shown(file.name)}`, onclick: () => stopper.abort() })
    const line = make('p', { className: 'files-upload' }, nameElement(file.name), ' ', progress, ' ', cancel)
    this.state.after(line)
    const { user, headers } = this.options
    try {
      await send(fileUrl(this.context.agent, path, user), file, {
        signal: AbortSignal.any ? AbortSignal.any([stopper.signal, this.life.signal]) : stopper.signal,
        headers,
        progressed: (loaded, total) => {
          progress.value = total ? loaded / total : 1
        },
      })
    } finally {
      line.remove()
    }
  }

  // The view of a file.

  async show(name, path) {
    this.viewing?.abort()
    const viewing = new AbortController()
    this.viewing = viewing
    const { user, headers } = this.options
    try {
      const response = await fetch(fileUrl(this.context.agent, path, user), { headers, signal: viewing.signal, cache: 'no-store', redirect: 'error' })
      if (!response.ok) throw await failure(response)
      const { bytes, isCut } = await bounded(response, VIEW_MAX)
      if (this.viewing !== viewing) return
      this.drawView(name, bytes, isCut)
    } catch (error) {
      if (this.viewing !== viewing || viewing.signal.aborted) return
      this.say(`${shown(name)} cannot be shown: ${reason(error)}.`)
    }
  }

  drawView(name, bytes, isCut) {
    const text = textOfFile(bytes, isCut)
    const title = make('h4', { tabIndex: -1 }, nameElement(name))
    const close = make('button', {
      type: 'button',
      textContent: 'Close',
      onclick: () => {
        this.closeView()
        this.heading.focus()
      },
    })
    this.view.replaceChildren(title, close)
    if (text === null) this.view.append(make('p', { textContent: 'This file is binary: it is not text in UTF-8. Download it to look at it.' }))
    else {
      if (isCut) this.view.append(make('p', { textContent: `Only the first ${sizeText(VIEW_MAX)} are shown.` }))
      if (text === '') this.view.append(make('p', { textContent: 'This file is empty.' }))
      this.view.append(make('pre', { tabIndex: 0, 'aria-label': `Content of ${shown(name)}` }, ...pieces(shownLines(text)).map((piece) => (piece.isBlock ? make('span', { className: 'files-piece', textContent: piece.text }) : piece.text))))
    }
    this.view.hidden = false
    title.focus()
  }

  closeView() {
    this.viewing?.abort()
    this.viewing = null
    this.view.hidden = true
    this.view.replaceChildren()
  }

  stop() {
    if (this.life.signal.aborted) return
    this.life.abort()
    this.loading?.abort()
    this.viewing?.abort()
    this.question?.(null)
    this.root.replaceChildren()
  }
}

/**
 * Shows the files of a sandbox in `root`, at first the home folder. `context` is that of the terminal. The function that it
 * returns ends what is under way and removes everything.
 */
export function mount(root, context) {
  const files = new Files(root, context)
  files.list('')
  return () => files.stop()
}
