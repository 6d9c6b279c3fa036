// One sandbox: what it is, what can be done with it, and a page for each of its parts.
//
// What is read again and again is its state; the part that is shown is mounted once, and again when the sandbox begins or
// stops to run. Nothing here resumes a sandbox but the button for it. Its agent is asked only while it runs.

import { agentOf, change, encoded, get, isAborted, MARK, now, path, reason } from './api.js'
import { kill } from './create.js'
import { mountNetwork, mountOverview, mountPorts, mountProcesses } from './inside.js'
import { follow, logPage } from './logs.js'
import { button, check, confirm, dialog, duration, field, input, Invalid, link, make, nameElement, note, poll, select, setText, shown, stateElement, trouble } from './ui.js'

const EVERY_MS = 3000
const TABS = [
  ['', 'Overview'],
  ['terminal', 'Terminal'],
  ['files', 'Files'],
  ['logs', 'Logs'],
  ['processes', 'Processes'],
  ['ports', 'Ports'],
  ['network', 'Network'],
]
// Parts that ask the agent, which answers only while the sandbox runs.
const NEEDS_AGENT = new Set(['terminal', 'files', 'processes', 'ports'])

function seconds(control, least = 1) {
  const value = Number(control.value)
  if (!Number.isInteger(value) || value < least) throw new Invalid(`A whole number of seconds from ${least} on is required.`)
  return value
}

function style(name) {
  const href = `/dashboard/assets/${name}`
  if (!document.querySelector(`link[href="${href}"]`)) document.head.append(make('link', { rel: 'stylesheet', href }))
}

export async function mount(root, context) {
  const [id, tab = ''] = context.parts
  const base = `/dashboard/sandboxes/${encoded(id)}`
  const api = path('sandboxes', id)
  let sandbox = null
  let isGone = false
  let part = null

  const heading = make('h1', { tabIndex: -1 }, nameElement(id, 80))
  const state = make('span')
  const alias = make('span', { className: 'soft' })
  const timer = make('span', { className: 'number soft' })
  const extend = button('Extend', onExtend)
  const pause = button('Pause', onPause)
  const resume = button('Resume', onResume, { className: 'is-main' })
  const fork = button('Fork', onFork)
  const snapshot = button('Snapshot', onSnapshot)
  const end = button('Kill', onKill, { className: 'is-danger' })
  const buttons = make('div', { className: 'buttons' }, extend, pause, resume, fork, snapshot, end)
  const problem = make('div')
  const body = make('div')
  const tabs = make(
    'nav',
    { className: 'tabs', 'aria-label': 'Parts of the sandbox' },
    ...TABS.map(([name, text]) => link(name ? `${base}/${name}` : base, text, name === tab ? { 'aria-current': 'page' } : {})),
  )
  for (const one of buttons.children) one.hidden = true
  root.append(
    make('p', { className: 'way' }, link('/dashboard/sandboxes', 'Sandboxes')),
    make('div', { className: 'head' }, heading, state, alias, timer, buttons),
    tabs,
    problem,
    body,
  )
  // A narrow window shows a part of them.
  const current = tabs.querySelector('[aria-current]')
  if (current) tabs.scrollLeft = current.offsetLeft - 80
  context.title(shown(id, 40))
  if (!TABS.some(([name]) => name === tab)) {
    body.append(note('There is no such page of a sandbox.'))
    return
  }

  function draw() {
    const isRunning = sandbox?.state === 'running'
    if (sandbox && state.textContent !== sandbox.state) state.replaceChildren(stateElement(sandbox.state))
    setText(alias, sandbox ? shown(sandbox.alias || sandbox.templateID, 80) : '')
    tick()
    // A button that disappears must not take the focus with it.
    const focused = document.activeElement
    extend.hidden = pause.hidden = fork.hidden = snapshot.hidden = !isRunning
    resume.hidden = sandbox?.state !== 'paused'
    end.hidden = !sandbox
    if (buttons.contains(focused) && focused.hidden) (isRunning ? pause : resume.hidden ? heading : resume).focus()
  }

  function tick() {
    if (!sandbox || isGone) return setText(timer, '')
    const left = Date.parse(sandbox.endAt) - now()
    const then = sandbox.lifecycle?.onTimeout === 'pause' ? 'Pauses' : 'Ends'
    return setText(timer, sandbox.state === 'running' && Number.isFinite(left) ? `${then} in ${duration(left)}` : '')
  }

  /** Mounts the part that is shown. Again only when what it rests on has changed. */
  async function mountPart() {
    const kind = `${tab}:${NEEDS_AGENT.has(tab) ? sandbox?.state : isGone && tab === ''}`
    if (part?.kind === kind) {
      part.update?.(sandbox)
      return
    }
    part?.life.abort()
    const life = new AbortController()
    context.signal.addEventListener('abort', () => life.abort(), { signal: life.signal })
    part = { kind, life }
    const mine = part
    body.replaceChildren()
    if (NEEDS_AGENT.has(tab) && sandbox?.state !== 'running') {
      body.append(note(isGone ? 'The sandbox has ended.' : `The sandbox is ${shown(sandbox?.state, 20)}: resume it to see this part.`))
      return
    }
    body.append(make('h2', { className: 'unseen', textContent: TABS.find(([name]) => name === tab)[1] }))
    const inner = { ...context, signal: life.signal, sandbox: id, agent: agentOf(id), headers: MARK, id, facts: sandbox }
    if (tab === 'terminal' || tab === 'files') {
      style(`${tab}.css`)
      const module = await import(tab === 'terminal' ? './terminal.js' : './files.js')
      if (life.signal.aborted) return
      const place = make('div')
      body.append(place)
      module.mount(place, { sandbox: id, agent: agentOf(id), signal: life.signal, headers: MARK, say: () => {}, ending: context.ending })
    } else if (tab === 'logs') mountLogs(body, inner)
    else if (tab === 'processes') mountProcesses(body, inner)
    else if (tab === 'ports') mountPorts(body, inner)
    else if (tab === 'network') mine.update = mountNetwork(body, inner)
    else mine.update = mountOverview(body, inner)
  }

  const refresh = poll(context.signal, EVERY_MS, async () => {
    try {
      sandbox = await get(api, { signal: context.signal })
      isGone = false
      problem.replaceChildren()
      draw()
      await mountPart()
    } catch (error) {
      if (isAborted(error)) throw error
      if (error.status === 404) {
        const wasThere = sandbox !== null
        isGone = true
        sandbox = null
        draw()
        state.replaceChildren(stateElement('ended'))
        problem.replaceChildren(note(wasThere ? 'The sandbox has ended. Its log stays for a while.' : 'There is no such sandbox, or it has ended. Its log stays for a while.'))
        await mountPart()
        return 15_000
      }
      if (sandbox) problem.replaceChildren(note(`Not current: ${reason(error)}.`, 'is-bad'))
      else problem.replaceChildren(trouble(error, () => refresh()))
      throw error
    }
    return 0
  })
  const clock = setInterval(() => !document.hidden && tick(), 1000)
  context.signal.addEventListener('abort', () => clearInterval(clock))

  // What can be done.

  async function done(result, text) {
    if (result === undefined) return
    context.say(text)
    await refresh()
  }

  async function onExtend() {
    const timeout = input({ type: 'number', min: '1', max: '2147483647', value: '3600', required: true })
    await done(
      await dialog({
        title: 'Set the timeout',
        content: [field('Seconds from now', timeout, 'It is cut at the largest lifetime that the platform allows.')],
        action: 'Set',
        act: async () => {
          await change('POST', `${api}/timeout`, { timeout: seconds(timeout) })
          return true
        },
      }),
      'The timeout was set.',
    )
  }

  async function onPause() {
    const memory = check('Keep its processes', true)
    await done(
      await dialog({
        title: 'Pause the sandbox?',
        content: [make('p', { textContent: 'Its connections are cut, terminals as well, and it has no end until it is resumed.' }), memory.element],
        action: 'Pause',
        act: async (progress) => {
          progress('Pausing …')
          await change('POST', `${api}/pause`, { memory: memory.control.checked })
          return true
        },
      }),
      'The sandbox is paused.',
    )
  }

  async function onResume() {
    const timeout = input({ type: 'number', min: '1', max: '2147483647', value: '300', required: true })
    await done(
      await dialog({
        title: 'Resume the sandbox',
        content: [field('Timeout in seconds', timeout)],
        action: 'Resume',
        act: async (progress) => {
          progress('Resuming …')
          await change('POST', `v2/${api}/connect`, { timeout: seconds(timeout) })
          return true
        },
      }),
      'The sandbox runs again.',
    )
  }

  async function onFork() {
    const count = input({ type: 'number', min: '1', max: '100', value: '1', required: true })
    const timeout = input({ type: 'number', min: '1', max: '86400', value: '300', required: true })
    const results = await dialog({
      title: 'Fork the sandbox',
      content: [
        make('p', { textContent: 'New sandboxes go on from where this one is, with its memory, processes and files. It stands still meanwhile.' }),
        field('How many', count),
        field('Timeout of each in seconds', timeout),
      ],
      action: 'Fork',
      act: async (progress) => {
        const body = { count: Number(count.value), timeout: seconds(timeout) }
        if (!Number.isInteger(body.count) || body.count < 1) throw new Invalid('A whole number from 1 on is required.')
        progress('Forking …')
        return (await change('POST', `${api}/fork`, body)) ?? []
      },
    })
    if (!Array.isArray(results)) return
    const ids = results.map((one) => one?.sandbox?.sandboxID).filter((one) => typeof one === 'string').slice(0, 100)
    const failed = results.map((one) => one?.error?.message).filter((one) => typeof one === 'string')
    context.say(`${ids.length} of ${results.length} created.`)
    await dialog({
      title: ids.length === 1 ? 'The fork runs' : `${ids.length} forks run`,
      content: [
        make('ul', {}, ...ids.map((one) => make('li', {}, link(`/dashboard/sandboxes/${encoded(one)}`, shown(one, 80))))),
        ...failed.slice(0, 3).map((text) => note(shown(text), 'is-bad')),
      ],
      action: null,
      cancel: 'Close',
    })
  }

  async function onSnapshot() {
    const name = input({ maxLength: 128, placeholder: 'my-snapshot' })
    const memory = check('Keep its memory and processes, where the host can', true)
    const made = await dialog({
      title: 'Make a snapshot',
      content: [
        make('p', { textContent: 'Sandboxes are created from a snapshot as from a template. This one stands still while it is copied, and runs on.' }),
        field('Name', name, 'May be empty: the snapshot then has its id.'),
        memory.element,
      ],
      action: 'Make',
      act: async (progress) => {
        progress('Copying …')
        const body = name.value.trim() ? { name: name.value.trim() } : {}
        if (!memory.control.checked) body.memory = false
        return change('POST', `${api}/snapshots`, body)
      },
    })
    if (!made) return
    context.say('The snapshot was made.')
    await dialog({
      title: 'The snapshot was made',
      content: [make('p', {}, 'Create sandboxes from it by its id: '), make('code', { className: 'secret', textContent: shown(made.snapshotID, 200) })],
      action: null,
      cancel: 'Close',
    })
  }

  async function onKill() {
    if (!(await confirm('Kill this sandbox?', [nameElement(id, 80), ': its processes end, and its files are removed.'], 'Kill', () => kill(id)))) return
    context.say('The sandbox was killed.')
    context.go('/dashboard/sandboxes')
  }
}

function mountLogs(root, context) {
  const level = select([['debug', 'All'], ['info', 'Information'], ['warn', 'Warnings'], ['error', 'Errors']], 'debug')
  const search = input({ type: 'search', maxLength: 256 })
  const form = make(
    'form',
    {
      className: 'bar',
      onsubmit: (event) => {
        event.preventDefault()
        again()
      },
    },
    field('Level', level),
    field('Message contains', search),
    make('button', { type: 'submit', textContent: 'Filter' }),
  )
  root.append(form)
  const again = follow(root, context, {
    label: 'Log of the sandbox',
    read: (cursor) => logPage(context, cursor, { level: level.value, search: search.value }),
  })
  level.addEventListener('change', () => again())
}
