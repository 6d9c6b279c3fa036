//! Why an operation of the blob store failed.

use std::error::Error;
use std::io;

/// Why an operation of the blob store failed. The text says what to do where that is known, and has no credentials.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BlobError {
    /// The settings cannot be used.
    #[error("{0}")]
    Settings(String),
    /// No such object.
    #[error("the blob store has no object {0}")]
    NotFound(String),
    /// No such bucket.
    #[error("the blob store has no {0}: create it, or correct blobs.bucket, blobs.endpoint and blobs.region")]
    NoBucket(String),
    /// The credentials are wrong, or do not allow the operation.
    #[error(
        "the blob store refuses the credentials for {place} ({why}): correct blobs.access_key_id and its key, or let \
         them read, write, list and delete"
    )]
    Refused {
        /// The bucket, for messages.
        place: String,
        /// The code of the server.
        why: String,
    },
    /// The server did not answer, or may answer otherwise later.
    #[error("the blob store does not work for {place}: {why}")]
    Unavailable {
        /// The bucket, for messages.
        place: String,
        /// What the system or the server said.
        why: String,
    },
    /// The content was not as long as the store said, or is more than an object can have.
    #[error("object {name} {why}")]
    Content {
        /// The object.
        name: String,
        /// What is wrong with the content.
        why: String,
    },
    /// What was to be stored could not be read.
    #[error("the content of object {name} cannot be read: {why}")]
    Source {
        /// The object.
        name: String,
        /// What its source said.
        why: String,
    },
    /// The directory with the unfinished uploads failed.
    #[error("the directory of unfinished uploads: {0}")]
    Journal(String),
}

impl BlobError {
    /// Whether the error stays until the operator changes something.
    #[must_use]
    pub fn is_lasting(&self) -> bool {
        matches!(self, Self::Settings(_) | Self::NoBucket(_) | Self::Refused { .. })
    }

    pub(crate) fn of(place: &str, name: &str, error: &object_store::Error) -> Self {
        use object_store::Error as Store;
        let text = error.to_string();
        let code = code(&text);
        let place = || place.to_owned();
        match (error, code) {
            (_, Some("NoSuchBucket")) => Self::NoBucket(place()),
            (Store::NotFound { .. }, None | Some("NoSuchKey" | "NoSuchUpload" | "NotFound")) => {
                Self::NotFound(name.to_owned())
            }
            // Some servers also answer 404 when they do not know the access key.
            (Store::NotFound { .. } | Store::PermissionDenied { .. } | Store::Unauthenticated { .. }, code) => {
                Self::Refused {
                    place: place(),
                    why: code.unwrap_or("access denied").to_owned(),
                }
            }
            (_, Some(why)) => Self::Unavailable {
                place: place(),
                why: why.to_owned(),
            },
            (error, None) => Self::Unavailable {
                place: place(),
                why: innermost(error),
            },
        }
    }
}

impl From<BlobError> for io::Error {
    fn from(error: BlobError) -> Self {
        Self::other(error)
    }
}

/// The code of the answer that a text quotes. The rest of an answer may repeat what was signed.
fn code(text: &str) -> Option<&str> {
    let (_, rest) = text.split_once("<Code>")?;
    let (code, _) = rest.split_once("</Code>")?;
    let is_word = code.len() <= 64 && code.bytes().all(|byte| byte.is_ascii_alphanumeric());
    is_word.then_some(code)
}

/// The text of the innermost cause, such as that of the system, without what a server sent.
fn innermost(error: &dyn Error) -> String {
    let mut at = error;
    while let Some(cause) = at.source() {
        at = cause;
    }
    let text = at.to_string();
    let text = text.split_once('<').map_or(text.as_str(), |(before, _)| before);
    text.chars().take(200).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn generic(text: &str) -> object_store::Error {
        object_store::Error::Generic {
            store: "S3",
            source: text.to_owned().into(),
        }
    }

    #[test]
    fn of_the_answers_of_a_server_only_the_code_is_told() {
        let answer = "403: <Error><Code>SignatureDoesNotMatch</Code><AWSAccessKeyId>name</AWSAccessKeyId></Error>";
        let denied = object_store::Error::PermissionDenied {
            path: "p".to_owned(),
            source: answer.into(),
        };
        let told = BlobError::of("bucket \"b\"", "n", &denied);
        assert!(told.is_lasting());
        let text = told.to_string();
        assert!(
            text.contains("SignatureDoesNotMatch") && !text.contains("name<"),
            "{text}"
        );
        let text = BlobError::of("b", "n", &generic("status 500: <Error><Secret>s</Secret>")).to_string();
        assert!(text.contains("status 500") && !text.contains("Secret"), "{text}");
        let missing = BlobError::of("b", "n", &generic("404: <Error><Code>NoSuchBucket</Code></Error>"));
        assert_eq!(missing, BlobError::NoBucket("b".to_owned()));
    }
}
