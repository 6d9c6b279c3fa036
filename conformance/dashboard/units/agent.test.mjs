// The Connect client against a real server: envelopes split at every byte, bounds, errors, the end by a signal.

import assert from 'node:assert/strict'
import http from 'node:http'
import { after, before, test } from 'node:test'
import { asset } from './assets.mjs'

const { AgentError, Envelopes, MESSAGE_MAX, bounded, call, envelope, fromBase64, stream, toBase64, userHeaders } = await asset('agent.js')

let server
let agent
// What the next request is answered with, and the requests so far.
let answer
const requests = []

before(async () => {
  server = http.createServer(async (request, response) => {
    const chunks = []
    for await (const chunk of request) chunks.push(chunk)
    requests.push({ url: request.url, headers: request.headers, body: Buffer.concat(chunks) })
    await answer(response)
  })
  await new Promise((resolve) => server.listen(0, '127.0.0.1', resolve))
  agent = `http://127.0.0.1:${server.address().port}/dashboard/agent/i1`
})
after(() => {
  server.closeAllConnections()
  server.close()
})

const STREAM = { 'Content-Type': 'application/connect+json' }
const join = (...parts) => Buffer.concat(parts)
const raw = (flags, text) => join(Buffer.from([flags]), Buffer.from(Uint32Array.of(text.length).buffer).reverse(), Buffer.from(text))

/** Answers with a stream of these bytes. */
function streams(bytes, { ends = true } = {}) {
  answer = (response) => {
    response.writeHead(200, STREAM)
    if (ends) response.end(bytes)
    else response.write(bytes)
  }
}

async function collect(events) {
  const out = []
  for await (const event of events) out.push(event)
  return out
}

function fails(promise, code, message) {
  return assert.rejects(promise, (error) => {
    assert.ok(error instanceof AgentError, `${error}`)
    assert.equal(error.code, code)
    assert.match(error.message, message)
    return true
  })
}

test('an envelope is flags, a length and JSON', () => {
  assert.deepEqual([...envelope({ a: 'ü' }, 2)], [2, 0, 0, 0, 10, ...Buffer.from('{"a":"ü"}')])
})

test('envelopes are the same wherever the chunks are cut', () => {
  const messages = [{}, { text: 'x'.repeat(300) }, { n: 1 }]
  const bytes = join(...messages.map((message, at) => envelope(message, at)))
  const read = (...chunks) => {
    const envelopes = new Envelopes()
    const out = chunks.flatMap((chunk) => envelopes.push(chunk))
    assert.equal(envelopes.isPartial, false)
    return out.map(({ flags, payload }) => [flags, JSON.parse(Buffer.from(payload))])
  }
  const expected = messages.map((message, at) => [at, message])
  for (let cut = 0; cut <= bytes.length; cut += 1) assert.deepEqual(read(bytes.subarray(0, cut), bytes.subarray(cut)), expected)
  assert.deepEqual(read(...Array.from(bytes, (byte) => Uint8Array.of(byte))), expected)
})

test('an empty payload ends at once', () => {
  assert.deepEqual(new Envelopes().push(Uint8Array.of(2, 0, 0, 0, 0)), [{ flags: 2, payload: new Uint8Array() }])
})

test('a length above the limit is refused before anything of it is kept', () => {
  const envelopes = new Envelopes()
  assert.throws(() => envelopes.push(Uint8Array.of(0, 0xff, 0xff, 0xff, 0xff)), { code: 'resource_exhausted' })
  new Envelopes().push(join(Buffer.from([0]), Buffer.from(Uint32Array.of(MESSAGE_MAX).buffer).reverse()))
})

test('base64 has every byte', () => {
  const bytes = Uint8Array.from({ length: 70_000 }, (_, at) => at & 255)
  assert.equal(toBase64(bytes), Buffer.from(bytes).toString('base64'))
  assert.deepEqual(fromBase64(toBase64(bytes)), bytes)
  assert.throws(() => fromBase64('%'), AgentError)
})

test('the user is the name of basic authentication without a password', () => {
  assert.deepEqual(userHeaders('root'), { Authorization: `Basic ${btoa('root:')}` })
  assert.deepEqual(userHeaders('ü'), { Authorization: `Basic ${Buffer.from('ü:').toString('base64')}` })
  assert.deepEqual(userHeaders(''), {})
})

test('a unary call', async () => {
  answer = (response) => response.end('{"entries":[]}')
  const options = { user: 'user', headers: { 'X-Test': '1' } }
  assert.deepEqual(await call(agent, 'filesystem.Filesystem/ListDir', { path: '/', depth: 1 }, options), { entries: [] })
  const { url, headers, body } = requests.at(-1)
  assert.equal(url, '/dashboard/agent/i1/filesystem.Filesystem/ListDir')
  assert.equal(headers['content-type'], 'application/json')
  assert.equal(headers['connect-protocol-version'], '1')
  assert.equal(headers.authorization, 'Basic dXNlcjo=')
  assert.equal(headers['x-test'], '1')
  assert.deepEqual(JSON.parse(body), { path: '/', depth: 1 })
})

test('errors of unary calls have the code and the message', async () => {
  const status = (code, text) => {
    answer = (response) => {
      response.writeHead(code)
      response.end(text)
    }
    return call(agent, 'a.B/C', {})
  }
  await fails(status(404, '{"code":"not_found","message":"file not found: x"}'), 'not_found', /^file not found: x$/)
  // Of the agent's gate, with a number; and of a proxy.
  await fails(status(401, '{"code":401,"message":"no"}'), 'unauthenticated', /^no$/)
  await fails(status(502, '<html>'), 'unavailable', /status 502/)
  await fails(status(404, ''), 'unimplemented', /status 404/)
  await fails(status(500, 'x'.repeat(1 << 20)), 'unknown', /status 500/)
  await fails(status(200, 'no JSON'), 'internal', /not JSON/)
  await fails(status(200, '[]'), 'internal', /not a JSON object/)
  await fails(status(200, Buffer.from([0x22, 0xff, 0x22])), 'internal', /not JSON/)
})

test('an answer above the limit is not read to its end', async () => {
  let closed
  const isClosed = new Promise((resolve) => (closed = resolve))
  answer = (response) => {
    response.on('close', closed)
    const more = () => {
      while (!response.destroyed && response.write(Buffer.alloc(65536, 0x20)));
    }
    response.on('drain', more)
    more()
  }
  await fails(call(agent, 'a.B/C', {}), 'resource_exhausted', /larger than/)
  await isClosed
})

test('a redirect is not followed', async () => {
  answer = (response) => {
    response.writeHead(307, { Location: '/elsewhere' })
    response.end()
  }
  const before = requests.length
  await assert.rejects(call(agent, 'a.B/C', {}), TypeError)
  assert.equal(requests.length, before + 1)
})

test('a stream', async () => {
  streams(join(raw(0, '{"event":{"start":{"pid":7}}}'), raw(0, '{"event":{"end":{}}}'), raw(2, '{}')))
  assert.deepEqual(await collect(stream(agent, 'process.Process/Start', { process: {} }, { user: 'root' })), [
    { event: { start: { pid: 7 } } },
    { event: { end: {} } },
  ])
  const { headers, body } = requests.at(-1)
  assert.equal(headers['content-type'], 'application/connect+json')
  assert.equal(headers['keepalive-ping-interval'], '30')
  assert.deepEqual([...body], [...envelope({ process: {} })])
})

test('what a stream ends with', async () => {
  const got = (bytes) => {
    streams(bytes)
    return collect(stream(agent, 'a.B/C', {}))
  }
  await fails(got(raw(2, '{"error":{"code":"invalid_argument","message":"cwd \'/x\' does not exist"}}')), 'invalid_argument', /cwd/)
  await fails(got(raw(2, '{"error":{"code":5}}')), 'unknown', /./)
  await fails(got(raw(0, '{}')), 'unavailable', /ended before/)
  await fails(got(raw(0, '{"a":1}').subarray(0, 6)), 'unavailable', /ended before/)
  await fails(got(raw(1, '{}')), 'internal', /compressed/)
  await fails(got(raw(0, 'null')), 'internal', /object/)
  await fails(got(Buffer.from([0, 0x7f, 0, 0, 0])), 'resource_exhausted', /larger/)
  // What comes after the end is not read.
  assert.deepEqual(await got(join(raw(2, '{}'), raw(0, '{"late":1}'))), [])
})

test('a page in the place of a stream is an error', async () => {
  answer = (response) => {
    response.writeHead(200, { 'Content-Type': 'text/html' })
    response.end('<html>')
  }
  await fails(collect(stream(agent, 'a.B/C', {})), 'internal', /not a stream/)
})

test('a signal, or leaving the loop, ends the request', async () => {
  for (const leave of ['abort', 'break']) {
    let closed
    const isClosed = new Promise((resolve) => (closed = resolve))
    answer = (response) => {
      response.on('close', closed)
      response.writeHead(200, STREAM)
      response.write(raw(0, '{"n":1}'))
    }
    const controller = new AbortController()
    const read = async () => {
      for await (const event of stream(agent, 'a.B/C', {}, { signal: controller.signal })) {
        assert.deepEqual(event, { n: 1 })
        if (leave === 'break') break
        controller.abort()
      }
    }
    if (leave === 'break') await read()
    else await assert.rejects(read(), { name: 'AbortError' })
    await isClosed
  }
})

test('a bounded body says whether there was more', async () => {
  const read = async (length, limit) => {
    const { bytes, isCut } = await bounded(new Response(new Uint8Array(length)), limit)
    return [bytes.length, isCut]
  }
  assert.deepEqual(await read(10, 10), [10, false])
  assert.deepEqual(await read(11, 10), [10, true])
  assert.deepEqual(await read(0, 10), [0, false])
})
