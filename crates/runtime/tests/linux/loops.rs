//! Loop devices of the host, and the mounts of them.

use std::fs;

/// Number of loop devices whose files have paths with this text.
pub(crate) fn loops_of(path: &str) -> usize {
    loop_numbers_of(path).len()
}

/// Numbers of the loop devices of a file in the form of mount tables, such as `7:0`.
pub(crate) fn loop_numbers_of(path: &str) -> Vec<String> {
    let devices = fs::read_dir("/sys/block").unwrap();
    let devices = devices.filter_map(|entry| {
        let device = entry.ok()?.path();
        let file = fs::read_to_string(device.join("loop/backing_file")).ok()?;
        let number = fs::read_to_string(device.join("dev")).ok()?;
        file.contains(path).then(|| number.trim().to_owned())
    });
    devices.collect()
}

/// The mounts of a table that are of one of these devices.
pub(crate) fn mounts_of<'a>(table: &'a str, devices: &[String]) -> Vec<&'a str> {
    let device_of = |line: &str| line.split(' ').nth(2).unwrap_or_default().to_owned();
    table
        .lines()
        .filter(|line| devices.contains(&device_of(line)))
        .collect()
}
