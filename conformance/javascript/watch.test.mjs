// Watches: every kind of change, directories that are made meanwhile, and the end of a watch.

import assert from 'node:assert/strict'
import { test } from 'node:test'
import { FileNotFoundError, FileType, FilesystemEventType, InvalidArgumentError } from 'e2b'
import { sandboxFor, until } from './harness.mjs'

const { CREATE, WRITE, REMOVE, RENAME, CHMOD } = FilesystemEventType

/** A watch that collects, and ends with its test. */
async function watched(t, files, path, options) {
  const events = []
  const handle = await files.watchDir(path, (event) => void events.push(event), { timeoutMs: 0, ...options })
  t.after(() => handle.stop())
  const heard = (type, name) =>
    until(
      () => events.find((event) => event.type === type && event.name === name),
      () => `${type} ${name} is heard: ${JSON.stringify(events)}`,
    )
  return { events, handle, heard }
}

test('a watch reports every kind of change', async (t) => {
  const { files, commands } = await sandboxFor(t)
  await files.makeDir('dir')
  const { events, handle, heard } = await watched(t, files, 'dir')
  await files.write('dir/new', 'x')
  await heard(CREATE, 'new')
  await heard(WRITE, 'new')
  assert.deepEqual([events[0].type, events[0].name, events[0].entry], [CREATE, 'new', undefined])
  await commands.run('chmod 600 dir/new')
  await heard(CHMOD, 'new')
  await files.rename('dir/new', 'dir/other')
  await heard(RENAME, 'new')
  await heard(CREATE, 'other')
  await files.remove('dir/other')
  await heard(REMOVE, 'other')
  await files.makeDir('dir/sub')
  await heard(CREATE, 'sub')
  await files.write('dir/sub/unseen', 'x')
  await handle.stop()
  const count = events.length
  await files.write('dir/late', 'x')
  assert.equal(events.slice(count).some((event) => event.name === 'late'), false)
  assert.equal(events.some((event) => event.name.includes('unseen')), false)
})

test('a recursive watch follows directories that are made meanwhile', async (t) => {
  const { files } = await sandboxFor(t)
  await files.makeDir('dir/old')
  const { heard } = await watched(t, files, 'dir', { recursive: true })
  await files.write('dir/old/file', 'x')
  await heard(CREATE, 'old/file')
  await files.makeDir('dir/new')
  await heard(CREATE, 'new')
  await files.write('dir/new/file', 'x')
  await heard(WRITE, 'new/file')
  await files.makeDir('dir/new/deeper')
  await heard(CREATE, 'new/deeper')
  await files.write('dir/new/deeper/file', 'x')
  await heard(WRITE, 'new/deeper/file')
})

test('events carry the entry when asked to', async (t) => {
  const { files } = await sandboxFor(t)
  await files.makeDir('dir')
  const { events, heard } = await watched(t, files, 'dir', { includeEntry: true })
  await files.write('dir/new', 'content')
  const created = await heard(CREATE, 'new')
  assert.deepEqual([created.entry.path, created.entry.type], ['/home/user/dir/new', FileType.FILE])
  await files.remove('dir/new')
  const removed = await heard(REMOVE, 'new')
  assert.equal(removed.entry, undefined)
  assert.ok(events.length >= 3)
})

test('what cannot be watched', async (t) => {
  const { files } = await sandboxFor(t)
  await files.write('file', 'x')
  await assert.rejects(files.watchDir('/no/such', () => {}), FileNotFoundError)
  await assert.rejects(files.watchDir('file', () => {}), InvalidArgumentError)
})

test('the end of the sandbox ends a watch', async (t) => {
  const sandbox = await sandboxFor(t)
  let ended
  const exited = new Promise((resolve) => (ended = resolve))
  await sandbox.files.watchDir('/tmp', () => {}, { timeoutMs: 0, onExit: ended })
  await sandbox.kill()
  assert.ok((await exited) instanceof Error)
})
