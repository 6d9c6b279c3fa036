//! A TLS client of the tests' own.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use link::{Authority, Credentials};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore, SupportedProtocolVersion};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

pub(crate) async fn connect(
    address: SocketAddr,
    authority: &Authority,
    credentials: Option<&Credentials>,
) -> io::Result<TlsStream<TcpStream>> {
    connect_with(address, authority, credentials, &[&rustls::version::TLS13]).await
}

pub(crate) async fn connect_with(
    address: SocketAddr,
    authority: &Authority,
    credentials: Option<&Credentials>,
    versions: &[&'static SupportedProtocolVersion],
) -> io::Result<TlsStream<TcpStream>> {
    connect_as(address, authority, credentials, versions, &[]).await
}

/// Connects, and asks for one of these protocols, if there are any.
pub(crate) async fn connect_as(
    address: SocketAddr,
    authority: &Authority,
    credentials: Option<&Credentials>,
    versions: &[&'static SupportedProtocolVersion],
    protocols: &[&[u8]],
) -> io::Result<TlsStream<TcpStream>> {
    let mut roots = RootCertStore::empty();
    roots
        .add(CertificateDer::from_pem_slice(authority.certificate_pem().as_bytes()).unwrap())
        .unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(versions)
        .unwrap()
        .with_root_certificates(roots);
    let mut config = match credentials {
        None => config.with_no_client_auth(),
        Some(credentials) => {
            let certificate = CertificateDer::from_pem_slice(credentials.certificate.as_bytes()).unwrap();
            let key = PrivateKeyDer::from_pem_slice(credentials.key.as_bytes()).unwrap();
            config.with_client_auth_cert(vec![certificate], key).unwrap()
        }
    };
    config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
    let socket = TcpStream::connect(address).await?;
    let name = ServerName::try_from("server.ringfence.internal").unwrap();
    TlsConnector::from(Arc::new(config)).connect(name, socket).await
}

/// Sends a frame, and reads the one that answers.
pub(crate) async fn ask(stream: &mut TlsStream<TcpStream>, text: &str) -> io::Result<String> {
    stream.write_u32(u32::try_from(text.len()).unwrap()).await?;
    stream.write_all(text.as_bytes()).await?;
    let length = stream.read_u32().await?;
    let mut answer = vec![0; length as usize];
    stream.read_exact(&mut answer).await?;
    Ok(String::from_utf8(answer).unwrap())
}
