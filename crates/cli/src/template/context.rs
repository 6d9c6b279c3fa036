//! The files that a Dockerfile copies: chosen by its instructions and by `.dockerignore`.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use dockerfile::{Copy, Escape, Ignore, Source};
use runtime::files::if_there;

use super::tar::Archive;

/// Maximum number of files of one instruction.
const FILES_MAX: usize = 1_000_000;

/// Files by their names in an archive.
type Chosen = BTreeMap<String, File>;

/// A file of the context.
#[derive(Debug, PartialEq, Eq)]
struct File {
    /// Its path in the context, which is another one than its name behind a link.
    path: String,
    /// Whether it is a link that stands for what it leads to.
    follow: bool,
}

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
            let text = if_there(fs::read_to_string(&path)).with_context(|| format!("read {}", path.display()))?;
            if let Some(text) = text {
                ignore = Ignore::parse(&text).with_context(|| path.display().to_string())?;
                break;
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
        let mut chosen = Chosen::new();
        for word in words {
            // What a variable is may depend on the image, so the platform chooses.
            let pattern = if word.contains('$') {
                ".".to_owned()
            } else {
                dockerfile::expand(word, escape, &|_| None)?
            };
            let mut of_word = Chosen::new();
            let matches = self.matches(&pattern)?;
            for path in &matches {
                self.choose(path, &mut of_word)?;
            }
            let is_all = matches.iter().any(String::is_empty);
            ensure!(
                is_all || !of_word.is_empty(),
                "{word}: no such file in {}, or it is excluded by .dockerignore",
                self.root.display()
            );
            chosen.append(&mut of_word);
        }
        let mut archive = Archive::begin()?;
        for (name, file) in &chosen {
            archive.add(&self.root.join(&file.path), name, file.follow)?;
        }
        archive.finish().map(Some)
    }

    /// Paths that match a pattern, relative to the context, without ignored ones. The context itself is empty.
    fn matches(&self, pattern: &str) -> Result<Vec<String>> {
        let mut paths = vec![String::new()];
        let clean = dockerfile::clean(pattern);
        let clean = clean.with_context(|| format!("{pattern}: is outside of {}", self.root.display()))?;
        for part in clean.split('/').filter(|part| !part.is_empty()) {
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
        let mut kept = Vec::new();
        for path in paths {
            if self.root.join(&path).symlink_metadata().is_err() {
                continue;
            }
            // Patterns are for the files themselves, also where a link leads to them.
            let real = self.real(&path)?;
            if real.is_empty() || !self.ignore.is_ignored(&real) || !self.ignore.is_pruned(&real) {
                kept.push(path);
            }
        }
        Ok(kept)
    }

    /// The path of a source in the context, where links in it are followed up to its last component.
    fn real(&self, path: &str) -> Result<String> {
        let Some((above, name)) = path.rsplit_once('/') else {
            return Ok(path.to_owned());
        };
        Ok(join(&self.followed(above)?, name))
    }

    /// The path in the context of what a path leads to.
    fn followed(&self, path: &str) -> Result<String> {
        let target = self.root.join(path);
        let target = target
            .canonicalize()
            .with_context(|| format!("follow link {}", target.display()))?;
        let below = target.strip_prefix(&self.root);
        let below = below.with_context(|| format!("{path}: is a link that leads out of {}", self.root.display()))?;
        let below = below.to_str().map(str::to_owned);
        below.with_context(|| format!("{path}: leads to a file whose name is not UTF-8"))
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

    /// Chooses a source, and everything below it. A source that is a link stands for what it leads to, which
    /// `.dockerignore` may exclude as well.
    fn choose(&self, name: &str, chosen: &mut Chosen) -> Result<()> {
        let path = self.real(name)?;
        if path.is_empty() || !self.root.join(&path).is_symlink() {
            return self.choose_all(name, &path, chosen);
        }
        let target = self.followed(&path)?;
        if self.ignore.is_ignored(&path) {
            return Ok(());
        }
        if self.root.join(&target).is_dir() {
            return self.choose_all(name, &target, chosen);
        }
        if !self.ignore.is_ignored(&target) {
            chosen.insert(name.to_owned(), File { path, follow: true });
        }
        Ok(())
    }

    /// Chooses what is at a path, with everything below it, under a name.
    fn choose_all(&self, name: &str, path: &str, chosen: &mut Chosen) -> Result<()> {
        let is_dir = self.root.join(path).symlink_metadata()?.is_dir();
        if !path.is_empty() && self.ignore.is_pruned(path) {
            return Ok(());
        }
        if !name.is_empty() && (path.is_empty() || !self.ignore.is_ignored(path)) {
            let (path, follow) = (path.to_owned(), false);
            chosen.insert(name.to_owned(), File { path, follow });
            ensure!(chosen.len() <= FILES_MAX, "more than {FILES_MAX} files");
        }
        if is_dir {
            for child in self.names(path)? {
                self.choose_all(&join(name, &child), &join(path, &child), chosen)?;
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
        let mut chosen = Chosen::new();
        for path in context.matches(pattern).unwrap() {
            context.choose(&path, &mut chosen).unwrap();
        }
        chosen.into_keys().collect()
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
        for path in ["../x", "app/../../x"] {
            assert!(all.matches(path).is_err(), "{path}");
        }
        assert!(all.choose("out", &mut Chosen::new()).is_err());
        std::os::unix::fs::symlink("/etc", all.root.join("etc")).unwrap();
        assert!(all.choose("etc", &mut Chosen::new()).is_err());
        assert!(all.matches("etc/passwd").is_err());
        assert!(all.matches("etc/pass*").is_err());
    }

    #[test]
    fn links_stand_for_what_they_lead_to() {
        let (_dir, all) = context("app/cache/deep\n*.dockerignore\nb.txt\n");
        let link = |target: &str, name: &str| std::os::unix::fs::symlink(target, all.root.join(name)).unwrap();
        link("app", "to-app");
        link("cache", "app/to-cache");
        link("b.txt", "to-ignored");
        link("app/cache/deep", "to-pruned");
        assert_eq!(
            chosen(&all, "to-app"),
            [
                "to-app",
                "to-app/cache",
                "to-app/cache/a",
                "to-app/main.py",
                "to-app/to-cache"
            ]
        );
        assert_eq!(chosen(&all, "to-app/to-cache/a"), ["to-app/to-cache/a"]);
        assert_eq!(chosen(&all, "to-app/*.py"), ["to-app/main.py"]);
        assert_eq!(chosen(&all, "none/../app/../a.txt"), ["a.txt"]);
        for ignored in ["to-ignored", "to-pruned", "to-app/cache/deep/b"] {
            assert!(chosen(&all, ignored).is_empty(), "{ignored}");
        }
        let mut followed = Chosen::new();
        all.choose("to-app/cache", &mut followed).unwrap();
        assert_eq!(followed["to-app/cache/a"].path, "app/cache/a");
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
        std::os::unix::fs::symlink("b.txt", all.root.join("to-ignored")).unwrap();
        for bad in ["none", "b.txt", "a.txt *.none", "to-ignored"] {
            let error = archive(&format!("FROM a\nCOPY {bad} /x/\n")).unwrap_err().to_string();
            assert!(error.contains("no such file"), "{bad}: {error}");
        }
    }
}
