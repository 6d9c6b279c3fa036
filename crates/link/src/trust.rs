//! Who is who on a link: the server's certificate authority, the certificates that it issues, and tokens to join.
//!
//! The authority issues certificates of three kinds. That of a server has one fixed name, under which nodes look for it at
//! whatever address, and one with its id, under which other servers do; it may only be used by a server. Those of nodes carry
//! the id of the node, and may only be used by a client. So may that which a server shows to another one, with a name that no
//! node gets. So no node can pass for the server of another, or for a server at all. A node trusts this one authority and no
//! other.
//!
//! A token has the fingerprint of the authority beside its secret: who joins needs to trust nobody at first sight, and the
//! secret is sent to none but the server that it came from.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use model::id::NodeId;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, PublicKeyData as _, date_time_ymd,
};
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{
    CertificateDer, CertificateSigningRequestDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, UnixTime,
};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, ServerConfig, SignatureScheme};
use secrecy::zeroize::Zeroizing;
use sha2::{Digest as _, Sha256};
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer as _, X509Certificate};

/// The name of every server, in its certificate.
const SERVER_NAME: &str = "server.ringfence.internal";
/// What follows the id of a node in its certificate.
const NODE_SUFFIX: &str = ".node.ringfence.internal";
/// What follows the id of a server in the certificates that are for other servers.
const SERVER_SUFFIX: &str = ".server.ringfence.internal";
/// The protocol of a link, named in the TLS handshake.
pub(crate) const ALPN: &[u8] = b"ringfence-link/1";
/// The protocol between two servers.
pub(crate) const SERVERS_ALPN: &[u8] = b"ringfence-servers/1";
/// What a token begins with.
const TOKEN_PREFIX: &str = "rfn_";

const DAY: Duration = Duration::from_secs(24 * 60 * 60);
/// Validity of the certificate of a node. One that is away for longer has to join again.
const NODE_VALID: Duration = DAY.saturating_mul(90);
/// Validity of the certificate of a server, which is made anew each day.
const SERVER_VALID: Duration = DAY.saturating_mul(14);
/// Time before expiry at which a node renews its certificate.
const RENEW: Duration = DAY.saturating_mul(60);

/// Why something about a certificate or a token cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TrustError {
    /// The text is no token.
    #[error("this is no token of `ringfence node token`: one begins with {TOKEN_PREFIX}")]
    NoToken,
    /// The key or the certificate of the authority cannot be read. The cause is left out, because it may quote the key.
    #[error("the certificate authority of nodes cannot be read: {0}")]
    Authority(&'static str),
    /// The request for a certificate is no such request, or its signature is wrong.
    #[error("the request for a certificate is not valid")]
    Request(#[source] rcgen::Error),
    /// A certificate could not be made.
    #[error("cannot make a certificate")]
    Make(#[source] rcgen::Error),
    /// A certificate cannot be used.
    #[error("a certificate cannot be used: {0}")]
    Certificate(String),
    /// The system has no random numbers.
    #[error("the system has no random numbers")]
    Random,
}

impl From<rustls::Error> for TrustError {
    fn from(error: rustls::Error) -> Self {
        Self::Certificate(error.to_string())
    }
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::aws_lc_rs::default_provider())
}

/// The certificate authority of a server.
pub struct Authority {
    key: KeyPair,
    certificate: CertificateDer<'static>,
}

impl fmt::Debug for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Authority(hidden)")
    }
}

impl Authority {
    /// Makes a private key for an authority, in PEM.
    ///
    /// # Errors
    /// When the system has no random numbers.
    pub fn make_key() -> Result<Zeroizing<String>, TrustError> {
        let key = KeyPair::generate().map_err(TrustError::Make)?;
        Ok(Zeroizing::new(key.serialize_pem()))
    }

    /// Makes the certificate of an authority with this key, in PEM.
    ///
    /// # Errors
    /// When the key is none.
    pub fn make_certificate(key: &str) -> Result<String, TrustError> {
        let key = KeyPair::from_pem(key).map_err(|_| TrustError::Authority("its key is no private key in PEM"))?;
        let made = authority_params().self_signed(&key).map_err(TrustError::Make)?;
        Ok(made.pem())
    }

    /// The authority with this key and certificate, in PEM.
    ///
    /// # Errors
    /// When they are something else.
    pub fn load(key: &str, certificate: &str) -> Result<Self, TrustError> {
        let key = KeyPair::from_pem(key).map_err(|_| TrustError::Authority("its key is no private key in PEM"))?;
        let certificate = CertificateDer::from_pem_slice(certificate.as_bytes())
            .map_err(|_| TrustError::Authority("its certificate is no certificate in PEM"))?;
        let (_, parsed) = X509Certificate::from_der(&certificate)
            .map_err(|_| TrustError::Authority("its certificate is no certificate"))?;
        if parsed.public_key().raw != key.subject_public_key_info() {
            return Err(TrustError::Authority("its certificate is not that of its key"));
        }
        Ok(Self { key, certificate })
    }

    /// The certificate of the authority, in PEM, for a node.
    #[must_use]
    pub fn certificate_pem(&self) -> String {
        pem_of(&self.certificate)
    }

    /// Makes a token to join, valid at this authority.
    ///
    /// # Errors
    /// When the system has no random numbers.
    pub fn make_token(&self) -> Result<Token, TrustError> {
        let mut secret = Zeroizing::new([0; 32]);
        getrandom::fill(secret.as_mut_slice()).map_err(|_| TrustError::Random)?;
        Ok(Token {
            authority: fingerprint(&self.certificate),
            secret,
        })
    }

    /// Issues the certificate of a node for the key of a request, in PEM. Nothing else in the request is looked at.
    ///
    /// # Errors
    /// When the request is not valid.
    pub fn issue(&self, request: &[u8], node: &NodeId, now: SystemTime) -> Result<String, TrustError> {
        let request = CertificateSigningRequestDer::from(request);
        let request = CertificateSigningRequestParams::from_der(&request).map_err(TrustError::Request)?;
        let params = params_of(
            vec![format!("{}{NODE_SUFFIX}", node.as_str())],
            ExtendedKeyUsagePurpose::ClientAuth,
            now,
            NODE_VALID,
        )?;
        let authority = authority_params();
        let issuer = Issuer::from_params(&authority, &self.key);
        let made = params
            .signed_by(&request.public_key, &issuer)
            .map_err(TrustError::Make)?;
        Ok(made.pem())
    }

    /// The settings of TLS of the server with this id where it is connected to, with a certificate that is made for them. A
    /// peer without a certificate is let in, to join.
    ///
    /// # Errors
    /// When the certificate cannot be made.
    pub(crate) fn server_config(&self, server: &NodeId, now: SystemTime) -> Result<Arc<ServerConfig>, TrustError> {
        let names = vec![SERVER_NAME.to_owned(), name_of_server(server)];
        let (chain, key) = self.own_certificate(names, ExtendedKeyUsagePurpose::ServerAuth, now)?;
        let mut roots = RootCertStore::empty();
        roots.add(self.certificate.clone())?;
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider())
            .allow_unauthenticated()
            .build()
            .map_err(|error| TrustError::Certificate(error.to_string()))?;
        let mut config = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain, key)?;
        config.alpn_protocols = vec![ALPN.to_vec(), SERVERS_ALPN.to_vec()];
        // A session that is resumed would not show the certificate again, which may have been forgotten meanwhile.
        config.session_storage = Arc::new(rustls::server::NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(Arc::new(config))
    }

    /// The settings of TLS of the server with this id where it connects to another one, with a certificate that is made for them.
    ///
    /// # Errors
    /// When the certificate cannot be made.
    pub(crate) fn between_servers(&self, server: &NodeId, now: SystemTime) -> Result<Arc<ClientConfig>, TrustError> {
        let names = vec![name_of_server(server)];
        let (chain, key) = self.own_certificate(names, ExtendedKeyUsagePurpose::ClientAuth, now)?;
        let mut roots = RootCertStore::empty();
        roots.add(self.certificate.clone())?;
        let mut config = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .with_root_certificates(roots)
            .with_client_auth_cert(chain, key)?;
        config.alpn_protocols = vec![SERVERS_ALPN.to_vec()];
        config.resumption = rustls::client::Resumption::disabled();
        Ok(Arc::new(config))
    }

    /// A certificate for a key that only this process has.
    fn own_certificate(
        &self,
        names: Vec<String>,
        usage: ExtendedKeyUsagePurpose,
        now: SystemTime,
    ) -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>), TrustError> {
        let key = KeyPair::generate().map_err(TrustError::Make)?;
        let authority = authority_params();
        let issuer = Issuer::from_params(&authority, &self.key);
        let made = params_of(names, usage, now, SERVER_VALID)?
            .signed_by(&key, &issuer)
            .map_err(TrustError::Make)?;
        let chain = vec![made.der().clone(), self.certificate.clone()];
        Ok((
            chain,
            PrivateKeyDer::from(PrivatePkcs8KeyDer::from(key.serialize_der())),
        ))
    }
}

fn name_of_server(server: &NodeId) -> String {
    format!("{}{SERVER_SUFFIX}", server.as_str())
}

/// Checks that a certificate can be issued for a request.
pub(crate) fn check_request(request: &[u8]) -> Result<(), TrustError> {
    let request = CertificateSigningRequestDer::from(request);
    CertificateSigningRequestParams::from_der(&request).map_err(TrustError::Request)?;
    Ok(())
}

/// The authority, but for its key. Everything is fixed, so that the certificates of one key are all the same.
fn authority_params() -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params
        .distinguished_name
        .push(DnType::CommonName, "Ringfence authority of nodes");
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.not_before = date_time_ymd(2025, 1, 1);
    params.not_after = date_time_ymd(2049, 12, 31);
    params
}

fn params_of(
    names: Vec<String>,
    usage: ExtendedKeyUsagePurpose,
    now: SystemTime,
    valid: Duration,
) -> Result<CertificateParams, TrustError> {
    let mut params = CertificateParams::new(names).map_err(TrustError::Make)?;
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, "Ringfence");
    params.is_ca = IsCa::ExplicitNoCa;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![usage];
    params.use_authority_key_identifier_extension = true;
    // A day before, for peers whose clocks are behind.
    let begin = now.duration_since(UNIX_EPOCH).unwrap_or_default().saturating_sub(DAY);
    params.not_before = date_time_ymd(1970, 1, 1) + begin;
    params.not_after = params.not_before + DAY + valid;
    Ok(params)
}

fn fingerprint(certificate: &CertificateDer<'_>) -> [u8; 32] {
    Sha256::digest(certificate).into()
}

fn pem_of(certificate: &CertificateDer<'_>) -> String {
    let text = base64::engine::general_purpose::STANDARD.encode(certificate);
    let lines: Vec<&str> = text
        .as_bytes()
        .chunks(64)
        .map(|line| std::str::from_utf8(line).unwrap_or_default())
        .collect();
    format!(
        "-----BEGIN CERTIFICATE-----\n{}\n-----END CERTIFICATE-----\n",
        lines.join("\n")
    )
}

/// The id of the node in a certificate that the authority has issued; none if it is not that of a node.
pub(crate) fn node_of(certificate: &CertificateDer<'_>) -> Option<NodeId> {
    id_before(certificate, NODE_SUFFIX)
}

/// The id of the server in a certificate that the authority has issued; none if it is not that of a server.
pub(crate) fn server_of(certificate: &CertificateDer<'_>) -> Option<NodeId> {
    id_before(certificate, SERVER_SUFFIX)
}

fn id_before(certificate: &CertificateDer<'_>, suffix: &str) -> Option<NodeId> {
    let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
    let names = certificate.subject_alternative_name().ok()??;
    names.value.general_names.iter().find_map(|name| match name {
        GeneralName::DNSName(name) => name.strip_suffix(suffix)?.parse().ok(),
        _ => None,
    })
}

/// A token to join. Whoever has it becomes a node.
#[derive(Clone)]
pub struct Token {
    authority: [u8; 32],
    secret: Zeroizing<[u8; 32]>,
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(hidden)")
    }
}

impl Token {
    /// Reads the text of a token.
    ///
    /// # Errors
    /// When it is something else.
    pub fn parse(text: &str) -> Result<Self, TrustError> {
        let encoded = text.trim().strip_prefix(TOKEN_PREFIX).ok_or(TrustError::NoToken)?;
        let bytes = URL_SAFE_NO_PAD.decode(encoded).map_err(|_| TrustError::NoToken)?;
        let bytes = Zeroizing::new(bytes);
        let (authority, secret) = bytes.split_at_checked(32).ok_or(TrustError::NoToken)?;
        Ok(Self {
            authority: authority.try_into().map_err(|_| TrustError::NoToken)?,
            secret: Zeroizing::new(secret.try_into().map_err(|_| TrustError::NoToken)?),
        })
    }

    /// The text of the token, for whoever joins.
    #[must_use]
    pub fn expose(&self) -> String {
        let bytes = Zeroizing::new([self.authority.as_slice(), self.secret.as_slice()].concat());
        format!("{TOKEN_PREFIX}{}", URL_SAFE_NO_PAD.encode(&*bytes))
    }

    /// The secret as it is sent to the server.
    pub(crate) fn secret(&self) -> String {
        hex::encode(self.secret.as_slice())
    }

    /// The hash under which the server knows the token.
    #[must_use]
    pub fn hash(&self) -> String {
        hash_of(&self.secret())
    }
}

/// The hash of a secret that was sent.
pub(crate) fn hash_of(secret: &str) -> String {
    hex::encode(Sha256::digest(secret.as_bytes()))
}

/// The key of a node that has no certificate yet, in PEM, and its request for one.
pub(crate) fn make_request() -> Result<(Zeroizing<String>, Vec<u8>), TrustError> {
    let key = KeyPair::generate().map_err(TrustError::Make)?;
    let request = CertificateParams::default()
        .serialize_request(&key)
        .map_err(TrustError::Make)?;
    Ok((Zeroizing::new(key.serialize_pem()), request.der().to_vec()))
}

/// What a node shows to its server, and the authority that it trusts.
#[derive(Clone)]
pub struct Credentials {
    /// The private key, in PEM.
    pub key: Zeroizing<String>,
    /// The certificate of the node, in PEM.
    pub certificate: String,
    /// The certificate of the server's authority, in PEM.
    pub authority: String,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Credentials(hidden)")
    }
}

impl Credentials {
    /// The credentials of a node, with a new key, for a host that has the authority itself.
    ///
    /// # Errors
    /// When the certificate cannot be made.
    pub fn issued_by(authority: &Authority, node: &NodeId, now: SystemTime) -> Result<Self, TrustError> {
        let (key, request) = make_request()?;
        Ok(Self {
            key,
            certificate: authority.issue(&request, node, now)?,
            authority: authority.certificate_pem(),
        })
    }

    /// The settings of the node's side of TLS.
    ///
    /// # Errors
    /// When what is held is no key or certificate.
    pub(crate) fn client_config(&self) -> Result<Arc<ClientConfig>, TrustError> {
        let read = |pem: &str| {
            CertificateDer::from_pem_slice(pem.as_bytes()).map_err(|error| TrustError::Certificate(error.to_string()))
        };
        // Without the parser's reason, which could quote what it read.
        let key = PrivateKeyDer::from_pem_slice(self.key.as_bytes())
            .map_err(|_| TrustError::Certificate("the private key is not in PEM".to_owned()))?;
        let mut roots = RootCertStore::empty();
        roots.add(read(&self.authority)?)?;
        let mut config = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .with_root_certificates(roots)
            .with_client_auth_cert(vec![read(&self.certificate)?], key)?;
        config.alpn_protocols = vec![ALPN.to_vec()];
        config.resumption = rustls::client::Resumption::disabled();
        Ok(Arc::new(config))
    }

    /// The id of the node.
    ///
    /// # Errors
    /// When the certificate is not that of a node.
    pub fn node(&self) -> Result<NodeId, TrustError> {
        CertificateDer::from_pem_slice(self.certificate.as_bytes())
            .ok()
            .and_then(|certificate| node_of(&certificate))
            .ok_or_else(|| TrustError::Certificate("it is not that of a node".to_owned()))
    }

    /// When the certificate ends.
    ///
    /// # Errors
    /// When it is no certificate.
    pub fn ends(&self) -> Result<SystemTime, TrustError> {
        let no = || TrustError::Certificate("it is no certificate".to_owned());
        let certificate = CertificateDer::from_pem_slice(self.certificate.as_bytes()).map_err(|_| no())?;
        let (_, certificate) = X509Certificate::from_der(&certificate).map_err(|_| no())?;
        let seconds = u64::try_from(certificate.validity().not_after.timestamp()).map_err(|_| no())?;
        Ok(UNIX_EPOCH + Duration::from_secs(seconds))
    }

    /// Whether it is time to renew the certificate.
    #[must_use]
    pub fn is_due(&self, now: SystemTime) -> bool {
        self.ends().map_or(true, |ends| now + RENEW >= ends)
    }
}

/// The name that a server expects of the other one with this id.
pub(crate) fn name_between_servers(server: &NodeId) -> Result<ServerName<'static>, TrustError> {
    ServerName::try_from(name_of_server(server))
        .map_err(|_| TrustError::Certificate(format!("{server} is no part of a name")))
}

/// The name that a node expects of its server.
pub(crate) fn server_name() -> ServerName<'static> {
    ServerName::try_from(SERVER_NAME).expect("a constant name")
}

/// The settings of TLS of a node that joins with a token: they trust the authority of the token alone.
pub(crate) fn join_config(token: &Token) -> Result<Arc<ClientConfig>, TrustError> {
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Pinned {
            authority: token.authority,
            provider: provider(),
        }))
        .with_no_client_auth();
    config.alpn_protocols = vec![ALPN.to_vec()];
    Ok(Arc::new(config))
}

/// Verifies the certificate of a server against an authority of which only the fingerprint is known: the server shows the
/// authority, too.
#[derive(Debug)]
struct Pinned {
    authority: [u8; 32],
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Pinned {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let authority = intermediates.iter().find(|shown| fingerprint(shown) == self.authority);
        let authority = authority.ok_or_else(|| {
            rustls::Error::General(
                "the server is not the one that has issued the token: its authority is another".to_owned(),
            )
        })?;
        let mut roots = RootCertStore::empty();
        roots.add(authority.clone().into_owned())?;
        WebPkiServerVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&self.provider))
            .build()
            .map_err(|error| rustls::Error::General(error.to_string()))?
            .verify_server_cert(end_entity, &[], server_name, ocsp_response, now)
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::Error::General("only TLS 1.3 is spoken".to_owned()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls13_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
