use protocol::figures::FILES;

use super::*;
use crate::base;

/// The list as a sandbox sees it.
const TEXT: &str = include_str!("../../tests/mounts.txt");

/// The type of the file system and the path in it, as `/proc/self/mountinfo` has them.
fn shown(mount: &Mount) -> (&'static str, String) {
    let path = |path: &str| format!("/{path}");
    match mount.source {
        Source::Root | Source::Overlay => ("overlay", path("")),
        Source::New(kind, _) => (kind, path("")),
        Source::SharedMemory => ("tmpfs", path("")),
        // All of them are in `/proc`.
        Source::Again => ("proc", mount.point.replace("/proc", "")),
        Source::Fixture(name) => ("tmpfs", path(name)),
        Source::Hidden(cover) => ("tmpfs", path(cover.path())),
        Source::Sysfs(name) | Source::SysfsOfNetwork(name) => ("sysfs", path(name)),
        Source::Processor => ("sysfs", mount.point.replace("/sys/", "/")),
        Source::Group => ("cgroup", "*".to_owned()),
        Source::Figure(name) => ("fuse", path(name)),
        Source::Agent => ("tmpfs", place::AGENT.to_owned()),
    }
}

fn flags(attributes: u64) -> String {
    let writable = if attributes & attr::RDONLY == 0 { "rw" } else { "ro" };
    let others = [
        (attr::NOSUID, ",nosuid"),
        (attr::NODEV, ",nodev"),
        (attr::NOEXEC, ",noexec"),
    ];
    let set = others.iter().filter(|(bit, _)| attributes & bit != 0);
    let names: String = set.map(|(_, name)| *name).collect();
    format!("{writable}{names}")
}

fn text(mount: &Mount) -> String {
    let when = match mount.when {
        When::Always => "always",
        When::KernelHasIt => "kernel",
        When::AllProcessors => "all-processors",
        When::SomeProcessors => "some-processors",
        When::Figures => "figures",
    };
    let checkpoint = match mount.source.treatment() {
        Treatment::Restored => "criu",
        Treatment::OfNetwork => "network",
        Treatment::External => "external",
    };
    let (kind, path) = shown(mount);
    let flags = flags(mount.attributes);
    format!(
        "{:<38} {kind:<8} {path:<38} {flags:<23} {when:<16} {checkpoint}\n",
        mount.point
    )
}

#[test]
fn the_list_is_as_written() {
    let mut list = String::new();
    for mount in MOUNTS {
        list += &text(mount);
    }
    let written: String = TEXT
        .split_inclusive('\n')
        .filter(|line| !line.starts_with('#'))
        .collect();
    assert_eq!(written, list, "tests/mounts.txt has another list:\n{list}");
}

#[test]
fn files_of_others_are_in_the_list() {
    let of = |source: fn(&Source) -> bool| -> Vec<&str> {
        let found = MOUNTS.iter().filter(|mount| source(&mount.source));
        found.map(|mount| mount.point).collect()
    };
    let figures = FILES.map(|file| format!("/proc/{file}"));
    assert_eq!(of(|source| matches!(source, Source::Figure(_))), figures);
    let agent = format!("/{}", base::AGENT);
    assert_eq!(of(|source| matches!(source, Source::Agent)), [agent.as_str()]);
}

/// What is attached later would be hidden.
#[test]
fn nothing_is_attached_above_what_is_there() {
    for (index, mount) in MOUNTS.iter().enumerate() {
        for earlier in &MOUNTS[..index] {
            let is_below = earlier
                .point
                .strip_prefix(mount.point)
                .is_some_and(|rest| rest.starts_with('/'));
            assert!(!is_below, "{} hides {}", mount.point, earlier.point);
        }
    }
}

#[test]
fn processors_are_those_with_mounts_of_their_own() {
    let points = |numbers: &[&str]| -> Vec<String> {
        let own = numbers
            .iter()
            .map(|number| format!("/sys/devices/system/cpu/cpu{number}"));
        own.chain(["/sys/devices/system/cpu".to_owned(), "/sys/class/net".to_owned()])
            .collect()
    };
    assert_eq!(processors(&points(&["10", "3"])), [3, 10]);
    assert_eq!(processors(&points(&[])), [0_u32; 0]);
}
