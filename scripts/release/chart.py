#!/usr/bin/env python3
"""Writes the chart of a release, as `helm package` does: an archive of its files, with the version of the release in them.

Usage: chart.py DIRECTORY OUTPUT VERSION SECONDS

The archive depends on its arguments and the files alone. A standard library is enough for that, so helm is not needed.
"""

from __future__ import annotations

import gzip
import io
import re
import sys
import tarfile
from pathlib import Path


def main() -> None:
    directory, output, version, seconds = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    # As in the tag of the image, which is the chart's `appVersion`. It is also what a version of a chart may look like.
    version = version.replace("~", "-")
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for path in sorted(path for path in directory.rglob("*") if path.is_file()):
            content = path.read_bytes()
            if path == directory / "Chart.yaml":
                text = re.sub(r"^version: .*$", f'version: "{version}"', content.decode(), flags=re.MULTILINE)
                content = re.sub(r"^appVersion: .*$", f'appVersion: "{version}"', text, flags=re.MULTILINE).encode()
            member = tarfile.TarInfo(f"ringfence/{path.relative_to(directory)}")
            member.size, member.mtime, member.mode = len(content), seconds, 0o644
            archive.addfile(member, io.BytesIO(content))
    output.write_bytes(gzip.compress(made.getvalue(), 9, mtime=0))


if __name__ == "__main__":
    main()
