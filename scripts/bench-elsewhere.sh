#!/usr/bin/env bash
# Measures, for SPECIFICATION.md, how long a paused sandbox takes to go on on another node than the one that has it, from its copy in a
# bucket on the same machine: idle, and with 200 MB of memory; and a fork on a node of another server.
#
# Usage: scripts/bench-elsewhere.sh [NUMBER]   of each kind (default: 20)
# RINGFENCE_BIN   the binary to measure (default: the release build of this tree)
#
# RINGFENCE_VERSITYGW   the S3 server (default: it is built below target/, by the Go of the PATH or of RINGFENCE_GO)
#
# Needs root, and PostgreSQL and Go of Debian. The SDK and CRIU are installed below target/ as well.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/scripts/common.sh"
help_if_asked "$@"
[[ ${1:-20} =~ ^[1-9][0-9]*$ ]] || refuse "not a number: $1"
need_root
need_packages "${run_packages[@]}" postgresql golang-go
RINGFENCE_BIN=${RINGFENCE_BIN:-$(release_binary)} RINGFENCE_CRIU=$(criu_program) RINGFENCE_GO=${RINGFENCE_GO:-go}
if [[ -z ${RINGFENCE_VERSITYGW:-} ]]; then
  RINGFENCE_VERSITYGW=$root/target/versitygw/versitygw
  export RINGFENCE_GO
  [[ -x $RINGFENCE_VERSITYGW ]] || versitygw_into "${RINGFENCE_VERSITYGW%/*}"
fi
export RINGFENCE_BIN RINGFENCE_CRIU RINGFENCE_VERSITYGW PYTHONDONTWRITEBYTECODE=1
venv=$(sdk_environment 2.63.0)
exec "$venv/bin/python" "$root/scripts/bench_elsewhere.py" "${1:-20}"
