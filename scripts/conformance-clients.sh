#!/usr/bin/env bash
# Drives the release binary (or RINGFENCE_BIN) with published clients other than Python's SDK, at pinned versions:
# the JavaScript SDK on Node and in a browser, the command line client, the Go SDK, and the official MCP clients. Ends at the
# first failure. `docs` runs every snippet of the pages, for which it needs all of these clients, and shows the pages in a browser.
# `acme` tries certificates by ACME, `monitoring` alerts with Prometheus. These are steps of `scripts/test.sh`, in its long form.
#
# Usage: scripts/conformance-clients.sh [CLIENT...]   with CLIENT one of: javascript cli go browser mcp signing codeint desktop gateway dashboard docs acme monitoring (default: all)
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/scripts/common.sh"
help_if_asked "$@"
known=" javascript cli go browser mcp signing codeint desktop gateway dashboard docs acme monitoring "
for word in "$@"; do
  [[ $known == *" $word "* ]] || refuse "unknown client: $word"
done
clients=("$@")
[ ${#clients[@]} -gt 0 ] || clients=(clients)
exec "$root/scripts/test.sh" --long --binary "${RINGFENCE_BIN:-$(release_binary)}" "${clients[@]}"
