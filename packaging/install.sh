#!/bin/sh
# Installs Ringfence on this machine, or removes it: `install.sh --help`.
#
# What is downloaded counts only after its check: the list of checksums must be signed with the key below, and the package
# must be the one of the list, of the version below. Until then nothing of it is unpacked or run. A server that is not trusted can
# refuse to serve, and nothing else. All of this is in functions, and the last line calls one: a copy that was cut off does nothing.
#
# Running it again is harmless: what is there stays or is replaced by the same. `scripts/release.sh` fills in the words between @.

main() {
    set -eu
    umask 022
    PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
    export PATH LC_ALL=C
    public_key='@PUBLIC_KEY@'
    version='@VERSION@'
    url='@URL@'
    format='' act=install dry='' purge='' starts=yes
    while [ $# -gt 0 ]; do
        case $1 in
            --url) need_value "$@"; url=$2; shift ;;
            --format) need_value "$@"; format=$2; shift ;;
            --dry-run) dry=yes ;;
            --no-start) starts='' ;;
            --uninstall) act=uninstall ;;
            --purge) purge=yes ;;
            -h | --help) help; return 0 ;;
            *) fail "unknown option: $1 (see --help)" 2 ;;
        esac
        shift
    done
    [ -z "$purge" ] || [ "$act" = uninstall ] || fail "--purge removes data: it needs --uninstall" 2
    case $(uname -s)-$(uname -m) in
        Linux-x86_64) debian=amd64 other=x86_64 ;;
        Linux-aarch64) debian=arm64 other=aarch64 ;;
        *) fail "Ringfence needs Linux on x86-64 or arm64; this is $(uname -s) on $(uname -m)" ;;
    esac
    [ "$(id -u)" = 0 ] || [ -n "$dry" ] || fail "run this as root, for example: sudo sh install.sh"
    case $act in
        install) install_it ;;
        uninstall) uninstall_it ;;
    esac
}

help() {
    cat <<TEXT
Installs Ringfence $version: sh install.sh [OPTION...]

  --url URL          where the files of the release are${url:+ (default: $url)}
  --format FORMAT    deb, rpm or tarball, instead of what fits this machine
  --no-start         install, and neither start nor enable the service
  --dry-run          check what would be installed, say each step, and change nothing
  --uninstall        stop the platform and remove the program; sandboxes, data and settings stay
  --uninstall --purge  end all sandboxes, and remove everything
TEXT
}

say() {
    printf 'install.sh: %s\n' "$*"
}

fail() { # WHY [CODE]
    printf 'install.sh: %s\n' "$1" >&2
    exit "${2:-1}"
}

need_value() { # OPTION VALUE...
    [ $# -ge 2 ] && [ -n "$2" ] || fail "$1 needs a value" 2
}

have() {
    command -v "$1" >/dev/null 2>&1
}

# Runs what changes the machine, or says it.
run() { # COMMAND...
    if [ -n "$dry" ]; then
        say "would run: $*"
    else
        "$@"
    fi
}

fitting_format() {
    if have dpkg && have apt-get; then
        echo deb
    elif have rpm && { have dnf || have yum || have zypper; }; then
        echo rpm
    else
        echo tarball
    fi
}

# Downloads a file of the release. One that never ends must not fill the disk: at most 1 GiB.
fetch() { # NAME
    (
        # In units of 512 bytes.
        ulimit -f 2097152
        # Settings in the home of the user could name another place or turn checks off.
        HOME=$place
        export HOME
        if have curl; then
            curl --disable --fail --silent --show-error --location --proto '=http,https' --proto-redir '=http,https' \
                --connect-timeout 20 --retry 2 --output "$place/$1" "$url/$1"
        else
            wget --quiet --timeout=20 --tries=3 -O "$place/$1" "$url/$1"
        fi
    ) || fail "$url/$1 could not be downloaded"
    [ -s "$place/$1" ] || fail "$url/$1 is empty: nothing was installed"
}

# Takes what the checks need from the distribution, whose packages are signed, too.
need_tools() {
    missing=''
    have openssl || missing="$missing openssl"
    have curl || have wget || missing="$missing curl"
    have sha256sum || missing="$missing coreutils"
    if [ -z "$missing" ]; then
        case $(openssl version) in
            'OpenSSL 0.'* | 'OpenSSL 1.'*) fail "the check of the signature needs OpenSSL 3; this is $(openssl version)" ;;
        esac
        return 0
    fi
    if [ -n "$dry" ]; then
        fail "a check needs$missing: install that first"
    elif have apt-get; then
        say "installing$missing"
        apt_install $missing || fail "install$missing first"
    elif have dnf; then
        dnf --quiet --assumeyes install $missing || fail "install$missing first"
    else
        fail "install$missing first"
    fi
}

# Lists of packages may be missing or old; they are fetched only then.
apt_install() { # WORD...
    DEBIAN_FRONTEND=noninteractive apt-get -qq -o APT::Sandbox::User=root -o DPkg::Lock::Timeout=120 install -y --no-install-recommends "$@" >"$place/log" 2>&1 && return 0
    apt-get -qq update >"$place/log" 2>&1 || { cat "$place/log" >&2; return 1; }
    DEBIAN_FRONTEND=noninteractive apt-get -qq -o APT::Sandbox::User=root -o DPkg::Lock::Timeout=120 install -y --no-install-recommends "$@" >"$place/log" 2>&1 ||
        { cat "$place/log" >&2; return 1; }
}

# Checks the signature of the list of checksums. The key is part of this program.
check_signature() {
    {
        echo '-----BEGIN PUBLIC KEY-----'
        echo "$public_key"
        echo '-----END PUBLIC KEY-----'
    } >"$place/key.pem"
    openssl base64 -d -A -in "$place/SHA256SUMS.sig" -out "$place/signature" 2>/dev/null ||
        fail "the signature of $url/SHA256SUMS cannot be read: nothing was installed"
    openssl pkeyutl -verify -rawin -pubin -inkey "$place/key.pem" -in "$place/SHA256SUMS" -sigfile "$place/signature" >/dev/null 2>&1 ||
        fail "$url/SHA256SUMS is not signed by the makers of this program, or was changed: nothing was installed"
}

# Downloads a file of the signed list, and checks it by the list.
fetch_listed() { # NAME
    want=$(awk -v name="$1" '$2 == name { print $1 }' "$place/SHA256SUMS")
    [ -n "$want" ] || fail "the release at $url has no $1: nothing was installed"
    fetch "$1"
    got=$(sha256sum <"$place/$1" | cut -d ' ' -f 1)
    [ "$want" = "$got" ] || fail "$url/$1 has the SHA-256 $got, not $want: nothing was installed"
}

install_it() {
    case $url in
        http://?* | https://?*) url=${url%/} ;;
        '') fail "name the place of the release: --url URL" 2 ;;
        *) fail "--url $url: it begins with neither https:// nor http://" 2 ;;
    esac
    format=${format:-$(fitting_format)}
    case $format in
        deb) name="ringfence_${version}_$debian.deb" ;;
        rpm) name="ringfence-$version-1.$other.rpm" ;;
        tarball) name="ringfence-$version-linux-$debian.tar.gz" ;;
        *) fail "--format $format: it is deb, rpm or tarball" 2 ;;
    esac
    # Only this user can write to it.
    place=$(mktemp -d "${TMPDIR:-/tmp}/ringfence-install.XXXXXX")
    trap 'rm -rf "$place"' EXIT
    trap 'exit 130' INT TERM HUP
    need_tools
    fetch SHA256SUMS
    fetch SHA256SUMS.sig
    check_signature
    fetch_listed "$name"
    say "$name is signed and whole"
    case $format in
        deb) run apt_install --allow-downgrades "$place/$name" || fail "the package could not be installed" ;;
        rpm) install_rpm ;;
        tarball) install_tarball ;;
    esac
    if [ -n "$dry" ]; then
        say "would run: ringfence doctor"
        say "nothing was changed"
        return 0
    fi
    say "ringfence $version is installed"
    start_it
}

install_rpm() {
    if have dnf; then
        run dnf --quiet --assumeyes --nogpgcheck --setopt=install_weak_deps=False install "$place/$name"
    elif have zypper; then
        run zypper --quiet --non-interactive --no-gpg-checks install --allow-unsigned-rpm --no-recommends "$place/$name"
    elif have yum; then
        run yum --quiet --assumeyes --nogpgcheck install "$place/$name"
    else
        run rpm --upgrade --replacepkgs "$place/$name"
    fi || fail "the package could not be installed"
}

# Names that a tarball takes, which its removal gives back.
files_of_tarball() {
    cat <<TEXT
/usr/local/bin/ringfence
/etc/systemd/system/ringfence.service
/usr/local/share/bash-completion/completions/ringfence
/usr/local/share/zsh/site-functions/_ringfence
/usr/local/share/fish/vendor_completions.d/ringfence.fish
TEXT
}

install_tarball() {
    have gzip && have tar || fail "install tar and gzip first"
    if [ -n "$dry" ]; then
        say "would write: /etc/ringfence/ringfence.toml /usr/local/share/doc/ringfence /usr/local/share/man/man1/ringfence*.1.gz"
        say "would write:" $(files_of_tarball)
        return 0
    fi
    tar -xzf "$place/$name" -C "$place" --no-same-owner
    from=$place/ringfence-$version
    # A program that runs cannot be written, only replaced.
    put "$from/ringfence" /usr/local/bin/ringfence 755
    put "$from/ringfence.service" /etc/systemd/system/ringfence.service 644
    for helper in bash-completion/completions/ringfence zsh/site-functions/_ringfence fish/vendor_completions.d/ringfence.fish; do
        put "$from/share/$helper" "/usr/local/share/$helper" 644
    done
    for page in "$from"/share/man/man1/*.gz; do
        put "$page" "/usr/local/share/man/man1/${page##*/}" 644
    done
    rm -rf /usr/local/share/doc/ringfence
    mkdir -p /usr/local/share/doc/ringfence
    cp -R "$from/docs" "$from/monitoring" "$from/copyright" "$from/README.md" "$from/CHANGELOG.md" "$from/SECURITY.md" /usr/local/share/doc/ringfence/
    # It is its owner's once it is there.
    if [ ! -e /etc/ringfence/ringfence.toml ]; then
        put "$from/ringfence.toml" /etc/ringfence/ringfence.toml 600
    fi
    if has_systemd; then
        systemctl daemon-reload
        systemctl try-restart ringfence.service
    fi
}

put() { # FILE PLACE MODE
    mkdir -p "${2%/*}"
    cp "$1" "$2.new"
    chmod "$3" "$2.new"
    mv -f "$2.new" "$2"
}

has_systemd() {
    [ -d /run/systemd/system ] && have systemctl
}

# Starts the service if this machine is fit for it.
start_it() {
    case $format in
        tarball) program=/usr/local/bin/ringfence ;;
        *) program=/usr/bin/ringfence ;;
    esac
    if ! "$program" doctor --config /etc/ringfence/ringfence.toml >"$place/doctor" 2>&1; then
        # A platform that runs already has its port.
        cat "$place/doctor"
        fail "this machine lacks what \`missing\` above says; after that: ringfence doctor"
    fi
    grep -v '^ok ' "$place/doctor" || :
    if [ -z "$starts" ]; then
        say "not started, as you wished"
    elif has_systemd; then
        systemctl enable --now --quiet ringfence.service || fail "the service does not start: journalctl -u ringfence"
        say "the service runs, now and after each boot; the keys of clients are in /var/lib/ringfence/credentials.env"
    else
        say "there is no systemd: start the platform with \`ringfence up\`"
    fi
}

uninstall_it() {
    found=''
    if have dpkg-query && dpkg-query -W -f '${db:Status-Status}' ringfence 2>/dev/null | grep -Eq '^(installed|config-files|half|unpacked)'; then
        found=yes
        if [ -n "$purge" ]; then
            run env DEBIAN_FRONTEND=noninteractive apt-get -qq purge -y ringfence
        else
            run env DEBIAN_FRONTEND=noninteractive apt-get -qq remove -y ringfence
        fi
    fi
    if have rpm && rpm -q ringfence >/dev/null 2>&1; then
        found=yes
        end_sandboxes /usr/bin/ringfence
        run rpm -e ringfence
        remove_data
    fi
    if [ -e /usr/local/bin/ringfence ] || [ -e /usr/local/share/doc/ringfence ]; then
        found=yes
        if has_systemd; then
            run systemctl disable --now --quiet ringfence.service || :
        fi
        end_sandboxes /usr/local/bin/ringfence
        run rm -f $(files_of_tarball) /usr/local/share/man/man1/ringfence.1.gz /usr/local/share/man/man1/ringfence-*.1.gz
        run rm -rf /usr/local/share/doc/ringfence
        # Only those that are empty now.
        for directory in bash-completion/completions bash-completion zsh/site-functions zsh fish/vendor_completions.d fish man/man1 man doc; do
            [ ! -d "/usr/local/share/$directory" ] || run rmdir "/usr/local/share/$directory" 2>/dev/null || :
        done
        if ! have systemctl; then
            run rmdir /etc/systemd/system /etc/systemd 2>/dev/null || :
        fi
        if has_systemd; then
            run systemctl daemon-reload
        fi
        remove_data
    fi
    if [ -z "$found" ]; then
        # Sandboxes may run, and what could end them is gone.
        [ -z "$purge" ] || [ ! -e /var/lib/ringfence ] ||
            fail "ringfence is not installed, and its data is in /var/lib/ringfence: install it again, then purge"
        say "ringfence is not installed"
    elif [ -n "$dry" ]; then
        say "nothing was changed"
    elif [ -n "$purge" ]; then
        say "ringfence and its data are removed"
    else
        say "ringfence is removed; data and settings are in /var/lib/ringfence and /etc/ringfence, as far as there are any"
    fi
}

# Ends sandboxes before a purge. Where that fails, all stays: a sandbox that runs must not lose its disk and its name.
end_sandboxes() { # PROGRAM
    [ -n "$purge" ] && [ -d /var/lib/ringfence ] && [ -x "$1" ] || return 0
    set -- "$1" down
    [ ! -e /etc/ringfence/ringfence.toml ] || set -- "$@" --config /etc/ringfence/ringfence.toml
    run "$@" || fail "not all sandboxes could be ended, so nothing was removed"
}

remove_data() {
    [ -z "$purge" ] || run rm -rf /var/lib/ringfence /etc/ringfence
}

main "$@"
