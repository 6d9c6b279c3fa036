//! What a directory with a recipe says about its template beside the Dockerfile, and the recipes that the program carries, as directories.

use std::fs::{self, DirBuilder};
use std::io::ErrorKind;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use recipes::{Carried, RecipeSettings, SETTINGS};

use crate::args::{AddArgs, BuildArgs};

/// What a directory says of its template.
#[derive(Debug, Default)]
pub(super) struct Recipe(RecipeSettings);

impl Recipe {
    /// The recipe of a directory; an empty one if there is no file.
    ///
    /// # Errors
    /// When the file cannot be read or has something else in it.
    pub(super) fn of(directory: &Path) -> Result<Self> {
        let path = directory.join(SETTINGS);
        match fs::read_to_string(&path) {
            Ok(text) => RecipeSettings::parse(&text)
                .map(Self)
                .with_context(|| format!("{} is not a recipe", path.display())),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(error).with_context(|| format!("read {}", path.display())),
        }
    }

    /// Fills what the command line leaves open.
    pub(super) fn complete(self, args: &mut BuildArgs) {
        args.name = args.name.take().or(self.0.name);
        args.cpu = args.cpu.or(self.0.cpu);
        args.memory = args.memory.or(self.0.memory);
        args.start_cmd = args.start_cmd.take().or(self.0.start_cmd);
        args.ready_cmd = args.ready_cmd.take().or(self.0.ready_cmd);
    }
}

/// The recipe with a name.
///
/// # Errors
/// When there is none; with the names that there are.
pub(super) fn named(name: &str) -> Result<&'static Carried> {
    match recipes::named(name) {
        Some(found) => Ok(found),
        None => {
            let names: Vec<_> = recipes::all().iter().map(|one| one.name).collect();
            bail!(
                "there is no ready-made template {name:?}; there is {}",
                names.join(", ")
            )
        }
    }
}

/// Writes the files of a recipe to a directory of their own, which is removed with what is returned.
///
/// # Errors
/// When they cannot be written.
pub(super) fn unpack(carried: &Carried) -> Result<Unpacked> {
    let path = std::env::temp_dir().join(format!("ringfence-recipe-{}", uuid::Uuid::new_v4()));
    // Nobody else may change what is built; an existing directory is refused.
    let made = DirBuilder::new().mode(0o700).create(&path);
    made.with_context(|| format!("create {}", path.display()))?;
    let unpacked = Unpacked { path };
    for (name, content) in carried.files {
        let file = unpacked.path.join(name);
        let parent = file.parent().unwrap_or(&unpacked.path);
        fs::create_dir_all(parent).with_context(|| format!("create {}", parent.display()))?;
        fs::write(&file, content).with_context(|| format!("write {}", file.display()))?;
    }
    Ok(unpacked)
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
            base_archive: args.base_archive.clone(),
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
    use super::*;
    use crate::template::context::Context;
    use dockerfile::{Kind, Plan};

    #[test]
    fn what_is_unpacked_makes_the_same_layers_as_a_build_of_the_server() {
        for carried in recipes::all() {
            let unpacked = unpack(carried).unwrap();
            let file = unpacked.path.join("Dockerfile");
            let context = Context::open(&unpacked.path, &file).unwrap();
            let plan = Plan::parse(carried.dockerfile(), None, &[].into(), "linux/amd64").unwrap();
            let mut hashes = Vec::new();
            for instruction in plan.stages.iter().flat_map(|stage| &stage.instructions) {
                if let Kind::Copy(copy) = &instruction.kind
                    && let Some((_, hash)) = context.archive(copy, plan.escape).unwrap()
                {
                    hashes.push((instruction.line, hash));
                }
            }
            let archives = carried.archives().unwrap().into_iter();
            let want: Vec<_> = archives.map(|(line, archive)| (line, archive.hash)).collect();
            assert_eq!(hashes, want, "{}", carried.name);
            let path = unpacked.path.clone();
            drop(unpacked);
            assert!(!path.exists());
        }
        assert!(named("nothing").unwrap_err().to_string().contains("code-interpreter"));
    }

    #[test]
    fn the_command_line_comes_before_the_recipe() {
        let carried = unpack(named("code-interpreter").unwrap()).unwrap();
        let args = AddArgs {
            template: "code-interpreter".to_owned(),
            name: Some("b".to_owned()),
            build_arg: Vec::new(),
            base_archive: None,
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
    }
}
