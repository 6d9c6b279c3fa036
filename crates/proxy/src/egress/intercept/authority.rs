//! The certificate authority of a sandbox, and the certificates that it issues for intercepted hosts.
//!
//! Everything about the authority follows from its seed, so that the one of a sandbox that was adopted is the one that
//! programs inside trust already: the same key, name, serial number and times. Only the certificate's signature of itself
//! differs each time, because ECDSA is randomized here, and no client compares it: it is a trust anchor. The key exists
//! in the memory of the gateway only, from the first connection that is intercepted on.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use hmac::{Hmac, KeyInit as _, Mac as _};
use parking_lot::Mutex;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    PKCS_ECDSA_P256_SHA256, PublicKeyData as _, SerialNumber, date_time_ymd,
};
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, UnixTime};
use rustls::server::{NoServerSessionStorage, ServerConfig};
use secrecy::zeroize::Zeroizing;
use sha2::{Digest as _, Sha256};

use model::secret::Secret;

use super::alpn::Alpn;

/// What the bytes of the private key are derived for.
const KEY_LABEL: &[u8] = b"ringfence egress authority key 1";
/// Bytes of a seed, of which each is two hexadecimal digits.
const SEED_BYTES: usize = 32;
/// Hosts whose certificates a sandbox keeps. Beyond, the one that was used longest ago is issued again when needed.
const HOSTS: usize = 64;
const DAY: Duration = Duration::from_secs(24 * 60 * 60);
/// How far before it is issued a certificate begins to be valid: clocks inside may be behind.
const BEFORE: Duration = DAY.saturating_mul(30);
/// How long a certificate is valid from when it is issued. With the time before, less than the 398 days that strict
/// clients accept.
const AFTER: Duration = DAY.saturating_mul(330);
/// Age at which a certificate is issued again.
const RENEW: Duration = DAY.saturating_mul(7);

/// Order of the group of P-256: the largest scalar is one less.
const ORDER: [u8; 32] = [
    0xff, 0xff, 0xff, 0xff, 0x00, 0x00, 0x00, 0x00, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xbc, 0xe6, 0xfa,
    0xad, 0xa7, 0x17, 0x9e, 0x84, 0xf3, 0xb9, 0xca, 0xc2, 0xfc, 0x63, 0x25, 0x51,
];

/// Why there is no authority.
#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    /// The seed is malformed.
    #[error("the seed of the certificate authority is not {} hexadecimal digits", SEED_BYTES * 2)]
    Seed,
    /// The library refused a key or a certificate.
    #[error("certificate authority: {0}")]
    Certificate(String),
}

impl AuthorityError {
    fn of(error: impl fmt::Display) -> Self {
        Self::Certificate(error.to_string())
    }
}

/// The certificate, in PEM, that programs of a sandbox with this seed are to trust.
///
/// # Errors
/// When the seed is malformed.
pub fn authority_certificate(seed: &Secret) -> Result<String, AuthorityError> {
    let key = authority_key(seed)?;
    let certificate = authority_params(&key).self_signed(&key).map_err(AuthorityError::of)?;
    Ok(certificate.pem())
}

/// The authority of a sandbox.
pub(super) struct Authority {
    issuer: Issuer<'static, KeyPair>,
    /// The key of all certificates that the authority issues. Made at random, unlike that of the authority.
    key: KeyPair,
    issued: Mutex<HashMap<String, Issued>>,
}

/// A certificate that was issued.
struct Issued {
    at: Duration,
    used: u64,
    config: Arc<ServerConfig>,
}

impl fmt::Debug for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Authority").finish_non_exhaustive()
    }
}

impl Authority {
    /// The authority of a seed.
    ///
    /// # Errors
    /// When the seed is malformed.
    pub(super) fn new(seed: &Secret) -> Result<Self, AuthorityError> {
        let key = authority_key(seed)?;
        Ok(Self {
            issuer: Issuer::new(authority_params(&key), key),
            key: KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(AuthorityError::of)?,
            issued: Mutex::default(),
        })
    }

    /// The configuration of TLS for a host that speaks this protocol.
    ///
    /// # Errors
    /// When no certificate can be issued.
    pub(super) fn config(&self, host: &str, alpn: Alpn) -> Result<Arc<ServerConfig>, AuthorityError> {
        let config = self.config_at(host, since_epoch())?;
        let Some(name) = alpn.name() else { return Ok(config) };
        let mut config = ServerConfig::clone(&config);
        config.alpn_protocols = vec![name.to_vec()];
        Ok(Arc::new(config))
    }

    fn config_at(&self, host: &str, now: Duration) -> Result<Arc<ServerConfig>, AuthorityError> {
        let mut issued = self.issued.lock();
        let use_count = issued.values().map(|issued| issued.used).max().unwrap_or(0) + 1;
        if let Some(known) = issued.get_mut(host)
            // None if the clock went back.
            && now.checked_sub(known.at).is_some_and(|age| age < RENEW)
        {
            known.used = use_count;
            return Ok(Arc::clone(&known.config));
        }
        let config = Arc::new(self.issue(host, now)?);
        if issued.len() >= HOSTS && !issued.contains_key(host) {
            let oldest = issued.iter().min_by_key(|(_, issued)| issued.used);
            let oldest = oldest.map(|(host, _)| host.clone());
            oldest.and_then(|host| issued.remove(&host));
        }
        let entry = Issued {
            at: now,
            used: use_count,
            config: Arc::clone(&config),
        };
        issued.insert(host.to_owned(), entry);
        Ok(config)
    }

    fn certificate(&self, host: &str, now: Duration) -> Result<CertificateDer<'static>, AuthorityError> {
        let mut params = CertificateParams::new(vec![host.to_owned()]).map_err(AuthorityError::of)?;
        params.distinguished_name = rcgen::DistinguishedName::new();
        // The host may be longer than a subject can be, and clients read it from the extension.
        let subject = "Ringfence egress gateway";
        params.distinguished_name.push(DnType::CommonName, subject);
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.use_authority_key_identifier_extension = true;
        let epoch = date_time_ymd(1970, 1, 1);
        params.not_before = epoch + now.saturating_sub(BEFORE);
        params.not_after = epoch + now + AFTER;
        let certificate = params.signed_by(&self.key, &self.issuer).map_err(AuthorityError::of)?;
        Ok(certificate.der().clone())
    }

    fn issue(&self, host: &str, now: Duration) -> Result<ServerConfig, AuthorityError> {
        let certificate = self.certificate(host, now)?;
        let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(self.key.serialize_der()));
        let mut config = ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(AuthorityError::of)?
            .with_no_client_auth()
            .with_single_cert(vec![certificate], key)
            .map_err(AuthorityError::of)?;
        // Nothing about a connection outlives it.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(config)
    }
}

/// The current time for certificates: seconds since the Unix epoch.
fn since_epoch() -> Duration {
    Duration::from_secs(UnixTime::now().as_secs())
}

/// The key of a seed: a number below the order of the group that looks random to all who lack the seed.
fn authority_key(seed: &Secret) -> Result<KeyPair, AuthorityError> {
    let mut bytes = Zeroizing::new([0; SEED_BYTES]);
    hex::decode_to_slice(seed.expose(), bytes.as_mut_slice()).map_err(|_| AuthorityError::Seed)?;
    let scalar = (0..=u8::MAX)
        .map(|attempt| {
            let mut mac = Hmac::<Sha256>::new_from_slice(bytes.as_slice()).expect("every length is accepted");
            mac.update(KEY_LABEL);
            mac.update(&[attempt]);
            Zeroizing::new(<[u8; 32]>::from(mac.finalize().into_bytes()))
        })
        // The first is one in all but one of 2^32 cases. Big-endian numbers compare as their bytes do.
        .find(|scalar| **scalar < ORDER && **scalar != [0; 32])
        .ok_or(AuthorityError::Seed)?;
    // PKCS #8 (RFC 5958) with an ECPrivateKey (RFC 5915) without the public key, which the library computes.
    const HEAD: [u8; 35] = [
        0x30, 0x41, 0x02, 0x01, 0x00, 0x30, 0x13, 0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01, 0x06, 0x08,
        0x2a, 0x86, 0x48, 0xce, 0x3d, 0x03, 0x01, 0x07, 0x04, 0x27, 0x30, 0x25, 0x02, 0x01, 0x01, 0x04, 0x20,
    ];
    let der = Zeroizing::new([&HEAD[..], scalar.as_ref()].concat());
    let der = PrivatePkcs8KeyDer::from(der.as_slice());
    KeyPair::from_pkcs8_der_and_sign_algo(&der, &PKCS_ECDSA_P256_SHA256).map_err(AuthorityError::of)
}

/// The certificate of a key. Its name is the key's as well: clients that trust two authorities of one name may try the
/// wrong one only.
fn authority_params(key: &KeyPair) -> CertificateParams {
    let digest = Sha256::digest(key.subject_public_key_info());
    let mut params = CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    let name = format!("Ringfence egress gateway {}", hex::encode(&digest[..4]));
    params.distinguished_name.push(DnType::CommonName, name);
    // Positive, and at most 20 bytes.
    let mut serial = digest[..16].to_vec();
    serial[0] = serial[0] & 0x7f | 0x40;
    params.serial_number = Some(SerialNumber::from(serial));
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.not_before = date_time_ymd(2020, 1, 1);
    params.not_after = date_time_ymd(2049, 12, 31);
    params
}

#[cfg(test)]
mod tests {
    use rustls::RootCertStore;
    use rustls::client::WebPkiServerVerifier;
    use rustls::client::danger::ServerCertVerifier as _;
    use rustls::pki_types::ServerName;
    use rustls::pki_types::pem::PemObject as _;

    use super::*;

    fn seed(digit: char) -> Secret {
        Secret::new(digit.to_string().repeat(64))
    }

    fn certificate(seed: &Secret) -> CertificateDer<'static> {
        CertificateDer::from_pem_slice(authority_certificate(seed).unwrap().as_bytes()).unwrap()
    }

    /// The part of a certificate that is signed.
    fn signed_part(certificate: &CertificateDer<'_>) -> Vec<u8> {
        let [0x30, 0x82, _, _, rest @ ..] = certificate.as_ref() else {
            panic!("not a certificate")
        };
        let [0x30, 0x82, high, low, ..] = rest else {
            panic!("not a certificate")
        };
        rest[..4 + usize::from(u16::from_be_bytes([*high, *low]))].to_vec()
    }

    fn accepts(root: &CertificateDer<'_>, leaf: &CertificateDer<'_>, host: &str) -> bool {
        let mut roots = RootCertStore::empty();
        roots.add(root.clone()).unwrap();
        let provider = Arc::new(aws_lc_rs::default_provider());
        let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider)
            .build()
            .unwrap();
        let name = ServerName::try_from(host.to_owned()).unwrap();
        verifier
            .verify_server_cert(leaf, &[], &name, &[], UnixTime::now())
            .is_ok()
    }

    #[test]
    fn everything_that_is_signed_follows_from_the_seed() {
        let one = certificate(&seed('1'));
        assert_eq!(signed_part(&one), signed_part(&certificate(&seed('1'))));
        assert_ne!(signed_part(&one), signed_part(&certificate(&seed('2'))));
        // A known value: programs of sandboxes that run while the platform is updated trust this key.
        let key = authority_key(&seed('1')).unwrap();
        let digest = Sha256::digest(key.subject_public_key_info());
        let shown = hex::encode(digest);
        assert_eq!(&shown[..8], KNOWN);
    }

    const KNOWN: &str = "f29db6ea";

    #[test]
    fn its_certificates_are_accepted_by_those_who_trust_it() {
        let authority = Authority::new(&seed('1')).unwrap();
        let leaf = authority.certificate("api.example.com", since_epoch()).unwrap();
        assert!(accepts(&certificate(&seed('1')), &leaf, "api.example.com"));
        assert!(!accepts(&certificate(&seed('1')), &leaf, "api.example.org"));
        assert!(!accepts(&certificate(&seed('2')), &leaf, "api.example.com"));
    }

    #[test]
    fn invalid_seeds_are_refused() {
        for text in [
            "",
            "1",
            &"1".repeat(62),
            &"1".repeat(66),
            &"g".repeat(64),
            &"é".repeat(32),
        ] {
            let seed = Secret::new(text.to_owned());
            assert!(matches!(Authority::new(&seed), Err(AuthorityError::Seed)), "{text}");
            assert!(matches!(authority_certificate(&seed), Err(AuthorityError::Seed)));
        }
    }

    #[test]
    fn certificates_are_kept_for_a_time_and_for_some_hosts() {
        let authority = Authority::new(&seed('1')).unwrap();
        let now = since_epoch();
        let first = authority.config_at("a.example", now).unwrap();
        let is_kept = |at| Arc::ptr_eq(&first, &authority.config_at("a.example", at).unwrap());
        assert!(is_kept(now + RENEW / 2));
        assert!(!is_kept(now + RENEW));
        let first = authority.config_at("a.example", now + RENEW).unwrap();
        for host in 0..HOSTS {
            authority.config_at(&format!("{host}.example"), now + RENEW).unwrap();
        }
        assert_eq!(authority.issued.lock().len(), HOSTS);
        assert!(!Arc::ptr_eq(
            &first,
            &authority.config_at("a.example", now + RENEW).unwrap()
        ));
        // The clock went back.
        assert!(!Arc::ptr_eq(
            &authority.config_at("a.example", now + RENEW).unwrap(),
            &authority.config_at("a.example", now).unwrap()
        ));
    }
}
