//! TLS on the port that also serves plain HTTP: certificates, detection by the first byte, handshakes.
//!
//! The first byte of a TLS connection is the type of a handshake record, and no HTTP request begins with it. It is
//! peeked, not consumed, so it makes no difference to either protocol. Handshakes have a time limit and a limit on how
//! many run concurrently, because each holds buffers for an unauthenticated client. TLS is layered on [`ClientStream`],
//! so that a cut connection is reset like a plain one, without a `close_notify` that a client would take for a proper
//! end.
//!
//! Clients resume sessions with tickets, whose keys rotate every six hours and exist in memory only: a restart costs
//! each client one full handshake. There is one configuration for the life of the process, and the certificate in it is
//! replaced, so tickets outlive a renewal. Early data is off, because it could be replayed.

mod validity;

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::RwLock;
use proxy::ingress::client::ClientStream;
use rustls::InconsistentKeys;
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::pki_types::pem::{self, PemObject as _};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use secrecy::zeroize::Zeroize as _;
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

pub use self::validity::Validity;

/// Time limit of a handshake, including the wait for its turn.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Maximum number of concurrent handshakes: each may have to buffer a `ClientHello` of 64 KiB, so all of them hold at
/// most 128 MiB. Others wait until one has finished or timed out.
const HANDSHAKES: usize = 2048;
/// First byte of every TLS connection: the content type of a handshake record.
const HANDSHAKE_RECORD: u8 = 0x16;

/// Why a certificate cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The certificates are not PEM.
    #[error("the certificate file is not readable as PEM: {0}")]
    Certificate(pem::Error),
    /// The file contains no certificate.
    #[error("the certificate file holds no certificate")]
    NoCertificate,
    /// The key is missing or not PEM.
    #[error("the key file holds no private key in PEM: {0}")]
    Key(pem::Error),
    /// Certificate and key do not match, or their type is not supported.
    #[error("certificate and key cannot be used: {0}")]
    Unusable(rustls::Error),
}

/// The TLS configuration of a server. Clones share it, so that the certificate can be replaced while the server runs.
#[derive(Clone)]
pub struct Tls {
    config: Arc<rustls::ServerConfig>,
    current: Arc<Current>,
    handshakes: Arc<Semaphore>,
}

impl fmt::Debug for Tls {
    /// Omits the configuration, which contains the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls").finish_non_exhaustive()
    }
}

/// The certificate that handshakes use.
struct Current(RwLock<Arc<CertifiedKey>>);

impl fmt::Debug for Current {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Current")
    }
}

impl ResolvesServerCert for Current {
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.0.read()))
    }
}

impl Tls {
    /// TLS 1.2 and 1.3 with a chain of certificates, the server's own first, and its private key, both in PEM. Clients
    /// choose HTTP/2 or HTTP/1.1 by ALPN.
    ///
    /// # Errors
    /// [`TlsError`], which never quotes the content of the files.
    pub fn from_pem(certificates: &[u8], key: &[u8]) -> Result<Self, TlsError> {
        let current = Arc::new(Current(RwLock::new(certified(certificates, key)?)));
        let mut config = rustls::ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(TlsError::Unusable)?
            .with_no_client_auth()
            .with_cert_resolver(Arc::clone(&current) as Arc<dyn ResolvesServerCert>);
        config.alpn_protocols = [&b"h2"[..], b"http/1.1", b"http/1.0"].map(<[u8]>::to_vec).to_vec();
        config.ticketer = aws_lc_rs::Ticketer::new().map_err(TlsError::Unusable)?;
        Ok(Self {
            config: Arc::new(config),
            current,
            handshakes: Arc::new(Semaphore::new(HANDSHAKES)),
        })
    }

    /// Replaces the certificate, from the next handshake on. Existing connections are not affected.
    ///
    /// # Errors
    /// As [`Self::from_pem`]; the current certificate is kept then.
    pub fn replace(&self, certificates: &[u8], key: &[u8]) -> Result<(), TlsError> {
        let certified = certified(certificates, key)?;
        *self.current.0.write() = certified;
        Ok(())
    }

    /// The validity of the current certificate; none if it cannot be parsed.
    #[must_use]
    pub fn validity(&self) -> Option<Validity> {
        Validity::of(self.current.0.read().cert.first()?)
    }

    /// Performs the handshake with a client, after `turn` has completed.
    ///
    /// # Errors
    /// When the handshake fails or times out.
    pub(crate) async fn accept(
        &self,
        stream: ClientStream,
        turn: impl Future<Output = ()>,
    ) -> io::Result<TlsStream<ClientStream>> {
        let handshake = async {
            turn.await;
            let _turn = self.handshakes.acquire().await.map_err(io::Error::other)?;
            let acceptor = TlsAcceptor::from(Arc::clone(&self.config));
            acceptor.accept(stream).await
        };
        tokio::time::timeout(HANDSHAKE, handshake)
            .await
            .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
    }
}

/// Whether the first byte from a client begins a TLS handshake. The byte stays in the socket.
///
/// # Errors
/// When the connection failed. A connection that is closed without a byte is not TLS.
pub(crate) async fn starts_with_tls(tcp: &TcpStream) -> io::Result<bool> {
    let mut first = [0];
    let got = tcp.peek(&mut first).await?;
    Ok(got == 1 && first[0] == HANDSHAKE_RECORD)
}

/// The cryptography provider of the platform.
#[must_use]
pub fn provider() -> Arc<CryptoProvider> {
    Arc::new(aws_lc_rs::default_provider())
}

fn certified(certificates: &[u8], key: &[u8]) -> Result<Arc<CertifiedKey>, TlsError> {
    let chain: Vec<_> = CertificateDer::pem_slice_iter(certificates)
        .collect::<Result<_, _>>()
        .map_err(TlsError::Certificate)?;
    if chain.is_empty() {
        return Err(TlsError::NoCertificate);
    }
    let mut key = PrivateKeyDer::from_pem_slice(key).map_err(TlsError::Key)?;
    let signing = aws_lc_rs::sign::any_supported_type(&key);
    key.zeroize();
    let certified = CertifiedKey::new(chain, signing.map_err(TlsError::Unusable)?);
    match certified.keys_match() {
        // Some key types cannot be compared; the first handshake shows it then.
        Ok(()) | Err(rustls::Error::InconsistentKeys(InconsistentKeys::Unknown)) => {}
        Err(error) => return Err(TlsError::Unusable(error)),
    }
    Ok(Arc::new(certified))
}
