//! Signed file links: finding the sandbox whose agent token made a signature.
//!
//! A link names no sandbox, and a signature is a hash, so the only way is to try every token. Links need no credential,
//! so the cost is bounded in three ways: the content of a link is hashed once and not per sandbox; misses are limited
//! per peer; and searches run one after another, on a blocking thread, for at most a quarter of the time of one core.
//! Links found before are cached.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use model::id::SandboxId;
use parking_lot::Mutex;
use protocol::signature::{Claim, Search};
use proxy::ingress::answer::Answer;
use proxy::ingress::route::SignedFile;
use secrecy::ExposeSecret as _;
use tokio::sync::OwnedMutexGuard;
use tokio::time::Instant;

use crate::keys::TokenSeed;
use crate::others::OtherServers;
use crate::peers::{Peer, PeerRates};
use crate::sandboxes::registry::Registry;

/// Longest path or other text in a link, in bytes: `PATH_MAX` of Linux.
const TEXT_MAX_BYTES: usize = 4096;
/// Burst and refill interval of the misses (links without a sandbox) of one peer.
const MISSES: (u32, Duration) = (60, Duration::from_secs(1));
/// Maximum number of waiting searches.
const WAITING_MAX: usize = 64;
/// Factor of the pause after a search: three times its duration.
const REST: u32 = 3;
/// Maximum number of cached links.
const CACHE_MAX: usize = 4096;

/// The sandboxes of other servers.
#[derive(Debug, Clone, Copy)]
pub(super) struct Elsewhere<'a> {
    pub(super) others: &'a OtherServers,
    pub(super) tokens: &'a TokenSeed,
}

/// Finds sandboxes by signatures.
#[derive(Debug, Default)]
pub(super) struct SignedLinks {
    known: Mutex<HashMap<[u8; 32], SandboxId>>,
    /// When the next search may begin. Locked by the running search.
    turn: Arc<tokio::sync::Mutex<Option<Instant>>>,
    waiting: AtomicUsize,
    misses: Misses,
}

#[derive(Debug)]
struct Misses(PeerRates);

impl Default for Misses {
    fn default() -> Self {
        Self(PeerRates::new(MISSES.0, MISSES.1))
    }
}

impl SignedLinks {
    /// Finds the running sandbox whose token made a signature.
    ///
    /// # Errors
    /// The response, when there is none or the search was refused.
    pub(super) async fn find(
        &self,
        registry: &Registry,
        signed: &SignedFile,
        peer: Option<Peer>,
        elsewhere: Option<Elsewhere<'_>>,
    ) -> Result<SandboxId, Answer> {
        for (name, text) in [("path", &signed.path), ("username", &signed.username)] {
            if text.len() > TEXT_MAX_BYTES {
                return Err(Answer::BadRequest(format!(
                    "{name} is too long: {} bytes of at most {TEXT_MAX_BYTES}",
                    text.len()
                )));
            }
        }
        let claim = Claim {
            path: &signed.path,
            operation: signed.operation,
            username: &signed.username,
            expiration: signed.expiration,
        };
        // A malformed signature belongs to no sandbox.
        let search = claim.search(&signed.signature).ok_or(Answer::BadSignature)?;
        if let Some(id) = self.cached(registry, &search, elsewhere) {
            return Ok(id);
        }
        let permit = match peer.map(|peer| self.misses.0.take(peer)) {
            None => None,
            Some(Ok(permit)) => Some(permit),
            Some(Err(wait)) => return Err(rate_limited(wait)),
        };
        let sought = search.signature_hash();
        let id = match (self.search(registry, search.clone()).await, elsewhere) {
            (Err(Answer::BadSignature), Some(elsewhere)) => self.search_elsewhere(elsewhere, search).await?,
            (found, _) => found?,
        };
        if let Some(permit) = permit {
            self.misses.0.give_back(&permit);
        }
        self.cache(sought, id.clone());
        Ok(id)
    }

    /// The sandbox of an earlier search, if the signature is verified again: it may come with another path.
    fn cached(&self, registry: &Registry, search: &Search, elsewhere: Option<Elsewhere<'_>>) -> Option<SandboxId> {
        let id = self.known.lock().get(&search.signature_hash()).cloned()?;
        let is_signed = match (registry.get(&id), elsewhere) {
            (Some(_), _) | (None, None) => {
                let sandbox = registry.running(&id)?;
                search.is_signed_with(sandbox.access_token.expose_secret())
            }
            (None, Some(elsewhere)) => search.is_signed_with(elsewhere.tokens.access_token(&id).expose_secret()),
        };
        is_signed.then_some(id)
    }

    fn cache(&self, sought: [u8; 32], id: SandboxId) {
        let mut known = self.known.lock();
        if known.len() >= CACHE_MAX
            && let Some(any) = known.keys().next().copied()
        {
            known.remove(&any);
        }
        known.insert(sought, id);
    }

    /// Tries the token of every running sandbox, once it is this search's turn.
    async fn search(&self, registry: &Registry, search: Search) -> Result<SandboxId, Answer> {
        let _waiting = WaitingSlot::take(&self.waiting).ok_or_else(|| rate_limited(Duration::from_secs(1)))?;
        let turn = self.turn().await;
        let begun = Instant::now();
        let sandboxes = registry.all_running();
        run(turn, begun, move || {
            let mut sandboxes = sandboxes.iter();
            let found = sandboxes.find(|sandbox| search.is_signed_with(sandbox.access_token.expose_secret()));
            found.map(|sandbox| sandbox.id.clone())
        })
        .await
    }

    /// Tries the token of every sandbox that runs on a node of another server, whose tokens are the same here.
    async fn search_elsewhere(&self, elsewhere: Elsewhere<'_>, search: Search) -> Result<SandboxId, Answer> {
        let _waiting = WaitingSlot::take(&self.waiting).ok_or_else(|| rate_limited(Duration::from_secs(1)))?;
        let turn = self.turn().await;
        // With the time of the database, which is spared as well.
        let begun = Instant::now();
        let sandboxes = elsewhere.others.running_elsewhere().await;
        let sandboxes = sandboxes.ok_or(Answer::Unavailable)?;
        let tokens = elsewhere.tokens.clone();
        run(turn, begun, move || {
            let mut sandboxes = sandboxes.into_iter();
            sandboxes.find(|id| search.is_signed_with(tokens.access_token(id).expose_secret()))
        })
        .await
    }

    /// Waits until a search may begin.
    async fn turn(&self) -> OwnedMutexGuard<Option<Instant>> {
        let turn = Arc::clone(&self.turn).lock_owned().await;
        if let Some(next_at) = *turn {
            tokio::time::sleep_until(next_at).await;
        }
        turn
    }
}

/// Runs a search. Its task holds the lock, so that a client disconnect does not let the next search run in parallel.
async fn run(
    mut turn: OwnedMutexGuard<Option<Instant>>,
    begun: Instant,
    search: impl FnOnce() -> Option<SandboxId> + Send + 'static,
) -> Result<SandboxId, Answer> {
    let searching = tokio::task::spawn_blocking(move || {
        let found = search();
        let now = Instant::now();
        *turn = Some(now + REST * (now - begun));
        found
    });
    match searching.await {
        Ok(Some(id)) => Ok(id),
        Ok(None) => Err(Answer::BadSignature),
        Err(error) => {
            tracing::error!(%error, "the search for the sandbox of a signed link failed");
            Err(Answer::Unavailable)
        }
    }
}

fn rate_limited(wait: Duration) -> Answer {
    Answer::RateLimited {
        seconds: wait.as_secs() + 1,
    }
}

/// A slot among the waiting searches, released when dropped.
struct WaitingSlot<'a>(&'a AtomicUsize);

impl<'a> WaitingSlot<'a> {
    fn take(count: &'a AtomicUsize) -> Option<Self> {
        let waiting = Self(count);
        (count.fetch_add(1, Ordering::AcqRel) < WAITING_MAX).then_some(waiting)
    }
}

impl Drop for WaitingSlot<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn signed(path: String, signature: &str) -> SignedFile {
        SignedFile {
            path,
            operation: "read",
            username: String::new(),
            signature: signature.to_owned(),
            expiration: None,
        }
    }

    fn signature(token: &str) -> String {
        let claim = Claim {
            path: "/a",
            operation: "read",
            username: "",
            expiration: None,
        };
        claim.sign(token)
    }

    #[tokio::test(start_paused = true)]
    async fn guessing_is_limited_per_peer() {
        let (links, registry) = (SignedLinks::default(), Registry::default());
        let (guesser, other) = (Some(Peer::V6(1)), Some(Peer::V6(2)));
        let signed = signed("/a".to_owned(), &signature("token"));
        for _ in 0..MISSES.0 {
            let answer = links
                .find(&registry, &signed, guesser, None)
                .await
                .expect_err("no sandbox");
            assert_eq!(answer, Answer::BadSignature);
        }
        for _ in 0..10 {
            let answer = links
                .find(&registry, &signed, guesser, None)
                .await
                .expect_err("no sandbox");
            assert_eq!(answer.status(), 429, "{answer:?}");
        }
        for who in [other, None] {
            let answer = links.find(&registry, &signed, who, None).await.expect_err("no sandbox");
            assert_eq!(answer, Answer::BadSignature);
        }
        tokio::time::advance(MISSES.1).await;
        let answer = links
            .find(&registry, &signed, guesser, None)
            .await
            .expect_err("no sandbox");
        assert_eq!(answer, Answer::BadSignature, "one permit was refilled");
    }

    #[tokio::test]
    async fn invalid_links_cost_no_search_and_no_permit() {
        let (links, registry) = (SignedLinks::default(), Registry::default());
        let peer = Some(Peer::V6(1));
        for _ in 0..3 * MISSES.0 {
            let long = signed("x".repeat(TEXT_MAX_BYTES + 1), &signature("token"));
            let answer = links.find(&registry, &long, peer, None).await.expect_err("too long");
            assert_eq!(answer.status(), 400);
            let garbage = signed("/a".to_owned(), "v1_garbage");
            let answer = links.find(&registry, &garbage, peer, None).await.expect_err("garbage");
            assert_eq!(answer, Answer::BadSignature);
        }
        assert_eq!(*links.turn.lock().await, None, "nothing was searched");
        let longest = signed("x".repeat(TEXT_MAX_BYTES), &signature("token"));
        let answer = links
            .find(&registry, &longest, peer, None)
            .await
            .expect_err("no sandbox");
        assert_eq!(answer, Answer::BadSignature);
        assert!(links.turn.lock().await.is_some());
    }

    #[tokio::test]
    async fn the_search_queue_is_bounded() {
        let (links, registry) = (SignedLinks::default(), Registry::default());
        let held = Arc::clone(&links.turn).lock_owned().await;
        let signed = signed("/a".to_owned(), &signature("token"));
        let mut waiting: Vec<_> = (0..WAITING_MAX)
            .map(|_| Box::pin(links.find(&registry, &signed, None, None)))
            .collect();
        for search in &mut waiting {
            let now = std::future::poll_fn(|cx| std::task::Poll::Ready(search.as_mut().poll(cx).is_ready())).await;
            assert!(!now);
        }
        let answer = links.find(&registry, &signed, None, None).await.expect_err("no place");
        assert_eq!(answer.status(), 429);
        // A cancelled search releases its slot.
        drop(waiting);
        drop(held);
        let answer = links
            .find(&registry, &signed, None, None)
            .await
            .expect_err("no sandbox");
        assert_eq!(answer, Answer::BadSignature);
    }
}
