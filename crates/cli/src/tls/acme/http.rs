//! The HTTPS client for an ACME server: one connection per request, bounded in time and size.
//!
//! A renewal is a dozen requests every other month. So nothing is pooled, and HTTP/1.1 will do.

use std::error::Error as StdError;
use std::path::Path;
use std::pin::Pin;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use bytes::Bytes;
use http::header::HOST;
use http::{HeaderValue, Request};
use instant_acme::{BodyWrapper, BytesResponse, Error, HttpClient};
use rustls::RootCertStore;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use tokio_rustls::TlsConnector;

use crate::requests::{self, Server, connector, roots_of_host};

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
        Ok(Self(connector(trusted(ca)?)))
    }

    async fn send(&self, mut request: Request<BodyWrapper<Bytes>>) -> Result<BytesResponse> {
        let uri = request.uri().clone();
        // The directory names the addresses of all else.
        if uri.scheme_str() != Some("https") {
            bail!("{uri} is not an HTTPS address");
        }
        let Some(authority) = uri.authority() else {
            bail!("{uri} has no host");
        };
        let address = HeaderValue::from_str(authority.as_str()).context("the address of the server")?;
        request.headers_mut().insert(HOST, address);
        let path = uri.path_and_query().map_or("/", |path| path.as_str()).parse()?;
        *request.uri_mut() = path;

        let server = Server {
            is_tls: true,
            authority: authority.clone(),
        };
        let stream = server.connect(&self.0, REQUEST).await?;
        let sent = requests::send(stream, request).await;
        let (response, _connection) = sent.with_context(|| format!("the connection to {authority}"))?;
        let (parts, body) = response.into_parts();
        let body = requests::whole(body, BODY).await;
        let body = body.with_context(|| format!("read the answer of {authority}"))?;
        Ok(BytesResponse {
            parts,
            body: Box::new(body),
        })
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
    let Some(path) = ca else {
        let roots = roots_of_host();
        if roots.is_empty() {
            bail!("this host has no CA certificates: install ca-certificates, or name a file with acme.ca");
        }
        return Ok(roots);
    };
    let mut roots = RootCertStore::empty();
    let said = || format!("the CA certificates in {}", path.display());
    for certificate in CertificateDer::pem_file_iter(path).with_context(said)? {
        roots.add(certificate.with_context(said)?).with_context(said)?;
    }
    if roots.is_empty() {
        bail!("{} contains no certificate", path.display());
    }
    Ok(roots)
}
