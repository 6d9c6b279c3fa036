#!/usr/bin/env bash
# Every test of the repository: formatting, lints, unit and integration tests, and the suites that drive the binary from
# outside (the published SDK, other clients, a fuzzer, escapes, the network, crashes). Suites run side by side; what measures or
# fills the whole machine runs alone at the end. Ends at the first failure; a skipped test is a failure.
#
# Usage: scripts/test.sh [OPTION...] [STEP...]
#
#   scripts/test.sh             everything that protects the product, in about half an hour: what CI runs
#   scripts/test.sh --long      all versions of all clients, all repeats and all cycles, on the released optimisation; and the
#                               guest with old kernels. Before a release, and after changes of dependencies
#   scripts/test.sh --changed   the nearest tests of what differs from `main`, in minutes
#   scripts/test.sh STEP...     only these of: lint unit build sdk blobs clients fuzz escape fence crash kubernetes, guest with --long,
#                               or of the clients: javascript cli go browser mcp signing codeint desktop gateway agents dashboard docs acme monitoring
#   scripts/test.sh --hunt N [NAME]   each test N times beside programs that use processors and disk, and how often it failed.
#                               NAME is a suite, a step, a file or test (crash/test_pauses.py), unit:CRATE, or SUITE:WORDS
#
#   --plan          say what would run, and do nothing
#   --keep-going    run everything else as well after a failure
#   --seed N        moments of the random tests, printed by each run (default: a new one)
#   --lanes N       suites side by side (default: one more than processors, at most 4)
#   --binary FILE   drive this program instead of building one
#   --verbose       print the whole output of everything at the end
#   --help          this text
#
# Outputs are in target/test-run. What is fetched and built for tests is kept in RINGFENCE_TEST_CACHE (default:
# ~/.cache/ringfence-tests). Exits with 0 if all passed, 1 if something failed, 2 if the words make no sense, 130 if interrupted.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"

. scripts/common.sh

# Before anything is installed, also where Python is not there yet. `scripts/testing/options.py` checks the rest.
steps=" lint unit build sdk blobs clients fuzz escape fence crash kubernetes guest javascript cli go browser mcp signing codeint desktop gateway agents dashboard docs acme monitoring "
help_if_asked "$@"
plan='' hunting='' value=''
for word in "$@"; do
  if [ -n "$value" ]; then
    value=''
    continue
  fi
  case $word in
    --plan) plan=yes ;;
    --long | --changed | --keep-going | --verbose) ;;
    --hunt) hunting=yes value=yes ;;
    --hunt=*) hunting=yes ;;
    --seed | --lanes | --binary) value=yes ;;
    --seed=* | --lanes=* | --binary=*) ;;
    -*) refuse "unknown option: $word" ;;
    *) [ -n "$hunting" ] || [[ $steps == *" $word "* ]] || refuse "unknown step: $word" ;;
  esac
done

# That of the system, of which the environments for tests are made as well; the PATH may have another first.
python=/usr/bin/python3
testing() { # MODE [WORD...]
  PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$root/scripts "$python" -m testing "$@"
}

if [ -n "$plan" ]; then
  testing run "$@"
  exit
fi
if [ -x "$python" ]; then
  testing check "$@" || exit
fi
need_root
need_rust
# What compiling needs. The packages of tests are installed beside that, before the first test.
begun=$SECONDS
need_packages "${run_packages[@]}"
testing check "$@" || exit
export TEST_INSTALL_SECONDS=$((SECONDS - begun))
export PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$root/scripts
exec "$python" -m testing run "$@"
