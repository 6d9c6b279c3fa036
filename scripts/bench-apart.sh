#!/usr/bin/env bash
# Measures, for SPECIFICATION.md, what a node costs that is a process of its own, on the same machine as its server: creates, small
# requests and a download of a sandbox, in turn with `ringfence up`.
#
# Usage: scripts/bench-apart.sh [NUMBER]   creates of each kind (default: 300)
# RINGFENCE_BIN   the binary to measure (default: the release build of this tree)
#
# Needs root, and wrk and nginx of Debian. The SDK is installed below target/.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/scripts/common.sh"
help_if_asked "$@"
[[ ${1:-300} =~ ^[1-9][0-9]*$ ]] || refuse "not a number: $1"
need_root
need_packages "${run_packages[@]}" wrk nginx-light
RINGFENCE_BIN=${RINGFENCE_BIN:-$(release_binary)}
export RINGFENCE_BIN PYTHONDONTWRITEBYTECODE=1
venv=$(sdk_environment 2.63.0)
exec "$venv/bin/python" "$root/scripts/bench_apart.py" "${1:-300}"
