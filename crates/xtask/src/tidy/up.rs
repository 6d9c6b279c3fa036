//! No file uses the file of a module that it is in.
//!
//! The file of a module uses its children, and says what they are together. A child that uses something of it cannot be
//! understood, tested or moved without it, and one import more is a circle. What children share is in one of them.

use anyhow::Result;

use super::breach::Breach;
use super::modules;
use super::tree::Tree;

const RULE: &str = "up";

/// The crates that keep to this rule.
pub(super) const CRATES: [&str; 2] = ["node", "runtime"];

/// One breach for each file of the crate and each file above it that it uses.
pub(super) fn check(tree: &Tree, name: &str) -> Result<Vec<Breach>> {
    let uses = modules::uses(tree, name)?;
    let mut breaches = Vec::new();
    for (file, targets) in &uses {
        for (target, line) in targets.iter().filter(|(target, _)| is_above(target, file)) {
            breaches.push(Breach {
                rule: RULE,
                subject: format!("crates/{name}/src/{file}"),
                message: format!(
                    "line {line}: uses {target}, the file of a module that it is in: move what it needs into a file beside it"
                ),
            });
        }
    }
    Ok(breaches)
}

/// Whether one file is that of a module that another file is in.
fn is_above(target: &str, file: &str) -> bool {
    let stem = target.strip_suffix(".rs").unwrap_or(target);
    let below = file.strip_prefix(stem);
    stem == "lib" || stem == "main" || below.is_some_and(|rest| rest.starts_with('/'))
}

#[cfg(test)]
mod tests {
    use super::super::exceptions::Exceptions;
    use super::super::tree::Tree;
    use super::{Breach, check};

    /// The breaches in crate `x` with these files.
    fn breaches(files: &[(&str, &str)]) -> Vec<Breach> {
        let paths: Vec<String> = files.iter().map(|(path, _)| format!("crates/x/src/{path}")).collect();
        let texts = paths.iter().zip(files).map(|(path, (_, text))| (path.as_str(), *text));
        check(&Tree::of(&texts.collect::<Vec<_>>()), "x").expect("check")
    }

    const LIB: (&str, &str) = ("lib.rs", "mod a; pub struct Root;");
    const PARENT: (&str, &str) = (
        "a.rs",
        "mod b; mod c; use self::c::Shared; pub struct Thing; fn f() { b::g(Shared) }",
    );
    const SIBLING: (&str, &str) = ("a/c.rs", "pub struct Shared;");

    #[test]
    fn files_that_use_no_file_above_them() {
        for child in [
            "use super::c::Shared;",
            "use crate::a::c::{self, Shared};",
            // This leads to the sibling, and not to the import in the file above.
            "use super::Shared;",
            "use crate::ab::Other;",
            "pub(in crate::a) fn g() {}",
            "#[cfg(test)] use super::Thing;",
            "#[cfg(test)] mod tests { use super::super::Thing; }",
            "mod inner { use super::g; } fn g() {}",
            "// super::Thing\nconst TEXT: &str = \"super::Thing\";",
        ] {
            let files = [LIB, PARENT, SIBLING, ("ab.rs", "pub struct Other;"), ("a/b.rs", child)];
            assert_eq!(breaches(&files), [], "{child}");
        }
        // Files with tests only may use whatever they like.
        assert_eq!(breaches(&[LIB, PARENT, SIBLING, ("a/tests.rs", "use super::*;")]), []);
    }

    #[test]
    fn files_that_use_a_file_above_them() {
        for (child, above) in [
            ("use super::Thing;", "a.rs"),
            ("use super::{Thing, c::Shared};", "a.rs"),
            ("use super::*;", "a.rs"),
            ("use crate::a::Thing;", "a.rs"),
            ("use crate::a as parent; fn g(_: parent::Thing) {}", "a.rs"),
            ("fn g(_: super::Thing) {}", "a.rs"),
            ("mod inner { use super::super::Thing; }", "a.rs"),
            ("use crate::Root;", "lib.rs"),
            ("fn g() { info!(\"{}\", crate::Root) }", "lib.rs"),
        ] {
            let found = breaches(&[LIB, PARENT, SIBLING, ("a/b.rs", child)]);
            let lines: Vec<String> = found.iter().map(ToString::to_string).collect();
            let expected = format!(
                "up: crates/x/src/a/b.rs: line 1: uses {above}, the file of a module that it is in: move what it needs \
                 into a file beside it"
            );
            assert_eq!(lines, [expected], "{child}");
        }
        let deep = ("a/b/d.rs", "use super::super::Thing;\nuse crate::{Root, a::b};");
        let found = breaches(&[LIB, PARENT, SIBLING, ("a/b.rs", "mod d;"), deep]);
        let above: Vec<&str> = found
            .iter()
            .filter_map(|breach| breach.message.split_once(", ").map(|(uses, _)| uses))
            .collect();
        assert_eq!(
            above,
            ["line 1: uses a.rs", "line 2: uses a/b.rs", "line 2: uses lib.rs"]
        );
    }

    #[test]
    fn listed_files_are_covered_and_no_other() {
        let mut exceptions = Exceptions::of(&[("up", "crates/x/src/a/b.rs", "")]);
        let uses = "use super::Thing;";
        let mut found = breaches(&[LIB, PARENT, ("a/b.rs", uses), ("a/c.rs", uses)]);
        found.retain(|breach| !exceptions.covers(breach));
        let subjects: Vec<&str> = found.iter().map(|breach| breach.subject.as_str()).collect();
        assert_eq!(subjects, ["crates/x/src/a/c.rs"]);
        assert_eq!(exceptions.unused(), []);
        // Once the listed file is mended, its line has to go …
        let mut exceptions = Exceptions::of(&[("up", "crates/x/src/a/b.rs", "")]);
        let found = breaches(&[LIB, PARENT, SIBLING, ("a/b.rs", "use super::c::Shared;")]);
        assert!(found.iter().all(|breach| exceptions.covers(breach)));
        let unused: Vec<String> = exceptions.unused().into_iter().map(|breach| breach.subject).collect();
        assert_eq!(unused, ["crates/x/src/a/b.rs"]);
        // … and then it is a breach when it comes back.
        let mut exceptions = Exceptions::of(&[]);
        let found = breaches(&[LIB, PARENT, SIBLING, ("a/b.rs", uses)]);
        assert_eq!(found.iter().filter(|breach| !exceptions.covers(breach)).count(), 1);
    }
}
