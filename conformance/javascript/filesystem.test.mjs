// Directories: looked at, listed, made, moved and removed.

import assert from 'node:assert/strict'
import { test } from 'node:test'
import { FileNotFoundError, FileType, InvalidArgumentError, SandboxError } from 'e2b'
import { asRoot, sandboxFor } from './harness.mjs'

test('what is known of a file', async (t) => {
  const sandbox = await sandboxFor(t)
  const { files } = sandbox
  const before = Date.now()
  await files.write('a.txt', 'content')
  const info = await files.getInfo('a.txt')
  const { name, path, type, size, mode, permissions, owner, group, symlinkTarget } = info
  assert.deepEqual(
    [name, path, type, size, mode, permissions, owner, group, symlinkTarget],
    ['a.txt', '/home/user/a.txt', FileType.FILE, 7, 0o644, '-rw-r--r--', 'user', 'user', undefined],
  )
  assert.ok(Math.abs(info.modifiedTime.getTime() - before) < 10_000, `${info.modifiedTime}`)
  const directory = await files.getInfo('/home/user')
  assert.deepEqual([directory.name, directory.type, directory.permissions[0]], ['user', FileType.DIR, 'd'])
  const temporary = await files.getInfo('/tmp')
  assert.deepEqual([temporary.permissions, temporary.mode, temporary.owner], ['dtrwxrwxrwx', 0o777, 'root'])
  await assert.rejects(files.getInfo('/no/such'), FileNotFoundError)
})

test('links are described by what they lead to', async (t) => {
  const sandbox = await sandboxFor(t)
  await sandbox.commands.run('mkdir real; echo x > real/file; ln -s real link; ln -s nowhere broken; ln -s real/file short')
  const link = await sandbox.files.getInfo('link')
  assert.deepEqual([link.type, link.symlinkTarget, link.permissions[0]], [FileType.DIR, '/home/user/real', 'L'])
  const short = await sandbox.files.getInfo('short')
  assert.deepEqual([short.type, short.symlinkTarget, short.path], [FileType.FILE, '/home/user/real/file', '/home/user/short'])
  assert.equal(await sandbox.files.exists('broken'), true)
  const listed = await sandbox.files.list('link')
  assert.deepEqual(listed.map((entry) => entry.path), ['/home/user/link/file'])
})

test('what exists', async (t) => {
  const { files } = await sandboxFor(t)
  await files.write('here', 'x')
  assert.deepEqual(await Promise.all(['here', '/home/user/here', '/home', '/no'].map((path) => files.exists(path))), [true, true, true, false])
})

test('directories are made once, with what is above them', async (t) => {
  const sandbox = await sandboxFor(t)
  const { files } = sandbox
  assert.equal(await files.makeDir('one/two/three'), true)
  assert.equal(await files.makeDir('one/two/three'), false)
  assert.equal(await files.makeDir('/opt/of-root', { user: 'root' }), true)
  assert.equal(
    await asRoot(sandbox, "stat -c '%U %a' /home/user/one /home/user/one/two/three /opt/of-root"),
    'user 755\nuser 755\nroot 755\n',
  )
  await files.write('file', 'x')
  await assert.rejects(files.makeDir('file'), InvalidArgumentError)
  await assert.rejects(files.makeDir('file/below'), SandboxError)
})

test('lists are sorted and as deep as asked for', async (t) => {
  const { files, commands } = await sandboxFor(t)
  await commands.run('mkdir -p top/b/deep top/a top/empty; touch top/z top/B top/a/1 top/b/deep/2 top/.hidden')
  const names = async (options) => (await files.list('top', options)).map((entry) => entry.path.slice('/home/user/top/'.length))
  assert.deepEqual(await names(), ['.hidden', 'B', 'a', 'b', 'empty', 'z'])
  assert.deepEqual(await names({ depth: 2 }), ['.hidden', 'B', 'a', 'a/1', 'b', 'b/deep', 'empty', 'z'])
  assert.deepEqual(await names({ depth: 10 }), ['.hidden', 'B', 'a', 'a/1', 'b', 'b/deep', 'b/deep/2', 'empty', 'z'])
  const [hidden, , a] = await files.list('top')
  assert.deepEqual([hidden.type, hidden.size, a.type, a.owner], [FileType.FILE, 0, FileType.DIR, 'user'])
  assert.deepEqual(await files.list('top/empty'), [])
  await assert.rejects(files.list('/no/such'), FileNotFoundError)
  await assert.rejects(files.list('top/z'), InvalidArgumentError)
})

test('a list of two thousand entries', async (t) => {
  const { files, commands } = await sandboxFor(t)
  await commands.run('mkdir big && cd big && seq -f %05g 2000 | xargs touch')
  const entries = await files.list('big')
  assert.equal(entries.length, 2000)
  assert.deepEqual([entries[0].name, entries[1999].name], ['00001', '02000'])
})

test('moved and removed', async (t) => {
  const { files } = await sandboxFor(t)
  await files.write('from', 'content')
  await files.write('onto', 'old')
  const moved = await files.rename('from', 'new/place/to')
  assert.deepEqual([moved.name, moved.path, moved.type, moved.size], ['to', '/home/user/new/place/to', FileType.FILE, 7])
  assert.equal(await files.exists('from'), false)
  await files.rename('new/place/to', 'onto')
  assert.equal(await files.read('onto'), 'content')
  await assert.rejects(files.rename('from', 'anywhere'), FileNotFoundError)
  await files.rename('new', 'renamed')
  assert.deepEqual((await files.list('renamed')).map((entry) => entry.name), ['place'])

  await files.write('renamed/place/full', 'x')
  await files.remove('renamed')
  assert.equal(await files.exists('renamed'), false)
  await files.remove('onto')
  await files.remove('never/was')
  await assert.rejects(files.remove('/proc/version'), SandboxError)
})

test('metadata written with a file is returned with it', async (t) => {
  const { files } = await sandboxFor(t)
  const written = await files.write('marked', 'x', { metadata: { origin: 'suite' } })
  assert.deepEqual(written.metadata, { origin: 'suite' })
  assert.deepEqual((await files.getInfo('marked')).metadata, { origin: 'suite' })
  assert.deepEqual((await files.list('.')).find((entry) => entry.name === 'marked').metadata, { origin: 'suite' })
})
