// Templates by the SDK's builder: every method of it, on the host of a fake internet, where a mirror of docker.io and a
// registry with a certificate and a user serve images, and a code host a repository.

import assert from 'node:assert/strict'
import { randomBytes } from 'node:crypto'
import { mkdirSync, mkdtempSync, readFileSync, symlinkSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import { after, test } from 'node:test'
import {
  AuthenticationError,
  BuildError,
  FileUploadError,
  Sandbox,
  Template,
  TemplateError,
  waitForFile,
  waitForPort,
  waitForProcess,
  waitForTimeout,
  waitForURL,
} from 'e2b'
import { sandboxFor, until } from './harness.mjs'

const { RINGFENCE_REGISTRY, RINGFENCE_PACKAGES, RINGFENCE_CODE_HOST_TOKEN, E2B_API_KEY, E2B_DOMAIN } = process.env
const [REGISTRY, USER, PASSWORD] = RINGFENCE_REGISTRY.split(' ')
const AUTHORITY = readFileSync(process.env.RINGFENCE_AUTHORITY, 'utf8')

const names = []

/** The name of a template, which is deleted at the end, when no sandbox of it is left. */
function nameFor(name = `t${randomBytes(6).toString('hex')}`) {
  names.push(name)
  return name
}

after(async () => {
  for (const name of names) {
    const url = `https://api.${E2B_DOMAIN}/templates/${name}`
    const answer = await fetch(url, { method: 'DELETE', headers: { 'X-API-Key': E2B_API_KEY } })
    assert.ok([204, 404].includes(answer.status), await answer.text())
  }
})

/** Builds it and returns the messages of its log. */
async function build(template, name, options = {}) {
  const lines = []
  const built = Template.build(template, name, { ...options, onBuildLogs: ({ message }) => lines.push(message) })
  // Shown with the failure.
  await built.catch((error) => Promise.reject(Object.assign(error, { lines })))
  return lines
}

/** What a command prints in a new sandbox of a template. */
async function printed(t, name, command, options) {
  const sandbox = await sandboxFor(t, { template: name })
  return (await sandbox.commands.run(command, options)).stdout
}

/** A directory with files to copy. */
function context(files) {
  const directory = mkdtempSync(join(process.cwd(), 'context-'))
  for (const [path, text] of Object.entries(files)) {
    mkdirSync(join(directory, path, '..'), { recursive: true })
    writeFileSync(join(directory, path), text)
  }
  return directory
}

test('images of every distribution, with the names that the SDK gives them', async (t) => {
  const images = {
    'debian:stable': Template().fromDebianImage(),
    'debian:trixie': Template().fromDebianImage('trixie'),
    'ubuntu:latest': Template().fromUbuntuImage(),
    'fedora:44': Template().fromFedoraImage(),
    'alpine:3.24': Template().fromAlpineImage(),
    'archlinux:latest': Template().fromArchImage(),
    'python:3': Template().fromPythonImage(),
    'node:lts': Template().fromNodeImage(),
    'oven/bun:latest': Template().fromBunImage(),
  }
  await Promise.all(
    Object.entries(images).map(async ([image, template]) => {
      const name = nameFor()
      const lines = await build(template.runCmd('echo "$IMAGE" > ~/image'), name)
      assert.ok(lines.some((line) => line.includes(`FROM ${image} [`)), lines.join('\n'))
      assert.equal(await printed(t, name, 'cat ~/image; id -un; pwd'), `${image}\nuser\n/home/user\n`)
    }),
  )
})

test('a registry with a certificate and users', async (t) => {
  const name = nameFor()
  const image = `${REGISTRY}/tools/shell:1`
  await assert.rejects(build(Template().fromImage(image), name), (error) => {
    assert.ok(error instanceof BuildError)
    assert.match(error.message, /requires credentials/)
    return true
  })
  await assert.rejects(
    build(Template().fromImage(image, { username: USER, password: 'wrong' }), name),
    /unauthorised/,
  )
  await build(Template().fromImage(image, { username: USER, password: PASSWORD }), name)
  assert.equal(await printed(t, name, 'cat /srv/mine', { user: 'root' }), 'mine\n')
  // Their own ways to log in: nobody answers for Amazon and Google here, and the registry sees no user of theirs.
  const aws = { accessKeyId: 'AKIA', secretAccessKey: 'canary', region: 'eu-central-1' }
  await assert.rejects(build(Template().fromAWSRegistry(image, aws), name), BuildError)
  const gcp = { serviceAccountJSON: { client_email: 'x@example.com', private_key: 'canary' } }
  await assert.rejects(build(Template().fromGCPRegistry(image, gcp), name), (error) => {
    assert.ok(error instanceof BuildError)
    assert.doesNotMatch(error.message, /canary/)
    return true
  })
})

test('every kind of step leaves its files', async (t) => {
  const name = nameFor()
  const fileContextPath = context({
    'tree/deep/file': 'deep\n',
    'tree/skipped.log': 'skipped\n',
    'one.txt': 'one\n',
    'two.txt': 'two\n',
    'tool.sh': '#!/bin/sh\necho tool\n',
    'plain/archive': 'plain\n',
    'target': 'target\n',
    '.dockerignore': '**/*.log\n',
  })
  symlinkSync('target', join(fileContextPath, 'link'))
  const template = () =>
    Template({ fileContextPath, fileIgnorePatterns: ['two.*'] })
      .fromBaseImage()
      .setEnvs({ GREETING: 'hello', BOTH: '$GREETING world' })
      .setEnvs({})
      .runCmd(['echo "$BOTH" > ~/greeting', 'touch ~/gone ~/gone2 ~/moved'])
      .makeDir(['/srv/app', '/srv/other'], { mode: 0o777, user: 'root' })
      .setWorkdir('/srv/app')
      .copy('tree', 'tree')
      .copy(['*.txt', 'link'], '/srv/other/', { user: 'root', mode: 0o640 })
      .copyItems([
        { src: 'tool.sh', dest: '/usr/local/bin/tool', user: 'root', mode: 0o755 },
        { src: 'plain', dest: 'plain', gzip: false, forceUpload: true },
        { src: 'link', dest: 'followed', resolveSymlinks: true },
      ])
      .makeSymlink('/srv/app/tree/deep/file', '/srv/app/shortcut')
      .makeSymlink('/nowhere', '/srv/app/shortcut2')
      .makeSymlink('/srv/app/tree', '/srv/app/shortcut2', { force: true, user: 'user' })
      .rename('/home/user/moved', '/home/user/renamed', { force: true })
      .remove(['/home/user/gone', '/home/user/gone2', '/home/user/never'], { force: true, recursive: true })
      .setUser('worker')
      .runCmd('id -un > /srv/app/by; pwd >> /srv/app/by')
      .runCmd('id -un > /etc/by', { user: 'root' })
  const lines = await build(template(), name, { cpuCount: 1, memoryMB: 512 })
  assert.ok(!lines.some((line) => line.startsWith('CACHED')), lines.join('\n'))
  const seen = await printed(
    t,
    name,
    `id -un; pwd; cat /home/user/greeting tree/deep/file plain/archive shortcut followed by /etc/by; tool
     stat -c '%n %U %a %F' /srv/other/*; readlink /srv/other/link shortcut2; test ! -L followed && ls tree /home/user; nproc`,
  )
  const want = [
    ...['worker', '/srv/app', 'hello world', 'deep', 'plain', 'deep', 'target', 'worker', '/srv/app', 'root', 'tool'],
    ...['/srv/other/link root 777 symbolic link', '/srv/other/one.txt root 640 regular file', 'target', '/srv/app/tree'],
    ...['/home/user:', 'greeting', 'renamed', '', 'tree:', 'deep', '1', ''],
  ]
  assert.deepEqual(seen.split('\n'), want)

  const again = await build(template(), name)
  // All but the first, which is the source, and from the forced upload on everything.
  const cached = again.filter((line) => line.startsWith('CACHED')).length
  assert.ok(cached === 8, again.join('\n'))
})

test('a step that is not to be cached, and all that follow', async (t) => {
  const name = nameFor()
  const stamps = async (template) => {
    await build(template.runCmd('date +%s%N > ~/third'), name)
    return (await printed(t, name, 'cat ~/first ~/second ~/third')).trim().split('\n')
  }
  const mark = `echo ${name}; date +%s%N`
  const first = () => Template().fromBaseImage().runCmd(`${mark} > ~/first`)
  const one = await stamps(first().runCmd('date +%s%N > ~/second'))
  const same = await stamps(first().runCmd('date +%s%N > ~/second'))
  const later = await stamps(first().skipCache().runCmd('date +%s%N > ~/second'))
  const all = await stamps(Template().skipCache().fromBaseImage().runCmd(`${mark} > ~/first`).runCmd('date +%s%N > ~/second'))
  const kept = (stamps) => stamps.map((stamp, at) => stamp === one[at])
  assert.deepEqual([same, later, all].map(kept), [
    [true, true, true],
    [true, false, false],
    [false, false, false],
  ])
})

test('packages of every tool', async (t) => {
  const name = nameFor()
  const bun = '#!/bin/sh\necho "$(id -un): bun $*" >> /usr/local/bun.log\nchmod -f 666 /usr/local/bun.log\nexit 0\n'
  const fileContextPath = context({ bun })
  for (const file of ['rfwheel-1.0-py3-none-any.whl', 'rfwheel2-1.0-py3-none-any.whl', 'rftool.tgz', 'rfdev.tgz', 'rfdeb.deb']) {
    writeFileSync(join(fileContextPath, file), readFileSync(join(RINGFENCE_PACKAGES, file)))
  }
  const template = Template({ fileContextPath })
    .fromBaseImage()
    .copy(['*.whl', '*.tgz', '*.deb'], '/srv/packages/', { user: 'root', mode: 0o644 })
    .copy('bun', '/usr/local/bin/bun', { mode: 0o755 })
    .pipInstall('/srv/packages/rfwheel-1.0-py3-none-any.whl')
    .pipInstall(['/srv/packages/rfwheel2-1.0-py3-none-any.whl'], { g: false })
    .npmInstall('/srv/packages/rftool.tgz', { g: true })
    .makeDir('/home/user/project')
    .setWorkdir('/home/user/project')
    .npmInstall(['--offline', '/srv/packages/rfdev.tgz'], { dev: true })
    .bunInstall('cowsay', { g: true })
    .bunInstall(['a', 'b'], { dev: true })
    .bunInstall()
    // The host's own sources are not in the fake internet.
    .runCmd('rm -rf /etc/apt/sources.list /etc/apt/sources.list.d/*', { user: 'root' })
    .aptInstall(['/srv/packages/rfdeb.deb'], { noInstallRecommends: true, fixMissing: true })
    .setWorkdir('/home/user')
  await build(template, name)
  const seen = await printed(
    t,
    name,
    'rfwheel; ~/.local/bin/rfwheel2; rftool; cat project/package.json /usr/local/bun.log /opt/rfdeb; python3 -c "import rfwheel; print(rfwheel.__file__)"',
  )
  assert.match(seen, /^rfwheel 1\nrfwheel2 1\nrftool 1\n/)
  assert.match(seen, /"devDependencies": \{\s+"rfdev"/)
  assert.match(seen, /root: bun install -g cowsay\nuser: bun install --dev a b\nuser: bun install\ndeb 1\n\/usr\/local\//)
})

test('a repository is cloned', async (t) => {
  const name = nameFor()
  const url = `https://x-access-token:${RINGFENCE_CODE_HOST_TOKEN}@github.com/octocat/templates.git`
  const fileContextPath = context({ 'authority.pem': AUTHORITY })
  const template = Template({ fileContextPath })
    .fromBaseImage()
    .copy('authority.pem', '/srv/authority.pem')
    .setEnvs({ GIT_SSL_CAINFO: '/srv/authority.pem' })
    .gitClone(url)
    .gitClone(url, '/srv/shallow', { branch: 'v1', depth: 1, user: 'root' })
    // What is allowed here and denied there: a step has the network of a sandbox.
    .runCmd(['curl -sf http://93.67.0.1/ > /dev/null', 'curl -sf http://www.example.com/ > /dev/null', '! curl -s -m 5 http://10.9.0.1/'])
  await build(template, name)
  const seen = await printed(t, name, 'cat templates/README.md; git -C templates rev-list --count HEAD; stat -c %U /srv/shallow; cat /srv/shallow/README.md')
  assert.equal(seen, '# octocat/templates\n1\nroot\n# octocat/templates\n')
})

test('a sandbox starts with its server answering, whatever is waited for', async (t) => {
  const server = (port) => `exec python3 -m http.server --bind 0.0.0.0 ${port}`
  const ways = {
    port: ['sleep 0.5; ' + server(8001), waitForPort(8001)],
    url: ['sleep 0.5; ' + server(8002), waitForURL('http://localhost:8002/page')],
    status: [server(8003), waitForURL('http://localhost:8003/none', 404)],
    process: [server(8004), waitForProcess('python3')],
    file: [`sleep 0.3; touch /tmp/ready; ${server(8005)}`, waitForFile('/tmp/ready')],
    timeout: [server(8006), waitForTimeout(1000)],
    text: [server(8007), 'curl -sf localhost:8007/page > /dev/null'],
  }
  await Promise.all(
    Object.entries(ways).map(async ([way, [start, ready]]) => {
      const name = nameFor()
      const template = Template().fromBaseImage().setWorkdir('/home/user/www').runCmd(`echo ${way} > page`).setStartCmd(start, ready)
      const lines = await build(template, name)
      assert.ok(lines.includes('the build is finished') || lines.some((line) => line.includes('ready')), lines.join('\n'))
      const sandbox = await sandboxFor(t, { template: name })
      if (['port', 'url', 'status', 'text'].includes(way)) {
        // At the first try, from outside.
        const answer = await fetch(`https://${sandbox.getHost(Number(start.match(/\d+$/)[0]))}/page`)
        assert.equal(await answer.text(), `${way}\n`)
      }
      const runs = async () => /http\.server/.test((await sandbox.commands.run('pgrep -a python3 || true')).stdout)
      // Only where it is asked for is it there at once: some ways say nothing of the server.
      if (['timeout', 'file'].includes(way)) await until(runs, 'its server runs')
      else assert.ok(await runs())
    }),
  )
  // Only what is waited for.
  const name = nameFor()
  await build(Template().fromBaseImage().runCmd('touch ~/there').setReadyCmd(waitForFile('/home/user/there')), name)
  await assert.rejects(
    build(Template().fromBaseImage().setStartCmd('exit 7', 'false'), name),
    (error) => error instanceof BuildError && /exit code 7/.test(error.message),
  )
  assert.equal(await printed(t, name, 'ls ~/there'), '/home/user/there\n', 'the build before still counts')
})

test('a Dockerfile, as text and as a file, and back', async (t) => {
  const name = nameFor()
  const fileContextPath = context({ 'app/main.py': 'print("main")\n', 'config.ini': 'x=1\n' })
  const dockerfile = [
    'FROM debian:stable AS only',
    'ARG VERSION=3',
    'ENV MODE=fast NAME=two',
    'EXPOSE 8080',
    'WORKDIR /srv/app',
    'COPY --chown=app:app app config.ini ./',
    'RUN echo "$MODE $NAME $VERSION" > mode && \\',
    '    id -un > by',
    'USER app',
    'CMD ["sleep", "1000"]',
  ].join('\n')
  const template = Template({ fileContextPath }).fromDockerfile(dockerfile)
  // Its ready command waits for 20 s, which is not what is tried here.
  template.setReadyCmd(waitForTimeout(1000))
  await build(template, name)
  const seen = await printed(t, name, "pwd; id -un; cat mode by; stat -c '%n %U %G' main.py config.ini", { user: 'app' })
  assert.equal(seen, '/srv/app\napp\nfast two 3\nroot\nmain.py app app\nconfig.ini app app\n')

  const path = join(fileContextPath, 'Dockerfile')
  writeFileSync(path, 'FROM e2bdev/base\nRUN echo file > /file\n')
  const other = nameFor()
  await build(Template({ fileContextPath }).fromDockerfile(path), other)
  assert.equal(await printed(t, other, 'cat /file; id -un; pwd'), 'file\nuser\n/home/user\n')

  assert.match(Template.toDockerfile(template), /^FROM debian:stable\nUSER root\nWORKDIR \/\n/)
  const json = JSON.parse(await Template.toJSON(template))
  assert.equal(json.fromImage, 'debian:stable')
  assert.match(json.steps.find(({ type }) => type === 'COPY').filesHash, /^[0-9a-f]{64}$/)
  assert.throws(() => Template.toDockerfile(Template().fromTemplate('base')))
})

test('a build in the background, and its end', async (t) => {
  const name = nameFor()
  const template = Template().fromBaseImage().runCmd('sleep 1; echo out')
  const begun = await Template.buildInBackground(template, `${name}:v1`, { tags: ['v2', 'v3'], cpuCount: 2, memoryMB: 1024, minFreeDiskMb: 64 })
  assert.deepEqual(begun.tags, ['v1', 'v2', 'v3'])
  assert.equal(begun.name, `${name}:v1`)
  let status = await Template.getBuildStatus(begun)
  assert.ok(['waiting', 'building'].includes(status.status), status.status)
  const lines = []
  await until(async () => {
    status = await Template.getBuildStatus(begun, { logsOffset: lines.length })
    lines.push(...status.logEntries.map(({ message }) => message))
    return status.status === 'ready'
  }, () => `${status.status}: ${lines.join('\n')}`)
  for (;;) {
    const { logEntries } = await Template.getBuildStatus(begun, { logsOffset: lines.length })
    if (logEntries.length === 0) break
    lines.push(...logEntries.map(({ message }) => message))
  }
  assert.ok(lines.some((line) => line.endsWith('[stdout]: out')), lines.join('\n'))
  assert.equal(new Set(lines).size, lines.length, 'no line twice')
  assert.deepEqual([status.templateID, status.buildID, status.reason], [begun.templateId, begun.buildId, undefined])

  // Only the tags that were asked for.
  await assert.rejects(Sandbox.create(name))
  assert.deepEqual([await Template.exists(name), await Template.aliasExists(`${name}:v3`), await Template.exists(`${name}:v4`)], [true, true, false])
  assert.equal(await Template.exists(`${name}x`), false)
  assert.deepEqual((await Template.getTags(name)).map(({ tag, buildId }) => [tag, buildId]), ['v1', 'v2', 'v3'].map((tag) => [tag, begun.buildId]))
  const assigned = await Template.assignTags(`${name}:v1`, 'default')
  assert.deepEqual(assigned, { buildId: begun.buildId, tags: ['default'] })
  await sandboxFor(t, { template: name })
  await Template.assignTags(`${name}:${begun.buildId}`, ['v4', 'v5'])
  await Template.removeTags(name, ['v1', 'v4'])
  await Template.removeTags(name, 'v2')
  const tags = await Template.getTags(begun.templateId)
  assert.deepEqual(tags.map(({ tag }) => tag), ['default', 'v3', 'v5'])
  assert.ok(tags.every(({ createdAt }) => Math.abs(Date.now() - createdAt) < 120_000))
  await assert.rejects(Template.removeTags(name, 'default'), TemplateError)
  await assert.rejects(Template.assignTags(`${name}:none`, 'x'), TemplateError)
  await assert.rejects(Template.getTags(`${name}x`), TemplateError)
})

test('from another template, with its commands', async (t) => {
  const name = nameFor()
  const child = nameFor(`${name}-child`)
  await build(Template().fromBaseImage().setWorkdir('/srv/app').setEnvs({ A: 'b' }).runCmd('echo parent > file'), name)
  await build(Template().fromTemplate(name).runCmd('cat file > copy; echo "$A" >> copy'), { alias: child })
  assert.equal(await printed(t, child, 'pwd; cat copy'), '/srv/app\nparent\nb\n')

  // What only templates of certain names may do, which here are ours.
  const script = '#!/bin/sh\necho "$(id -un): $0 $*" >> /var/log/calls\n'
  const fileContextPath = context({ script })
  const tools = { 'mcp-gateway': ['mcp-gateway'], devcontainer: ['devcontainer', '/prepare-exec.sh'] }
  for (const [special, programs] of Object.entries(tools)) {
    let template = Template({ fileContextPath }).fromBaseImage()
    for (const program of programs) {
      template = template.copy('script', program.startsWith('/') ? program : `/usr/local/bin/${program}`, { user: 'root', mode: 0o755 })
    }
    await build(template, nameFor(special))
  }
  await build(Template().fromTemplate('mcp-gateway').addMcpServer(['time', 'fetch']).addMcpServer('git'), child)
  const calls = await printed(t, child, 'cat /var/log/calls')
  assert.equal(calls, 'root: /usr/local/bin/mcp-gateway pull time fetch\nroot: /usr/local/bin/mcp-gateway pull git\n')
  await build(
    Template().fromTemplate('devcontainer').betaDevContainerPrebuild('/srv/a b').betaSetDevContainerStart('/srv/a b'),
    child,
  )
  const begun = await printed(t, child, 'cat /var/log/calls; ls /devcontainer.up')
  assert.match(begun, /build --workspace-folder \/srv\/a b\n.*up --workspace-folder \/srv\/a b\n/)
  assert.throws(() => Template().fromBaseImage().addMcpServer('time'), BuildError)
})

test('failures are of the right class and lead to the line', async (t) => {
  const name = nameFor()
  /** The line of this file in which a mark stands. */
  const lineOf = (mark) => 1 + readFileSync(new URL(import.meta.url), 'utf8').split('\n').findIndex((line) => line.endsWith(`// ${mark}`))
  const failure = async (template, options) => {
    try {
      await build(template, name, options)
    } catch (error) {
      return error
    }
    return assert.fail('it was built')
  }
  let error = await failure(
    Template()
      .fromBaseImage()
      .runCmd('true')
      .runCmd('exit 3') // the step that fails
      .runCmd('true'),
  )
  assert.ok(error instanceof BuildError)
  assert.match(error.message, /exit code 3/)
  assert.match(error.stack, new RegExp(`templates\\.test\\.mjs:${lineOf('the step that fails')}:`))
  error = await failure(
    Template()
      .fromTemplate('no-such-template') // the source that is not there
      .runCmd('true'),
  )
  assert.match(error.message, /no-such-template/)
  assert.match(error.stack, new RegExp(`templates\\.test\\.mjs:${lineOf('the source that is not there')}:`))
  error = await failure(
    Template()
      .fromBaseImage()
      .setStartCmd('exit 4', 'false'), // the start that fails
  )
  assert.match(error.message, /exit code 4/)
  assert.match(error.stack, new RegExp(`templates\\.test\\.mjs:${lineOf('the start that fails')}:`))

  assert.ok((await failure(Template().fromBaseImage(), { apiKey: `e2b_${'0'.repeat(40)}` })) instanceof AuthenticationError)
  assert.ok((await failure(Template().fromBaseImage(), { memoryMB: 100 })) instanceof BuildError)
  error = await failure(Template({ fileContextPath: context({}) }).fromBaseImage().copy('none', '/srv/'))
  assert.match(error.message, /none|No files found/)
  assert.ok(!(error instanceof FileUploadError) || error.message.length > 0)
  await assert.rejects(build(Template().fromBaseImage(), 'Not A Name!'), BuildError)
  await assert.rejects(build(Template().fromBaseImage(), 'other-team/name'), BuildError)
  await assert.rejects(Template.exists('a b'), TemplateError)
})
