//! The files that a Dockerfile copies: chosen by its instructions and by `.dockerignore`.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use dockerfile::{Copy, Escape, Ignore, Source};

use super::tar::Archive;

/// Maximum number of files of one instruction.
const FILES_MAX: usize = 1_000_000;

/// A directory with files.
#[derive(Debug)]
pub(super) struct Context {
    root: PathBuf,
    ignore: Ignore,
}

impl Context {
    /// Opens the directory of a Dockerfile, whose own `.dockerignore` comes before that of the directory.
    pub(super) fn open(root: &Path, dockerfile: &Path) -> Result<Self> {
        let root = root
            .canonicalize()
            .with_context(|| format!("open directory {}", root.display()))?;
        ensure!(root.is_dir(), "{} is not a directory", root.display());
        let mut own = OsString::from(dockerfile);
        own.push(".dockerignore");
        let mut ignore = Ignore::default();
        for path in [PathBuf::from(own), root.join(".dockerignore")] {
            match fs::read_to_string(&path) {
                Ok(text) => {
                    ignore = Ignore::parse(&text).with_context(|| path.display().to_string())?;
                    break;
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error).with_context(|| format!("read {}", path.display())),
            }
        }
        Ok(Self { root, ignore })
    }

    /// An archive of what an instruction copies; none if it copies no files of the context.
    pub(super) fn archive(&self, copy: &Copy, escape: Escape) -> Result<Option<(fs::File, String)>> {
        let words = copy.sources.iter().filter_map(|source| match source {
            Source::Path(word) => Some(word),
            Source::File { .. } => None,
        });
        let words: Vec<&String> = words.collect();
        if copy.from.is_some() || words.is_empty() {
            return Ok(None);
        }
        let mut chosen = BTreeSet::new();
        for word in words {
            // What a variable is may depend on the image, so the platform chooses.
            let pattern = match word.contains('$') {
                true => ".".to_owned(),
                false => dockerfile::expand(word, escape, &|_| None)?,
            };
            let before = chosen.len();
            for path in self.matches(&pattern)? {
                self.choose(&path, &mut chosen)?;
            }
            ensure!(
                chosen.len() > before || !self.matches(&pattern)?.is_empty(),
                "{word}: no such file in {}, or it is excluded by .dockerignore",
                self.root.display()
            );
        }
        let mut archive = Archive::begin()?;
        for (path, follow) in &chosen {
            archive.add(&self.root.join(path), path, *follow)?;
        }
        archive.finish().map(Some)
    }

    /// Paths that a pattern means, relative to the context, without ignored ones. The context itself is empty.
    fn matches(&self, pattern: &str) -> Result<Vec<String>> {
        let mut paths = vec![String::new()];
        for part in pattern.split('/') {
            match part {
                "" | "." => continue,
                ".." => bail!("{pattern}: is outside of {}", self.root.display()),
                _ => {}
            }
            let mut found = Vec::new();
            for path in &paths {
                if !dockerfile::is_pattern(part.as_bytes()) {
                    found.push(join(path, part));
                    continue;
                }
                for name in self.names(path).unwrap_or_default() {
                    if dockerfile::matches(part.as_bytes(), name.as_bytes()) {
                        found.push(join(path, &name));
                    }
                }
            }
            ensure!(found.len() <= FILES_MAX, "{pattern}: matches too many files");
            paths = found;
        }
        paths.retain(|path| {
            let exists = self.root.join(path).symlink_metadata().is_ok();
            exists && (path.is_empty() || !self.ignore.is_ignored(path) || !self.ignore.is_pruned(path))
        });
        Ok(paths)
    }

    fn names(&self, path: &str) -> Result<Vec<String>> {
        let path = self.root.join(path);
        let read = || format!("read directory {}", path.display());
        let mut names = Vec::new();
        for entry in fs::read_dir(&path).with_context(read)? {
            let name = entry.with_context(read)?.file_name();
            let name = name.into_string().map_err(|name| {
                anyhow::anyhow!(
                    "{}: the name of a file is not UTF-8: {}",
                    path.display(),
                    name.display()
                )
            })?;
            names.push(name);
        }
        names.sort();
        Ok(names)
    }

    /// Chooses a source with everything below it. A source that is a link stands for what it leads to.
    fn choose(&self, path: &str, chosen: &mut BTreeSet<(String, bool)>) -> Result<()> {
        let full = self.root.join(path);
        if path.is_empty() || !full.is_symlink() {
            return self.choose_all(path, chosen);
        }
        let target = full
            .canonicalize()
            .with_context(|| format!("follow link {}", full.display()))?;
        ensure!(
            target.starts_with(&self.root),
            "{path}: is a link that leads out of {}",
            self.root.display()
        );
        match target.is_dir() {
            false => chosen.insert((path.to_owned(), true)),
            true => bail!("{path}: is a link to a directory; name the directory"),
        };
        Ok(())
    }

    fn choose_all(&self, path: &str, chosen: &mut BTreeSet<(String, bool)>) -> Result<()> {
        let is_dir = self.root.join(path).symlink_metadata()?.is_dir();
        if !path.is_empty() {
            if self.ignore.is_pruned(path) {
                return Ok(());
            }
            if !self.ignore.is_ignored(path) {
                chosen.insert((path.to_owned(), false));
                ensure!(chosen.len() <= FILES_MAX, "more than {FILES_MAX} files");
            }
        }
        if is_dir {
            for name in self.names(path)? {
                self.choose_all(&join(path, &name), chosen)?;
            }
        }
        Ok(())
    }
}

fn join(directory: &str, name: &str) -> String {
    match directory {
        "" => name.to_owned(),
        _ => format!("{directory}/{name}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn context(ignore: &str) -> (tempfile::TempDir, Context) {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("app/cache/deep")).unwrap();
        for file in ["app/main.py", "app/cache/a", "app/cache/deep/b", "a.txt", "b.txt"] {
            fs::write(dir.path().join(file), file).unwrap();
        }
        std::os::unix::fs::symlink("a.txt", dir.path().join("link")).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", dir.path().join("out")).unwrap();
        fs::write(dir.path().join(".dockerignore"), ignore).unwrap();
        let context = Context::open(dir.path(), &dir.path().join("Dockerfile")).unwrap();
        (dir, context)
    }

    fn chosen(context: &Context, pattern: &str) -> Vec<String> {
        let mut chosen = BTreeSet::new();
        for path in context.matches(pattern).unwrap() {
            context.choose(&path, &mut chosen).unwrap();
        }
        chosen.into_iter().map(|(path, _)| path).collect()
    }

    #[test]
    fn ignored_files_are_not_chosen() {
        let (_dir, all) = context("app/cache\n!app/cache/deep\n*.dockerignore\nout\n");
        assert_eq!(
            chosen(&all, "app"),
            ["app", "app/cache/deep", "app/cache/deep/b", "app/main.py"]
        );
        assert_eq!(chosen(&all, "*.txt"), ["a.txt", "b.txt"]);
        assert_eq!(chosen(&all, "./link"), ["link"]);
        assert_eq!(chosen(&all, ".").len(), 7);
        assert!(chosen(&all, "none").is_empty());
        let (_dir, none) = context("*\n");
        assert!(chosen(&none, "a.txt").is_empty());
    }

    #[test]
    fn nothing_outside_is_chosen() {
        let (_dir, all) = context("");
        assert!(all.matches("../x").is_err());
        assert!(all.choose("out", &mut BTreeSet::new()).is_err());
    }

    #[test]
    fn sources_that_do_not_exist_are_errors() {
        let (_dir, all) = context("b.txt");
        let archive = |text: &str| {
            let plan = dockerfile::Plan::parse(text, None, &Default::default(), "linux/amd64").unwrap();
            let dockerfile::Kind::Copy(copy) = &plan.stages[0].instructions[0].kind else {
                panic!("{text}")
            };
            all.archive(copy, plan.escape)
        };
        assert!(archive("FROM a\nCOPY a.txt /x\n").unwrap().is_some());
        assert!(archive("FROM a\nCOPY --from=b a.txt /x\n").unwrap().is_none());
        assert!(archive("FROM a\nCOPY <<E /x\nE\n").unwrap().is_none());
        assert!(archive("FROM a\nCOPY $X /x\n").unwrap().is_some());
        for bad in ["none", "b.txt", "a.txt *.none"] {
            let error = archive(&format!("FROM a\nCOPY {bad} /x/\n")).unwrap_err().to_string();
            assert!(error.contains("no such file"), "{bad}: {error}");
        }
    }
}
