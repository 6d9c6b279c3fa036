//! Imports between the files of a crate, found by the paths that they contain.
//!
//! A path leads to the file that defines what it names: `crate::Thing` leads through a re-export in `lib.rs` to where
//! `Thing` is. `mod child;` alone is no use of the child. `use x::*` is a use of the file of `x`, and what that re-exports
//! is not followed: only tests import all of a module. Paths are found wherever they stand, in macros as well; what is
//! compiled for tests only is left out, because nothing of a release depends on it.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;

use super::tokens::{self, Kind, Token, group_end};
use super::tree::Tree;

/// A module's path from the root of its crate.
type Module = Vec<String>;

/// The files of one crate that a file uses, each with the first line where it does.
pub(super) type Uses = BTreeMap<String, BTreeMap<String, usize>>;

/// A path in the source, and where it is.
#[derive(Debug)]
struct Written {
    module: Module,
    segments: Vec<String>,
    line: usize,
    file: String,
}

#[derive(Debug, Default)]
struct Modules {
    /// The file that each module is in; inline modules share their parent's.
    files: BTreeMap<Module, String>,
    /// What `use` declarations bind, by module and name.
    imports: BTreeMap<(Module, String), Vec<String>>,
    paths: Vec<Written>,
}

/// Imports between the files of the crate whose sources are below `crates/NAME/src`.
pub(super) fn uses(tree: &Tree, name: &str) -> Result<Uses> {
    let sources = format!("crates/{name}/src/");
    let mut modules = Modules::default();
    let mut read = Vec::new();
    for (path, text) in tree.with_endings(&["rs"]) {
        let Some(inside) = path.strip_prefix(&sources) else {
            continue;
        };
        let Some(module) = module_of(inside) else { continue };
        modules.files.insert(module.clone(), inside.to_owned());
        read.push((module, inside.to_owned(), tokens::for_release(path, text)?));
    }
    for (module, file, tokens) in &read {
        modules.read(module, file, tokens);
    }
    Ok(modules.edges())
}

/// The module that a file is. Tests, and other programs of the crate, are none of the library's.
fn module_of(inside: &str) -> Option<Module> {
    let stem = inside.strip_suffix(".rs")?;
    let segments: Module = stem.split('/').map(str::to_owned).collect();
    if segments.iter().any(|segment| segment == "tests" || segment == "bin") {
        return None;
    }
    let root = stem == "lib" || stem == "main";
    Some(if root { Vec::new() } else { segments })
}

impl Modules {
    /// Notes the inline modules, imports and paths of one file.
    fn read(&mut self, root: &Module, file: &str, tokens: &[Token]) {
        // The inline modules around the place, each with where it ends.
        let mut around: Vec<(String, usize)> = Vec::new();
        let mut at = 0;
        while at < tokens.len() {
            while around.last().is_some_and(|(_, end)| at >= *end) {
                around.pop();
            }
            let mut module = root.clone();
            module.extend(around.iter().map(|(name, _)| name.clone()));
            if let Some(name) = inline_module(&tokens[at..]) {
                around.push((name.to_owned(), group_end(tokens, at + 2)));
                module.push(name.to_owned());
                self.files.insert(module, file.to_owned());
                at += 3;
            } else if tokens[at].is("use") && !follows_path(tokens, at) {
                at = self.declaration(&module, file, tokens, at + 1);
            } else if is_visibility(tokens, at) {
                at = path("in", tokens, at + 1).1;
            } else if let Some(first) = tokens[at].ident().filter(|_| !follows_path(tokens, at)) {
                let (segments, next) = path(first, tokens, at);
                if segments.len() > 1 {
                    self.paths.push(Written {
                        module,
                        segments,
                        line: tokens[at].line,
                        file: file.to_owned(),
                    });
                }
                at = next;
            } else {
                at += 1;
            }
        }
    }

    /// Notes one `use` declaration, whose tree begins at `at`; answers where it ends.
    fn declaration(&mut self, module: &Module, file: &str, tokens: &[Token], at: usize) -> usize {
        let length = tokens[at..]
            .iter()
            .position(|token| token.punct(';'))
            .unwrap_or(tokens.len() - at);
        let mut found = Vec::new();
        use_tree(&tokens[at..at + length], &[], &mut found);
        for (segments, name) in found {
            if name != "*" {
                self.imports.insert((module.clone(), name), segments.clone());
            }
            self.paths.push(Written {
                module: module.clone(),
                segments,
                line: tokens[at].line,
                file: file.to_owned(),
            });
        }
        at + length
    }

    fn edges(&self) -> Uses {
        let mut uses = Uses::new();
        for written in &self.paths {
            let entry = uses.entry(written.file.clone()).or_default();
            let Some(target) = self.resolve(&written.module, &written.segments, &mut BTreeSet::new()) else {
                continue;
            };
            if target != written.file {
                entry
                    .entry(target)
                    .and_modify(|line| *line = written.line.min(*line))
                    .or_insert(written.line);
            }
        }
        uses
    }

    /// The file that defines what a path in a module names; `None` for what is of another crate.
    fn resolve(&self, module: &Module, segments: &[String], seen: &mut BTreeSet<(Module, String)>) -> Option<String> {
        let (first, rest) = segments.split_first()?;
        match first.as_str() {
            "crate" => self.descend(Vec::new(), rest, seen),
            "self" => self.descend(module.clone(), rest, seen),
            "super" => {
                let (_, parent) = module.split_last()?;
                let parent = parent.to_vec();
                if rest.first().is_some_and(|next| next == "super") {
                    self.resolve(&parent, rest, seen)
                } else {
                    self.descend(parent, rest, seen)
                }
            }
            name => {
                let child = [module.as_slice(), &[name.to_owned()]].concat();
                if self.files.contains_key(&child) {
                    return self.descend(child, rest, seen);
                }
                let key = (module.clone(), name.to_owned());
                let import = self.imports.get(&key).filter(|_| seen.insert(key.clone()))?;
                // `use bytes;` binds the name of another crate to itself.
                let full = [import.as_slice(), rest].concat();
                self.resolve(module, &full, seen)
            }
        }
    }

    /// Follows names down from a module that is known.
    fn descend(
        &self,
        mut module: Module,
        mut rest: &[String],
        seen: &mut BTreeSet<(Module, String)>,
    ) -> Option<String> {
        while let Some((name, below)) = rest.split_first() {
            let child = [module.as_slice(), std::slice::from_ref(name)].concat();
            if self.files.contains_key(&child) {
                module = child;
                rest = below;
                continue;
            }
            let key = (module.clone(), name.clone());
            if let Some(import) = self.imports.get(&key).filter(|_| seen.insert(key)) {
                let full = [import.as_slice(), below].concat();
                // What is imported from another crate is named here all the same.
                return self
                    .resolve(&module, &full, seen)
                    .or_else(|| self.files.get(&module).cloned());
            }
            break;
        }
        self.files.get(&module).cloned()
    }
}

/// The name of a module whose body begins here.
fn inline_module(tokens: &[Token]) -> Option<&str> {
    let [word, name, body, ..] = tokens else { return None };
    if word.is("mod") && body.open('{') {
        name.ident()
    } else {
        None
    }
}

/// Whether the word here is that of `pub(in PATH)`. Whoever may see an item is not used by it.
fn is_visibility(tokens: &[Token], at: usize) -> bool {
    at >= 2 && tokens[at].is("in") && tokens[at - 1].open('(') && tokens[at - 2].is("pub")
}

/// Whether what is before the place makes it a later part of something: a path, a field, a method, a `$crate`'s word.
fn follows_path(tokens: &[Token], at: usize) -> bool {
    let before = |back: usize| at.checked_sub(back).map(|index| &tokens[index]);
    let colons = before(1).is_some_and(|token| token.punct(':')) && before(2).is_some_and(|token| token.punct(':'));
    let field = before(1).is_some_and(|token| token.punct('.')) && !before(2).is_some_and(|token| token.punct('.'));
    colons || field
}

/// The path that begins with an identifier, and where it ends.
fn path(first: &str, tokens: &[Token], at: usize) -> (Vec<String>, usize) {
    let mut segments = vec![first.to_owned()];
    let mut next = at + 1;
    while let [colon, again, word, ..] = &tokens[next..] {
        let Some(word) = word.ident().filter(|_| colon.punct(':') && again.punct(':')) else {
            break;
        };
        segments.push(word.to_owned());
        next += 3;
    }
    (segments, next)
}

/// Every path of a `use` tree with the name that it binds.
fn use_tree(tokens: &[Token], prefix: &[String], found: &mut Vec<(Vec<String>, String)>) {
    let mut segments = prefix.to_vec();
    let mut name = None;
    let mut at = 0;
    let mut written = false;
    let mut put = |segments: &mut Vec<String>, name: &mut Option<String>, written: &mut bool| {
        // `a::{self}` binds `a`.
        if segments.len() > 1 && segments.last().is_some_and(|last| last == "self") {
            segments.pop();
        }
        if let Some(name) = name.take().or_else(|| segments.last().cloned()).filter(|_| *written) {
            found.push((std::mem::replace(segments, prefix.to_vec()), name));
        }
        *segments = prefix.to_vec();
        *written = false;
    };
    let mut groups = Vec::new();
    while at < tokens.len() {
        match &tokens[at].kind {
            Kind::Punct(',') => put(&mut segments, &mut name, &mut written),
            Kind::Ident(word) if word == "as" => {
                name = tokens.get(at + 1).and_then(|token| token.ident().map(str::to_owned));
                at += 1;
            }
            Kind::Ident(word) => {
                segments.push(word.clone());
                written = true;
            }
            Kind::Punct('*') => {
                name = Some("*".to_owned());
                written = true;
            }
            Kind::Open('{') => {
                let end = group_end(tokens, at);
                groups.push((at + 1..end - 1, segments.clone()));
                segments = prefix.to_vec();
                written = false;
                at = end;
                continue;
            }
            _ => {}
        }
        at += 1;
    }
    put(&mut segments, &mut name, &mut written);
    for (range, prefix) in groups {
        use_tree(&tokens[range], &prefix, found);
    }
}
