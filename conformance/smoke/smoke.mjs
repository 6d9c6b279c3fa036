// What every program does with an older SDK. RINGFENCE_FILES says whether the way taken carries files: this version
// sends no sandbox id with them, so that over HTTP nothing says which sandbox is meant.

import assert from 'node:assert/strict'
import { test } from 'node:test'
import { CommandExitError, NotFoundError, Sandbox } from 'e2b'

const carriesFiles = process.env.RINGFENCE_FILES === 'yes'

async function sandboxFor(t, options = {}) {
  const sandbox = await Sandbox.create({ timeoutMs: 120_000, ...options })
  t.after(() => sandbox.kill())
  return sandbox
}

async function listed() {
  const pages = Sandbox.list()
  const found = []
  while (pages.hasNext) found.push(...(await pages.nextItems()).map((item) => item.sandboxId))
  return found
}

test('commands', async (t) => {
  const sandbox = await sandboxFor(t)
  assert.equal((await sandbox.commands.run('echo hello')).stdout, 'hello\n')
  await assert.rejects(sandbox.commands.run('exit 3'), (failed) => {
    assert.ok(failed instanceof CommandExitError)
    return failed.exitCode === 3
  })
  const sleeper = await sandbox.commands.run('exec sleep 1000', { background: true })
  assert.equal(await sleeper.kill(), true)
  assert.ok((await sandbox.commands.list()).every((process) => process.pid !== sleeper.pid))
})

test('connecting', async (t) => {
  const sandbox = await sandboxFor(t)
  await sandbox.commands.run('echo here > mark')
  const again = await Sandbox.connect(sandbox.sandboxId, { timeoutMs: 300_000 })
  assert.equal((await again.commands.run('cat mark')).stdout, 'here\n')
  assert.equal((await again.getInfo()).sandboxId, sandbox.sandboxId)
  await assert.rejects(Sandbox.connect('i' + '0'.repeat(20)), NotFoundError)
})

test('files', async (t) => {
  const sandbox = await sandboxFor(t)
  await sandbox.files.makeDir('notes')
  assert.equal(await sandbox.files.exists('notes'), true)
  if (carriesFiles) {
    await sandbox.files.write('notes/a.txt', 'some text')
    assert.equal(await sandbox.files.read('notes/a.txt'), 'some text')
    assert.deepEqual((await sandbox.files.list('notes')).map((entry) => entry.name), ['a.txt'])
    assert.equal(await sandbox.isRunning(), true)
  }
})

test('the list and the end', async () => {
  const sandbox = await Sandbox.create({ timeoutMs: 120_000 })
  assert.ok((await listed()).includes(sandbox.sandboxId))
  // In this version, `kill` of an instance returns nothing.
  await sandbox.kill()
  assert.ok(!(await listed()).includes(sandbox.sandboxId))
  assert.equal(await Sandbox.kill(sandbox.sandboxId), false)
  if (carriesFiles) assert.equal(await sandbox.isRunning(), false)
})
