//! Repositories that a sandbox gets as working trees, before its create request is answered.
//!
//! Git runs inside the new sandbox, as its user, and never on the host. While it runs, the sandbox reaches the code host
//! and nothing else, and the egress gateway adds the token to its requests, so that the token is never inside:
//!
//! 1. It asks the code host for the references of the repository. This is the check of the token: nothing is taken from a
//!    copy before the code host has accepted it.
//! 2. If the platform has a copy that is not too old, the copy is uploaded and git takes what it has from there. What it
//!    lacks, or everything, is fetched from the code host. So the working tree is always that of now, whatever the age
//!    of the copy.
//! 3. If there was no copy, or it lacked something and is older than the soft age, a new one is written. Only sandboxes of
//!    the built-in template may do so, because no code of a user has run in them.
//!
//! Copies belong to a team. Of several sandboxes that need the same new copy, one fetches and the others wait.

mod cache;
mod error;
mod git;

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use model::id::{SandboxId, TeamId};
use model::repository::{MountPath, RepositoryUrl, default_branch};
use model::secret::Secret;
use parking_lot::Mutex;
use sha2::{Digest as _, Sha256};
use tokio::sync::OwnedMutexGuard;
use tokio_util::task::TaskTracker;

use self::cache::{MirrorCache, MirrorKey};
pub(crate) use self::error::RepositoryError;
use crate::admission::AdmissionControl;
use crate::agent::{self, Agent, AgentError, EndsWith, Output};
use crate::chain::Chain;
use crate::clock::{Clock, SECOND_US};
use crate::keys::TokenSeed;
use crate::node::NodeHandle;
use crate::settings::RepositorySettings;

/// How much of the references of a repository is read for its default branch, which is on the first line.
const REFERENCES_KEPT: usize = 64 << 10;
/// Maximum size of the references of a repository, in bytes.
const REFERENCES_MAX: usize = 64 << 20;

/// A repository of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Repository {
    pub(crate) url: RepositoryUrl,
    pub(crate) mount_path: MountPath,
}

/// The repositories of a request.
#[derive(Debug, Clone)]
pub(crate) struct RepositoryRequest {
    pub(crate) repositories: Vec<Repository>,
    /// With which the code host is asked.
    pub(crate) token: Secret,
}

/// The sandbox that gets repositories.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Target<'a> {
    pub(crate) id: &'a SandboxId,
    pub(crate) team: &'a TeamId,
    /// The user that owns the working trees.
    pub(crate) user: &'a str,
    /// Whether copies may be written from this sandbox.
    pub(crate) is_trusted: bool,
}

impl From<AgentError> for RepositoryError {
    fn from(error: AgentError) -> Self {
        Self::Sandbox(Box::new(error))
    }
}

/// The services of repositories.
#[derive(Debug)]
pub(crate) struct RepositoryServices {
    pub(crate) node: NodeHandle,
    pub(crate) admission: Arc<AdmissionControl>,
    pub(crate) tokens: TokenSeed,
    pub(crate) clock: Clock,
    /// Connections to agents.
    pub(crate) work: TaskTracker,
}

/// Prepares the repositories of sandboxes.
#[derive(Debug)]
pub(crate) struct Repositories {
    node: NodeHandle,
    admission: Arc<AdmissionControl>,
    tokens: TokenSeed,
    clock: Clock,
    settings: RepositorySettings,
    cache: Option<MirrorCache>,
    /// Copies that are being fetched.
    fetches: Mutex<HashMap<MirrorKey, Arc<tokio::sync::Mutex<()>>>>,
    /// Connections to agents.
    work: TaskTracker,
}

/// A copy to write.
struct NewCopy<'a> {
    key: MirrorKey,
    references: String,
    fetched_s: u64,
    mount_path: &'a MountPath,
    _fetch: Option<OwnedMutexGuard<()>>,
}

impl Repositories {
    pub(crate) fn new(settings: RepositorySettings, services: RepositoryServices) -> Self {
        let RepositoryServices {
            node,
            admission,
            tokens,
            clock,
            work,
        } = services;
        let directory = settings.directory.as_deref();
        let cache = directory.and_then(|directory| match MirrorCache::open(directory, &settings) {
            Ok(cache) => Some(cache),
            Err(error) => {
                tracing::error!("cannot keep copies of repositories, so all are fetched in full: {error}");
                None
            }
        });
        Self {
            node,
            admission,
            tokens,
            clock,
            settings,
            cache,
            fetches: Mutex::default(),
            work,
        }
    }

    /// How long all repositories of a sandbox together may take.
    pub(crate) fn limit(&self) -> Duration {
        Duration::from_secs(self.settings.clone_timeout_s.into())
    }

    /// Makes the working trees in a sandbox that has just started and that no client knows.
    /// Returns how many of them were made with a copy.
    pub(crate) async fn prepare(
        &self,
        target: Target<'_>,
        repositories: &[Repository],
    ) -> Result<usize, RepositoryError> {
        let begun = Instant::now();
        let agent = Agent {
            node: &self.node,
            id: target.id,
            token: self.tokens.access_token(target.id),
            work: &self.work,
        };
        let all = async {
            let mut from_copy = 0;
            for (index, repository) in repositories.iter().enumerate() {
                let (had_copy, new_copy) = self.prepare_one(&agent, target, index, repository).await?;
                from_copy += usize::from(had_copy);
                let Some(copy) = new_copy else { continue };
                // The working tree is complete, so a failure changes nothing for the client. Others wait for the copy, and
                // repositories that follow need time.
                let rest = self.limit().saturating_sub(begun.elapsed()) / 2;
                match tokio::time::timeout(rest, self.keep(&agent, target, copy)).await {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => {
                        let error = Chain(&error);
                        tracing::warn!(sandbox.id = %target.id, error = %error, "cannot keep a copy of a repository");
                    }
                    Err(_) => {
                        tracing::warn!(sandbox.id = %target.id, "no time was left to keep a copy of a repository");
                    }
                }
            }
            Ok(from_copy)
        };
        let limit_s = self.settings.clone_timeout_s;
        let prepared = tokio::time::timeout(self.limit(), all).await;
        prepared.unwrap_or(Err(RepositoryError::TimedOut { limit_s }))
    }

    /// Whether there was a copy, and the one to write.
    async fn prepare_one<'a>(
        &self,
        agent: &Agent<'_>,
        target: Target<'_>,
        index: usize,
        repository: &'a Repository,
    ) -> Result<(bool, Option<NewCopy<'a>>), RepositoryError> {
        let Repository { url, mount_path } = repository;
        let failed = |ended: &agent::Ended| git::failure(ended.code, &ended.stderr, mount_path, url);
        let made = agent
            .run(
                target.user,
                git::make_as_user(mount_path),
                EndsWith::Output,
                &mut Ignored,
            )
            .await?;
        if made.code == git::NOT_OWN {
            let command = git::make_as_root(mount_path, target.user);
            let made = agent.run("root", command, EndsWith::Output, &mut Ignored).await?;
            if made.code != 0 {
                return Err(failed(&made));
            }
        } else if made.code != 0 {
            return Err(failed(&made));
        }

        let mut references = References::default();
        let asked = agent
            .run(target.user, git::references(url), EndsWith::Output, &mut references)
            .await?;
        if asked.code != 0 {
            return Err(failed(&asked));
        }
        // From here on, the token was accepted.
        let branch = default_branch(&String::from_utf8_lossy(&references.head));
        let references = references.digest();

        let key = MirrorKey::new(target.team, url);
        let (now_s, soft_s) = (self.now_s(), u64::from(self.settings.soft_age_s));
        let mut copy = self.find(&key, now_s);
        let is_wanted = |copy: &Option<cache::OpenMirror>| {
            copy.as_ref()
                .is_none_or(|copy| copy.references != references && now_s.saturating_sub(copy.fetched_s) > soft_s)
        };
        let mut fetch = None;
        if self.cache.is_some() && target.is_trusted && is_wanted(&copy) {
            fetch = Some(self.begin_fetch(&key).await);
            // Another sandbox may have fetched it meanwhile.
            copy = self.find(&key, now_s);
        }
        let write_copy = fetch.is_some() && is_wanted(&copy);
        let is_complete = copy.as_ref().is_some_and(|copy| copy.references == references);
        if !write_copy {
            fetch = None;
        }

        let inside = copy.is_some().then(|| format!("/tmp/.repository-{index}.bundle"));
        if let (Some(copy), Some(inside)) = (copy, &inside) {
            agent.upload(target.user, inside, copy.bytes, copy.content()).await?;
        }
        let command = git::populate(mount_path, url, branch.as_deref(), inside.as_deref(), !is_complete);
        let ended = agent.run(target.user, command, EndsWith::Output, &mut Ignored).await?;
        if ended.code != 0 {
            return Err(failed(&ended));
        }
        // A repository without any branch has nothing to copy.
        let new_copy = (write_copy && branch.is_some()).then(|| NewCopy {
            key,
            references,
            fetched_s: now_s,
            mount_path,
            _fetch: fetch,
        });
        Ok((inside.is_some(), new_copy))
    }

    /// Writes a copy from a working tree that was just made.
    async fn keep(&self, agent: &Agent<'_>, target: Target<'_>, new: NewCopy<'_>) -> Result<(), RepositoryError> {
        let Some(cache) = &self.cache else { return Ok(()) };
        let io = |error: io::Error| RepositoryError::Sandbox(Box::new(error));
        let spare = self.admission.spare_disk_bytes().await.unwrap_or(0);
        if spare < self.settings.bundle_bytes {
            tracing::warn!("no copies of repositories are kept, because the disk of the host is almost full");
            return Ok(());
        }
        let mut file = cache.create().map_err(io)?;
        let ended = agent
            .run(target.user, git::copy(new.mount_path), EndsWith::Output, &mut file)
            .await?;
        if ended.code != 0 {
            return Err(io(io::Error::other(format!("git bundle ended with {}", ended.code))));
        }
        cache
            .keep(&new.key, file, &new.references, new.fetched_s)
            .await
            .map_err(io)?;
        let (copies, bytes) = cache.size();
        tracing::info!(sandbox.id = %target.id, copies, bytes, "kept a copy of a repository");
        Ok(())
    }

    fn find(&self, key: &MirrorKey, now_s: u64) -> Option<cache::OpenMirror> {
        self.cache.as_ref()?.find(key, now_s)
    }

    /// Waits until no other sandbox fetches the repository. The caller's time limit bounds it.
    async fn begin_fetch(&self, key: &MirrorKey) -> OwnedMutexGuard<()> {
        let lock = {
            let mut fetches = self.fetches.lock();
            fetches.retain(|_, lock| Arc::strong_count(lock) > 1);
            Arc::clone(fetches.entry(key.clone()).or_default())
        };
        lock.lock_owned().await
    }

    fn now_s(&self) -> u64 {
        u64::try_from(self.clock.now_us() / SECOND_US).unwrap_or_default()
    }
}

/// Output that is of no interest.
struct Ignored;

impl Output for Ignored {
    async fn take(&mut self, _: Bytes) -> io::Result<()> {
        Ok(())
    }
}

/// The references of a repository.
#[derive(Default)]
struct References {
    /// The first bytes of the references.
    head: Vec<u8>,
    hash: Sha256,
    bytes: usize,
}

impl References {
    fn digest(self) -> String {
        cache::short(&self.hash.finalize())
    }
}

impl Output for References {
    async fn take(&mut self, piece: Bytes) -> io::Result<()> {
        self.bytes = self.bytes.saturating_add(piece.len());
        if self.bytes > REFERENCES_MAX {
            return Err(io::Error::other("the repository has too many references"));
        }
        let kept = REFERENCES_KEPT.saturating_sub(self.head.len()).min(piece.len());
        self.head.extend_from_slice(&piece[..kept]);
        self.hash.update(&piece);
        Ok(())
    }
}
