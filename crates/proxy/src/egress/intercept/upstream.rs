//! The side of an intercepted connection that leads to the server of the host.
//!
//! Each connection of a program has one of its own, so that no request can get to a connection of another host, rule or
//! sandbox, and so that what one side does, the other sees. TLS sessions are not resumed for the same reason.

use std::future::Future;
use std::io;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use http::{Request, Response};
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioIo, TokioTimer};
use rustls::client::Resumption;
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use tokio::sync::Mutex;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::super::outside::Outside;
use super::super::roots::host_certificates;
use super::super::settings::EgressSettings;
use super::alpn::Alpn;
use super::body::RequestBody;
use super::limits::{HEAD_BYTES, HEADERS, windows};

/// How long a server may take for its part of a handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// What may be on its way in one direction of an HTTP/2 connection: as much per stream, and four times that in all.
const WINDOW_BYTES: u32 = 256 << 10;
/// Bytes that HTTP/2 buffers per stream before they are sent.
const SEND_BYTES: usize = 64 << 10;

/// TLS to servers.
#[derive(Debug, Default)]
pub(crate) struct UpstreamTls(OnceLock<Arc<ClientConfig>>);

impl UpstreamTls {
    /// Begins TLS with a server, which must prove that it is the host.
    ///
    /// # Errors
    /// When it cannot, or something else fails.
    pub(super) async fn connect(
        &self,
        settings: &EgressSettings,
        host: &str,
        offered: &[Alpn],
        stream: Outside,
    ) -> io::Result<TlsStream<Outside>> {
        let mut config = ClientConfig::clone(self.0.get_or_init(|| Arc::new(config(settings))));
        let names = offered.iter().filter_map(|alpn| alpn.name());
        config.alpn_protocols = names.map(<[u8]>::to_vec).collect();
        let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
        let handshake = TlsConnector::from(Arc::new(config)).connect(name, stream);
        tokio::time::timeout(HANDSHAKE_TIMEOUT, handshake).await?
    }
}

/// A client that trusts the issuers of the host, and those of the operator.
fn config(settings: &EgressSettings) -> ClientConfig {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(host_certificates());
    roots.add_parsable_certificates(settings.authorities.iter().cloned());
    roots.add_parsable_certificates(settings.upstream_roots.iter().cloned());
    if roots.is_empty() {
        tracing::warn!("the host trusts no issuers of certificates: requests of sandboxes with rules will fail");
    }
    let mut config = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("the provider supports the default versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.resumption = Resumption::disabled();
    config
}

/// Sends requests on one connection to a server.
pub(super) enum Sender {
    Http1(Mutex<http1::SendRequest<RequestBody>>),
    Http2(http2::SendRequest<RequestBody>),
    /// No connection could be made, for this reason.
    Failed(String),
}

impl Sender {
    /// Begins HTTP on a connection, whose end cancels `gone`.
    ///
    /// # Errors
    /// When the connection fails.
    pub(super) async fn new(
        stream: TlsStream<Outside>,
        tasks: &Tasks,
        gone: CancellationToken,
        is_of_many: bool,
    ) -> hyper::Result<Self> {
        let (window, connection_window) = windows(WINDOW_BYTES, is_of_many);
        let is_http2 = stream.get_ref().1.alpn_protocol() == Alpn::Http2.name();
        let stream = TokioIo::new(stream);
        if is_http2 {
            let (sender, connection) = http2::Builder::new(tasks.clone())
                .timer(TokioTimer::new())
                .max_header_list_size(HEAD_BYTES)
                .initial_stream_window_size(window)
                .initial_connection_window_size(connection_window)
                .max_send_buf_size(SEND_BYTES)
                .handshake(stream)
                .await?;
            tasks.run(async move {
                let ended = connection.await;
                tracing::trace!(?ended, "connection to an intercepted host");
                gone.cancel();
            });
            return Ok(Self::Http2(sender));
        }
        let (sender, connection) = http1::Builder::new()
            .max_headers(HEADERS)
            .max_buf_size(HEAD_BYTES as usize)
            .preserve_header_case(true)
            .title_case_headers(true)
            .handshake(stream)
            .await?;
        tasks.run(async move {
            let ended = connection.with_upgrades().await;
            tracing::trace!(?ended, "connection to an intercepted host");
            gone.cancel();
        });
        Ok(Self::Http1(Mutex::new(sender)))
    }

    /// Sends a request and waits for the head of the response.
    ///
    /// # Errors
    /// When there is none.
    pub(super) async fn send(&self, request: Request<RequestBody>) -> hyper::Result<Response<Incoming>> {
        match self {
            Self::Http1(sender) => {
                let response = {
                    let mut sender = sender.lock().await;
                    // The end of the last response may have come just now.
                    sender.ready().await?;
                    sender.send_request(request)
                };
                response.await
            }
            Self::Http2(sender) => {
                let mut sender = sender.clone();
                sender.ready().await?;
                sender.send_request(request).await
            }
            Self::Failed(_) => unreachable!("answered before"),
        }
    }
}

/// Runs the tasks of one intercepted connection until it ends.
#[derive(Debug, Clone)]
pub(super) struct Tasks {
    pub(super) tasks: TaskTracker,
    pub(super) cut: CancellationToken,
}

impl Tasks {
    pub(super) fn run(&self, task: impl Future<Output = ()> + Send + 'static) {
        let cut = self.cut.clone();
        self.tasks.spawn(async move {
            tokio::select! {
                biased;
                () = cut.cancelled() => {}
                () = task => {}
            }
        });
    }
}

impl<F: Future<Output = ()> + Send + 'static> hyper::rt::Executor<F> for Tasks {
    fn execute(&self, task: F) {
        self.run(task);
    }
}
