//! One HTTP request to a server of another operator, on a connection of its own: for webhooks and for exports of traces and metrics.
//!
//! How the connection was made, and to whom it may be made, is the caller's. Redirects are not followed, the environment has no
//! say (no proxy), and what is read of the head of an answer is bounded.

use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, Uri, header};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use proxy::egress::host_roots;
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;

/// Maximum number of headers of an answer.
const HEADERS_MAX: usize = 100;
/// Maximum size of the head of an answer, in bytes.
const HEAD_MAX: usize = 16 << 10;
const AGENT: HeaderValue = HeaderValue::from_static(concat!("ringfence/", env!("CARGO_PKG_VERSION")));
/// The request is the last one of its connection.
const CLOSE: HeaderValue = HeaderValue::from_static("close");

/// Why there is no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AskError {
    /// The certificate is not valid, or there is no TLS.
    Tls,
    /// What came back is not an answer of HTTP, or nothing did.
    Answer,
}

/// The sender of the requests of one purpose, which trusts the issuers of the host and its own.
pub(crate) struct Sender {
    authorities: Vec<CertificateDer<'static>>,
    connector: OnceLock<TlsConnector>,
}

impl Sender {
    pub(crate) fn new(authorities: Vec<CertificateDer<'static>>) -> Self {
        Self {
            authorities,
            connector: OnceLock::new(),
        }
    }

    /// Sends a request, and reads the head of the answer. With TLS, `tls` is the host whose certificate is expected.
    ///
    /// # Errors
    /// When the host is not the one that is expected, or there is no answer.
    pub(crate) async fn ask(
        &self,
        stream: TcpStream,
        tls: Option<&str>,
        request: Request<Full<Bytes>>,
    ) -> Result<Answered, AskError> {
        let answered = match tls {
            Some(host) => {
                let name = ServerName::try_from(host.to_owned()).map_err(|_| AskError::Tls)?;
                let connector = self.connector.get_or_init(|| connector(&self.authorities));
                let stream = connector.connect(name, stream).await;
                ask(stream.map_err(|_| AskError::Tls)?, request).await
            }
            None => ask(stream, request).await,
        };
        answered.map_err(|_| AskError::Answer)
    }
}

/// A connector that trusts the issuers of the host, and others.
fn connector(authorities: &[CertificateDer<'static>]) -> TlsConnector {
    let roots = if authorities.is_empty() {
        Arc::clone(host_roots())
    } else {
        let mut roots = RootCertStore::clone(host_roots());
        roots.add_parsable_certificates(authorities.iter().cloned());
        Arc::new(roots)
    };
    let config = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("the provider has the usual versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    TlsConnector::from(Arc::new(config))
}

/// A POST request. Its own headers replace those of `headers`.
pub(crate) fn post(
    target: Uri,
    authority: HeaderValue,
    content_type: &'static str,
    headers: HeaderMap,
    body: Bytes,
) -> Request<Full<Bytes>> {
    let own: [(HeaderName, HeaderValue); 5] = [
        (header::HOST, authority),
        (header::CONTENT_TYPE, HeaderValue::from_static(content_type)),
        (header::CONTENT_LENGTH, HeaderValue::from(body.len())),
        (header::USER_AGENT, AGENT),
        (header::CONNECTION, CLOSE),
    ];
    let mut request = Request::new(Full::new(body));
    *request.method_mut() = Method::POST;
    *request.uri_mut() = target;
    *request.headers_mut() = headers;
    for (name, value) in own {
        request.headers_mut().insert(name, value);
    }
    request
}

/// An answer whose body was not read. Its connection is cut when this is dropped.
#[derive(Debug)]
pub(crate) struct Answered {
    pub(crate) answer: Response<Incoming>,
    pub(crate) connection: JoinSet<()>,
}

async fn ask<S>(stream: S, request: Request<Full<Bytes>>) -> Result<Answered, hyper::Error>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (mut sender, driver) = http1::Builder::new()
        .max_headers(HEADERS_MAX)
        .max_buf_size(HEAD_MAX)
        .handshake(TokioIo::new(stream))
        .await?;
    let mut connection = JoinSet::new();
    connection.spawn(async move {
        // Its errors are also those of the request.
        let _ = driver.await;
    });
    let answer = sender.send_request(request).await?;
    Ok(Answered { answer, connection })
}
