//! Confinement of a process before it becomes the agent or the spawner, inherited by everything in a sandbox.

use std::io;

use model::resources::OPEN_FILES_MAX;

use crate::{schedule, seccomp, sys};

/// Capabilities of root in a sandbox: those of a default OCI container, and only over the sandbox's own user namespace.
/// By number: CHOWN 0, DAC_OVERRIDE 1, FOWNER 3, FSETID 4, KILL 5, SETGID 6, SETUID 7, SETPCAP 8, NET_BIND_SERVICE 10,
/// NET_RAW 13, SYS_CHROOT 18, MKNOD 27, AUDIT_WRITE 29, SETFCAP 31.
pub(crate) const CAPABILITIES: u64 = 0xa804_25fb;

/// Highest capability number to drop; the kernel rejects unknown numbers, which ends the loop.
const LAST_CAPABILITY: u32 = 63;

/// Confines the calling process for good. It must be root of the sandbox's user namespace with all capabilities, in
/// all of the sandbox's namespaces. `open_files` is how many its processes may have unless they ask for more.
pub(crate) fn confine(open_files: u32) -> io::Result<()> {
    sys::join_new_session_keyring()?;
    schedule::of_sandbox()?;
    sys::limit(libc::RLIMIT_NOFILE, open_files.into(), OPEN_FILES_MAX.into())?;
    // Not 0: that prevents core files, but the kernel would still start the host's pipe handler, as the host's root,
    // for a crash in a sandbox. The kernel takes 1 as "no handler either".
    sys::limit(libc::RLIMIT_CORE, 1, 1)?;
    sys::reset_signals();
    sys::prctl(libc::PR_SET_PDEATHSIG, 0)?;
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    for capability in 0..=LAST_CAPABILITY {
        if CAPABILITIES & (1 << capability) == 0
            && let Err(error) = sys::prctl(libc::PR_CAPBSET_DROP, u64::from(capability))
        {
            if error.raw_os_error() == Some(libc::EINVAL) {
                break;
            }
            return Err(error);
        }
    }
    // Installing the filter requires CAP_SYS_ADMIN over the sandbox, so the capabilities are dropped last; nothing
    // between here and exec makes a call that the filter rejects.
    sys::install_seccomp(&seccomp::PROGRAM)?;
    sys::set_capabilities(CAPABILITIES)?;
    sys::prctl(libc::PR_CAP_AMBIENT, 4) // PR_CAP_AMBIENT_CLEAR_ALL
}
