// What a page of another origin does with the SDK, and what browsers refuse it. Bundled by the test beside this file,
// which runs one function of `tests` after the other.

import { AuthenticationError, CommandExitError, FileNotFoundError, FileType, NotFoundError, Sandbox, SandboxError } from 'e2b'

/** As the options of the SDK: the key, and how the platform is reached. */
const options = JSON.parse(document.querySelector('#options').textContent)
const api = options.apiUrl ?? `https://api.${options.domain}`
const key = { 'X-API-Key': options.apiKey }

function same(got, want) {
  if (JSON.stringify(got) !== JSON.stringify(want)) throw new Error(`got ${JSON.stringify(got)}, want ${JSON.stringify(want)}`)
}

async function fails(promise, kind) {
  const error = await promise.then(
    (value) => new Error(`it did not fail: ${JSON.stringify(value)}`),
    (error) => error,
  )
  if (!(error instanceof kind)) throw error
  return error
}

/** Browsers tell a page no more than this of a request that the other side does not allow. */
async function isRefused(promise) {
  same((await fails(promise, TypeError)).message, 'Failed to fetch')
}

async function until(condition, what) {
  const deadline = Date.now() + 20_000
  for (;;) {
    const value = await condition()
    if (value) return value
    if (Date.now() > deadline) throw new Error(`still not so: ${what}`)
    await new Promise((wake) => setTimeout(wake, 20))
  }
}

let shared
/** One sandbox for all tests but those that end theirs. */
async function sandbox() {
  shared ??= await Sandbox.create({ ...options, timeoutMs: 120_000 })
  return shared
}

const http = (host) => `${options.apiUrl ? 'http' : 'https'}://${host}`

/** Starts the server whose text the page has, and waits for it. */
async function server() {
  const box = await sandbox()
  const url = http(box.getHost(8000))
  if (!(await box.files.exists('/tmp/server.py'))) {
    await box.files.write('/tmp/server.py', document.querySelector('#server').textContent)
    await box.commands.run('exec python3 /tmp/server.py 8000', { background: true, timeoutMs: 0 })
    await until(() => box.commands.run('ss -ltnH').then(({ stdout }) => stdout.includes(':8000 ')), 'the server listens')
  }
  return url
}

globalThis.tests = {
  async a_sandbox_is_made_used_and_ended() {
    const box = await Sandbox.create({ ...options, timeoutMs: 120_000, metadata: { from: 'a page' } })
    const listed = await Sandbox.list({ ...options, query: { metadata: { from: 'a page' } } }).nextItems()
    same(listed.map(({ sandboxId }) => sandboxId), [box.sandboxId])
    const again = await Sandbox.connect(box.sandboxId, options)
    same((await again.commands.run('echo "from $0"')).stdout, 'from /bin/bash\n')
    await box.setTimeout(60_000)
    same(await box.isRunning(), true)
    same((await box.getInfo()).metadata, { from: 'a page' })
    same(Array.isArray(await box.getMetrics()), true)
    same(await box.kill(), true)
    same(await box.isRunning(), false)
    same(await Sandbox.kill(box.sandboxId, options), false)
    await fails(box.getInfo(), NotFoundError)
    // Also what the proxy says of a sandbox that is gone is readable.
    await fails(box.files.list('/'), SandboxError)
    await fails(box.commands.run('true'), SandboxError)
  },

  async commands_stream() {
    const box = await sandbox()
    const seen = []
    const handle = await box.commands.run('echo one; read line; echo "$line" >&2; exit 3', {
      background: true,
      stdin: true,
      onStdout: (data) => seen.push(['out', data]),
      onStderr: (data) => seen.push(['err', data]),
    })
    await until(() => seen.length === 1, 'the first line arrives while the command runs')
    await box.commands.sendStdin(handle.pid, 'two\n')
    const error = await fails(handle.wait(), CommandExitError)
    same([error.exitCode, seen], [3, [['out', 'one\n'], ['err', 'two\n']]])
    const long = await box.commands.run('sleep 60', { background: true })
    same((await box.commands.list()).some(({ pid }) => pid === long.pid), true)
    same(await long.kill(), true)
  },

  async files() {
    const box = await sandbox()
    await box.files.write('dir/text', 'first')
    same(await box.files.read('dir/text'), 'first')
    const bytes = Uint8Array.from({ length: 100_000 }, (_, at) => at * 7)
    await box.files.write('dir/bytes', new Blob([bytes]))
    same(Array.from(await box.files.read('dir/bytes', { format: 'bytes' })).join(), Array.from(bytes).join())
    same((await box.files.list('dir')).map(({ name, type }) => [name, type]).sort(), [['bytes', FileType.FILE], ['text', FileType.FILE]])
    await box.files.rename('dir/text', 'dir/other')
    same((await box.files.getInfo('dir/other')).size, 5)
    await box.files.remove('dir/other')
    await fails(box.files.read('dir/other'), FileNotFoundError)
  },

  async changes_are_watched() {
    const box = await sandbox()
    await box.files.makeDir('watched')
    const seen = []
    const handle = await box.files.watchDir('watched', (event) => seen.push(`${event.type} ${event.name}`))
    await box.files.write('watched/new', 'x')
    await until(() => seen.includes('create new'), 'the new file is reported')
    await handle.stop()
  },

  async a_terminal() {
    const box = await sandbox()
    let screen = ''
    const terminal = await box.pty.create({ cols: 80, rows: 24, onData: (data) => (screen += new TextDecoder().decode(data)) })
    await box.pty.sendInput(terminal.pid, new TextEncoder().encode('echo $((6 * 7))\n'))
    await until(() => screen.includes('42'), 'the terminal answers')
    await box.pty.resize(terminal.pid, { cols: 100, rows: 30 })
    await box.pty.kill(terminal.pid)
  },

  async signed_links() {
    const box = await sandbox()
    const form = new FormData()
    form.append('file', new Blob(['by a form']), 'any')
    const up = await fetch(await box.uploadUrl('linked', { useSignatureExpiration: 60 }), { method: 'POST', body: form })
    same([up.status, (await up.json())[0].path], [200, '/home/user/linked'])
    const url = await box.downloadUrl('linked', { useSignatureExpiration: 60 })
    same(await (await fetch(url)).text(), 'by a form')
    // A page may read why one is refused.
    const forged = await fetch(url.replace(/signature=[^&]*/, 'signature=v1_forged'))
    same([forged.status, typeof (await forged.json()).message], [401, 'string'])
  },

  async errors_are_readable() {
    await fails(Sandbox.create({ ...options, apiKey: `e2b_${'0'.repeat(40)}` }), AuthenticationError)
    await fails(Sandbox.connect('i0123456789abcdefghij', options), NotFoundError)
    const none = await fetch(`${api}/sandboxes`)
    same([none.status, (await none.json()).code], [401, 401])
    same((await fetch(`${api}/no/such/path`, { headers: key })).status, 404)
  },

  async only_headers_that_are_named_may_be_sent() {
    same((await fetch(`${api}/sandboxes`, { headers: { ...key, lang: 'js' } })).status, 200)
    await isRefused(fetch(`${api}/sandboxes`, { headers: { ...key, 'X-Other': '1' } }))
  },

  async only_headers_that_are_named_may_be_read() {
    const { headers } = await fetch(`${api}/v2/sandboxes`, { headers: key })
    same(headers.get('x-request-id') !== null, true)
    // The browser has it, but it is not the page's.
    same(headers.get('date'), null)
  },

  async cookies_and_passwords_of_the_browser_are_not_accepted() {
    same((await fetch(`${api}/sandboxes`, { headers: key, credentials: 'omit' })).status, 200)
    await isRefused(fetch(`${api}/sandboxes`, { headers: key, credentials: 'include' }))
  },

  async only_methods_that_are_named_reach_the_agent() {
    const box = await sandbox()
    await box.files.write('method', 'x')
    const url = await box.downloadUrl('method')
    same((await fetch(url)).status, 200)
    await isRefused(fetch(url, { method: 'PROPFIND' }))
  },

  async servers_inside_decide_themselves() {
    const url = await server()
    same(await (await fetch(`${url}/open`)).text(), 'read by anyone')
    await isRefused(fetch(`${url}/closed`))
    // Questions before a request are the server's to answer too.
    same(await (await fetch(`${url}/asked`, { method: 'PUT', headers: { 'X-Mine': 'a' }, body: 'b' })).text(), 'PUT a b')
    await isRefused(fetch(`${url}/asked`, { method: 'PUT', headers: { 'X-Yours': 'a' }, body: 'b' }))
  },

  async server_sent_events() {
    const source = new EventSource(`${await server()}/events`)
    const seen = []
    try {
      await new Promise((done, fail) => {
        setTimeout(() => fail(new Error(`only ${seen}`)), 20_000)
        source.onmessage = ({ data, lastEventId }) => {
          seen.push(`${lastEventId}: ${data}`)
          if (seen.length === 4) done()
        }
      })
    } finally {
      source.close()
    }
    // The server ends each stream after two, and the browser comes back and says where it was.
    same(seen, ['1: after 0', '2: after 0', '3: after 2', '4: after 2'])
  },

  async websockets() {
    const socket = new WebSocket(`${(await server()).replace('http', 'ws')}/ws`)
    socket.binaryType = 'arraybuffer'
    const received = []
    socket.onmessage = ({ data }) => received.push(typeof data === 'string' ? data : data.byteLength)
    await new Promise((done, fail) => {
      socket.onopen = done
      socket.onerror = () => fail(new Error('the connection failed'))
    })
    socket.send('text')
    socket.send(new Uint8Array(60_000))
    await until(() => received.length === 2, 'both come back')
    same(received, ['text', 60_000])
    socket.close(1000)
    await new Promise((done) => (socket.onclose = done))
  },

  async the_last_one_ends_the_sandbox() {
    same(await (await sandbox()).kill(), true)
  },
}
