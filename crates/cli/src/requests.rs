//! Requests over HTTP/1.1 and TLS: what all clients of the command line have in common.
//!
//! Each request has a connection of its own: a command sends few, and most of them to different servers. Whom a client trusts,
//! how long it waits and what it accepts are its own.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow};
use bytes::Bytes;
use http::uri::Authority;
use http::{Request, Response};
use http_body_util::{BodyExt as _, Limited};
use hyper::body::{Body, Incoming};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;

/// A connection to a server, with TLS or without.
pub(crate) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// A server that is spoken to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Server {
    pub(crate) is_tls: bool,
    /// `host` or `host:port`.
    pub(crate) authority: Authority,
}

impl Server {
    /// The host, an IPv6 address without its brackets.
    pub(crate) fn host(&self) -> &str {
        self.authority.host().trim_matches(['[', ']'])
    }

    pub(crate) fn port(&self) -> u16 {
        let usual = if self.is_tls { 443 } else { 80 };
        self.authority.port_u16().unwrap_or(usual)
    }

    /// Connects, with TLS if the server has it, within a time.
    ///
    /// # Errors
    /// When there is no connection; it names the server.
    pub(crate) async fn connect(&self, tls: &TlsConnector, within: Duration) -> Result<Box<dyn Stream>> {
        let connect = async {
            let stream = TcpStream::connect((self.host(), self.port())).await?;
            stream.set_nodelay(true)?;
            if !self.is_tls {
                return Ok::<Box<dyn Stream>, anyhow::Error>(Box::new(stream));
            }
            let name = ServerName::try_from(self.host().to_owned())?;
            let stream = tls.connect(name, stream).await?;
            Ok(Box::new(stream))
        };
        let connected = tokio::time::timeout(within, connect).await;
        connected
            .map_err(|_| anyhow!("timeout"))
            .and_then(|connected| connected)
            .with_context(|| format!("connect to {}", self.authority))
    }
}

/// The certificates of issuers that the host trusts; none if it has none.
pub(crate) fn roots_of_host() -> RootCertStore {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    roots
}

/// TLS with servers whose certificates lead to these.
pub(crate) fn connector(roots: RootCertStore) -> TlsConnector {
    let config = ClientConfig::builder_with_provider(server::tls::provider())
        .with_safe_default_protocol_versions()
        .expect("the provider supports the default versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    TlsConnector::from(Arc::new(config))
}

/// The connection of an answer, which ends when this is dropped. The body of the answer needs it.
#[derive(Debug)]
pub(crate) struct Connection {
    _task: JoinSet<()>,
}

/// Sends a request, and returns the head of the answer.
///
/// # Errors
/// When there is no answer.
pub(crate) async fn send<S, B>(stream: S, request: Request<B>) -> hyper::Result<(Response<Incoming>, Connection)>
where
    S: Stream + 'static,
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let (mut requests, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let mut task = JoinSet::new();
    task.spawn(async move {
        // Its errors are also those of the request or the body.
        let _ = connection.await;
    });
    let response = requests.send_request(request).await?;
    Ok((response, Connection { _task: task }))
}

/// A whole body of at most so many bytes.
///
/// # Errors
/// When it is larger, or the connection ends before it.
pub(crate) async fn whole(body: Incoming, most: usize) -> Result<Bytes> {
    let body = Limited::new(body, most).collect().await;
    Ok(body.map_err(|error| anyhow!("{error}"))?.to_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_have_a_host_and_a_port() {
        for (is_tls, authority, host, port) in [
            (true, "h.example", "h.example", 443),
            (false, "h.example", "h.example", 80),
            (true, "[::1]:5000", "::1", 5000),
            (true, "[::1]", "::1", 443),
        ] {
            let authority = Authority::from_static(authority);
            let server = Server { is_tls, authority };
            assert_eq!((server.host(), server.port()), (host, port));
        }
    }
}
