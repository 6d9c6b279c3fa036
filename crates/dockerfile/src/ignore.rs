//! `.dockerignore`: which files are not part of a build.

use crate::pattern::matches;
use crate::refusal::Refusal;

/// Maximum size of a file, in bytes.
const TEXT_MAX: usize = 256 << 10;
/// Maximum number of patterns.
const RULES_MAX: usize = 1000;
/// Maximum number of components of a pattern.
const PARTS_MAX: usize = 64;

/// The rules of a file. The last one that matches a path or a directory above it decides.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ignore {
    rules: Vec<Rule>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Rule {
    parts: Vec<String>,
    is_exception: bool,
}

impl Ignore {
    /// Reads a file.
    ///
    /// # Errors
    /// With the number of the line and the reason.
    pub fn parse(text: &str) -> Result<Self, Refusal> {
        let mut rules = Vec::new();
        if text.len() > TEXT_MAX {
            return Err(Refusal::new(1, format!("larger than {TEXT_MAX} bytes")));
        }
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        for (index, line) in text.lines().enumerate() {
            if line.starts_with('#') {
                continue;
            }
            let line = line.trim();
            let (is_exception, pattern) = match line.strip_prefix('!') {
                Some(pattern) => (true, pattern.trim()),
                None => (false, line),
            };
            if line.is_empty() {
                continue;
            }
            if pattern.is_empty() {
                return Err(Refusal::new(index + 1, "a `!` without a pattern"));
            }
            let mut parts: Vec<String> = Vec::new();
            for part in pattern.split('/') {
                match part {
                    "" | "." => {}
                    ".." => drop(parts.pop()),
                    "**" if parts.last().is_some_and(|last| last == "**") => {}
                    part => parts.push(part.to_owned()),
                }
            }
            // `.` and `/` alone would be the whole directory; they have no effect.
            if parts.is_empty() {
                continue;
            }
            if rules.len() == RULES_MAX || parts.len() > PARTS_MAX {
                let why = format!("more than {RULES_MAX} patterns, or one of more than {PARTS_MAX} components");
                return Err(Refusal::new(index + 1, why));
            }
            rules.push(Rule { parts, is_exception });
        }
        Ok(Self { rules })
    }

    /// Whether a file is ignored. The path is relative, with slashes, and without `.` and `..`.
    #[must_use]
    pub fn is_ignored(&self, path: &str) -> bool {
        let path: Vec<&str> = path.split('/').collect();
        let mut is_ignored = false;
        for rule in &self.rules {
            if rule.is_exception == is_ignored && rule.matches(&path) {
                is_ignored = !rule.is_exception;
            }
        }
        is_ignored
    }

    /// Whether nothing in an ignored directory can be excepted, so that it need not be read.
    #[must_use]
    pub fn is_pruned(&self, directory: &str) -> bool {
        self.is_ignored(directory) && !self.rules.iter().any(|rule| rule.is_exception)
    }
}

impl Rule {
    /// Whether the path or a directory above it matches.
    fn matches(&self, path: &[&str]) -> bool {
        // Which numbers of leading components of the path the parts so far can have taken.
        let mut reached = vec![false; path.len() + 1];
        reached[0] = true;
        for part in &self.parts {
            let mut next = vec![false; path.len() + 1];
            if part == "**" {
                let mut any = false;
                for (at, reachable) in reached.iter().enumerate() {
                    any |= reachable;
                    next[at] = any;
                }
            } else {
                for (at, name) in path.iter().enumerate() {
                    next[at + 1] = reached[at] && matches(part.as_bytes(), name.as_bytes());
                }
            }
            reached = next;
        }
        // Not the directory itself that everything is in.
        reached[1..].iter().any(|reachable| *reachable)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_rule_decides() {
        let ignore = Ignore::parse(
            "\u{feff}# comment\n\n*.log\n/target\n**/cache\nsrc/*/gen\n!keep.log\ndocs\n!docs/README.md\n a b \n*/x?\n",
        )
        .unwrap();
        for (path, want) in [
            ("a.log", true),
            ("keep.log", false),
            ("sub/a.log", false),
            ("target", true),
            ("target/debug/x", true),
            ("src/target", false),
            ("cache", true),
            ("a/b/cache/c", true),
            ("src/a/gen/file", true),
            ("src/a/b/gen", false),
            ("docs/page.md", true),
            ("docs/README.md", false),
            ("a b", true),
            ("d/x1", true),
            ("d/e/x1", false),
            ("# comment", false),
        ] {
            assert_eq!(ignore.is_ignored(path), want, "{path}");
        }
        assert!(!ignore.is_pruned("docs"));
        assert!(Ignore::parse("docs").unwrap().is_pruned("docs"));
        let all = Ignore::parse("**\n!a\n.\n").unwrap();
        assert!(all.is_ignored("b/c") && !all.is_ignored("a/b"));
        assert_eq!(Ignore::parse("a\n!\n").unwrap_err().line, 2);
    }
}
