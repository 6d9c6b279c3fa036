//! Negotiation of the content coding of a download.
//!
//! Ranges and conditions are about the bytes of the file, so they are answered in identity only. A client that takes
//! either gets gzip only where it pays, which is not decided here.

use http::StatusCode;
use http::header::{self, HeaderMap};

use super::failure::Failure;
use crate::transport::encoding::{self, Coding};

/// The coding for a request with these headers.
///
/// # Errors
/// 406 when the client refuses all there are.
pub(super) fn choose(headers: &HeaderMap) -> Result<Coding, Failure> {
    const CONDITIONS: [header::HeaderName; 4] = [
        header::RANGE,
        header::IF_RANGE,
        header::IF_MODIFIED_SINCE,
        header::IF_NONE_MATCH,
    ];
    let refuse = |message| Err(Failure::new(StatusCode::NOT_ACCEPTABLE, message));
    let Some(coding) = encoding::preferred(headers, &header::ACCEPT_ENCODING) else {
        return refuse("error parsing Accept-Encoding: no acceptable encoding found, supported: [gzip]");
    };
    let conditional = CONDITIONS.iter().any(|name| headers.contains_key(name));
    match coding {
        Coding::Gzip { only: true } if conditional => {
            refuse("identity encoding not acceptable for Range or conditional request")
        }
        Coding::Gzip { only: false } if conditional => Ok(Coding::Identity),
        coding => Ok(coding),
    }
}
