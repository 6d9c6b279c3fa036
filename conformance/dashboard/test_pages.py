"""The pages of the dashboard with answers that no honest platform gives: hostile strings everywhere, ten thousand sandboxes,
refusals, and a platform that is gone.

The page and its session are the platform's. Where a test says so, answers of the API are made by the test, in the page.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2b import Sandbox

from harness.dashboard import Dashboard, dashboard
from harness.hostile import HOSTILE
from harness.platform import Platform

# Answers for every path that the pages ask for, with `text` in each place where the API has a string.
CANNED = """
window.answerWith = (text) => (url, options) => {
  const path = url.replace('/dashboard/api/', '').replace('/dashboard/', '').split('?')[0]
  // The session is the platform's own.
  if (!/^.dashboard.(api|operator-api|agent)[/]/.test(url)) return null
  const time = '2026-01-02T03:04:05Z'
  const pairs = Object.fromEntries([[text, text], ['name', text]])
  const box = { sandboxID: 'i1', templateID: text, alias: text, clientID: text, state: text, startedAt: time, endAt: time, cpuCount: text, memoryMB: 1,
    diskSizeMB: 1, envdVersion: text, metadata: pairs, domain: text, lifecycle: { onTimeout: text, autoResume: text }, resumeError: text, pauseMode: text,
    pauseStorage: text, network: { allowOut: [text], denyOut: [text], dnsServers: [text], egressProxy: { address: text }, rules: pairs, allowPublicTraffic: false } }
  const template = { templateID: text, names: [text, text], aliases: [text], buildStatus: text, buildID: text, createdAt: time, updatedAt: text, cpuCount: 1, memoryMB: text,
    diskSizeMB: 1, spawnCount: text, buildCount: 1, builds: [{ buildID: text, status: text, createdAt: time, finishedAt: text }] }
  const entry = { timestamp: time, level: text, message: text, step: text, fields: { logger: 'egress', event_type: text, host: text, [text]: text } }
  const hook = { id: 'h1', name: text, url: text, events: [text], enabled: true, droppedEvents: text }
  const answers = [
    [/^v2\\/sandboxes$/, [box]],
    [/^sandboxes\\/metrics$/, { sandboxes: { i1: { timestamp: text, cpuUsedPct: text, memUsed: text } } }],
    [/^sandboxes\\/i1$/, box],
    // Of a sandbox that does not run, there is nothing of its agent.
    [/^sandboxes\\/i2$/, { ...box, sandboxID: 'i2', state: 'running' }],
    [/^agent\\/i2\\/process.Process\\/List$/, { processes: [{ pid: text, tag: text, config: { cmd: text, args: [text], cwd: text, envs: pairs } }, { pid: '7', tag: text, config: text }] }],
    [/^operator-api\\/sandboxes$/, [{ id: text, team: text, template: text, state: text, started_at: text, cpu_count: text, memory_mb: text, kept_bytes: text,
      usage: { cpu_percent: text, memory_used_bytes: text, disk_used_bytes: text } }]],
    [/^operator-api\\/nodes$/, [{ id: text, name: text, state: text, version: text, joined_at: text, seen_at: text, address: text, sandboxes: text, max_sandboxes: text,
      memory_bytes: text, memory_available_bytes: text, disk_available_bytes: text, cores: text, pressure: text }]],
    [/^operator-api\\/sandboxes\\/[^/]*\\/logs$/, [{ at: text, level: text, message: text, fields: pairs }]],
    [/^sandboxes\\/i1\\/metrics$/, [{ timestamp: time, cpuUsedPct: text, memUsed: 1e308 }, { timestamp: text }]],
    [/^v2\\/sandboxes\\/i1\\/logs$/, { logs: [entry] }],
    [/^sandboxes\\/i1\\/injections$/, { injections: [{ type: text, id: text, base_url: text, headers: pairs }] }],
    [/^v2\\/templates$/, [template]],
    [/^ready-made-templates$/, [{ name: text, templateName: text, description: text, cpuCount: text, memoryMB: 1, buildArgs: [{ name: text, default: text }], dockerfile: text }]],
    [/^snapshots$/, [{ snapshotID: text, names: [text] }]],
    [/^templates\\/[^/]*$/, template],
    [/\\/tags$/, [{ tag: text, buildID: text, createdAt: time }]],
    [/\\/status$/, { status: text, reason: { message: text, step: text } }],
    [/\\/builds\\/[^/]*\\/logs$/, { logs: [entry] }],
    [/^injection-rules$/, [{ ruleID: text, name: text, injection: { type: text, base_url: text, headers: pairs } }]],
    [/^secrets$/, [{ secretID: text, name: text, currentVersion: text, metadata: pairs }]],
    [/^api-keys$/, [{ id: text, name: text, mask: { prefix: text, maskedValuePrefix: text, maskedValueSuffix: text }, createdAt: text, lastUsed: text }]],
    [/^events\\/sandboxes$/, [{ id: text, type: text, eventLabel: text, sandboxId: text, timestamp: text, eventData: { sandbox_metadata: pairs } }]],
    [/^events\\/webhooks$/, [hook]],
    [/^events\\/webhooks\\/h1$/, hook],
    [/\\/deliveries$/, [{ id: text, eventId: text, type: text, status: text, attempt: text, error: text, timestamp: time, nextAttemptAt: text }]],
    [/\\/metrics\\/max$/, { value: text }],
    [/^teams\\/[^/]*\\/limits$/, [{ name: text, limit: text, used: text }, { name: 'memoryMB', limit: 1, used: 1e308 }]],
    [/^teams\\/[^/]*\\/metrics$/, [{ timestamp: time, concurrentSandboxes: text, sandboxStartRate: text }]],
  ]
  if (path === 'operator-api/metrics') {
    return { text: ['creates_total{outcome', 'sandboxes{state', 'sandbox_ends_total{reason'].map((name) => `ringfence_${name}="${text}"} 1\\nringfence_host_memory_available_bytes ${text}\\n`).join('') }
  }
  const found = answers.find(([pattern]) => pattern.test(path))
  return found ? { body: found[1] } : { status: 400, body: { code: 400, message: text } }
}
// What must not be in a page, whatever the answers were.
window.faults = () => {
  const known = new Set(['HEADER', 'NAV', 'A', 'DIV', 'SPAN', 'BUTTON', 'FOOTER', 'MAIN', 'H1', 'H2', 'H3', 'H4', 'P', 'FORM', 'LABEL', 'INPUT', 'SELECT', 'OPTION', 'TABLE',
    'CAPTION', 'THEAD', 'TBODY', 'TR', 'TH', 'TD', 'BDI', 'DL', 'DT', 'DD', 'FIGURE', 'FIGCAPTION', 'svg', 'line', 'polyline', 'polygon', 'TIME', 'CODE', 'UL', 'LI',
    'TEXTAREA', 'SECTION', 'PRE', 'DATALIST', 'DIALOG', 'FIELDSET', 'LEGEND'])
  const bad = []
  for (const one of document.body.querySelectorAll('*')) {
    if (!known.has(one.tagName)) bad.push(`element ${one.tagName}`)
    for (const { name, value } of one.attributes) {
      if (/^(on|srcdoc|formaction|src$)/.test(name)) bad.push(`attribute ${name}`)
      if (name !== 'value' && /[\\p{Cc}\\p{Cf}\\p{Co}\\p{Cs}\\u2028\\u2029]/u.test(value)) bad.push(`hidden characters in ${name} of ${one.tagName}`)
    }
    if (one.tagName === 'A' && one.origin !== location.origin && !(one.rel === 'noopener noreferrer' && one.target === '_blank')) bad.push(`link to ${one.href}`)
  }
  const text = document.body.textContent
  const hidden = text.match(/[\\p{Cf}\\p{Co}\\p{Cs}\\u2028\\u2029]|(?![\\n\\t])\\p{Cc}/u)
  if (hidden) bad.push(`hidden character ${hidden[0].codePointAt(0).toString(16)} near ${text.slice(Math.max(0, hidden.index - 40), hidden.index + 40)}`)
  if (/\\[object |undefined|NaN/.test(text)) bad.push(`no text: ${/.{0,60}(\\[object |undefined|NaN).{0,20}/.exec(text)[0]}`)
  if (document.title === 'taken') bad.push('a script has run')
  if (text.includes('the page has a fault')) bad.push('a script has failed')
  if (document.cookie || localStorage.length || sessionStorage.length) bad.push('something is kept in the browser')
  return [...new Set(bad), ...window.refused]
}
// Goes through pages, each until it has drawn its answers, and returns what is wrong in any of them.
window.visit = async (pages) => {
  const bad = []
  for (const path of pages) {
    await go(path)
    // In the answers' places, not only in the frame; a log shows lines as lines.
    const main = document.querySelector('main')
    const isThere = (selector, text) => [...main.querySelectorAll(selector)].some((one) => one.textContent.includes(text))
    const isDrawn = () => {
      if (/[/]team$/.test(path)) return main.querySelector('h1') && main.querySelector('.facts')
      if (/[/](logs|network|b1)$/.test(path)) return isThere('.log p .text', window.expectedLine)
      if (/[/]processes$/.test(path)) return isThere('[aria-label=Processes] tbody code', window.expected)
      if (window.isOperator) return isThere('[aria-label=Nodes] tbody th', window.expected) && isThere('[aria-label^=Sandboxes] tbody th', window.expected)
      return main.textContent.includes(window.expected)
    }
    for (const end = performance.now() + 20_000; !isDrawn(); await new Promise((done) => setTimeout(done, 2))) {
      if (performance.now() > end) throw new Error(`${path} has not drawn its answer: ${document.body.innerText}`)
    }
    bad.push(...faults().map((fault) => `${path}: ${fault}`))
  }
  return bad
}
"""
PAGES = (
    "/dashboard/sandboxes",
    "/dashboard/sandboxes/i1",
    "/dashboard/sandboxes/i1/logs",
    "/dashboard/sandboxes/i1/network",
    "/dashboard/sandboxes/i2/processes",
    "/dashboard/templates",
    "/dashboard/templates/t1",
    "/dashboard/templates/t1/builds/b1",
    "/dashboard/injections",
    "/dashboard/keys",
    "/dashboard/events",
    "/dashboard/events/webhooks/h1",
    "/dashboard/team",
)


@pytest.fixture(scope="module")
def browser(platform: Platform, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dashboard]:
    """The dashboard, signed in, whose answers a test may make."""
    with dashboard(tmp_path_factory.mktemp("home"), platform.url) as browser:
        browser.look()
        browser.page.call("Page.addScriptToEvaluateOnNewDocument", source=CANNED)
        browser.sign_in(platform.credentials()["E2B_API_KEY"])
        yield browser


@pytest.fixture
def shown(browser: Dashboard) -> Iterator[Dashboard]:
    yield browser
    browser.run("window.pace = 1; window.canned = null; document.querySelectorAll('dialog').forEach((one) => one.close()); go('/dashboard/sandboxes')")
    browser.heading("Sandboxes")


def answer_with(browser: Dashboard, text: str) -> None:
    """Has every answer be made of a text, and notes what a page shows of it: in one line, and in a log."""
    # A lone surrogate is none in UTF-8, and is one in JSON.
    browser.run(f"window.text = JSON.parse({json.dumps(json.dumps(text))}); window.canned = answerWith(window.text); 0")
    browser.run(
        "import('/dashboard/assets/text.js').then((module) => { window.expected = module.shown(window.text, 40).slice(0, 40);"
        " window.expectedLine = module.shownLines(window.text).slice(0, 40); window.shownText = module.shown })"
    )


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_strings_are_text_on_every_page(shown: Dashboard, text: str) -> None:
    answer_with(shown, text)
    assert shown.run(f"visit({json.dumps(PAGES)})") == []
    # And where an error quotes it.
    shown.run("window.canned = () => ({ status: 400, body: { code: 400, message: window.text } }); go('/dashboard/templates')")
    shown.wait("/^Not read: /m.test(shows())")
    assert shown.run("faults()") == []


def test_hostile_strings_are_text_on_the_page_of_the_operator(platform: Platform, tmp_path: Path) -> None:
    """Names of teams, templates and nodes, and the log of a sandbox, which whoever runs the platform reads."""
    told = platform.run("dashboard").stdout
    (code,) = re.findall(r"^\s*(\w+_[0-9a-f]{20,})$", told, re.MULTILINE)
    with dashboard(tmp_path, platform.url) as operator:
        operator.look()
        operator.page.call("Page.addScriptToEvaluateOnNewDocument", source=CANNED)
        operator.sign_in(code)
        operator.heading("Host")
        operator.run("window.isOperator = true; 0")
        for text in HOSTILE:
            answer_with(operator, text)
            assert operator.run("visit(['/dashboard'])") == [], text
            for name, drawn in (("Log", "document.querySelector('dialog pre')?.textContent.includes(window.expected)"), ("End", "document.querySelector('dialog bdi') !== null")):
                # By its place, because its name is hostile too.
                operator.run(f"[...document.querySelectorAll('[aria-label^=Sandboxes] tbody button')].find((one) => one.textContent === '{name}').click()")
                operator.wait(drawn)
                assert operator.run("faults()") == [], (name, text)
                operator.run("document.querySelector('dialog').close()")
                operator.wait("document.querySelector('dialog') === null")


@pytest.mark.parametrize("look", [("light", 1280), ("dark", 360)], ids=["desk", "phone"])
def test_pages_that_are_full_are_accessible(shown: Dashboard, look: tuple[str, int]) -> None:
    """Each kind of row, label and error at once, in long and short words."""
    shown.look(*look)
    try:
        for text, is_whole in (("plain", True), ("a-word-that-is-longer-than-any-window-of-a-phone-has-columns-" * 3, False)):
            shown.run(f"window.canned = answerWith({json.dumps(text)}); 0")
            for path in PAGES:
                shown.run(f"go({json.dumps(path)})")
                shown.wait("document.querySelector('main .facts, main .log p, main tbody tr') !== null")
                shown.check(is_whole)
    finally:
        shown.look()


def test_hostile_metadata_and_files_of_a_real_sandbox_are_text(shown: Dashboard, platform: Platform) -> None:
    texts = [text for text in HOSTILE if "\x00" not in text and "\ud800" not in text and len(text.encode()) < 200 and "/" not in text]
    sandbox = Sandbox.create(metadata={f"k{at}": text for at, text in enumerate(texts)} | {"<b>name</b>": "\u202e"}, timeout=120)
    try:
        for text in texts:
            sandbox.files.write(f"/home/user/{text}", text)
        shown.run(f"go('/dashboard/sandboxes/{sandbox.sandbox_id}')")
        shown.shows("<b>name</b>=\\u{202e}")
        shown.run("import('/dashboard/assets/text.js').then((module) => { window.shownText = module.shown })")
        drawn = shown.run("[...document.querySelectorAll('.pair')].map((one) => one.textContent)")
        assert len(drawn) == len(texts) + 1 or "more" in shown.run("shows()")
        assert shown.run("faults()") == []
        shown.press("Files")
        shown.wait(f"document.querySelectorAll('.files-table tbody tr').length >= {len(texts)}")
        names = set(shown.run("[...document.querySelectorAll('.files-table tbody th bdi')].map((one) => one.textContent)"))
        wanted = shown.run(f"{json.dumps(texts)}.map((one) => shownText(one))")
        assert set(wanted) <= names
        assert shown.run("faults()") == []
        shown.press("Logs")
        shown.shows("the sandbox was created")
        assert shown.run("faults()") == []
    finally:
        sandbox.kill()


MANY = """
window.asked = []
window.many = 10_000
window.canned = (url) => {
  if (url.startsWith('/dashboard/api/sandboxes/metrics')) {
    window.asked.push(url)
    return { body: { sandboxes: {} } }
  }
  if (!url.startsWith('/dashboard/api/v2/sandboxes?')) return null
  window.asked.push(url)
  const query = new URLSearchParams(url.split('?')[1])
  const from = Number(query.get('nextToken') ?? 0)
  const list = []
  for (let at = from; at < Math.min(from + 100, window.many); at += 1) {
    list.push({ sandboxID: `i${String(at).padStart(6, '0')}`, templateID: 't', alias: 'base', state: 'running', startedAt: '2026-01-01T00:00:00Z',
      endAt: '2099-01-01T00:00:00Z', metadata: at === 7777 ? { needle: 'here' } : { number: String(at) } })
  }
  return { body: list, headers: from + 100 < window.many ? { 'x-next-token': String(from + 100) } : {} }
}
0
"""


def test_ten_thousand_sandboxes_are_shown_in_pages(shown: Dashboard) -> None:
    shown.run(MANY)
    shown.run("go('/dashboard/sandboxes')")
    shown.wait("document.querySelectorAll('tbody tr').length === 100")
    assert shown.run("document.querySelectorAll('*').length") < 5000
    # All of the page's sandboxes are measured by one request.
    shown.wait("window.asked.some((url) => url.includes('metrics'))")
    for at in range(1, 4):
        shown.press("Next")
        shown.shows(f"i{at:04}00")
        assert shown.run("document.querySelectorAll('tbody tr').length") == 100
    shown.press("Previous")
    shown.shows("i000200")
    # A text is looked for in all of them.
    shown.put("Text", "needle=here")
    shown.press("Filter")
    shown.shows("1 shown of 10000 looked at")
    assert shown.run("[...document.querySelectorAll('tbody th a')].map((one) => one.textContent)") == ["i007777"]
    shown.put("Text", "")
    shown.press("Filter")
    shown.shows("100 shown, page 1.")
    # Rows stay the same elements, so that the focus is not lost by an answer.
    shown.run("window.row = document.querySelector('tbody tr'); control('Select i000000').focus(); window.asked = []")
    shown.wait("window.asked.length > 1")
    shown.wait("window.row.isConnected && document.activeElement.getAttribute('aria-label') === 'Select i000000'")


def test_answers_that_are_too_many_are_cut(shown: Dashboard) -> None:
    """Whatever an answer has, the page is bounded."""
    shown.run(
        """window.canned = (url) => {
          const many = (make) => ({ body: Array.from({ length: 2000 }, (_, at) => make(`n${at}`)) })
          if (url.startsWith('/dashboard/api/api-keys')) return many((name) => ({ id: name, name, mask: {}, createdAt: '2026-01-01T00:00:00Z' }))
          if (url.startsWith('/dashboard/api/injection-rules')) return many((name) => ({ ruleID: name, name, injection: {} }))
          if (url.startsWith('/dashboard/api/v2/templates')) return many((name) => ({ templateID: name, names: [name] }))
          if (url.startsWith('/dashboard/api/v2/sandboxes?')) return many((name) => ({ sandboxID: name, state: 'running', metadata: Object.fromEntries(Array.from({ length: 100 }, (_, at) => [at, name])) }))
          if (url.includes('/v2/sandboxes/i1/logs')) return { body: { logs: Array.from({ length: 20_000 }, (_, at) => ({ timestamp: new Date(1e12 + at).toISOString(), message: `m${at}` })) } }
          return null
        }; 0"""
    )
    for path, text, selector, most in (
        ("/dashboard/keys", "500 are shown", "tbody tr", 500),
        ("/dashboard/injections", "500 are shown", ".table[aria-label='Injection rules'] tbody tr", 500),
        ("/dashboard/templates", "100 shown", "tbody tr", 100),
        ("/dashboard/sandboxes", "100 shown", "tbody tr, .pair", 500),
        ("/dashboard/sandboxes/i1/logs", "lines", ".log p", 1000),
    ):
        shown.run(f"go({json.dumps(path)})")
        shown.shows(text)
        assert 0 < shown.run(f"document.querySelectorAll({json.dumps(selector)}).length") <= most, path


def test_a_refusal_is_told_and_not_repeated_at_once(shown: Dashboard) -> None:
    # The times are real ones: in the 30 seconds a slow machine does the rest.
    shown.run("window.pace = 1; window.asked = 0; window.canned = (url) => { window.asked += 1; return { status: 429, headers: { 'retry-after': '30' }, body: { code: 429, message: 'too many requests' } } }")
    shown.run("go('/dashboard/keys')")
    shown.shows("Not read: too many requests (try again in 30 s).")
    shown.run("go('/dashboard/sandboxes')")
    shown.shows("too many requests (try again in 30 s)")
    # Nothing asks again by itself within what the platform asked for: one request of each of the two pages.
    asked = shown.run("new Promise((done) => setTimeout(() => done(window.asked), 4000))")
    assert asked == 2
    shown.press("Try again")
    shown.wait("window.asked === 3")
    # A change is sent once, and its error stays in the dialog.
    shown.press("Create sandbox")
    shown.press("Create")
    shown.wait("document.querySelector('dialog .error').textContent === 'Not done: too many requests (try again in 30 s).'")
    assert shown.run("window.asked") == 5  # With the list of the templates that are suggested.
    shown.press("Cancel")


def test_a_platform_that_is_gone_is_told_and_what_was_shown_stays(shown: Dashboard) -> None:
    shown.run(MANY)
    shown.run("window.pace = 10; go('/dashboard/sandboxes')")
    shown.wait("document.querySelectorAll('tbody tr').length === 100")
    shown.run("window.canned = () => { throw new TypeError('Failed to fetch') }; 0")
    shown.shows("Not current: the platform cannot be reached.")
    assert shown.run("document.querySelectorAll('tbody tr').length") == 100
    shown.run(MANY)
    shown.shows("100 shown, page 1.")


def test_a_hidden_page_asks_nothing(shown: Dashboard) -> None:
    shown.run(MANY)
    shown.run("window.pace = 10; go('/dashboard/sandboxes')")
    shown.wait("window.asked.length > 0")
    shown.run("Object.defineProperty(document, 'hidden', { value: true, configurable: true }); document.dispatchEvent(new Event('visibilitychange')); window.asked = []")
    assert shown.run("new Promise((done) => setTimeout(() => done(window.asked.length), 4000))") <= 2
    before = shown.run("window.asked.length")
    shown.run("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
    shown.wait(f"window.asked.length > {before}")
