// Lifecycle of sandboxes through the API: create, find, list, extend, kill.

import assert from 'node:assert/strict'
import { randomUUID } from 'node:crypto'
import { test } from 'node:test'
import { AuthenticationError, InvalidArgumentError, NotFoundError, Sandbox, SandboxError } from 'e2b'
import { request, sandboxFor, until } from './harness.mjs'

async function all(paginator) {
  const found = []
  while (paginator.hasNext) found.push(...(await paginator.nextItems()))
  return found
}

test('a new sandbox has the requested properties', async (t) => {
  const mark = randomUUID()
  const before = Date.now()
  const sandbox = await sandboxFor(t, { metadata: { mark, 'a key': 'é=&,' }, envs: { COLOUR: 'green' } })
  assert.match(sandbox.sandboxId, /^[a-z0-9]+$/)
  assert.equal(await sandbox.isRunning(), true)
  const info = await sandbox.getInfo()
  assert.equal(info.sandboxId, sandbox.sandboxId)
  assert.deepEqual(info.metadata, { mark, 'a key': 'é=&,' })
  assert.equal(info.state, 'running')
  assert.ok(info.cpuCount > 0 && info.memoryMB > 0, JSON.stringify(info))
  assert.match(info.envdVersion, /^\d+\.\d+\.\d+$/)
  // Both clocks are of one machine; a second is given for rounding.
  assert.ok(Math.abs(info.startedAt.getTime() - before) < 10_000, `${info.startedAt}`)
  const left = info.endAt.getTime() - info.startedAt.getTime()
  assert.ok(Math.abs(left - 120_000) < 2_000, `${left}`)
  assert.equal((await sandbox.commands.run('echo $COLOUR')).stdout, 'green\n')
  for (const found of [await Sandbox.getInfo(sandbox.sandboxId), await Sandbox.getFullInfo(sandbox.sandboxId)]) {
    assert.deepEqual([found.sandboxId, found.templateId, found.state], [info.sandboxId, info.templateId, 'running'])
  }
})

test('what a sandbox may reach can be changed', async (t) => {
  const sandbox = await sandboxFor(t, { network: { allowOut: ['1.1.1.1'], maskRequestHost: 'localhost:${PORT}' } })
  await sandbox.updateNetwork({ allowOut: ['1.1.1.1', 'example.com'], denyOut: ['0.0.0.0/0'] })
  await assert.rejects(sandbox.updateNetwork({ denyOut: ['example.com'] }), SandboxError)
  await Sandbox.updateNetwork(sandbox.sandboxId, {})
  assert.equal(await sandbox.isRunning(), true)
})

test('a template is named by its alias', async (t) => {
  const sandbox = await Sandbox.create('base', { timeoutMs: 60_000 })
  t.after(() => sandbox.kill())
  assert.equal((await sandbox.getInfo()).name, 'base')
  await assert.rejects(Sandbox.create('no-such-template'), (refused) => {
    assert.ok(refused instanceof SandboxError)
    assert.match(refused.message, /^404: .*no-such-template/)
    return true
  })
})

test('connecting finds the same sandbox', async (t) => {
  const sandbox = await sandboxFor(t)
  await sandbox.commands.run('echo kept > kept')
  const again = await Sandbox.connect(sandbox.sandboxId)
  assert.equal(again.sandboxId, sandbox.sandboxId)
  assert.equal(await again.files.read('kept'), 'kept\n')
  assert.equal((await (await sandbox.connect()).commands.run('cat kept')).stdout, 'kept\n')
})

test('connecting prolongs and never shortens', async (t) => {
  const sandbox = await sandboxFor(t)
  const first = (await sandbox.getInfo()).endAt.getTime()
  await Sandbox.connect(sandbox.sandboxId, { timeoutMs: 10_000 })
  assert.equal((await sandbox.getInfo()).endAt.getTime(), first)
  await Sandbox.connect(sandbox.sandboxId, { timeoutMs: 600_000 })
  assert.ok((await sandbox.getInfo()).endAt.getTime() > first + 400_000)
})

test('a sandbox is paused and resumed', async (t) => {
  const sandbox = await sandboxFor(t)
  const command = await sandbox.commands.run('i=0; while :; do i=$((i+1)); echo $i > /tmp/n.new; mv /tmp/n.new /tmp/n; done', { background: true, timeoutMs: 0 })
  const count = async () => Number(await sandbox.files.read('/tmp/n'))
  await until(async () => (await sandbox.files.exists('/tmp/n')) && (await count()) > 0)
  const before = await count()
  // The stream of the command ends with an error, and does not hang.
  const ended = assert.rejects(command.wait())
  assert.equal(await sandbox.pause(), true)
  await ended
  assert.equal(await sandbox.pause(), false)
  assert.equal((await sandbox.getInfo()).state, 'paused')
  const headers = { 'X-API-Key': process.env.E2B_API_KEY }
  const detail = await request(process.env.RINGFENCE_ADDRESS, `/sandboxes/${sandbox.sandboxId}`, { headers })
  assert.equal(JSON.parse(detail.text).pauseStorage, process.env.RINGFENCE_PAUSE_STORAGE)
  assert.equal(await sandbox.isRunning(), false)
  await assert.rejects(sandbox.commands.run('true'))
  await sandbox.connect()
  await until(async () => (await count()) > before)
  for (const pause of [() => sandbox.betaPause(), () => Sandbox.pause(sandbox.sandboxId), () => Sandbox.betaPause(sandbox.sandboxId)]) {
    assert.equal(await pause(), true)
    const again = await Sandbox.connect(sandbox.sandboxId)
    assert.equal((await again.commands.run('echo alive')).stdout, 'alive\n')
  }
  assert.equal(await sandbox.commands.kill(command.pid), true)
  await assert.rejects(Sandbox.pause('i' + '0'.repeat(20)), NotFoundError)
})

test('a sandbox is paused at its deadline and resumed by its clients', async (t) => {
  const sandbox = await sandboxFor(t, { timeoutMs: 2_000, lifecycle: { onTimeout: 'pause', autoResume: true } })
  await until(async () => (await sandbox.getInfo()).state === 'paused')
  assert.equal((await sandbox.commands.run('echo awake')).stdout, 'awake\n')
  assert.equal((await sandbox.getInfo()).state, 'running')
})

test('the list is filtered, paged and complete', async (t) => {
  const mark = randomUUID()
  const made = []
  for (let n = 0; n < 5; n++) made.push((await sandboxFor(t, { metadata: { mark, n: `${n}` } })).sandboxId)
  const query = { metadata: { mark } }

  const whole = await all(Sandbox.list({ query }))
  assert.deepEqual(new Set(whole.map((item) => item.sandboxId)), new Set(made))
  assert.equal(whole.length, 5)

  const pages = Sandbox.list({ query, limit: 2 })
  const sizes = []
  const seen = []
  while (pages.hasNext) {
    const page = await pages.nextItems()
    sizes.push(page.length)
    seen.push(...page.map((item) => item.sandboxId))
  }
  assert.deepEqual(sizes, [2, 2, 1])
  assert.deepEqual(seen, whole.map((item) => item.sandboxId))
  await assert.rejects(pages.nextItems())

  const one = await all(Sandbox.list({ query: { metadata: { mark, n: '3' }, state: ['running'] } }))
  assert.deepEqual(one.map((item) => item.sandboxId), [made[3]])
  assert.equal(one[0].metadata.n, '3')
  assert.deepEqual(await all(Sandbox.list({ query: { metadata: { mark }, state: ['paused'] } })), [])
})

test('the order of the list can be turned round', async (t) => {
  const mark = randomUUID()
  for (let n = 0; n < 3; n++) await sandboxFor(t, { metadata: { mark } })
  const query = { metadata: { mark } }
  const ids = async (order) => (await all(Sandbox.list({ query, order }))).map((item) => item.sandboxId)
  assert.deepEqual(await ids('asc'), (await ids('desc')).reverse())
})

test('a killed sandbox is gone', async (t) => {
  const sandbox = await sandboxFor(t)
  assert.equal(await sandbox.kill(), true)
  assert.equal(await sandbox.kill(), false)
  assert.equal(await sandbox.isRunning(), false)
  await assert.rejects(sandbox.getInfo(), NotFoundError)
  await assert.rejects(Sandbox.connect(sandbox.sandboxId), NotFoundError)
  await assert.rejects(sandbox.setTimeout(10_000), NotFoundError)
  await assert.rejects(sandbox.commands.run('true'))
  assert.equal(await Sandbox.kill(sandbox.sandboxId), false)
})

test('a deadline can be moved, and ends the sandbox when it comes', async (t) => {
  const sandbox = await sandboxFor(t)
  const begun = Date.now()
  await sandbox.setTimeout(600_000)
  assert.ok((await sandbox.getInfo()).endAt.getTime() > begun + 590_000)
  await Sandbox.setTimeout(sandbox.sandboxId, 1_000)
  await until(async () => !(await sandbox.isRunning()), 'the deadline ended the sandbox')
  await until(() => Sandbox.getInfo(sandbox.sandboxId).then(() => false, (gone) => gone instanceof NotFoundError), 'it is not found')
})

test('failures are of the kinds that the SDK documents', async () => {
  await assert.rejects(Sandbox.create({ apiKey: `e2b_${'0'.repeat(40)}` }), AuthenticationError)
  await assert.rejects(Sandbox.getInfo('iaaaaaaaaaaaaaaaaaaaa'), NotFoundError)
  await assert.rejects(Sandbox.create({ timeoutMs: 1000 * 3600 * 24 * 365 }), (refused) => {
    assert.ok(refused instanceof InvalidArgumentError || refused instanceof SandboxError, `${refused}`)
    assert.match(refused.message, /400/)
    return true
  })
})

test('ten sandboxes at once', async (t) => {
  const boxes = await Promise.all(Array.from({ length: 10 }, () => sandboxFor(t)))
  const said = await Promise.all(boxes.map((box, n) => box.commands.run(`echo ${n}`)))
  assert.deepEqual(said.map((result) => result.stdout), boxes.map((_, n) => `${n}\n`))
  assert.equal(new Set(boxes.map((box) => box.sandboxId)).size, 10)
})

test('what a sandbox uses', async (t) => {
  const sandbox = await sandboxFor(t)
  const [first] = await until(async () => {
    const samples = await sandbox.getMetrics()
    return samples.length > 0 && samples
  }, 'it was measured')
  const { cpuCount, memoryMB } = await sandbox.getInfo()
  assert.deepEqual([first.cpuCount, first.memTotal], [cpuCount, memoryMB * 2 ** 20])
  assert.ok(first.memUsed > 0 && first.diskUsed > 0 && first.diskTotal > first.diskUsed, JSON.stringify(first))
  assert.ok(first.cpuUsedPct >= 0 && Math.abs(first.timestamp.getTime() - Date.now()) < 60_000)
  const later = new Date(Date.now() + 60_000)
  assert.deepEqual(await Sandbox.getMetrics(sandbox.sandboxId, { start: later }), [])
  assert.deepEqual((await Sandbox.getMetrics(sandbox.sandboxId, { end: later }))[0], first)
})

test('a snapshot has the files of a sandbox', async (t) => {
  const sandbox = await sandboxFor(t)
  await sandbox.files.write('f', 'kept')
  const name = `s${randomUUID().slice(0, 8)}`
  const made = [await sandbox.createSnapshot(), await Sandbox.createSnapshot(sandbox.sandboxId, { name })]
  assert.match(made[1].snapshotId, new RegExp(`/${name}:default$`))
  await sandbox.files.write('f', 'changed')
  for (const { snapshotId } of made) {
    const child = await Sandbox.create(snapshotId, { timeoutMs: 60_000 })
    assert.equal(await child.files.read('f'), 'kept')
    await child.kill()
  }
  const ids = made.map((snapshot) => snapshot.snapshotId).reverse()
  for (const paginator of [sandbox.listSnapshots({ limit: 1 }), Sandbox.listSnapshots({ sandboxId: sandbox.sandboxId })]) {
    assert.deepEqual((await all(paginator)).map((snapshot) => snapshot.snapshotId), ids)
  }
  for (const { snapshotId } of made) {
    assert.equal(await Sandbox.deleteSnapshot(snapshotId), true)
    assert.equal(await Sandbox.deleteSnapshot(snapshotId), false)
  }
})
