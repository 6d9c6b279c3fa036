//! A CA certificate of the host's: whether real programs trust a server of it, and only then.

use std::sync::Arc;

use protocol::connect::Codec;
use protocol::process::{ProcessConfig, StartRequest};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, KeyUsagePurpose};
use rustls::ServerConfig;
use rustls::pki_types::PrivateKeyDer;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_rustls::TlsAcceptor;

use crate::client::{Client, Rest};
use crate::sandbox::Sandbox;

/// What every request is answered with. It is also a git repository, as far as listing its branches goes.
const BODY: &str = "0123456789012345678901234567890123456789\trefs/heads/main\n";

/// A certificate authority.
struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    fn new(name: &str) -> Self {
        let mut params = CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    fn init(&self) -> String {
        serde_json::json!({ "caBundle": self.0.pem() }).to_string()
    }

    /// Serves HTTPS as `localhost` in the sandbox, and tells the port.
    fn serve(&self, sandbox: &Sandbox) -> u16 {
        let mut params = CertificateParams::new(["localhost".to_owned()]).unwrap();
        params.use_authority_key_identifier_extension = true;
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.0).unwrap();
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(
                vec![certificate.der().clone()],
                PrivateKeyDer::try_from(key.serialize_der()).unwrap(),
            )
            .unwrap();
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let listener = sandbox.listener();
        let port = listener.local_addr().unwrap().port();
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let acceptor = acceptor.clone();
                tokio::spawn(async move {
                    // A client that does not trust us ends the handshake.
                    let Ok(mut stream) = acceptor.accept(stream).await else {
                        return;
                    };
                    let mut head = Vec::new();
                    while !head.ends_with(b"\r\n\r\n") {
                        match stream.read_u8().await {
                            Ok(byte) => head.push(byte),
                            Err(_) => return,
                        }
                    }
                    let answer = format!(
                        "HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{BODY}",
                        BODY.len()
                    );
                    let _ = stream.write_all(answer.as_bytes()).await;
                    let _ = stream.shutdown().await;
                });
            }
        });
        port
    }
}

/// Clients that print an answer's body, with what they take their trust from.
fn clients(port: u16) -> Vec<(&'static str, String)> {
    let url = format!("https://localhost:{port}");
    let python = |code: &str| format!("/usr/bin/python3 -c \"{code}\"");
    let urllib = python(&format!(
        "import urllib.request as r; print(r.urlopen('{url}/').read().decode())"
    ));
    let mut clients = vec![
        ("curl", format!("/usr/bin/curl --silent --show-error {url}/")),
        // What sudo leaves of the environment: the trust store alone must do.
        (
            "curl without variables",
            format!("env -i /usr/bin/curl --silent --show-error {url}/"),
        ),
        ("python", urllib.clone()),
        ("python without variables", format!("env -i {urllib}")),
        ("wget", format!("/usr/bin/wget --quiet --output-document=- {url}/")),
        ("git", format!("/usr/bin/git ls-remote {url}/repository")),
        (
            "git without variables",
            format!("env -i HOME=/ /usr/bin/git ls-remote {url}/repository"),
        ),
        (
            "openssl",
            format!(
                "(printf 'GET / HTTP/1.0\\r\\n\\r\\n'; sleep 1) | /usr/bin/openssl s_client -quiet -verify_return_error -connect localhost:{port}"
            ),
        ),
        (
            // As programs that bring their own roots are told of others.
            "the bundle of requests",
            python(&format!(
                "import os, ssl, urllib.request as r; c = ssl.create_default_context(cafile=os.environ.get('REQUESTS_CA_BUNDLE') or '/dev/null'); \
                 print(r.urlopen('{url}/', context=c).read().decode())"
            )),
        ),
    ];
    if std::path::Path::new("/usr/bin/node").exists() {
        let code = format!(
            "fetch('{url}/').then(r => r.text()).then(t => console.log(t)).catch(e => {{ console.error(e); process.exit(1) }})"
        );
        clients.push(("node", format!("/usr/bin/node -e \"{code}\"")));
    } else {
        eprintln!("SKIPPED: node is not here");
    }
    clients
}

async fn run(client: &mut Client, script: &str, envs: &[(&str, &str)]) -> Rest {
    let envs = envs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
    let request = StartRequest {
        process: Some(ProcessConfig {
            cmd: "/bin/sh".to_owned(),
            args: vec!["-c".to_owned(), script.to_owned()],
            envs: envs.collect(),
            ..ProcessConfig::default()
        }),
        stdin: Some(false),
        ..StartRequest::default()
    };
    let mut events = client.stream(Codec::Proto, "Start", &request).await;
    events.started().await;
    events.rest().await
}

/// Has every client try a server. They either all get the answer, or none does.
async fn check(sandbox: &Sandbox, port: u16, trusted: bool) {
    let mut client = sandbox.client().await.user("user");
    for (name, script) in clients(port) {
        let rest = run(&mut client, &script, &[]).await;
        let got = rest.out().contains(BODY.trim_end());
        assert_eq!(got, trusted, "{name}: {} {}", rest.out(), rest.err());
    }
}

#[tokio::test]
async fn programs_trust_the_certificate_that_was_installed_last() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    let (first, second) = (Authority::new("first gateway"), Authority::new("second gateway"));
    let (to_first, to_second) = (first.serve(&sandbox), second.serve(&sandbox));
    let mut host = sandbox.host().await;

    check(&sandbox, to_first, false).await;
    assert_eq!(host.post("/init", &first.init()).await.status, 204);
    check(&sandbox, to_first, true).await;
    check(&sandbox, to_second, false).await;
    // Roots of the system are still there.
    let mut client = sandbox.client().await.user("user");
    let count = "grep -c 'BEGIN CERTIFICATE' \"$SSL_CERT_FILE\"";
    let system = std::fs::read_to_string("/etc/ssl/certs/ca-certificates.crt").unwrap();
    let expect = system.matches("BEGIN CERTIFICATE").count() + 1;
    assert_eq!(run(&mut client, count, &[]).await.out().trim(), expect.to_string());

    // Without one, the old one stays; an older call changes nothing; another takes its place.
    assert_eq!(
        host.post("/init", r#"{"timestamp":"2026-01-01T00:00:00Z"}"#)
            .await
            .status,
        204
    );
    let stale = serde_json::json!({ "caBundle": second.0.pem(), "timestamp": "2025-01-01T00:00:00Z" }).to_string();
    assert_eq!(host.post("/init", &stale).await.status, 204);
    check(&sandbox, to_second, false).await;
    assert_eq!(host.post("/init", &second.init()).await.status, 204);
    check(&sandbox, to_first, false).await;
    check(&sandbox, to_second, true).await;
    assert_eq!(run(&mut client, count, &[]).await.out().trim(), expect.to_string());

    // What the client says itself wins, for one process and for all.
    let (_, curl) = &clients(to_second)[0];
    let python = &clients(to_second)[2].1;
    let own = [("SSL_CERT_FILE", "/dev/null"), ("SSL_CERT_DIR", "/dev/null")];
    assert_ne!(run(&mut client, python, &own).await.exit().0, 0);
    let everywhere = r#"{"envVars":{"CURL_CA_BUNDLE":"/dev/null"}}"#;
    assert_eq!(host.post("/init", everywhere).await.status, 204);
    assert_ne!(run(&mut client, curl, &[]).await.exit().0, 0);
    assert_eq!(run(&mut client, python, &[]).await.exit().0, 0);
}

#[tokio::test]
async fn what_is_no_certificate_changes_nothing() {
    let Some(sandbox) = Sandbox::ready(r#"{"envVars":{"A":"1"}}"#).await else {
        return;
    };
    let mut host = sandbox.host().await;
    let before = host.get("/envs").await.text().to_owned();
    let authority = Authority::new("gateway");
    let pem = authority.0.pem();
    let key = authority.0.key().serialize_pem();
    let long = format!("{pem}{}", "#".repeat(64 * 1024));
    for (bundle, reason) in [
        ("nonsense", "it has no certificate in PEM"),
        (
            pem.trim_end().trim_end_matches('-'),
            "the PEM block of certificate 1 has no end",
        ),
        (
            &pem.replacen("MII", "MI!", 1),
            "certificate 1 is not base64 of one DER certificate",
        ),
        (
            &format!("{pem}{key}"),
            "it has a PEM block 'PRIVATE KEY': only certificates belong here",
        ),
        (&long, "it is longer than 65536 bytes"),
    ] {
        let init = serde_json::json!({ "caBundle": bundle, "envVars": { "A": "2" }, "accessToken": "t" });
        let answer = host.post("/init", &init.to_string()).await;
        assert_eq!(answer.status, 400, "{bundle:.60}");
        assert_eq!(
            answer.text().trim_end(),
            format!("failed to install CA bundle: {reason}")
        );
        assert!(!answer.text().contains("MII"));
    }
    assert_eq!(host.get("/envs").await.text(), before);
    assert_eq!(sandbox.client().await.get("/envs").await.status, 200);
    let file = "/files?path=/run/ringfence/ca.pem";
    assert_eq!(host.get(file).await.status, 404);
    // Nothing is as good as nothing said.
    assert_eq!(host.post("/init", r#"{"caBundle":""}"#).await.status, 204);
    assert_eq!(host.get(file).await.status, 404);
    assert_eq!(host.post("/init", &authority.init()).await.status, 204);
    assert_eq!(host.get(file).await.text(), pem.replace("\r\n", "\n"));
}

#[tokio::test]
async fn a_process_waits_for_a_certificate_whose_installation_is_deferred() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    let authority = Authority::new("deferred");
    let port = authority.serve(&sandbox);
    let init = serde_json::json!({ "caBundle": authority.0.pem(), "caBundleDeferred": true });
    let mut client = sandbox.client().await.user("user");
    let mut host = sandbox.host().await;
    assert_eq!(host.post("/init", &init.to_string()).await.status, 204);
    let rest = run(&mut client, "cat /run/ringfence/ca.pem; echo $SSL_CERT_FILE", &[]).await;
    assert!(rest.out().starts_with("-----BEGIN CERTIFICATE-----"), "{}", rest.err());
    assert!(rest.out().contains("/etc/ssl/certs/"), "{}", rest.out());
    check(&sandbox, port, true).await;
}
