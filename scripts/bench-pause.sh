#!/usr/bin/env bash
# Measures pauses to disk, resumes, snapshots and forks for SPECIFICATION.md.
#
# Usage: scripts/bench-pause.sh [CASE...]   with CASE one of: idle memory fork snapshot files (default: all)
# RINGFENCE_BIN   the binary to measure (default: the release build of this tree)
#
# Needs root and 12 GB in $TMPDIR (default /var/tmp). CRIU and the SDK are installed below target/.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/scripts/common.sh"
help_if_asked "$@"
known=" idle memory fork snapshot files "
for word in "$@"; do
  [[ $known == *" $word "* ]] || refuse "unknown case: $word"
done
need_root
need_packages "${run_packages[@]}"
RINGFENCE_BIN=${RINGFENCE_BIN:-$(release_binary)} RINGFENCE_CRIU=$(criu_program)
export RINGFENCE_BIN RINGFENCE_CRIU PYTHONDONTWRITEBYTECODE=1
venv=$(sdk_environment 2.63.0)
exec "$venv/bin/python" "$root/scripts/bench_pause.py" "$@"
