//! CRIU on this host.

use std::collections::BTreeSet;
use std::io::{self, Read as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::{Deserialize, Serialize};

/// The first version that works here: those before it cannot write every kind of socket on newer kernels, and those with
/// which this was tried on older ones end with a signal.
const MINIMUM: (u32, u32) = (4, 2);

/// Programs that CRIU starts: an archiver for what is in memory, which starts a shell, which starts a compressor.
const STARTED: [&str; 2] = ["tar", "gzip"];
const SHELL: &str = "/bin/sh";
/// Where a loader looks up libraries. Without it, it looks in the usual directories.
const LOADER_CACHE: &str = "/etc/ld.so.cache";
/// Where programs are that CRIU starts.
pub(super) const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// CRIU on this host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Program {
    /// Its file.
    pub(crate) path: PathBuf,
    /// Its version.
    pub(crate) version: String,
    /// All files of the host that its runs need: itself, the programs that it starts, and what all of them load.
    pub(crate) files: Vec<PathBuf>,
    /// When its file was changed, in seconds and nanoseconds.
    changed: (i64, i64),
}

impl Program {
    /// The program that is there now: another one than at the start of the platform, if the host was upgraded since.
    ///
    /// # Errors
    /// As [`find`].
    pub(crate) fn current(&self) -> Result<Self, String> {
        match changed(&self.path) {
            Ok(now) if now == self.changed => Ok(self.clone()),
            _ => find(&self.path),
        }
    }
}

/// Finds out which CRIU there is at `path`.
///
/// # Errors
/// With a sentence for the operator when there is none, or none that works on this kernel.
pub(crate) fn find(path: &Path) -> Result<Program, String> {
    let named = |error: io::Error| format!("{}: {error}", path.display());
    let changed = changed(path).map_err(named)?;
    if is_script(path).map_err(named)? {
        // Which programs it starts is not known, and none of them would be in the root that CRIU runs in.
        return Err(format!("{} is a script: name the program itself", path.display()));
    }
    let text = output(path, &["--version"], &[]).map_err(named)?;
    let version = text
        .lines()
        .find_map(|line| line.strip_prefix("Version: "))
        .unwrap_or_default();
    check(version.trim())?;
    let started = STARTED.iter().filter_map(|name| in_path(name));
    let programs = [path.to_owned(), SHELL.into()].into_iter().chain(started);
    let mut files = BTreeSet::new();
    for program in programs.filter(|program| program.exists()) {
        files.extend(loaded_by(&program).map_err(|error| format!("{}: {error}", program.display()))?);
        files.insert(program);
    }
    files.extend(
        [LOADER_CACHE]
            .map(PathBuf::from)
            .into_iter()
            .filter(|file| file.exists()),
    );
    Ok(Program {
        path: path.to_owned(),
        version: version.trim().to_owned(),
        files: files.into_iter().collect(),
        changed,
    })
}

/// What a program loads before it starts, and what loads it. Empty for one that is linked statically.
///
/// The loader of the C library prints that in the place of running the program, where it finds this variable.
fn loaded_by(program: &Path) -> io::Result<Vec<PathBuf>> {
    // A program without a loader would run, so it gets an argument with which it ends at once.
    let text = output(program, &["--version"], &[("LD_TRACE_LOADED_OBJECTS", "1")])?;
    Ok(text.lines().filter_map(loaded).collect())
}

/// The file in a line such as `libc.so.6 => /lib/libc.so.6 (0x7f...)` or `/lib64/ld-linux-x86-64.so.2 (0x7f...)`.
fn loaded(line: &str) -> Option<PathBuf> {
    let (file, _) = line.trim().rsplit_once(" (0x")?;
    let file = file.split_once(" => ").map_or(file, |(_, file)| file);
    file.starts_with('/').then(|| PathBuf::from(file))
}

fn in_path(name: &str) -> Option<PathBuf> {
    let mut places = PATH.split(':').map(|directory| Path::new(directory).join(name));
    places.find(|path| path.is_file())
}

fn is_script(path: &Path) -> io::Result<bool> {
    let mut begin = Vec::new();
    std::fs::File::open(path)?.take(2).read_to_end(&mut begin)?;
    Ok(begin == b"#!")
}

fn changed(path: &Path) -> io::Result<(i64, i64)> {
    std::fs::metadata(path).map(|metadata| (metadata.ctime(), metadata.ctime_nsec()))
}

fn output(program: &Path, arguments: &[&str], environment: &[(&str, &str)]) -> io::Result<String> {
    #[expect(clippy::disallowed_methods, reason = "programs of the host, without a sandbox")]
    let output = Command::new(program)
        .args(arguments)
        .env_clear()
        .env("PATH", PATH)
        .envs(environment.iter().copied())
        .stdin(Stdio::null())
        .output()?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
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

    #[test]
    fn a_loader_names_the_files_of_a_program() {
        for (line, want) in [
            ("\tlinux-vdso.so.1 (0x00007ffd)", None),
            (
                "\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f01)",
                Some("/lib/x86_64-linux-gnu/libc.so.6"),
            ),
            (
                "\t/lib64/ld-linux-x86-64.so.2 (0x00007f02)",
                Some("/lib64/ld-linux-x86-64.so.2"),
            ),
            ("\tlibgone.so.1 => not found", None),
            ("\tstatically linked", None),
            ("Version: 4.2", None),
        ] {
            assert_eq!(loaded(line), want.map(PathBuf::from), "{line}");
        }
        let shell = loaded_by(Path::new(SHELL)).unwrap();
        assert!(
            shell.iter().any(|file| file.to_string_lossy().contains("libc.so")),
            "{shell:?}"
        );
        assert!(shell.iter().all(|file| file.exists()), "{shell:?}");
    }
}
