#!/usr/bin/env bash
# Every test of the repository: formatting, lints, unit and integration tests, then the suites that drive the release
# binary from outside (the published SDK, other clients, a fuzzer, escapes, the network, crashes). Ends at the first failure; a
# skipped test is a failure.
#
# Usage: scripts/test.sh [STEP...]   with STEP one of: lint unit build sdk blobs clients fuzz escape fence crash (default: all in order)
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
. scripts/common.sh

need_root
need_rust
need_packages "${run_packages[@]}" "${test_packages[@]}"

# Nothing of the caller's may configure what is tested.
while IFS='=' read -r name _; do
  case $name in
    E2B_* | RINGFENCE_BIN | RINGFENCE_DATA_DIR | RINGFENCE_LISTEN | RINGFENCE_DOMAIN | RINGFENCE_CONFIG | PYTEST_*) unset "$name" ;;
  esac
done < <(env)
export PYTHONDONTWRITEBYTECODE=1
RINGFENCE_BIN=$(release_binary)
export RINGFENCE_BIN
binary=$RINGFENCE_BIN

suite() { # VERSION SECONDS DIRECTORY [OPTION...]: one pytest run, bounded in time
  local venv bound=$2
  venv=$(sdk_environment "$1")
  shift
  (cd conformance && RINGFENCE_BIN=$binary timeout --signal=INT --kill-after=60 "$bound" "$venv/bin/pytest" -p no:cacheprovider "${@:2}")
}

secure_suite() { # As suite, over HTTPS, where every name below localhost is this machine
  local venv bound=$2
  venv=$(sdk_environment "$1")
  shift
  (cd conformance && RINGFENCE_BIN=$binary timeout --signal=INT --kill-after=60 "$bound" \
    python3 harness/names.py "$venv/bin/pytest" -p no:cacheprovider --tls "${@:2}")
}

step_lint() {
  cargo fmt --all --check
  cargo clippy --locked --workspace --all-targets -- -D warnings
}

step_unit() {
  local gateway criu
  gateway=$(versitygw)
  criu=$(criu_program)
  # Where namespaces cannot be made, the agent tests must fail, not pass without having run.
  RINGFENCE_VERSITYGW=$gateway RINGFENCE_CRIU=$criu AGENT_TESTS_MUST_RUN=1 cargo test --locked --workspace
}

step_build() {
  RINGFENCE_COMMIT=$(tree_commit) cargo build --locked --release -p cli
}

step_sdk() {
  local RINGFENCE_CRIU file
  RINGFENCE_CRIU=$(criu_program)
  export RINGFENCE_CRIU
  need_go
  # What an operator does, what is in a sandbox, what runs in a build and what becomes of processes does not depend on the client.
  local clients=()
  for file in base limits operator operator_sandboxes pool pause_answer pause_on_disk pause_programs page_out snapshot_memory template_files dockerfiles template_registry image_families; do
    clients+=("--ignore=python/test_$file.py")
  done
  suite 2.63.0 900 python
  suite 2.45.1 900 python "${clients[@]}"
  # What a build does does not depend on how it was asked for.
  secure_suite 2.63.0 900 python "${clients[@]}" --ignore=python/test_template_builds.py --ignore=python/test_snapshots.py \
    --ignore=python/test_fork.py
  secure_suite 2.45.1 300 smoke/test_python.py
  # Versions that programs still pin, and what every program does.
  local version
  for version in 2.20.3 2.8.1; do
    suite "$version" 300 smoke/test_python.py
    secure_suite "$version" 300 smoke/test_python.py
  done
}

step_blobs() {
  local RINGFENCE_VERSITYGW
  RINGFENCE_VERSITYGW=$(versitygw)
  export RINGFENCE_VERSITYGW
  suite 2.63.0 600 blobs
  # What templates do is the same with a bucket.
  suite 2.63.0 600 --s3 python/test_templates.py python/test_template_builds.py python/test_template_files.py python/test_dockerfiles.py
}

step_clients() {
  RINGFENCE_BIN=$binary scripts/conformance-clients.sh
}

step_fuzz() {
  local venv
  venv=$(python_environment conformance/fuzz/requirements.txt "$root/target/fuzz")
  RINGFENCE_SCHEMATHESIS=$venv/bin/schemathesis suite 2.63.0 600 fuzz
}

step_escape() {
  local RINGFENCE_CRIU
  RINGFENCE_CRIU=$(criu_program)
  export RINGFENCE_CRIU
  suite 2.63.0 1200 escape
  local own=escape/test_shared_inodes.py::test_nothing_that_can_be_opened_is_shared
  # What holds in a sandbox holds in one that was restored from disk.
  suite 2.63.0 900 --restored escape/test_kernel.py escape/test_network.py escape/test_files_of_the_host.py escape/test_respawn.py \
    escape/test_proc_and_sys.py escape/test_limits.py "$own"
  # And in a fork: what depends on its ids, its groups, its agent and what it sees.
  local limits=escape/test_limits.py
  suite 2.63.0 300 --forked escape/test_kernel.py escape/test_files_of_the_host.py escape/test_proc_and_sys.py "$own" \
    "escape/test_agent_survives.py::test_nothing_that_acts_on_another_process_reaches_the_agent" \
    escape/test_network.py --deselect escape/test_network.py::test_the_control_channel_refuses_peers_inside \
    "$limits::test_what_the_kernel_counts_per_user_is_counted_per_sandbox" "$limits::test_a_fork_bomb_is_held" \
    "$limits::test_a_memory_hog_is_killed_and_the_agent_lives" "$limits::test_an_fd_hog_meets_its_own_limit" \
    "$limits::test_limits_hold_for_terminals_too"
}

step_fence() {
  local RINGFENCE_CRIU
  RINGFENCE_CRIU=$(criu_program)
  export RINGFENCE_CRIU
  need_npm
  suite 2.63.0 900 fence
}

step_crash() {
  local RINGFENCE_CRIU
  RINGFENCE_CRIU=$(criu_program)
  export RINGFENCE_CRIU
  suite 2.63.0 1500 crash
}

steps=("$@")
[ ${#steps[@]} -gt 0 ] || steps=(lint unit build sdk blobs clients fuzz escape fence crash)
report=()
for step in "${steps[@]}"; do
  say "$step"
  begun=$SECONDS
  "step_$step"
  report+=("$(printf '%-7s passed in %4d s' "$step" $((SECONDS - begun)))")
done
say "all passed"
printf '%s\n' "${report[@]}"
