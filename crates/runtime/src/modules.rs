//! Kernel modules that sandboxes need.

use std::path::Path;
use std::process::{Command, Stdio};

/// Loads the module for the `eth0` of sandboxes. The kernel would load it on demand, but would then also create
/// an interface on the host. Where this does not work, because the module is built in or there is no modprobe, the
/// launchers find out which kinds of interface exist.
pub(crate) fn load_for_interfaces() {
    let _ = modprobe(&["dummy", "numdummies=0"]) || modprobe(&["ifb", "numifbs=0"]);
}

/// Loads FUSE, which serves the sandboxes' own `/proc` files. Service managers create the device whose opening loads
/// it; elsewhere it has to be loaded here.
pub(crate) fn load_for_figures() {
    if !Path::new("/dev/fuse").exists() {
        let _ = modprobe(&["fuse"]);
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "the host's own program, at the start of the platform"
)]
fn modprobe(arguments: &[&str]) -> bool {
    Command::new("modprobe")
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .arg("-q")
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}
