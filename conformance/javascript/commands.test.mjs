// Commands: output, exits, surroundings, input, signals, and output that is heard while it comes.

import assert from 'node:assert/strict'
import { test } from 'node:test'
import { CommandExitError, InvalidArgumentError, AuthenticationError, NotFoundError, SandboxError, TimeoutError } from 'e2b'
import { sandboxFor, until } from './harness.mjs'

test('output and exit codes', async (t) => {
  const { commands } = await sandboxFor(t)
  const good = await commands.run('echo out; echo err >&2')
  assert.deepEqual([good.exitCode, good.stdout, good.stderr, good.error], [0, 'out\n', 'err\n', undefined])
  await assert.rejects(commands.run('echo out; echo err >&2; exit 42'), (failed) => {
    assert.ok(failed instanceof CommandExitError && failed instanceof SandboxError)
    assert.deepEqual([failed.exitCode, failed.stdout, failed.stderr], [42, 'out\n', 'err\n'])
    assert.equal(failed.error, 'exit status 42')
    return true
  })
  await assert.rejects(commands.run('no-such-program'), (failed) => {
    assert.equal(failed.exitCode, 127)
    assert.match(failed.stderr, /no-such-program/)
    return true
  })
  await assert.rejects(commands.run('kill -SEGV $$'), (failed) => {
    assert.deepEqual([failed.exitCode, failed.error?.replace(' (core dumped)', '')], [-1, 'signal: segmentation fault'])
    return true
  })
})

test('text of many bytes per character, cut anywhere', async (t) => {
  const { commands } = await sandboxFor(t)
  const text = '日本語 – ünïcödé 🦀\n'
  assert.equal((await commands.run(`printf '%s' '${text}'`)).stdout, text)
  const slow = "python3 -c \"import sys,time\nfor b in '🦀é'.encode(): sys.stdout.buffer.write(bytes([b])); sys.stdout.flush(); time.sleep(0.01)\""
  const pieces = []
  assert.equal((await commands.run(slow, { onStdout: (piece) => void pieces.push(piece) })).stdout, '🦀é')
  assert.equal(pieces.join(''), '🦀é')
})

test('environment, directory and user', async (t) => {
  const { commands } = await sandboxFor(t, { envs: { FROM_SANDBOX: 'a', BOTH: 'sandbox' } })
  const seen = await commands.run('echo "$FROM_SANDBOX $BOTH $FROM_COMMAND"', {
    envs: { FROM_COMMAND: "it's \"quoted\" $HOME", BOTH: 'command' },
  })
  assert.equal(seen.stdout, 'a command it\'s "quoted" $HOME\n')
  assert.equal((await commands.run('pwd; whoami; echo $HOME')).stdout, '/home/user\nuser\n/home/user\n')
  assert.equal((await commands.run('pwd; whoami; echo $HOME', { user: 'root' })).stdout, '/root\nroot\n/root\n')
  assert.equal((await commands.run('pwd', { cwd: '/usr/bin' })).stdout, '/usr/bin\n')
  assert.equal((await commands.run('mkdir -p sub && cd sub && pwd', { cwd: '.' })).stdout, '/home/user/sub\n')
  assert.equal((await commands.run('pwd', { cwd: 'sub' })).stdout, '/home/user/sub\n')
  await assert.rejects(commands.run('pwd', { cwd: '/no/such/dir' }), InvalidArgumentError)
  await assert.rejects(commands.run('true', { user: 'nobody-here' }), AuthenticationError)
})

test('output is heard while the command runs', async (t) => {
  const { commands } = await sandboxFor(t)
  const out = []
  const err = []
  const handle = await commands.run('echo first; echo problem >&2; read line; echo "got $line"', {
    background: true,
    stdin: true,
    onStdout: (piece) => void out.push(piece),
    onStderr: (piece) => void err.push(piece),
  })
  await until(() => out.join('') === 'first\n' && err.join('') === 'problem\n', 'the first lines are heard')
  assert.equal(handle.exitCode, undefined)
  await commands.sendStdin(handle.pid, 'more\n')
  const result = await handle.wait()
  assert.equal(result.stdout, 'first\ngot more\n')
  assert.equal(out.join(''), result.stdout)
  assert.equal(handle.exitCode, 0)
})

test('a large output arrives whole and in order', async (t) => {
  const { commands } = await sandboxFor(t)
  const { stdout } = await commands.run('seq 1 500000')
  assert.equal(stdout.length, 3_388_895)
  assert.ok(stdout.startsWith('1\n2\n') && stdout.endsWith('\n499999\n500000\n'))
})

test('input of a command: text, bytes and its end', async (t) => {
  const { commands } = await sandboxFor(t)
  const handle = await commands.run('cat', { background: true, stdin: true })
  await handle.sendStdin('text ')
  await handle.sendStdin(new Uint8Array([0xc3, 0xa9]))
  await handle.closeStdin()
  assert.equal((await handle.wait()).stdout, 'text é')
  assert.equal((await commands.run('cat')).stdout, '')
  const other = await commands.run('cat', { background: true, stdin: true })
  await commands.sendStdin(other.pid, 'x'.repeat(300_000))
  await commands.closeStdin(other.pid)
  assert.equal((await other.wait()).stdout.length, 300_000)

  const deaf = await commands.run('sleep 60', { background: true })
  await assert.rejects(commands.sendStdin(deaf.pid, 'x'), /stdin not enabled/)
  await deaf.kill()
})

test('a killed command ends as killed', async (t) => {
  const { commands } = await sandboxFor(t)
  const handle = await commands.run('exec sleep 600', { background: true })
  assert.equal(await handle.kill(), true)
  await assert.rejects(handle.wait(), (failed) => {
    assert.ok(failed instanceof CommandExitError)
    assert.deepEqual([failed.exitCode, failed.error], [-1, 'signal: killed'])
    return true
  })
  assert.equal(await commands.kill(handle.pid), false)
  assert.equal(await commands.kill(999_999), false)
})

test('the list names what was asked for', async (t) => {
  const { commands } = await sandboxFor(t)
  assert.deepEqual(await commands.list(), [])
  const handle = await commands.run('exec sleep 600', { background: true, envs: { A: 'b' }, cwd: '/tmp' })
  const [listed, ...others] = await commands.list()
  assert.deepEqual(others, [])
  const { pid, cmd, args, envs, cwd, tag } = listed
  assert.deepEqual([pid, cmd, args, cwd, tag], [handle.pid, '/bin/bash', ['-l', '-c', 'exec sleep 600'], '/tmp', undefined])
  assert.equal(envs.A, 'b')
  await handle.kill()
  await until(async () => (await commands.list()).length === 0, 'the list is empty again')
})

test('a second listener hears what comes from then on', async (t) => {
  const { commands } = await sandboxFor(t)
  const first = await commands.run('read a; echo "$a"; read b; echo "$b"; exit 3', { background: true, stdin: true })
  await first.sendStdin('one\n')
  await until(() => first.stdout === 'one\n', 'the first line is heard')
  const heard = []
  const second = await commands.connect(first.pid, { onStdout: (piece) => void heard.push(piece) })
  assert.equal(second.pid, first.pid)
  await second.sendStdin('two\n')
  for (const handle of [first, second]) {
    await assert.rejects(handle.wait(), (failed) => failed instanceof CommandExitError && failed.exitCode === 3)
  }
  assert.equal(first.stdout, 'one\ntwo\n')
  assert.equal(heard.join(''), 'two\n')
  await assert.rejects(commands.connect(999_999), NotFoundError)
})

test('a command outlives the client that left it', async (t) => {
  const { commands } = await sandboxFor(t)
  const handle = await commands.run('read line; echo "$line" > left', { background: true, stdin: true })
  await handle.disconnect()
  await commands.sendStdin(handle.pid, 'behind\n')
  await until(async () => (await commands.run('cat left 2>/dev/null || true')).stdout === 'behind\n', 'it went on')
})

test('a time limit ends the command', async (t) => {
  const { commands } = await sandboxFor(t)
  // The time may be over before the command has begun.
  for (const timeoutMs of [1_000, 4_000, 16_000]) {
    await assert.rejects(commands.run('echo $$ > pid; exec sleep 600', { timeoutMs }), TimeoutError)
    await until(async () => (await commands.list()).length === 0, 'the process is gone')
    if ((await commands.run('test -s pid && echo begun || true')).stdout === 'begun\n') break
  }
  assert.match((await commands.run('cat pid')).stdout, /^\d+\n$/)
  assert.equal((await commands.run('test -e /proc/$(cat pid) && echo there || echo gone')).stdout, 'gone\n')
  assert.equal((await commands.run('sleep 1.2; echo done', { timeoutMs: 0 })).stdout, 'done\n')
})

test('fifty commands at once', async (t) => {
  const { commands } = await sandboxFor(t)
  const results = await Promise.all(Array.from({ length: 50 }, (_, n) => commands.run(`echo ${n}; exit 0`)))
  assert.deepEqual(results.map((result) => result.stdout), results.map((_, n) => `${n}\n`))
})

test('killing the sandbox ends a command that is waited for', async (t) => {
  const sandbox = await sandboxFor(t)
  const handle = await sandbox.commands.run('sleep 600', { background: true })
  const ended = assert.rejects(handle.wait(), TimeoutError)
  await sandbox.kill()
  await ended
})
