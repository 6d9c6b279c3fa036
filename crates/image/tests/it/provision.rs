//! Provisioning of images of all families, and of none.

use std::os::unix::fs::PermissionsExt;

use image::Program;
use protocol::image::{PackageTool, Progress, ProvisionJob, ProvisionReport};

use crate::{Root, run};

fn job(root: &Root, user: &str, admin: bool, prepare: bool) -> ProvisionJob {
    ProvisionJob {
        user: user.to_owned(),
        admin,
        prepare,
        only_interpreters: false,
        root: root.path(),
    }
}

fn provision(job: &ProvisionJob) -> ProvisionReport {
    match run(Program::Provision, job).unwrap() {
        Progress::Provisioned(report) => report,
        other => panic!("{other:?}"),
    }
}

fn debian() -> Root {
    let root = Root::new();
    root.write(
        "etc/passwd",
        "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534::/nonexistent:/usr/sbin/nologin",
    );
    root.write("etc/group", "root:x:0:\nsudo:x:27:\nnogroup:x:65534:\n");
    root.write("etc/shadow", "root:*:19000:0:99999:7:::\n");
    root.write("etc/gshadow", "root:*::\nsudo:*::\n");
    std::fs::set_permissions(root.path().join("etc/shadow"), PermissionsExt::from_mode(0o640)).unwrap();
    rustix::fs::chown(
        root.path().join("etc/shadow"),
        None,
        Some(rustix::fs::Gid::from_raw(42)),
    )
    .unwrap();
    root.write("etc/os-release", "ID=debian\n");
    root.write("etc/machine-id", "0123\n");
    root.write("etc/hosts", "kept");
    root.write("etc/skel/.bashrc", "rc");
    root.write("etc/skel/.config/x", "x");
    root.write("bin/bash", "");
    root.write("usr/bin/sudo", "");
    root.write("usr/local/bin/tool", "");
    root.write("usr/bin/python3.11", "");
    root.write("usr/include/python3.11/Python.h", "");
    root.write("usr/local/bin/python3.9", "");
    root.write("usr/local/lib/python3.11/dist-packages/x", "");
    root.write(
        "etc/ssl/certs/ca-certificates.crt",
        &"-----BEGIN CERTIFICATE-----\n".repeat(20),
    );
    root
}

#[test]
fn an_image_of_debian_gets_its_user() {
    let root = debian();
    let report = provision(&job(&root, "user", true, true));
    let expect = ProvisionReport {
        uid: 1000,
        gid: 1000,
        home: "/home/user".to_owned(),
        shell: "/bin/bash".to_owned(),
        created: true,
        packages: Some(PackageTool::AptGet),
        os: Some("debian".to_owned()),
        missing: Vec::new(),
        wanted: vec!["curl".to_owned(), "iproute2".to_owned()],
    };
    assert_eq!(report, expect);
    assert_eq!(
        root.read("etc/passwd"),
        "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534::/nonexistent:/usr/sbin/nologin\n\
         user:x:1000:1000::/home/user:/bin/bash\n"
    );
    assert_eq!(
        root.read("etc/group"),
        "root:x:0:\nsudo:x:27:user\nnogroup:x:65534:\nuser:x:1000:\n"
    );
    assert_eq!(root.read("etc/shadow"), "root:*:19000:0:99999:7:::\nuser::::::::\n");
    assert_eq!(root.read("etc/gshadow"), "root:*::\nsudo:*::user\nuser:!::\n");
    assert_eq!(
        root.read("etc/sudoers.d/90-ringfence-user"),
        "user ALL=(ALL:ALL) NOPASSWD: ALL\n"
    );
    for (path, expect) in [
        ("etc/shadow", "f 640 0:42"),
        ("etc/sudoers.d", "d 750 0:0"),
        ("etc/sudoers.d/90-ringfence-user", "f 440 0:0"),
        ("home/user", "d 755 1000:1000"),
        ("home/user/.bashrc", "f 644 1000:1000"),
        ("home/user/.config/x", "f 644 1000:1000"),
        ("code", "d 777 0:0"),
        ("usr/local", "d 777 0:0"),
        ("usr/local/bin/tool", "f 777 0:0"),
        ("tmp", "d 1777 0:0"),
        ("etc/machine-id", "missing"),
        ("home/user/.local", "d 755 1000:1000"),
        ("home/user/.local/lib/python3.11/site-packages", "d 755 1000:1000"),
        ("home/user/.local/lib/python3.9/site-packages", "d 755 1000:1000"),
        (
            "home/user/.local/lib/python3.9/site-packages/README.txt",
            "f 644 1000:1000",
        ),
        ("usr/include", "d 755 0:0"),
        ("usr/include/python3.11", "d 1777 0:0"),
        ("usr/include/python3.9", "missing"),
    ] {
        assert_eq!(root.state(path), expect, "{path}");
    }
    assert_eq!(root.read("etc/hosts"), "kept");
    let before = root.listing();
    let texts = ["passwd", "group", "shadow", "gshadow"].map(|name| root.read(&format!("etc/{name}")));
    let again = provision(&job(&root, "user", true, true));
    assert!(!again.created);
    assert_eq!(root.listing(), before);
    let after = ["passwd", "group", "shadow", "gshadow"].map(|name| root.read(&format!("etc/{name}")));
    assert_eq!(after, texts, "a second run changes nothing");
}

#[test]
fn only_what_is_not_there_is_wanted() {
    for (os, programs, want) in [
        ("ID=debian\n", &["usr/bin/curl", "bin/ss"][..], &[][..]),
        ("ID=alpine\n", &["usr/bin/curl"], &["iproute2"]),
        ("ID=fedora\n", &["usr/sbin/curl"], &["iproute"]),
        ("ID=arch\n", &["usr/sbin/ss"], &["curl"]),
    ] {
        let root = Root::new();
        root.write("etc/os-release", os);
        for program in programs {
            root.write(program, "");
        }
        assert_eq!(provision(&job(&root, "user", true, true)).wanted, want, "{os}");
    }
}

#[test]
fn an_interpreter_that_a_step_installs_gets_its_directory() {
    let root = Root::new();
    provision(&job(&root, "user", true, true));
    assert_eq!(root.state("home/user/.local"), "missing");
    root.write("usr/bin/python3.12", "");
    root.write("usr/bin/python3.12-config", "");
    provision(&job(&root, "user", false, false));
    let packages = "home/user/.local/lib/python3.12/site-packages";
    assert_eq!(root.state(packages), "d 755 1000:1000");
    let names = std::fs::read_dir(root.path().join("home/user/.local/lib")).unwrap();
    assert_eq!(names.count(), 1);
    // A user who does not exist is not made for it.
    let only = |name| ProvisionJob {
        only_interpreters: true,
        ..job(&root, name, false, false)
    };
    root.write("usr/bin/python3.13", "");
    let before = root.listing();
    provision(&only("stranger"));
    assert_eq!(root.listing(), before);
    provision(&only("user"));
    let packages = "home/user/.local/lib/python3.13/site-packages";
    assert_eq!(root.state(packages), "d 755 1000:1000");
    assert_eq!(root.read("etc/passwd").lines().count(), 2);
    std::fs::remove_file(root.path().join("usr/bin/python3.13")).unwrap();
    // What the user has put there instead is not followed.
    std::fs::remove_dir_all(root.path().join("home/user/.local")).unwrap();
    std::fs::create_dir(root.path().join("home/user/.local")).unwrap();
    std::os::unix::fs::symlink("/etc", root.path().join("home/user/.local/lib")).unwrap();
    provision(&job(&root, "user", false, false));
    assert_eq!(root.state("etc/python3.12"), "missing");
    // Root needs none.
    provision(&job(&root, "root", false, false));
    assert_eq!(root.state("root/.local"), "missing");
}

#[test]
fn scratch_gets_what_is_needed() {
    let root = Root::new();
    let report = provision(&job(&root, "user", true, true));
    assert_eq!(
        (report.uid, report.shell.as_str(), report.packages),
        (1000, "/bin/sh", None)
    );
    assert_eq!(report.missing, ["bash", "sudo", "ca-certificates"]);
    assert_eq!(report.wanted, ["curl", "iproute2"]);
    assert_eq!(
        root.read("etc/passwd"),
        "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n"
    );
    assert_eq!(root.read("etc/group"), "root:x:0:\nuser:x:1000:\nsudo:x:999:user\n");
    assert_eq!(root.state("etc/shadow"), "missing");
    assert_eq!(root.state("root"), "d 700 0:0");
}

#[test]
fn ids_and_groups_that_are_taken() {
    let root = Root::new();
    root.write("etc/os-release", "ID=alpine");
    root.write(
        "etc/passwd",
        "root:x:0:0::/root:/bin/ash\nubuntu:x:1000:1000::/home/ubuntu:/bin/sh\n",
    );
    root.write(
        "etc/group",
        "root:x:0:\nwheel:x:10:root\nubuntu:x:1000:\nother:x:1001:\nowned:x:1500:\n",
    );
    let report = provision(&job(&root, "user", true, false));
    assert_eq!(
        (report.uid, report.gid, report.packages),
        (1001, 1002, Some(PackageTool::Apk))
    );
    assert!(root.read("etc/group").contains("wheel:x:10:root,user\n"));
    // A group of the name is taken.
    let report = provision(&job(&root, "owned", false, false));
    assert_eq!((report.uid, report.gid), (1002, 1500));
    assert_eq!(root.state("etc/sudoers.d/90-ringfence-owned"), "missing");
    // Without `prepare` nothing else is made.
    assert_eq!(root.state("code"), "missing");
    // An existing user becomes an administrator and keeps the rest.
    let report = provision(&job(&root, "ubuntu", true, false));
    assert!(!report.created);
    assert!(root.read("etc/group").contains("wheel:x:10:root,user,ubuntu\n"));
}

#[test]
fn names_are_checked() {
    let root = debian();
    for name in [
        "",
        ":a",
        "a b",
        "-x",
        "12x",
        "../x",
        "a\nb",
        "x,y",
        "ALL=(ALL)",
        &"a".repeat(33),
        "ü",
    ] {
        let error = run(Program::Provision, &job(&root, name, true, true)).unwrap_err();
        assert!(error.contains("invalid user name"), "{error}");
    }
    assert!(!root.read("etc/passwd").contains("1000"));
}

#[test]
fn users_are_given_by_number_and_with_a_group() {
    let root = debian();
    provision(&job(&root, "user", true, true));
    let before = root.read("etc/passwd");
    for (user, want) in [
        ("user", (1000, 1000, "/home/user")),
        ("1000", (1000, 1000, "/home/user")),
        ("user:sudo", (1000, 27, "/home/user")),
        ("1000:5", (1000, 5, "/home/user")),
        ("1234", (1234, 0, "/")),
        ("1234:sudo", (1234, 27, "/")),
        ("65535:65535", (65535, 65535, "/")),
    ] {
        let report = provision(&job(&root, user, false, false));
        let found = (report.uid, report.gid, report.home.as_str(), report.created);
        assert_eq!(found, (want.0, want.1, want.2, false), "{user}");
    }
    assert_eq!(root.read("etc/passwd"), before);
    for (user, admin, want) in [
        ("user:nothing", false, "no group \"nothing\""),
        ("user:", false, "no group \"\""),
        ("user:65536", false, "no group \"65536\""),
        ("65536", false, "ids 0 to 65535"),
        ("1234", true, "has no name"),
    ] {
        let error = run(Program::Provision, &job(&root, user, admin, false)).unwrap_err();
        assert!(error.contains(want), "{user}: {error}");
    }
    // A user by name is created also when it gets another group.
    let report = provision(&job(&root, "app:sudo", false, false));
    assert_eq!((report.uid, report.gid, report.created), (1001, 27, true));
    assert!(root.read("etc/passwd").contains("app:x:1001:1001::/home/app:"));
}

#[test]
fn links_in_the_image_lead_nowhere_else() {
    let root = Root::new();
    let outside = root.beside("outside");
    std::fs::create_dir_all(outside.join("etc")).unwrap();
    std::os::unix::fs::symlink(&outside, root.path().join("home")).unwrap();
    std::os::unix::fs::symlink("../outside/etc", root.path().join("code")).unwrap();
    let error = run(Program::Provision, &job(&root, "user", true, true));
    // A link to what does not exist inside is not followed to what exists outside.
    assert!(error.is_err());
    assert_eq!(std::fs::read_dir(&outside).unwrap().count(), 1);
    assert_eq!(crate::state(&outside.join("etc")), "d 755 0:0");
}
