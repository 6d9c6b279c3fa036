// What sandboxes may reach and how they are reached, set by the SDK, on the host of a fake internet in which every
// address answers. Addresses in 93.66.0.0/16 and names below example.net are denied wherever they are tried, which the
// fake internet checks at the end; each denial has a twin that is allowed.

import assert from 'node:assert/strict'
import { createHash } from 'node:crypto'
import { readFileSync } from 'node:fs'
import { createRequire } from 'node:module'
import { dirname, join } from 'node:path'
import { test } from 'node:test'
import * as e2b from 'e2b'
import { Sandbox, SandboxError } from 'e2b'
import { program, sandboxFor, until } from './harness.mjs'

const AUTHORITY = readFileSync(process.env.RINGFENCE_AUTHORITY, 'utf8')
const everything = ({ allTraffic }) => [allTraffic]

/** Whether each of the URLs answers to a program inside. */
async function reached(sandbox, ...urls) {
  await sandbox.files.write('/tmp/authority.pem', AUTHORITY)
  const curl = (url) => `curl -s -m 10 -o /dev/null --cacert /tmp/authority.pem '${url}'; echo $?`
  const { stdout } = await sandbox.commands.run(urls.map(curl).join('\n'))
  return stdout.trim().split('\n').map((code) => code === '0')
}

test('everything public is open unless it is closed', async (t) => {
  const open = await sandboxFor(t)
  const urls = ['http://93.67.0.1/', 'https://www.example.com/', 'http://[2606:4700:67::1]/', 'http://10.9.0.1/']
  assert.deepEqual(await reached(open, ...urls), [true, true, true, false])
  const closed = await sandboxFor(t, { allowInternetAccess: false })
  assert.deepEqual(await reached(closed, 'http://93.66.0.1/', 'https://shut.example.net/'), [false, false])
})

test('what is allowed beats what is denied, by address and by name', async (t) => {
  const sandbox = await sandboxFor(t, {
    network: { denyOut: everything, allowOut: ['93.67.1.0/24', 'www.example.com', '*.example.org'] },
  })
  const urls = ['http://93.67.1.7/', 'https://www.example.com/', 'https://any.example.org/', 'http://any.example.org/']
  assert.deepEqual(await reached(sandbox, ...urls), [true, true, true, true])
  const others = ['http://93.66.1.7/', 'https://www.example.net/', 'http://shut.example.net/', 'https://example.net/']
  assert.deepEqual(await reached(sandbox, ...others), [false, false, false, false])
})

test('what is denied alone', async (t) => {
  const sandbox = await sandboxFor(t, { network: { denyOut: ['93.66.0.0/16', '2606:4700:66::/48'] } })
  const urls = ['http://93.66.2.1/', 'http://93.67.2.1/', 'http://[2606:4700:66::1]/', 'http://[2606:4700:67::1]/']
  assert.deepEqual(await reached(sandbox, ...urls), [false, true, false, true])
})

test('an update replaces the policy, also for connections that are open', async (t) => {
  const sandbox = await sandboxFor(t)
  const hold = "import socket; s = socket.create_connection(('93.67.3.1', 1006)); print('open', flush=True); s.recv(1)"
  const output = []
  const held = await sandbox.commands.run(`python3 -c "${hold}"`, {
    background: true,
    onStdout: (data) => output.push(data),
  })
  await until(() => output.join('') === 'open\n', 'the connection is open')
  await sandbox.updateNetwork({ denyOut: ['93.67.3.1'] })
  await assert.rejects(held.wait(), ({ stderr }) => stderr.includes('ConnectionResetError'))
  const urls = ['http://93.67.3.1/', 'http://93.67.3.2/']
  assert.deepEqual(await reached(sandbox, ...urls), [false, true])
  await Sandbox.updateNetwork(sandbox.sandboxId, { denyOut: everything, allowOut: ['93.67.3.1'] })
  assert.deepEqual(await reached(sandbox, ...urls, 'http://93.66.3.1/'), [true, false, false])
  await sandbox.updateNetwork({ allowInternetAccess: false })
  assert.deepEqual(await reached(sandbox, ...urls, 'http://93.66.3.1/'), [false, false, false])
  await sandbox.updateNetwork({})
  assert.deepEqual(await reached(sandbox, ...urls), [true, true])
  // One that is invalid changes nothing.
  await assert.rejects(sandbox.updateNetwork({ denyOut: ['example.net'] }), SandboxError)
  assert.deepEqual(await reached(sandbox, ...urls), [true, true])
})

test('the policy is told', async (t) => {
  const sandbox = await sandboxFor(t, { network: { denyOut: everything, allowOut: ['www.example.com'] } })
  assert.deepEqual(await reached(sandbox, 'https://www.example.com/', 'https://shut.example.net/'), [true, false])
  const { network } = await sandbox.getInfo()
  assert.deepEqual([network.allowOut, network.denyOut], [['www.example.com'], ['0.0.0.0/0']])
})

const { Secret, SecretNotFoundError } = e2b

// Older versions of the SDK do not have secrets.
if (Secret) test('secrets are set as headers, and changed', async (t) => {
  const secret = await Secret.create('JS-key', 'js-first-value', { metadata: { a: 'b' } })
  t.after(() => Secret.destroy(secret.secretId))
  assert.deepEqual([secret.name, secret.version, secret.metadata], ['js-key', 1, { a: 'b' }])
  const value = Secret.fill('js-key')
  const rules = { 'www.example.com': [{ transform: { headers: { 'X-Key': value } } }] }
  const sandbox = await sandboxFor(t, { network: { rules } })
  const digest = (text) => createHash('sha256').update(text).digest('hex')
  // Once nothing is set any more, the connection is not intercepted, and the authority of the site is not trusted inside.
  const curl = 'curl -sS -k --http1.1 https://www.example.com/headers/'
  const seen = async () => JSON.parse((await sandbox.commands.run(curl)).stdout)
  assert.equal((await seen())['x-key'], digest('js-first-value'))
  assert.equal((await Secret.update('js-key', 'js-second-value')).version, 2)
  assert.equal((await seen())['x-key'], digest('js-second-value'))
  assert.deepEqual((await sandbox.getInfo()).network.rules['www.example.com'][0].transform.headers, { 'X-Key': value })
  assert.equal((await Secret.getInfo('js-key')).version, 2)
  assert((await Secret.list({ limit: 100 }).nextItems()).some(({ name }) => name === 'js-key'))
  await assert.rejects(sandbox.updateNetwork({ rules: { 'www.example.com': [{ transform: { headers: { a: Secret.fill('no') } } }] } }))
  assert.equal(await Secret.exists('no'), false)
  await assert.rejects(Secret.getInfo('no'), SecretNotFoundError)
  assert.equal(await Secret.destroy('js-key'), true)
  assert.equal((await seen())['x-key'], undefined)
})

// What the version of the SDK can send.
const declared = readFileSync(join(dirname(createRequire(import.meta.url).resolve('e2b')), 'index.d.ts'), 'utf8')

if (declared.includes('egressProxy?')) test('connections go through a proxy, or nowhere', async (t) => {
  // The addresses and the user of the fake internet's SOCKS5 servers.
  const proxy = { address: '45.90.7.1:1081', username: 'fence', password: 'correct horse battery staple' }
  const sandbox = await sandboxFor(t, { network: { egressProxy: proxy } })
  assert.deepEqual(await reached(sandbox, 'http://93.67.4.1/', 'https://www.example.com/'), [true, true])
  const { network } = await sandbox.getInfo()
  assert.deepEqual([network.egressProxy.address, network.egressProxy.username], [proxy.address, 'fence'])
  assert(!JSON.stringify(network).includes(proxy.password))
  for (const wrong of [{ ...proxy, password: 'wrong' }, { ...proxy, address: '45.90.7.1:1083' }]) {
    await sandbox.updateNetwork({ egressProxy: wrong })
    assert.deepEqual(await reached(sandbox, 'http://93.66.4.1/', 'http://[2606:4700:66::4]/'), [false, false])
  }
  await sandbox.updateNetwork({})
  assert.deepEqual(await reached(sandbox, 'http://93.67.4.1/'), [true])
  assert.equal((await sandbox.getInfo()).network.egressProxy, undefined)
  await assert.rejects(sandbox.updateNetwork({ egressProxy: { address: '10.9.0.1:1080' } }), SandboxError)
})

if (declared.includes('httpsPorts?')) test('servers inside that speak TLS', async (t) => {
  const sandbox = await sandboxFor(t, { network: { httpsPorts: [8443] } })
  assert.deepEqual((await sandbox.getInfo()).network.httpsPorts, [8443])
  const key = '/tmp/key.pem'
  await sandbox.commands.run(
    `openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=inside -keyout ${key} -out ${key}.crt && cat ${key}.crt >> ${key}`,
  )
  const server = `
import http.server, ssl, sys
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.SimpleHTTPRequestHandler)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain("${key}")
server.socket = context.wrap_socket(server.socket, server_side=True)
server.serve_forever()
`
  await sandbox.files.write('/tmp/tls_server.py', server)
  for (const port of [8443, 8444]) {
    await sandbox.commands.run(`cd /etc && exec python3 /tmp/tls_server.py ${port}`, { background: true, timeoutMs: 0 })
  }
  const answer = async (port) => fetch(`https://${sandbox.getHost(port)}/hostname`)
  await until(async () => (await answer(8443)).status === 200, 'the port is served over TLS')
  // The other one is not listed, so its server gets requests without TLS.
  assert.notEqual((await answer(8444)).status, 200)
})

/** Starts the server that shows what reached it and waits until a browser would see it. */
async function served(sandbox, port, headers = {}) {
  await sandbox.files.write('/tmp/http_server.py', program('http_server.py'))
  await sandbox.commands.run(`exec python3 /tmp/http_server.py 127.0.0.1 ${port}`, { background: true, timeoutMs: 0 })
  const url = `https://${sandbox.getHost(port)}`
  await until(async () => (await fetch(url, { headers })).status !== 502, `${url} is served`)
  return url
}

test('servers inside are reached by names of their own over HTTPS', async (t) => {
  const sandbox = await sandboxFor(t)
  const url = await served(sandbox, 8000)
  const seen = await (await fetch(`${url}/path?q=1`)).json()
  assert.deepEqual([seen.method, seen.path, seen.headers.host ?? seen.headers.Host], ['GET', '/path?q=1', sandbox.getHost(8000)])
  const body = 'x'.repeat(1_000_000)
  assert.equal(await (await fetch(`${url}/echo`, { method: 'POST', body })).text(), body)
})

test('the host that a server inside sees', async (t) => {
  const sandbox = await sandboxFor(t, { network: { maskRequestHost: 'localhost:${PORT}' } })
  for (const port of [8001, 8002]) {
    const seen = await (await fetch(await served(sandbox, port))).json()
    assert.equal(seen.headers.host ?? seen.headers.Host, `localhost:${port}`)
  }
})

test('a sandbox that is not public wants its token', async (t) => {
  const sandbox = await sandboxFor(t, { network: { allowPublicTraffic: false } })
  const headers = { 'e2b-traffic-access-token': sandbox.trafficAccessToken }
  const url = await served(sandbox, 8003, headers)
  assert.equal((await fetch(url)).status, 403)
  assert.equal((await fetch(url, { headers: { 'e2b-traffic-access-token': 'x'.repeat(64) } })).status, 403)
  const answer = await fetch(url, { headers })
  const seen = await answer.json()
  assert.equal(answer.status, 200)
  // The server inside has no use for it.
  assert.ok(!JSON.stringify(seen).includes(sandbox.trafficAccessToken))
})
