//! TLS to servers inside, for the ports that a client listed in `httpsPorts`.
//!
//! Certificates are not verified: the server makes its own, and there is nobody between the platform and the sandbox, to
//! which it connects with a socket inside. Sessions are not resumed, because a ticket of one sandbox would be shown to
//! another. The server name is not sent, as it is not for any address.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use protocol::node::{DialError, SandboxStream};
use rustls::client::Resumption;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, SignatureScheme};
use tokio::io::{AsyncRead as _, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_util::either::Either;
use tokio_util::sync::CancellationToken;

/// How long a handshake may take.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// The client side of TLS into sandboxes.
#[derive(Clone)]
pub(super) struct GuestTls(TlsConnector);

impl GuestTls {
    pub(super) fn new() -> Self {
        let provider = Arc::new(aws_lc_rs::default_provider());
        let mut config = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .expect("the provider supports the default versions")
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(AnyCertificate(provider)))
            .with_no_client_auth();
        config.enable_sni = false;
        config.resumption = Resumption::disabled();
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Self(TlsConnector::from(Arc::new(config)))
    }

    /// Begins TLS on a new connection.
    ///
    /// # Errors
    /// `PortClosed` if the server does not speak TLS, `Gone` if the sandbox ends.
    pub(super) async fn connect(
        &self,
        stream: SandboxStream,
        ending: &CancellationToken,
    ) -> Result<Transport, DialError> {
        let name = ServerName::try_from("localhost").expect("a name");
        let handshake = tokio::time::timeout(HANDSHAKE_TIMEOUT, self.0.connect(name, stream));
        let outcome = tokio::select! {
            biased;
            () = ending.cancelled() => return Err(DialError::Gone),
            outcome = Box::pin(handshake) => outcome,
        };
        match outcome {
            Ok(Ok(stream)) => Ok(Either::Right(Box::new(stream))),
            Ok(Err(error)) => {
                tracing::debug!(%error, "no TLS with a server in a sandbox");
                Err(DialError::PortClosed)
            }
            Err(_) => {
                tracing::debug!("timeout of a TLS handshake with a server in a sandbox");
                Err(DialError::PortClosed)
            }
        }
    }
}

/// Accepts every certificate.
#[derive(Debug)]
struct AnyCertificate(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

/// A stream into a sandbox, as it is or with TLS.
pub(super) type Transport = Either<SandboxStream, Box<TlsStream<SandboxStream>>>;

/// The socket of a stream into a sandbox, if it is one of this host.
pub(super) fn socket_of(transport: &Transport) -> Option<&TcpStream> {
    let stream = match transport {
        Either::Left(stream) => stream,
        Either::Right(stream) => stream.get_ref().0,
    };
    stream.socket()
}

/// Reads from a stream into a sandbox.
pub(super) fn poll_read(
    transport: &mut Transport,
    cx: &mut Context<'_>,
    buf: &mut ReadBuf<'_>,
) -> Poll<io::Result<()>> {
    let is_tls = matches!(transport, Either::Right(_));
    match ready!(Pin::new(transport).poll_read(cx, buf)) {
        // Many servers close the connection without the message that ends TLS. Nobody in between can cut it short.
        Err(error) if is_tls && error.kind() == io::ErrorKind::UnexpectedEof => Poll::Ready(Ok(())),
        read => Poll::Ready(read),
    }
}
