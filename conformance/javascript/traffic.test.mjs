// Servers inside a sandbox, reached from outside by the name that `getHost` gives.

import assert from 'node:assert/strict'
import { test } from 'node:test'
import { request, sandboxFor, until } from './harness.mjs'

async function served(sandbox, port, path = '/') {
  return until(async () => {
    const answer = await request(sandbox.getHost(port), path)
    return answer.status !== 502 && answer
  }, `port ${port} is served`)
}

test('a web server inside is reached by its host name', async (t) => {
  const sandbox = await sandboxFor(t)
  await sandbox.files.write('site/index.html', '<p>from inside</p>')
  await sandbox.commands.run('exec python3 -m http.server 8000 --bind 127.0.0.1', {
    cwd: '/home/user/site',
    background: true,
    timeoutMs: 0,
  })
  assert.equal(sandbox.getHost(8000), `8000-${sandbox.sandboxId}.${sandbox.sandboxDomain}`)
  const answer = await served(sandbox, 8000)
  assert.deepEqual([answer.status, answer.text], [200, '<p>from inside</p>'])
  assert.equal((await request(sandbox.getHost(8000), '/none')).status, 404)
  const head = await request(sandbox.getHost(8000), '/', { method: 'HEAD' })
  assert.deepEqual([head.status, head.text, head.headers['content-length']], [200, '', '18'])
})

test('a server on every address, and its headers', async (t) => {
  const sandbox = await sandboxFor(t)
  const program = [
    'import http.server',
    'class Echo(http.server.BaseHTTPRequestHandler):',
    '    def do_POST(self):',
    "        body = self.rfile.read(int(self.headers['Content-Length']))",
    '        self.send_response(201)',
    "        self.send_header('X-Host', self.headers['Host'])",
    "        self.send_header('X-Mark', self.headers['X-Mark'])",
    "        self.send_header('Content-Length', str(len(body)))",
    '        self.end_headers()',
    '        self.wfile.write(body)',
    "http.server.HTTPServer(('0.0.0.0', 9000), Echo).serve_forever()",
  ].join('\n')
  await sandbox.files.write('echo.py', program)
  await sandbox.commands.run('exec python3 echo.py', { background: true, timeoutMs: 0 })
  await served(sandbox, 9000)
  const body = 'x'.repeat(200_000)
  const answer = await request(sandbox.getHost(9000), '/any?q=1', { method: 'POST', headers: { 'X-Mark': 'm' }, body })
  assert.deepEqual([answer.status, answer.headers['x-mark'], answer.text.length], [201, 'm', 200_000])
  assert.equal(answer.headers['x-host'], sandbox.getHost(9000))
})

test('a closed port and a sandbox that is gone answer 502', async (t) => {
  const sandbox = await sandboxFor(t)
  assert.equal((await request(sandbox.getHost(1234))).status, 502)
  const host = sandbox.getHost(8000)
  await sandbox.kill()
  const gone = await request(host)
  assert.equal(gone.status, 502)
  assert.match(gone.text, /not found/)
})

test('ports of other protocols are not the agent', async (t) => {
  const sandbox = await sandboxFor(t)
  const answer = await request(sandbox.getHost(49983), '/health')
  assert.equal(answer.status, 204)
  const closed = await request(sandbox.getHost(49983), '/process.Process/List', {
    method: 'POST',
    headers: { 'Content-Type': 'application/json' },
    body: '{}',
  })
  assert.equal(closed.status, 401)
})
