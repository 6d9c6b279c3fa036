// Forks: sandboxes that go on from where another one is.

import assert from 'node:assert/strict'
import { test } from 'node:test'
import { Sandbox } from 'e2b'
import { sandboxFor, until } from './harness.mjs'

const COUNT = 'i=0; while :; do i=$((i+1)); echo $i > /tmp/n.new; mv /tmp/n.new /tmp/n; sleep 0.02; done'

test('forks go on by themselves', async (t) => {
  const parent = await sandboxFor(t, { metadata: { of: 'the parent' } })
  await parent.commands.run(COUNT, { background: true, timeoutMs: 0 })
  const count = async (sandbox) => Number(await sandbox.files.read('/tmp/n'))
  await until(() => parent.files.exists('/tmp/n'), 'it counts')
  const before = await count(parent)
  const children = await parent.fork({ count: 2, timeoutMs: 60_000 })
  children.push(...(await Sandbox.fork(parent.sandboxId, { timeoutMs: 60_000 })))
  for (const child of children) if (child instanceof Sandbox) t.after(() => child.kill())
  assert.equal(new Set([parent, ...children].map((sandbox) => sandbox.sandboxId)).size, 4)
  for (const sandbox of [parent, ...children]) {
    const seen = await count(sandbox)
    assert.ok(seen >= before, `${seen}`)
    await until(async () => (await count(sandbox)) > seen, 'it counts on')
    assert.equal((await sandbox.commands.run('echo $E2B_SANDBOX_ID')).stdout, `${sandbox.sandboxId}\n`)
    assert.deepEqual((await sandbox.getInfo()).metadata, { of: 'the parent' })
  }
  await children[0].files.write('/tmp/own', 'x')
  assert.equal(await parent.files.exists('/tmp/own'), false)
})
