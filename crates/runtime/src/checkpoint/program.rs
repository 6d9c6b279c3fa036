//! CRIU on this host.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The first version that works here: those before it cannot write every kind of socket on newer kernels, and those with
/// which this was tried on older ones end with a signal.
const MINIMUM: (u32, u32) = (4, 2);

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
    check(version.trim())?;
    Ok(Criu {
        path: path.to_owned(),
        version: version.trim().to_owned(),
    })
}

fn check(version: &str) -> Result<(), String> {
    let mut parts = version.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    let (Some(Ok(major)), Some(Ok(minor))) = (parts.next(), parts.next()) else {
        return Err("CRIU does not report its version".to_owned());
    };
    if (major, minor) < MINIMUM {
        let (major, minor) = MINIMUM;
        return Err(format!(
            "CRIU {version} is too old: version {major}.{minor} or later is required"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_that_are_too_old_are_refused() {
        assert_eq!(check("4.2.1"), Ok(()));
        assert_eq!(check("4.2"), Ok(()));
        assert_eq!(check("10.0"), Ok(()));
        for old in ["4.1.1", "3.17.1"] {
            assert!(check(old).unwrap_err().contains("4.2 or later"), "{old}");
        }
        assert!(check("").is_err());
        assert!(find(Path::new("/nowhere")).unwrap_err().contains("/nowhere"));
    }
}
