// Files: every form in which they are written and read, and signed links that work without a header.

import assert from 'node:assert/strict'
import { createHash, randomBytes } from 'node:crypto'
import { test } from 'node:test'
import { AuthenticationError, FileNotFoundError, InvalidArgumentError, NotFoundError } from 'e2b'
import { asRoot, sandboxFor } from './harness.mjs'

const hash = (data) => createHash('sha256').update(data).digest('hex')

test('written and read in every form', async (t) => {
  const { files } = await sandboxFor(t)
  const text = 'héllo 🦀\n'
  const data = Buffer.from(text)
  const exact = data.buffer.slice(data.byteOffset, data.byteOffset + data.byteLength)
  const forms = {
    text,
    buffer: exact,
    blob: new Blob([data]),
    stream: new ReadableStream({
      start(controller) {
        controller.enqueue(new Uint8Array(exact, 0, 4))
        controller.enqueue(new Uint8Array(exact, 4))
        controller.close()
      },
    }),
  }
  for (const [name, form] of Object.entries(forms)) {
    const written = await files.write(name, form)
    assert.deepEqual([written.path, written.name, written.type], [`/home/user/${name}`, name, 'file'])
    assert.equal(await files.read(name), text)
    assert.deepEqual(Buffer.from(await files.read(name, { format: 'bytes' })), data)
    assert.equal(await (await files.read(name, { format: 'blob' })).text(), text)
    const chunks = []
    for await (const chunk of await files.read(name, { format: 'stream' })) chunks.push(chunk)
    assert.deepEqual(Buffer.concat(chunks), data)
  }
})

test('empty files, and files written over', async (t) => {
  const { files } = await sandboxFor(t)
  await files.write('a', 'a long first content')
  await files.write('a', 'short')
  assert.equal(await files.read('a'), 'short')
  await files.write('a', '')
  assert.equal(await files.read('a'), '')
  assert.equal((await files.read('a', { format: 'bytes' })).length, 0)
})

test('odd names', async (t) => {
  const { files } = await sandboxFor(t)
  for (const name of ['with space', 'ünï-日本', "quote'\"s", 'a+b&c=d%20;e?#', '-dash', 'back\\slash']) {
    const written = await files.write(`/home/user/odd/${name}`, name)
    assert.equal(written.path, `/home/user/odd/${name}`)
    assert.equal(await files.read(`odd/${name}`), name)
  }
})

test('owner, mode and directories made on the way', async (t) => {
  const sandbox = await sandboxFor(t)
  await sandbox.files.write('deep/er/file', 'x')
  await sandbox.files.write('/opt/mine/file', 'x', { user: 'root' })
  assert.equal(
    await asRoot(sandbox, "stat -c '%U:%G %a' /home/user/deep /home/user/deep/er/file /opt/mine /opt/mine/file"),
    'user:user 755\nuser:user 644\nroot:root 755\nroot:root 644\n',
  )
  await sandbox.files.write('~/in-home', 'x', { user: 'root' })
  assert.equal(await asRoot(sandbox, 'cat /root/in-home'), 'x')
})

test('many files in one call', async (t) => {
  const { files, commands } = await sandboxFor(t)
  const entries = Array.from({ length: 20 }, (_, n) => ({ path: `/home/user/many/${n}`, data: `content ${n}` }))
  const written = await files.write(entries)
  assert.deepEqual(written.map((item) => item.path), entries.map((item) => item.path))
  assert.equal((await commands.run('ls many | wc -l; cat many/7')).stdout, '20\ncontent 7')
  const mixed = await files.writeFiles([
    { path: 'text', data: 'text' },
    { path: 'bytes', data: new Uint8Array([0, 255]).buffer },
    { path: 'blob', data: new Blob(['blob']) },
  ])
  assert.deepEqual(mixed.map((item) => item.name), ['text', 'bytes', 'blob'])
  assert.deepEqual([...(await files.read('bytes', { format: 'bytes' }))], [0, 255])
  assert.deepEqual(await files.write([]), [])
})

test('as a form and as a stream of octets', async (t) => {
  const { files } = await sandboxFor(t)
  const text = 'the same line again\n'.repeat(100_000)
  for (const useOctetStream of [true, false]) {
    await files.write('plain', text, { useOctetStream })
    assert.equal(await files.read('plain'), text)
    assert.equal(await files.read('plain', { gzip: true }), text)
  }
})

test('64 MiB come back byte for byte', async (t) => {
  const { files, commands } = await sandboxFor(t)
  const data = randomBytes(64 * 1024 * 1024)
  const begun = performance.now()
  await files.write('large', new Blob([data]))
  const wrote = performance.now()
  const read = await files.read('large', { format: 'bytes' })
  const done = performance.now()
  assert.equal(hash(read), hash(data))
  assert.equal((await commands.run('sha256sum < large')).stdout.split(' ')[0], hash(data))
  t.diagnostic(`64 MiB: write ${((wrote - begun) / 1000).toFixed(2)} s, read ${((done - wrote) / 1000).toFixed(2)} s`)
})

test('failures name what failed', async (t) => {
  const { files } = await sandboxFor(t)
  await assert.rejects(files.read('/no/such/file'), (missing) => {
    assert.ok(missing instanceof FileNotFoundError && missing instanceof NotFoundError)
    assert.match(missing.message, /\/no\/such\/file/)
    return true
  })
  await assert.rejects(files.read('/tmp'), InvalidArgumentError)
  await assert.rejects(files.write('/tmp', 'x'), InvalidArgumentError)
  await assert.rejects(files.read('x', { user: 'nobody-here' }), AuthenticationError)
})

test('signed links carry files without any header', async (t) => {
  const sandbox = await sandboxFor(t)
  const form = new FormData()
  form.append('file', new Blob(['by link']), 'linked')
  const posted = await fetch(await sandbox.uploadUrl('linked'), { method: 'POST', body: form })
  assert.equal(posted.status, 200, await posted.clone().text())
  assert.equal((await posted.json())[0].path, '/home/user/linked')
  assert.equal(await sandbox.files.read('linked'), 'by link')

  const url = await sandbox.downloadUrl('linked', { useSignatureExpiration: 60 })
  const got = await fetch(url)
  assert.deepEqual([got.status, await got.text()], [200, 'by link'])
  const part = await fetch(url, { headers: { Range: 'bytes=3-' } })
  assert.deepEqual([part.status, await part.text()], [206, 'link'])

  await sandbox.files.write('/root/secret', 'of root', { user: 'root' })
  const ofRoot = await fetch(await sandbox.downloadUrl('/root/secret', { user: 'root' }))
  assert.deepEqual([ofRoot.status, await ofRoot.text()], [200, 'of root'])
})

test('links that were changed or have expired are refused', async (t) => {
  const sandbox = await sandboxFor(t)
  await sandbox.files.write('mine', 'x')
  await sandbox.files.write('other', 'y')
  const url = new URL(await sandbox.downloadUrl('mine', { useSignatureExpiration: 60 }))
  const refused = async (change) => {
    const changed = new URL(url)
    change(changed.searchParams)
    const answer = await fetch(changed)
    await answer.arrayBuffer()
    assert.equal(answer.status, 401, `${changed.search}`)
  }
  await refused((query) => query.set('path', 'other'))
  await refused((query) => query.set('signature_expiration', '99999999999'))
  await refused((query) => query.set('username', 'root'))
  const upload = await fetch(new URL(url), { method: 'POST', body: new FormData() })
  assert.equal(upload.status, 401)
  // Without a signature, the sandbox of a request to the shared address is unknown.
  url.searchParams.delete('signature')
  assert.ok([401, 404].includes((await fetch(url)).status))
  const expired = await fetch(await sandbox.downloadUrl('mine', { useSignatureExpiration: -10 }))
  assert.equal(expired.status, 401)
})
