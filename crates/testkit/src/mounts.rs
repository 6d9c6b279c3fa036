//! Mount tables of sandboxes, compared with the list of what is mounted in one (`mounts.txt` in the tests of `runtime`).

use std::collections::BTreeMap;
use std::path::Path;

/// A line of the list.
#[derive(Debug)]
struct Entry<'a> {
    point: &'a str,
    kind: &'a str,
    path: &'a str,
    flags: &'a str,
    when: &'a str,
}

/// A line of a mount table, without the numbers that differ between two sandboxes.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Mounted {
    point: String,
    /// The mount point of what it is attached to.
    above: String,
    path: String,
    flags: String,
    kind: String,
    /// The source, and the options of the file system.
    options: String,
}

impl<'a> Entry<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let mut words = line.split_whitespace();
        Some(Self {
            point: words.next()?,
            kind: words.next()?,
            path: words.next()?,
            flags: words.next()?,
            when: words.next()?,
        })
    }

    /// Whether a mount is one of this entry.
    fn covers(&self, mount: &Mounted) -> bool {
        let value = match self.point.split_once('{') {
            None => (self.point == mount.point).then_some(""),
            Some(("", _)) => (mount.point != "/").then_some(""),
            Some((before, "group}")) => {
                (mount.point == before.trim_end_matches('/') || mount.point.starts_with(before)).then_some("")
            }
            Some((before, _)) => mount
                .point
                .strip_prefix(before)
                .filter(|value| value.bytes().all(|byte| byte.is_ascii_digit())),
        };
        let Some(value) = value else { return false };
        let path = self.path.replace("{processor}", value);
        let kind = mount.kind == self.kind || (self.kind == "cgroup" && mount.kind == "cgroup2");
        kind && (path == "*" || path == mount.path) && mount.flags == format!("{},relatime", self.flags)
    }

    /// Whether a sandbox with these mounts has to have it; `None` where it may have it.
    fn is_expected(&self, table: &[Mounted]) -> Option<bool> {
        let has = |point: &str| table.iter().any(|mount| mount.point == point);
        match self.when {
            _ if self.point == "{overlay}" => None,
            "always" => Some(true),
            "kernel" => Some(Path::new(self.point).exists()),
            "some-processors" => Some(has("/proc/cpuinfo")),
            "all-processors" => Some(!has("/proc/cpuinfo")),
            "figures" => Some(has("/proc/meminfo")),
            other => panic!("unknown word in the list: {other}"),
        }
    }
}

/// Parses the text of `/proc/<pid>/mountinfo`.
fn table(mountinfo: &str) -> Vec<Mounted> {
    let lines: Vec<Vec<&str>> = mountinfo.lines().map(|line| line.split(' ').collect()).collect();
    let points: BTreeMap<&str, &str> = lines.iter().map(|line| (line[0], line[4])).collect();
    let mut table: Vec<Mounted> = lines
        .iter()
        .map(|line| {
            let end = line.iter().position(|word| *word == "-").expect("a separator");
            Mounted {
                point: line[4].to_owned(),
                above: points.get(line[1]).copied().unwrap_or("-").to_owned(),
                path: line[3].to_owned(),
                flags: line[5].to_owned(),
                kind: line[end + 1].to_owned(),
                options: line[end + 2..].join(" "),
            }
        })
        .collect();
    table.sort();
    table
}

/// What a mount table has that the list does not allow, and what it lacks.
#[must_use]
pub fn differences(list: &str, mountinfo: &str) -> Vec<String> {
    let lines = list.lines().filter(|line| !line.starts_with('#'));
    let entries: Vec<Entry<'_>> = lines.filter_map(Entry::parse).collect();
    let table = table(mountinfo);
    let mut differences = Vec::new();
    for mount in &table {
        let entries = entries.iter().filter(|entry| entry.covers(mount)).count();
        let again = table.iter().filter(|other| other.point == mount.point).count();
        if (entries, again) != (1, 1) {
            differences.push(format!("{entries} entries of the list, {again} mounts: {mount:?}"));
        }
    }
    for entry in &entries {
        let found = table.iter().any(|mount| entry.covers(mount));
        if entry.is_expected(&table).is_some_and(|expected| expected != found) {
            differences.push(format!("expected otherwise, found {found}: {entry:?}"));
        }
    }
    differences
}

/// What two mount tables have that the other one does not have, but for the numbers of mounts and devices.
#[must_use]
pub fn changes(before: &str, after: &str) -> Vec<String> {
    let (before, after) = (table(before), table(after));
    let lost = before.iter().filter(|mount| !after.contains(mount));
    let added = after.iter().filter(|mount| !before.contains(mount));
    lost.map(|mount| format!("- {mount:?}"))
        .chain(added.map(|mount| format!("+ {mount:?}")))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: &str = "# A comment.\n\
        /                overlay  /         rw,nodev                always criu\n\
        {overlay}        overlay  /         rw,nodev                always external\n\
        /proc            proc     /         rw,nosuid,nodev,noexec  always criu\n\
        /proc/cmdline    tmpfs    /dev/null rw,nosuid               kernel external\n\
        /proc/nowhere    tmpfs    /dev/null rw,nosuid               kernel external\n\
        /c/cpu{processor} sysfs   /c/cpu{processor} ro,nosuid       some-processors external\n\
        /g/{group}       cgroup   *         ro,nosuid               always external\n";
    const TABLE: [&str; 5] = [
        "10 1 0:1 / / rw,nodev,relatime - overlay overlay rw,index=on",
        "11 10 0:2 / /usr rw,nodev,relatime - overlay overlay rw,index=on",
        "12 10 0:3 / /proc rw,nosuid,nodev,noexec,relatime - proc proc rw",
        "13 12 0:4 /dev/null /proc/cmdline rw,nosuid,relatime - tmpfs none rw,mode=755",
        "14 10 0:5 /.. /g/memory ro,nosuid,relatime - cgroup cgroup rw,memory",
    ];

    /// The number of differences after a word of one line was replaced.
    fn differences_with(line: usize, from: &str, to: &str) -> usize {
        let mut table = TABLE.map(str::to_owned);
        assert!(table[line].contains(from), "{from}");
        table[line] = table[line].replacen(from, to, 1);
        differences(LIST, &table.join("\n")).len()
    }

    #[test]
    fn a_table_of_the_list_has_no_differences() {
        assert_eq!(differences(LIST, &TABLE.join("\n")), [""; 0]);
    }

    #[test]
    fn what_is_not_as_in_the_list_is_a_difference() {
        // Flags, type, path, mount points that are not in the list or not of this kernel, and one point twice.
        for (line, from, to, want) in [
            (2, "nosuid,", "", 2),
            (3, "tmpfs", "ramfs", 2),
            (3, "/dev/null", "/dev/zero", 2),
            (3, "/proc/cmdline", "/proc/of-the-host", 2),
            (3, "/proc/cmdline", "/proc/nowhere", 2),
            (4, "/g/memory", "/h/memory", 2),
            (1, "/usr", "/", 2),
        ] {
            assert_eq!(differences_with(line, from, to), want, "{line} {from} {to}");
        }
        let (all, without) = (TABLE.join("\n"), TABLE[..4].join("\n"));
        assert_eq!(differences(LIST, &without).len(), 1);
        let one_more = format!("{all}\n15 10 0:6 / /sys rw,relatime - sysfs sysfs rw");
        assert_eq!(differences(LIST, &one_more).len(), 1);
    }

    #[test]
    fn numbers_are_not_changes() {
        let before = TABLE.join("\n");
        let after = "110 1 0:91 / / rw,nodev,relatime - overlay overlay rw,index=on\n\
                     113 112 0:94 /dev/null /proc/cmdline rw,nosuid,relatime - tmpfs none rw,mode=755\n\
                     112 110 0:93 / /proc rw,nosuid,nodev,noexec,relatime - proc proc rw\n\
                     111 110 0:92 / /usr rw,nodev,relatime - overlay overlay rw,index=on\n\
                     114 110 0:95 /.. /g/memory ro,nosuid,relatime - cgroup cgroup rw,memory";
        assert_eq!(changes(&before, after), [""; 0]);
        let moved = after.replace("113 112", "113 110");
        assert_eq!(changes(&before, &moved).len(), 2);
        let other = after.replace("rw,mode=755", "rw,mode=777");
        assert_eq!(changes(&before, &other).len(), 2);
    }
}
