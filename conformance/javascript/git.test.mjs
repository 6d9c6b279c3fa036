// The SDK's git helpers, on repositories inside the sandbox.

import assert from 'node:assert/strict'
import { test } from 'node:test'
import { GitAuthError, GitUpstreamError } from 'e2b'
import { program, sandboxFor, until } from './harness.mjs'

const AUTHOR = { authorName: 'Ann', authorEmail: 'ann@example.com' }

test('a repository from its first commit to a push', async (t) => {
  const { git, files, commands } = await sandboxFor(t)
  await git.configureUser('Ann', 'ann@example.com')
  await git.init('work', { initialBranch: 'main' })
  await files.write('work/a.txt', 'one\n')
  let status = await git.status('work')
  assert.deepEqual(status.fileStatus.map((file) => [file.name, file.status]), [['a.txt', 'untracked']])
  await git.add('work')
  await git.commit('work', 'first', AUTHOR)
  status = await git.status('work')
  assert.deepEqual([status.currentBranch, status.isClean], ['main', true])
  assert.equal((await commands.run('git -C work log --format="%an %s"')).stdout, 'Ann first\n')

  await commands.run('git init -q --bare far.git')
  await git.remoteAdd('work', 'origin', '/home/user/far.git')
  await git.push('work', { remote: 'origin', branch: 'main', setUpstream: true })
  await git.clone('/home/user/far.git', { path: 'copy', branch: 'main' })
  assert.equal(await files.read('copy/a.txt'), 'one\n')
})

test('branches, resets and restored files', async (t) => {
  const { git, files } = await sandboxFor(t)
  await git.init('work', { initialBranch: 'main' })
  await files.write('work/a.txt', 'one\n')
  await git.add('work', { files: ['a.txt'] })
  await git.commit('work', 'first', AUTHOR)
  await git.createBranch('work', 'side')
  assert.deepEqual((await git.branches('work')).currentBranch, 'side')
  await git.checkoutBranch('work', 'main')
  const { branches, currentBranch } = await git.branches('work')
  assert.deepEqual([branches.sort(), currentBranch], [['main', 'side'], 'main'])
  await git.deleteBranch('work', 'side')
  assert.deepEqual((await git.branches('work')).branches, ['main'])

  await files.write('work/a.txt', 'two\n')
  await git.restore('work', { paths: ['a.txt'] })
  assert.equal(await files.read('work/a.txt'), 'one\n')
  await files.write('work/a.txt', 'three\n')
  await git.add('work')
  await git.reset('work', { mode: 'hard' })
  assert.equal((await git.status('work')).isClean, true)
  await git.setConfig('user.name', 'Bob')
  assert.equal(await git.getConfig('user.name'), 'Bob')
})

test('remotes, and what both sides have', async (t) => {
  const { git, files, commands } = await sandboxFor(t)
  await git.configureUser('Ann', 'ann@example.com')
  await git.init('far.git', { bare: true, initialBranch: 'main' })
  await git.init('work', { initialBranch: 'main' })
  await files.write('work/a.txt', 'one\n')
  await git.add('work')
  await git.commit('work', 'first', AUTHOR)
  await git.remoteAdd('work', 'origin', '/nowhere')
  await git.push('work', { remote: '/home/user/far.git', branch: 'main', setUpstream: false })
  await git.remoteAdd('work', 'origin', '/home/user/far.git', { overwrite: true, fetch: true })
  assert.equal(await git.remoteGet('work', 'origin'), '/home/user/far.git')
  assert.equal(await git.remoteGet('work', 'none'), undefined)
  await assert.rejects(git.pull('work'), GitUpstreamError)
  await git.push('work', { remote: 'origin', branch: 'main' })

  await git.clone('file:///home/user/far.git', { path: 'copy', depth: 1 })
  await files.write('copy/a.txt', 'two\n')
  await git.add('copy')
  await git.commit('copy', 'second', AUTHOR)
  assert.equal((await git.status('copy')).ahead, 1)
  await git.push('copy')
  await git.pull('work')
  assert.equal(await files.read('work/a.txt'), 'two\n')
  await git.reset('work', { mode: 'soft', target: 'HEAD~1' })
  assert.equal((await git.status('work')).stagedCount, 1)
  await git.restore('work', { paths: ['a.txt'], staged: true })
  assert.equal((await git.status('work')).stagedCount, 0)
  assert.equal((await commands.run('git -C work log --format=%s origin/main')).stdout, 'second\nfirst\n')
})

test('a server that wants a password', async (t) => {
  const { git, files, commands } = await sandboxFor(t)
  const login = { username: 'ann', password: 's3cret' }
  const url = 'http://localhost:8418/far.git'
  await files.write('git_server.py', program('git_server.py'))
  await commands.run('mkdir srv && git init -q --bare srv/far.git && git -C srv/far.git config http.receivepack true')
  await commands.run('exec python3 git_server.py 8418 srv ann s3cret', { background: true, timeoutMs: 0 })
  await until(async () => (await commands.run('ss -ltnH')).stdout.includes(':8418 '), 'the git server listens')

  await git.configureUser('Ann', 'ann@example.com')
  await git.init('work', { initialBranch: 'main' })
  await files.write('work/a.txt', 'one\n')
  await git.add('work')
  await git.commit('work', 'first', AUTHOR)
  await git.remoteAdd('work', 'origin', url)
  const unasked = { envs: { GIT_TERMINAL_PROMPT: '0' } }
  await assert.rejects(git.push('work', { remote: 'origin', branch: 'main', ...unasked }), GitAuthError)
  await git.push('work', { remote: 'origin', branch: 'main', ...login })
  await assert.rejects(git.clone(url, { path: 'copy', ...unasked }), GitAuthError)
  await git.clone(url, { path: 'copy', branch: 'main', ...login })
  assert.equal(await git.remoteGet('copy', 'origin'), url)
  await assert.rejects(git.pull('copy', { remote: 'origin', branch: 'main', ...unasked }), GitAuthError)
  await git.dangerouslyAuthenticate({ ...login, host: 'localhost:8418', protocol: 'http' })
  await git.pull('copy', { remote: 'origin', branch: 'main' })
})
