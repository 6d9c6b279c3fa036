#!/usr/bin/env bash
# Builds Ringfence, starts it, and runs a first sandbox through the published Python SDK.
#
# Usage: scripts/run.sh [OPTION OF ringfence up...]
#   --listen ADDRESS:PORT   where it listens (default: 127.0.0.1:3000)
#   --data-dir DIRECTORY    where it keeps its data (default: /var/lib/ringfence)
#   --config FILE, --domain NAME, --tls and the others: see docs/configuration.md
#
# Ends with the platform running in the background and says how to use and how to stop it. Run again while it runs,
# it only makes another sandbox. Needs root and Rust; packages of Debian that are missing are installed.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/scripts/common.sh"

help_if_asked "$@"
# The flags of `ringfence up` are in the table of keys. A wrong one is told now, and not after the build.
flags=" --config $(sed -n 's/.*Some("\(--[a-z-]*\)").*/\1/p' "$root/crates/cli/src/config/keys.rs" | tr '\n' ' ')"
value=''
for word in "$@"; do
  case $word in
    --*) [ -n "$value" ] && refuse "$value needs a value, not $word" ;;
    *)
      [ -n "$value" ] || refuse "unexpected argument: $word"
      value=''
      continue
      ;;
  esac
  [[ $flags == *" ${word%%=*} "* ]] || refuse "unknown option: $word"
  case $word in
    --tls | *=*) ;;
    *) value=$word ;;
  esac
done
[ -z "$value" ] || refuse "$value needs a value"

need_root
need_rust
need_packages "${run_packages[@]}"

say "building: the first time takes minutes, and so does its last step, which links everything and prints nothing meanwhile"
RINGFENCE_COMMIT=$(tree_commit) cargo build --release --locked --manifest-path "$root/Cargo.toml" -p cli
binary=$(release_binary)
data_dir=/var/lib/ringfence
listen=127.0.0.1:3000
arguments=("$@")
for ((i = 0; i < ${#arguments[@]}; i++)); do
  case ${arguments[i]} in
    --data-dir) data_dir=${arguments[i + 1]} ;;
    --data-dir=*) data_dir=${arguments[i]#*=} ;;
    --listen) listen=${arguments[i + 1]} ;;
    --listen=*) listen=${arguments[i]#*=} ;;
  esac
done

if curl -sf -o /dev/null "http://$listen/health"; then
  say "already running on $listen"
else
  say "starting"
  log=/var/log/ringfence.log
  setsid "$binary" up "$@" </dev/null >>"$log" 2>&1 &
  pid=$!
  until curl -sf -o /dev/null "http://$listen/health"; do
    if ! kill -0 "$pid" 2>/dev/null; then
      tail -n 20 "$log" >&2
      exit 1
    fi
    sleep 0.05
  done
  echo "ready on $listen, process $pid, log $log"
fi

say "a first sandbox"
venv=$(sdk_environment 2.63.0)
set -a
. "$data_dir/credentials.env"
set +a
"$venv/bin/python" - <<'PYTHON'
from e2b import Sandbox

with Sandbox.create() as sandbox:
    print(sandbox.commands.run("echo Hello from sandbox $E2B_SANDBOX_ID, $(id -un) on $(uname -sr)").stdout, end="")
PYTHON

cat <<TEXT

The platform keeps running. Its documentation: http://$listen/docs
To have the program on the PATH, as the documentation names it:
    install -m 755 $binary /usr/local/bin/ringfence
To use the platform from your own program, load its keys:
    set -a; . $data_dir/credentials.env; set +a
To stop it, leaving the sandboxes for the next start:
    kill $(ss -ltnpH "sport = :${listen##*:}" | sed -n 's/.*pid=\([0-9]*\).*/\1/p' | head -n 1)
To stop it and end every sandbox:
    $binary down --data-dir $data_dir
TEXT
