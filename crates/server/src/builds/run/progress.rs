//! Progress of a build: the state so far, and how it changes.

use std::collections::{BTreeMap, BTreeSet};

use model::id::LayerId;
use model::log::Level;
use model::secret::Secret;
use protocol::image::{
    CopyJob, Credentials, ImageReport, JobSecret, Progress, ProvisionJob, ProvisionReport, PullJob, Transfer,
    UnpackJob, UnpackLimits,
};
use protocol::node::{Committed, Image};
use protocol::process::ProcessConfig;

use super::expand::expand;
use super::machine::Machine;
use super::packages::Lacking;
use super::state::{State, USER};
use super::step::{Archive, BASE, Files, Instruction, Key};
use crate::builds::context::BuildContext;
use crate::builds::recipe::{BuildFailure, BuildSpec, Job, Logins, Registry, Source, Step};
use crate::telemetry::traced;

/// Changed when the same steps would make other layers than before.
const FORMAT: &str = "1";
/// Format of the keys of what an image becomes before the first step.
const IMAGE_FORMAT: &str = "2";
/// Where images are unpacked.
const IMPORTED: &str = "/mnt";
/// Where the file system is that another one copies from.
const COPIED_FROM: &str = "/media";
/// Where programs may write much: on the disk of the sandbox.
const WORK: &str = "/var/tmp";
/// Where files of a Dockerfile are uploaded to.
const FILES: &str = "/var/tmp/ringfence-files";
/// Maximum length of all variables together, in bytes: programs take little more.
const VARIABLES_MAX: usize = 1 << 20;
/// Maximum length of a path that a step writes out, in bytes.
const PATH_MAX: usize = 4096;

/// Creates a directory, where `$2` owns what is created, or `$3` where there is no user with that id, and writes its
/// physical path.
const MAKE_DIRECTORY: &str = r#"set -e
first= next=$1
while [ ! -e "$next" ]; do first=$next; next=$(dirname -- "$next"); done
if [ -n "$first" ]; then
  mkdir -p -- "$1"
  chown -R -- "$2" "$first" 2>/dev/null || chown -R -- "$3" "$first"
fi
cd -- "$1"
pwd -P"#;

/// The state so far, with what decides whether the next layer is in the cache.
#[derive(Clone)]
pub(super) struct Progressing<'a> {
    context: &'a BuildContext,
    job: &'a Job,
    pub(super) state: State,
    pub(super) key: Key,
    /// Whether the cache is not asked any more.
    force: bool,
    /// Layers that the node has.
    present: BTreeSet<LayerId>,
    /// Space that layers take, in bytes, as far as it is known.
    bytes: BTreeMap<LayerId, u64>,
}

impl<'a> Progressing<'a> {
    /// The beginning of a build: nothing above `base`.
    pub(super) async fn begin(context: &'a BuildContext, job: &'a Job) -> Result<Self, BuildFailure> {
        let layers = context.node.layers().await;
        let layers = layers.map_err(|error| BuildFailure::at(BASE, format!("the node does not answer: {error}")))?;
        let empty = State {
            base: true,
            layers: Vec::new(),
            env: BTreeMap::new(),
            user: USER.to_owned(),
            workdir: None,
            entrypoint: Vec::new(),
        };
        Ok(Self {
            context,
            job,
            state: empty,
            key: Key::first(&[FORMAT, "base"]),
            force: job.recipe.force,
            present: layers.iter().map(|layer| layer.id.clone()).collect(),
            bytes: layers.into_iter().map(|layer| (layer.id, layer.bytes)).collect(),
        })
    }

    /// The source of the recipe: the first step, which clients call `base`. An image without credentials of its own is
    /// fetched with those of `logins` for its registry.
    pub(super) async fn load(&mut self, source: &Source, logins: &Logins) -> Result<(), BuildFailure> {
        let span = self.context.begin_part("build.source");
        traced(span, self.load_source(source, logins)).await
    }

    async fn load_source(&mut self, source: &Source, logins: &Logins) -> Result<(), BuildFailure> {
        match source {
            Source::Base => self.log(BASE, "[base] FROM base".to_owned()),
            Source::Template { spec, .. } => self.inherit(spec),
            Source::Image { reference, registry } => self.import(reference, registry.as_ref(), logins).await?,
            Source::Archive { hash } => self.unpack(hash).await?,
            Source::Scratch => self.scratch().await?,
            // It has sources of its own.
            Source::Dockerfile(_) => return Err(BuildFailure::internal()),
        }
        Ok(())
    }

    /// Makes another user run the steps, where the layers do not determine the user.
    pub(super) fn become_user(&mut self, user: &str) {
        user.clone_into(&mut self.state.user);
        self.key = Key::first(&[self.key.as_str(), user]);
    }

    /// Takes over which layers the node has, from another stage of the same build.
    pub(super) fn learn(&mut self, other: &Self) {
        self.present.extend(other.present.iter().cloned());
        self.bytes
            .extend(other.bytes.iter().map(|(layer, bytes)| (layer.clone(), *bytes)));
    }

    /// Space that the layers of the state take, in bytes. Those of a build of an earlier version may have come to the node meanwhile.
    pub(super) async fn layer_bytes(&self) -> BTreeMap<LayerId, u64> {
        let own = &self.state.layers;
        let known = own.iter().filter_map(|layer| self.bytes.get_key_value(layer));
        let mut known: BTreeMap<LayerId, u64> = known.map(|(layer, bytes)| (layer.clone(), *bytes)).collect();
        if own.iter().any(|layer| !known.contains_key(layer)) {
            let there = self.context.node.layers().await.unwrap_or_default();
            let there = there.into_iter().filter(|layer| own.contains(&layer.id));
            known.extend(there.map(|layer| (layer.id, layer.bytes)));
        }
        known
    }

    pub(super) fn log(&self, step: &str, line: String) {
        self.context.log(Level::Info, Some(step), line);
    }

    fn inherit(&mut self, spec: &BuildSpec) {
        let known = spec.layer_bytes.iter();
        self.bytes.extend(known.map(|(layer, bytes)| (layer.clone(), *bytes)));
        (self.state.base, self.state.layers) = match &spec.image {
            Image::Base | Image::Import | Image::Copy { .. } => (true, Vec::new()),
            Image::Layers { base, layers } => (*base, layers.clone()),
        };
        self.state.env.clone_from(&spec.env);
        self.state.workdir.clone_from(&spec.workdir);
        let layers: Vec<&str> = self.state.layers.iter().map(LayerId::as_str).collect();
        let base = self.state.base.to_string();
        // The variables and the directory are not layers, and decide what the steps make.
        let rest = serde_json::to_string(&(&self.state.env, &self.state.workdir)).unwrap_or_default();
        let mut parts = vec![FORMAT, "template", &base, &rest];
        parts.extend(layers);
        self.key = Key::first(&parts);
        self.log(BASE, "[base] FROM template".to_owned());
    }

    /// An image of a registry, with what every template needs.
    async fn import(
        &mut self,
        reference: &str,
        registry: Option<&Registry>,
        logins: &Logins,
    ) -> Result<(), BuildFailure> {
        let settings = &self.context.settings;
        let pull = |resolve| PullJob {
            reference: reference.to_owned(),
            resolve,
            target: IMPORTED.into(),
            work: WORK.into(),
            credentials: registry.map(credentials),
            logins: logins
                .iter()
                .map(|(host, login)| (host.clone(), credentials(login)))
                .collect(),
            arch: None,
            mirrors: settings
                .registry_mirrors
                .iter()
                .map(|(host, mirror)| (host.clone(), vec![mirror.clone()]))
                .collect(),
            insecure: settings.insecure_registries.clone(),
            authorities: settings.registry_authorities.clone(),
            limits: UnpackLimits::default(),
            transfer: Transfer::default(),
        };
        let machine = self.start(BASE, Image::Import).await?;
        let digest = match machine.program("image-pull", &pull(true)).await? {
            Progress::Resolved { digest } => digest,
            other => return Err(unexpected(&other)),
        };
        let from = format!("[base] FROM {reference} [{}]", short(&digest));
        self.key = Key::first(&[IMAGE_FORMAT, "image", &digest]);
        if self.take_cached().await {
            self.log(BASE, format!("CACHED {from}"));
            return Ok(());
        }
        self.log(BASE, from);
        let report = match machine.program("image-pull", &pull(false)).await? {
            Progress::Unpacked(report) => report,
            other => return Err(unexpected(&other)),
        };
        self.imported(machine, &report).await
    }

    /// An image or a file system in an uploaded archive.
    async fn unpack(&mut self, hash: &str) -> Result<(), BuildFailure> {
        let from = format!("[base] FROM archive [{}]", short(hash));
        self.key = Key::first(&[IMAGE_FORMAT, "archive", hash]);
        if self.take_cached().await {
            self.log(BASE, format!("CACHED {from}"));
            return Ok(());
        }
        self.log(BASE, from);
        let Some(file) = self.context.file(hash).await else {
            return Err(BuildFailure::at(BASE, no_archive(hash)));
        };
        let machine = self.start(BASE, Image::Import).await?;
        let archive = format!("{WORK}/{hash}");
        machine.upload(&archive, &file).await?;
        let job = UnpackJob {
            archive: archive.into(),
            target: IMPORTED.into(),
            work: WORK.into(),
            reference: None,
            arch: None,
            limits: UnpackLimits::default(),
        };
        let report = match machine.program("image-unpack", &job).await? {
            Progress::Unpacked(report) => report,
            other => return Err(unexpected(&other)),
        };
        self.imported(machine, &report).await
    }

    /// A file system without any programs.
    async fn scratch(&mut self) -> Result<(), BuildFailure> {
        self.key = Key::first(&[FORMAT, "scratch"]);
        if self.take_cached().await {
            self.log(BASE, "CACHED [base] FROM scratch".to_owned());
            return Ok(());
        }
        self.log(BASE, "[base] FROM scratch".to_owned());
        let machine = self.start(BASE, Image::Import).await?;
        self.prepare(&machine).await?;
        self.replace(machine, BTreeMap::new()).await
    }

    /// Makes the image that was unpacked in a sandbox the state.
    async fn imported(&mut self, machine: Machine<'a>, report: &ImageReport) -> Result<(), BuildFailure> {
        let ImageReport {
            env,
            bytes,
            layers,
            entrypoint,
            ..
        } = report;
        let line = format!("unpacked {} layers, {} MB", layers.len(), bytes / 1_000_000);
        self.log(BASE, line);
        let report = self.prepare(&machine).await?;
        self.log(BASE, format!("[base] DEFAULT USER {USER}"));
        let env = env.iter().map(|(name, value)| (name.clone(), value.trim().to_owned()));
        let env = env.filter(|(_, value)| !value.is_empty()).collect();
        self.state.entrypoint.clone_from(entrypoint);
        self.replace(machine, env).await?;
        let Some(lacking) = Lacking::of(self.context, &report) else {
            return Ok(());
        };
        let machine = self.start(BASE, self.state.image()).await?;
        lacking.install(self.context, &machine).await?;
        self.commit(machine).await
    }

    /// Adds what every template needs to an image.
    async fn prepare(&self, machine: &Machine<'_>) -> Result<ProvisionReport, BuildFailure> {
        let job = ProvisionJob {
            prepare: true,
            root: IMPORTED.into(),
            ..provision(USER, true)
        };
        match machine.program("image-provision", &job).await? {
            Progress::Provisioned(report) => Ok(report),
            other => Err(unexpected(&other)),
        }
    }

    /// Makes what an import left the lowest layer.
    async fn replace(&mut self, machine: Machine<'a>, env: BTreeMap<String, String>) -> Result<(), BuildFailure> {
        self.state.base = false;
        self.state.layers.clear();
        self.state.env = env;
        self.commit(machine).await
    }

    /// Runs the step with this number, from 1 on.
    pub(super) async fn step(
        &mut self,
        number: usize,
        steps: &[Step],
        instruction: &Instruction,
    ) -> Result<(), BuildFailure> {
        let count = steps.len();
        let Some((step, following)) = steps.get(number - 1..).and_then(<[Step]>::split_first) else {
            return Err(BuildFailure::internal());
        };
        let name = number.to_string();
        let name = name.as_str();
        self.key = self.key.step(step);
        self.force |= step.force;
        let prefix = format!("[builder {number}/{count}]");
        let kind = step.kind.to_ascii_uppercase();
        let line = format!("{prefix} {kind} {} [{}]", step.args.join(" "), short(self.key.as_str()));
        if let Instruction::Env(pairs) = instruction {
            self.log_variables(name, line, following).await;
            for (variable, value) in pairs {
                let value = expand(value, &self.state.env);
                let value =
                    value.ok_or_else(|| BuildFailure::at(name, format!("{variable}: the value is too long")))?;
                self.state.env.insert(variable.clone(), value);
            }
            let bytes = self.state.env.iter().map(|(name, value)| name.len() + value.len());
            if bytes.sum::<usize>() > VARIABLES_MAX {
                let why = format!("more than {VARIABLES_MAX} bytes of variables");
                return Err(BuildFailure::at(name, why));
            }
            return Ok(());
        }
        self.perform(name, &prefix, line, instruction).await
    }

    /// Writes the line of a step that makes no layer, with the word of a cached one if an earlier build had it as well.
    /// What is kept belongs to a layer: to the one below, or without one to the next.
    pub(super) async fn log_variables(&self, name: &str, line: String, following: &[Step]) {
        let mut key = self.key.clone();
        if let Some(layer) = self.state.layers.last() {
            let was_seen = !self.force && self.context.cached(key.as_str()).await.is_some();
            let state = serde_json::to_string(&self.state).unwrap_or_default();
            self.context.put_cached(key.as_str(), layer, 0, &state).await;
            return self.log_cached(name, line, was_seen);
        }
        let makes_layer = |step: &Step| !matches!(Instruction::parse(step), Ok(Instruction::Env(_)));
        let next = following.iter().position(makes_layer);
        let steps = next.map_or(&[][..], |next| &following[..=next]);
        for step in steps {
            key = key.step(step);
        }
        let is_forced = self.force || steps.iter().any(|step| step.force);
        let was_seen = !is_forced && !steps.is_empty() && self.context.cached(key.as_str()).await.is_some();
        self.log_cached(name, line, was_seen);
    }

    fn log_cached(&self, name: &str, line: String, is_cached: bool) {
        if is_cached {
            self.log(name, format!("CACHED {line}"));
        } else {
            self.log(name, line);
        }
    }

    /// Takes what an instruction makes from the cache, or runs it. The key must be that of the instruction.
    pub(super) async fn perform(
        &mut self,
        name: &str,
        prefix: &str,
        line: String,
        instruction: &Instruction,
    ) -> Result<(), BuildFailure> {
        let span = self.context.begin_part("build.step");
        let is_cached = self.take_cached().await;
        self.log_cached(name, line, is_cached);
        if let Some(span) = &span {
            span.note_word("ringfence.build.cached", if is_cached { "true" } else { "false" });
        }
        let making = async {
            if is_cached {
                Ok(())
            } else {
                self.make(name, prefix, instruction).await
            }
        };
        traced(span, making).await
    }

    /// Runs an instruction, and makes a layer of what it wrote.
    async fn make(&mut self, name: &str, prefix: &str, instruction: &Instruction) -> Result<(), BuildFailure> {
        let image = match instruction {
            Instruction::Files(Files {
                archive: Archive::Stage(from),
                ..
            }) => Image::Copy {
                to: self.state.stack(),
                from: from.clone(),
            },
            _ => self.state.image(),
        };
        let machine = self.start(name, image).await?;
        match instruction {
            Instruction::Run { command, user } => {
                let user = user.as_deref().unwrap_or(&self.state.user);
                let ended = machine.run(user, self.state.shell(command), prefix).await?;
                if ended.code != 0 {
                    return Err(ended.failure(name, "the command"));
                }
                self.notice_interpreters(&machine).await;
            }
            Instruction::Exec { args, env } => {
                let mut envs = env.clone();
                envs.extend(self.state.envs());
                let mut args = args.iter().cloned();
                let command = ProcessConfig {
                    cmd: args.next().unwrap_or_default(),
                    args: args.collect(),
                    envs,
                    cwd: self.state.workdir.clone(),
                };
                let ended = machine.run(&self.state.user, command, prefix).await?;
                if ended.code != 0 {
                    return Err(ended.failure(name, "the command"));
                }
                self.notice_interpreters(&machine).await;
            }
            Instruction::Files(files) => self.files(&machine, name, files).await?,
            Instruction::Copy { .. } => self.copy(&machine, name, instruction).await?,
            Instruction::Workdir(path) => self.state.workdir = Some(self.workdir(&machine, name, path).await?),
            Instruction::User { name: user, admin } => {
                match machine.program("image-provision", &provision(user, *admin)).await? {
                    Progress::Provisioned(_) => self.state.user.clone_from(user),
                    other => return Err(unexpected(&other)),
                }
            }
            Instruction::Env(_) => {}
        }
        self.commit(machine).await
    }

    /// Gives the user of the template what an interpreter needs that a command may have installed.
    async fn notice_interpreters(&self, machine: &Machine<'_>) {
        if self.state.user != "root" {
            let job = ProvisionJob {
                only_interpreters: true,
                ..provision(&self.state.user, false)
            };
            // What is missing then is a convenience.
            let _ = machine.late_program("image-provision", &job).await;
        }
    }

    async fn copy(&self, machine: &Machine<'_>, step: &str, copy: &Instruction) -> Result<(), BuildFailure> {
        let Instruction::Copy {
            source,
            dest,
            owner,
            mode,
            hash,
        } = copy
        else {
            return Ok(());
        };
        let Some(file) = self.context.file(hash).await else {
            return Err(BuildFailure::at(step, no_archive(hash)));
        };
        let archive = format!("{WORK}/{hash}");
        machine.upload(&archive, &file).await?;
        let job = CopyJob {
            archive: archive.into(),
            source: source.clone(),
            ..self.copy_job(dest, owner.as_ref(), mode.as_ref())
        };
        self.run_copy(machine, step, &job).await
    }

    /// Copies the files of an instruction of a Dockerfile.
    async fn files(&self, machine: &Machine<'_>, step: &str, files: &Files) -> Result<(), BuildFailure> {
        let Files {
            archive,
            patterns,
            dest,
            owner,
            mode,
        } = files;
        let mut job = CopyJob {
            patterns: patterns.clone(),
            ..self.copy_job(dest, owner.as_ref(), mode.as_ref())
        };
        match archive {
            Archive::Stage(_) => {
                job.from = Some(COPIED_FROM.into());
                job.root = IMPORTED.into();
            }
            Archive::Uploaded(hash) => {
                let Some(file) = self.context.file(hash).await else {
                    return Err(BuildFailure::at(step, no_archive(hash)));
                };
                machine.upload(FILES, &file).await?;
                job.archive = FILES.into();
            }
            Archive::Inline(bytes) => {
                machine.write(FILES, bytes.clone()).await?;
                job.archive = FILES.into();
            }
        }
        self.run_copy(machine, step, &job).await
    }

    fn copy_job(&self, dest: &str, owner: Option<&String>, mode: Option<&String>) -> CopyJob {
        CopyJob {
            archive: std::path::PathBuf::new(),
            from: None,
            source: String::new(),
            patterns: Vec::new(),
            dest: dest.to_owned(),
            workdir: self.state.workdir.clone(),
            user: self.state.user.clone(),
            owner: owner.cloned(),
            mode: mode.cloned(),
            limits: UnpackLimits::default(),
            root: "/".into(),
            work: WORK.into(),
            consume: true,
        }
    }

    async fn run_copy(&self, machine: &Machine<'_>, step: &str, job: &CopyJob) -> Result<(), BuildFailure> {
        match machine.program("image-copy", job).await? {
            Progress::Copied(report) => {
                self.log(step, format!("copied {} files, {} bytes", report.entries, report.bytes));
                Ok(())
            }
            other => Err(unexpected(&other)),
        }
    }

    /// Makes sure that a directory exists and returns its physical path.
    async fn workdir(&self, machine: &Machine<'_>, step: &str, path: &str) -> Result<String, BuildFailure> {
        let absolute = if path.starts_with('/') {
            path.to_owned()
        } else {
            format!("{}/{path}", self.state.workdir.as_deref().unwrap_or_default())
        };
        let user = &self.state.user;
        let owner = if user.contains(':') {
            user.clone()
        } else {
            // With the group of the user.
            format!("{user}:")
        };
        let args = ["-c", MAKE_DIRECTORY, "sh", &absolute, &owner, user];
        let command = ProcessConfig {
            cmd: "/bin/sh".to_owned(),
            args: args.map(str::to_owned).to_vec(),
            cwd: Some("/".to_owned()),
            ..ProcessConfig::default()
        };
        let (ended, output) = machine.output_of("root", command, PATH_MAX + 1).await?;
        let made = output.strip_suffix('\n').unwrap_or(&output);
        if ended.code == 0 && made.starts_with('/') && made.len() <= PATH_MAX {
            Ok(made.to_owned())
        } else {
            let why = format!("cannot enter {absolute}: {}", ended.stderr.trim());
            Err(BuildFailure::at(step, why))
        }
    }

    async fn start(&self, step: &str, image: Image) -> Result<Machine<'a>, BuildFailure> {
        Machine::start(self.context, self.job, step, image).await
    }

    /// Takes the state of the current key from the cache.
    async fn take_cached(&mut self) -> bool {
        if self.force {
            return false;
        }
        let Some(cached) = self.context.cached(self.key.as_str()).await else {
            return false;
        };
        let Ok(state) = serde_json::from_str::<State>(&cached.state_json) else {
            return false;
        };
        if let Some(gone) = state.layers.iter().find(|layer| !self.present.contains(layer)) {
            self.context.forget_layer(gone).await;
            return false;
        }
        self.context.pin(&state.layers);
        self.state = state;
        true
    }

    /// Commits what a step wrote, and stores the layer under the key of the step.
    async fn commit(&mut self, machine: Machine<'a>) -> Result<(), BuildFailure> {
        let merge = self.state.layers.len() >= Image::LAYERS_MAX;
        let Committed { layer, bytes } = machine.commit(merge).await?;
        if merge {
            self.state.layers.clear();
        }
        self.state.layers.push(layer.clone());
        self.present.insert(layer.clone());
        self.bytes.insert(layer.clone(), bytes);
        let state = serde_json::to_string(&self.state).unwrap_or_default();
        self.context.put_cached(self.key.as_str(), &layer, bytes, &state).await;
        Ok(())
    }
}

/// Credentials as the program takes them.
/// Why a step fails whose files are not here. They may have been uploaded to another server, which is gone.
fn no_archive(hash: &str) -> String {
    format!(
        "there is no uploaded archive {hash} with the files of this step on the server that builds: build the template again, \
         which uploads them"
    )
}

fn credentials(registry: &Registry) -> Credentials {
    let secret = |secret: &Secret| JobSecret::new(secret.expose());
    match registry {
        Registry::Basic { username, password } => Credentials::Registry {
            username: username.clone(),
            password: secret(password),
        },
        Registry::Aws {
            access_key_id,
            secret_access_key,
            region,
        } => Credentials::Aws {
            access_key_id: access_key_id.clone(),
            secret_access_key: secret(secret_access_key),
            region: region.clone(),
        },
        Registry::Gcp { service_account } => Credentials::Gcp {
            service_account_json: secret(service_account),
        },
    }
}

fn provision(user: &str, admin: bool) -> ProvisionJob {
    ProvisionJob {
        user: user.to_owned(),
        admin,
        prepare: false,
        only_interpreters: false,
        root: "/".into(),
    }
}

fn unexpected(result: &Progress) -> BuildFailure {
    BuildFailure::at(
        BASE,
        format!("a program of the platform gave another result: {result:?}"),
    )
}

/// The beginning of a hash, for the log.
pub(super) fn short(hash: &str) -> &str {
    let digits = hash.strip_prefix("sha256:").unwrap_or(hash);
    digits.get(..12).unwrap_or(digits)
}
