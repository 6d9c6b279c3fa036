//! The mounts of a sandbox in an image of its processes.
//!
//! CRIU itself restores the instances that belong to a sandbox alone: `/proc`, terminals, memory and message queues. All
//! others are external: it notes a name for each, and is told at a restore where the mount is that has this name.

use std::io;

use super::rpc::CriuSettings;
use crate::setup::{CPU, MASKED_DIRS, SYS_OF_NETWORK};

/// How a mount of a sandbox is treated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Treatment {
    /// CRIU restores it.
    Restored,
    /// It is left out, and attached when the network of the sandbox exists.
    OfNetwork,
    /// It is provided by the platform.
    External,
}

/// Mount points, relative to the root, of what CRIU restores.
const RESTORED: [&str; 7] = [
    "/",
    "/dev/pts",
    "/dev/shm",
    "/dev/mqueue",
    "/proc",
    "/proc/sys",
    "/proc/sysrq-trigger",
];

/// How the mount at this point is treated.
pub(crate) fn treatment(point: &str) -> Treatment {
    let of_network = |point: &str| {
        let part = point.strip_prefix("/sys/");
        part.is_some_and(|part| SYS_OF_NETWORK.contains(&part))
    };
    match point {
        point if RESTORED.contains(&point) => Treatment::Restored,
        point if of_network(point) => Treatment::OfNetwork,
        _ => Treatment::External,
    }
}

/// The mount points in the text of `/proc/<pid>/mountinfo`, without those that others cover.
pub(crate) fn points(mountinfo: &str) -> Vec<String> {
    let mut points: Vec<String> = Vec::new();
    for line in mountinfo.lines() {
        if let Some(point) = line.split(' ').nth(4)
            && !points.iter().any(|have| have == point)
        {
            points.push(point.to_owned());
        }
    }
    points
}

/// The name of a mount in an image.
fn key(index: usize) -> String {
    format!("mount{index}")
}

/// CriuSettings of CRIU about the mounts at these points, for writing an image.
///
/// # Errors
/// When CRIU cannot be told about one of them.
pub(crate) fn settings_of_dump(points: &[String], settings: &mut CriuSettings) -> io::Result<()> {
    for (index, point) in points.iter().enumerate() {
        match treatment(point) {
            Treatment::Restored => {}
            Treatment::OfNetwork => settings.set("skip-mnt", point)?,
            Treatment::External => settings.set("external", &format!("mnt[{point}]:{}", key(index)))?,
        }
    }
    Ok(())
}

/// The same for a restore. `source` returns the path of the mount for a point.
///
/// # Errors
/// When there is none for a point, and when CRIU cannot be told about one of them.
pub(crate) fn settings_of_restore(
    points: &[String],
    source: impl Fn(&str) -> Option<String>,
    settings: &mut CriuSettings,
) -> io::Result<()> {
    for (index, point) in points.iter().enumerate() {
        if treatment(point) == Treatment::External {
            let source =
                source(point).ok_or_else(|| io::Error::other(format!("the image has an unknown mount at {point}")))?;
            settings.set("external", &format!("mnt[{}]:{source}", key(index)))?;
        }
    }
    Ok(())
}

/// The processors that a sandbox with these mount points sees one by one, ascending; none where it sees all of the host's.
pub(crate) fn processors(points: &[String]) -> Vec<u32> {
    let number = |point: &String| {
        let name = point.strip_prefix("/sys/")?.strip_prefix(CPU)?.strip_prefix("/cpu")?;
        name.parse().ok()
    };
    let mut numbers: Vec<u32> = points.iter().filter_map(number).collect();
    numbers.sort_unstable();
    numbers
}

/// Whether a point in `/proc` is covered by an empty directory; otherwise it is covered by an empty file.
pub(crate) fn is_masked_directory(name: &str) -> bool {
    MASKED_DIRS.contains(&name)
}

#[cfg(test)]
mod tests {
    use super::*;

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

    #[test]
    fn every_mount_is_restored_or_named() {
        let info = "1 0 0:1 / / rw - overlay x rw\n2 1 0:2 / /dev rw - tmpfs x rw\n3 2 0:3 / /dev/pts rw - devpts x rw\n\
                    4 1 0:4 / /sys/class/net ro - sysfs x rw\n5 1 0:4 /a /usr rw - overlay x rw\n5 1 0:4 /a /usr rw - overlay x rw\n";
        let points = points(info);
        assert_eq!(points, ["/", "/dev", "/dev/pts", "/sys/class/net", "/usr"]);
        let written = |fill: &dyn Fn(&mut CriuSettings) -> io::Result<()>| {
            let mut settings = CriuSettings::new();
            fill(&mut settings).map(|()| settings.text().replace(CriuSettings::new().text(), ""))
        };
        let dump = written(&|settings| settings_of_dump(&points, settings)).unwrap();
        assert_eq!(
            dump,
            "external \"mnt[/dev]:mount1\"\nskip-mnt \"/sys/class/net\"\nexternal \"mnt[/usr]:mount4\"\n"
        );
        let restore =
            written(&|settings| settings_of_restore(&points, |point| Some(format!("/p{point}")), settings)).unwrap();
        assert_eq!(
            restore,
            "external \"mnt[mount1]:/p/dev\"\nexternal \"mnt[mount4]:/p/usr\"\n"
        );
        let missing =
            written(&|settings| settings_of_restore(&points, |point| (point != "/usr").then(String::new), settings));
        assert!(missing.unwrap_err().to_string().contains("an unknown mount at /usr"));
    }
}
