"""Small packages that installers take from a file: wheels of Python, archives of npm, a package of Debian."""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
import tempfile
import zipfile
from pathlib import Path


def wheel(directory: Path, name: str, module: str | None = None) -> Path:
    """A wheel with a module and a program, both of that name; the program is `main` of the module, and prints the name unless the module is given."""
    program = name.replace("_", "-")
    path = directory / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}/__init__.py": module or f'def main():\n    print("{name} 1")\n',
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{program} = {name}:main\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
    return path


def tgz(directory: Path, name: str, program: str | None = None) -> Path:
    """A package of npm with a program of that name, which prints it unless it is given."""
    own = name.rpartition("/")[2]
    path = directory / f"{own}.tgz"
    files = {
        "package/package.json": json.dumps({"name": name, "version": "1.0.0", "bin": {own: "run.js"}}),
        "package/run.js": program or f'#!/usr/bin/env node\nconsole.log("{name} 1")\n',
    }
    with tarfile.open(path, "w:gz") as archive:
        for file, text in files.items():
            info = tarfile.TarInfo(file)
            info.size, info.mode = len(text), 0o755
            archive.addfile(info, io.BytesIO(text.encode()))
    return path


def deb(directory: Path, name: str, files: dict[str, str], control: str = "") -> Path:
    """A package of Debian with files, and with further lines of its control file."""
    path = directory / f"{name}.deb"
    with tempfile.TemporaryDirectory() as made:
        root = Path(made) / name
        (root / "DEBIAN").mkdir(parents=True)
        (root / "DEBIAN" / "control").write_text(
            f"Package: {name}\nVersion: 1.0\nArchitecture: all\nMaintainer: x <x@example.com>\nDescription: tiny\n{control}"
        )
        for file, text in files.items():
            (root / file).parent.mkdir(parents=True, exist_ok=True)
            (root / file).write_text(text)
            (root / file).chmod(0o755)
        root.chmod(0o755)
        subprocess.run(["dpkg-deb", "--build", "--root-owner-group", root, path], check=True, capture_output=True)
    return path


def make(directory: Path) -> None:
    """One of each kind, and two of some."""
    directory.mkdir()
    for name in ("rfwheel", "rfwheel2"):
        wheel(directory, name)
    for name in ("rftool", "rfdev"):
        tgz(directory, name)
    deb(directory, "rfdeb", {"opt/rfdeb": "deb 1\n"})
