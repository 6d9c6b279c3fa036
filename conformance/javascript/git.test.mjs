// The SDK's git helpers, on repositories inside the sandbox.

import assert from 'node:assert/strict'
import { test } from 'node:test'
import { sandboxFor } from './harness.mjs'

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
