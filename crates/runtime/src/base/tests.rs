use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::fs::CWD;
use tempfile::TempDir;

use super::accounts::Accounts;
use super::packages::{conffiles, held};
use super::sources::{is_public_key, lines, of_distribution, stanzas};
use super::{Versions, packages_of, unsupported_reason};
use crate::mapped::tests::with_overlay;
use crate::mounting;

const MD5_OF_SHIPPED: &str = "fd3d1512c1f4af5f65da9313a20a3bbb"; // of "shipped\n"

/// A host with a merged `/usr`, and a place for the versions made from it.
struct Host {
    dir: TempDir,
    data: TempDir,
}

impl Host {
    fn new() -> Self {
        let host = Self {
            dir: tempfile::tempdir().unwrap(),
            data: tempfile::tempdir().unwrap(),
        };
        for name in ["bin", "sbin", "lib"] {
            symlink(format!("usr/{name}"), host.path(name)).unwrap();
        }
        host.write("usr/bin/bash", "");
        host.write("usr/bin/python3", "");
        host.write("usr/lib/os-release", "ID=debian\nVERSION_CODENAME=bookworm\n");
        host
    }

    /// A Debian host with one package that has these files outside `/usr`.
    fn debian(listed: &[&str], status: &str) -> Self {
        let host = Self::new();
        host.write("usr/bin/dpkg", "");
        host.write("var/lib/dpkg/status", status);
        host.write("var/lib/dpkg/info/thing.list", &format!("/.\n{}\n", listed.join("\n")));
        host.write("var/lib/dpkg/info/thing.postinst", "#!/bin/sh\n");
        host.write("var/lib/dpkg/alternatives/pager", "auto\n");
        host.write("var/lib/dpkg/triggers/File", "/etc/x thing\n");
        host
    }

    fn path(&self, path: &str) -> PathBuf {
        self.dir.path().join(path)
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn chmod(&self, path: &str, mode: u32) {
        fs::set_permissions(self.path(path), Permissions::from_mode(mode)).unwrap();
    }

    fn versions(&self) -> Versions {
        Versions::new(self.dir.path(), self.data.path())
    }

    /// Creates the version that matches now and returns its directory.
    fn made(&self) -> PathBuf {
        self.versions().update_current().unwrap();
        let all = self.data.path().join("base");
        all.join(fs::read_link(all.join("current")).unwrap())
    }
}

fn text(path: &Path) -> String {
    fs::read_to_string(path).unwrap()
}

/// All plain files below a directory, as one text.
fn everything_in(dir: &Path) -> Vec<u8> {
    let mut all = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        if entry.file_type().unwrap().is_dir() {
            all.extend(everything_in(&entry.path()));
        } else if entry.file_type().unwrap().is_file() {
            all.extend(fs::read(entry.path()).unwrap());
        }
    }
    all
}

#[test]
fn a_host_without_a_merged_usr_is_rejected_with_the_reason() {
    let host = Host::new();
    assert_eq!(unsupported_reason(host.dir.path()), None);
    fs::remove_file(host.path("sbin")).unwrap();
    fs::create_dir(host.path("sbin")).unwrap();
    assert!(
        unsupported_reason(host.dir.path())
            .unwrap()
            .contains("/sbin is not a link")
    );
    assert!(host.versions().update_current().is_err());
}

#[test]
fn python_is_linked_to_python3_unless_the_host_has_it() {
    let host = Host::new();
    let link = "usr/bin/python";
    assert_eq!(fs::read_link(host.made().join(link)).unwrap(), Path::new("python3"));
    host.write(link, "its own");
    assert!(!host.made().join(link).exists());
    fs::remove_file(host.path(link)).unwrap();
    fs::remove_file(host.path("usr/bin/python3")).unwrap();
    assert!(host.made().join(link).symlink_metadata().is_err());
}

#[test]
fn externally_managed_markers_are_hidden_for_every_python() {
    let host = Host::new();
    for version in ["3.11", "3.13"] {
        host.write(
            &format!("usr/lib/python{version}/EXTERNALLY-MANAGED"),
            "[externally-managed]",
        );
    }
    host.chmod("usr/lib/python3.11", 0o755);
    fs::create_dir(host.path("usr/lib/python3.12")).unwrap();
    let made = host.made();
    for version in ["3.11", "3.13"] {
        let hidden = made.join(format!("usr/lib/python{version}/EXTERNALLY-MANAGED"));
        let found = hidden.symlink_metadata().unwrap();
        assert!(found.file_type().is_char_device() && found.rdev() == 0);
    }
    assert!(!made.join("usr/lib/python3.12").exists());
    // An upgrade of the host brings another one.
    host.write("usr/lib/python3.12/EXTERNALLY-MANAGED", "[externally-managed]");
    assert!(
        host.made()
            .join("usr/lib/python3.12/EXTERNALLY-MANAGED")
            .symlink_metadata()
            .is_ok()
    );
    assert!(text(&made.join("root/etc/pip.conf")).contains("break-system-packages = true"));
}

#[test]
fn packages_of_python_have_their_directories_from_the_start() {
    let host = Host::new();
    for file in ["python3.11", "python3.12", "python3.11-config", "python3"] {
        host.write(&format!("usr/bin/{file}"), "");
    }
    let made = host.made();
    let state = |path: &str| {
        let found = made.join(path).metadata().unwrap();
        (found.mode() & 0o7777, found.uid())
    };
    let name = if host.path("var/lib/dpkg/status").exists() {
        "dist"
    } else {
        "site"
    };
    for version in ["python3.11", "python3.12"] {
        assert_eq!(state(&format!("usr/local/lib/{version}/{name}-packages")), (0o755, 0));
        assert_eq!(state(&format!("usr/local/lib/{version}")), (0o755, 0));
        assert_eq!(
            state(&format!("root/home/user/.local/lib/{version}/site-packages")),
            (0o755, 1000)
        );
    }
    assert_eq!(state("root/home/user/.local"), (0o755, 1000));
    // Without these, `pip` would remove the directories with the last package in them.
    let kept = ["usr/local/lib/python3.12", "root/home/user/.local/lib/python3.12"];
    for (directory, name, owner) in [(kept[0], name, 0), (kept[1], "site", 1000)] {
        let path = format!("{directory}/{name}-packages/README.txt");
        assert_eq!(state(&path), (0o644, owner));
    }
    assert_eq!(fs::read_dir(made.join("usr/local/lib")).unwrap().count(), 2);
}

#[test]
fn the_hosts_npm_settings_are_replaced() {
    let host = Host::new();
    assert!(!host.made().join("usr/etc").exists());
    host.write("usr/etc/npmrc", "//registry.example/:_authToken=MARK\n");
    assert_eq!(text(&host.made().join("usr/etc/npmrc")), "prefix=/usr/local\n");
}

#[test]
fn a_host_without_dpkg_gets_no_package_database() {
    let host = Host::new();
    host.write("var/lib/rpm/rpmdb.sqlite", "");
    let made = host.made();
    for absent in [
        "root/var/lib/dpkg",
        "root/var/lib/rpm",
        "root/etc/apt",
        "root/etc/dpkg",
        "usr/sbin",
    ] {
        assert!(!made.join(absent).exists(), "{absent}");
    }
    assert!(text(&made.join("root/etc/passwd")).contains("\nuser:x:1000:1000:"));
}

#[test]
fn only_unchanged_conffiles_of_packages_are_copied() {
    let listed = [
        "/etc",
        "/etc/thing",
        "/etc/thing/link",
        "/etc/thing/far",
        "/etc/shut",
        "/etc/thing/deep",
        "/etc/pam.d",
        "/etc/rerouted",
        "/var/lib/thing",
        "/var/lib/../../../escape",
    ];
    let status = format!(
        "Package: thing\nStatus: install ok installed\nConffiles:\n /etc/thing/same {MD5_OF_SHIPPED}\n \
         /etc/thing/changed {MD5_OF_SHIPPED}\n /etc/thing/closed {MD5_OF_SHIPPED}\n /etc/shut/file {MD5_OF_SHIPPED}\n \
         /etc/rerouted/file {MD5_OF_SHIPPED}\n /etc/../outside {MD5_OF_SHIPPED}\nVersion: 1\n"
    );
    let host = Host::debian(&listed, &status);
    for name in ["same", "closed", "other"] {
        host.write(&format!("etc/thing/{name}"), "shipped\n");
    }
    host.write("etc/thing/changed", "MARK\n");
    host.write("outside", "shipped\n");
    host.chmod("etc/thing/same", 0o755);
    host.chmod("etc/thing/closed", 0o600);
    host.write("etc/shut/file", "shipped\n");
    host.chmod("etc/shut", 0o750);
    fs::create_dir_all(host.path("etc/thing/deep")).unwrap();
    host.chmod("etc/thing/deep", 0o710);
    fs::create_dir_all(host.path("var/lib/thing")).unwrap();
    host.write("var/lib/thing/state", "MARK");
    symlink("same", host.path("etc/thing/link")).unwrap();
    symlink("/root/secret", host.path("etc/thing/far")).unwrap();
    // Links in place of directories: nothing may be written through them on the host.
    let elsewhere = tempfile::tempdir().unwrap();
    fs::write(elsewhere.path().join("file"), "shipped\n").unwrap();
    symlink(elsewhere.path(), host.path("etc/rerouted")).unwrap();
    symlink(elsewhere.path(), host.path("etc/pam.d")).unwrap();

    let made = host.made();
    let etc = made.join("root/etc");
    assert_eq!(text(&etc.join("thing/same")), "shipped\n");
    assert_eq!(etc.join("thing/same").metadata().unwrap().mode() & 0o7777, 0o755);
    assert_eq!(fs::read_link(etc.join("thing/link")).unwrap(), Path::new("same"));
    assert_eq!(etc.join("thing/deep").metadata().unwrap().mode() & 0o7777, 0o710);
    for absent in [
        "thing/changed",
        "thing/closed",
        "thing/other",
        "thing/far",
        "shut/file",
        "rerouted/file",
    ] {
        assert!(etc.join(absent).symlink_metadata().is_err(), "{absent}");
    }
    assert!(made.join("root/var/lib/thing").is_dir());
    assert!(!made.join("root/outside").exists());
    assert_eq!(memchr::memmem::find(&everything_in(&made), b"MARK"), None);
    let names: Vec<_> = fs::read_dir(elsewhere.path())
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    assert_eq!(names, ["file"]);
    assert!(etc.join("pam.d/sudo").is_file());
}

#[test]
fn the_package_database_is_complete_and_contains_no_secrets() {
    let host = Host::debian(&[], "Package: thing\nStatus: install ok installed\n");
    host.write("var/lib/dpkg/info/thing.md5sums", "");
    host.write("var/lib/apt/extended_states", "Package: thing\nAuto-Installed: 1\n");
    host.write("var/lib/apt/lists/private.example_Packages", "MARK");
    host.write("var/cache/debconf/passwords.dat", "MARK");
    host.write(
        "etc/apt/auth.conf.d/private.conf",
        "machine private.example login me password MARK\n",
    );
    host.write(
        "etc/apt/apt.conf.d/99proxy",
        "Acquire::http::Proxy \"http://me:MARK@proxy.example\";\n",
    );
    host.write("etc/apt/preferences.d/pins", "Package: *\nPin: origin MARK.example\n");
    let made = host.made();
    let database = made.join("root/var/lib/dpkg");
    let shared = [
        "status",
        "info/thing.list",
        "info/thing.md5sums",
        "info/thing.postinst",
        "alternatives/pager",
    ];
    for file in shared {
        let (copy, original) = (database.join(file), host.path("var/lib/dpkg").join(file));
        assert_eq!(text(&copy), text(&original));
        assert_ne!(copy.metadata().unwrap().ino(), original.metadata().unwrap().ino());
    }
    assert!(database.join("lock").is_file() && database.join("updates").is_dir());
    assert!(made.join("root/var/lib/apt/extended_states").is_file());
    assert_eq!(memchr::memmem::find(&everything_in(&made), b"MARK"), None);
    assert_eq!(text(&made.join("usr/sbin/policy-rc.d")), "#!/bin/sh\nexit 101\n");
    // The host has no sources that may be copied: the distribution's own are there.
    let sources = text(&made.join("root/etc/apt/sources.list.d/distribution.sources"));
    assert!(sources.contains("Suites: bookworm bookworm-updates\n"));
}

#[test]
fn packages_that_boot_the_host_are_held() {
    let status = "Package: linux-image-amd64\nStatus: install ok installed\n\n\
                  Package: bash\nStatus: install ok installed\n\n\
                  Package: grub-pc\nStatus: deinstall ok config-files\n";
    let expect = "Package: linux-image-amd64\nStatus: hold ok installed\n\n\
                  Package: bash\nStatus: install ok installed\n\n\
                  Package: grub-pc\nStatus: deinstall ok config-files\n";
    assert_eq!(held(status), expect);
}

#[test]
fn conffiles_are_read_only_from_their_field() {
    let status = "Package: a\nDescription: text\n /etc/no 1\nConffiles:\n /etc/a 1\n /etc/b 2 obsolete\nVersion: 1\n \
                  /etc/no 3\n\nPackage: b\nConffiles:\n /usr/c 4\n /etc/./d 5\n /etc/e 6\n";
    let found = conffiles(status);
    // "." is dropped by the reading of a path, and what remains is the same file.
    assert_eq!(
        found,
        [("etc/a", "1"), ("etc/b", "2"), ("etc/./d", "5"), ("etc/e", "6")]
    );
}

#[test]
fn only_world_readable_files_without_private_keys_are_copied() {
    let host = Host::new();
    let key = "-----BEGIN EC PRIVATE KEY-----\nMARK\n-----END EC PRIVATE KEY-----\n";
    let certificate = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    for (name, mode, content) in [
        ("ca.pem", 0o644, certificate.to_owned()),
        ("combined.pem", 0o644, format!("{certificate}{key}")),
        ("mail.pem", 0o600, certificate.to_owned()),
        ("group.pem", 0o640, certificate.to_owned()),
        ("closed/ca.pem", 0o644, certificate.to_owned()),
    ] {
        let path = format!("etc/ssl/certs/{name}");
        host.write(&path, &content);
        host.chmod(&path, mode);
    }
    host.chmod("etc/ssl/certs/closed", 0o750);
    symlink("ca.pem", host.path("etc/ssl/certs/link.pem")).unwrap();
    let certs = host.made().join("root/etc/ssl/certs");
    let mut names: Vec<_> = fs::read_dir(certs)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    names.sort();
    assert_eq!(names, ["ca.pem", "link.pem"]);
}

#[test]
fn accounts_of_the_host_are_copied_when_packages_need_them() {
    let host = Host::new();
    host.write(
        "etc/passwd",
        "root:x:0:0:The Boss:/root:/bin/zsh\nman:x:6:12:man:/var/cache/man:/usr/sbin/nologin\n\
         games:x:5:60:secret:/home/games:/bin/bash\nbilling:x:998:998:MARK:/srv/billing:/usr/sbin/nologin\n\
         alice:x:1000:1000:Alice:/home/alice:/bin/bash\n_apt:x:42:65534::/nonexistent:/usr/sbin/nologin\n\
         messagebus:x:101:102::/nonexistent:/usr/sbin/nologin\nbig:x:70000:1::/:/bin/sh\nbroken:x\n",
    );
    host.write(
        "etc/group",
        "man:x:12:alice\nmessagebus:x:102:alice\nssl-cert:x:103:alice\nbilling:x:998:\n",
    );
    host.write(
        "var/lib/dpkg/statoverride",
        "messagebus ssl-cert 4754 /usr/lib/helper\nbig root 755 /x\n",
    );
    let accounts = Accounts::of(host.dir.path());
    let passwd = accounts.passwd();
    for line in [
        "root:x:0:0:root:/root:/bin/bash",
        "user:x:1000:1000:user:/home/user:/bin/bash",
        "man:x:6:12:man:/var/cache/man:/usr/sbin/nologin",
        "games:x:5:65534:games:/nonexistent:/usr/sbin/nologin",
        "_apt:x:42:65534:_apt:/nonexistent:/usr/sbin/nologin",
        "messagebus:x:101:65534:messagebus:/nonexistent:/usr/sbin/nologin",
    ] {
        assert!(passwd.lines().any(|have| have == line), "{line} in {passwd}");
    }
    assert_eq!(passwd.lines().count(), 8 + 4);
    let group = accounts.group();
    assert!(group.contains("\nssl-cert:x:103:\n") && group.contains("\nsudo:x:27:user\n"));
    for absent in ["alice", "billing", "messagebus:x:102:a"] {
        assert!(!group.contains(absent) && !passwd.contains(absent), "{absent}");
    }
    assert_eq!(accounts.uid("_apt"), Some(42));
    assert_eq!(accounts.shadow().lines().count(), passwd.lines().count());
    assert_eq!(accounts.gshadow().lines().count(), group.lines().count());
}

#[test]
fn only_public_one_line_sources_are_copied() {
    let check = |source: &str, comes: bool| {
        let expect = if comes { format!("{source}\n") } else { String::new() };
        assert_eq!(lines(source), expect, "{source}");
    };
    for source in [
        "deb http://deb.debian.org/debian bookworm main contrib",
        "deb-src https://archive.ubuntu.com/ubuntu/ noble main",
        "deb [arch=amd64 signed-by=/usr/share/keyrings/docker.gpg] https://download.docker.com/linux/debian bookworm stable",
        "deb [ signed-by=/etc/apt/keyrings/nodesource.asc ] https://deb.nodesource.com/node_20.x nodistro main",
        "deb http://snapshot.debian.org/archive/debian/20250520T000000Z bookworm main",
        "deb https://packages.cloud.google.com/apt google-compute-engine-bookworm-stable main",
        "deb mirror+http://mirrors.example:8080/list bookworm main",
    ] {
        check(source, true);
    }
    for source in [
        "deb https://me:secret@packages.example/debian bookworm main",
        "deb https://token@packages.example/debian bookworm main",
        "deb https://packages.example/debian?token=1 bookworm main",
        "deb https://packagecloud.example/priv/0a1b2c3d4e5f60718293a4b5c6d7e8f9/any bookworm main",
        "deb https://packages.example/0f8fad5b-d9cb-469f-a165-70867728950e/debian bookworm main",
        "deb https://packages.example/tok_aGVsbG8gd29ybGQhISE/debian bookworm main",
        "deb file:/srv/packages ./",
        "deb cdrom:[Debian]/ bookworm main",
        "deb s3://bucket/debian bookworm main",
        "deb [signed-by=/root/private.gpg] http://packages.example/ bookworm main",
        "deb [signed-by=/etc/apt/keyrings/../../../root/x.gpg] http://packages.example/ bookworm main",
        "deb [arch=amd64 http://packages.example/ bookworm main",
        "deb",
        "nonsense",
    ] {
        check(source, false);
    }
    assert_eq!(
        lines("# login: secret\n\ndeb http://a.example x y # secret\n#deb http://b.example x y\n"),
        "deb http://a.example x y\n"
    );
}

#[test]
fn only_public_deb822_sources_are_copied() {
    let open = "Types: deb\nURIs: http://deb.debian.org/debian https://b.example/debian\nSuites: bookworm\n\
                Components: main\nSigned-By: /usr/share/keyrings/debian-archive-keyring.gpg";
    let embedded_key = "Types: deb\nURIs: https://a.example/\nSuites: ./\nSigned-By:\n \
                       -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n /mDMEY865UxYJKwYBBAHaRw8BAQ\n -----END PGP PUBLIC KEY BLOCK-----";
    let closed = [
        "Types: deb\nURIs: http://a.example/ https://me:secret@b.example/\nSuites: x",
        "Types: deb\nURIs:\n https://me:secret@b.example/\nSuites: x",
        "Types: deb\nURIs: file:/srv/packages\nSuites: ./",
        "Types: deb\nURIs: http://a.example/\nSuites: x\nSigned-By: /root/key.gpg",
        "Types: deb\nSuites: x",
        "no field",
    ];
    for stanza in closed {
        assert_eq!(stanzas(stanza), "", "{stanza}");
    }
    let file = format!(
        "# secret\n{open}\n\n{}\n \n# secret\n{embedded_key}\n# secret\n",
        closed[0]
    );
    assert_eq!(stanzas(&file), format!("{open}\n\n{embedded_key}\n"));
}

#[test]
fn only_keyrings_of_public_keys_are_copied() {
    assert!(is_public_key(b"-----BEGIN PGP PUBLIC KEY BLOCK-----\n"));
    assert!(is_public_key(&[0x99, 0x01, 0x0d]));
    assert!(is_public_key(&[0xc6, 0x33]));
    for private in [
        &b"-----BEGIN PGP PRIVATE KEY BLOCK-----\n"[..],
        &[0x95, 0x01],
        &[0xc5, 0x33],
        b"",
        b"text",
    ] {
        assert!(!is_public_key(private));
    }
}

#[test]
fn default_sources_of_distributions() {
    let ubuntu = of_distribution("NAME=\"Ubuntu\"\nID=ubuntu\nVERSION_CODENAME=noble\n").unwrap();
    assert!(ubuntu.contains("URIs: http://security.ubuntu.com/ubuntu\nSuites: noble-security\n"));
    assert!(of_distribution("ID=\"debian\"\nVERSION_CODENAME=\"trixie\"\n").is_some());
    assert_eq!(of_distribution("ID=fedora\nVERSION_CODENAME=x\n"), None);
    assert_eq!(of_distribution(""), None);
    // The default sources themselves pass the filter.
    assert_eq!(stanzas(&ubuntu), ubuntu);
}

#[test]
fn a_version_is_kept_while_a_sandbox_uses_it() {
    let host = Host::debian(&[], "Package: a\n");
    let versions = host.versions();
    let sweep = |names: &[&str]| {
        let names: BTreeSet<String> = names.iter().map(|name| (*name).to_owned()).collect();
        versions.sweep(|| Ok(names)).unwrap();
    };
    let first = host.made();
    assert!(!versions.update_current().unwrap(), "nothing changed");
    versions.sweep(|| panic!("there is nothing to remove")).unwrap();

    // As `dpkg` does: a new file in the place of the old.
    let change = |text: &str| {
        host.write("var/lib/dpkg/status-new", text);
        fs::rename(host.path("var/lib/dpkg/status-new"), host.path("var/lib/dpkg/status")).unwrap();
    };
    change("Package: b\n");
    assert!(versions.update_current().unwrap());
    let second = host.made();
    assert_ne!(first, second);
    assert_eq!(text(&second.join("root/var/lib/dpkg/status")), "Package: b\n");

    sweep(&["one", "two"]);
    assert!(first.is_dir());
    assert_eq!(versions.of("one").unwrap(), None, "one may use either");
    assert_eq!(versions.of("three").unwrap(), versions.current());
    sweep(&["two", "three"]);
    assert!(first.is_dir(), "two may use it");
    sweep(&["three"]);
    assert!(!first.exists(), "three came later");
    assert!(second.is_dir());

    change("Package: c\n");
    let third = host.made();
    sweep(&[]);
    assert!(!second.exists() && third.is_dir());
}

#[test]
fn versions_of_the_same_packages_are_known_as_such() {
    let host = Host::debian(&[], "Package: a\n");
    let (made, versions) = (host.made(), host.versions());
    let current = versions.current().unwrap();
    assert_eq!(current.split(' ').next(), made.file_name().unwrap().to_str());
    // After the host has started again, or with another version of this program.
    let name = format!("{}-0123456789abcdef", packages_of(&current));
    let earlier = made.with_file_name(&name);
    fs::create_dir(&earlier).unwrap();
    fs::write(earlier.join("users"), "one\n").unwrap();
    assert_eq!(versions.of("one").unwrap(), Some(name.clone()));
    assert_eq!(versions.of("two").unwrap(), Some(current.clone()));
    assert_eq!(packages_of(&name), packages_of(&current));
    // With other packages.
    fs::rename(earlier, made.with_file_name("0123456789abcdef-0123456789abcdef")).unwrap();
    assert_eq!(versions.of("one").unwrap(), None);
}

#[test]
fn a_version_that_matches_again_is_reused() {
    let host = Host::new();
    let names = |names: &[&str]| Ok(names.iter().map(|name| (*name).to_owned()).collect());
    let first = host.made();
    host.write("etc/skel/.bashrc", "# changed\n");
    let second = host.made();
    host.versions().sweep(|| names(&["one"])).unwrap();
    fs::remove_dir_all(host.path("etc/skel")).unwrap();
    assert_eq!(host.made(), first);
    // Its users are recorded anew when it is replaced again.
    fs::create_dir(host.path("etc/skel")).unwrap();
    assert_ne!(host.made(), first);
    host.versions().sweep(|| names(&["late"])).unwrap();
    assert!(first.is_dir() && !second.join("users").metadata().is_ok_and(|users| users.len() == 0));
    host.versions().sweep(|| names(&[])).unwrap();
    assert!(!first.exists() && !second.exists());
}

#[test]
fn leftovers_of_a_killed_platform_are_cleaned_up() {
    let host = Host::new();
    let all = host.data.path().join("base");
    // A version of an older release, a half-created one, a half-removed one, and a link that was not renamed yet.
    for dir in ["1/root", "unfinished/root/etc", "removed/root"] {
        fs::create_dir_all(all.join(dir)).unwrap();
    }
    symlink("nowhere", all.join("current.new")).unwrap();
    let made = host.made();
    host.versions()
        .sweep(|| Ok(BTreeSet::from(["old".to_owned()])))
        .unwrap();
    assert!(all.join("1/root").is_dir(), "a sandbox of the older release may use it");
    assert!(!all.join("unfinished").exists() && !all.join("removed").exists());
    host.versions().sweep(|| Ok(BTreeSet::new())).unwrap();
    let mut names: Vec<_> = fs::read_dir(&all)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    names.sort();
    let mut expect = [made.file_name().unwrap().to_owned(), "current".into()];
    expect.sort();
    assert_eq!(names, expect);
}

#[test]
fn a_usr_that_cannot_have_mapped_ids_is_copied_for_each_version() {
    let (host, beside) = (Host::new(), tempfile::tempdir().unwrap());
    let versions = host.versions();
    assert_eq!(versions.copied_bytes().unwrap(), None);
    with_overlay(&host.path("usr"), beside.path(), || {
        let expected = versions.copied_bytes().unwrap();
        let made = versions.make().unwrap();
        assert!(!versions.has_current(), "nothing waits for the copy");
        assert!(versions.make_current(&made).unwrap());
        let first = host.made();
        assert!(first.join("host/bin/bash").is_file());
        assert_eq!(first.metadata().unwrap().mode() & 0o777, 0o700);
        assert_eq!(text(&first.join("bytes")), format!("{}\n", expected.unwrap()));
        assert_eq!(versions.copied_bytes().unwrap(), expected);

        host.write("usr/etc/npmrc", "");
        let second = host.made();
        assert!(second.join("host/etc/npmrc").is_file() && !first.join("host/etc").exists());
        versions.sweep(|| Ok(BTreeSet::new())).unwrap();
        assert!(!first.exists() && second.is_dir());
    });
    let shown = Host::new();
    assert!(!shown.made().join("host").exists());
}

#[test]
fn what_a_copy_of_usr_left_is_removed() {
    let (host, beside) = (Host::new(), tempfile::tempdir().unwrap());
    host.write("usr/lib/large", &"large".repeat(1 << 20));
    let all = host.data.path().join("base");
    with_overlay(&host.path("usr"), beside.path(), || {
        let small = mounting::create("tmpfs", &[("size", "2m")], 0).unwrap();
        mounting::attach(small.as_fd(), CWD, host.data.path().to_str().unwrap()).unwrap();
        let why = host.versions().update_current().unwrap_err().to_string();
        assert!(why.contains("needs 6 MB for a copy"), "{why}");
        assert_eq!(fs::read_dir(&all).unwrap().count(), 0, "of one that failed");
        fs::create_dir_all(all.join("unfinished/host/bin")).unwrap();
        host.versions().remove_incomplete().unwrap();
        assert_eq!(fs::read_dir(&all).unwrap().count(), 0, "of a platform that was killed");
    });
}

#[test]
fn a_package_change_in_progress_is_detected_without_taking_the_lock() {
    let host = Host::debian(&[], "");
    host.write("var/lib/dpkg/lock", "");
    assert!(!host.versions().host_is_changing());
    let code =
        "import fcntl,sys\nf=open(sys.argv[1],'w')\nfcntl.lockf(f,fcntl.LOCK_EX)\nprint(flush=True)\nsys.stdin.read()";
    let mut holder = Command::new("python3")
        .args(["-c", code])
        .arg(host.path("var/lib/dpkg/lock"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    holder.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
    assert!(host.versions().host_is_changing());
    let mut stdin = holder.stdin.take().unwrap();
    stdin.flush().unwrap();
    drop(stdin);
    assert!(holder.wait().unwrap().success());
    assert!(!host.versions().host_is_changing());
}
