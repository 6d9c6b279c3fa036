//! The `base` image: what a sandbox has when nobody built or downloaded anything.
//!
//! Two overlays. The root stands on a skeleton that is made here once; `/usr` stands on the host's own `/usr`, with
//! `/usr/local` and `/usr/src` hidden. Overlay does not cross mounts, hence two. Nothing else of the host is in it:
//! of `/etc`, only what packages put there and programs need to start (the linker's cache, alternatives, certificate
//! bundles, name tables) is copied when the skeleton is made.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use rustix::fs::XattrFlags;

/// Version of what [`make`] makes: a skeleton of another version is made anew.
const VERSION: u32 = 1;
/// Uid and gid of `user`, as in the images of the existing platform.
const USER: u32 = 1000;
/// Where the agent's binary appears inside a sandbox.
pub(crate) const AGENT: &str = "run/ringfence/agent";
/// Host name of every sandbox; `sudo` wants to find it in `/etc/hosts`.
pub(crate) const HOST_NAME: &str = "sandbox";

/// Files and directories of the host's `/etc` that are copied, where they exist.
const COPIED: [&str; 14] = [
    "alternatives",
    "debian_version",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "login.defs",
    "mime.types",
    "networks",
    "protocols",
    "rpc",
    "services",
    "shells",
    "ssl/certs",
];

/// The directory of the current skeleton: `root` and `usr` lie in it.
pub(crate) fn path(data_dir: &Path) -> PathBuf {
    data_dir.join(format!("base/{VERSION}"))
}

/// Why this host's `/usr` cannot be a base, or nothing.
pub(crate) fn unfit(root: &Path) -> Option<String> {
    for name in ["bin", "sbin", "lib"] {
        let target = fs::read_link(root.join(name)).unwrap_or_default();
        if target != Path::new("usr").join(name) && target != Path::new("/usr").join(name) {
            return Some(format!(
                "/{name} is not a link to usr/{name}; the base template needs a merged /usr"
            ));
        }
    }
    (!root.join("usr/bin/bash").exists()).then(|| "/usr/bin/bash is missing".to_owned())
}

/// Makes the skeleton unless it is there. Skeletons of other versions are removed.
///
/// # Errors
/// When the host is unfit or the data directory cannot be written.
pub(crate) fn make(data_dir: &Path) -> io::Result<()> {
    let path = path(data_dir);
    if path.exists() {
        return Ok(());
    }
    if let Some(why) = unfit(Path::new("/")) {
        return Err(io::Error::other(why));
    }
    let all = data_dir.join("base");
    if all.exists() {
        fs::remove_dir_all(&all)?;
    }
    let unfinished = data_dir.join("base/new");
    make_root(&unfinished.join("root"))?;
    make_usr(&unfinished.join("usr"))?;
    fs::rename(&unfinished, &path)
}

fn make_root(root: &Path) -> io::Result<()> {
    let dirs = [
        ("", 0o755),
        ("boot", 0o755),
        ("code", 0o777),
        ("dev", 0o755),
        ("etc", 0o755),
        ("home", 0o755),
        ("home/user", 0o755),
        ("media", 0o755),
        ("mnt", 0o755),
        ("opt", 0o755),
        ("proc", 0o555),
        ("root", 0o700),
        ("run", 0o755),
        ("run/lock", 0o1777),
        ("run/ringfence", 0o755),
        ("run/sudo", 0o711),
        ("srv", 0o755),
        ("sys", 0o555),
        ("tmp", 0o1777),
        ("usr", 0o755),
        ("var", 0o755),
        ("var/backups", 0o755),
        ("var/cache", 0o755),
        ("var/lib", 0o755),
        ("var/lib/sudo", 0o700),
        ("var/local", 0o755),
        ("var/log", 0o755),
        ("var/mail", 0o755),
        ("var/opt", 0o755),
        ("var/spool", 0o755),
        ("var/tmp", 0o1777),
    ];
    for (dir, mode) in dirs {
        make_dir(&root.join(dir), mode)?;
    }
    for name in ["bin", "sbin", "lib", "lib32", "lib64", "libx32"] {
        if let Ok(target) = fs::read_link(Path::new("/").join(name)) {
            symlink(target, root.join(name))?;
        }
    }
    symlink("/run", root.join("var/run"))?;
    symlink("/run/lock", root.join("var/lock"))?;
    fs::write(root.join(AGENT), "")?;
    make_etc(&root.join("etc"))?;
    for file in [".bashrc", ".profile", ".bash_logout"] {
        let skel = Path::new("/etc/skel").join(file);
        let text = fs::read(&skel).unwrap_or_default();
        for home in ["home/user", "root"] {
            fs::write(root.join(home).join(file), &text)?;
        }
        std::os::unix::fs::chown(root.join("home/user").join(file), Some(USER), Some(USER))?;
    }
    std::os::unix::fs::chown(root.join("home/user"), Some(USER), Some(USER))
}

fn make_etc(etc: &Path) -> io::Result<()> {
    for name in COPIED {
        let from = Path::new("/etc").join(name);
        if from.symlink_metadata().is_ok() {
            if let Some(parent) = Path::new(name).parent() {
                make_dir(&etc.join(parent), 0o755)?;
            }
            copy(&from, &etc.join(name))?;
        }
    }
    if let Ok(target) = fs::read_link("/etc/os-release") {
        symlink(target, etc.join("os-release"))?;
    }
    for dir in ["pam.d", "profile.d", "security", "skel"] {
        make_dir(&etc.join(dir), 0o755)?;
    }
    make_dir(&etc.join("sudoers.d"), 0o750)?;
    let path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
    let hosts = format!(
        "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n{}\t{HOST_NAME}\n",
        crate::netns::ETH0_ADDRESS
    );
    let files: [(&str, u32, String); 19] = [
        (
            "passwd",
            0o644,
            format!(
                "root:x:0:0:root:/root:/bin/bash\n\
                 daemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin\n\
                 bin:x:2:2:bin:/bin:/usr/sbin/nologin\n\
                 sys:x:3:3:sys:/dev:/usr/sbin/nologin\n\
                 mail:x:8:8:mail:/var/mail:/usr/sbin/nologin\n\
                 www-data:x:33:33:www-data:/var/www:/usr/sbin/nologin\n\
                 nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n\
                 user:x:{USER}:{USER}:user:/home/user:/bin/bash\n"
            ),
        ),
        (
            "group",
            0o644,
            format!(
                "root:x:0:\ndaemon:x:1:\nbin:x:2:\nsys:x:3:\nadm:x:4:\ntty:x:5:\ndisk:x:6:\nmail:x:8:\nsudo:x:27:user\n\
                 www-data:x:33:\nshadow:x:42:\nutmp:x:43:\nstaff:x:50:\nusers:x:100:\nnogroup:x:65534:\nuser:x:{USER}:\n"
            ),
        ),
        (
            "shadow",
            0o640,
            "root:*:19000:0:99999:7:::\nuser:*:19000:0:99999:7:::\n".to_owned(),
        ),
        ("gshadow", 0o640, "root:*::\nsudo:*::user\nuser:!::\n".to_owned()),
        ("hostname", 0o644, format!("{HOST_NAME}\n")),
        ("hosts", 0o644, hosts),
        // Not a loopback address: some resolvers treat those as a cache of their own.
        (
            "resolv.conf",
            0o644,
            format!("nameserver {}\n", crate::netns::ETH0_ADDRESS),
        ),
        (
            "nsswitch.conf",
            0o644,
            "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\nnetworks: files\nprotocols: files\n\
             services: files\nrpc: files\n"
                .to_owned(),
        ),
        ("environment", 0o644, format!("PATH=\"{path}\"\n")),
        (
            "profile",
            0o644,
            format!(
                "# PATH for login shells; a PATH that the caller set stays in front.\n\
                 case \":$PATH:\" in\n  *:/usr/local/bin:*) ;;\n  *) PATH=\"${{PATH:+$PATH:}}{path}\" ;;\nesac\n\
                 export PATH\n\
                 if [ -n \"${{BASH_VERSION-}}\" ] && [ -n \"${{PS1-}}\" ] && [ -f /etc/bash.bashrc ]; then\n  \
                 . /etc/bash.bashrc\nfi\n\
                 for file in /etc/profile.d/*.sh; do\n  [ -r \"$file\" ] && . \"$file\"\ndone\nunset file\n"
            ),
        ),
        (
            "bash.bashrc",
            0o644,
            "[ -z \"${PS1-}\" ] || PS1='\\u@\\h:\\w\\$ '\n".to_owned(),
        ),
        ("sudoers", 0o440, sudoers(path)),
        ("pam.d/other", 0o644, pam("pam_deny.so", "pam_deny.so")),
        ("pam.d/sudo", 0o644, pam("pam_unix.so", "pam_permit.so")),
        ("pam.d/sudo-i", 0o644, pam("pam_unix.so", "pam_permit.so")),
        (
            "pam.d/su",
            0o644,
            format!("auth sufficient pam_rootok.so\n{}", pam("pam_unix.so", "pam_permit.so")),
        ),
        (
            "pam.d/su-l",
            0o644,
            format!("auth sufficient pam_rootok.so\n{}", pam("pam_unix.so", "pam_permit.so")),
        ),
        (
            "pam.d/runuser",
            0o644,
            format!("auth sufficient pam_rootok.so\n{}", pam("pam_unix.so", "pam_permit.so")),
        ),
        ("timezone", 0o644, "Etc/UTC\n".to_owned()),
    ];
    for (name, mode, text) in files {
        let path = etc.join(name);
        fs::write(&path, text)?;
        fs::set_permissions(&path, Permissions::from_mode(mode))?;
    }
    std::os::unix::fs::chown(etc.join("shadow"), Some(0), Some(42))?;
    symlink("/proc/self/mounts", etc.join("mtab"))
}

fn sudoers(path: &str) -> String {
    format!(
        "Defaults env_reset\nDefaults secure_path=\"{path}\"\nDefaults !fqdn\n\
         root ALL=(ALL:ALL) ALL\nuser ALL=(ALL:ALL) NOPASSWD:ALL\n@includedir /etc/sudoers.d\n"
    )
}

/// A PAM service with one module for who may come in and one for everything after.
fn pam(auth: &str, after: &str) -> String {
    format!("auth required {auth}\naccount required {after}\npassword required {auth}\nsession required {after}\n")
}

/// The layer that lies between the host's `/usr` and a sandbox's: it hides what is the host's own.
fn make_usr(usr: &Path) -> io::Result<()> {
    make_dir(usr, 0o755)?;
    for hidden in ["local", "src"] {
        let dir = usr.join(hidden);
        make_dir(&dir, 0o755)?;
        rustix::fs::setxattr(&dir, "trusted.overlay.opaque", b"y", XattrFlags::empty())?;
    }
    // Writable for everyone, so that `user` can install programs where every PATH finds them.
    for dir in ["", "bin", "etc", "games", "include", "lib", "sbin", "share", "src"] {
        make_dir(&usr.join("local").join(dir), 0o777)?;
    }
    symlink("share/man", usr.join("local/man"))
}

fn make_dir(path: &Path, mode: u32) -> io::Result<()> {
    fs::create_dir_all(path)?;
    fs::set_permissions(path, Permissions::from_mode(mode))
}

/// Copies a file, a link as a link, or a directory with all that is in it; nothing else.
fn copy(from: &Path, to: &Path) -> io::Result<()> {
    let metadata = from.symlink_metadata()?;
    if metadata.is_symlink() {
        symlink(fs::read_link(from)?, to)
    } else if metadata.is_dir() {
        make_dir(to, 0o755)?;
        for entry in fs::read_dir(from)? {
            let entry = entry?;
            copy(&entry.path(), &to.join(entry.file_name()))?;
        }
        Ok(())
    } else if metadata.is_file() {
        fs::write(to, fs::read(from)?)?;
        fs::set_permissions(to, Permissions::from_mode(0o644))
    } else {
        Ok(())
    }
}
