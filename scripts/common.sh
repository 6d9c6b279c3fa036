# What the scripts share: the packages of Debian that Ringfence and its tests need, and the SDK's environment.
# Sourced, never run; needs `set -euo pipefail` and `root` (the repository).

# To build: a C compiler for the bundled SQLite. To run: mkfs.ext4 for disk images; sudo, ps, ss, Python and pip are what
# programs in the built-in `base` template expect, which shows the host's own /usr. For the SDK: Python.
run_packages=(ca-certificates curl gcc libc6-dev e2fsprogs sudo procps iproute2 python3 python3-pip python3-venv)
# The store's tests run on both databases, and the agent's try the trust store with the clients that people use. The SDKs
# have helpers for git, which the built-in `base` template shows where the host has it; so it does with the runtimes that
# size themselves by what they find, with clients of ssh and DNS, and with tmux. ripgrep is what `rg` of the documentation
# endpoint is compared with. mmdebstrap makes an image of Debian, and skopeo, umoci, busybox and musl make others. systemd
# brings `systemd-analyze`, which checks the unit of the package. zstd makes layers of images.
test_packages=(postgresql docker-registry skopeo git openssl wget default-jdk-headless nodejs make ripgrep systemd openssh-client openssh-server bind9-dnsutils tmux mmdebstrap umoci busybox-static musl-tools zstd)

say() {
  printf '\n== %s\n' "$*"
}

# The comment at the head of the script that runs.
usage() {
  sed -n '2,${/^#/!q;s/^# \{0,1\}//;p;}' "$0"
}

# Ends here where help is asked for. Scripts call it before they install or build anything.
help_if_asked() { # WORD...
  local word
  for word in "$@"; do
    case $word in
      -h | --help)
        usage
        exit 0
        ;;
    esac
  done
}

# Ends here because the words make no sense.
refuse() { # WHY
  printf '%s\nsee %s --help\n' "$1" "$0" >&2
  exit 2
}

# Runs a program whose output matters only if it fails.
quietly() { # COMMAND...
  local output status=0
  output=$("$@" 2>&1) || status=$?
  [ "$status" -eq 0 ] || tail -n 40 <<<"$output" >&2
  return "$status"
}

# Says which settings help where lists of packages cannot be fetched.
apt_update() { # [OPTION...]
  quietly apt-get update -qq "$@" || {
    cat >&2 <<'TEXT'
apt-get update failed. What helps, depending on the message above:
  through a proxy      http_proxy=http://HOST:PORT in the environment, or Acquire::http::Proxy in /etc/apt/apt.conf.d
  from a mirror        its address in /etc/apt/sources.list or /etc/apt/sources.list.d
  a source is broken   remove it there: one that fails is enough
  a wrong clock        "Release file is not valid yet": set the time of this machine
TEXT
    return 1
  }
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
    apt_update || return
    # The tests start the server themselves, in a namespace; on the machine of whoever runs them, the package starts none.
    if [[ " ${missing[*]} " == *" openssh-server "* ]]; then
      mkdir -p /etc/ssh
      touch /etc/ssh/sshd_not_to_be_run
    fi
    DEBIAN_FRONTEND=noninteractive quietly apt-get install -y --no-install-recommends "${missing[@]}"
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
  # rustup knows toolchains by name: it would download the pinned version although its `stable` is that version.
  local pinned found
  pinned=$(sed -n 's/^channel = "\(.*\)"/\1/p' "$root/rust-toolchain.toml")
  if [ -z "${RUSTUP_TOOLCHAIN:-}" ] && found=$(cd / && rustup show active-toolchain 2>/dev/null); then
    if [ "$(cd / && rustc --version | cut -d' ' -f2)" = "$pinned" ]; then
      export RUSTUP_TOOLCHAIN=${found%% *}
    fi
  fi
}

# Makes a Python environment with one pinned version of the SDK and prints its path.
sdk_environment() {
  python_environment "$root/conformance/python/requirements-$1.txt" "$root/target/sdk-$1"
}

# Makes a Python environment of what a file pins, and prints its path. Where the output is captured, bash does not end
# a function at its first failure, and what was not installed would count as installed.
python_environment() { # FILE DIRECTORY
  local pins=$1 venv=$2 want
  want=$(sha256sum <"$pins")
  if [ "$(cat "$venv/.pins" 2>/dev/null)" != "$want" ]; then
    rm -rf "$venv"
    /usr/bin/python3 -m venv "$venv" || return
    "$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps -r "$pins" || return
    printf '%s\n' "$want" >"$venv/.pins"
  fi
  printf '%s\n' "$venv"
}

# The Go SDK asks for Go 1.22; Debian 12 has 1.19, which can fetch a newer one as a module.
go_version=1.22.12
go_serves() {
  command -v "$1" >/dev/null && [ "$(GOTOOLCHAIN=local "$1" env GOVERSION | cut -d. -f2)" -ge 22 ]
}

# Puts that newer Go into a directory, by the `go` of the PATH.
go_into() { # DIRECTORY
  local arch
  arch=$(go env GOARCH) || return
  go mod download "golang.org/toolchain@v0.0.1-go$go_version.linux-$arch" || return
  rm -rf "$1"
  mkdir -p "$(dirname "$1")"
  cp -r "$(go env GOMODCACHE)/golang.org/toolchain@v0.0.1-go$go_version.linux-$arch" "$1" || return
  chmod -R u+w "$1"
  # Files of a module carry no execute bits.
  chmod +x "$1"/bin/* "$1"/pkg/tool/*/*
  go_serves "$1/bin/go"
}

# An S3 server for tests. Needs a newer Go than Debian has, which that one fetches.
versitygw_version=v1.8.0

# Builds the S3 server into a directory, by the Go of RINGFENCE_GO.
versitygw_into() { # DIRECTORY
  (cd / && GOBIN=$1 GOFLAGS=-buildvcs=false GOTOOLCHAIN=auto "$RINGFENCE_GO" install \
    "github.com/versity/versitygw/cmd/versitygw@$versitygw_version")
}

# An ACME server for tests, and the DNS server that it asks. Needs Go 1.24, which an older one fetches.
pebble_version=v2.10.1

# Builds both into a directory, by the Go of RINGFENCE_GO.
pebble_into() { # DIRECTORY
  local module=github.com/letsencrypt/pebble/v2/cmd
  (cd / && GOBIN=$1 GOFLAGS=-buildvcs=false GOTOOLCHAIN=auto "$RINGFENCE_GO" install \
    "$module/pebble@$pebble_version" "$module/pebble-challtestsrv@$pebble_version")
}

# The system of the image of containers: programs that sandboxes of `base` see, and what the platform needs. No service manager.
image_suite=trixie
image_packages=ca-certificates,e2fsprogs,iproute2,kmod,procps,python3,sudo

# Makes it as an archive, or as a directory, from a mirror of Debian: RINGFENCE_MIRROR, or the one of this host.
container_system() { # OUTPUT [OPTION...]
  local output=$1 mirror
  shift
  mirror=${RINGFENCE_MIRROR:-$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' | grep -m1 '/debian/\?$')} || return
  mmdebstrap --quiet --variant=minbase --include="$image_packages" \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-include=/usr/share/doc/*/copyright' \
    --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
    --customize-hook='rm -rf "$1"/var/cache/apt/* "$1"/var/lib/apt/lists/* "$1"/var/log/* "$1"/etc/resolv.conf "$1"/etc/hostname' \
    "$@" "$image_suite" "$output" "$mirror"
}

# Makes it for tests.
container_system_into() { # DIRECTORY
  mkdir -p "$1" && container_system "$1/root" --format=directory --skip=output/dev,output/mknod
}

# What renders the chart. Needs Go 1.26, which an older one fetches.
helm_version=v3.22.0

# Builds helm into a directory, by the Go of RINGFENCE_GO.
helm_into() { # DIRECTORY
  (cd / && GOBIN=$1 GOFLAGS=-buildvcs=false GOTOOLCHAIN=auto "$RINGFENCE_GO" install "helm.sh/helm/v3/cmd/helm@$helm_version")
}

# Builds what judges rendered objects into a directory, by the Go of RINGFENCE_GO. What it is made of is pinned by its go.sum.
chart_judge_into() { # DIRECTORY
  (cd "$root/conformance/kubernetes/judge" &&
    GOFLAGS='-buildvcs=false -mod=readonly' GOTOOLCHAIN=auto "$RINGFENCE_GO" build -trimpath -o "$1/judge" .)
}

# Builds a collector of OpenTelemetry into a directory, by the Go of RINGFENCE_GO. What it is made of is pinned by its go.sum.
collector_into() { # DIRECTORY
  (cd "$root/conformance/monitoring/collector" &&
    GOFLAGS='-buildvcs=false -mod=readonly' GOTOOLCHAIN=auto "$RINGFENCE_GO" build -trimpath -o "$1/collector" .)
}

# Puts the files of a Debian package into a directory, without installing it.
debian_files_into() { # PACKAGE DIRECTORY
  local fetched
  fetched=$(mktemp -d "${TMPDIR:-/tmp}/ringfence-package.XXXXXX") || return
  {
    (cd "$fetched" && apt-get download -qq -o APT::Sandbox::User=root "$1") || { apt_update && (cd "$fetched" && apt-get download -qq -o APT::Sandbox::User=root "$1"); }
  } && mkdir -p "$2" && dpkg-deb -x "$fetched"/*.deb "$2"
  local status=$?
  rm -rf "$fetched"
  return $status
}

# The JavaScript SDK's `engines` ask for Node 20.18.1 or newer; Debian 12 has 18, which is enough to run npm, and npm has Node.
node_version=20.20.2
node_arch() {
  case $(uname -m) in
    x86_64) echo x64 ;;
    aarch64) echo arm64 ;;
    *) uname -m ;;
  esac
}

# Puts that Node into a directory, by npm.
node_into() { # DIRECTORY
  local arch
  arch=$(node_arch)
  npm install --prefix "$1" --no-save --no-package-lock --no-audit --no-fund --loglevel=error "node-linux-$arch@$node_version" || return
  ln -s "node_modules/node-linux-$arch/bin/node" "$1/node"
}

# Installs what a lock file pins into a directory, below `node_modules`.
npm_into() { # DIRECTORY-OF-THE-LOCK-FILE DIRECTORY
  mkdir -p "$2"
  cp "$1/package.json" "$1/package-lock.json" "$2/" || return
  npm ci --prefix "$2" --no-audit --no-fund --loglevel=error
}

# Where cargo puts the release binary.
release_binary() {
  printf '%s\n' "${CARGO_TARGET_DIR:-$root/target}/x86_64-unknown-linux-gnu/release/ringfence"
}

# Which commit the tree is of: git's answer, with a mark where files differ from it, or what the export of an archive
# wrote down. Nothing where neither is known.
tree_commit() {
  local commit
  if [ -e "$root/.git" ] && commit=$(git -C "$root" rev-parse --short=12 HEAD 2>/dev/null); then
    [ -z "$(git -C "$root" status --porcelain 2>/dev/null)" ] || commit+=-modified
    printf '%s\n' "$commit"
  else
    sed -n '1s/^\([0-9a-f]\{12\}\)[0-9a-f]*$/\1/p' "$root/packaging/commit"
  fi
}

# When that commit was made, in seconds, as SOURCE_DATE_EPOCH where that is set; 0 where it is not known.
tree_time() {
  local time=${SOURCE_DATE_EPOCH:-}
  if [ -z "$time" ] && [ -e "$root/.git" ]; then
    time=$(git -C "$root" log -1 --format=%ct 2>/dev/null || true)
  fi
  [ -n "$time" ] || time=$(sed -n '2s/^\([0-9]\+\)$/\1/p' "$root/packaging/commit")
  printf '%s\n' "${time:-0}"
}

# CRIU, by which paused sandboxes are kept on disk. Debian has a version that works with current kernels only in its
# development suite: it is unpacked with its libraries, and nothing of the system changes. Prints the path of the program.
criu_program() {
  local program
  program=$(type -P criu || true)
  if [ -n "$program" ] && dpkg --compare-versions "$("$program" --version | sed -n 's/^Version: //p')" ge 4.2; then
    printf '%s\n' "$program"
    return
  fi
  criu_unpacked
}

# That of the development suite, whatever the system has: a directory with everything that it needs.
criu_unpacked() {
  local into="$root/target/criu"
  if [ ! -x "$into/criu" ]; then
    need_packages "${criu_packages[@]}" >&2 || return
    criu_into "$into" >&2 || return
  fi
  printf '%s\n' "$into/criu"
}

# What unpacking it needs.
criu_packages=(patchelf debian-archive-keyring)

# The package that the tests were last run with, and its SHA-256 by architecture, with commas between. A development suite has one version at a time, so
# another one may be there, signed by Debian like this one: it is taken, and said. The same version with other content is refused.
criu_version=4.2.1-1
criu_hashes=amd64:4039578de7dd6480964754c1348416f0f0658fba3eadaa918bfe43e9a5fb9b04

criu_is_pinned() { # FILE
  local version architecture pinned found
  version=$(dpkg-deb -f "$1" Version) || return
  architecture=$(dpkg-deb -f "$1" Architecture) || return
  found=$(sha256sum "$1" | cut -d ' ' -f 1)
  pinned=$(tr , '\n' <<<"$criu_hashes" | sed -n "s/^$architecture://p")
  if [ "$version" != "$criu_version" ] || [ -z "$pinned" ]; then
    echo "CRIU $version for $architecture (sha256 $found) is not the one that the tests were last run with, which is $criu_version"
  elif [ "$found" != "$pinned" ]; then
    echo "the package of CRIU $version has the sha256 $found, not $pinned: not used" >&2
    return 1
  fi
}

# Unpacks it into a directory, where it has to stay: its programs name their libraries by absolute paths.
criu_into() { # DIRECTORY
  local into=$1 site
  site=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' | grep -m1 '/debian/\?$') || {
    echo "no mirror of Debian is configured: install CRIU 4.2 or later" >&2
    return 1
  }
  rm -rf "$into"
  mkdir -p "$into"/apt/{lists,archives}/partial "$into"/root/usr/{bin,sbin,lib,lib64}
  : >"$into/apt/status"
  printf 'deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] %s sid main\n' "$site" >"$into/apt/sources.list"
  cat >"$into/apt/apt.conf" <<END
Dir::State "$into/apt";
Dir::State::status "$into/apt/status";
Dir::State::lists "$into/apt/lists";
Dir::Cache "$into/apt";
Dir::Cache::archives "$into/apt/archives";
Dir::Etc::sourcelist "$into/apt/sources.list";
Dir::Etc::sourceparts "-";
APT::Sandbox::User "root";
END
  APT_CONFIG=$into/apt/apt.conf apt_update || return
  APT_CONFIG=$into/apt/apt.conf quietly apt-get install -y --no-install-recommends --download-only criu || return
  criu_is_pinned "$(echo "$into"/apt/archives/criu_*.deb)" || return
  local dir package
  for dir in bin sbin lib lib64; do ln -s "usr/$dir" "$into/root/$dir"; done
  for package in "$into"/apt/archives/*.deb; do dpkg -x "$package" "$into/root" || return; done
  cp "$into/root/usr/sbin/criu" "$into/criu.new" || return
  # The path is for the libraries of its libraries, too.
  patchelf --set-interpreter "$(echo "$into"/root/lib64/ld-linux-*.so.*)" --force-rpath \
    --set-rpath "$(dirname "$(echo "$into"/root/usr/lib/*/libc.so.6)")" "$into/criu.new" || return
  "$into/criu.new" --version || return
  rm -rf "$into/apt"
  mv "$into/criu.new" "$into/criu"
}

# Fetches the packages of Python and Node that the recipe of the code interpreter pins, so that its build needs no network.
code_interpreter_packages_into() { # DIRECTORY
  local recipe=$root/templates/code-interpreter drivers work
  drivers=$recipe/server/code_interpreter/drivers
  mkdir -p "$1"
  /usr/bin/python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --require-hashes \
    -r "$recipe/requirements-server.txt" -d "$1/wheels" || return
  /usr/bin/python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --require-hashes \
    -r "$recipe/requirements-kernel.txt" -d "$1/wheels" || return
  work=$(mktemp -d)
  cp "$drivers/package.json" "$drivers/package-lock.json" "$work/"
  npm ci --prefix "$work" --cache "$1/npm" --ignore-scripts --no-audit --no-fund --loglevel=error || return
  rm -rf "$work"
}

# Fetches the packages of Python that the recipe of the MCP gateway pins, so that its build needs no network.
mcp_gateway_packages_into() { # DIRECTORY
  /usr/bin/python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --require-hashes \
    -r "$root/templates/mcp-gateway/requirements.txt" -d "$1/wheels"
}

# Fetches what the recipe of coding agents pins for some of them, so that its build needs no network; and writes down which these are.
agents_packages_into() { # AGENTS DIRECTORY
  local recipe=$root/templates/agents agent work
  /usr/bin/python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --require-hashes \
    -r "$recipe/requirements.txt" -d "$2/wheels" || return
  for agent in $1; do
    work=$(mktemp -d)
    cp "$recipe/npm/$agent/package.json" "$recipe/npm/$agent/package-lock.json" "$work/"
    npm ci --prefix "$work" --cache "$2/npm" --ignore-scripts --no-audit --no-fund --loglevel=error || return
    rm -rf "$work"
  done
  printf '%s\n' "$1" >"$2/agents"
}

# What packages of the desktop are compressed with again, once, because unpacking those of Debian takes three times as long in each build.
desktop_compression=gzip

# Fetches the packages that the recipe of the desktop installs and this system, of which `base` is made, lacks, as a source of
# packages. `try` says whether they still fit to what the system has.
desktop_packages_into() { # DIRECTORY
  local recipe=$root/templates/desktop/Dockerfile browser names file
  browser=$(sed -n 's/^ARG BROWSER=//p' "$recipe") || return
  # The lines of the command between its options and its end.
  names=$(sed -n '/apt-get install/,/[^\\]$/p' "$recipe" | tail -n +2 | tr -d '\\\n') || return
  mkdir -p "$1/partial"
  # shellcheck disable=SC2086
  names=${names//\$BROWSER/$browser}
  set -- "$1" $names
  apt_update || return
  quietly apt-get install --yes --no-install-recommends --download-only --option APT::Sandbox::User=root \
    --option Dir::Cache::archives="$1" "${@:2}" || return
  rm -rf "$1/partial" "$1/lock"
  for file in "$1"/*.deb; do
    dpkg-deb --raw-extract "$file" "$1/unpacked" && quietly dpkg-deb "-Z$desktop_compression" -z1 --build "$1/unpacked" "$file" || return
    rm -rf "$1/unpacked"
    dpkg-deb --field "$file" || return
    printf 'Filename: ./%s\nSize: %s\nSHA256: %s\n\n' "$(basename "$file")" "$(stat -c %s "$file")" "$(sha256sum "$file" | cut -d ' ' -f 1)"
  done >"$1/Packages" || return
  cat >"$1/try" <<END
#!/bin/sh
# Whether the packages beside this can be installed on this system as it is, without any other source.
set -e
here=\$(cd "\$(dirname "\$0")" && pwd)
work=\$(mktemp -d)
trap 'rm -rf "\$work"' EXIT
mkdir -p "\$work/lists/partial"
echo "deb [trusted=yes] file:\$here ./" >"\$work/sources.list"
set -- -o Dir::State="\$work" -o Dir::State::lists="\$work/lists" -o Dir::State::status=/var/lib/dpkg/status -o Dir::Cache="\$work" \\
  -o Dir::Etc::sourcelist="\$work/sources.list" -o Dir::Etc::sourceparts=- -o APT::Sandbox::User=root
apt-get "\$@" update
apt-get "\$@" install --simulate --no-install-recommends $names
END
  chmod 755 "$1/try"
}
