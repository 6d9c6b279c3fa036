// Terminals: a login shell with a size that can change, input, a second listener, and their end.

import assert from 'node:assert/strict'
import { test } from 'node:test'
import { CommandExitError } from 'e2b'
import { sandboxFor, until } from './harness.mjs'

const bytes = (text) => new TextEncoder().encode(text)

class Screen {
  text = ''
  decoder = new TextDecoder()
  onData = (data) => {
    assert.ok(data instanceof Uint8Array)
    this.text += this.decoder.decode(data, { stream: true })
  }

  shows(pattern) {
    return until(() => this.text.match(pattern), () => `${pattern} is on the screen: ${JSON.stringify(this.text)}`)
  }
}

async function terminal(sandbox, options = {}) {
  const screen = new Screen()
  const handle = await sandbox.pty.create({ cols: 80, rows: 24, onData: screen.onData, timeoutMs: 0, ...options })
  return { screen, handle, type: (line) => sandbox.pty.sendInput(handle.pid, bytes(line)) }
}

test('a shell of the user in a terminal', async (t) => {
  const sandbox = await sandboxFor(t)
  const { screen, handle, type } = await terminal(sandbox, { envs: { COLOUR: 'green' }, cwd: '/tmp' })
  await type('tty; echo "$TERM-$LANG-$COLOUR-$PWD-$(whoami)"; stty size\r')
  await screen.shows(/\/dev\/pts\/\d+/)
  await screen.shows(/xterm-256color-C\.UTF-8-green-\/tmp-user/)
  await screen.shows(/24 80/)
  await type('exit\r')
  assert.equal((await handle.wait()).exitCode, 0)
})

test('another size reaches the program', async (t) => {
  const sandbox = await sandboxFor(t)
  const { screen, handle, type } = await terminal(sandbox)
  await type('trap "echo turned" WINCH; stty size\r')
  await screen.shows(/24 80/)
  await sandbox.pty.resize(handle.pid, { cols: 132, rows: 50 })
  await type('stty size\r')
  await screen.shows(/50 132/)
  await handle.kill()
})

test('control keys, and the exit code of the shell', async (t) => {
  const sandbox = await sandboxFor(t)
  const { screen, handle, type } = await terminal(sandbox)
  // One job says that it is ready and then waits: between two, an interrupt would find no job in the foreground.
  await type("sh -c 'echo rea\"\"dy; exec sleep 600'\r")
  await screen.shows(/[\r\n]ready/)
  await type('\x03')
  await type('echo after-$?\r')
  await screen.shows(/after-130/)
  await type('exit 7\r')
  await assert.rejects(handle.wait(), (failed) => failed instanceof CommandExitError && failed.exitCode === 7)
})

test('a second listener on one terminal', async (t) => {
  const sandbox = await sandboxFor(t)
  const { screen, handle, type } = await terminal(sandbox)
  await type('echo fir""st\r')
  await screen.shows(/[\r\n]first/)
  const other = new Screen()
  const second = await sandbox.pty.connect(handle.pid, { onData: other.onData })
  await type('echo sec""ond\r')
  await screen.shows(/[\r\n]second/)
  await other.shows(/[\r\n]second/)
  assert.ok(!other.text.includes('\rfirst'))
  await second.disconnect()
  assert.equal(await sandbox.pty.kill(handle.pid), true)
})

test('a terminal of root, and its end', async (t) => {
  const sandbox = await sandboxFor(t)
  const { screen, handle, type } = await terminal(sandbox, { user: 'root' })
  await type('echo uid-$(id -u)\r')
  await screen.shows(/uid-0/)
  assert.deepEqual((await sandbox.commands.list()).map(({ pid, args }) => ({ pid, args })), [
    { pid: handle.pid, args: ['-i', '-l'] },
  ])
  assert.equal(await sandbox.pty.kill(handle.pid), true)
  await assert.rejects(handle.wait(), (failed) => failed instanceof CommandExitError && failed.exitCode === -1)
  assert.equal(await sandbox.pty.kill(handle.pid), false)
})
