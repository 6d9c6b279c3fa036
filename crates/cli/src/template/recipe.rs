//! What a directory with a recipe says about its template beside the Dockerfile, and the recipes that the program carries.
//!
//! `templates/` of the repository is the one source: its files are part of the program, and a test compares the list here with
//! the directory.

use std::fs::{self, DirBuilder};
use std::io::ErrorKind;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use serde::Deserialize;

use crate::args::{AddArgs, BuildArgs};

/// The file beside the Dockerfile.
const FILE: &str = "template.toml";

/// Settings of a template that the command line can say otherwise.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Recipe {
    name: Option<String>,
    cpu: Option<u32>,
    memory: Option<u32>,
    start_cmd: Option<String>,
    ready_cmd: Option<String>,
}

impl Recipe {
    /// The recipe of a directory; an empty one if there is no file.
    ///
    /// # Errors
    /// When the file cannot be read or has something else in it.
    pub(super) fn of(directory: &Path) -> Result<Self> {
        let path = directory.join(FILE);
        match fs::read_to_string(&path) {
            Ok(text) => toml::from_str(&text).with_context(|| format!("{} is not a recipe", path.display())),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(error).with_context(|| format!("read {}", path.display())),
        }
    }

    /// Fills what the command line leaves open.
    pub(super) fn complete(self, args: &mut BuildArgs) {
        args.name = args.name.take().or(self.name);
        args.cpu = args.cpu.or(self.cpu);
        args.memory = args.memory.or(self.memory);
        args.start_cmd = args.start_cmd.take().or(self.start_cmd);
        args.ready_cmd = args.ready_cmd.take().or(self.ready_cmd);
    }
}

/// A recipe that the program carries.
#[derive(Debug)]
pub(super) struct Carried {
    /// Its directory in `templates/`.
    pub(super) name: &'static str,
    files: &'static [(&'static str, &'static str)],
}

/// Files of a recipe, by their paths in its directory.
macro_rules! files {
    ($directory:literal, $($path:literal),+ $(,)?) => {
        &[$(($path, include_str!(concat!("../../../../templates/", $directory, "/", $path)))),+]
    };
}

/// The recipes that the program carries.
const CARRIED: &[Carried] = &[
    Carried {
        name: "agents",
        files: files!(
            "agents",
            ".dockerignore",
            "Dockerfile",
            "npm/claude/package-lock.json",
            "npm/claude/package.json",
            "npm/codex/package-lock.json",
            "npm/codex/package.json",
            "npm/gemini/package-lock.json",
            "npm/gemini/package.json",
            "npm/opencode/package-lock.json",
            "npm/opencode/package.json",
            "requirements.txt",
            "set-up",
            "template.toml",
        ),
    },
    Carried {
        name: "code-interpreter",
        files: files!(
            "code-interpreter",
            ".dockerignore",
            "Dockerfile",
            "kernel/code_interpreter_kernel/__init__.py",
            "kernel/code_interpreter_kernel/__main__.py",
            "kernel/code_interpreter_kernel/formatters.py",
            "kernel/code_interpreter_kernel/output.py",
            "kernel/code_interpreter_kernel/variables.py",
            "requirements-kernel.txt",
            "requirements-server.txt",
            "server/code_interpreter/__init__.py",
            "server/code_interpreter/__main__.py",
            "server/code_interpreter/access.py",
            "server/code_interpreter/app.py",
            "server/code_interpreter/bash.py",
            "server/code_interpreter/bounds.py",
            "server/code_interpreter/child.py",
            "server/code_interpreter/contexts.py",
            "server/code_interpreter/driver.py",
            "server/code_interpreter/drivers/Cells.java",
            "server/code_interpreter/drivers/cells.R",
            "server/code_interpreter/drivers/node.js",
            "server/code_interpreter/drivers/package-lock.json",
            "server/code_interpreter/drivers/package.json",
            "server/code_interpreter/events.py",
            "server/code_interpreter/jupyter.py",
            "server/code_interpreter/kernel.py",
            "server/code_interpreter/languages.py",
            "server/code_interpreter/requests.py",
            "start",
            "template.toml",
        ),
    },
    Carried {
        name: "desktop",
        files: files!(
            "desktop",
            ".dockerignore",
            "Dockerfile",
            "files/firefox.json",
            "files/keep-awake.desktop",
            "files/mimeapps.list",
            "files/set-up",
            "files/xfwm4.xml",
            "template.toml",
        ),
    },
    Carried {
        name: "mcp-gateway",
        files: files!(
            "mcp-gateway",
            ".dockerignore",
            "Dockerfile",
            "gateway/mcp_gateway/__init__.py",
            "gateway/mcp_gateway/__main__.py",
            "gateway/mcp_gateway/configuration.py",
            "gateway/mcp_gateway/joined.py",
            "gateway/mcp_gateway/passed.py",
            "gateway/mcp_gateway/serve.py",
            "mcp-gateway",
            "requirements.txt",
            "template.toml",
        ),
    },
];

impl Carried {
    /// The recipe with a name.
    ///
    /// # Errors
    /// When there is none; with the names that there are.
    pub(super) fn named(name: &str) -> Result<&'static Self> {
        match CARRIED.iter().find(|one| one.name == name) {
            Some(found) => Ok(found),
            None => {
                let names: Vec<_> = CARRIED.iter().map(|one| one.name).collect();
                bail!(
                    "there is no ready-made template {name:?}; there is {}",
                    names.join(", ")
                )
            }
        }
    }

    /// Writes the files to a directory of their own, which is removed with what is returned.
    ///
    /// # Errors
    /// When they cannot be written.
    pub(super) fn unpack(&self) -> Result<Unpacked> {
        let path = std::env::temp_dir().join(format!("ringfence-recipe-{}", uuid::Uuid::new_v4()));
        // Nobody else may change what is built; an existing directory is refused.
        let made = DirBuilder::new().mode(0o700).create(&path);
        made.with_context(|| format!("create {}", path.display()))?;
        let unpacked = Unpacked { path };
        for (name, content) in self.files {
            let file = unpacked.path.join(name);
            let parent = file.parent().unwrap_or(&unpacked.path);
            fs::create_dir_all(parent).with_context(|| format!("create {}", parent.display()))?;
            fs::write(&file, content).with_context(|| format!("write {}", file.display()))?;
        }
        Ok(unpacked)
    }
}

/// A directory with the files of a recipe.
#[derive(Debug)]
pub(super) struct Unpacked {
    path: PathBuf,
}

impl Unpacked {
    /// What `template build` would have been told.
    ///
    /// # Errors
    /// When the recipe cannot be read.
    pub(super) fn build_args(&self, args: &AddArgs) -> Result<BuildArgs> {
        let mut build = BuildArgs {
            name: args.name.clone(),
            from_image: None,
            file: None,
            from_archive: None,
            build_arg: args.build_arg.clone(),
            target: None,
            start_cmd: None,
            ready_cmd: None,
            cpu: args.cpu,
            memory: args.memory,
            registry_login: Vec::new(),
            no_cache: args.no_cache,
            format: args.format,
            path: self.path.clone(),
        };
        Recipe::of(&self.path)?.complete(&mut build);
        Ok(build)
    }
}

impl Drop for Unpacked {
    fn drop(&mut self) {
        // What stays is in a directory for what may be removed at any time.
        let _ = fs::remove_dir_all(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

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
        for carried in CARRIED {
            let root = templates.join(carried.name);
            let (mut want, mut have) = (BTreeMap::new(), BTreeMap::new());
            found(&root, &root, &mut want);
            let unpacked = carried.unpack().unwrap();
            found(&unpacked.path, &unpacked.path, &mut have);
            assert_eq!(have.keys().collect::<Vec<_>>(), want.keys().collect::<Vec<_>>());
            assert!(have == want, "{}: a file differs", carried.name);
            let path = unpacked.path.clone();
            drop(unpacked);
            assert!(!path.exists());
        }
        assert!(
            Carried::named("nothing")
                .unwrap_err()
                .to_string()
                .contains("code-interpreter")
        );
    }

    #[test]
    fn the_command_line_comes_before_the_recipe() {
        let carried = Carried::named("code-interpreter").unwrap().unpack().unwrap();
        let args = AddArgs {
            template: "code-interpreter".to_owned(),
            name: Some("b".to_owned()),
            build_arg: Vec::new(),
            cpu: None,
            memory: Some(4096),
            no_cache: false,
            unless_present: false,
            format: crate::output::Format::Text,
        };
        let build = carried.build_args(&args).unwrap();
        assert_eq!(
            (build.name.as_deref(), build.cpu, build.memory),
            (Some("b"), Some(2), Some(4096))
        );
        assert_eq!(build.start_cmd.as_deref(), Some("/opt/code-interpreter/start"));
        assert!(build.ready_cmd.unwrap().contains(":49999/health"));
        assert!(toml::from_str::<Recipe>("nam = 'a'").is_err());
    }
}
