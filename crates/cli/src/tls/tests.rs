//! Tests of the certificate files: created, kept, renewed.

#![expect(
    clippy::disallowed_methods,
    reason = "certificates are valid at the time of the test"
)]

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::PathBuf;
use std::time::Duration;

use rustls::client::verify_server_name;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::server::ParsedCertificate;

use super::*;

const DOMAIN: &str = "sandbox.localhost:3000";
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// A data directory and its four files: the authority, its key, the certificate, its key.
struct TlsFiles {
    _temp: tempfile::TempDir,
    dir: DataDir,
    files: [PathBuf; 4],
}

impl TlsFiles {
    fn new() -> Self {
        let temp = tempfile::tempdir().unwrap();
        let dir = DataDir::prepare(&temp.path().join("data")).unwrap();
        Self {
            files: local::files(dir.path()),
            _temp: temp,
            dir,
        }
    }

    /// Prepares the certificate and tells which files were written anew.
    fn changed(&self, domain: &str, now: SystemTime) -> [bool; 4] {
        let before = self.contents();
        local::certificate(&self.dir, domain, now).unwrap();
        let after = self.contents();
        [0, 1, 2, 3].map(|at| before[at] != after[at])
    }

    fn contents(&self) -> [Option<String>; 4] {
        self.files.each_ref().map(|path| fs::read_to_string(path).ok())
    }

    fn is_for(&self, name: &str) -> bool {
        let certificate = CertificateDer::from_pem_slice(&fs::read(&self.files[2]).unwrap()).unwrap();
        let parsed = ParsedCertificate::try_from(&certificate).unwrap();
        verify_server_name(&parsed, &ServerName::try_from(name).unwrap()).is_ok()
    }
}

#[test]
fn a_first_start_makes_everything_with_its_mode_and_a_second_one_keeps_it() {
    let tls = TlsFiles::new();
    let now = SystemTime::now();
    assert_eq!(tls.changed(DOMAIN, now), [true; 4]);
    for (path, mode) in tls.files.iter().zip([0o644, 0o600, 0o644, 0o600]) {
        let found = fs::metadata(path).unwrap().mode() & 0o777;
        assert_eq!(found, mode, "{}", path.display());
    }
    assert_eq!(fs::read_dir(tls.dir.path().join("tls")).unwrap().count(), 4);
    for name in [
        "sandbox.localhost",
        "api.sandbox.localhost",
        "49983-iabc0123456789abcdefg.sandbox.localhost",
        "sandbox.sandbox.localhost",
        "localhost",
        "127.0.0.1",
        "::1",
    ] {
        assert!(tls.is_for(name), "{name}");
    }
    assert!(!tls.is_for("a.b.sandbox.localhost") && !tls.is_for("localhost.example"));
    assert_eq!(tls.changed(DOMAIN, now), [false; 4]);
    // The port is no part of a name.
    assert_eq!(tls.changed("sandbox.localhost:9", now), [false; 4]);
}

#[test]
fn another_domain_and_a_near_end_renew_the_certificate_and_keep_the_authority() {
    let tls = TlsFiles::new();
    let now = SystemTime::now();
    let renewed = [false, false, true, true];
    tls.changed(DOMAIN, now);
    assert_eq!(tls.changed("box.example.com", now), renewed);
    assert!(tls.is_for("api.box.example.com") && !tls.is_for("api.sandbox.localhost"));
    assert_eq!(tls.changed("box.example.com", now + 364 * DAY), [false; 4]);
    assert_eq!(tls.changed("box.example.com", now + 366 * DAY), renewed);
    // A clock that went back far enough makes it one of the future.
    assert_eq!(tls.changed("box.example.com", now), renewed);
}

#[test]
fn what_is_lost_or_damaged_is_made_again() {
    let tls = TlsFiles::new();
    let now = SystemTime::now();
    tls.changed(DOMAIN, now);
    let [authority, authority_key, certificate, key] = &tls.files;
    let first = fs::read(authority).unwrap();
    let trusted_first = || {
        let mut roots = rustls::RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(&first).unwrap()).unwrap();
        let roots = std::sync::Arc::new(roots);
        let verifier =
            rustls::client::WebPkiServerVerifier::builder_with_provider(roots, server::tls::provider()).build();
        let certificate = CertificateDer::from_pem_slice(&fs::read(certificate).unwrap()).unwrap();
        let name = ServerName::try_from("localhost").unwrap();
        let now = rustls::pki_types::UnixTime::now();
        use rustls::client::danger::ServerCertVerifier as _;
        verifier
            .unwrap()
            .verify_server_cert(&certificate, &[], &name, &[], now)
            .is_ok()
    };

    for lost in [certificate, key] {
        fs::remove_file(lost).unwrap();
        assert_eq!(tls.changed(DOMAIN, now), [false, false, true, true]);
    }
    fs::write(certificate, "no certificate").unwrap();
    assert_eq!(tls.changed(DOMAIN, now), [false, false, true, true]);
    fs::copy(authority_key, key).unwrap();
    assert_eq!(tls.changed(DOMAIN, now), [false, false, true, true]);

    // The same key makes the same authority: clients that trust the lost file trust the new one.
    fs::remove_file(authority).unwrap();
    assert_eq!(tls.changed(DOMAIN, now), [true, false, true, true]);
    assert!(trusted_first());

    // Its key is needed to sign only.
    fs::remove_file(authority_key).unwrap();
    assert_eq!(tls.changed(DOMAIN, now), [false; 4]);
    assert_eq!(tls.changed("d.e", now), [true; 4]);
    assert!(!trusted_first());

    fs::write(
        authority_key,
        "-----BEGIN PRIVATE KEY-----\nc2VjcmV0\n-----END PRIVATE KEY-----\n",
    )
    .unwrap();
    fs::remove_file(certificate).unwrap();
    let error = local::certificate(&tls.dir, DOMAIN, now).unwrap_err();
    let said = format!("{error:#} {error:?}");
    assert!(said.contains("ca.key") && !said.contains("c2VjcmV0"), "{said}");
}

#[test]
fn domains_of_every_shape_get_a_certificate() {
    let long = format!("{}.{}.{}", "a".repeat(63), "b".repeat(63), "c".repeat(50));
    for domain in [
        "localhost:80",
        "localhost",
        "a.b",
        "127.0.0.1:3000",
        "1-2.3-x.example",
        &long,
    ] {
        let tls = TlsFiles::new();
        assert_eq!(tls.changed(domain, SystemTime::now()), [true; 4], "{domain}");
        assert_eq!(tls.changed(domain, SystemTime::now()), [false; 4], "{domain}");
    }
}

#[test]
fn files_of_the_operator_are_taken_replaced_and_looked_at() {
    let (tls, other) = (TlsFiles::new(), TlsFiles::new());
    let now = SystemTime::now();
    tls.changed(DOMAIN, now);
    other.changed(DOMAIN, now);
    let files = Files {
        certificates: tls.files[2].clone(),
        key: tls.files[3].clone(),
    };
    let shown = prepare(&Https::Files(files.clone()), &tls.dir, DOMAIN)
        .unwrap()
        .unwrap();
    assert_eq!(shown.authority, None);
    assert!(prepare(&Https::Off, &tls.dir, DOMAIN).unwrap().is_none());
    let local = prepare(&Https::Local, &tls.dir, DOMAIN).unwrap().unwrap();
    assert_eq!(local.authority.as_deref(), Some(tls.files[0].as_path()));
    assert_eq!(authority_of(tls.dir.path()).unwrap(), local.authority);

    assert!(files.uncovered(host_of(DOMAIN)).is_empty());
    assert_eq!(files.uncovered("example.com"), ["example.com", "*.example.com"]);
    for (mode, exposed) in [
        (0o600, false),
        (0o640, false),
        (0o660, true),
        (0o604, true),
        (0o644, true),
    ] {
        fs::set_permissions(&files.key, Permissions::from_mode(mode)).unwrap();
        assert_eq!(files.exposure().is_some(), exposed, "{mode:o}");
    }

    fs::copy(&other.files[2], &files.certificates).unwrap();
    let error = files.reload(&shown.tls).unwrap_err();
    assert!(format!("{error:#}").contains("server.pem"), "{error:#}");
    fs::copy(&other.files[3], &files.key).unwrap();
    files.reload(&shown.tls).unwrap();
    fs::remove_file(&files.key).unwrap();
    assert!(files.load().is_err());
}
