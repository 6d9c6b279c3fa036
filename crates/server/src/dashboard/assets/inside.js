// Parts of the page of a sandbox: its use, its processes, its ports and its network.
//
// Its use is what the host measures. Processes come from its agent, and ports from files of its kernel (`/proc/net`), which the agent
// reads like any other: whoever is root inside may show other ones, so they are bounded and shown as text.

import { bounded, call } from './agent.js'
import { change, encoded, get, isAborted, items, MARK, now, path, reason, withQuery } from './api.js'
import { follow, logPage } from './logs.js'
import { plot } from './plot.js'
import { LISTED_MAX, listProcesses } from './processes.js'
import { button, bytes, confirm, duration, facts, field, fill, input, Invalid, link, make, metadataElement, moment, nameElement, note, number, poll, row, select, setText, shown, table, wordsOf, dialog, timeElement } from './ui.js'

const METRICS_MS = 5000
const PROCESSES_MS = 3000
const PORTS_MS = 5000
const FILE_MAX = 256 * 1024
const ROWS_MAX = 200
const LISTENS = '0A'
// The port of the agent, which is no one's to open.
const AGENT_PORT = 49983

/** A file of the kernel of a sandbox, as text. */
async function kernelFile(context, name) {
  const query = new URLSearchParams({ path: name, username: 'root' })
  const response = await fetch(`${context.agent}/files?${query}`, { headers: MARK, signal: context.signal, cache: 'no-store', redirect: 'error' })
  if (!response.ok) {
    await response.body?.cancel().catch(() => {})
    throw new Error(`status ${response.status}`)
  }
  return new TextDecoder().decode((await bounded(response, FILE_MAX)).bytes)
}

/** Bytes per second between two totals that are `ms` milliseconds apart; none where the later one is smaller or no time went by. */
export function perSecond(before, after, ms) {
  return ms > 0 && after > before ? ((after - before) * 1000) / ms : 0
}

/** Ports on which something listens, with whether only the sandbox itself reaches them, of `/proc/net/tcp` and `tcp6`. */
export function portsOf(...texts) {
  const ports = new Map()
  for (const text of texts) {
    for (const line of text.split('\n').slice(1, 5000)) {
      const [, local = '', , state] = line.trim().split(/\s+/u)
      const [address, hex] = local.split(':')
      const port = /^[0-9A-F]{4}$/u.test(hex ?? '') ? parseInt(hex, 16) : 0
      if (state !== LISTENS || !port || port === AGENT_PORT || !/^[0-9A-F]+$/u.test(address)) continue
      const isLocal = /^(0100007F|0{24}01000000)$/u.test(address)
      ports.set(port, (ports.get(port) ?? true) && isLocal)
    }
  }
  return [...ports].map(([port, isLocal]) => ({ port, isLocal })).sort((one, other) => one.port - other.port)
}

/** The address of a port of a sandbox. */
export function portUrl(port, id, domain, protocol = location.protocol) {
  return `${protocol}//${port}-${id}.${domain}`
}

export function mountOverview(root, context) {
  const { id, signal } = context
  const about = make('div')
  const range = select([['300', '5 minutes'], ['3600', '1 hour'], ['86400', '1 day'], ['all', 'All']], '300', { 'aria-label': 'Range of the plots' })
  const percent = (value) => `${value.toFixed(value < 10 ? 1 : 0)} %`
  const cpu = plot('CPU', { text: percent, top: () => 100 })
  const memory = plot('Memory', { text: bytes, top: () => memoryTotal })
  const disk = plot('Disk', { text: bytes, top: () => diskTotal })
  const traffic = plot('Network', { names: ['in', 'out'], text: (value) => `${bytes(value)}/s`, top: (largest) => Math.max(largest, 1024) })
  let memoryTotal = 1
  let diskTotal = 1
  const status = make('p', { className: 'state-line' })
  root.append(
    about,
    make('div', { className: 'head section' }, make('h2', { textContent: 'Use' }), range),
    status,
    make('div', { className: 'plots' }, cpu.element, memory.element, disk.element, traffic.element),
  )

  async function samples() {
    const end = Math.floor(now() / 1000)
    const length = range.value === 'all' ? null : Number(range.value)
    const list = items(await get(withQuery(`${path('sandboxes', id)}/metrics`, length ? { start: end - length, end } : {}), { signal }), 5000).filter((one) => Number.isFinite(Date.parse(one.timestamp)))
    const times = list.map((one) => Date.parse(one.timestamp))
    const span = length ? [(end - length) * 1000, end * 1000] : [times[0] ?? end * 1000 - 1, times.at(-1) ?? end * 1000]
    const series = (value) => [list.map((one, at) => [times[at], value(one)])]
    memoryTotal = Math.max(...list.slice(-1).map((one) => number(one.memTotal)), 1)
    diskTotal = Math.max(...list.slice(-1).map((one) => number(one.diskTotal)), 1)
    cpu.draw(series((one) => number(one.cpuUsedPct)), span)
    memory.draw(series((one) => number(one.memUsed)), span)
    disk.draw(series((one) => number(one.diskUsed)), span)
    const rates = (total) => times.slice(1).map((at, before) => [at, perSecond(total(list[before]), total(list[before + 1]), at - times[before])])
    traffic.draw([rates((one) => number(one.networkReceived)), rates((one) => number(one.networkSent))], span)
    const last = list.at(-1)
    setText(status, last ? `Measured ${duration(now() - times.at(-1))} ago; memory of ${bytes(last.memTotal)}, disk of ${bytes(last.diskTotal)}.` : 'There are no samples in this range.')
  }
  const again = poll(signal, METRICS_MS, () =>
    samples().catch((error) => {
      if (!isAborted(error)) setText(status, `Not current: ${reason(error)}.`)
      throw error
    }),
  )
  range.addEventListener('change', () => again())

  let drawn = ''
  function update(sandbox) {
    if (!sandbox) return
    const text = JSON.stringify(sandbox)
    if (text === drawn) return
    drawn = text
    const pairs = [
      ['Template', link(`/dashboard/templates/${encoded(sandbox.templateID)}`, nameElement(sandbox.alias || sandbox.templateID, 100))],
      ['Started', timeElement(sandbox.startedAt)],
      [sandbox.state === 'running' ? (sandbox.lifecycle?.onTimeout === 'pause' ? 'Pauses at' : 'Ends at') : 'End', sandbox.state === 'running' ? moment(sandbox.endAt) : 'none while it is paused'],
      ['Size', `${number(sandbox.cpuCount)} CPU, ${bytes(number(sandbox.memoryMB) * 1024 * 1024)} of memory, ${bytes(number(sandbox.diskSizeMB) * 1024 * 1024)} of disk`],
      ['Resumes on traffic', sandbox.lifecycle?.autoResume ? 'yes' : 'no'],
      ['Agent', shown(sandbox.envdVersion, 40)],
    ]
    if (sandbox.pauseMode) pairs.push(['Paused with', `${sandbox.pauseMode === 'full' ? 'its processes' : 'its files only'}${sandbox.pauseStorage ? `, in ${shown(sandbox.pauseStorage, 20)}` : ''}`])
    if (sandbox.pauseDiskBytes) pairs.push(['Size of the pause', bytes(sandbox.pauseDiskBytes)])
    if (sandbox.resumeError) pairs.push(['Last resume', make('span', { className: 'error', textContent: shown(sandbox.resumeError) })])
    const metadata = sandbox.metadata && Object.keys(sandbox.metadata).length ? metadataElement(sandbox.metadata, 50) : 'none'
    fill(about, facts([...pairs, ['Metadata', metadata]]))
  }
  update(context.facts)
  return update
}

export function mountProcesses(root, context) {
  const status = make('p', { className: 'state-line' })
  const { element, body } = table('Processes', ['PID', 'Command', 'Directory', 'Tag', ['', 'narrow']])
  const all = table('All processes', [['PID', 'right'], ['Parent', 'right'], 'Command', 'State', ['CPU time', 'right'], ['Memory', 'right']])
  const allStatus = make('p', { className: 'state-line', role: 'status' })
  const list = button('List all processes', onList)
  all.element.hidden = true
  root.append(
    note('Processes that the agent has started: commands, terminals and servers. What these start is below, when you ask for it.'),
    status,
    element,
    make('div', { className: 'head section' }, make('h2', { textContent: 'All processes' }), list),
    allStatus,
    all.element,
  )
  let drawn = null
  const again = poll(context.signal, PROCESSES_MS, async () => {
    try {
      const answer = await call(context.agent, 'process.Process/List', {}, { headers: MARK, signal: context.signal })
      const started = items(answer.processes, 100_000)
      const first = started.slice(0, ROWS_MAX)
      setText(status, `${started.length} ${started.length === 1 ? 'process' : 'processes'}${started.length > first.length ? `, ${first.length} are shown` : ''}.`)
      element.hidden = first.length === 0
      const text = JSON.stringify(first)
      if (text === drawn) return
      drawn = text
      body.replaceChildren(
        ...first.map((one) => {
          const pid = number(Number(one.pid))
          const words = [one.config?.cmd, ...(Array.isArray(one.config?.args) ? one.config.args : [])].filter((word) => typeof word === 'string')
          const command = words.join(' ')
          return row(
            [String(pid), 'number'],
            make('code', {}, nameElement(command, 400)),
            nameElement(one.config?.cwd ?? '', 200),
            nameElement(one.tag ?? '', 100),
            [button('Kill', () => end(pid, command), { className: 'is-danger small', 'aria-label': `Kill process ${pid}` }), 'narrow'],
          )
        }),
      )
    } catch (error) {
      if (!isAborted(error)) setText(status, `Not current: ${reason(error)}.`)
      throw error
    }
  })
  async function onList() {
    list.disabled = true
    setText(allStatus, 'Reading …')
    try {
      const found = await listProcesses(context)
      setText(allStatus, `${found.length}${found.length === LISTED_MAX ? ' or more' : ''} processes, as the sandbox says.`)
      all.element.hidden = found.length === 0
      all.body.replaceChildren(
        ...found.map((one) =>
          row([String(one.pid), 'right'], [String(one.parent), 'right'], make('code', {}, nameElement(one.command, 400)), shown(one.state, 10), [`${one.seconds.toFixed(1)} s`, 'right'], [bytes(one.bytes), 'right']),
        ),
      )
    } catch (error) {
      if (!isAborted(error)) setText(allStatus, `Not read: ${reason(error)}.`)
      if (error instanceof TypeError) console.error(error)
    } finally {
      list.disabled = false
    }
  }
  async function end(pid, command) {
    const isDone = await confirm(`Kill process ${pid}?`, [make('code', {}, nameElement(command, 300))], 'Kill', () =>
      call(context.agent, 'process.Process/SendSignal', { process: { pid }, signal: 'SIGNAL_SIGKILL' }, { headers: MARK, signal: context.signal }),
    )
    if (isDone) context.say(`Process ${pid} was killed.`)
    again()
  }
}

export function mountPorts(root, context) {
  const { domain } = context.session
  // As the API names it, and not the address of the page.
  const id = shown(context.facts?.sandboxID ?? '', 80)
  const status = make('p', { className: 'state-line' })
  const { element, body } = table('Ports', ['Port', 'Address', 'Reached'])
  const port = input({ type: 'number', min: '1', max: '65535', required: true, placeholder: '3000' })
  const opened = make('p', { role: 'status' })
  const anchor = (number_) => make('a', { href: portUrl(number_, id, domain), target: '_blank', rel: 'noopener noreferrer', textContent: portUrl(number_, id, domain) })
  if (context.facts?.network?.allowPublicTraffic === false) root.append(note('The ports of this sandbox need its traffic token, which this page does not have: the links are refused.'))
  root.append(
    make(
      'form',
      {
        className: 'bar',
        onsubmit: (event) => {
          event.preventDefault()
          opened.replaceChildren('Opens in a new tab: ', anchor(Number(port.value)))
          opened.querySelector('a').focus()
        },
      },
      field('Port', port),
      make('button', { type: 'submit', textContent: 'Make a link' }),
    ),
    opened,
    status,
    element,
  )
  let drawn = null
  poll(context.signal, PORTS_MS, async () => {
    try {
      const texts = await Promise.all(['/proc/net/tcp', '/proc/net/tcp6'].map((name) => kernelFile(context, name).catch((error) => (isAborted(error) ? Promise.reject(error) : ''))))
      const all = portsOf(...texts)
      const list = all.slice(0, ROWS_MAX)
      setText(status, all.length ? `${all.length} listening ${all.length === 1 ? 'port' : 'ports'}${all.length > list.length ? `, ${list.length} are shown` : ''}.` : 'Nothing listens on a TCP port.')
      element.hidden = list.length === 0
      const text = JSON.stringify(list)
      if (text === drawn) return
      drawn = text
      body.replaceChildren(...list.map((one) => row([String(one.port), 'number'], anchor(one.port), one.isLocal ? 'listens on the loopback' : 'listens on all addresses')))
    } catch (error) {
      if (!isAborted(error)) setText(status, `Not current: ${reason(error)}.`)
      throw error
    }
  })
}

export function mountNetwork(root, context) {
  const rules = make('div')
  const injected = make('div')
  const edit = button('Change the rules', onEdit)
  root.append(
    make('div', { className: 'head' }, make('h2', { textContent: 'Outbound rules' }), edit),
    rules,
    make('h2', { textContent: 'Injections' }),
    injected,
    make('h2', { textContent: 'Decisions' }),
    make('p', { className: 'hint', textContent: 'Connections that were refused and requests in which headers were set, as they happen. Values of headers are never logged.' }),
  )
  follow(root, context, {
    label: 'Decisions about outbound connections',
    read: (cursor) => logPage(context, cursor),
    keep: (entry) => entry.fields?.logger === 'egress',
    none: 'Nothing was refused or injected in the part of the log that was read.',
  })
  let facts_ = context.facts
  let seen = ''
  const list = (values) => (Array.isArray(values) && values.length ? values.slice(0, 256).map((one) => shown(one, 254)).join(', ') : 'none')
  function update(sandbox) {
    facts_ = sandbox ?? facts_
    edit.hidden = sandbox?.state !== 'running'
    const network = facts_?.network ?? {}
    const text = JSON.stringify([network, facts_?.allowInternetAccess])
    if (text === seen) return
    seen = text
    rules.replaceChildren(
      facts([
        ['Internet access', facts_?.allowInternetAccess === false ? 'closed, except what is allowed' : 'open, as the platform allows'],
        ['Allowed', list(network.allowOut)],
        ['Denied', list(network.denyOut)],
        ['DNS servers', network.dnsServers ? list(network.dnsServers) : 'those of the platform'],
        ['Proxy', network.egressProxy ? shown(network.egressProxy.address, 254) : 'none'],
        ['Hosts with header rules', network.rules ? list(Object.keys(network.rules)) : 'none'],
        ['Public traffic to ports', network.allowPublicTraffic === false ? 'only with the traffic token' : 'open'],
      ]),
    )
  }
  update(facts_)
  get(`${path('sandboxes', context.id)}/injections`, { signal: context.signal })
    .then((value) => {
      const all = items(value?.injections, 100)
      injected.replaceChildren(all.length ? make('ul', {}, ...all.map((one) => make('li', {}, nameElement([one.type, one.id, one.base_url].filter(Boolean).join(' '), 300)))) : 'none')
    })
    .catch((error) => {
      if (!isAborted(error)) injected.replaceChildren(error.status === 404 ? 'The sandbox has ended.' : `Not read: ${reason(error)}.`)
    })

  async function onEdit() {
    const network = facts_?.network ?? {}
    const allow = make('textarea', { maxLength: 60_000, spellcheck: false, value: (network.allowOut ?? []).join('\n') })
    const deny = make('textarea', { maxLength: 60_000, spellcheck: false, value: (network.denyOut ?? []).join('\n') })
    const access = select([['open', 'Open, as the platform allows'], ['closed', 'Closed, except what is allowed']], facts_?.allowInternetAccess === false ? 'closed' : 'open')
    const isDone = await dialog({
      title: 'Change the outbound rules',
      content: [
        make('p', { textContent: 'These rules take the place of those that it has.' }),
        field('Internet access', access),
        field('Allowed', allow, 'Domains, addresses and networks, one a line.'),
        field('Denied', deny, 'Addresses and networks, one a line.'),
      ],
      action: 'Change',
      act: async () => {
        if (network.egressProxy || network.rules) throw new Invalid('This sandbox has a proxy or header rules, whose secrets this page does not have: change it by the API.')
        const body = { allowOut: wordsOf(allow.value), denyOut: wordsOf(deny.value) }
        if (access.value === 'closed') body.allow_internet_access = false
        if (network.dnsServers) body.dnsServers = network.dnsServers
        if (network.httpsPorts) body.httpsPorts = network.httpsPorts
        await change('PUT', `${path('sandboxes', context.id)}/network`, body)
        return true
      },
    })
    if (isDone) context.say('The rules were changed.')
  }
  return update
}
