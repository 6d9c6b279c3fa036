//! The sandbox's own `/etc`, and the few files of the host that belong to no package but that programs need.

use std::fs;
use std::io;
use std::os::unix::fs::chown;
use std::path::Path;

use super::accounts::Accounts;
use super::copy::{copy_public, create_dir, put, put_link};
use super::fixed::HOST_NAME;

/// Files and directories of the host's `/etc` that are copied, if they exist: those that its package manager and tools
/// generated from the packages in `/usr`.
const COPIED: [&str; 18] = [
    "alternatives",
    "ca-certificates.conf",
    "ca-certificates/extracted",
    "crypto-policies",
    "debian_version",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "login.defs",
    "mime.types",
    "networks",
    "pki/ca-trust/extracted",
    "pki/tls/certs",
    "protocols",
    "rpc",
    "services",
    "shells",
    "ssl/certs",
];
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
const NSSWITCH: &str = "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\nnetworks: files\n\
                        protocols: files\nservices: files\nrpc: files\n";
/// Distributions reserve their Python for their packages. In a sandbox nothing else uses it, so `pip` may install next
/// to their packages, even after an update has restored the marker that [`super::usr`] hides.
const PIP: &str = "[global]\nbreak-system-packages = true\nroot-user-action = ignore\n";

/// Fills the sandbox's `/etc`.
pub(super) fn create(host: &Path, etc: &Path, accounts: &Accounts) -> io::Result<()> {
    for name in COPIED {
        let from = host.join("etc").join(name);
        if from.symlink_metadata().is_ok() {
            if let Some(parent) = Path::new(name).parent() {
                create_dir(&etc.join(parent), 0o755)?;
            }
            copy_public(&from, &etc.join(name))?;
        }
    }
    if let Ok(target) = fs::read_link(host.join("etc/os-release")) {
        put_link(target, &etc.join("os-release"))?;
    }
    for dir in ["pam.d", "profile.d", "security", "skel"] {
        create_dir(&etc.join(dir), 0o755)?;
    }
    create_dir(&etc.join("sudoers.d"), 0o750)?;
    for (name, mode, text) in files(accounts) {
        put(&etc.join(name), mode, text)?;
    }
    for (name, text) in pam() {
        put(&etc.join("pam.d").join(name), 0o644, text)?;
    }
    chown(etc.join("shadow"), Some(0), Some(42))?;
    put_link("/usr/share/zoneinfo/Etc/UTC", &etc.join("localtime"))?;
    put_link("/proc/self/mounts", &etc.join("mtab"))
}

/// Content of `/etc/hosts`.
pub(crate) fn hosts() -> String {
    format!(
        "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n{}\t{HOST_NAME}\n",
        crate::netns::ETH0_ADDRESS
    )
}

/// Content of `/etc/resolv.conf`. Not a loopback address: some resolvers treat those as a cache of their own.
pub(crate) fn resolver() -> String {
    format!("nameserver {}\n", crate::egress::GATEWAY)
}

fn files(accounts: &Accounts) -> [(&'static str, u32, String); 14] {
    [
        ("passwd", 0o644, accounts.passwd()),
        ("group", 0o644, accounts.group()),
        ("shadow", 0o640, accounts.shadow()),
        ("gshadow", 0o640, accounts.gshadow()),
        ("hostname", 0o644, format!("{HOST_NAME}\n")),
        ("hosts", 0o644, hosts()),
        ("resolv.conf", 0o644, resolver()),
        ("nsswitch.conf", 0o644, NSSWITCH.to_owned()),
        ("environment", 0o644, format!("PATH=\"{PATH}\"\n")),
        ("profile", 0o644, profile()),
        (
            "bash.bashrc",
            0o644,
            "[ -z \"${PS1-}\" ] || PS1='\\u@\\h:\\w\\$ '\n".to_owned(),
        ),
        ("sudoers", 0o440, sudoers()),
        ("timezone", 0o644, "Etc/UTC\n".to_owned()),
        ("pip.conf", 0o644, PIP.to_owned()),
    ]
}

fn profile() -> String {
    format!(
        "# PATH for login shells; a PATH that the caller set stays in front.\n\
         case \":$PATH:\" in\n  *:/usr/local/bin:*) ;;\n  *) PATH=\"${{PATH:+$PATH:}}{PATH}\" ;;\nesac\n\
         # Where programs that `pip` and others install for one user alone are found.\n\
         case \":$PATH:\" in\n  *\":$HOME/.local/bin:\"*) ;;\n  *) PATH=\"$PATH:$HOME/.local/bin\" ;;\nesac\n\
         export PATH\n\
         # Without a locale many programs take text for ASCII.\n\
         export LANG=\"${{LANG:-C.UTF-8}}\"\n\
         if [ -n \"${{BASH_VERSION-}}\" ] && [ -n \"${{PS1-}}\" ] && [ -f /etc/bash.bashrc ]; then\n  \
         . /etc/bash.bashrc\nfi\n\
         for file in /etc/profile.d/*.sh; do\n  [ -r \"$file\" ] && . \"$file\"\ndone\nunset file\n"
    )
}

fn sudoers() -> String {
    format!(
        "Defaults env_reset\nDefaults secure_path=\"{PATH}\"\nDefaults !fqdn\n\
         root ALL=(ALL:ALL) ALL\nuser ALL=(ALL:ALL) NOPASSWD:ALL\n@includedir /etc/sudoers.d\n"
    )
}

fn pam() -> [(&'static str, String); 11] {
    let switch = stack("pam_unix.so", "pam_permit.so");
    let from_root = format!("auth sufficient pam_rootok.so\n{switch}");
    let common = |kind: &str| format!("{kind} required pam_unix.so\n");
    [
        ("other", stack("pam_deny.so", "pam_deny.so")),
        ("sudo", switch.clone()),
        ("sudo-i", switch),
        ("su", from_root.clone()),
        ("su-l", from_root.clone()),
        ("runuser", from_root),
        // Included by the services of Debian's packages.
        ("common-auth", common("auth")),
        ("common-account", common("account")),
        ("common-password", common("password")),
        ("common-session", common("session")),
        ("common-session-noninteractive", common("session")),
    ]
}

/// A PAM service with one module for authentication and one for everything after.
fn stack(auth: &str, after: &str) -> String {
    format!("auth required {auth}\naccount required {after}\npassword required {auth}\nsession required {after}\n")
}
