//! The HTTPS client for an ACME server: one connection per request, bounded in time and size.
//!
//! A renewal is a dozen requests every other month. So nothing is pooled, and HTTP/1.1 will do.

use std::error::Error as StdError;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use bytes::Bytes;
use http::header::HOST;
use http::{HeaderValue, Request};
use http_body_util::{BodyExt as _, Limited};
use hyper_util::rt::TokioIo;
use instant_acme::{BodyWrapper, BytesResponse, Error, HttpClient};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use server::tls::provider;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

/// Time limit of a request, from the look-up of the name to the end of the body.
const REQUEST: Duration = Duration::from_secs(30);
/// Maximum size of a body: a chain of certificates has some kilobytes.
const BODY: usize = 1 << 20;

/// An HTTP client for the ACME server.
#[derive(Clone)]
pub(super) struct Client(TlsConnector);

impl Client {
    /// A client that trusts the CA certificates of a file, or else those of the host.
    ///
    /// # Errors
    /// When there are none.
    pub(super) fn new(ca: Option<&Path>) -> Result<Self> {
        let config = ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()?
            .with_root_certificates(trusted(ca)?)
            .with_no_client_auth();
        Ok(Self(TlsConnector::from(Arc::new(config))))
    }

    async fn send(&self, mut request: Request<BodyWrapper<Bytes>>) -> Result<BytesResponse> {
        let uri = request.uri().clone();
        // The directory names the addresses of all else.
        if uri.scheme_str() != Some("https") {
            bail!("{uri} is not an HTTPS address");
        }
        let (Some(host), Some(authority)) = (uri.host(), uri.authority()) else {
            bail!("{uri} has no host");
        };
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let address = HeaderValue::from_str(authority.as_str()).context("the address of the server")?;
        request.headers_mut().insert(HOST, address);
        let path = uri.path_and_query().map_or("/", |path| path.as_str()).parse()?;
        *request.uri_mut() = path;

        let port = uri.port_u16().unwrap_or(443);
        let tcp = TcpStream::connect((host.as_str(), port))
            .await
            .with_context(|| format!("connect to {authority}"))?;
        let name = ServerName::try_from(host).with_context(|| format!("connect to {authority}"))?;
        let stream = self.0.connect(name, tcp).await;
        let stream = stream.with_context(|| format!("TLS with {authority}"))?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        let exchange = async {
            let (parts, body) = sender.send_request(request).await?.into_parts();
            let body = Limited::new(body, BODY).collect().await;
            let body = body.map_err(|error| anyhow!("read the answer of {authority}: {error}"))?;
            Ok(BytesResponse {
                parts,
                body: Box::new(body.to_bytes()),
            })
        };
        let mut exchange = std::pin::pin!(exchange);
        tokio::select! {
            // Both end together; the answer counts.
            biased;
            answered = &mut exchange => answered,
            ended = connection => match ended {
                Ok(()) => exchange.await,
                Err(error) => Err(error).with_context(|| format!("the connection to {authority}")),
            },
        }
    }
}

impl HttpClient for Client {
    fn request(
        &self,
        request: Request<BodyWrapper<Bytes>>,
    ) -> Pin<Box<dyn Future<Output = Result<BytesResponse, Error>> + Send>> {
        let client = self.clone();
        Box::pin(async move {
            let answered = tokio::time::timeout(REQUEST, client.send(request)).await;
            let answered = answered.unwrap_or_else(|_| Err(anyhow!("no answer after {REQUEST:?}")));
            // As one text: the chain of causes would be lost.
            answered.map_err(|error| Error::Other(Box::<dyn StdError + Send + Sync>::from(format!("{error:#}"))))
        })
    }
}

/// The CA certificates of a file, or else those of the host.
///
/// # Errors
/// When there are none.
pub(super) fn trusted(ca: Option<&Path>) -> Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    let Some(path) = ca else {
        let found = rustls_native_certs::load_native_certs();
        roots.add_parsable_certificates(found.certs);
        if roots.is_empty() {
            bail!("this host has no CA certificates: install ca-certificates, or name a file with acme.ca");
        }
        return Ok(roots);
    };
    let said = || format!("the CA certificates in {}", path.display());
    for certificate in CertificateDer::pem_file_iter(path).with_context(said)? {
        roots.add(certificate.with_context(said)?).with_context(said)?;
    }
    if roots.is_empty() {
        bail!("{} contains no certificate", path.display());
    }
    Ok(roots)
}
