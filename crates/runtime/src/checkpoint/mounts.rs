//! The mounts of a sandbox in a checkpoint.
//!
//! CRIU itself restores the instances that belong to a sandbox alone: `/proc`, terminals, memory and message queues. All
//! others are external: it notes a name for each, and is told at a restore where the mount is that has this name. Which
//! mounts are which is in the list ([`mounts::MOUNTS`]).

use std::io;

use super::jail;
use super::rpc::CriuSettings;
use crate::mounts::{self, Cover, Source, Treatment};

/// How the mount at this point is treated: one that is not in the list is provided by the platform.
fn treatment(point: &str) -> Treatment {
    mounts::at(point).map_or(Treatment::External, |mount| mount.source.treatment())
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

/// The name of a mount in a checkpoint.
fn key(index: usize) -> String {
    format!("mount{index}")
}

/// Tells CRIU about the mounts at these points, for writing a checkpoint.
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

/// Tells CRIU about the mounts at these points, for a restore. `source` returns the path of the mount for a point.
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
            let source = source(point)
                .ok_or_else(|| io::Error::other(format!("the checkpoint has an unknown mount at {point}")))?;
            settings.set("external", &format!("mnt[{}]:{source}", key(index)))?;
        }
    }
    Ok(())
}

/// The name by which a restore knows the source of the mount at a point. One source covers all files, and one all
/// directories.
pub(crate) fn source_name(source: Source, point: &str) -> &str {
    match source {
        Source::Hidden(Cover::File) => "mask",
        Source::Hidden(Cover::Directory) => "empty",
        _ => point,
    }
}

/// Where the source of this name is, in the root for CRIU.
pub(crate) fn source_path(name: &str) -> String {
    let name = name.trim_start_matches('/').replace('/', "_");
    format!("{}/{name}", jail::MOUNTS)
}

/// Where the source of the mount at a point of a checkpoint is, in the root for CRIU, given the names of the sources, and whether
/// the sandbox has `/proc` files of its own. Whatever else covers something in `/proc`, in a checkpoint of another version or of
/// another host, stays covered.
pub(crate) fn source_at<'a>(point: &str, mut names: impl Iterator<Item = &'a str>, figures: bool) -> Option<String> {
    if names.any(|name| name == point) {
        return Some(source_path(point));
    }
    let cover = |cover| Some(source_path(source_name(Source::Hidden(cover), point)));
    match mounts::at(point).map(|mount| mount.source) {
        Some(Source::Figure(file)) if figures => Some(format!("{}/{file}", jail::FIGURES)),
        Some(Source::Hidden(kind)) => cover(kind),
        _ if point.starts_with("/proc/") => cover(Cover::File),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::cgroup_view::{Scope, Shown};
    use crate::mounts::{Layout, MOUNTS};
    use crate::processors::{ProcessorFiles, View};
    use crate::rootfs::Overlay;

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

    fn overlay(target: &str) -> Overlay {
        Overlay {
            target: target.to_owned(),
            layers: Vec::new(),
            upper: String::new(),
        }
    }

    fn group(name: &str, scope: Scope) -> Shown {
        Shown {
            tree: PathBuf::new(),
            name: name.to_owned(),
            scope,
        }
    }

    /// What a start attaches, a checkpoint can write, and a restore has a source for.
    #[test]
    fn a_start_a_checkpoint_and_a_restore_agree() {
        let overlays = [overlay("/"), overlay("/usr")];
        let files = ProcessorFiles {
            lists: Vec::new(),
            info: String::new(),
        };
        let some = View {
            numbers: vec![1, 3],
            files: Some(files),
        };
        let all = View {
            numbers: vec![0, 1],
            files: None,
        };
        let version_1 = [group("memory", Scope::Workload), group("cpuset", Scope::Sandbox)];
        let version_2 = [group("", Scope::Workload)];
        for (processors, groups, figures) in [
            (&some, version_1.as_slice(), true),
            (&all, &version_2, false),
            (&all, &[], true),
        ] {
            let layout = Layout {
                name: "ione.0.disk",
                overlays: &overlays,
                processors,
                groups,
                figures,
                agent: "/agent",
            };
            let (mut points, mut names) = (Vec::new(), Vec::new());
            for mount in MOUNTS {
                let each: Result<(), ()> = layout.each(mount, |point, _| {
                    assert!(!points.iter().any(|have| have == point), "{point}");
                    assert_eq!(treatment(point), mount.source.treatment(), "{point}");
                    points.push(point.to_owned());
                    let is_whole = matches!(mount.source, Source::Figure(_));
                    if mount.source.treatment() == Treatment::External && !is_whole {
                        names.push(source_name(mount.source, point).to_owned());
                    }
                    Ok(())
                });
                each.unwrap();
            }
            let mut dump = CriuSettings::new();
            settings_of_dump(&points, &mut dump).unwrap();
            let mut restore = CriuSettings::new();
            let source = |point: &str| source_at(point, names.iter().map(String::as_str), figures);
            settings_of_restore(&points, source, &mut restore).unwrap();
            for (index, point) in points.iter().enumerate() {
                let written = format!("external \"mnt[{point}]:mount{index}\"\n");
                let sourced = format!("external \"mnt[mount{index}]:");
                let is_external = treatment(point) == Treatment::External;
                assert_eq!(dump.text().contains(&written), is_external, "{point}");
                assert_eq!(restore.text().contains(&sourced), is_external, "{point}");
            }
        }
    }

    #[test]
    fn what_a_checkpoint_covers_stays_covered() {
        let names = ["mask", "empty", "/proc/cgroups"];
        let at = |point, figures| source_at(point, names.into_iter(), figures);
        for (point, figures, want) in [
            ("/proc/cgroups", true, Some("/ringfence/mounts/proc_cgroups")),
            ("/proc/kcore", true, Some("/ringfence/mounts/mask")),
            ("/proc/acpi", true, Some("/ringfence/mounts/empty")),
            ("/proc/stat", true, Some("/ringfence/figures/stat")),
            ("/proc/stat", false, Some("/ringfence/mounts/mask")),
            ("/proc/of-another-version", true, Some("/ringfence/mounts/mask")),
            ("/proc/cpuinfo", true, Some("/ringfence/mounts/mask")),
            ("/usr", true, None),
        ] {
            assert_eq!(at(point, figures).as_deref(), want, "{point}");
        }
    }
}
