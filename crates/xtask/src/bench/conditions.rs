//! The conditions of a run, without which its figures cannot be compared.

use jiff::Timestamp;

/// A line for the head of a report.
pub(crate) fn line() -> String {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let kernel = rustix::system::uname();
    let build = if cfg!(debug_assertions) {
        "DEBUG build, so these figures mean nothing"
    } else {
        "release build"
    };
    // The three averages; what follows them is about this program too.
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load: Vec<&str> = load.split(' ').take(3).collect();
    format!(
        "{:.0}, {cpus} cpus shared by client and platform, kernel {}, {build}, load before {}\n",
        Timestamp::now(),
        kernel.release().to_string_lossy(),
        load.join(" ")
    )
}
