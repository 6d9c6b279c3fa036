#!/usr/bin/env bash
# Makes what is given to users: a tarball and a Debian package of the release binary, with checksums.
#
# Usage: scripts/release.sh [DIRECTORY]   (default: target/dist)
# RINGFENCE_BIN   package this binary instead of building one
#
# The same commit gives the same files to the byte, given the same versions of rustc, gcc and dpkg: nothing in them tells
# where, when or by whom they were made. Needs, beside what a build needs: dpkg-deb, python3.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/scripts/common.sh"
help_if_asked "$@"
case ${1:-} in -*) refuse "unknown option: $1" ;; esac
[ $# -le 1 ] || refuse "one directory at most, not $#"
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
    cargo build --release --locked --manifest-path "$root/Cargo.toml" -p cli \
    --config "target.x86_64-unknown-linux-gnu.rustflags=[$maps]"
  binary=$root/target/dist-build/x86_64-unknown-linux-gnu/release/ringfence
}

binary=${RINGFENCE_BIN:-}
[ -n "$binary" ] || build
[ -x "$binary" ] || { echo "no binary at $binary" >&2; exit 1; }
mkdir -p "$out"

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
  python3 "$root/scripts/notices.py" "$root"
} >"$notices"

# The pages for users, which may be in folders; those for developers stay in the repository.
pages() { # DIRECTORY
  local page
  while IFS= read -r page; do
    install -D -m 644 "$root/docs/$page" "$1/$page"
  done < <(cd "$root/docs" && find . -name '*.md' -not -path './dev/*' -not -path './decisions/*' | sort)
}

# What both packages hold, at its places in the tarball.
tree=$work/ringfence-$version
mkdir -p "$tree"
install -m 755 "$binary" "$tree/ringfence"
install -m 644 "$notices" "$tree/copyright"
install -m 644 "$root/README.md" "$root/CHANGELOG.md" "$root/SECURITY.md" "$root/packaging/ringfence.toml" "$tree/"
pages "$tree/docs"
# A user who unpacks a tarball puts the program where what is not a package belongs.
sed 's|/usr/bin/|/usr/local/bin/|; s|/usr/share/doc/ringfence/|/usr/local/share/doc/ringfence/|' \
  "$root/packaging/ringfence.service" >"$tree/ringfence.service"
chmod 644 "$tree/ringfence.service"
tarball=ringfence-$version-linux-amd64.tar.gz
tar -C "$work" --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner --format=ustar \
  -cf - "ringfence-$version" | gzip -n -9 >"$out/$tarball"

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
gzip -n -9 <"$root/CHANGELOG.md" >"$doc/changelog.gz"
echo /etc/ringfence/ringfence.toml >"$deb/DEBIAN/conffiles"
for script in postinst prerm postrm; do
  install -m 755 "$root/packaging/debian/$script" "$deb/DEBIAN/"
done
(cd "$deb" && find usr etc -type f -print0 | sort -z | xargs -0 md5sum >DEBIAN/md5sums)
size=$(find "$deb/usr" "$deb/etc" -type f -printf '%s\n' | awk '{ kib += int(($1 + 1023) / 1024) } END { print kib }')
sed "s/@VERSION@/$version/; s/@SIZE@/$size/" "$root/packaging/debian/control" >"$deb/DEBIAN/control"
chmod 644 "$deb/DEBIAN/"{conffiles,control,md5sums}
find "$deb" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
package=ringfence_${version}_amd64.deb
dpkg-deb --root-owner-group --threads-max=1 -Zxz --build "$deb" "$out/$package" >/dev/null

(cd "$out" && sha256sum "$tarball" "$package" >SHA256SUMS && cat SHA256SUMS)
