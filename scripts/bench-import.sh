#!/usr/bin/env bash
# Times the import of an image of 1 GB (`ringfence template build --from-image`) beside `skopeo copy` and `umoci unpack` of
# the same image from the same registry, three times each, and prints medians and peak memory.
#
# The registry is in a network namespace of its own, because sandboxes, in which images are unpacked, reach no address of
# the host. Nothing is cached between runs, except by the kernel.
#
# Usage: scripts/bench-import.sh [RUNS]     RINGFENCE_BIN names the program, by default the release binary of this tree
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/scripts/common.sh"
help_if_asked "$@"
[[ ${1:-3} =~ ^[1-9][0-9]*$ && $# -le 1 ]] || refuse "a number of runs, not: $*"
need_root
need_packages python3 docker-registry skopeo umoci iproute2
binary=${RINGFENCE_BIN:-$(release_binary)}
[ -x "$binary" ] || { echo "$binary is not there: build it with cargo build --release -p cli, or set RINGFENCE_BIN" >&2; exit 1; }
exec python3 "$root/scripts/bench_import.py" "$binary" "${1:-3}"
