//! Identifiers: one type for each kind, valid by construction.
//!
//! The formats are what existing clients parse: a sandbox id has no dash because it is part of a host label
//! (`<port>-<id>.<domain>`), and API keys are `e2b_` + hexadecimal because older SDKs check that before any call.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A string that is not an id of the expected kind.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid {kind}: {why}")]
pub struct InvalidId {
    /// The expected kind, in words for a client, e.g. `sandbox ID`.
    pub kind: &'static str,
    /// What is wrong with the input.
    pub why: &'static str,
}

const ALPHABET: &[u8; 36] = b"0123456789abcdefghijklmnopqrstuvwxyz";

/// Maps random bytes to `[a-z0-9]`. The bias of `256 % 36` costs less than 0.1 bit per character.
fn base36(random: &[u8]) -> String {
    random
        .iter()
        .map(|byte| char::from(ALPHABET[usize::from(*byte) % ALPHABET.len()]))
        .collect()
}

macro_rules! text_id {
    ($(#[$doc:meta])* $name:ident, $kind:literal, $valid:expr) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// The id as text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = InvalidId;

            fn from_str(text: &str) -> Result<Self, InvalidId> {
                let valid: fn(&str) -> Result<(), &'static str> = $valid;
                valid(text).map_err(|why| InvalidId { kind: $kind, why })?;
                Ok(Self(text.to_owned()))
            }
        }

        impl TryFrom<String> for $name {
            type Error = InvalidId;

            fn try_from(text: String) -> Result<Self, InvalidId> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> String {
                id.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

fn lower_alphanumeric(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit() || b.is_ascii_lowercase())
}

fn uuid_shape(text: &str) -> Result<(), &'static str> {
    let bytes = text.as_bytes();
    let ok = bytes.len() == 36
        && bytes.iter().enumerate().all(|(i, b)| match i {
            8 | 13 | 18 | 23 => *b == b'-',
            _ => b.is_ascii_digit() || (b'a'..=b'f').contains(b),
        });
    if ok { Ok(()) } else { Err("must be a lower-case UUID") }
}

text_id!(
    /// A sandbox: `i` and 20 characters of `[a-z0-9]`. Any `[a-z0-9]` of at most 60 characters is accepted, which is
    /// what fits in a host label beside a port: an id that was never issued is simply not found.
    SandboxId,
    "sandbox ID",
    |text| {
        if !lower_alphanumeric(text) {
            return Err("must consist of lower-case letters and digits");
        }
        if text.len() > 60 { Err("must not be longer than 60 characters") } else { Ok(()) }
    }
);

impl SandboxId {
    /// A new id from 20 random bytes.
    #[must_use]
    pub fn from_random(random: &[u8; 20]) -> Self {
        Self(format!("i{}", base36(random)))
    }

    /// Whether it has the form of the ids that [`Self::from_random`] makes: no other one is that of a sandbox.
    #[must_use]
    pub fn is_issued(&self) -> bool {
        self.0.len() == 21 && self.0.starts_with('i')
    }

    /// Reads an id as clients send it in a path: older ones append `-` and a client id, which is dropped.
    ///
    /// # Errors
    /// When the text before the dash is not an id, or there is more than one dash.
    pub fn from_path(text: &str) -> Result<Self, InvalidId> {
        match text.split_once('-') {
            None => text.parse(),
            Some((id, client)) if lower_alphanumeric(client) => id.parse(),
            Some(_) => Err(InvalidId {
                kind: "sandbox ID",
                why: "only one dash and a client ID may follow the ID",
            }),
        }
    }
}

text_id!(
    /// A disk of a sandbox: `d` and 20 characters of `[a-z0-9]`. A number of at most 4 digits is the id of a
    /// disk of an older version.
    DiskId,
    "disk ID",
    |text| {
        let random = text.strip_prefix('d').unwrap_or_default();
        let is_number = text.len() <= 4 && !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        if is_number || (random.len() == 20 && lower_alphanumeric(random)) {
            Ok(())
        } else {
            Err("must be `d` and 20 lower-case letters and digits")
        }
    }
);

impl DiskId {
    /// A new id from 20 random bytes.
    #[must_use]
    pub fn from_random(random: &[u8; 20]) -> Self {
        Self(format!("d{}", base36(random)))
    }
}

text_id!(
    /// A layer: an immutable directory tree that a node stores, named by the SHA-256 of what it contains, as 64
    /// lower-case hexadecimal digits.
    LayerId,
    "layer ID",
    |text| {
        let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        if text.len() == 64 && text.bytes().all(is_digit) {
            Ok(())
        } else {
            Err("must be 64 lower-case hexadecimal digits")
        }
    }
);

impl LayerId {
    /// Creates the id of the layer with this hash.
    #[must_use]
    pub fn from_hash(hash: &[u8; 32]) -> Self {
        Self(hex::encode(hash))
    }
}

text_id!(
    /// A template: 20 characters of `[a-z0-9]`.
    TemplateId,
    "template ID",
    |text| {
        if text.len() == 20 && lower_alphanumeric(text) {
            Ok(())
        } else {
            Err("must be 20 lower-case letters and digits")
        }
    }
);

impl TemplateId {
    /// A new id from 20 random bytes.
    #[must_use]
    pub fn from_random(random: &[u8; 20]) -> Self {
        Self(base36(random))
    }
}

text_id!(
    /// One build of a template: a UUID.
    BuildId, "build ID", uuid_shape
);
text_id!(
    /// A team, the owner of sandboxes, templates and keys: a UUID.
    TeamId, "team ID", uuid_shape
);
text_id!(
    /// A user of one team: a UUID.
    UserId, "user ID", uuid_shape
);
text_id!(
    /// A node, which is one data directory on a host: a UUID that stays the same for the life of the directory.
    NodeId, "node ID", uuid_shape
);
text_id!(
    /// The owner of a node's lease: a UUID of one data directory in one place. The directory's lock allows one server
    /// there.
    OwnerId, "owner ID", uuid_shape
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sandbox_ids_are_validated() {
        for (text, ok) in [
            ("i0123456789abcdefghij", true),
            ("abc", true),
            ("", false),
            ("Iabc", false),
            ("i-abc", false),
            ("i_abc", false),
            ("é", false),
        ] {
            assert_eq!(text.parse::<SandboxId>().is_ok(), ok, "{text}");
        }
        assert!("a".repeat(60).parse::<SandboxId>().is_ok());
        assert!("a".repeat(61).parse::<SandboxId>().is_err());
        let id = SandboxId::from_random(&[255; 20]);
        assert_eq!(id.as_str().len(), 21);
        assert_eq!(id.as_str().parse::<SandboxId>().as_ref(), Ok(&id));
    }

    #[test]
    fn disk_ids_are_validated() {
        let id = DiskId::from_random(&[7; 20]);
        assert_eq!(id.as_str().parse().as_ref(), Ok(&id));
        for (text, ok) in [
            ("0", true),
            ("4095", true),
            ("", false),
            ("40960", false),
            ("-1", false),
            ("d", false),
            ("d1", false),
            ("d0123456789abcdefghij", true),
            ("i0123456789abcdefghij", false),
            ("d../../../../../../pas", false),
        ] {
            assert_eq!(text.parse::<DiskId>().is_ok(), ok, "{text}");
        }
    }

    #[test]
    fn layer_ids_are_validated() {
        let id = LayerId::from_hash(&[0xa5; 32]);
        assert_eq!(id.as_str(), "a5".repeat(32));
        assert_eq!(id.as_str().parse().as_ref(), Ok(&id));
        for text in [
            "",
            "a5",
            &"A5".repeat(32),
            &"g5".repeat(32),
            &"a5".repeat(33),
            &format!("../{}", "a".repeat(61)),
        ] {
            assert!(text.parse::<LayerId>().is_err(), "{text}");
        }
    }

    #[test]
    fn the_client_id_of_older_sdks_is_dropped() {
        for (text, want) in [
            ("iabc", Some("iabc")),
            ("iabc-6532622b", Some("iabc")),
            ("iabc-6532622b-x", None),
            ("iabc-", None),
            ("-iabc", None),
        ] {
            assert_eq!(
                SandboxId::from_path(text).ok().as_ref().map(SandboxId::as_str),
                want,
                "{text}"
            );
        }
    }

    #[test]
    fn uuids_are_lower_case_with_dashes() {
        assert!("0b0e1d52-58ff-4c8e-8f0d-0a1b2c3d4e5f".parse::<TeamId>().is_ok());
        assert!("0B0E1D52-58ff-4c8e-8f0d-0a1b2c3d4e5f".parse::<TeamId>().is_err());
        assert!("0b0e1d5258ff4c8e8f0d0a1b2c3d4e5f".parse::<TeamId>().is_err());
    }
}
