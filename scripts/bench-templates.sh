#!/usr/bin/env bash
# Measures the ready-made templates for SPECIFICATION.md: time of the build, size, memory of an idle sandbox, and cells.
#
# Usage: scripts/bench-templates.sh [TEMPLATE...]   (default: all that the program carries)
# RINGFENCE_BIN   the binary to measure (default: the release build of this tree)
# BENCH_CONFIG    lines for the configuration, such as `egress.allow_private = "10.0.0.0/8"` where the mirrors are in that network
#
# Builds fetch from the mirrors of packages that the recipes name, some gigabytes for all. Needs root, and 12 GB in $TMPDIR
# (default /var/tmp). The client and CRIU are installed below target/.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/scripts/common.sh"
help_if_asked "$@"
known=" agents code-interpreter desktop mcp-gateway "
for word in "$@"; do
  [[ $known == *" $word "* ]] || refuse "unknown template: $word"
done
need_root
need_packages "${run_packages[@]}"
RINGFENCE_BIN=${RINGFENCE_BIN:-$(release_binary)} RINGFENCE_CRIU=$(criu_program)
export RINGFENCE_BIN RINGFENCE_CRIU PYTHONDONTWRITEBYTECODE=1
venv=$(python_environment "$root/conformance/codeint/requirements-2.11.5.txt" "$root/target/codeint-2.11.5")
exec "$venv/bin/python" "$root/scripts/bench_templates.py" "$@"
