"""Recipes on Debian instead of `base`. The code interpreter, with R and Java: a root file system of packages alone is an image of a
registry in a fake internet, and what the recipe installs comes from a repository in the image, so that the build reaches nothing else.
The MCP gateway: the same image is an archive.

Packages are fetched from the mirrors of this host, for minutes.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import shlex
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2b import TimeoutException
from e2b_code_interpreter import Sandbox

from harness import code_interpreter, mcp_gateway
from harness.hoststate import HostState, left_over
from harness.internet import RESOLVER, Internet
from harness.patience import within
from harness.platform import Platform
from harness.registry import layer, member, registry, saved

HOST, PORT = "registry.example.org", 5000
CONFIG = f"""
[builds]
insecure_registries = "{HOST}:{PORT}"
[egress]
resolvers = "{RESOLVER}:53"
"""
PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# What the recipes install where it is missing, with both languages.
MISSING = "python3-venv nodejs npm curl sudo git util-linux r-base-core r-cran-jsonlite r-cran-repr default-jdk-headless"
REPOSITORY = "opt/packages/debian"
SOURCES = f"deb [trusted=yes] file:/{REPOSITORY} ./\n"


def root(directory: Path) -> list[bytes]:
    """Debian, and a layer with packages that it lacks."""
    packages = directory / "packages"
    packages.mkdir()
    cache = "-o Dir::Cache::archives=/var/tmp/fetched"
    fetch = f'chroot "$1" sh -c "mkdir -p /var/tmp/fetched/partial && apt-get -q -y --no-install-recommends --download-only {cache} install {MISSING}"'
    hooks = [f"--customize-hook={fetch}", f'--customize-hook=mv "$1"/var/tmp/fetched/*.deb {packages} && rm -r "$1"/var/tmp/fetched']
    made = subprocess.run(
        ["mmdebstrap", "--quiet", "--mode=root", "--variant=apt", "--dpkgopt=force-unsafe-io", *hooks, "bookworm", directory / "root.tar"],
        capture_output=True, text=True, timeout=within(900), check=False,
    )
    assert made.returncode == 0, made.stderr
    index = []
    for file in sorted(packages.glob("*.deb")):
        control = subprocess.run(["dpkg-deb", "-f", file], check=True, capture_output=True, text=True).stdout.strip()
        data = file.read_bytes()
        index.append(f"{control}\nFilename: ./{file.name}\nSize: {len(data)}\nSHA256: {hashlib.sha256(data).hexdigest()}\n")

    def repository(archive: object) -> None:
        member(archive, "etc/apt/sources.list", SOURCES.encode(), mode=0o644)
        member(archive, f"{REPOSITORY}/Packages", "\n".join(index).encode(), mode=0o644)
        for file in sorted(packages.glob("*.deb")):
            member(archive, f"{REPOSITORY}/{file.name}", file.read_bytes(), mode=0o644)

    return [gzip.compress((directory / "root.tar").read_bytes(), 1), layer(repository)]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Platform, Path]]:
    """The log of the build of the template on Debian, its platform, and a directory with the image as the archive `debian.tar`."""
    directory = tmp_path_factory.mktemp("debian")
    # With the mirrors of this host, which the fake internet has not.
    layers = root(directory)
    (directory / "internet").mkdir()
    with Internet(directory / "internet") as internet, registry(internet, directory / "registry", HOST, PORT) as images:
        images.push("debian", "12", layers, env=[PATH])
        before = HostState.take()
        server = Platform(directory / "data", config=CONFIG, ready=True)
        try:
            server.start()
            server.use()
            begun = time.monotonic()
            options = ("--build-arg", f"BASE={HOST}:{PORT}/debian:12", "--build-arg", "LANGUAGES=r java")
            log = code_interpreter.build(server, directory, *options, timeout_s=900)
            print(f"the build took {time.monotonic() - begun:.0f} s")
            (directory / "debian.tar").write_bytes(saved([gzip.decompress(data) for data in layers], [PATH]))
            yield log, server, directory
            assert server.terminate() == 0, server.log_tail(12)
            assert server.down().returncode == 0
            assert left_over(before) == {}
        finally:
            server.close()


@pytest.fixture(scope="module")
def built(started: tuple[str, Platform, Path]) -> str:
    """The log of the build of the template on Debian."""
    return started[0]


@pytest.fixture(scope="module")
def debian(built: str) -> Iterator[Sandbox]:
    """A sandbox of it."""
    with Sandbox.create(timeout=900) as box:
        print("sizes:", box.commands.run("sudo du -sh /opt/code-interpreter /usr/lib/R /usr/lib/jvm /usr 2>/dev/null || true", timeout=120).stdout)
        yield box


def test_what_is_missing_is_installed_and_every_language_runs(built: str, debian: Sandbox) -> None:
    assert "r-base-core" in built and "default-jdk-headless" in built
    assert debian.commands.run("cat /etc/debian_version").stdout.startswith("12.")
    for language, cell, want in (
        ("python", "'%d' % (6 * 7)", "42"),
        ("js", "6 * 7", "42"),
        ("ts", "const n: number = 6 * 7; n", "42"),
        ("r", "6 * 7", "[1] 42"),
        ("java", "6 * 7", "42"),
    ):
        done = debian.run_code(cell, language=language)
        assert (done.text or done.results[0].text, done.error) == (want, None), language
    assert "".join(debian.run_code("echo $((6 * 7)); id -un", language="bash").logs.stdout) == "42\nroot\n"
    plot = debian.run_code("import matplotlib.pyplot as plt; plt.plot([1, 2]); plt.show()").results[0]
    assert plot.chart.type.value == "line"


def test_r(debian: Sandbox) -> None:
    def run(code: str, **options: object) -> object:
        return debian.run_code(code, language="r", **options)

    first = run("x <- c(a = 1, b = 2)\nprint('out')\nmessage('err')\nwarning('careful')\nx['b']\n'last'")
    assert "".join(first.logs.stdout) == '[1] "out"\n' and first.error is None
    assert "err\n" in "".join(first.logs.stderr) and "careful" in "".join(first.logs.stderr)
    assert [result.is_main_result for result in first.results] == [False, True] and first.text == '[1] "last"'
    assert run("x[['a']]").text == "[1] 1"
    failed = run("f <- function(n) stop('no ', n)\nf(3)").error
    assert (failed.name, failed.value) == ("Error", "no 3") and "f(3)" in failed.traceback
    assert run("x <- (").error.name == "Error"
    (table,) = run("data.frame(n = c(1.5, NA, Inf), s = c('x', NA, 'z'), f = factor(c('u', 'v', 'u')))").results
    assert table.data == {"n": [1.5, None, None], "s": ["x", None, "z"], "f": ["u", "v", "u"]} and "<table" in table.html
    (picture,) = run("plot(1:3)").results
    assert base64.b64decode(picture.png, validate=True).startswith(b"\x89PNG")
    assert run("nchar('a\u2028\U0001f600')").text == "[1] 3"
    with pytest.raises(TimeoutException):
        run("while (TRUE) {}", timeout=1)
    assert run("x[['b']]").text == "[1] 2", "an interrupt leaves the variables"
    assert run("quit()").error.name == "ContextRestarting"
    assert run("exists('x')").text == "[1] FALSE"


def test_java(debian: Sandbox) -> None:
    def run(code: str, **options: object) -> object:
        return debian.run_code(code, language="java", **options)

    first = run('int square(int n) { return n * n; }\nrecord Pair(int a, String b) {}\nvar p = new Pair(square(3), "z");\nSystem.out.println("out é");\nSystem.err.println("err");\np')
    assert (first.logs.stdout, first.logs.stderr, first.error) == (["out é\n"], ["err\n"], None)
    assert first.text == "Pair[a=9, b=z]" and first.results[0].is_main_result
    assert run("p.b()").text == "z"
    assert run("int unused = 3;").results == []
    failed = run("int z = 1 / (square(0));").error
    assert (failed.name, failed.value) == ("ArithmeticException", "/ by zero") and "java.lang" in failed.traceback
    wrong = run("int y = nowhere;").error
    assert wrong.name == "SyntaxError" and "cannot find symbol" in wrong.value
    assert run("for (int i = 0; i < 3; i++) {").error.name == "SyntaxError"
    assert run("List.of(1, 2).stream().map(n -> n * 2).toList()").text == "[2, 4]"
    with pytest.raises(TimeoutException):
        run("while (true) {}", timeout=2)
    assert run("p.a()").text == "9", "an interrupt leaves the variables"
    assert run("System.exit(3)").error.name == "ContextRestarting"
    assert run("p").error.name == "SyntaxError"


@pytest.mark.parametrize(
    ("language", "variable", "where"),
    [("r", "cat(Sys.getenv('V', 'None'))", "cat(getwd())"), ("java", 'System.out.print(System.getProperty("V", "None"))', 'System.out.print(System.getProperty("user.dir"))')],
)
def test_variables_and_directories_of_other_languages(debian: Sandbox, language: str, variable: str, where: str) -> None:
    value = "it's \"quoted\" $HOME `id` \\ ä\nand more"
    assert debian.run_code(variable, language=language).logs.stdout == ["None"]
    assert "".join(debian.run_code(variable, language=language, envs={"V": value}).logs.stdout) == value
    assert debian.run_code(variable, language=language).logs.stdout == ["None"]
    context = debian.create_code_context(cwd="/var/tmp", language=language)
    assert debian.run_code(where, context=context).logs.stdout == ["/var/tmp"]
    debian.restart_code_context(context)
    assert debian.run_code(where, context=context).logs.stdout == ["/var/tmp"]
    debian.remove_code_context(context)


def test_much_output_of_other_languages_is_passed_on(debian: Sandbox) -> None:
    def size(code: str, language: str) -> int:
        sizes: list[int] = []
        done = debian.run_code(code, language=language, on_stdout=lambda message: sizes.append(len(message.line)), timeout=120)
        assert done.error is None, done.error
        return sum(sizes)

    assert size("for (n in 1:200) cat(strrep('x', 99999), '\\n', sep = '')", "r") == 20_000_000
    assert size('for (int n = 0; n < 200; n++) System.out.println("x".repeat(99_999));', "java") == 20_000_000


def test_the_gateway_is_built_on_an_archive(started: tuple[str, Platform, Path]) -> None:
    _, server, directory = started
    log = mcp_gateway.build(server, directory, "--base-archive", str(directory / "debian.tar"))
    assert "uploaded the archive" in log and "[base] FROM archive [" in log and " git" in log
    settings = {"command": "python3", "args": ["-c", "import sys; sys.exit('it was started')"]}
    with Sandbox.create("mcp-gateway", timeout=300) as box:
        assert box.commands.run("cat /etc/debian_version").stdout.startswith("12.")
        assert box.commands.run("uvx --version && npx --version && git --version").stdout.startswith("uv")
        config = json.dumps({"mine": settings})
        refused = box.commands.run(f"mcp-gateway --config {shlex.quote(config)} 2>&1 || true", user="root", envs={"GATEWAY_ACCESS_TOKEN": "t"}).stdout
        assert "the server mine did not start" in refused and "it was started" in refused, refused
