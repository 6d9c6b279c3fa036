//! Why files did not become a layer, or a layer not files.

use std::io;

use crate::wire::Reply;

/// Maximum length of a message about a file, in characters.
const MESSAGE_MAX: usize = 1000;
/// Reason for a failure because the files do not fit.
pub(super) const NO_SPACE: &str = "the host's disk has no space for the layer";

/// Why files did not become a layer, or a layer not files.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// A file cannot be part of a layer.
    #[error("{0}")]
    Refused(String),
    #[error("{0}")]
    Full(String),
    #[error(transparent)]
    Failed(#[from] io::Error),
}

impl From<rustix::io::Errno> for Failure {
    fn from(error: rustix::io::Errno) -> Self {
        match error {
            rustix::io::Errno::NOSPC | rustix::io::Errno::DQUOT => Self::Full(NO_SPACE.to_owned()),
            error => Self::Failed(error.into()),
        }
    }
}

impl Failure {
    /// The reply to a request that failed.
    pub(crate) fn reply(self) -> Reply {
        let short = |text: String| match text.char_indices().nth(MESSAGE_MAX) {
            Some((end, _)) => text[..end].to_owned(),
            None => text,
        };
        match self {
            Self::Refused(why) => Reply::Refused(short(why)),
            Self::Full(why) => Reply::Full(why),
            Self::Failed(error) => Reply::Failed(short(error.to_string())),
        }
    }
}
