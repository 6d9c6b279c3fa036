// What the pages make of answers and of forms, without a page.

import assert from 'node:assert/strict'
import { test } from 'node:test'
import { asset } from './assets.mjs'

const { encoded, items, path, withQuery } = await asset('api.js')
const { ago, bytes, duration, moment, number, pairsOf, wordsOf } = await asset('ui.js')
const { matches, metadataFilter } = await asset('sandboxes.js')
const { recipeOf, templateOf } = await asset('build.js')
const { requestOf } = await asset('create.js')
const { injectionOf } = await asset('injections.js')
const { perSecond, portsOf, portUrl } = await asset('inside.js')
const { fresh } = await asset('logs.js')
const { LISTED_MAX, processesOf } = await asset('processes.js')
const { nodeState, nodeTexts } = await asset('operator.js')
const { stepTimes, tookText } = await asset('template.js')

test('a part of a path leaves no folder', () => {
  assert.equal(path('sandboxes', 'a/b', '?#'), 'sandboxes/a%2Fb/%3F%23')
  for (const part of ['', '.', '..', '\ud800', null]) assert.match(encoded(part), /^(_|null)$/)
  assert.equal(withQuery('v2/sandboxes', { limit: 0, state: '', text: 'a&b', none: undefined }), 'v2/sandboxes?limit=0&text=a%26b')
})

test('a list is objects, and no more of them than are asked for', () => {
  for (const value of [null, undefined, 'text', { length: 3 }, 7]) assert.deepEqual(items(value), [])
  assert.deepEqual(items([{ a: 1 }, null, 'x', 3, { b: 2 }]), [{ a: 1 }, { b: 2 }])
  assert.equal(items(Array.from({ length: 50 }, () => ({})), 10).length, 10)
})

test('what is no time and no number is said to be none', () => {
  assert.deepEqual([duration(NaN), duration(-5), duration(61_000), duration(3_720_000), duration(3 * 86_400_000)], ['–', '0 s', '1 min 1 s', '1 h 2 min', '3 d 0 h'])
  assert.equal(ago('yesterday'), '–')
  assert.equal(moment('\u202egpj'), '\\u{202e}gpj')
  for (const value of ['5', null, {}, NaN, Infinity]) assert.equal(number(value), 0)
  assert.deepEqual([bytes(0), bytes(1023), bytes(1536), bytes(1e308), bytes('x')], ['0 B', '1023 B', '1.5 KiB', `${Math.round(1e308 / 1024 ** 4)} TiB`, '0 B'])
})

test('pairs are lines, whose names are only names', () => {
  assert.deepEqual({ ...pairsOf('a=1\n\n b = x=y \n', 'Metadata') }, { a: '1', b: 'x=y' })
  const odd = pairsOf('__proto__=1\nconstructor=2', 'Metadata')
  assert.equal(JSON.stringify(odd), '{"__proto__":"1","constructor":"2"}')
  assert.equal({}.polluted, undefined)
  for (const text of ['a', '=b', 'a=1\nb']) assert.throws(() => pairsOf(text, 'Metadata'), /Metadata: a line must be name=value/)
  assert.deepEqual(wordsOf(' a, b\n\tc,,'), ['a', 'b', 'c'])
})

test('a filter finds what a row shows', () => {
  const sandbox = { sandboxID: 'iabc', alias: 'Base', templateID: 't1', metadata: { Purpose: 'Review' } }
  for (const text of ['', 'iab', 'base', 'purpose=rev']) assert.ok(matches(sandbox, text), text)
  for (const text of ['other', 'review=']) assert.ok(!matches(sandbox, text), text)
  assert.ok(!matches({ metadata: null, alias: 7 }, 'x'))
  assert.equal(metadataFilter('a=1, b=x&y ,c=%'), 'a=1&b=x&y&c=%25')
  assert.equal(metadataFilter('näme=wért=2'), 'n%C3%A4me=w%C3%A9rt%3D2')
})

const form = { template: ' base ', timeout: '300', metadata: '', environment: '', allow: '', deny: '', isPrivate: false, access: 'open', atEnd: 'kill' }

test('a sandbox is requested as it was filled in', () => {
  assert.deepEqual(requestOf(form), { templateID: 'base', timeout: 300 })
  assert.deepEqual(requestOf({ ...form, metadata: 'a=1', environment: 'B=2', allow: 'example.com', deny: '10.0.0.0/8, 192.0.2.1', isPrivate: true, access: 'closed', atEnd: 'pause' }), {
    templateID: 'base',
    timeout: 300,
    metadata: { a: '1' },
    envVars: { B: '2' },
    network: { allowOut: ['example.com'], denyOut: ['10.0.0.0/8', '192.0.2.1'], allowPublicTraffic: false },
    allow_internet_access: false,
    autoPause: true,
  })
  for (const wrong of [{ template: ' ' }, { timeout: '1.5' }, { timeout: '0' }, { timeout: '' }, { metadata: 'x' }]) assert.throws(() => requestOf({ ...form, ...wrong }))
})

test('an injection has what its kind needs', () => {
  const given = { kind: 'http', address: 'api.example.com', headers: 'Authorization=Bearer x', secret: '' }
  assert.deepEqual(injectionOf(given), { type: 'http', base_url: 'api.example.com', headers: { Authorization: 'Bearer x' } })
  assert.deepEqual(injectionOf({ ...given, kind: 'openai', address: '', secret: 's' }), { type: 'openai', api_key: 's' })
  assert.deepEqual(injectionOf({ ...given, kind: 'github', secret: 't' }), { type: 'github', base_url: 'api.example.com', token: 't' })
  for (const wrong of [{ address: '' }, { headers: '' }, { kind: 'openai' }]) assert.throws(() => injectionOf({ ...given, ...wrong }))
})

test('ports are read from what the kernel says, or a liar in its place', () => {
  const head = '  sl  local_address rem_address   st tx_queue rx_queue\n'
  const line = (address, state = '0A') => `   0: ${address} 00000000:0000 ${state} 00000000:00000000 00:00000000\n`
  const texts = [head + line('0100007F:1F90') + line('00000000:0BB8') + line('00000000:0050', '01') + line('00000000:C33F'), head + line('00000000000000000000000000000000:1F90')]
  assert.deepEqual(portsOf(...texts), [{ port: 3000, isLocal: false }, { port: 8080, isLocal: false }])
  assert.deepEqual(portsOf(head + line('0100007F:1F90')), [{ port: 8080, isLocal: true }])
  for (const text of ['', 'x', head + line('<b>:<i>'), head + line('00000000:0000'), head + line('00000000:10000')]) assert.deepEqual(portsOf(text), [])
  assert.ok(portsOf(head + line('00000000:0BB8').repeat(100_000)).length === 1)
  assert.equal(portUrl(3000, 'iabc', 'example.com:8443', 'https:'), 'https://3000-iabc.example.com:8443')
})

test('a rate is never less than nothing, and never without time', () => {
  assert.equal(perSecond(1000, 6000, 5000), 1000)
  assert.equal(perSecond(6000, 1000, 5000), 0)
  assert.equal(perSecond(0, 5000, 0), 0)
  assert.equal(perSecond(NaN, 5000, 1000), 0)
})

test('an entry of a log comes once, whatever shares its millisecond', () => {
  const seen = { at: -Infinity, texts: new Set() }
  const entry = (ms, message) => ({ timestamp: new Date(ms).toISOString(), message })
  assert.equal(fresh([entry(1, 'a'), entry(2, 'b')], seen).length, 2)
  assert.deepEqual(fresh([entry(2, 'b'), entry(2, 'c'), entry(3, 'd')], seen).map((one) => one.message), ['c', 'd'])
  assert.deepEqual(fresh([entry(3, 'd'), entry(1, 'old'), { timestamp: 'never', message: 'x' }], seen), [])
  assert.equal(seen.texts.size, 1)
})

test('a build is what its recipe says, and a form that is not filled in is refused', () => {
  assert.deepEqual(templateOf({ name: ' team/one:v2 ', cpus: '4', memory: '512' }), { name: 'team/one:v2', cpuCount: 4, memoryMB: 512 })
  for (const wrong of [{ name: ' ' }, { cpus: '0' }, { cpus: '1.5' }, { cpus: '' }, { memory: '64' }, { memory: 'x' }]) {
    assert.throws(() => templateOf({ name: 'n', cpus: '1', memory: '512', ...wrong }), /required|whole number/)
  }
  const given = { kind: 'template', source: ' base ', text: 'a && b\n\n  c=1  \n', start: '', ready: ' ' }
  assert.deepEqual(recipeOf(given), { fromTemplate: 'base', steps: [{ type: 'RUN', args: ['a && b', 'root'] }, { type: 'RUN', args: ['c=1', 'root'] }] })
  assert.deepEqual(recipeOf({ ...given, kind: 'image', source: 'debian:12', text: '' }), { fromImage: 'debian:12', steps: [] })
  // A Dockerfile is sent as it is: white space may mean something.
  const text = 'FROM debian:12\nRUN <<E\n  x\nE\n'
  assert.deepEqual(recipeOf({ ...given, kind: 'dockerfile', source: '', text, start: ' run ', ready: 'check' }), { fromDockerfile: { dockerfile: text }, startCmd: 'run', readyCmd: 'check' })
  assert.deepEqual(recipeOf({ ...given, kind: 'ready-made:agents', source: '', text: 'AGENTS=codex gemini\nA=b=c' }), { fromReadyMade: { name: 'agents', buildArgs: { AGENTS: 'codex gemini', A: 'b=c' } } })
  assert.throws(() => recipeOf({ ...given, kind: 'ready-made:agents', source: '', text: 'AGENTS' }), /NAME=VALUE|=/)
  for (const wrong of [{ source: ' ' }, { kind: 'image', source: '' }, { kind: 'dockerfile', text: ' \n' }]) assert.throws(() => recipeOf({ ...given, ...wrong }), /is required/)
})

test('processes are what the kernel says of them, whatever their names are', () => {
  const stat = (pid, name, parent, state = 'S') => `${pid} (${name}) ${state} ${parent} 1 1 0 -1 4194560 100 0 0 0 150 50 0 0 20 0 1 0 100 1000000 256 18446744073709551615`
  const text = (...pairs) => `77\n${pairs.map(([one, command]) => `${one}\n${command}\n`).join('')}`
  const [one, other] = processesOf(text([stat(5, 'sh', 1), 'sh -c <b>x</b> '], [stat(6, 'kworker', 2, 'R'), '']))
  assert.deepEqual(one, { pid: 5, parent: 1, state: 'S', command: 'sh -c <b>x</b>', seconds: 2, bytes: 1024 * 1024 })
  assert.deepEqual([other.command, other.state], ['[kworker]', 'R'])
  // A name that looks like the end of one, and what lists the processes.
  assert.equal(processesOf(text([stat(5, 'a) R 99 (', 3), '']))[0].parent, 3)
  assert.deepEqual(processesOf(text([stat(77, 'sh', 5), 'sh'], [stat(78, 'tr', 77), 'tr'])), [])
  for (const none of ['', '77', '77\n', '77\n5 (sh\nx\n', '77\n5 sh) S\nx\n', 'x\n(((\n)))\n', `77\n${stat('a', 'b', 'c')}\nx\n`]) assert.deepEqual(processesOf(none), [], none)
  assert.equal(processesOf(text(...Array.from({ length: 2000 }, (_, at) => [stat(at + 100, 'x', 1), 'y']))).length, LISTED_MAX)
})

test('a step of a build takes until the next one begins, and until its last line while it runs', () => {
  const note = stepTimes()
  const entry = (ms, step) => ({ timestamp: new Date(1e12 + ms).toISOString(), step, message: 'x' })
  assert.deepEqual(note(entry(0, undefined)), [])
  assert.deepEqual(note({ timestamp: 'never', step: 'base' }), [])
  assert.deepEqual(note(entry(100, 'base')), [{ name: 'base', ms: 0 }])
  assert.deepEqual(note(entry(1600, 'base')), [{ name: 'base', ms: 1500 }])
  // A command that prints nothing has one line, and takes its time all the same.
  assert.deepEqual(note(entry(2000, '1')), [{ name: 'base', ms: 1900 }, { name: '1', ms: 0 }])
  assert.deepEqual(note(entry(9000, undefined)), [])
  assert.deepEqual(note(entry(62_000, '2')), [{ name: '1', ms: 60_000 }, { name: '2', ms: 0 }])
  assert.deepEqual(note(entry(62_400, '2')), [{ name: '2', ms: 400 }])
  // A clock that was set back.
  assert.deepEqual(note(entry(0, '2')), [{ name: '2', ms: 0 }])
  assert.deepEqual([0, 40, 1249, 9949, 9950, 61_000].map(tookText), ['0.0 s', '0.0 s', '1.2 s', '9.9 s', '10 s', '1 min 1 s'])
})

test('a node has what it said, and nothing is made up for one that is away', () => {
  const node = { version: '1.2.3', sandboxes: 0, max_sandboxes: 40, memory_available_bytes: 1024 ** 3, memory_bytes: 4 * 1024 ** 3, disk_available_bytes: 1024 ** 4, cores: 8, pressure: 0 }
  assert.deepEqual(nodeTexts(node), { version: '1.2.3', sandboxes: '0 of 40', memory: '1.0 GiB free of 4.0 GiB', disk: '1.0 TiB free', cores: '8', pressure: '0 %' })
  assert.deepEqual([nodeTexts({ sandboxes: 3 }).sandboxes, nodeTexts({ memory_available_bytes: 1024 ** 2 }).memory], ['3', '1.0 MiB free'])
  for (const none of [{}, { version: '', sandboxes: '5', memory_available_bytes: NaN, memory_bytes: 'x', pressure: null, cores: {} }]) {
    assert.deepEqual(Object.values(nodeTexts(none)), Array(6).fill('–'))
  }
})

test('a node that drains says what is left, also while another server has it', () => {
  const draining = { state: 'connected', draining_at: '2030-01-01T00:00:00Z', sandboxes: 3, max_sandboxes: 40, left: { running: 1, paused_in_memory: 1, paused_on_disk: 0 } }
  assert.deepEqual([nodeState(draining), nodeTexts(draining).sandboxes], ['draining', '3 left'])
  const elsewhere = { ...draining, state: 'elsewhere', sandboxes: undefined, left: { running: 2, paused_in_memory: 1, paused_on_disk: 7 } }
  assert.deepEqual([nodeState(elsewhere), nodeTexts(elsewhere).sandboxes], ['draining, elsewhere', '3 left, 7 paused on disk'])
  assert.equal(nodeState({ state: 'away' }), 'away')
  assert.equal(nodeTexts({ ...draining, left: { running: 'x' }, sandboxes: null }).sandboxes, '0 left')
})
