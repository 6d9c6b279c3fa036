#!/usr/bin/env bash
# Runs Ringfence in a virtual machine that looks like what users have: Debian 12, cgroup v2 only, a distribution kernel.
# The processor is emulated (QEMU TCG), so no /dev/kvm is needed and no figure that comes out means anything.
#
# Usage: RINGFENCE_BIN=FILE scripts/guest/run.sh [-k 6.1|6.12] [-i plain|systemd] [-p] [-t SECONDS] [-v]
#   -k  the cloud kernel of Debian 12 (6.1, the default) or of its backports (6.12)
#   -i  what is process 1: a script without any service manager (the default), or systemd with Ringfence installed from its Debian package
#   -p  check pauses and forks alone, without a service manager
#   -t  seconds until the machine is given up (default 1500)
#   -v  show the whole console while it runs
# RINGFENCE_BIN   the binary to test (default: the release build of this tree)
# RINGFENCE_GUEST_CACHE   a directory that keeps downloads and root file systems between runs (default: none is kept)
#
# Needs root, with systemd cargo for the licences of the package, and, by apt: qemu-system-x86 debootstrap busybox-static e2fsprogs xz-utils. Exits 0 if every check passed.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
. "$root/scripts/common.sh"

help_if_asked "$@"
kernel=6.1 init=plain seconds=1500 only= verbose=
while getopts k:i:pt:v option; do
  case $option in
    k) kernel=$OPTARG ;;
    i) init=$OPTARG ;;
    t) seconds=$OPTARG ;;
    p) only=paused init=plain ;;
    v) verbose=yes ;;
    *) refuse "wrong options: $*" ;;
  esac
done
shift $((OPTIND - 1))
[ $# -eq 0 ] || refuse "unexpected argument: $1"
case $init in plain | systemd) ;; *) echo "-i is plain or systemd" >&2; exit 2 ;; esac
case $kernel in
  6.1) suite=bookworm-security mirror=http://deb.debian.org/debian-security ;;
  6.12) suite=bookworm-backports mirror=http://deb.debian.org/debian ;;
  *) echo "-k is 6.1 or 6.12" >&2; exit 2 ;;
esac
binary=${RINGFENCE_BIN:-$(release_binary)}
[ -x "$binary" ] || { echo "no binary at $binary: build it, or set RINGFENCE_BIN" >&2; exit 1; }
need_root
need_packages qemu-system-x86 debootstrap busybox-static e2fsprogs xz-utils

work=$(mktemp -d "${TMPDIR:-/tmp}/ringfence-guest.XXXXXX")
cache=${RINGFENCE_GUEST_CACHE:-$work/cache}
machine='' follower=''
finish() {
  [ -z "$follower" ] || kill "$follower" 2>/dev/null || true
  if [ -n "$machine" ] && kill -0 "$machine" 2>/dev/null; then
    kill -KILL "$machine" 2>/dev/null || true
    wait "$machine" 2>/dev/null || true
  fi
  # debootstrap, when interrupted, leaves /proc mounted in its tree.
  awk -v below="$work/" 'index($5, below) == 1 { print $5 }' /proc/self/mountinfo | sort -r | xargs -r umount
  rm -rf --one-file-system "$work"
}
trap finish EXIT
trap 'exit 130' INT TERM
mkdir -p "$cache"

# Each directory of the cache is made under another name first, so that one that is there is whole.

# The kernel's package, by an apt with sources and lists of its own, so that the host's are left alone.
fetch_kernel() {
  local apt=$work/apt into=$1 package
  mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial"
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $suite main" >"$apt/sources.list"
  cat >"$apt/apt.conf" <<CONF
Dir::Etc::sourcelist "$apt/sources.list";
Dir::Etc::sourceparts "-";
Dir::State::lists "$apt/lists";
Dir::Cache "$apt/cache";
APT::Sandbox::User "root";
CONF
  APT_CONFIG=$apt/apt.conf apt_update
  package=$(APT_CONFIG=$apt/apt.conf apt-cache depends --no-recommends --no-suggests linux-image-cloud-amd64 |
    sed -n 's/^ *Depends: \(linux-image-.*\)/\1/p' | head -n 1)
  (cd "$apt" && APT_CONFIG=$apt/apt.conf apt-get download -qq "$package")
  rm -rf "$into.new"
  mkdir "$into.new"
  dpkg-deb -x "$apt"/linux-image-*.deb "$into.new"
  mv "$into.new" "$into"
}

# A root file system of Debian 12, as a directory.
fetch_root() {
  local into=$1 packages=bash,ca-certificates,e2fsprogs,iproute2,kmod,procps,python3,sudo,util-linux
  [ "$init" = plain ] || packages+=,systemd,systemd-sysv,dbus
  rm -rf --one-file-system "$into.new"
  debootstrap --variant=minbase --include="$packages" bookworm "$into.new" http://deb.debian.org/debian >"$work/debootstrap.log" 2>&1 || {
    tail -n 20 "$work/debootstrap.log" >&2
    return 1
  }
  rm -rf "$into.new/var/cache/apt" "$into.new/var/lib/apt/lists"
  mv "$into.new" "$into"
}

say "kernel $kernel, $init"
[ -d "$cache/kernel-$kernel" ] || fetch_kernel "$cache/kernel-$kernel"
[ -d "$cache/root-$init" ] || fetch_root "$cache/root-$init"
modules=$(echo "$cache/kernel-$kernel"/lib/modules/*)
release=${modules##*/}

# The disk: the root with this kernel's modules, the binary and the checks laid over it.
tree=$work/tree
cp -a "$cache/root-$init" "$tree"
mkdir -p "$tree/lib/modules" "$tree/opt/guest"
cp -a "$modules" "$tree/lib/modules/"
chroot "$tree" depmod "$release"
install -m 755 "$here/init" "$here"/{check,guest,paused}.py "$tree/opt/guest/"
install -D -m 644 -t "$tree/opt/guest/harness" "$root"/conformance/harness/{__init__,hoststate,patience}.py
# Its interpreter and libraries are named by absolute paths.
criu=$(criu_unpacked)
mkdir -p "$tree$(dirname "$criu")"
cp -a "$(dirname "$criu")/." "$tree$(dirname "$criu")/"
echo "$criu" >"$tree/opt/guest/criu.path"
[ -z "$only" ] || : >"$tree/opt/guest/only-$only"
if [ "$init" = systemd ]; then
  # As a user gets it: the checks install it.
  RINGFENCE_BIN=$binary "$root/scripts/release.sh" --without rpm,image,sbom --fast "$work/dist"
  install -m 644 "$work"/dist/ringfence_*.deb "$tree/opt/guest/ringfence.deb"
  # The next version, whose program is the same.
  dpkg-deb --raw-extract "$tree/opt/guest/ringfence.deb" "$work/next"
  sed -i 's/^Version: .*/&+next/' "$work/next/DEBIAN/control"
  dpkg-deb --root-owner-group -Zxz -z0 --build "$work/next" "$tree/opt/guest/next.deb" >/dev/null
  install -m 644 "$here/guest-check.service" "$tree/etc/systemd/system/"
  mkdir -p "$tree/etc/systemd/system/multi-user.target.wants"
  ln -s ../guest-check.service "$tree/etc/systemd/system/multi-user.target.wants/"
  process_one=/sbin/init
else
  install -m 755 "$binary" "$tree/usr/local/bin/ringfence"
  process_one=/opt/guest/init
fi

# The initial file system only finds the disk; everything else loads as it would for a user.
early=$work/early
mkdir -p "$early"/{bin,dev,proc,sys,new}
cp /bin/busybox "$early/bin/busybox"
install -m 755 "$here/early-init" "$early/init"
for name in virtio_pci virtio_blk ext4; do
  chroot "$tree" modprobe --set-version "$release" --show-depends "$name"
done | awk '$1 == "insmod" && !seen[$2]++ { print $2 }' >"$work/needed"
while read -r path; do
  case $path in
    *.xz) xz -dc "$tree$path" ;;
    *) cat "$tree$path" ;;
  esac >"$early/$(basename "$path" .xz)"
  basename "$path" .xz >>"$early/modules"
done <"$work/needed"
(cd "$early" && find . | busybox cpio -o -H newc | gzip -1 >"$work/early.img")

truncate -s 4G "$work/disk.img"
mkfs.ext4 -q -F -E nodiscard -d "$tree" "$work/disk.img"
rm -rf "$tree"

# One thread per emulated core, at the lowest priority. The machine ends when the kernel powers off, panics, or restarts;
# it is booted again where the checks have said that they restart it. Without
# cx16, because QEMU 7.2's cmpxchg16b now and then loses the flags, which newer kernels meet in their allocator.
boot() {
  nice -n 19 qemu-system-x86_64 -machine pc -accel tcg,thread=multi -cpu max,-cx16 -smp 2 -m 2048 \
    -nodefaults -no-user-config -display none -no-reboot -chardev "file,id=console,path=$work/console,append=on" -serial chardev:console \
    -drive "file=$work/disk.img,format=raw,if=virtio,cache=unsafe" \
    -kernel "$cache/kernel-$kernel/boot/vmlinuz-$release" -initrd "$work/early.img" \
    -append "console=ttyS0 panic=-1 quiet loglevel=4 mitigations=off random.trust_cpu=on init=$process_one systemd.show_status=0 net.ifnames=0" \
    </dev/null &
  machine=$!
  while kill -0 "$machine" 2>/dev/null; do
    if [ $((SECONDS - begun)) -ge "$seconds" ]; then
      echo "gave up after $seconds s; the end of the console:" >&2
      tail -n 40 "$work/console" >&2
      exit 1
    fi
    sleep 1
  done
  wait "$machine" || true
  machine=
}
say "booting $release"
begun=$SECONDS
: >"$work/console"
# Ends with this shell's `finish`, or when all has been shown.
tail -n +1 -f "$work/console" > >(sed -u 's/\r//g' | if [ -n "$verbose" ]; then cat; else grep --line-buffered -E '^(ok|FAILED|     )' || true; fi) &
follower=$!
boot
if tr -d '\r' <"$work/console" | grep -qx restarting; then
  say "booting it again"
  boot
  # What was said before counts no more.
  sed -i '1,/^restarting/d' "$work/console"
fi
sleep 1
kill "$follower" 2>/dev/null || true
wait "$follower" 2>/dev/null || true
closing=$(tr -d '\r' <"$work/console" | grep -E '^[0-9]+ passed, [0-9]+ failed$' | tail -n 1 || true)
if [ -z "$closing" ]; then
  echo "the machine ended before the checks did; the end of the console:" >&2
  tail -n 60 "$work/console" >&2
  exit 1
fi
if [[ $closing != *" 0 failed" ]]; then
  [ -n "$verbose" ] || tail -n 60 "$work/console" >&2
  printf '\n%s\n' "$closing"
  exit 1
fi
printf '\n%s\n' "$closing"
