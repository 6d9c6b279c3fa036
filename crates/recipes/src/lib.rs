//! Recipes of templates: the settings beside a Dockerfile, and the recipes that come with the program, with archives of what
//! their Dockerfiles copy.
//!
//! The command line unpacks such a recipe and builds it as any directory; the server builds it without one. Both must make the same
//! layers, so an archive has the hash here that the command line gives to the same files.
//!
//! Invariant: this crate is pure. There is no I/O, and what it works on is in the program.

mod archive;
mod carried;

use std::collections::BTreeMap;

use dockerfile::{Kind, Plan, Source};
use serde::Deserialize;

pub use self::archive::Archive;
pub use self::carried::Carried;

/// The file with the settings.
pub const SETTINGS: &str = "template.toml";
const DOCKERFILE: &str = "Dockerfile";

/// RecipeSettings of a template that a Dockerfile cannot say.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecipeSettings {
    /// Name of the template.
    pub name: Option<String>,
    /// What sandboxes of the template are for, in one line.
    pub description: Option<String>,
    /// Cores of its sandboxes.
    pub cpu: Option<u32>,
    /// Memory of its sandboxes, in MiB.
    pub memory: Option<u32>,
    /// What sandboxes run from their start on.
    pub start_cmd: Option<String>,
    /// What says that a sandbox is ready by ending with 0.
    pub ready_cmd: Option<String>,
}

impl RecipeSettings {
    /// Reads the settings of a recipe.
    ///
    /// # Errors
    /// When the text has something else in it.
    pub fn parse(text: &str) -> Result<Self, toml::de::Error> {
        toml::from_str(text)
    }
}

/// Why a recipe that the program carries cannot be used. A test finds it before a user does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Malformed(String);

impl std::fmt::Display for Malformed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Malformed {}

/// An argument that a recipe takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Argument {
    /// Name of the argument.
    pub name: String,
    /// Value where none is given; none if there is none.
    pub default: Option<String>,
}

/// The recipes that the program carries, by name.
#[must_use]
pub fn all() -> &'static [Carried] {
    carried::CARRIED
}

/// The recipe with a name.
#[must_use]
pub fn named(name: &str) -> Option<&'static Carried> {
    all().iter().find(|one| one.name == name)
}

impl Carried {
    /// What a file of the recipe contains.
    #[must_use]
    pub fn file(&self, path: &str) -> Option<&'static str> {
        self.files.iter().find(|(name, _)| *name == path).map(|(_, text)| *text)
    }

    /// The Dockerfile.
    #[must_use]
    pub fn dockerfile(&self) -> &'static str {
        self.file(DOCKERFILE).unwrap_or_default()
    }

    /// The settings.
    ///
    /// # Errors
    /// When the recipe has none, or others.
    pub fn settings(&self) -> Result<RecipeSettings, Malformed> {
        let text = self
            .file(SETTINGS)
            .ok_or_else(|| Malformed(format!("{}: there is no {SETTINGS}", self.name)))?;
        RecipeSettings::parse(text).map_err(|error| Malformed(format!("{}: {error}", self.name)))
    }

    fn plan(&self) -> Result<Plan, Malformed> {
        // Which files are copied does not depend on the platform or on arguments.
        let plan = Plan::parse(self.dockerfile(), None, &BTreeMap::new(), "linux/amd64");
        plan.map_err(|refusal| Malformed(format!("{}: {refusal}", self.name)))
    }

    /// The arguments that the recipe takes, in their order.
    ///
    /// # Errors
    /// When the Dockerfile is malformed.
    pub fn arguments(&self) -> Result<Vec<Argument>, Malformed> {
        let document = dockerfile::Document::parse(self.dockerfile());
        let document = document.map_err(|refusal| Malformed(format!("{}: {refusal}", self.name)))?;
        let mut found: Vec<Argument> = Vec::new();
        for instruction in document.instructions {
            let Kind::Arg(arguments) = instruction.kind else {
                continue;
            };
            for argument in arguments {
                if found.iter().all(|other| other.name != argument.name) {
                    let dockerfile::Argument { name, default } = argument;
                    let default = default.map(|text| text.trim_matches('"').to_owned());
                    found.push(Argument { name, default });
                }
            }
        }
        Ok(found)
    }

    /// What the instructions of the Dockerfile copy from the recipe, by their lines.
    ///
    /// # Errors
    /// When the Dockerfile is malformed, or names what the recipe has not.
    pub fn archives(&self) -> Result<BTreeMap<usize, Archive>, Malformed> {
        let mut archives = BTreeMap::new();
        let plan = self.plan()?;
        for instruction in plan.stages.iter().flat_map(|stage| &stage.instructions) {
            let Kind::Copy(copy) = &instruction.kind else {
                continue;
            };
            if copy.from.is_some() {
                continue;
            }
            let mut chosen = BTreeMap::new();
            for source in &copy.sources {
                if let Source::Path(path) = source {
                    self.choose(path, &mut chosen)?;
                }
            }
            if !chosen.is_empty() {
                archives.insert(instruction.line, Archive::of(&chosen));
            }
        }
        Ok(archives)
    }

    /// Adds a file, or a directory with everything below it: contents by their names, none for a directory.
    fn choose(&self, path: &str, chosen: &mut BTreeMap<&'static str, Option<&'static str>>) -> Result<(), Malformed> {
        let mut is_there = false;
        for &(name, text) in self.files {
            if name == path {
                chosen.insert(name, Some(text));
                is_there = true;
                continue;
            }
            if name.strip_prefix(path).is_none_or(|rest| !rest.starts_with('/')) {
                continue;
            }
            chosen.insert(name, Some(text));
            is_there = true;
            let directories = name.match_indices('/').map(|(at, _)| &name[..at]);
            for directory in directories.filter(|directory| directory.len() >= path.len()) {
                chosen.insert(directory, None);
            }
        }
        if is_there {
            Ok(())
        } else {
            Err(Malformed(format!("{}: there is no {path} in the recipe", self.name)))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs;
    use std::path::Path;

    use super::*;

    /// The files of a directory with their content.
    fn found(root: &Path, directory: &Path, into: &mut BTreeMap<String, String>) {
        for entry in fs::read_dir(directory).unwrap() {
            let entry = entry.unwrap();
            let name = entry.file_name().into_string().unwrap();
            let path = entry.path();
            if path.is_dir() && !["tests", "__pycache__", "node_modules"].contains(&name.as_str()) {
                found(root, &path, into);
            } else if path.is_file() && name != "README.md" {
                let short = path.strip_prefix(root).unwrap().to_str().unwrap().to_owned();
                into.insert(short, fs::read_to_string(&path).unwrap());
            }
        }
    }

    #[test]
    fn everything_of_each_recipe_is_carried() {
        let templates = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../templates");
        let mut directories: Vec<_> = fs::read_dir(&templates)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        directories.sort();
        let names: Vec<_> = all().iter().map(|one| one.name).collect();
        assert_eq!(names, directories);
        for carried in all() {
            let root = templates.join(carried.name);
            let mut want = BTreeMap::new();
            found(&root, &root, &mut want);
            let pairs = carried
                .files
                .iter()
                .map(|(name, text)| ((*name).to_owned(), (*text).to_owned()));
            let have: BTreeMap<String, String> = pairs.collect();
            assert_eq!(have.keys().collect::<Vec<_>>(), want.keys().collect::<Vec<_>>());
            assert!(have == want, "{}: a file differs", carried.name);
        }
        assert!(named("nothing").is_none());
    }

    #[test]
    fn each_recipe_says_what_it_needs() {
        for carried in all() {
            let settings = carried.settings().unwrap();
            assert!(
                settings.name.is_some() && settings.description.is_some(),
                "{}",
                carried.name
            );
            assert!(settings.cpu.is_some() && settings.memory.is_some(), "{}", carried.name);
            assert!(!carried.archives().unwrap().is_empty(), "{}", carried.name);
            assert_eq!(carried.arguments().unwrap()[0].name, "BASE");
        }
        let arguments = named("agents").unwrap().arguments().unwrap();
        let want = Argument {
            name: "AGENTS".to_owned(),
            default: Some("claude codex gemini".to_owned()),
        };
        assert!(arguments.contains(&want), "{arguments:?}");
        assert!(RecipeSettings::parse("nam = 'a'").is_err());
    }

    #[test]
    fn directories_are_copied_with_what_is_below() {
        let mut chosen = BTreeMap::new();
        named("agents").unwrap().choose("npm", &mut chosen).unwrap();
        let names: Vec<_> = chosen.keys().copied().collect();
        assert_eq!(names[..3], ["npm", "npm/claude", "npm/claude/package-lock.json"]);
        assert_eq!(chosen["npm/claude"], None);
        assert!(named("agents").unwrap().choose("np", &mut chosen).is_err());
    }
}
