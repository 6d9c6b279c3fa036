# What both scripts share: the packages of Debian that Ringfence and its tests need, and the SDK's environment.
# Sourced, never run; needs `set -euo pipefail` and `root` (the repository).

# To build: a C compiler for the bundled SQLite. To run: mkfs.ext4 for disk images; sudo, ps and ss are what programs
# in the built-in `base` template expect, which shows the host's own /usr. For the SDK: Python.
run_packages=(ca-certificates curl gcc libc6-dev e2fsprogs sudo procps iproute2 python3 python3-venv)
# The store's tests run on both databases, and the agent's try the trust store with the clients that people use. The SDKs
# have helpers for git, which the built-in `base` template shows where the host has it.
test_packages=(postgresql git openssl wget)

say() {
  printf '\n== %s\n' "$*"
}

# Installs what is missing of the named packages; says what to do where there is no apt.
need_packages() {
  local missing=() package
  if ! command -v apt-get >/dev/null; then
    echo "apt-get is not here: install the equivalents of: $*" >&2
    return 1
  fi
  for package in "$@"; do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || missing+=("$package")
  done
  if [ ${#missing[@]} -gt 0 ]; then
    say "installing ${missing[*]}"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"
  fi
}

need_root() {
  if [ "$(id -u)" -ne 0 ]; then
    echo "$0 needs root: namespaces with their own id ranges, mounts and cgroups are made by root" >&2
    exit 1
  fi
}

need_rust() {
  if ! command -v cargo >/dev/null && [ -f "$HOME/.cargo/env" ]; then
    . "$HOME/.cargo/env"
  fi
  if ! command -v cargo >/dev/null; then
    echo "cargo is not on the PATH: install Rust $(sed -n 's/^rust-version = "\(.*\)"/\1/p' "$root/Cargo.toml") or newer" >&2
    exit 1
  fi
}

# Makes a Python environment with one pinned version of the SDK and prints its path.
sdk_environment() {
  python_environment "$root/conformance/python/requirements-$1.txt" "$root/target/sdk-$1"
}

# Makes a Python environment of what a file pins, and prints its path.
python_environment() { # FILE DIRECTORY
  local pins=$1 venv=$2 want
  want=$(sha256sum <"$pins")
  if [ "$(cat "$venv/.pins" 2>/dev/null)" != "$want" ]; then
    rm -rf "$venv"
    /usr/bin/python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps -r "$pins"
    printf '%s\n' "$want" >"$venv/.pins"
  fi
  printf '%s\n' "$venv"
}

# Where cargo puts the release binary.
release_binary() {
  printf '%s\n' "${CARGO_TARGET_DIR:-$root/target}/x86_64-unknown-linux-gnu/release/ringfence"
}
