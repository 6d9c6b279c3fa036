//! gRPC calls, which need HTTP/2 on both sides: their status is in the trailers, both directions stream at the same time,
//! and gRPC servers serve nothing else.
//!
//! A call that arrives over HTTP/2 is forwarded over HTTP/2 without TLS and without an upgrade ("prior knowledge"), on a
//! connection of its own. So a call that is cut, or a server inside that misbehaves, affects no other call, and the end
//! of a call is the end of everything that was opened for it. All other requests are forwarded over HTTP/1.1, which every
//! server understands, and so are those to ports with TLS inside.
//!
//! A server inside is not trusted: it may buffer here what it may over HTTP/1.1, the windows of HTTP/2 included.

use std::future::Future;

use http::header::{CONNECTION, CONTENT_TYPE, HOST, TRANSFER_ENCODING};
use http::uri::{Authority, Scheme};
use http::{HeaderMap, Request, Response, Uri, Version};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use protocol::node::DialError;
use tokio_util::either::Either;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::answer::Answer;
use super::connector::{Connector, GUEST_BUFFER_BYTES};
use super::dial;
use super::failure::{closed, instead, unanswered};
use super::guest::{GuestStream, Head};
use super::pool::Lease;
use super::request_body::RequestBody;
use super::route::Target;
use super::unanswered::Unanswered;

/// Maximum size of the headers, and of the trailers, of a response.
const HEADERS_MAX_BYTES: u32 = 64 * 1024;
const WINDOW_BYTES: u32 = 128 * 1024;

/// Whether a request is a gRPC call. gRPC-Web is made for HTTP/1.1.
pub(super) fn is_call(version: Version, headers: &HeaderMap) -> bool {
    let kind = headers.get(CONTENT_TYPE).map(http::HeaderValue::as_bytes);
    let rest = kind.and_then(|kind| kind.strip_prefix(b"application/grpc"));
    version == Version::HTTP_2 && rest.is_some_and(|rest| matches!(rest.first(), None | Some(b'+' | b';' | b' ')))
}

impl Connector {
    /// Forwards a call on a new connection and waits for the head of the response. The connection is closed with the
    /// lease, and if this future is dropped.
    pub(super) async fn call(
        &self,
        request: Request<RequestBody>,
        target: &Target,
        ending: &CancellationToken,
    ) -> Result<(Response<Incoming>, Lease), Answer> {
        let permit = self.permit(target)?;
        let stream = dial::dial(self.node.as_ref(), target, ending)
            .await
            .map_err(|error| instead(error, target))?;
        // The limits for a head of HTTP/1.1 do not apply: a server sends its settings at once, and its response when the
        // client is done. The HTTP library bounds the frames that it holds; what they cost is shared fairly, as a body.
        let head = Head::default();
        head.complete();
        let stream = GuestStream::new(Either::Left(stream), head, permit);
        let cut = ending.child_token();
        let guard = cut.clone().drop_guard();
        let tasks = CallTasks {
            tasks: self.tasks.clone(),
            cut,
            stop: self.stop.clone(),
        };
        let failed = |error: hyper::Error| match closed(&error, ending) {
            DialError::PortClosed => unanswered(Unanswered::NoHttp2, target),
            error => instead(error, target),
        };
        let (mut sender, connection) = hyper::client::conn::http2::Builder::new(tasks.clone())
            .max_header_list_size(HEADERS_MAX_BYTES)
            .initial_stream_window_size(WINDOW_BYTES)
            .initial_connection_window_size(WINDOW_BYTES)
            .max_send_buf_size(GUEST_BUFFER_BYTES)
            .handshake(TokioIo::new(stream))
            .await
            .map_err(failed)?;
        tasks.run(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "connection of a call into the sandbox");
            }
        });
        let response = sender.send_request(over_http_2(request)).await.map_err(failed)?;
        Ok((response, self.pool.apart(target, guard)))
    }
}

/// The request for a connection over HTTP/2, where the host is part of the target.
fn over_http_2(mut request: Request<RequestBody>) -> Request<RequestBody> {
    let headers = request.headers_mut();
    headers.remove(CONNECTION);
    headers.remove(TRANSFER_ENCODING);
    let host = headers.remove(HOST);
    let authority = host.and_then(|host| Authority::try_from(host.as_bytes()).ok());
    let mut parts = request.uri().clone().into_parts();
    parts.scheme = Some(Scheme::HTTP);
    parts.authority = Some(authority.unwrap_or_else(|| Authority::from_static("localhost")));
    if let Ok(uri) = Uri::from_parts(parts) {
        *request.uri_mut() = uri;
    }
    *request.version_mut() = Version::HTTP_2;
    request
}

/// Runs the tasks of one connection until they are cut.
#[derive(Debug, Clone)]
struct CallTasks {
    tasks: TaskTracker,
    cut: CancellationToken,
    stop: CancellationToken,
}

impl CallTasks {
    fn run(&self, task: impl Future<Output = ()> + Send + 'static) {
        let (cut, stop) = (self.cut.clone(), self.stop.clone());
        self.tasks.spawn(async move {
            tokio::select! {
                biased;
                () = cut.cancelled() => {}
                () = stop.cancelled() => {}
                () = task => {}
            }
        });
    }
}

impl<F: Future<Output = ()> + Send + 'static> hyper::rt::Executor<F> for CallTasks {
    fn execute(&self, task: F) {
        self.run(task);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls() {
        for (kind, version, expected) in [
            ("application/grpc", Version::HTTP_2, true),
            ("application/grpc+proto", Version::HTTP_2, true),
            ("application/grpc;charset=utf-8", Version::HTTP_2, true),
            ("application/grpc", Version::HTTP_11, false),
            ("application/grpc-web", Version::HTTP_2, false),
            ("application/grpc-web+proto", Version::HTTP_2, false),
            ("application/json", Version::HTTP_2, false),
        ] {
            let headers = HeaderMap::from_iter([(CONTENT_TYPE, kind.parse().expect("a value"))]);
            assert_eq!(is_call(version, &headers), expected, "{kind} {version:?}");
        }
        assert!(!is_call(Version::HTTP_2, &HeaderMap::new()));
    }
}
