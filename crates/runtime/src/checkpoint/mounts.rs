//! The mounts of a sandbox in an image of its processes.
//!
//! CRIU itself restores the instances that belong to a sandbox alone: `/proc`, terminals, memory and message queues. All
//! others are external: it notes a name for each, and is told at a restore where the mount is that has this name.

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

/// Arguments of CRIU about the mounts at these points, for writing an image.
pub(crate) fn arguments_of_dump(points: &[String]) -> Vec<String> {
    let arguments = points.iter().enumerate().filter_map(|(index, point)| {
        let key = key(index);
        match treatment(point) {
            Treatment::Restored => None,
            Treatment::OfNetwork => Some(format!("--skip-mnt={point}")),
            Treatment::External => Some(format!("--external=mnt[{point}]:{key}")),
        }
    });
    arguments.collect()
}

/// The same for a restore. `source` returns the path of the mount for a point.
///
/// # Errors
/// With the first point for which there is none.
pub(crate) fn arguments_of_restore(
    points: &[String],
    source: impl Fn(&str) -> Option<String>,
) -> Result<Vec<String>, String> {
    let mut arguments = Vec::new();
    for (index, point) in points.iter().enumerate() {
        if treatment(point) == Treatment::External {
            let source = source(point).ok_or_else(|| point.clone())?;
            arguments.push(format!("--external=mnt[{}]:{source}", key(index)));
        }
    }
    Ok(arguments)
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
        let dump = arguments_of_dump(&points);
        assert_eq!(
            dump,
            [
                "--external=mnt[/dev]:mount1",
                "--skip-mnt=/sys/class/net",
                "--external=mnt[/usr]:mount4"
            ]
        );
        let restore = arguments_of_restore(&points, |point| Some(format!("/p{point}"))).unwrap();
        assert_eq!(
            restore,
            ["--external=mnt[mount1]:/p/dev", "--external=mnt[mount4]:/p/usr"]
        );
        let missing = arguments_of_restore(&points, |point| (point != "/usr").then(String::new));
        assert_eq!(missing, Err("/usr".to_owned()));
    }
}
