//! Names of objects below the prefix.

use std::fmt;

use model::id::{LayerId, SandboxId, TeamId};

const LAYERS: &str = "layers/";
const LAYER_END: &str = ".tar.zst";
const FILES: &str = "files/";
const FILE_END: &str = ".tar";
const PARCELS: &str = "parcels/";
const MANIFEST_END: &str = ".manifest";
/// Length of the id of a parcel, in hexadecimal digits.
const PARCEL_DIGITS: usize = 32;

/// The name of an object that the platform keeps. Every other name belongs to another user.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Name {
    /// A layer as an archive.
    Layer(LayerId),
    /// An archive that a team uploaded under a hash of its client: 64 lower-case hexadecimal digits.
    File(TeamId, String),
    /// A chunk of copies of a paused sandbox, encrypted: 64 lower-case hexadecimal digits.
    Chunk(SandboxId, String),
    /// The manifest of a copy of a paused sandbox, encrypted: 32 lower-case hexadecimal digits. It is written last.
    Manifest(SandboxId, String),
}

impl Name {
    /// What the names of all objects of builds begin with, below the prefix.
    pub(crate) const FOLDERS_OF_BUILDS: [&'static str; 2] = ["layers", "files"];
    /// What the names of all objects of copies begin with, below the prefix.
    pub(crate) const FOLDER_OF_COPIES: &'static str = "parcels";

    /// What the names of all objects of a sandbox begin with, below the prefix.
    pub(crate) fn folder_of(id: &SandboxId) -> String {
        format!("{PARCELS}{id}")
    }

    /// Parses the name of an object; none if `Display` does not write such a text.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let name = if let Some(rest) = text.strip_prefix(LAYERS) {
            Self::Layer(rest.strip_suffix(LAYER_END)?.parse().ok()?)
        } else if let Some(rest) = text.strip_prefix(PARCELS) {
            let (id, name) = rest.split_once('/')?;
            let id = id.parse().ok()?;
            match name.strip_suffix(MANIFEST_END) {
                Some(parcel) if is_hexadecimal(parcel, PARCEL_DIGITS) => Self::Manifest(id, parcel.to_owned()),
                None if is_hexadecimal(name, 2 * PARCEL_DIGITS) => Self::Chunk(id, name.to_owned()),
                _ => return None,
            }
        } else {
            let (team, hash) = text.strip_prefix(FILES)?.strip_suffix(FILE_END)?.split_once('/')?;
            // A hash is what the id of a layer is.
            let hash: LayerId = hash.parse().ok()?;
            Self::File(team.parse().ok()?, hash.as_str().to_owned())
        };
        (name.to_string() == text).then_some(name)
    }
}

fn is_hexadecimal(text: &str, digits: usize) -> bool {
    text.len() == digits && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Layer(id) => write!(f, "{LAYERS}{id}{LAYER_END}"),
            Self::File(team, hash) => write!(f, "{FILES}{team}/{hash}{FILE_END}"),
            Self::Chunk(id, hash) => write!(f, "{PARCELS}{id}/{hash}"),
            Self::Manifest(id, parcel) => write!(f, "{PARCELS}{id}/{parcel}{MANIFEST_END}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written_and_nothing_else_is_a_name() {
        let hash = "a5".repeat(32);
        let team: TeamId = "6a3e2f43-5d3c-4a43-8d5c-0d6c8a6f4a10".parse().unwrap();
        let layer = Name::Layer(hash.parse().unwrap());
        let file = Name::File(team, hash.clone());
        let sandbox: SandboxId = "ione".parse().unwrap();
        let chunk = Name::Chunk(sandbox.clone(), hash.clone());
        let manifest = Name::Manifest(sandbox, "0f".repeat(16));
        for name in [layer, file, chunk, manifest] {
            assert_eq!(Name::parse(&name.to_string()), Some(name));
        }
        for text in [
            "".to_owned(),
            "owner".to_owned(),
            "layers/".to_owned(),
            format!("layers/{hash}"),
            format!("layers/{hash}.tar.zst.bak"),
            format!("layers/x/{hash}.tar.zst"),
            format!("other/{hash}.tar.zst"),
            format!("files/{hash}.tar"),
            "files/a/b.tar".to_owned(),
            format!("parcels/{hash}"),
            "parcels/ione/0f".to_owned(),
            format!("parcels/ione/x/{hash}"),
            format!("parcels/ione/{hash}.manifest"),
            format!("parcels/ione/{}", hash.to_uppercase()),
        ] {
            assert_eq!(Name::parse(&text), None, "{text}");
        }
    }
}
