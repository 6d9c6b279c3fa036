"""What `bench-import.sh` does: an image, a registry in a namespace, and two ways to unpack the image."""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LAYER_BYTES = 256_000_000
NAMESPACE, LINK = f"bench{os.getpid()}", f"be{os.getpid()}"
HOST, REGISTRY = "10.213.77.1", "10.213.77.2"
IMAGE = f"{REGISTRY}:5000/bench:1"
KIND = "application/vnd.oci.image"
ARCH = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
WORDS = [f"word{number}" for number in range(5000)]


def files(number: int) -> Iterator[tuple[str, bytes]]:
    """Files of one layer: large ones that cannot be compressed, or many small texts."""
    left, index, rng = LAYER_BYTES, 0, random.Random(number)
    while left > 0:
        if number % 2 == 0:
            data = rng.randbytes(min(left, 16_000_000))
        else:
            size = min(left, rng.randrange(2_000, 100_000))
            data = " ".join(rng.choices(WORDS, k=size // 6)).encode()[:size]
        yield f"srv/layer{number}/{index // 100}/{index}", data
        left, index = left - max(len(data), 1), index + 1


def layer(number: int, blobs: Path) -> tuple[dict[str, object], str]:
    """One compressed layer of the image, and the digest of its content."""
    made = blobs / f"new{number}"
    content = hashlib.sha256()
    with open(made, "wb") as out:
        gzip = subprocess.Popen(["gzip", "-1", "-n"], stdin=subprocess.PIPE, stdout=out)

        class Both(io.RawIOBase):
            def write(self, data: bytes) -> int:
                content.update(data)
                gzip.stdin.write(data)
                return len(data)

        with tarfile.open(fileobj=Both(), mode="w|", format=tarfile.USTAR_FORMAT) as archive:
            for name, data in files(number):
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
        gzip.stdin.close()
        assert gzip.wait() == 0
    return blob(made, f"{KIND}.layer.v1.tar+gzip"), f"sha256:{content.hexdigest()}"


def blob(made: Path, kind: str) -> dict[str, object]:
    with open(made, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    size = made.stat().st_size
    made.rename(made.parent / digest)
    return {"mediaType": kind, "digest": f"sha256:{digest}", "size": size}


def image(directory: Path) -> int:
    """Writes the image as an OCI layout, and returns the size of its compressed layers."""
    blobs = directory / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def document(content: object, kind: str) -> dict[str, object]:
        path = blobs / "new"
        path.write_text(json.dumps(content))
        return blob(path, kind)

    layers = [layer(number, blobs) for number in range(4)]
    config = {
        "architecture": ARCH,
        "os": "linux",
        "config": {"Env": ["PATH=/usr/bin:/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [content for _, content in layers]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{KIND}.manifest.v1+json",
        "config": document(config, f"{KIND}.config.v1+json"),
        "layers": [described for described, _ in layers],
    }
    named = {"annotations": {"org.opencontainers.image.ref.name": "bench"}}
    index = {"schemaVersion": 2, "manifests": [{**document(manifest, manifest["mediaType"]), **named}]}
    (directory / "index.json").write_text(json.dumps(index))
    (directory / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    return sum(described["size"] for described, _ in layers)


def run(*command: object) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}: {done.stderr[-2000:] or done.stdout[-2000:]}")


def wait_for(url: str, process: subprocess.Popen[bytes], within_s: float = 60) -> None:
    deadline = time.monotonic() + within_s
    while True:
        if process.poll() is not None:
            sys.exit(f"{process.args[0]} has ended with {process.returncode}")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            if time.monotonic() > deadline:
                sys.exit(f"{url} does not answer")
            time.sleep(0.05)


@contextmanager
def registry(directory: Path) -> Iterator[None]:
    """A registry in a namespace, for as long as the context lasts."""
    run("ip", "netns", "add", NAMESPACE)
    process = None
    try:
        run("ip", "link", "add", LINK, "type", "veth", "peer", "name", "eth0", "netns", NAMESPACE)
        run("ip", "address", "add", f"{HOST}/30", "dev", LINK)
        run("ip", "link", "set", LINK, "up")
        run("ip", "-n", NAMESPACE, "address", "add", f"{REGISTRY}/30", "dev", "eth0")
        run("ip", "-n", NAMESPACE, "link", "set", "eth0", "up")
        config = {
            "version": 0.1,
            "log": {"level": "error"},
            "storage": {"filesystem": {"rootdirectory": str(directory / "registry")}},
            "http": {"addr": f"{REGISTRY}:5000"},
        }
        (directory / "registry.json").write_text(json.dumps(config))
        command = ["ip", "netns", "exec", NAMESPACE, "docker-registry", "serve", str(directory / "registry.json")]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for(f"http://{REGISTRY}:5000/v2/", process)
        yield
    finally:
        if process:
            process.terminate()
            process.wait()
        run("ip", "netns", "delete", NAMESPACE)


class Peaks:
    """Peak memory of processes that have a word in their command line, in KiB, looked for all the time."""

    def __init__(self, word: bytes) -> None:
        self.word, self.peak, self.ended = word, 0, threading.Event()
        self.thread = threading.Thread(target=self.watch)

    def watch(self) -> None:
        while not self.ended.wait(0.05):
            for process in Path("/proc").glob("[0-9]*"):
                try:
                    if self.word in (process / "cmdline").read_bytes():
                        self.peak = max(self.peak, peak(process))
                except OSError:
                    continue

    def __enter__(self) -> Peaks:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()


def peak(process: Path) -> int:
    lines = (process / "status").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)


def ours(binary: str, directory: Path) -> tuple[float, int, int]:
    """Seconds of an import by a platform that has nothing, peak memory of the platform, and that of the unpacker."""
    data = directory / "data"
    config = directory / "config.toml"
    config.write_text(
        f'[builds]\ninsecure_registries = "{REGISTRY}:5000"\n[egress]\nallow_private = "{REGISTRY}"\n[sandbox]\ndisk_mb = 4096\n[pool]\nbase = 0\n'
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with open(directory / "platform.log", "wb") as log:
        command = [binary, "up", "--data-dir", str(data), "--config", str(config), "--listen", address]
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        wait_for(f"http://{address}/health", server)
        build = [binary, "template", "build", "--from-image", IMAGE, "--data-dir", str(data), "--config", str(config)]
        with Peaks(b"image-pull") as peaks:
            begun = time.monotonic()
            done = subprocess.run(build, capture_output=True, text=True)
            took = time.monotonic() - begun
        if done.returncode != 0:
            sys.exit(f"the build failed: {done.stderr[-3000:]}\n{(directory / 'platform.log').read_text()[-2000:]}")
        return took, peak(Path(f"/proc/{server.pid}")), peaks.peak
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()
        run(binary, "down", "--data-dir", data)
        shutil.rmtree(data)


def theirs(directory: Path) -> tuple[float, float, int]:
    """Seconds of `skopeo copy` and of `umoci unpack`, and the peak memory of either."""
    layout, bundle = directory / "layout", directory / "bundle"
    begun = time.monotonic()
    with Peaks(str(layout).encode()) as peaks:
        run("skopeo", "copy", "--src-tls-verify=false", f"docker://{IMAGE}", f"oci:{layout}:bench")
        copied = time.monotonic()
        run("umoci", "unpack", "--image", f"{layout}:bench", bundle)
        unpacked = time.monotonic()
    shutil.rmtree(layout)
    shutil.rmtree(bundle)
    return copied - begun, unpacked - copied, peaks.peak


def main(binary: str, runs: int) -> None:
    # On a disk: the directory for temporary files may be memory.
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/var/tmp") as name:
        directory = Path(name)
        print("making an image of 4 layers, 1.02 GB of files", flush=True)
        size = image(directory / "image")
        with registry(directory):
            run("skopeo", "copy", "--dest-tls-verify=false", f"oci:{directory / 'image'}:bench", f"docker://{IMAGE}")
            shutil.rmtree(directory / "image")
            imports, copies = [], []
            for number in range(runs):
                imports.append(ours(binary, directory))
                copies.append(theirs(directory))
                one, other = imports[-1], copies[-1]
                load = f"load {os.getloadavg()[0]:.1f}"
                print(f"run {number + 1}: import {one[0]:.1f} s, skopeo {other[0]:.1f} s + umoci {other[1]:.1f} s, {load}", flush=True)
    mib = 1 / 1024
    print(f"\nimage           4 layers, {4 * LAYER_BYTES / 1e9:.2f} GB of files, {size / 1e9:.2f} GB compressed by gzip")
    print(f"machine         {os.cpu_count()} CPUs, Linux {platform.release()}")
    print(f"import          p50 {statistics.median(one for one, *_ in imports):.1f} s of {runs}")
    print(f"skopeo + umoci  p50 {statistics.median(a + b for a, b, _ in copies):.1f} s of {runs}")
    print(f"peak memory     platform {max(one[1] for one in imports) * mib:.0f} MiB, unpacker {max(one[2] for one in imports) * mib:.0f} MiB,")
    print(f"                skopeo or umoci {max(one[2] for one in copies) * mib:.0f} MiB")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
