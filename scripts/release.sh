#!/usr/bin/env bash
# Makes what is given to users: a tarball, packages for Debian and for RPM, an image for containers with a chart for Kubernetes, a bill of materials,
# checksums with their signature, and the program that installs all that.
#
# Usage: scripts/release.sh [--arch amd64|arm64] [--without PART,PART] [--fast] [DIRECTORY]   (default: target/dist)
# --arch ARCH                  for which machines (default: amd64). There is no image for arm64, and no sandbox was ever started there
# --without PARTS              leave out some of rpm, image, sbom
# --fast                       compress little, for tests
# RINGFENCE_BIN                package this binary instead of building one
# RINGFENCE_SIGNING_KEY_FILE   private key of Ed25519 in PEM; without it nothing is signed, and there is no install.sh
# RINGFENCE_RELEASE_URL        where the files will be, for install.sh; otherwise it has to be told
# RINGFENCE_MIRROR             mirror of Debian for the image; otherwise the one of this host
#
# Needs neither root nor Docker. The same commit gives the same files to the byte, given the same versions of rustc, gcc, dpkg and
# the packages in the image: nothing in them tells where, when or by whom they were made. Needs, beside what a build needs: dpkg-deb, python3;
# for a signature openssl 3; for the image mmdebstrap; for arm64 elsewhere gcc-aarch64-linux-gnu, the standard library of Rust for
# aarch64-unknown-linux-gnu, and qemu-user-static. The packager of RPMs is installed below target/.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/scripts/common.sh"
# Of the packager from crates.io.
rpm_packager_version=0.21.1
help_if_asked "$@"
arch=amd64 without=, level=9 deb_level=6
while [[ ${1:-} == -* ]]; do
  case $1 in
    --arch)
      [ $# -ge 2 ] || refuse "--arch needs an architecture"
      [[ $2 =~ ^(amd64|arm64)$ ]] || refuse "--arch $2: it is amd64 or arm64"
      arch=$2
      shift
      ;;
    --without)
      [ $# -ge 2 ] || refuse "--without needs parts"
      [[ ,$2 =~ ^(,(rpm|image|sbom))+$ ]] || refuse "--without $2: parts are rpm, image and sbom"
      without=,$2,
      shift
      ;;
    --fast) level=1 deb_level=0 ;;
    *) refuse "unknown option: $1" ;;
  esac
  shift
done
[ $# -le 1 ] || refuse "one directory at most, not $#"
case $arch in
  amd64) machine=x86_64 others=-E ;;
  arm64) machine=aarch64 others=-vE without+=image, ;;
esac
target=$machine-unknown-linux-gnu
out=${1:-$root/target/dist}
export LC_ALL=C TZ=UTC
umask 022

commit=$(tree_commit)
SOURCE_DATE_EPOCH=$(tree_time)
export SOURCE_DATE_EPOCH
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' "$root/Cargo.toml" | head -n 1)
# Between releases: after everything before, and before the release that is being worked at.
if [ -n "$commit" ] && [ "$(git -C "$root" describe --tags --exact-match 2>/dev/null)" != "v$version" ]; then
  version+="~$(date -u -d "@$SOURCE_DATE_EPOCH" +%Y%m%d).${commit//-/.}"
fi

work=$(mktemp -d "${TMPDIR:-/tmp}/ringfence-release.XXXXXX")
trap 'rm -rf "$work"' EXIT

wants() { # PART
  case $without in *,$1,*) return 1 ;; esac
}

# Paths of this machine, which panics and assertions name, become those of no machine. A target directory of its own,
# because other flags would build everything of an ordinary one again.
build() {
  need_rust
  local cargo_home=${CARGO_HOME:-$HOME/.cargo} maps
  maps="'--remap-path-prefix=$root=/ringfence', '--remap-path-prefix=$cargo_home=/cargo'"
  say "building $version: this takes minutes, and so does its last step, which links everything and prints nothing meanwhile"
  RINGFENCE_COMMIT=$commit \
    CFLAGS="${CFLAGS:-} -ffile-prefix-map=$root=/ringfence -ffile-prefix-map=$cargo_home=/cargo" \
    CARGO_TARGET_DIR=$root/target/dist-build CARGO_INCREMENTAL=0 \
    cargo build --release --locked --manifest-path "$root/Cargo.toml" -p cli --target "$target" \
    --config "target.$target.rustflags=[$maps]"
  binary=$root/target/dist-build/$target/release/ringfence
}

binary=${RINGFENCE_BIN:-}
[ -n "$binary" ] || build
[ -x "$binary" ] || { echo "no binary at $binary" >&2; exit 1; }
# The program itself, under emulation where this machine is of another kind.
run_it() { # WORD...
  if [ "$(uname -m)" = "$machine" ]; then
    "$binary" "$@"
  else
    "qemu-$machine-static" "$binary" "$@"
  fi
}
[ "$(uname -m)" = "$machine" ] || command -v "qemu-$machine-static" >/dev/null ||
  { echo "qemu-$machine-static is not on the PATH: install qemu-user-static" >&2; exit 1; }
mkdir -p "$out"

key=${RINGFENCE_SIGNING_KEY_FILE:-}
# It becomes a word of a shell script.
[[ ${RINGFENCE_RELEASE_URL:-} =~ ^(https?://[A-Za-z0-9._~:/%-]+)?$ ]] ||
  { echo "RINGFENCE_RELEASE_URL is no plain address that begins with https:// or http://" >&2; exit 1; }
if [ -n "$key" ]; then
  # Before anything is made that would have to be thrown away.
  openssl pkey -in "$key" -noout -text 2>/dev/null | grep -q '^ED25519 Private-Key' ||
    { echo "RINGFENCE_SIGNING_KEY_FILE names no private key of Ed25519 in PEM: openssl genpkey -algorithm ed25519" >&2; exit 1; }
fi

say "packaging $version"
notices=$work/copyright
{
  printf 'Ringfence %s\n\n' "$version"
  cat "$root/LICENSE"
  cat <<'TEXT'

The binary also holds the C library of GNU, linked statically, under the GNU Lesser General Public License 2.1 or later,
and the standard library of Rust, under the MIT licence or the Apache License 2.0. The sources of this program, from
which it can be linked with another C library, are where you got it from. What else is in it:
TEXT
  python3 "$root/scripts/notices.py" "$root" "$target"
} >"$notices"

# The pages for users, which may be in folders, with their pictures; those for developers stay in the repository.
pages() { # DIRECTORY
  local page
  while IFS= read -r page; do
    install -D -m 644 "$root/docs/$page" "$1/$page"
  done < <(cd "$root/docs" && find . \( -name '*.md' -o -path './pictures/*.png' \) -not -path './dev/*' -not -path './decisions/*' | sort)
}

# What shells and `man` need, at its places below a directory such as /usr.
helpers() { # DIRECTORY
  local bash=$1/share/bash-completion/completions zsh=$1/share/zsh/site-functions fish=$1/share/fish/vendor_completions.d page
  mkdir -p "$bash" "$zsh" "$fish" "$1/share/man/man1"
  run_it completions bash >"$bash/ringfence"
  run_it completions zsh >"$zsh/_ringfence"
  run_it completions fish >"$fish/ringfence.fish"
  run_it manual "$work/manual"
  for page in "$work"/manual/*.1; do
    gzip -n -9 <"$page" >"$1/share/man/man1/${page##*/}.gz"
  done
}

# What the tools of an operator load.
monitoring() { # DIRECTORY
  install -D -m 644 -t "$1" "$root/packaging/monitoring/alerts.yml" "$root/packaging/monitoring/grafana-dashboard.json"
}

# What both packages hold, at its places in the tarball.
tree=$work/ringfence-$version
mkdir -p "$tree"
install -m 755 "$binary" "$tree/ringfence"
install -m 644 "$notices" "$tree/copyright"
install -m 644 "$root/README.md" "$root/CHANGELOG.md" "$root/SECURITY.md" "$root/packaging/ringfence.toml" "$tree/"
pages "$tree/docs"
monitoring "$tree/monitoring"
helpers "$tree"
# A user who unpacks a tarball puts the program where what is not a package belongs.
sed 's|/usr/bin/|/usr/local/bin/|; s|/usr/share/doc/ringfence/|/usr/local/share/doc/ringfence/|' \
  "$root/packaging/ringfence.service" >"$tree/ringfence.service"
chmod 644 "$tree/ringfence.service"
tarball=ringfence-$version-linux-$arch.tar.gz
tar -C "$work" --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner --format=ustar \
  -cf - "ringfence-$version" | gzip -n -$level >"$out/$tarball"

deb=$work/deb
doc=$deb/usr/share/doc/ringfence
mkdir -p "$deb/DEBIAN" "$deb/usr/bin" "$deb/usr/lib/systemd/system" "$deb/etc/ringfence" "$doc"
install -m 755 "$binary" "$deb/usr/bin/ringfence"
install -m 644 "$root/packaging/ringfence.service" "$deb/usr/lib/systemd/system/"
# It may come to hold the password of a database.
install -m 600 "$root/packaging/ringfence.toml" "$deb/etc/ringfence/"
install -m 644 "$notices" "$doc/copyright"
install -m 644 "$root/README.md" "$root/SECURITY.md" "$doc/"
pages "$doc/docs"
monitoring "$doc/monitoring"
helpers "$deb/usr"
# Where Debian looks for those of packages.
mkdir -p "$deb/usr/share/zsh/vendor-completions"
mv "$deb/usr/share/zsh/site-functions/_ringfence" "$deb/usr/share/zsh/vendor-completions/"
rmdir "$deb/usr/share/zsh/site-functions"
gzip -n -9 <"$root/CHANGELOG.md" >"$doc/changelog.gz"
echo /etc/ringfence/ringfence.toml >"$deb/DEBIAN/conffiles"
for script in postinst prerm postrm; do
  install -m 755 "$root/packaging/debian/$script" "$deb/DEBIAN/"
done
(cd "$deb" && find usr etc -type f -print0 | sort -z | xargs -0 md5sum >DEBIAN/md5sums)
size=$(find "$deb/usr" "$deb/etc" -type f -printf '%s\n' | awk '{ kib += int(($1 + 1023) / 1024) } END { print kib }')
sed "s/@VERSION@/$version/; s/@SIZE@/$size/; s/@ARCH@/$arch/" "$root/packaging/debian/control" >"$deb/DEBIAN/control"
chmod 644 "$deb/DEBIAN/"{conffiles,control,md5sums}
find "$deb" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
package=ringfence_${version}_$arch.deb
dpkg-deb --root-owner-group --threads-max=1 -Zxz -z$deb_level --build "$deb" "$out/$package" >/dev/null
files=("$tarball" "$package")

if wants rpm; then
  say "packaging for RPM"
  need_rust
  tools=$root/target/release-tools
  if [ "$("$tools/bin/cargo-generate-rpm" --version 2>/dev/null)" != "cargo-generate-rpm $rpm_packager_version" ]; then
    cargo install --quiet --locked --root "$tools" "cargo-generate-rpm@$rpm_packager_version"
  fi
  python3 "$root/scripts/release/rpm.py" "$deb" "$version" "$root/packaging/rpm" >"$work/Cargo.toml"
  rpm=ringfence-$version-1.$machine.rpm
  (cd "$work" && "$tools/bin/cargo-generate-rpm" --auto-req disabled --arch $machine --payload-compress gzip --output "$work/rpm")
  mv "$work/rpm" "$out/$rpm"
  files+=("$rpm")
fi

if wants image; then
  say "making the image of containers"
  container_system "$work/base.tar"
  own=$work/own
  mkdir -p "$own/usr/bin" "$own/usr/lib/ringfence" "$own/usr/share/doc/ringfence" "$own/var/lib/ringfence"
  chmod 700 "$own/var/lib/ringfence"
  install -m 755 "$binary" "$own/usr/bin/ringfence"
  install -m 755 "$root/packaging/image/start" "$own/usr/lib/ringfence/start"
  install -m 644 "$notices" "$own/usr/share/doc/ringfence/copyright"
  tar -C "$own" --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner --format=ustar -cf "$work/own.tar" .
  image=ringfence-$version-image-amd64.tar
  python3 "$root/scripts/release/image.py" "$out/$image" "$version" "$SOURCE_DATE_EPOCH" "$level" "$work/base.tar" "$work/own.tar"
  files+=("$image")
fi

# Like the image, for a cluster of machines of this kind.
if wants image; then
  chart=ringfence-$version-chart.tgz
  python3 "$root/scripts/release/chart.py" "$root/packaging/helm/ringfence" "$out/$chart" "$version" "$SOURCE_DATE_EPOCH"
  files+=("$chart")
fi

if wants sbom; then
  bom=ringfence-$version.cdx.json
  [ "$arch" = amd64 ] || bom=ringfence-$version-$arch.cdx.json
  python3 "$root/scripts/release/sbom.py" "$root" "$version" "$SOURCE_DATE_EPOCH" "$target" >"$out/$bom"
  files+=("$bom")
fi

# What was made before of the same version for the other architecture stays in the list, if it is what the list says.
other=$(cd "$out" && [ -s SHA256SUMS ] && sha256sum --check --strict --quiet SHA256SUMS >/dev/null 2>&1 &&
  grep -F -e "ringfence-$version" -e "ringfence_${version}_" SHA256SUMS | grep $others 'arm64|aarch64' || true)
(cd "$out" && { sha256sum "${files[@]}"; [ -z "$other" ] || printf '%s\n' "$other"; } >SHA256SUMS.new && mv SHA256SUMS.new SHA256SUMS && cat SHA256SUMS)
# Of an earlier run, with other checksums.
rm -f "$out/SHA256SUMS.sig" "$out/install.sh"
if [ -n "$key" ]; then
  openssl pkeyutl -sign -rawin -inkey "$key" -in "$out/SHA256SUMS" | base64 -w 0 >"$out/SHA256SUMS.sig"
  public=$(openssl pkey -in "$key" -pubout -outform DER | base64 -w 0)
  sed "s|@PUBLIC_KEY@|$public|; s|@VERSION@|$version|; s|@URL@|${RINGFENCE_RELEASE_URL:-}|" "$root/packaging/install.sh" >"$out/install.sh"
  chmod 644 "$out/install.sh"
else
  say "not signed, and without install.sh: RINGFENCE_SIGNING_KEY_FILE names no key"
fi
