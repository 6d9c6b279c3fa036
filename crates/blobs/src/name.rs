//! Names of objects below the prefix.

use std::fmt;

use model::id::{BuildId, LayerId, SandboxId, TeamId};

const LAYERS: &str = "layers/";
const LAYER_END: &str = ".tar.zst";
const FILES: &str = "files/";
const FILE_END: &str = ".tar";
const PARCELS: &str = "parcels/";
const MEMORIES: &str = "memories/";
const MANIFEST_END: &str = ".manifest";
/// Length of the id of a parcel, in hexadecimal digits.
const PARCEL_DIGITS: usize = 32;

/// What a copy is of.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum CopyOf {
    /// A paused sandbox.
    Sandbox(SandboxId),
    /// The memory of the snapshot that is this build.
    Memory(BuildId),
}

impl fmt::Display for CopyOf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sandbox(id) => id.fmt(f),
            Self::Memory(build) => build.fmt(f),
        }
    }
}

impl CopyOf {
    /// What the names of all objects of its copies begin with, below the prefix.
    pub(crate) fn folder(&self) -> String {
        match self {
            Self::Sandbox(id) => format!("{PARCELS}{id}"),
            Self::Memory(build) => format!("{MEMORIES}{build}"),
        }
    }
}

/// The name of an object that the platform keeps. Every other name belongs to another user.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Name {
    /// A layer as an archive.
    Layer(LayerId),
    /// An archive that a team uploaded under a hash of its client: 64 lower-case hexadecimal digits.
    File(TeamId, String),
    /// A chunk of copies, encrypted: 64 lower-case hexadecimal digits.
    Chunk(CopyOf, String),
    /// The manifest of a copy, encrypted: 32 lower-case hexadecimal digits. It is written last.
    Manifest(CopyOf, String),
}

impl Name {
    /// What the names of all objects of builds begin with, below the prefix.
    pub(crate) const FOLDERS_OF_BUILDS: [&'static str; 2] = ["layers", "files"];
    /// What the names of all objects of copies of sandboxes begin with, below the prefix.
    pub(crate) const FOLDER_OF_SANDBOXES: &'static str = "parcels";
    /// What the names of all objects of copies of memories begin with, below the prefix.
    pub(crate) const FOLDER_OF_MEMORIES: &'static str = "memories";

    /// Parses the name of an object; none if `Display` does not write such a text.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let name = if let Some(rest) = text.strip_prefix(LAYERS) {
            Self::Layer(rest.strip_suffix(LAYER_END)?.parse().ok()?)
        } else if let Some((id, name)) = text.strip_prefix(PARCELS).and_then(|rest| rest.split_once('/')) {
            Self::of_copy(CopyOf::Sandbox(id.parse().ok()?), name)?
        } else if let Some((build, name)) = text.strip_prefix(MEMORIES).and_then(|rest| rest.split_once('/')) {
            Self::of_copy(CopyOf::Memory(build.parse().ok()?), name)?
        } else {
            let (team, hash) = text.strip_prefix(FILES)?.strip_suffix(FILE_END)?.split_once('/')?;
            // A hash is what the id of a layer is.
            let hash: LayerId = hash.parse().ok()?;
            Self::File(team.parse().ok()?, hash.as_str().to_owned())
        };
        (name.to_string() == text).then_some(name)
    }

    fn of_copy(of: CopyOf, name: &str) -> Option<Self> {
        match name.strip_suffix(MANIFEST_END) {
            Some(parcel) if is_hexadecimal(parcel, PARCEL_DIGITS) => Some(Self::Manifest(of, parcel.to_owned())),
            None if is_hexadecimal(name, 2 * PARCEL_DIGITS) => Some(Self::Chunk(of, name.to_owned())),
            _ => None,
        }
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
            Self::Chunk(of, hash) => write!(f, "{}/{hash}", of.folder()),
            Self::Manifest(of, parcel) => write!(f, "{}/{parcel}{MANIFEST_END}", of.folder()),
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
        let build: BuildId = "11111111-2222-4333-8444-555555555555".parse().unwrap();
        let of_copies = [CopyOf::Sandbox("ione".parse().unwrap()), CopyOf::Memory(build)];
        let of_copies = of_copies.into_iter().flat_map(|of| {
            [
                Name::Chunk(of.clone(), hash.clone()),
                Name::Manifest(of, "0f".repeat(16)),
            ]
        });
        for name in [layer, file].into_iter().chain(of_copies) {
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
            format!("memories/ione/{hash}"),
            format!("parcels/11111111-2222-4333-8444-555555555555/{hash}"),
        ] {
            assert_eq!(Name::parse(&text), None, "{text}");
        }
    }
}
