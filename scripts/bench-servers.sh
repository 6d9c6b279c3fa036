#!/usr/bin/env bash
# Measures, for SPECIFICATION.md, what several servers on one PostgreSQL cost: requests, commands and traffic of a sandbox on a node
# of the server that is asked and of the other one, in turn, and creates beside one server alone.
#
# Usage: scripts/bench-servers.sh [NUMBER]   of each kind (default: 300)
# RINGFENCE_BIN   the binary to measure (default: the release build of this tree)
#
# Needs root and PostgreSQL of Debian. The SDK is installed below target/.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/scripts/common.sh"
help_if_asked "$@"
[[ ${1:-300} =~ ^[1-9][0-9]*$ ]] || refuse "not a number: $1"
need_root
need_packages "${run_packages[@]}" postgresql
RINGFENCE_BIN=${RINGFENCE_BIN:-$(release_binary)}
export RINGFENCE_BIN PYTHONDONTWRITEBYTECODE=1
venv=$(sdk_environment 2.63.0)
exec "$venv/bin/python" "$root/scripts/bench_servers.py" "${1:-300}"
