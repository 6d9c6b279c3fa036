//! What HTTP may take on either side of an intercepted connection.

/// Maximum size of the head of a request or a response.
pub(super) const HEAD_BYTES: u32 = 64 << 10;
/// Maximum number of headers of a request or a response.
pub(super) const HEADERS: usize = 200;
/// What may be on its way on one of many connections with HTTP/2, where one stream may take all of it: the least with
/// which HTTP/2 begins.
const WINDOW_BYTES_OF_MANY: u32 = (64 << 10) - 1;

/// The windows of a stream and of a connection with HTTP/2.
pub(super) const fn windows(stream: u32, is_of_many: bool) -> (u32, u32) {
    if is_of_many {
        (WINDOW_BYTES_OF_MANY, WINDOW_BYTES_OF_MANY)
    } else {
        (stream, stream * 4)
    }
}
