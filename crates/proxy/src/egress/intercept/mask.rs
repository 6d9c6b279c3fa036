//! Hiding secrets in answers that contain them: a server that shows the request to its client would otherwise tell the
//! sandbox.
//!
//! Bytes are replaced one by one, so that lengths stay right. A text is searched for all forms of all secrets at once with
//! the automaton of Aho and Corasick, whose state says at each byte how much of a form may have begun; that much is held
//! back until more bytes decide, except for a few bytes: holding them back would stop protocols in which each side waits
//! for the other. If a form was cut there, those few bytes are all that gets through.

use std::collections::VecDeque;
use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD, URL_SAFE_NO_PAD};
use bytes::{Bytes, BytesMut};
use http::{HeaderMap, HeaderName, HeaderValue};

/// Shortest text that is hidden. What is shorter occurs by chance.
const SHORTEST: usize = 8;
/// Longest text that is hidden.
const LONGEST: usize = 16 << 10;
/// Bytes that are not held back although a secret may begin with them.
const LET_THROUGH: usize = 3;
/// What hidden bytes become.
const MASK: u8 = b'*';
/// States of an automaton, about one per byte of a form, each of some 64 bytes: for secrets as they are, and with their
/// other forms. What is beyond is not searched for.
const PLAIN_STATES: usize = 64 << 10;
const STATES: usize = 16 << 10;

/// What finds the secrets of a rule.
pub(super) struct Masker {
    any: Automaton,
    /// What finds them in names of headers, which have no case: forms in lower case.
    in_names: Automaton,
}

/// What finds some forms of secrets.
struct Automaton {
    states: Vec<State>,
    /// The state after each byte at the root, which is where a search is almost always.
    first: [u32; 256],
}

impl fmt::Debug for Masker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Masker")
            .field("states", &self.any.states.len())
            .finish_non_exhaustive()
    }
}

#[derive(Default)]
struct State {
    next: Vec<(u8, u32)>,
    fail: u32,
    /// Bytes of a form that led here.
    depth: u32,
    /// Length of the longest form that ends here; 0 if none does.
    ends: u32,
}

impl Masker {
    /// Hides these secrets, in every form in which servers usually show them.
    pub(super) fn new<'a>(secrets: impl Iterator<Item = &'a str>) -> Self {
        let (mut any, mut in_names) = (Automaton::new(), Automaton::new());
        let is_hidden = |secret: &&str| (SHORTEST..=LONGEST).contains(&secret.len()) && !is_media_type(secret);
        let secrets: Vec<&str> = secrets.filter(is_hidden).collect();
        // All secrets come before other forms of any.
        let mut are_all = secrets.iter().all(|secret| any.add(secret.as_bytes(), PLAIN_STATES));
        for secret in secrets {
            for mut form in forms(secret) {
                are_all &= any.add(&form, STATES);
                if HeaderName::from_bytes(&form).is_ok() {
                    form.make_ascii_lowercase();
                    are_all &= in_names.add(&form, PLAIN_STATES);
                }
            }
        }
        if !are_all {
            tracing::warn!(
                "secrets of an injection rule are too long, or too many, to hide all their forms in answers to the sandbox: some may be \
                 seen inside if a server sends them back; shorten them, or use fewer rules"
            );
        }
        any.link();
        in_names.link();
        Self { any, in_names }
    }

    /// Whether there is nothing to hide.
    pub(super) fn is_empty(&self) -> bool {
        self.any.states.len() == 1
    }

    /// Whether the name of a header has a secret in it.
    fn is_in_name(&self, name: &HeaderName) -> bool {
        !scan_clean(&self.in_names, 0, name.as_str().as_bytes()).1
    }

    /// The value of a header with its secrets hidden; none if it has none.
    fn header(&self, value: &HeaderValue) -> Option<HeaderValue> {
        if scan_clean(&self.any, 0, value.as_bytes()).1 {
            return None;
        }
        let mut masked = BytesMut::from(value.as_bytes());
        Search::default().scan_from(&self.any, &mut masked, 0);
        Some(HeaderValue::from_bytes(&masked).expect("bytes of a header, and asterisks"))
    }
}

/// Hides secrets in headers or trailers. One with a secret in its name is removed.
pub(super) fn mask_headers(headers: &mut HeaderMap, masker: &Masker) {
    let shown: Vec<HeaderName> = headers.keys().filter(|name| masker.is_in_name(name)).cloned().collect();
    for name in shown {
        headers.remove(name);
    }
    for value in headers.values_mut() {
        if let Some(masked) = masker.header(value) {
            *value = masked;
        }
    }
}

impl Automaton {
    fn new() -> Self {
        Self {
            states: vec![State::default()],
            first: [0; 256],
        }
    }

    /// Searches for one more form, unless that needs more states. Whether it is searched for.
    fn add(&mut self, form: &[u8], most: usize) -> bool {
        if self.states.len() + form.len() > most {
            return false;
        }
        let mut at = 0usize;
        for (depth, byte) in (1u32..).zip(form) {
            let known = self.states[at].next.iter().find(|(label, _)| label == byte);
            at = match known {
                Some((_, next)) => *next as usize,
                None => {
                    let new = self.states.len();
                    self.states.push(State {
                        depth,
                        ..State::default()
                    });
                    self.states[at].next.push((*byte, index(new)));
                    new
                }
            };
        }
        let state = &mut self.states[at];
        state.ends = state.ends.max(state.depth);
        true
    }

    fn link(&mut self) {
        let mut queue = VecDeque::new();
        for (byte, next) in self.states[0].next.clone() {
            self.first[usize::from(byte)] = next;
            queue.push_back(next);
        }
        while let Some(at) = queue.pop_front() {
            for (byte, next) in self.states[at as usize].next.clone() {
                let fail = self.step(self.states[at as usize].fail, byte);
                let ends = self.states[fail as usize].ends;
                let state = &mut self.states[next as usize];
                state.fail = fail;
                state.ends = state.ends.max(ends);
                queue.push_back(next);
            }
        }
    }

    fn step(&self, mut at: u32, byte: u8) -> u32 {
        loop {
            if at == 0 {
                return self.first[usize::from(byte)];
            }
            let state = &self.states[at as usize];
            if let Some((_, next)) = state.next.iter().find(|(label, _)| *label == byte) {
                return *next;
            }
            at = state.fail;
        }
    }
}

fn index(index: usize) -> u32 {
    u32::try_from(index).expect("there are fewer states")
}

/// A value of a header that is no secret, and occurs everywhere.
fn is_media_type(text: &str) -> bool {
    [
        "application/",
        "text/",
        "image/",
        "audio/",
        "video/",
        "multipart/",
        "*/*",
    ]
    .iter()
    .any(|start| text.starts_with(start))
}

/// The forms of a secret: as it is, in hexadecimal digits, percent-encoded, in JSON, and in base64 at every place that it
/// may have in an encoded text.
fn forms(secret: &str) -> Vec<Vec<u8>> {
    let bytes = secret.as_bytes();
    let percent = |keep: &[u8], upper: bool| -> String {
        let encode = |byte: &u8| match byte {
            byte if byte.is_ascii_alphanumeric() || keep.contains(byte) => char::from(*byte).to_string(),
            byte if upper => format!("%{byte:02X}"),
            byte => format!("%{byte:02x}"),
        };
        bytes.iter().map(encode).collect()
    };
    let json = serde_json::to_string(secret).unwrap_or_default();
    let json = json.get(1..json.len().saturating_sub(1)).unwrap_or_default();
    let mut forms = vec![
        secret.to_owned(),
        hex::encode(bytes),
        hex::encode_upper(bytes),
        percent(b"-._~", true),
        percent(b"-._~", false),
        percent(b"-._~/:@!$&'()*+,;=", true),
        percent(b"-._*", true).replace("%20", "+"),
        json.to_owned(),
        json.replace('/', "\\/"),
        secret.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;"),
    ];
    for before in 0..3 {
        let text = [&b"\0\0"[..before], bytes].concat();
        // Characters that are not of the secret alone depend on what is before and after it.
        let start = (before * 8).div_ceil(6);
        for encoded in [STANDARD_NO_PAD.encode(&text), URL_SAFE_NO_PAD.encode(&text)] {
            let end = text.len() * 8 / 6;
            forms.extend(encoded.get(start..end).map(str::to_owned));
        }
    }
    // The encoded secret as a whole, of which nothing is left then.
    forms.push(STANDARD.encode(bytes));
    forms.sort_unstable();
    forms.dedup();
    let forms = forms.into_iter().filter(|form| form.len() >= SHORTEST);
    forms.map(String::into_bytes).collect()
}

/// A search through a text that comes in parts.
#[derive(Debug, Default)]
pub(super) struct Search {
    state: u32,
    /// Bytes that are held back.
    held: BytesMut,
}

impl Search {
    /// The bytes that may be passed on, now that these have come.
    pub(super) fn push(&mut self, masker: &Masker, part: Bytes) -> Bytes {
        if self.held.is_empty() {
            // Mostly a part is passed on as it is.
            let before = self.state;
            let (state, is_clean) = scan_clean(&masker.any, before, &part);
            if is_clean && depth(masker, state) <= LET_THROUGH {
                self.state = state;
                return part;
            }
        }
        let from = self.held.len();
        self.held.extend_from_slice(&part);
        let mut all = std::mem::take(&mut self.held);
        self.scan_from(&masker.any, &mut all, from);
        let open = depth(masker, self.state);
        let keep = if open <= LET_THROUGH { 0 } else { open.min(all.len()) };
        let ready = all.split_to(all.len() - keep);
        self.held = all;
        ready.freeze()
    }

    /// The bytes that were held back, at the end of the text.
    pub(super) fn finish(&mut self) -> Bytes {
        std::mem::take(&mut self.held).freeze()
    }

    /// How many bytes are held back.
    pub(super) fn held(&self) -> usize {
        self.held.len()
    }

    /// Whether no bytes are held back.
    pub(super) fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    fn scan_from(&mut self, masker: &Automaton, text: &mut [u8], from: usize) {
        for at in from..text.len() {
            self.state = masker.step(self.state, text[at]);
            let length = masker.states[self.state as usize].ends as usize;
            if length > 0 {
                // What is before the text was let through.
                let start = (at + 1).saturating_sub(length);
                text[start..=at].fill(MASK);
            }
        }
    }
}

fn depth(masker: &Masker, state: u32) -> usize {
    masker.any.states[state as usize].depth as usize
}

/// The state after a text, and whether no secret ends in it.
fn scan_clean(masker: &Automaton, mut state: u32, text: &[u8]) -> (u32, bool) {
    for byte in text {
        state = match state {
            0 => masker.first[usize::from(*byte)],
            _ => masker.step(state, *byte),
        };
        if state != 0 && masker.states[state as usize].ends > 0 {
            return (state, false);
        }
    }
    (state, true)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECRET: &str = "sk-Zq9/tok+en?\"value";

    fn masked(masker: &Masker, parts: &[&[u8]]) -> Vec<u8> {
        let mut search = Search::default();
        let mut all = Vec::new();
        for part in parts {
            all.extend(search.push(masker, Bytes::copy_from_slice(part)));
        }
        all.extend(search.finish());
        all
    }

    fn of(secrets: &[&str]) -> Masker {
        Masker::new(secrets.iter().copied())
    }

    #[test]
    fn every_form_is_hidden() {
        let masker = of(&[SECRET]);
        let mut texts: Vec<String> = forms(SECRET)
            .into_iter()
            .map(|form| String::from_utf8(form).unwrap())
            .collect();
        for user in ["", "x", "xy", "xyz", "x-access-token:"] {
            texts.push(STANDARD.encode(format!("{user}{SECRET}")));
            texts.push(URL_SAFE_NO_PAD.encode(format!("{user}{SECRET}:")));
        }
        for text in texts {
            let shown = masked(&masker, &[format!("a {text} b").as_bytes()]);
            let shown = String::from_utf8(shown).unwrap();
            assert_eq!(shown.len(), text.len() + 4, "{text}");
            let left = shown.bytes().filter(|byte| *byte != b'*').count();
            // The user before, and characters of base64 that have bits of both.
            assert!(left <= 4 + 24 && shown.contains("********"), "{text}: {shown}");
        }
        assert_eq!(masked(&masker, &[b"nothing"]), b"nothing");
    }

    #[test]
    fn a_cut_lets_a_few_bytes_through() {
        let masker = of(&["0123456789"]);
        for cut in 0..=10 {
            let text = b"ab0123456789cd";
            let shown = masked(&masker, &[&text[..2 + cut], &text[2 + cut..]]);
            let mut want = b"ab**********cd".to_vec();
            if cut <= LET_THROUGH {
                want[2..2 + cut].copy_from_slice(&text[2..2 + cut]);
            }
            assert_eq!(shown, want, "{cut}");
        }
    }

    #[test]
    fn what_only_begins_like_a_secret_is_not_lost() {
        let masker = of(&["0123456789", "3456abcd"]);
        assert_eq!(masked(&masker, &[b"012345"]), b"012345");
        assert_eq!(masked(&masker, &[b"012345", b"x"]), b"012345x");
        assert_eq!(masked(&masker, &[b"0123456", b"abcd"]), b"012********");
        assert_eq!(masked(&masker, &[b"01234567890123456789"]), b"********************");
    }

    #[test]
    fn many_secrets_are_hidden_at_least_as_they_are() {
        let secrets: Vec<String> = (0..20).map(|at| format!("{at:02}{}", "x".repeat(2000))).collect();
        let masker = Masker::new(secrets.iter().map(String::as_str));
        assert!(masker.any.states.len() <= PLAIN_STATES);
        for secret in &secrets {
            assert!(masked(&masker, &[secret.as_bytes()]).iter().all(|byte| *byte == MASK));
        }
    }

    #[test]
    fn names_of_headers_have_no_case() {
        let masker = of(&["sk-ABC-0123456789", "Bearer sk-ABC-0123456789"]);
        let encoded = URL_SAFE_NO_PAD.encode("sk-ABC-0123456789");
        for (name, is_shown) in [
            ("x-sk-ABC-0123456789-y", true),
            ("sk-abc-0123456789", true),
            (encoded.as_str(), true),
            ("736b2d4142432d30313233343536373839", true),
            ("sk-abc-012345678", false),
            ("content-type", false),
        ] {
            let name = HeaderName::from_bytes(name.as_bytes()).unwrap();
            assert_eq!(masker.is_in_name(&name), is_shown, "{name}");
        }
    }

    #[test]
    fn what_is_no_secret_is_not_hidden() {
        assert!(of(&["short", "application/json", "text/event-stream"]).is_empty());
        let masker = of(&["Bearer abcdefgh"]);
        assert!(masker.header(&HeaderValue::from_static("Bearer x")).is_none());
        let shown = masker.header(&HeaderValue::from_static("x Bearer abcdefgh y")).unwrap();
        assert_eq!(shown, "x *************** y");
    }

    proptest! {
        #[test]
        fn parts_make_no_difference(text in "[ab]{0,60}", cuts in proptest::collection::vec(0usize..60, 0..6)) {
            let masker = of(&["abababba", "bbbbbbbb", "abbabbabba", "aaaaaaaaab"]);
            let whole = masked(&masker, &[text.as_bytes()]);
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(text.len())).collect();
            cuts.sort_unstable();
            cuts.insert(0, 0);
            cuts.push(text.len());
            let parts: Vec<&[u8]> = cuts.windows(2).map(|cut| &text.as_bytes()[cut[0]..cut[1]]).collect();
            let shown = masked(&masker, &parts);
            prop_assert_eq!(shown.len(), text.len());
            // Each cut may have let some bytes through.
            let differ = shown.iter().zip(&whole).filter(|(one, other)| one != other).count();
            prop_assert!(differ <= LET_THROUGH * parts.len());
            let naive = naive(&text, &["abababba", "bbbbbbbb", "abbabbabba", "aaaaaaaaab"]);
            prop_assert_eq!(whole, naive);
        }
    }

    fn naive(text: &str, secrets: &[&str]) -> Vec<u8> {
        let mut shown = text.as_bytes().to_vec();
        for form in secrets.iter().flat_map(|secret| forms(secret)) {
            for at in 0..text.len() {
                if text.as_bytes()[at..].starts_with(&form) {
                    shown[at..at + form.len()].fill(MASK);
                }
            }
        }
        shown
    }
}
