//! Steps of a build in the form in which they are executed: checked, and with their keys in the cache of layers.

use std::collections::BTreeMap;

use bytes::Bytes;
use model::id::LayerId;
use protocol::node::LayerStack;
use sha2::{Digest as _, Sha256};

use crate::builds::recipe::Step;

/// Name of the step that is not in the recipe.
pub(super) const BASE: &str = "base";
/// Maximum length of one argument of a step, in bytes: what the kernel takes as one argument of a program.
const ARGUMENT_MAX: usize = 128 << 10;

/// One step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Instruction {
    /// A command of the shell, as a user or the current one.
    Run { command: String, user: Option<String> },
    /// Files of an uploaded archive.
    Copy {
        source: String,
        dest: String,
        owner: Option<String>,
        mode: Option<String>,
        hash: String,
    },
    /// Variables, in order.
    Env(Vec<(String, String)>),
    /// The working directory.
    Workdir(String),
    /// The user of the following steps, and whether it may become root.
    User { name: String, admin: bool },
    /// A program with its arguments, as the current user, with variables besides those of the state, which win.
    Exec {
        args: Vec<String>,
        env: BTreeMap<String, String>,
    },
    /// Files, as a Dockerfile names them.
    Files(Files),
}

/// Files to copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Files {
    pub(super) archive: Archive,
    pub(super) patterns: Vec<String>,
    pub(super) dest: String,
    pub(super) owner: Option<String>,
    pub(super) mode: Option<String>,
}

/// Where files come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Archive {
    /// An archive that the team uploaded under this hash.
    Uploaded(String),
    /// An archive.
    Inline(Bytes),
    /// Another stage or image.
    Stage(LayerStack),
}

impl Instruction {
    /// Checks a step. The error is for the client.
    pub(super) fn parse(step: &Step) -> Result<Self, String> {
        let kind = step.kind.to_ascii_uppercase();
        let args = &step.args;
        if args.iter().any(|arg| arg.contains('\0') || arg.len() > ARGUMENT_MAX) {
            return Err(format!("{kind}: an argument contains NUL or is longer than 128 KiB"));
        }
        let at = |index: usize| args.get(index).filter(|arg| !arg.is_empty()).cloned();
        let count = |least: usize, most: usize, wants: &str| match args.len() {
            length if (least..=most).contains(&length) => Ok(()),
            length => Err(format!("{kind} takes {wants}, and this one has {length} arguments")),
        };
        match kind.as_str() {
            "RUN" => {
                count(1, 2, "a command and optionally a user")?;
                Ok(Self::Run {
                    command: args[0].clone(),
                    user: at(1),
                })
            }
            "COPY" | "ADD" => {
                count(2, 4, "a source, a destination, and optionally an owner and a mode")?;
                let Some(hash) = step.files_hash.clone() else {
                    return Err(format!("{kind} needs filesHash, the hash of its uploaded files"));
                };
                Ok(Self::Copy {
                    source: args[0].clone(),
                    dest: args[1].clone(),
                    owner: at(2),
                    mode: at(3),
                    hash,
                })
            }
            "ENV" | "ARG" => {
                if args.is_empty() || !args.len().is_multiple_of(2) {
                    return Err(format!(
                        "{kind} takes pairs of a name and a value, and this one has {} arguments",
                        args.len()
                    ));
                }
                let pairs = args.chunks(2).map(|pair| (pair[0].clone(), pair[1].clone()));
                let pairs: Vec<(String, String)> = pairs.collect();
                match pairs.iter().find(|(name, _)| name.is_empty() || name.contains('=')) {
                    Some((name, _)) => Err(format!("{kind}: {name:?} cannot be the name of a variable")),
                    None => Ok(Self::Env(pairs)),
                }
            }
            "WORKDIR" => {
                count(1, 1, "a path")?;
                Ok(Self::Workdir(at(0).ok_or("WORKDIR takes a path that is not empty")?))
            }
            "USER" => {
                count(1, 2, "a name, and optionally `true` for a user who may become root")?;
                Ok(Self::User {
                    name: at(0).ok_or("USER takes a name that is not empty")?,
                    admin: at(1).as_deref() == Some("true"),
                })
            }
            _ => Err(format!(
                "{:?} is not a known step: use RUN, COPY, ADD, ENV, ARG, WORKDIR or USER",
                step.kind
            )),
        }
    }
}

/// The key of a layer in the cache: everything that its content depends on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Key(String);

impl Key {
    /// The key of the first layer.
    pub(super) fn first(parts: &[&str]) -> Self {
        Self(hash(parts))
    }

    /// The key of a step after this key.
    pub(super) fn step(&self, step: &Step) -> Self {
        let kind = step.kind.to_ascii_uppercase();
        let files = step.files_hash.as_deref().unwrap_or_default();
        let mut parts = vec![self.0.as_str(), kind.as_str(), files];
        parts.extend(step.args.iter().map(String::as_str));
        Self(hash(&parts))
    }

    /// The key of other work after this key.
    pub(super) fn with(&self, parts: &[&str]) -> Self {
        let mut all = vec![self.0.as_str()];
        all.extend(parts);
        Self(hash(&all))
    }

    pub(super) fn as_str(&self) -> &str {
        &self.0
    }
}

/// Each part with its length, so that no two lists of parts have the same hash.
fn hash(parts: &[&str]) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part.as_bytes());
    }
    LayerId::from_hash(&hash.finalize().into()).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(kind: &str, args: &[&str], hash: Option<&str>) -> Step {
        Step {
            kind: kind.to_owned(),
            args: args.iter().map(|&arg| arg.to_owned()).collect(),
            files_hash: hash.map(str::to_owned),
            force: false,
        }
    }

    #[test]
    fn steps_are_checked() {
        let parse = |kind: &str, args: &[&str], hash| Instruction::parse(&step(kind, args, hash));
        let run = |user: Option<&str>| Instruction::Run {
            command: "true".to_owned(),
            user: user.map(str::to_owned),
        };
        assert_eq!(parse("run", &["true"], None), Ok(run(None)));
        assert_eq!(parse("RUN", &["true", "root"], None), Ok(run(Some("root"))));
        assert_eq!(parse("RUN", &["true", ""], None), Ok(run(None)));
        let env = Instruction::Env(vec![("A".to_owned(), String::new())]);
        assert_eq!(parse("ARG", &["A", ""], None), Ok(env));
        let copy = Instruction::Copy {
            source: "a".to_owned(),
            dest: "b".to_owned(),
            owner: None,
            mode: Some("0644".to_owned()),
            hash: "h".to_owned(),
        };
        assert_eq!(parse("ADD", &["a", "b", "", "0644"], Some("h")), Ok(copy));
        let user = Instruction::User {
            name: "u".to_owned(),
            admin: true,
        };
        assert_eq!(parse("USER", &["u", "true"], None), Ok(user));
        for (kind, args, hash, want) in [
            ("RUN", &[][..], None, "RUN takes a command"),
            ("RUN", &["a", "b", "c"], None, "3 arguments"),
            ("RUN", &["a\0b"], None, "NUL"),
            ("COPY", &["a", "b"], None, "filesHash"),
            ("COPY", &["a"], Some("h"), "takes a source"),
            ("ENV", &[], None, "pairs"),
            ("ENV", &["A"], None, "pairs"),
            ("ENV", &["A=B", "c"], None, "name of a variable"),
            ("ENV", &["", "c"], None, "name of a variable"),
            ("WORKDIR", &[""], None, "path"),
            ("WORKDIR", &["a", "b"], None, "2 arguments"),
            ("USER", &[], None, "USER takes a name"),
            ("USER", &[""], None, "USER takes a name"),
            ("SHELL", &["a"], None, "not a known step"),
            ("", &[], None, "not a known step"),
        ] {
            let error = parse(kind, args, hash).unwrap_err();
            assert!(error.contains(want), "{kind} {args:?}: {error}");
        }
    }

    #[test]
    fn keys_depend_on_every_part_and_nothing_else() {
        let first = Key::first(&["base", "1"]);
        let all = [
            first.step(&step("RUN", &["a b"], None)),
            first.step(&step("RUN", &["a", "b"], None)),
            first.step(&step("RUN", &["a b", ""], None)),
            first.step(&step("COPY", &["a b"], None)),
            first.step(&step("RUN", &["a b"], Some("h"))),
            Key::first(&["base1", ""]).step(&step("RUN", &["a b"], None)),
        ];
        for (index, key) in all.iter().enumerate() {
            assert!(!all[..index].contains(key), "{index}");
        }
        let forced = Step {
            force: true,
            ..step("run", &["a b"], None)
        };
        assert_eq!(first.step(&forced), all[0]);
    }
}
