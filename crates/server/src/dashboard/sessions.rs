//! Sessions of browsers.
//!
//! A session of a team stands for the key that opened it: it has the hash of the key, which is looked up again for every
//! request, and ends with it. One of the operator was opened by a code that the operator got on the host ([`Codes`]). Sessions are in memory only, so a restart signs everybody out, and a server knows its own alone. Their number
//! is bounded for each team and in all: the oldest makes room.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use model::id::TeamId;
use parking_lot::Mutex;
use sha2::{Digest as _, Sha256};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::authentication::{Owner, StoredCredential};

/// The hash of a token or a code: what is kept of it.
type Digest = [u8; 32];

/// How long a session lasts, however much it is used.
pub(super) const LIFETIME: Duration = Duration::from_secs(12 * 3600);
/// Maximum number of sessions of one team, and of all.
const SESSIONS: (usize, usize) = (64, 4096);
/// Beginning of a code of the operator.
pub(super) const CODE_PREFIX: &str = "rfop_";
/// How long a code opens a session.
pub(super) const CODE_LIFETIME: Duration = Duration::from_secs(300);
/// Maximum number of codes that were not used yet.
const CODES_MAX: usize = 16;
/// Random bytes of a code.
const CODE_BYTES: usize = 16;
/// Random bytes of a token.
const TOKEN_BYTES: usize = 32;

/// Whom a session acts for.
#[derive(Debug)]
pub(super) enum Actor {
    /// A user of a team, by a key.
    Team {
        /// The hash of the key.
        credential: StoredCredential,
        owner: Owner,
    },
    /// Who runs the platform.
    Operator,
}

impl Actor {
    fn team(&self) -> Option<&TeamId> {
        match self {
            Self::Team { owner, .. } => Some(&owner.team),
            Self::Operator => None,
        }
    }
}

/// The session of one browser.
#[derive(Debug)]
pub(super) struct Session {
    /// Whom it acts for.
    pub(super) actor: Actor,
    /// When it ends, in microseconds since the Unix epoch.
    pub(super) expires_us: i64,
    /// This time by the clock of the runtime.
    pub(super) expires_at: Instant,
    /// Cancelled when it has ended: streams that it opened are cut then.
    pub(super) ended: CancellationToken,
    /// The order in which sessions began.
    number: u64,
    id: Digest,
}

#[derive(Debug, Default)]
struct Table {
    /// By the hash of the token, which is nowhere else on this side.
    sessions: HashMap<Digest, Arc<Session>>,
    begun: u64,
}

impl Table {
    fn remove(&mut self, id: &Digest) {
        if let Some(session) = self.sessions.remove(id) {
            session.ended.cancel();
        }
    }

    /// Ends the oldest session among those that are wanted, once there are `most` of them.
    fn make_room(&mut self, most: usize, is_wanted: impl Fn(&Session) -> bool) {
        let wanted = || self.sessions.values().filter(|session| is_wanted(session));
        if wanted().count() < most {
            return;
        }
        if let Some(oldest) = wanted().min_by_key(|session| session.number).map(|session| session.id) {
            self.remove(&oldest);
        }
    }
}

/// All sessions of this server.
#[derive(Debug, Default)]
pub(super) struct Sessions(Mutex<Table>);

impl Sessions {
    /// Begins a session. Returns its token, which is only in the cookie from now on.
    ///
    /// # Errors
    /// When the system has no random numbers.
    pub(super) fn begin(&self, actor: Actor, now_us: i64) -> Result<(String, Arc<Session>), getrandom::Error> {
        let mut random = [0; TOKEN_BYTES];
        getrandom::fill(&mut random)?;
        let token = hex::encode(random);
        let id = hash(&token);
        let mut table = self.0.lock();
        let expired: Vec<_> = table
            .sessions
            .values()
            .filter(|session| session.expires_us <= now_us)
            .map(|session| session.id)
            .collect();
        for id in expired {
            table.remove(&id);
        }
        table.make_room(SESSIONS.0, |session| session.actor.team() == actor.team());
        table.make_room(SESSIONS.1, |_| true);
        table.begun += 1;
        let lifetime_us = i64::try_from(LIFETIME.as_micros()).unwrap_or(i64::MAX);
        let session = Arc::new(Session {
            actor,
            expires_us: now_us.saturating_add(lifetime_us),
            expires_at: Instant::now() + LIFETIME,
            ended: CancellationToken::new(),
            number: table.begun,
            id,
        });
        table.sessions.insert(id, Arc::clone(&session));
        Ok((token, session))
    }

    /// The session of a token, unless it has ended.
    pub(super) fn find(&self, token: &str, now_us: i64) -> Option<Arc<Session>> {
        if token.len() != 2 * TOKEN_BYTES {
            return None;
        }
        let id = hash(token);
        let mut table = self.0.lock();
        let session = table.sessions.get(&id).cloned()?;
        if session.expires_us <= now_us {
            table.remove(&id);
            return None;
        }
        Some(session)
    }

    /// Ends a session, and what it still reads.
    pub(super) fn end(&self, session: &Session) {
        self.0.lock().remove(&session.id);
    }
}

/// Codes by which the operator signs in: each opens one session, within a few minutes.
///
/// They are no stored credential: who can ask for one can do everything on the host anyway.
#[derive(Debug, Default)]
pub(super) struct Codes(Mutex<VecDeque<(Digest, Instant)>>);

impl Codes {
    /// Makes a code.
    ///
    /// # Errors
    /// When the system has no random numbers.
    pub(super) fn issue(&self) -> Result<String, getrandom::Error> {
        let mut random = [0; CODE_BYTES];
        getrandom::fill(&mut random)?;
        let code = format!("{CODE_PREFIX}{}", hex::encode(random));
        let mut codes = self.0.lock();
        if codes.len() >= CODES_MAX {
            codes.pop_front();
        }
        codes.push_back((hash(&code), Instant::now() + CODE_LIFETIME));
        Ok(code)
    }

    /// Uses a code up. Returns whether it was one.
    pub(super) fn take(&self, code: &str) -> bool {
        let sought = hash(code);
        let now = Instant::now();
        let mut codes = self.0.lock();
        codes.retain(|(_, until)| *until > now);
        let found = codes.iter().position(|(code, _)| *code == sought);
        found.and_then(|at| codes.remove(at)).is_some()
    }
}

fn hash(token: &str) -> Digest {
    Sha256::digest(token.as_bytes()).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::authentication::Credential;

    fn begin(sessions: &Sessions, team: &str, now_us: i64) -> (String, Arc<Session>) {
        let credential = StoredCredential::of(&Credential::ApiKey("e2b_00".into())).expect("a key");
        let owner = Owner {
            credential: "key".to_owned(),
            team: team.parse().expect("an id"),
            user: "00000000-0000-4000-8000-000000000001".parse().expect("an id"),
        };
        sessions
            .begin(Actor::Team { credential, owner }, now_us)
            .expect("random numbers")
    }

    const ONE: &str = "00000000-0000-4000-8000-00000000000a";
    const OTHER: &str = "00000000-0000-4000-8000-00000000000b";

    #[test]
    fn a_session_ends_by_sign_out_and_by_age() {
        let sessions = Sessions::default();
        let (token, session) = begin(&sessions, ONE, 0);
        let (other_token, _) = begin(&sessions, ONE, 0);
        assert_ne!(token, other_token);
        assert!(sessions.find(&token, 1).is_some() && sessions.find(&token[1..], 1).is_none());
        sessions.end(&session);
        assert!(session.ended.is_cancelled());
        assert!(
            sessions.find(&token, 1).is_none(),
            "a cookie is worth nothing after a sign-out"
        );
        let end_us = i64::try_from(LIFETIME.as_micros()).expect("a time");
        let other = sessions.find(&other_token, end_us - 1).expect("not expired");
        assert!(sessions.find(&other_token, end_us).is_none() && other.ended.is_cancelled());
    }

    #[test]
    fn a_team_takes_its_own_sessions_only() {
        let sessions = Sessions::default();
        let (other_token, _) = begin(&sessions, OTHER, 0);
        let (first, first_session) = begin(&sessions, ONE, 0);
        let (second, _) = begin(&sessions, ONE, 0);
        for _ in 2..SESSIONS.0 {
            begin(&sessions, ONE, 0);
        }
        assert!(sessions.find(&first, 1).is_some());
        begin(&sessions, ONE, 0);
        assert!(sessions.find(&first, 1).is_none() && first_session.ended.is_cancelled());
        assert!(sessions.find(&second, 1).is_some() && sessions.find(&other_token, 1).is_some());
        assert_eq!(sessions.0.lock().sessions.len(), SESSIONS.0 + 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_code_of_the_operator_works_once_and_for_a_while() {
        let codes = Codes::default();
        let code = codes.issue().expect("random numbers");
        assert!(code.starts_with(CODE_PREFIX) && !codes.take("rfop_00"));
        assert!(codes.take(&code) && !codes.take(&code));
        let late = codes.issue().expect("random numbers");
        tokio::time::advance(CODE_LIFETIME).await;
        assert!(!codes.take(&late));
        let first = codes.issue().expect("random numbers");
        let last = (0..CODES_MAX).map(|_| codes.issue().expect("random numbers")).last();
        assert!(!codes.take(&first) && codes.take(&last.expect("a code")));
    }

    #[test]
    fn sessions_of_all_teams_are_bounded() {
        let sessions = Sessions::default();
        for number in 0..SESSIONS.1 + 5 {
            begin(&sessions, &format!("00000000-0000-4000-8000-{number:012x}"), 0);
        }
        assert_eq!(sessions.0.lock().sessions.len(), SESSIONS.1);
        let end_us = i64::try_from(LIFETIME.as_micros()).expect("a time");
        begin(&sessions, ONE, end_us);
        assert_eq!(sessions.0.lock().sessions.len(), 1, "expired ones are removed");
    }
}
