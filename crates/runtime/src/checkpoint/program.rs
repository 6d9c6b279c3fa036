//! CRIU on this host.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The first version that can write every kind of socket on all kernels.
const MINIMUM: (u32, u32) = (4, 2);
/// The first version that can do so on kernels before [`CHANGED`].
const MINIMUM_BEFORE: (u32, u32) = (4, 1);
/// The kernel that changed which options sockets have.
const CHANGED: (u32, u32) = (6, 16);

/// The program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Criu {
    /// Its file.
    pub(crate) path: PathBuf,
    /// Its version.
    pub(crate) version: String,
}

/// Finds out which CRIU there is at `path`.
///
/// # Errors
/// With a sentence for the operator when there is none, or none that works on this kernel.
pub(crate) fn find(path: &Path) -> Result<Criu, String> {
    #[expect(
        clippy::disallowed_methods,
        reason = "the host's own program, at the start of the platform"
    )]
    let output = Command::new(path)
        .arg("--version")
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("{}: {error}", path.display()))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let version = text
        .lines()
        .find_map(|line| line.strip_prefix("Version: "))
        .unwrap_or_default();
    check(version.trim(), &super::kernel())?;
    Ok(Criu {
        path: path.to_owned(),
        version: version.trim().to_owned(),
    })
}

fn check(version: &str, kernel: &str) -> Result<(), String> {
    let numbers = |text: &str| -> Option<(u32, u32)> {
        let mut parts = text.split(|c: char| !c.is_ascii_digit());
        Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
    };
    let has = numbers(version).ok_or("CRIU does not report its version")?;
    let minimum = match numbers(kernel) {
        Some(kernel) if kernel < CHANGED => MINIMUM_BEFORE,
        _ => MINIMUM,
    };
    if has < minimum {
        let (major, minor) = minimum;
        return Err(format!(
            "CRIU {version} is too old for Linux {kernel}: version {major}.{minor} or later is required"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_that_fail_on_this_kernel_are_refused() {
        assert_eq!(check("4.2.1", "6.18.44-fc"), Ok(()));
        assert_eq!(check("4.1.1", "6.12.0+deb13"), Ok(()));
        assert!(check("4.1.1", "6.16.0").unwrap_err().contains("4.2 or later"));
        assert!(check("3.17.1", "6.1.0-44-amd64").unwrap_err().contains("4.1 or later"));
        assert!(check("", "6.1.0").is_err());
        assert!(find(Path::new("/nowhere")).unwrap_err().contains("/nowhere"));
    }
}
