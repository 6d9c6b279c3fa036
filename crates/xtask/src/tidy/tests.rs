use std::path::Path;

use super::exceptions::Exceptions;
use super::tree::Tree;
use super::{Breach, circles, rules};

fn told(breaches: impl IntoIterator<Item = Breach>) -> Vec<String> {
    breaches.into_iter().map(|breach| breach.to_string()).collect()
}

#[test]
fn the_repository_is_tidy() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let breaches = told(super::check(&root).expect("check"));
    assert!(
        breaches.is_empty(),
        "{} breaches\n{}",
        breaches.len(),
        breaches.join("\n")
    );
}

#[test]
fn exceptions_that_nothing_needs_are_breaches() {
    let mut exceptions = Exceptions::of(&[("lines", "a.rs", ""), ("sql", "a.rs", ""), ("sql", "a/", "")]);
    let breach = |rule, subject: &str| Breach {
        rule,
        subject: subject.to_owned(),
        message: String::new(),
    };
    assert!(exceptions.covers(&breach("lines", "a.rs")));
    assert!(exceptions.covers(&breach("sql", "a/b.rs")));
    assert!(!exceptions.covers(&breach("lines", "b.rs")));
    assert!(!exceptions.covers(&breach("unsafe", "a.rs")));
    assert_eq!(
        told(exceptions.unused()),
        ["exception: a.rs: keeps to the rule `sql` now: take its line out of tidy/exceptions.rs"]
    );
}

/// The files of crate `x` that are in circles, each with its circle.
fn circles_of(files: &[(&str, &str)]) -> Vec<String> {
    let paths: Vec<String> = files.iter().map(|(path, _)| format!("crates/x/src/{path}")).collect();
    let files: Vec<(&str, &str)> = paths
        .iter()
        .zip(files)
        .map(|(path, (_, text))| (path.as_str(), *text))
        .collect();
    let prefix = "circle: crates/x/src/";
    let middle = "uses itself by way of others: ";
    told(circles::check(&Tree::of(&files), "x").expect("check"))
        .into_iter()
        .map(|line| line.replace(prefix, "").replace(middle, ""))
        .collect()
}

const NONE: [&str; 0] = [];

#[test]
fn a_tree_without_a_circle() {
    let found = circles_of(&[
        ("lib.rs", "mod a; mod b; pub use a::A; pub fn go() { b::run(A) }"),
        // `crate::A` leads to `a.rs` and not to the re-export.
        (
            "b.rs",
            "use crate::A; pub(crate) fn run(_: A) {} #[cfg(test)] mod tests { use crate::go; }",
        ),
        (
            "a.rs",
            "// crate::b::run\npub struct A; const TEXT: &str = \"crate::b::run\";",
        ),
        // Tests may use whatever they like.
        ("a/tests.rs", "use crate::b::run;"),
    ]);
    assert_eq!(found, NONE);
}

#[test]
fn a_circle_by_use() {
    let found = circles_of(&[
        ("lib.rs", "mod a; mod b; mod c; mod d;"),
        ("a.rs", "\nuse crate::{b::{self, B}, d};"),
        ("b.rs", "pub struct B;\nuse super::c::C;"),
        ("c.rs", "pub struct C(crate::a::A);"),
        ("d.rs", ""),
    ]);
    assert_eq!(
        found,
        [
            "a.rs: a.rs:2 uses b.rs, b.rs:2 uses c.rs, c.rs:1 uses a.rs",
            "b.rs: b.rs:2 uses c.rs, c.rs:1 uses a.rs, a.rs:2 uses b.rs",
            "c.rs: c.rs:1 uses a.rs, a.rs:2 uses b.rs, b.rs:2 uses c.rs",
        ]
    );
}

#[test]
fn a_circle_of_parent_and_child() {
    // That the parent declares the child is no use of it …
    let child = ("a/child.rs", "use super::Thing; pub(super) fn f(_: Thing) {}");
    assert_eq!(
        circles_of(&[("lib.rs", "mod a;"), ("a.rs", "mod child; pub struct Thing;"), child]),
        NONE
    );
    // … but a path to something in it is.
    let parent = ("a.rs", "mod child; pub struct Thing; fn g() { child::f(Thing) }");
    assert_eq!(
        circles_of(&[("lib.rs", "mod a;"), parent, child]),
        [
            "a.rs: a.rs:1 uses a/child.rs, a/child.rs:1 uses a.rs",
            "a/child.rs: a/child.rs:1 uses a.rs, a.rs:1 uses a/child.rs"
        ]
    );
}

#[test]
fn a_circle_by_whatever_leads_there() {
    let back = ("b.rs", "pub struct B; use crate::a::A;");
    for a in [
        "pub struct A; fn f() -> crate::b::B { todo() }",
        "pub struct A; fn f() { info!(\"{}\", crate::b::B) }",
        "pub struct A; mod inner { use super::super::b::B; }",
        "pub struct A; use crate::b as other; fn f() { other::g() }",
        "pub struct A; use crate::b::*;",
        "pub struct A; use crate::Named;",
        "pub struct A; use crate::facade::B;",
        "pub struct A; impl From<super::b::B> for A {}",
        "pub struct A; #[cfg(not(test))] use crate::b::B;",
    ] {
        let lib = (
            "lib.rs",
            "mod a; mod b; mod facade { pub use crate::b::B; } pub use b::B as Named;",
        );
        let found = circles_of(&[lib, ("a.rs", a), back]);
        assert_eq!(found.len(), 2, "{a}: {found:?}");
    }
}

#[test]
fn what_is_for_tests_makes_no_circle() {
    let back = ("b.rs", "pub struct B; use crate::a::A;");
    for a in [
        "pub struct A; #[cfg(test)] use crate::b::{B};",
        "pub struct A; #[cfg(test)] #[derive(Debug)] pub(crate) struct C(crate::b::B);",
        "pub struct A; #[cfg(all(test, unix))] fn f() -> [u8; 1] { crate::b::g() }",
        "pub struct A { #[cfg(test)] b: crate::b::B, c: u8 }",
        "pub struct A; #[cfg(test)] const B: crate::b::B = crate::b::B { x: 1 };",
        "pub struct A; fn f() { x.b::<u8>(); y::b::B; }",
    ] {
        assert_eq!(
            circles_of(&[("lib.rs", "mod a; mod b;"), ("a.rs", a), back]),
            NONE,
            "{a}"
        );
    }
}

#[test]
fn rules_about_one_file() {
    let check = |path: &str, text: &str| -> Vec<String> {
        let mut breaches = Vec::new();
        rules::check(&Tree::of(&[(path, text)]), &mut breaches).expect("check");
        told(breaches)
    };
    let long = |lines: usize| "\n".repeat(lines);
    assert_eq!(check("a.py", &long(700)), NONE);
    assert_eq!(
        check("a.py", &long(701)),
        ["lines: a.py: has 701 lines: split it, 700 are the most"]
    );
    assert_eq!(check("a.md", &long(701)), NONE);
    assert_eq!(check("a/sys.rs", "unsafe fn f() {}"), NONE);
    assert_eq!(check("a/b.rs", "// unsafe\nconst A: &str = \"unsafe\";"), NONE);
    assert_eq!(
        check("a/b.rs", "\nunsafe fn f() {}"),
        ["unsafe: a/b.rs: line 2: `unsafe` belongs in a `sys.rs`"]
    );
    let statement = "const A: &str = r#\"\n SELECT 1\"#;";
    assert_eq!(check("crates/store/src/a.rs", statement), NONE);
    assert_eq!(
        check("crates/a/src/a.rs", statement),
        ["sql: crates/a/src/a.rs: line 1: SQL belongs in `store`"]
    );
    assert_eq!(check("crates/a/src/a.rs", "const A: &str = \"Select one\";"), NONE);
    assert_eq!(
        check("crates/a/a.sql", ""),
        ["sql: crates/a/a.sql: SQL belongs in `store`"]
    );
    let names_http = "use axum::Router;";
    for path in ["crates/server/src/api/a.rs", "crates/server/src/admission_like.rs"] {
        assert_eq!(check(path, names_http), NONE);
    }
    for path in ["crates/server/src/sandboxes.rs", "crates/server/src/admission/rate.rs"] {
        let expected =
            format!("domain: {path}: line 1: the server's domain does not depend on HTTP: translate in `api`");
        assert_eq!(check(path, names_http), [expected]);
    }
    assert_eq!(
        check("a/mod.rs", ""),
        ["module: a/mod.rs: a module `foo` is in `foo.rs` beside the directory `foo`"]
    );
}
