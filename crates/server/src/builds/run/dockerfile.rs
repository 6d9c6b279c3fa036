//! Running a Dockerfile: the stages that its target needs, in order, each on layers of its own.
//!
//! Words are expanded when their instruction runs, because variables of an image are known only then.

use std::collections::BTreeMap;

use bytes::Bytes;
use dockerfile::{Argument, Base, Command, Copy, Instruction as Line, Kind, Origin, Plan, Source as From};
use protocol::node::LayerStack;

use super::command::{SHELL, Startup, args_of};
use super::progress::{Progressing, short};
use super::state::{PATHS, USER};
use super::step::{Archive, BASE, Files, Instruction};
use crate::builds::recipe::{BuildFailure, DockerfileSource, Source};

/// The working directory of sandboxes, unless the Dockerfile names one.
const HOME: &str = "/home/user";
/// Maximum length of all words of an instruction, and of all variables, in bytes. Programs take little more.
const WORDS_MAX: usize = 512 << 10;
/// Maximum length of an instruction in the log, in characters.
const SHOWN_MAX: usize = 200;

/// A stage in progress, or one that is finished.
#[derive(Clone)]
struct Stage<'a> {
    progress: Progressing<'a>,
    shell: Vec<String>,
    /// What its sandboxes run from their start on.
    startup: Startup,
    has_user: bool,
    has_workdir: bool,
    /// Arguments that were declared.
    args: BTreeMap<String, String>,
}

/// What the instructions of all stages share.
struct Run<'a, 'b> {
    plan: &'b Plan,
    source: &'b DockerfileSource,
    /// The state before the first instruction.
    first: Progressing<'a>,
    /// Finished stages.
    stages: Vec<Option<Stage<'a>>>,
    /// Images that were copied from.
    images: BTreeMap<String, Progressing<'a>>,
    number: usize,
    count: usize,
}

/// Builds the target of a Dockerfile. The result is its command.
pub(super) async fn run(
    progressing: &mut Progressing<'_>,
    source: &DockerfileSource,
) -> Result<Option<String>, BuildFailure> {
    let plan = source
        .plan()
        .map_err(|refusal| BuildFailure::at(BASE, refusal.to_string()))?;
    for note in &plan.notes {
        progressing.log(BASE, format!("line {}: {}", note.line, note.message));
    }
    let needed = plan.needed();
    let stages = plan.stages.iter().zip(&needed).filter(|(_, needed)| **needed);
    let mut run = Run {
        plan: &plan,
        source,
        first: progressing.clone(),
        stages: Vec::new(),
        images: BTreeMap::new(),
        number: 0,
        count: stages.map(|(stage, _)| stage.instructions.len()).sum(),
    };
    for (index, is_needed) in needed.into_iter().enumerate() {
        let stage = if is_needed {
            Some(Box::pin(run.stage(index)).await?)
        } else {
            None
        };
        run.stages.push(stage);
    }
    let Some(Some(last)) = run.stages.into_iter().nth(plan.target) else {
        return Err(BuildFailure::internal());
    };
    let command = last.start_command();
    if last.startup.ignores_image() {
        let line =
            "the entry point of the image is not run: a CMD or ENTRYPOINT in the Dockerfile makes it the start command";
        last.progress.log(BASE, line.to_owned());
    }
    let mut state = last.progress;
    if !last.has_user {
        USER.clone_into(&mut state.state.user);
    }
    if !last.has_workdir {
        state.state.workdir = Some(HOME.to_owned());
    }
    *progressing = state;
    Ok(command)
}

/// The failure of a line.
fn at(line: usize, failure: BuildFailure) -> BuildFailure {
    BuildFailure {
        message: format!("line {line}: {}", failure.message),
        step: failure.step,
    }
}

impl Stage<'_> {
    /// The start command. Those run in a login shell, which may set another path than that of the image.
    fn start_command(&self) -> Option<String> {
        let command = Command::Exec(self.startup.args()?).to_shell();
        let path = self.progress.state.envs().remove("PATH");
        Some(match path {
            Some(path) => {
                let path = Command::Exec(vec![format!("PATH={path}")]).to_shell();
                format!("export {path}\n{command}")
            }
            None => command,
        })
    }

    fn lookup(&self, name: &str) -> Option<&str> {
        let state = &self.progress.state;
        let value = state.env.get(name).or_else(|| self.args.get(name));
        // Where nothing sets it, commands have this one, and so has what is put in front of it.
        value.map(String::as_str).or_else(|| (name == "PATH").then_some(PATHS))
    }
}

impl<'a> Run<'a, '_> {
    async fn stage(&mut self, index: usize) -> Result<Stage<'a>, BuildFailure> {
        let plan = self.plan;
        let stage = &plan.stages[index];
        let mut current = match &stage.base {
            Base::Stage(other) => {
                let Some(Some(other)) = self.stages.get(*other) else {
                    return Err(BuildFailure::internal());
                };
                Stage {
                    args: plan.predefined(),
                    startup: other.startup.inherited(),
                    ..other.clone()
                }
            }
            base => {
                let source = match base {
                    Base::Image(reference) => Source::image(reference, None),
                    Base::Archive(hash) => Source::Archive { hash: hash.clone() },
                    _ => Source::Scratch,
                };
                let mut progress = self.first.clone();
                progress
                    .load(&source, &self.source.registries)
                    .await
                    .map_err(|failure| at(stage.line, failure))?;
                progress.become_user("root");
                progress.state.workdir = Some("/".to_owned());
                Stage {
                    startup: Startup::of_image(&progress.state.entrypoint),
                    progress,
                    shell: SHELL.map(str::to_owned).to_vec(),
                    has_user: false,
                    has_workdir: false,
                    args: plan.predefined(),
                }
            }
        };
        current.progress.learn(&self.first);
        for line in &stage.instructions {
            self.number += 1;
            let done = Box::pin(self.line(&mut current, index, line)).await;
            done.map_err(|failure| at(line.line, failure))?;
        }
        self.first.learn(&current.progress);
        Ok(current)
    }

    async fn line(&mut self, stage: &mut Stage<'a>, index: usize, line: &Line) -> Result<(), BuildFailure> {
        let name = self.number.to_string();
        let name = name.as_str();
        let prefix = format!("[builder {}/{}]", self.number, self.count);
        let shown: String = line.text.chars().take(SHOWN_MAX).collect();
        let expand = |stage: &Stage<'_>, word: &str| {
            let expanded = dockerfile::expand(word, self.plan.escape, &|name| stage.lookup(name));
            expanded.map_err(|error| BuildFailure::at(name, error.to_string()))
        };
        let instruction = match &line.kind {
            Kind::From { .. } => return Err(BuildFailure::internal()),
            Kind::Arg(arguments) => {
                for argument in arguments {
                    let default = argument.default.as_deref().map(|default| expand(stage, default));
                    self.argument(stage, argument, default.transpose()?);
                    within(name, stage.args.iter().map(|(name, value)| name.len() + value.len()))?;
                }
                stage.progress.log(name, format!("{prefix} {shown}"));
                return Ok(());
            }
            Kind::Env(pairs) => {
                // All values see the variables from before the instruction.
                let mut expanded: Vec<(String, String)> = Vec::with_capacity(pairs.len());
                let mut bytes = 0;
                for (variable, value) in pairs {
                    let (variable, value) = (expand(stage, variable)?, expand(stage, value)?);
                    bytes += variable.len() + value.len();
                    within(name, [bytes].into_iter())?;
                    expanded.push((variable, value));
                }
                for (variable, value) in expanded {
                    if variable.is_empty() || variable.contains(['=', '\0']) {
                        let shown: String = variable.chars().take(SHOWN_MAX).collect();
                        let why = format!("{shown:?} cannot be the name of a variable");
                        return Err(BuildFailure::at(name, why));
                    }
                    stage.progress.key = stage.progress.key.with(&["ENV", &variable, &value]);
                    stage.progress.state.env.insert(variable, value);
                }
                let env = &stage.progress.state.env;
                within(name, env.iter().map(|(name, value)| name.len() + value.len()))?;
                stage
                    .progress
                    .log_variables(name, format!("{prefix} {shown}"), &[])
                    .await;
                return Ok(());
            }
            Kind::Shell(shell) => {
                stage.shell.clone_from(shell);
                stage.progress.log(name, format!("{prefix} {shown}"));
                return Ok(());
            }
            Kind::Cmd(command) => {
                stage.startup.set_cmd(args_of(&stage.shell, command));
                stage.progress.log(name, format!("{prefix} {shown}"));
                return Ok(());
            }
            Kind::Entrypoint(command) => {
                stage.startup.set_entrypoint(args_of(&stage.shell, command));
                stage.progress.log(name, format!("{prefix} {shown}"));
                return Ok(());
            }
            Kind::User(word) => {
                let user = user(&expand(stage, word)?).map_err(|why| BuildFailure::at(name, why))?;
                stage.has_user = true;
                stage.progress.key = stage.progress.key.with(&["USER", &user]);
                // There is nothing to create or to look for.
                if user == "root" || user.split(':').all(is_number) {
                    stage.progress.state.user = user;
                    stage.progress.log(name, format!("{prefix} {shown}"));
                    return Ok(());
                }
                Instruction::User {
                    name: user,
                    admin: false,
                }
            }
            Kind::Workdir(word) => {
                let path = expand(stage, word)?;
                if path.is_empty() {
                    return Err(BuildFailure::at(
                        name,
                        "WORKDIR is empty after its variables were replaced",
                    ));
                }
                stage.has_workdir = true;
                stage.progress.key = stage.progress.key.with(&["WORKDIR", &path]);
                Instruction::Workdir(path)
            }
            Kind::Run(command) => run_command(stage, command),
            Kind::Copy(copy) => {
                let origin = self.plan.origin(index, line);
                let origin = origin.map_err(|refusal| BuildFailure::at(name, refusal.message))?;
                let from = match origin {
                    Some(origin) => Some(self.origin(origin).await?),
                    None => None,
                };
                // Files of the context and heredocs are in archives of their own.
                if let (None, Some((files, heredocs))) = (&from, halves(copy)) {
                    let dest = expand(stage, &copy.dest)?;
                    if !dest.ends_with('/') && dest != "." {
                        let why = format!("several sources take a directory as their destination: write {dest}/");
                        return Err(BuildFailure::at(name, why));
                    }
                    let first = self.copy(stage, name, line.line, &files, None)?;
                    let shown = format!("{prefix} {shown} [{}]", short(stage.progress.key.as_str()));
                    stage.progress.perform(name, &prefix, shown, &first).await?;
                    self.copy(stage, name, line.line, &heredocs, None)?
                } else {
                    self.copy(stage, name, line.line, copy, from)?
                }
            }
        };
        let shown = format!("{prefix} {shown} [{}]", short(stage.progress.key.as_str()));
        stage.progress.perform(name, &prefix, shown, &instruction).await
    }

    fn argument(&self, stage: &mut Stage<'_>, argument: &Argument, default: Option<String>) {
        if let Some(value) = self.plan.argument(argument, default) {
            stage.progress.key = stage.progress.key.with(&["ARG", &argument.name, &value]);
            stage.args.insert(argument.name.clone(), value);
        }
    }

    /// The layers of another stage or of an image, and the key of what they are.
    async fn origin(&mut self, origin: Origin) -> Result<(LayerStack, String), BuildFailure> {
        let progress = match origin {
            Origin::Stage(index) => match self.stages.get(index) {
                Some(Some(stage)) => &stage.progress,
                _ => return Err(BuildFailure::internal()),
            },
            Origin::Image(reference) => {
                if !self.images.contains_key(&reference) {
                    let mut progress = self.first.clone();
                    let source = Source::image(&reference, None);
                    progress.load(&source, &self.source.registries).await?;
                    self.first.learn(&progress);
                    self.images.insert(reference.clone(), progress);
                }
                &self.images[&reference]
            }
        };
        Ok((progress.state.stack(), progress.key.as_str().to_owned()))
    }

    fn copy(
        &self,
        stage: &mut Stage<'_>,
        name: &str,
        line: usize,
        copy: &Copy,
        from: Option<(LayerStack, String)>,
    ) -> Result<Instruction, BuildFailure> {
        let fail = |why: String| BuildFailure::at(name, why);
        let expand = |word: &str| {
            let expanded = dockerfile::expand(word, self.plan.escape, &|name| stage.lookup(name));
            let expanded = expanded.map_err(|error| fail(error.to_string()))?;
            if expanded.contains('\0') {
                Err(fail("contains NUL".to_owned()))
            } else {
                Ok(expanded)
            }
        };
        let optional = |word: &Option<String>| word.as_deref().map(expand).transpose();
        let (mut patterns, mut inline) = (Vec::new(), Vec::new());
        let mut bytes = 0;
        for source in &copy.sources {
            match source {
                From::Path(word) => {
                    let pattern = expand(word)?;
                    bytes += pattern.len();
                    within(name, [bytes].into_iter())?;
                    patterns.push(pattern);
                }
                From::File {
                    name,
                    content,
                    is_expanded,
                } => {
                    let content = if *is_expanded {
                        dockerfile::expand_text(content, &|name| stage.lookup(name))
                            .map_err(|error| fail(error.to_string()))?
                    } else {
                        content.clone()
                    };
                    inline.push((name.clone(), content));
                }
            }
        }
        let (archive, key) = match from {
            Some((stack, key)) => (Archive::Stage(stack), key),
            None if !patterns.is_empty() => {
                let hash = self.source.files.get(&line).ok_or_else(|| {
                    fail(format!(
                        "no files were uploaded for {}: this flow of building uploads none; use `ringfence template build` or the builder of an SDK",
                        patterns.join(" ").chars().take(SHOWN_MAX).collect::<String>()
                    ))
                })?;
                (Archive::Uploaded(hash.clone()), hash.clone())
            }
            None => {
                let bytes = archive(&inline).ok_or_else(|| fail("a name of a file is too long".to_owned()))?;
                patterns = inline.into_iter().map(|(name, _)| escaped(&name)).collect();
                let key = super::step::Key::first(&[&String::from_utf8_lossy(&bytes)]);
                (Archive::Inline(bytes), key.as_str().to_owned())
            }
        };
        let dest = expand(&copy.dest)?;
        let (owner, mode) = (optional(&copy.chown)?, optional(&copy.chmod)?);
        // Docker's default, whoever the current user is. Other file systems keep their owners.
        let owner = owner.or_else(|| (!matches!(archive, Archive::Stage(_))).then(|| "0:0".to_owned()));
        let mut parts = vec!["COPY", &key, &dest];
        parts.push(owner.as_deref().unwrap_or_default());
        parts.push(mode.as_deref().unwrap_or_default());
        parts.extend(patterns.iter().map(String::as_str));
        let key = stage.progress.key.with(&parts);
        stage.progress.key = key;
        Ok(Instruction::Files(Files {
            archive,
            patterns,
            dest,
            owner,
            mode,
        }))
    }
}

/// Checks the size of all words of an instruction, or of all variables, together.
fn within(step: &str, lengths: impl Iterator<Item = usize>) -> Result<(), BuildFailure> {
    if lengths.sum::<usize>() > WORDS_MAX {
        let why = format!("more than {WORDS_MAX} bytes of variables or sources");
        Err(BuildFailure::at(step, why))
    } else {
        Ok(())
    }
}

/// A copy of files and of heredocs as two copies; none if it has one kind of source.
fn halves(copy: &Copy) -> Option<(Copy, Copy)> {
    let (files, heredocs): (Vec<From>, Vec<From>) = copy
        .sources
        .iter()
        .cloned()
        .partition(|source| matches!(source, From::Path(_)));
    let half = |sources| Copy {
        sources,
        ..copy.clone()
    };
    (!files.is_empty() && !heredocs.is_empty()).then(|| (half(files), half(heredocs)))
}

/// A name that is no pattern.
fn escaped(name: &str) -> String {
    let mut escaped = String::new();
    for c in name.chars() {
        if matches!(c, '*' | '?' | '[' | '\\') {
            escaped.push('\\');
        }
        escaped.push(c);
    }
    escaped
}

/// The user of a USER instruction: `user[:group]`, each a name or a number.
fn user(text: &str) -> Result<String, String> {
    if text.len() > SHOWN_MAX {
        return Err(format!("USER takes a name of at most {SHOWN_MAX} bytes"));
    }
    let (name, group) = match text.split_once(':') {
        Some((name, group)) => (name, Some(group)),
        None => (text, None),
    };
    if name.is_empty() {
        return Err("USER is empty after its variables were replaced".to_owned());
    }
    if group.is_some_and(str::is_empty) {
        return Err(format!(
            "USER {text}: write a group after the colon, or leave the colon out"
        ));
    }
    let is_root = |word: &str| matches!(word, "root" | "0");
    if is_root(name) && group.is_none_or(is_root) {
        return Ok("root".to_owned());
    }
    if let Some(id) = [Some(name), group]
        .into_iter()
        .flatten()
        .find(|word| is_number(word) && !has_id(word))
    {
        return Err(format!(
            "USER {text}: a sandbox has the ids 0 to {ID_MAX}, and {id} is none of them"
        ));
    }
    // A user has a group with its name, so they mean the same, and the user stays a member of other groups.
    Ok(if group == Some(name) && !is_number(name) {
        name
    } else {
        text
    }
    .to_owned())
}

/// The largest id of a user or a group that a sandbox has.
const ID_MAX: u32 = 65_535;

fn is_number(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_digit())
}

fn has_id(number: &str) -> bool {
    number.parse().is_ok_and(|id: u32| id <= ID_MAX)
}

fn run_command(stage: &mut Stage<'_>, command: &Command) -> Instruction {
    let args = args_of(&stage.shell, command);
    let mut parts = vec!["RUN"];
    parts.extend(args.iter().map(String::as_str));
    let key = stage.progress.key.with(&parts);
    stage.progress.key = key;
    Instruction::Exec {
        args,
        env: stage.args.clone(),
    }
}

/// Length of a block of an archive, in bytes.
const BLOCK: usize = 512;

/// A tar archive of small files; none if a name is too long for it.
fn archive(files: &[(String, String)]) -> Option<Bytes> {
    let mut archive = Vec::new();
    for (name, content) in files {
        let mut header = [0; BLOCK];
        header
            .get_mut(..100)?
            .get_mut(..name.len())?
            .copy_from_slice(name.as_bytes());
        for (at, text) in [
            (100, "0000644\0".to_owned()),
            (108, "0000000\0".to_owned()),
            (116, "0000000\0".to_owned()),
            (124, format!("{:011o}\0", content.len())),
            (136, "00000000000\0".to_owned()),
            // Counted as blanks in the sum.
            (148, "        ".to_owned()),
            (156, "0".to_owned()),
            (257, "ustar\x0000".to_owned()),
        ] {
            header[at..at + text.len()].copy_from_slice(text.as_bytes());
        }
        let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        archive.extend_from_slice(&header);
        archive.extend_from_slice(content.as_bytes());
        archive.resize(archive.len().next_multiple_of(BLOCK), 0);
    }
    archive.resize(archive.len() + 2 * BLOCK, 0);
    Some(archive.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_are_names_or_numbers() {
        for (text, want) in [
            ("root", Ok("root")),
            ("0:0", Ok("root")),
            ("app", Ok("app")),
            ("app:app", Ok("app")),
            ("app:staff", Ok("app:staff")),
            ("1000", Ok("1000")),
            ("1000:1000", Ok("1000:1000")),
            ("1000:staff", Ok("1000:staff")),
            ("root:staff", Ok("root:staff")),
            ("0:5", Ok("0:5")),
            ("65535:65535", Ok("65535:65535")),
            ("65536", Err("ids 0 to 65535, and 65536")),
            ("app:65536", Err("ids 0 to 65535, and 65536")),
            ("4294967295", Err("4294967295 is none")),
            ("99999999999999999999", Err("is none")),
            ("app:", Err("write a group")),
            (":app", Err("empty")),
            ("", Err("empty")),
        ] {
            match (user(text), want) {
                (Ok(name), Ok(want)) => assert_eq!(name, want),
                (Err(why), Err(want)) => assert!(why.contains(want), "{why}"),
                (got, _) => panic!("{text}: {got:?}"),
            }
        }
    }

    #[test]
    fn names_are_no_patterns() {
        assert_eq!(escaped("a*[b"), "a\\*\\[b");
    }

    #[test]
    fn archives_have_names_and_contents() {
        let bytes = archive(&[("a".to_owned(), "x".repeat(513)), ("b".to_owned(), String::new())]).unwrap();
        assert_eq!(bytes.len(), BLOCK * (1 + 2 + 1 + 2));
        assert_eq!(&bytes[257..265], b"ustar\x0000");
        assert_eq!(&bytes[3 * BLOCK..3 * BLOCK + 2], b"b\0");
        assert_eq!(archive(&[("n".repeat(101), String::new())]), None);
    }
}
