//! `doctor`, and what `up` says on a host or to a user that cannot run sandboxes.

use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;

use super::{Ran, TestDir, command};

/// A user id without rights that every Linux knows.
const NOBODY: u32 = 65534;

/// Copies the binary, in a process of its own: what another thread starts would have the copy open for a moment, and a file
/// that is open for writing cannot be executed.
fn copy_binary(to: &Path) {
    let mut copy = command(Path::new("cp"));
    copy.arg(env!("CARGO_BIN_EXE_ringfence")).arg(to);
    Ran::of(&mut copy).expect(0);
}

#[test]
fn the_report_says_whether_up_would_work() {
    let place = TestDir::new();
    let ran = place.run(&["doctor", "--listen", "127.0.0.1:0", "--format", "json"]);
    let report = ran.json();
    let checks = report["checks"].as_array().unwrap();
    let missing = checks.iter().any(|check| check["status"] == "missing");
    assert_eq!(report["ready"], !missing);
    assert_eq!(ran.code, Some(i32::from(missing)));
    for check in checks {
        assert!(
            ["ok", "degraded", "missing"].contains(&check["status"].as_str().unwrap()),
            "{check}"
        );
        assert!(!check["name"].as_str().unwrap().is_empty(), "{check}");
        if check["status"] != "ok" {
            assert!(check["cost"].is_string() && check["fix"].is_string(), "{check}");
        }
    }
    let text = place.run(&["doctor", "--listen", "127.0.0.1:0"]).stdout;
    for name in [
        "root",
        "cgroup",
        "user namespaces",
        "overlay",
        "kvm",
        "port",
        "data directory",
    ] {
        assert!(text.to_lowercase().contains(name), "{name}: {text}");
    }
    assert!(!place.data_dir().exists());
}

#[test]
fn a_taken_port_is_named() {
    let place = TestDir::new();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let report = place
        .run(&["doctor", "--listen", &address, "--format", "json"])
        .expect(1)
        .json();
    let checks = report["checks"].as_array().unwrap();
    let port = checks.iter().find(|check| check["name"] == "port").unwrap();
    assert_eq!(port["status"], "missing");
    assert!(port["detail"].as_str().unwrap().contains(&address), "{port}");
}

#[test]
fn without_root_everything_that_is_missing_is_said_at_once() {
    let place = TestDir::new();
    let mut up = if rustix::process::geteuid().is_root() {
        // Others must be able to reach a copy of the binary, wherever the build directory lies.
        let copy = place.temp.path().join("ringfence");
        copy_binary(&copy);
        std::fs::set_permissions(place.temp.path(), PermissionsExt::from_mode(0o755)).unwrap();
        let mut up = command(&copy);
        up.uid(NOBODY)
            .gid(NOBODY)
            .args(["up", "--data-dir"])
            .arg(place.data_dir());
        up
    } else {
        place.ringfence(&["up"])
    };
    let ran = Ran::of(&mut up).expect(1);
    assert_eq!(ran.stdout, "");
    ran.complains_of(&["root", "fix:", "ringfence doctor"]);
    assert!(!place.data_dir().exists());
}

/// Runs as root, in mounts of its own: `doctor` in a root that is not the one of its mount namespace.
const IN_A_CHROOT: &str = r#"
cd "$1"
[ -z "$2" ] || mount -t proc proc proc
exec chroot . /ringfence doctor --listen 127.0.0.1:0 --data-dir /data --format json
"#;

#[test]
fn a_chroot_is_no_place_for_sandboxes() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let place = TestDir::new();
    let named = |report: &serde_json::Value, name: &str| {
        let checks = report["checks"].as_array().unwrap();
        checks.iter().find(|check| check["name"] == name).unwrap().clone()
    };
    let outside = place
        .run(&["doctor", "--listen", "127.0.0.1:0", "--format", "json"])
        .json();
    let root = place.temp.path().join("root");
    std::fs::create_dir_all(root.join("proc")).unwrap();
    copy_binary(&root.join("ringfence"));
    let inside = |proc: &str| {
        let mut own = command(Path::new("unshare"));
        own.args(["--mount", "--propagation", "private", "sh", "-c", IN_A_CHROOT, "sh"])
            .arg(&root)
            .arg(proc);
        Ran::of(&mut own).expect(1).json()
    };
    let with_proc = named(&inside("yes"), "user namespaces");
    assert_eq!(with_proc["status"], "missing", "{with_proc}");
    assert!(with_proc["fix"].as_str().unwrap().contains("pivot_root"), "{with_proc}");
    // A test in a container without rights would find nothing out.
    if named(&outside, "root")["status"] == "ok" {
        let without_chroot = named(&outside, "user namespaces");
        assert_eq!(without_chroot["status"], "ok", "{without_chroot}");
    }
    let without_proc = named(&inside(""), "root");
    assert_eq!(without_proc["status"], "missing", "{without_proc}");
    assert!(
        without_proc["fix"].as_str().unwrap().contains("mount -t proc"),
        "{without_proc}"
    );
}

#[test]
fn the_end_of_nothing_is_no_failure() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let place = TestDir::new();
    place.run(&["down"]).expect(1).complains_of(&["no data directory"]);
    std::fs::create_dir(place.data_dir()).unwrap();
    let ran = place.run(&["down"]).expect(0);
    assert!(
        ran.stdout.contains("nothing to end") && ran.stdout.contains("is empty"),
        "{ran:?}"
    );
    assert_eq!(std::fs::read_dir(place.data_dir()).unwrap().count(), 0);
    // Another's directory stays refused.
    std::fs::write(place.data_dir().join("letter"), "dear").unwrap();
    place.run(&["down"]).expect(1).complains_of(&["no data directory"]);
}
