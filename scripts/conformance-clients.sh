#!/usr/bin/env bash
# Drives the release binary (or RINGFENCE_BIN) with published clients other than Python's SDK, at pinned versions:
# the JavaScript SDK on Node and in a browser, the command line client, the Go SDK, and the official MCP clients. Ends at the
# first failure. `docs` runs every snippet of the pages, for which it needs all of these clients, and shows the pages in a browser.
#
# Certificates by ACME are tried here too, because the server for that is in Go.
#
# Usage: scripts/conformance-clients.sh [CLIENT...]   with CLIENT one of: javascript cli go browser mcp signing docs acme (default: all)
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
. scripts/common.sh

need_root
# The SDKs have helpers for git, which the built-in `base` template shows where the host has it.
need_packages "${run_packages[@]}" git openssl
binary=${RINGFENCE_BIN:-$(release_binary)}
export PYTHONDONTWRITEBYTECODE=1
clients="$root/target/clients"
mkdir -p "$clients"

# The SDK's `engines` ask for Node 20.18.1 or newer; Debian 12 has 18, which is enough to run npm, and npm has Node.
node_version=20.20.2
node_serves() {
  command -v "$1" >/dev/null &&
    "$1" -e 'const [a, b, c] = process.versions.node.split(".").map(Number); process.exit(a > 22 || (a === 22 && b >= 9) || (a === 20 && (b > 18 || (b === 18 && c >= 1))) ? 0 : 1)'
}

need_node() {
  need_npm
  if node_serves node; then
    RINGFENCE_NODE=$(command -v node)
  else
    local arch
    case $(uname -m) in
      x86_64) arch=x64 ;;
      aarch64) arch=arm64 ;;
      *) arch=$(uname -m) ;;
    esac
    RINGFENCE_NODE="$clients/node/node_modules/node-linux-$arch/bin/node"
    node_serves "$RINGFENCE_NODE" ||
      npm install --prefix "$clients/node" --no-save --no-package-lock --no-audit --no-fund --loglevel=error \
        "node-linux-$arch@$node_version"
    node_serves "$RINGFENCE_NODE"
  fi
  export RINGFENCE_NODE
}

# Installs what a lock file pins and prints the directory that holds it. Its output is captured, so it has to end itself
# when a step fails.
npm_packages() { # DIRECTORY
  local into="$clients/npm/${1//\//-}" want
  want=$(sha256sum <"$1/package-lock.json")
  if [ "$(cat "$into/.pins" 2>/dev/null)" != "$want" ]; then
    rm -rf "$into"
    mkdir -p "$into"
    cp "$1/package.json" "$1/package-lock.json" "$into/"
    npm ci --prefix "$into" --no-audit --no-fund --loglevel=error >&2 || return
    printf '%s\n' "$want" >"$into/.pins"
  fi
  printf '%s\n' "$into/node_modules"
}

suite() { # DIRECTORY [ENVIRONMENT [OPTION...]]: one pytest run, bounded in time; the harness around the clients is Python's
  local venv
  venv=${2:-$(sdk_environment 2.63.0)}
  (cd conformance && RINGFENCE_BIN=$binary timeout --signal=INT --kill-after=60 900 \
    "$venv/bin/pytest" -s -p no:cacheprovider "$1" "${@:3}")
}

run_javascript() {
  need_node
  local version RINGFENCE_CRIU
  RINGFENCE_CRIU=$(criu_program)
  export RINGFENCE_CRIU
  for version in 2.51.0 2.49.0; do
    RINGFENCE_NODE_MODULES=$(npm_packages "conformance/javascript/$version")
    export RINGFENCE_NODE_MODULES
    suite javascript
  done
  # A version that programs still pin, and what every program does.
  RINGFENCE_NODE_MODULES=$(npm_packages conformance/javascript/2.8.4)
  suite smoke/test_javascript.py
}

run_cli() {
  need_node
  RINGFENCE_NODE_MODULES=$(npm_packages conformance/cli)
  export RINGFENCE_NODE_MODULES
  suite cli
}

run_go() {
  need_go
  suite go
}

# The JavaScript SDK in a page of another origin. The tools put a certificate authority into the browser's trust.
run_browser() {
  need_node
  need_packages chromium libnss3-tools
  RINGFENCE_NODE_MODULES=$(npm_packages conformance/browser)
  export RINGFENCE_NODE_MODULES
  suite browser
}

run_mcp() {
  need_node
  local version pythons=()
  for version in 2.3.0 1.30.0; do
    pythons+=("$(python_environment "conformance/mcp/requirements-$version.txt" "$clients/mcp-$version")/bin/python")
  done
  RINGFENCE_MCP_PYTHON=$(IFS=:; printf '%s' "${pythons[*]}")
  RINGFENCE_NODE_MODULES=$(npm_packages conformance/mcp)
  export RINGFENCE_MCP_PYTHON RINGFENCE_NODE_MODULES
  suite mcp
}

# Requests that Qiniu's SDKs for Python and Node sign.
run_signing() {
  need_node
  RINGFENCE_QINIU_PYTHON=$(python_environment conformance/signing/requirements.txt "$clients/signing")/bin/python
  RINGFENCE_NODE_MODULES=$(npm_packages conformance/signing)
  export RINGFENCE_QINIU_PYTHON RINGFENCE_NODE_MODULES
  suite signing
}

run_docs() {
  need_node
  need_go
  # The browser, with a font; the venv has only what drives it.
  need_packages chromium fonts-dejavu-core
  RINGFENCE_NODE_MODULES=$(npm_packages conformance/javascript/2.51.0)
  RINGFENCE_CLI_MODULES=$(npm_packages conformance/cli)
  export RINGFENCE_NODE_MODULES RINGFENCE_CLI_MODULES
  local venv RINGFENCE_CRIU
  RINGFENCE_CRIU=$(criu_program)
  export RINGFENCE_CRIU
  venv=$(python_environment conformance/docs/requirements.txt "$root/target/docs")
  suite docs "$venv" --criu
}

# An ACME server for tests, and the DNS server that it asks. Needs Go 1.24, which an older one fetches.
pebble_version=v2.10.1

# Certificates by ACME. The SDK connects to names below `localhost`, so all of it runs where they are this machine.
run_acme() {
  need_go
  need_packages openssl
  local venv programs="$clients/pebble-$pebble_version" module=github.com/letsencrypt/pebble/v2/cmd
  if [ ! -x "$programs/pebble" ] || [ ! -x "$programs/pebble-challtestsrv" ]; then
    (cd / && GOBIN=$programs GOFLAGS=-buildvcs=false GOTOOLCHAIN=auto "$RINGFENCE_GO" install \
      "$module/pebble@$pebble_version" "$module/pebble-challtestsrv@$pebble_version")
  fi
  venv=$(sdk_environment 2.63.0)
  (cd conformance && RINGFENCE_BIN=$binary RINGFENCE_PEBBLE=$programs timeout --signal=INT --kill-after=60 300 \
    python3 harness/names.py "$venv/bin/pytest" -s -p no:cacheprovider acme)
}

wanted=("$@")
[ ${#wanted[@]} -gt 0 ] || wanted=(javascript cli go browser mcp signing docs acme)
report=()
for client in "${wanted[@]}"; do
  say "$client"
  begun=$SECONDS
  "run_$client"
  report+=("$(printf '%-10s passed in %4d s' "$client" $((SECONDS - begun)))")
done
say "all passed"
printf '%s\n' "${report[@]}"
