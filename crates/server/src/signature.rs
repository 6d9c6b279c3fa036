//! Signed requests: `Authorization: <scheme> <access key>:<signature>`, an HMAC-SHA1 over the request.
//!
//! The clients of this scheme do not agree on the text that they sign: the path is decoded or not, a missing content type
//! is signed as that of a form or not at all, and one client writes the port twice. All of these are accepted. The body is
//! always part of the text, whatever its type, so that nobody can put another body under a signature.
//!
//! The date is signed where a client sends it, and then the signature is valid for 15 minutes. Clients that send none make
//! the same signature for the same request, so it cannot be refused when it comes again: such a request can be replayed
//! by whoever has seen it. The operator can require a date.

use std::borrow::Cow;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE;
use formats::percent::{self, Plus};
use hmac::{Hmac, KeyInit as _, Mac as _};
use http::{HeaderMap, header, request};
use jiff::civil::DateTime;
use jiff::tz::TimeZone;
use sha1::Sha1;
use store::Store;
use store::error::StoreError;
use store::keys::AccessKeyRow;

use crate::authentication::Owner;
use crate::clock::{Clock, SECOND_US};
use crate::peers::{Peer, PeerRates, RatePermit};
use crate::seal::Sealer;
use crate::settings::SigningSettings;

/// How far the signed date may be from the time of this server.
const MAX_SKEW_US: i64 = 15 * 60 * SECOND_US;
/// Length of a signature in bytes.
const SIGNATURE_BYTES: usize = 20;
/// Burst and refill interval of failed signatures of one peer: to check one is expensive, and its body is read first.
const FAILURES: (u32, Duration) = (60, Duration::from_secs(1));
/// Longest access key.
const ACCESS_KEY_MAX: usize = 128;
/// The content type that some clients sign when they send none.
const FORM: &str = "application/x-www-form-urlencoded";
/// The scheme whose headers clients also sign under other names of the scheme.
const COMMON_SCHEME: &str = "Qiniu";

/// Why a signature is refused. What is said about it does not depend on the secret key.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SignatureError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("the signed token is malformed: it must be an access key, a colon and a signature in base64url")]
    Malformed,
    #[error("unknown access key")]
    UnknownKey,
    #[error("the signature does not match the request")]
    Mismatch,
    #[error("the signed date is more than 15 minutes from the time of this server, or not a date")]
    Date,
    #[error("this platform requires a signed date")]
    NoDate,
    #[error("the secret of the access key cannot be decrypted")]
    Unreadable(#[source] crate::seal::SealError),
}

/// The token of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SignedToken {
    /// The scheme in front of the token, as configured.
    scheme: String,
    access_key: String,
    signature: [u8; SIGNATURE_BYTES],
}

impl SignedToken {
    /// The token of the header `Authorization`; none if its scheme is not one of those of signed requests.
    pub(crate) fn read(headers: &HeaderMap, schemes: &[String]) -> Option<Result<Self, SignatureError>> {
        let sent = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
        let (scheme, token) = sent.split_once(' ')?;
        let scheme = schemes.iter().find(|known| known.eq_ignore_ascii_case(scheme))?;
        Some(Self::parse(scheme, token).ok_or(SignatureError::Malformed))
    }

    fn parse(scheme: &str, token: &str) -> Option<Self> {
        let (access_key, signature) = token.trim().split_once(':')?;
        let is_key =
            (1..=ACCESS_KEY_MAX).contains(&access_key.len()) && access_key.bytes().all(|byte| byte.is_ascii_graphic());
        // Before it is decoded, because only this length can be right.
        if !is_key || signature.len() != SIGNATURE_BYTES.div_ceil(3) * 4 {
            return None;
        }
        Some(Self {
            scheme: scheme.to_owned(),
            access_key: access_key.to_owned(),
            signature: URL_SAFE.decode(signature).ok()?.try_into().ok()?,
        })
    }
}

/// Verifies signed requests.
#[derive(Debug)]
pub(crate) struct Signatures {
    store: Store,
    sealer: Sealer,
    clock: Clock,
    settings: SigningSettings,
    failures: Failures,
}

/// The failed signatures of peers.
#[derive(Debug)]
struct Failures(PeerRates);

/// A signature that is being checked. It counts as failed unless [`Signatures::succeeded`] gets it back.
#[derive(Debug)]
pub(crate) struct Attempt(Option<RatePermit>);

impl Default for Failures {
    fn default() -> Self {
        Self(PeerRates::new(FAILURES.0, FAILURES.1))
    }
}

impl Failures {
    fn begin(&self, peer: Option<Peer>) -> Result<Attempt, Duration> {
        peer.map(|peer| self.0.take(peer)).transpose().map(Attempt)
    }

    fn succeeded(&self, attempt: &Attempt) {
        if let Attempt(Some(permit)) = attempt {
            self.0.give_back(permit);
        }
    }
}

impl Signatures {
    pub(crate) fn new(store: Store, sealer: Sealer, clock: Clock, settings: SigningSettings) -> Self {
        Self {
            store,
            sealer,
            clock,
            settings,
            failures: Failures::default(),
        }
    }

    /// Begins to check a signature of a known access key, before anything else of the request is read.
    ///
    /// # Errors
    /// When too many signatures of the peer have failed, with the time until the next may be checked.
    pub(crate) fn begin(&self, peer: Option<Peer>) -> Result<Attempt, Duration> {
        self.failures.begin(peer)
    }

    /// Notes that a signature was right.
    pub(crate) fn succeeded(&self, attempt: &Attempt) {
        self.failures.succeeded(attempt);
    }

    /// Whether operations on injection rules require a signature.
    pub(crate) fn rules_require_it(&self) -> bool {
        self.settings.required_for_rules
    }

    /// The token of a request; none if it is not signed.
    pub(crate) fn token(&self, headers: &HeaderMap) -> Option<Result<SignedToken, SignatureError>> {
        SignedToken::read(headers, &self.settings.schemes)
    }

    /// The access key of a token. It is looked up before the body is read, so that a request with an unknown key costs
    /// no more than this.
    pub(crate) async fn key(&self, token: &SignedToken) -> Result<AccessKeyRow, SignatureError> {
        let key = self.store.access_key_by_id(&token.access_key).await?;
        key.ok_or(SignatureError::UnknownKey)
    }

    /// The owner of the key, if the request was signed with it.
    pub(crate) fn verify(
        &self,
        token: &SignedToken,
        key: AccessKeyRow,
        parts: &request::Parts,
        body: &[u8],
    ) -> Result<Owner, SignatureError> {
        let secret = self.sealer.open(&key.id, key.secret_sealed.as_str());
        let secret = secret.map_err(SignatureError::Unreadable)?;
        let signed = matches(secret.as_bytes(), token, parts, body).ok_or(SignatureError::Mismatch)?;
        match signed.date {
            None if self.settings.require_date => return Err(SignatureError::NoDate),
            None => {}
            Some(date) => {
                let date_us = parse_date(&date).ok_or(SignatureError::Date)?;
                if (date_us - self.clock.now_us()).abs() > MAX_SKEW_US {
                    return Err(SignatureError::Date);
                }
            }
        }
        Ok(Owner {
            credential: key.id,
            team: key.team_id,
            user: key.user_id,
        })
    }
}

/// What a signature covers besides the request itself.
#[derive(Debug, PartialEq, Eq)]
struct Signed {
    /// The signed date.
    date: Option<String>,
}

/// Compares a signature with every text that a client may have signed; none if it is of none of them. Every comparison
/// takes the same time whatever the signature is.
fn matches(secret: &[u8], token: &SignedToken, parts: &request::Parts, body: &[u8]) -> Option<Signed> {
    let mut prefixes = vec![format!("x-{}-", token.scheme.to_ascii_lowercase())];
    let common = format!("x-{}-", COMMON_SCHEME.to_ascii_lowercase());
    if !prefixes.contains(&common) {
        prefixes.push(common);
    }
    let host = host(parts)?;
    let sent_type = parts.headers.get(header::CONTENT_TYPE);
    let sent_type = sent_type.map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned());
    for prefix in prefixes {
        let extra = extra_headers(&parts.headers, &prefix);
        for target in targets(parts) {
            for host in hosts(&host) {
                for content_type in content_types(sent_type.as_deref()) {
                    let mut mac = Hmac::<Sha1>::new_from_slice(secret).ok()?;
                    mac.update(parts.method.as_str().as_bytes());
                    mac.update(b" ");
                    mac.update(&target);
                    mac.update(b"\nHost: ");
                    mac.update(host.as_bytes());
                    mac.update(b"\n");
                    if let Some(content_type) = content_type {
                        mac.update(b"Content-Type: ");
                        mac.update(content_type.as_bytes());
                        mac.update(b"\n");
                    }
                    for (name, value) in &extra {
                        mac.update(name.as_bytes());
                        mac.update(b": ");
                        mac.update(value);
                        mac.update(b"\n");
                    }
                    mac.update(b"\n");
                    mac.update(body);
                    if mac.verify_slice(&token.signature).is_ok() {
                        let date = format!("{prefix}date");
                        let date = extra.iter().find(|(name, _)| name.eq_ignore_ascii_case(&date));
                        let date = date.map(|(_, value)| String::from_utf8_lossy(value).into_owned());
                        return Some(Signed { date });
                    }
                }
            }
        }
    }
    None
}

/// The host that the client sent.
fn host(parts: &request::Parts) -> Option<String> {
    match parts.headers.get(header::HOST) {
        Some(host) => Some(String::from_utf8_lossy(host.as_bytes()).into_owned()),
        // HTTP/2 has it in the target.
        None => parts.uri.authority().map(|authority| authority.as_str().to_owned()),
    }
}

/// The forms of the path, with the query.
fn targets(parts: &request::Parts) -> Vec<Vec<u8>> {
    let raw = parts.uri.path();
    let query = parts.uri.query().filter(|query| !query.is_empty());
    let with_query = |path: &[u8]| match query {
        None => path.to_vec(),
        Some(query) => [path, b"?", query.as_bytes()].concat(),
    };
    let mut targets = vec![with_query(raw.as_bytes())];
    if let Ok(decoded) = percent::decode_bytes(raw, Plus::Plus)
        && decoded != raw.as_bytes()
    {
        targets.push(with_query(&decoded));
    }
    targets
}

/// The forms of the host: as sent, and with its port twice.
fn hosts(host: &str) -> Vec<Cow<'_, str>> {
    let port = host.rsplit_once(':').map(|(_, port)| port);
    let port = port.filter(|port| !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit()));
    let doubled = port.map(|port| Cow::Owned(format!("{host}:{port}")));
    [Some(Cow::Borrowed(host)), doubled].into_iter().flatten().collect()
}

/// The forms of the content type: as sent, that of a form, none.
fn content_types(sent: Option<&str>) -> Vec<Option<&str>> {
    let mut types = vec![sent];
    for other in [Some(FORM), None] {
        if !types.contains(&other) {
            types.push(other);
        }
    }
    types
}

/// The headers that begin with a prefix and are longer, in their canonical form, sorted. Of a repeated one the first
/// value counts.
fn extra_headers(headers: &HeaderMap, prefix: &str) -> Vec<(String, Vec<u8>)> {
    let own = headers.keys().filter(|name| {
        let name = name.as_str();
        name.len() > prefix.len() && name.starts_with(prefix)
    });
    let values = own.filter_map(|name| Some((canonical(name.as_str()), headers.get(name)?.as_bytes().to_vec())));
    let mut extra: Vec<_> = values.collect();
    extra.sort();
    extra
}

/// The name of a header with capitals at the beginning and after hyphens.
fn canonical(name: &str) -> String {
    let mut is_first = true;
    name.chars()
        .map(|letter| {
            let letter = if is_first { letter.to_ascii_uppercase() } else { letter };
            is_first = letter == '-';
            letter
        })
        .collect()
}

/// A date such as `20260101T000000Z`, in microseconds since the Unix epoch.
fn parse_date(text: &str) -> Option<i64> {
    let digits = text.strip_suffix('Z')?.split_once('T')?;
    let is_number = |digits: &str, length| digits.len() == length && digits.bytes().all(|byte| byte.is_ascii_digit());
    let is_date = is_number(digits.0, 8) && is_number(digits.1, 6);
    let date = DateTime::strptime("%Y%m%dT%H%M%SZ", text).ok().filter(|_| is_date)?;
    let zoned = date.to_zoned(TimeZone::UTC).ok()?;
    Some(zoned.timestamp().as_microsecond())
}

#[cfg(test)]
mod tests;
