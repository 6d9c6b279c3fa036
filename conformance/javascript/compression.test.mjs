// Files that are compressed on the way to the sandbox.

import assert from 'node:assert/strict'
import { test } from 'node:test'
import { sandboxFor } from './harness.mjs'

test('a compressed upload is stored as it was', async (t) => {
  const { files, commands } = await sandboxFor(t)
  const text = 'the same line again\n'.repeat(100_000)
  await files.write('zipped', text, { gzip: true })
  assert.equal((await commands.run('wc -c < zipped')).stdout, `${text.length}\n`)
  assert.equal(await files.read('zipped', { gzip: true }), text)
  const written = await files.write([{ path: 'one', data: 'ONE' }, { path: 'two', data: new Blob(['TWO']) }], { gzip: true })
  assert.deepEqual(written.map((item) => item.path), ['/home/user/one', '/home/user/two'])
  assert.equal((await commands.run('cat one two')).stdout, 'ONETWO')
})
