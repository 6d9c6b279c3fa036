//! CRIU on this host.

use std::collections::BTreeSet;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::vetted::{self, PATH};
use crate::settings::CriuChoice;

/// The first version that works here: those before it cannot write every kind of socket on newer kernels, and those with
/// which this was tried on older ones end with a signal.
const MINIMUM: (u32, u32) = (4, 2);

/// Where CRIU is looked for: in the folders of our own packages, and where distributions and builds from source put it. Not in the
/// `PATH` of whoever starts the platform.
pub(crate) const PLACES: [&str; 6] = [
    "/usr/lib/ringfence/criu/criu",
    "/usr/local/lib/ringfence/criu/criu",
    "/usr/sbin/criu",
    "/usr/bin/criu",
    "/usr/local/sbin/criu",
    "/usr/local/bin/criu",
];

/// Programs that CRIU starts: an archiver for what is in memory, which starts a shell, which starts a compressor.
const STARTED: [&str; 2] = ["tar", "gzip"];
/// The shell, which is named by its path.
const SHELL: &str = "/bin/sh";
/// Where a loader looks up libraries. Without it, it looks in the usual directories.
const LOADER_CACHE: &str = "/etc/ld.so.cache";

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

/// The CRIU that the setting means: the one that it names, or the first fitting one of [`PLACES`].
///
/// # Errors
/// With a sentence for the operator when there is none, or none that works on this kernel and is safe to run.
pub(crate) fn choose(setting: &CriuChoice) -> Result<Option<Program>, String> {
    match setting {
        CriuChoice::Off => Ok(None),
        CriuChoice::At(path) => find(path).map(Some),
        CriuChoice::Auto => first_of(PLACES.into_iter().map(Path::new)).map(Some),
    }
}

/// The first of these that can be used; otherwise why those that exist cannot.
fn first_of<'a>(places: impl Iterator<Item = &'a Path>) -> Result<Program, String> {
    let mut reasons = Vec::new();
    for place in places.filter(|place| place.symlink_metadata().is_ok()) {
        match find(place) {
            Ok(program) => return Ok(program),
            Err(why) => reasons.push(why),
        }
    }
    // Of one program under two names once.
    reasons.dedup();
    if reasons.is_empty() {
        Err("no CRIU is installed".to_owned())
    } else {
        Err(reasons.join("; "))
    }
}

/// Why what is at the [`PLACES`] before this one cannot be used.
pub(crate) fn passed_over(chosen: &Path) -> Vec<String> {
    let before = PLACES.iter().map(Path::new).take_while(|place| *place != chosen);
    let there = before.filter(|place| place.symlink_metadata().is_ok());
    there.filter_map(|place| find(place).err()).collect()
}

/// Finds out which CRIU there is at `path`. Nothing of it runs before all of it is known to be root's.
///
/// # Errors
/// With a sentence for the operator when there is none, or none that works on this kernel, or one that others than root
/// could have put there.
pub(crate) fn find(path: &Path) -> Result<Program, String> {
    let named = |error: io::Error| format!("{}: {error}", path.display());
    let changed = changed(path).map_err(named)?;
    // Before anything is run, because loaders follow it.
    let cache = Path::new(LOADER_CACHE);
    let has_cache = cache.exists();
    if has_cache {
        vetted::file(cache)?;
    }
    let mut files = vetted::program(path)?;
    let text = vetted::output(path, &["--version"], &[]).map_err(named)?;
    let version = text
        .lines()
        .find_map(|line| line.strip_prefix("Version: "))
        .unwrap_or_default();
    check(version.trim()).map_err(|why| format!("{}: {why}", path.display()))?;
    files.extend(vetted::program(Path::new(SHELL))?);
    for program in STARTED {
        files.extend(started(program)?);
    }
    if has_cache {
        files.insert(cache.to_owned());
    }
    Ok(Program {
        path: path.to_owned(),
        version: version.trim().to_owned(),
        files: files.into_iter().collect(),
        changed,
    })
}

/// The files of a program that CRIU starts. The first one of the path that is root's is taken: in the root that CRIU runs in,
/// there is no other. None where the host has no such program.
fn started(name: &str) -> Result<BTreeSet<PathBuf>, String> {
    let mut why = None;
    let places = PATH.split(':').map(|directory| Path::new(directory).join(name));
    for place in places.filter(|place| place.is_file()) {
        match vetted::program(&place) {
            Ok(files) => return Ok(files),
            Err(reason) => why = why.or(Some(reason)),
        }
    }
    why.map_or_else(|| Ok(BTreeSet::new()), Err)
}

fn changed(path: &Path) -> io::Result<(i64, i64)> {
    std::fs::metadata(path).map(|metadata| (metadata.ctime(), metadata.ctime_nsec()))
}

fn check(version: &str) -> Result<(), String> {
    let mut parts = version.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    let (Some(Ok(major)), Some(Ok(minor))) = (parts.next(), parts.next()) else {
        return Err("is not CRIU: its --version has no line such as \"Version: 4.2\"".to_owned());
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
    fn the_first_that_fits_is_taken_and_otherwise_each_reason_is_told() {
        assert_eq!(choose(&CriuChoice::Off), Ok(None));
        let nowhere = Path::new("/nowhere/criu");
        assert_eq!(first_of([nowhere].into_iter()).unwrap_err(), "no CRIU is installed");
        assert!(
            choose(&CriuChoice::At(nowhere.into()))
                .unwrap_err()
                .contains("/nowhere/criu")
        );
        // Programs of root, and none of them is CRIU.
        let why = first_of(["/bin/true", "/nowhere/criu", "/bin/sh"].map(Path::new).into_iter()).unwrap_err();
        assert!(why.contains("/bin/true: ") && why.contains("; /bin/sh: "), "{why}");
    }

    #[test]
    fn what_criu_starts_is_found() {
        let archiver = started("tar").unwrap();
        assert!(archiver.iter().any(|file| file.ends_with("tar")), "{archiver:?}");
        assert_eq!(started("no-such-program"), Ok(BTreeSet::new()));
    }
}
