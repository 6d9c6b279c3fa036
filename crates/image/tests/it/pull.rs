//! Pulls from servers that answer wrongly, late, or with conditions.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use image::Program;
use protocol::image::{Credentials, ImageReport, JobSecret, Progress, PullJob, Transfer};

use crate::archive::{file, gzip, tar};
use crate::fake::{Objects, Reply, Request, Server, objects, reply};
use crate::hostile::LIMITS;
use crate::unpack::{check, check_report, config, layers};
use crate::{Root, run};

pub(crate) fn job(root: &Root, reference: &str, hosts: &[&str]) -> PullJob {
    PullJob {
        reference: reference.to_owned(),
        resolve: false,
        target: root.path(),
        work: root.work(),
        credentials: None,
        logins: Default::default(),
        arch: Some("amd64".to_owned()),
        mirrors: Default::default(),
        insecure: hosts.iter().map(|host| (*host).to_owned()).collect(),
        authorities: Default::default(),
        limits: LIMITS,
        transfer: Transfer {
            request_timeout_ms: 30_000,
            stall_timeout_ms: 30_000,
            attempts: 3,
            backoff_ms: 10,
            ..Transfer::default()
        },
    }
}

pub(crate) fn pull(job: &PullJob) -> Result<ImageReport, String> {
    let done = run(Program::Pull, job);
    let left = std::fs::read_dir(&job.work).unwrap().count();
    assert_eq!(left, 0, "nothing is left behind");
    done.map(|progress| match progress {
        Progress::Unpacked(report) => report,
        other => panic!("{other:?}"),
    })
}

pub(crate) fn image() -> Objects {
    objects(&config("amd64"), &layers())
}

fn login() -> Credentials {
    Credentials::Registry {
        username: "user".to_owned(),
        password: JobSecret::new("pass:word"),
    }
}

fn basic(text: &str) -> String {
    format!("Basic {}", STANDARD.encode(text))
}

/// A registry that answers rightly except where `other` has an answer. It gets the number of the request for a layer.
fn registry(other: impl Fn(&Objects, &Request, usize) -> Option<Reply> + Send + Sync + 'static) -> Server {
    let objects = image();
    let count = AtomicUsize::new(0);
    Server::start(move |request| {
        let is_first_layer = request.path.ends_with(&objects.layers[0]);
        let number = if is_first_layer {
            count.fetch_add(1, Ordering::SeqCst) + 1
        } else {
            0
        };
        other(&objects, request, number).unwrap_or_else(|| objects.answer(request))
    })
}

#[test]
fn faults_are_overcome_or_reported() {
    type Fault = fn(&Objects, &Request, usize) -> Option<Reply>;
    let faults: [(&str, Fault, Result<(), &str>); 14] = [
        ("nothing wrong", |_, _, _| None, Ok(())),
        (
            "a layer stalls once",
            |right, request, number| (number == 1).then(|| right.answer(request).cut(100, Duration::from_secs(3))),
            Ok(()),
        ),
        (
            "a layer is cut once",
            |right, request, number| (number == 1).then(|| right.answer(request).cut(100, Duration::ZERO)),
            Ok(()),
        ),
        (
            "a layer always stalls",
            |_, _, number| (number > 0).then(|| reply(200, vec![0; 100]).cut(0, Duration::from_secs(3))),
            Err("sent nothing for 300 ms"),
        ),
        (
            "no range",
            |right, request, number| match number {
                1 => Some(right.answer(request).cut(100, Duration::ZERO)),
                2 => Some(reply(200, right.paths[&format!("blobs/{}", right.layers[0])].1.clone())),
                _ => None,
            },
            Ok(()),
        ),
        (
            "range refused",
            |right, request, number| match number {
                1 => Some(right.answer(request).cut(100, Duration::ZERO)),
                2 => Some(reply(416, "")),
                _ => None,
            },
            Ok(()),
        ),
        (
            "wrong contents once",
            |right, request, number| {
                (number == 1).then(|| {
                    let mut wrong = right.answer(request);
                    wrong.body[50] ^= 1;
                    wrong
                })
            },
            Ok(()),
        ),
        (
            "wrong contents",
            |right, request, number| {
                (number > 0).then(|| {
                    let mut wrong = right.answer(request);
                    wrong.body[50] ^= 1;
                    wrong
                })
            },
            Err("wrong digest"),
        ),
        (
            "larger than stated",
            |right, request, number| {
                (number > 0).then(|| {
                    let mut wrong = right.answer(request);
                    wrong.body.push(0);
                    wrong
                })
            },
            Err("is larger than"),
        ),
        (
            "unavailable once",
            |_, _, number| (number == 1).then(|| reply(503, "").with("Retry-After", "0")),
            Ok(()),
        ),
        (
            "unavailable",
            |_, _, number| (number > 0).then(|| reply(503, "")),
            Err("status 503"),
        ),
        (
            "layer is gone",
            |_, _, number| (number > 0).then(|| reply(404, "")),
            Err("does not have the layer"),
        ),
        (
            "too many requests",
            |_, request, _| request.path.contains("manifests").then(|| reply(429, "")),
            Err("too many requests"),
        ),
        (
            "redirects for ever",
            |_, request, number| (number > 0).then(|| reply(307, "").with("Location", request.path.clone())),
            Err("redirects"),
        ),
    ];
    for (name, fault, expect) in faults {
        let server = registry(fault);
        let root = Root::new();
        let host = server.host();
        let mut job = job(&root, &format!("{host}/a/b"), &[&host]);
        if name.contains("stalls") {
            job.transfer.stall_timeout_ms = 300;
        }
        if name == "a layer stalls once" {
            // On a busy machine more than the layer may stall.
            job.transfer.attempts = 10;
        }
        let done = pull(&job);
        match (done, expect) {
            (Ok(report), Ok(())) => {
                check(&root);
                check_report(&report);
            }
            (Err(error), Err(words)) => {
                assert!(error.contains(words), "{name}: {error}");
                assert!(
                    error.starts_with(&format!("image {host}/a/b:latest: ")),
                    "{name}: {error}"
                );
            }
            (done, _) => panic!("{name}: {done:?}"),
        }
    }
}

#[test]
fn a_cut_layer_goes_on_where_it_ended() {
    let server =
        registry(|right, request, number| (number == 1).then(|| right.answer(request).cut(100, Duration::ZERO)));
    let root = Root::new();
    let host = server.host();
    pull(&job(&root, &format!("{host}/a/b"), &[&host])).unwrap();
    let ranges: Vec<String> = server
        .requests()
        .iter()
        .filter_map(|request| request.header("range").map(str::to_owned))
        .collect();
    assert_eq!(ranges, ["bytes=100-"]);
}

#[test]
fn responses_that_never_begin_end_the_pull() {
    let server = Server::start(|_| {
        // The pace of a server: far longer than the limit below.
        std::thread::sleep(Duration::from_secs(5));
        reply(200, "")
    });
    let root = Root::new();
    let host = server.host();
    let mut job = job(&root, &format!("{host}/a/b"), &[&host]);
    job.transfer.request_timeout_ms = 200;
    let error = pull(&job).unwrap_err();
    assert!(error.contains("did not respond within 200 ms"), "{error}");
    // The server may learn of the last one after it was given up.
    let begun = Instant::now();
    // By its connections: one may be given up before its request was written.
    while server.accepted() < 3 {
        assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", server.requests());
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(server.accepted(), 3);
}

/// A registry with tokens, whose layers are elsewhere.
struct Tokens {
    storage: Server,
    realm: Arc<Server>,
    registry: Server,
}

impl Tokens {
    /// The token is valid for so many requests.
    fn start(valid: usize) -> Self {
        let objects = image();
        let storage = Server::start(move |request| {
            let right = objects.answer(request);
            if request.header("authorization").is_some() {
                reply(400, "two kinds of authorization")
            } else {
                right
            }
        });
        let issued = Arc::new(AtomicUsize::new(0));
        let number = Arc::clone(&issued);
        let realm = Arc::new(Server::start(move |request| {
            if request.header("authorization") != Some(&basic("user:pass:word")) {
                return reply(401, "");
            }
            let number = number.fetch_add(1, Ordering::SeqCst) + 1;
            reply(200, format!("{{\"token\":\"t{number}\"}}"))
        }));
        let (objects, used) = (image(), AtomicUsize::new(0));
        let (realm_host, storage_host) = (realm.host(), storage.host());
        let registry = Server::start(move |request| {
            let current = format!("Bearer t{}", issued.load(Ordering::SeqCst));
            let is_valid = request.header("authorization") == Some(&current);
            if !is_valid || used.fetch_add(1, Ordering::SeqCst) % valid == valid - 1 {
                let challenge = format!(
                    "Bearer realm=\"http://{realm_host}/token\",service=\"the registry\",scope=\"repository:a/b:pull\""
                );
                return reply(401, "").with("WWW-Authenticate", challenge);
            }
            if request.path.contains("/blobs/") {
                return reply(307, "").with("Location", format!("http://{storage_host}{}", request.path));
            }
            objects.answer(request)
        });
        Self {
            storage,
            realm,
            registry,
        }
    }

    fn job(&self, root: &Root) -> PullJob {
        let hosts = [self.registry.host(), self.realm.host(), self.storage.host()];
        let hosts: Vec<&str> = hosts.iter().map(String::as_str).collect();
        job(root, &format!("{}/a/b", hosts[0]), &hosts)
    }
}

#[test]
fn tokens_go_to_the_registry_and_credentials_to_its_realm() {
    let tokens = Tokens::start(1000);
    let root = Root::new();
    let job = PullJob {
        credentials: Some(login()),
        ..tokens.job(&root)
    };
    check_report(&pull(&job).unwrap());
    check(&root);
    let asked = tokens.realm.requests();
    assert_eq!(asked.len(), 1);
    assert_eq!(
        asked[0].path,
        "/token?service=the%20registry&scope=repository%3Aa%2Fb%3Apull"
    );
    for request in tokens.registry.requests() {
        let value = request.header("authorization");
        assert!(matches!(value, None | Some("Bearer t1")), "{value:?}");
    }
    assert_eq!(tokens.storage.requests().len(), 4);
    for request in tokens.storage.requests() {
        assert_eq!(request.header("authorization"), None);
    }
}

#[test]
fn tokens_that_expire_are_renewed() {
    let tokens = Tokens::start(3);
    let root = Root::new();
    let mut job = PullJob {
        credentials: Some(login()),
        ..tokens.job(&root)
    };
    job.transfer.parallel = 1;
    check_report(&pull(&job).unwrap());
    assert!(tokens.realm.requests().len() > 1);
}

#[test]
fn of_several_logins_that_of_the_registry_is_used() {
    let tokens = Tokens::start(1000);
    let pulled = |hosts: &[&str]| {
        let root = Root::new();
        let other = Credentials::Registry {
            username: "other".to_owned(),
            password: JobSecret::new("other"),
        };
        let mut job = tokens.job(&root);
        job.logins = hosts.iter().map(|host| ((*host).to_owned(), login())).collect();
        for host in ["docker.io", "other.example", &tokens.realm.host()] {
            job.logins.insert(host.to_owned(), other.clone());
        }
        pull(&job)
    };
    let host = tokens.registry.host();
    check_report(&pulled(&[&host]).unwrap());
    let port = host.rsplit_once(':').unwrap().1;
    for not_it in [vec![], vec!["127.0.0.1"], vec![port]] {
        let error = pulled(&not_it).unwrap_err();
        assert!(error.contains("requires credentials"), "{error}");
    }
    let mut sent: Vec<Option<String>> = Vec::new();
    for request in tokens.realm.requests() {
        sent.push(request.header("authorization").map(str::to_owned));
    }
    let own = format!("Basic {}", STANDARD.encode("user:pass:word"));
    sent.retain(|value| value.as_ref() != Some(&own));
    assert!(sent.iter().all(Option::is_none), "{sent:?}");
}

#[test]
fn wrong_credentials_are_reported_and_not_shown() {
    let tokens = Tokens::start(1000);
    for (password, words) in [
        (Some("secret-word"), "does not accept the credentials"),
        (None, "requires credentials"),
    ] {
        let root = Root::new();
        let credentials = password.map(|password| Credentials::Registry {
            username: "user".to_owned(),
            password: JobSecret::new(password),
        });
        let error = pull(&PullJob {
            credentials,
            ..tokens.job(&root)
        })
        .unwrap_err();
        assert!(error.contains("unauthorised") && error.contains(words), "{error}");
        assert!(!error.contains("secret-word"));
    }
}

#[test]
fn mirrors_are_asked_first_and_get_no_credentials() {
    let broken = Server::start(|_| reply(404, "{}"));
    let objects = image();
    let mirror = Server::start(move |request| objects.answer(request));
    let origin = Server::start(|_| reply(500, ""));
    let root = Root::new();
    let hosts = [broken.host(), mirror.host(), origin.host()];
    let hosts: Vec<&str> = hosts.iter().map(String::as_str).collect();
    let mut job = job(&root, &format!("{}/a/b", hosts[2]), &hosts);
    job.credentials = Some(login());
    job.mirrors
        .insert(hosts[2].to_owned(), vec![hosts[0].to_owned(), hosts[1].to_owned()]);
    check_report(&pull(&job).unwrap());
    assert!(!broken.requests().is_empty() && origin.requests().is_empty());
    for request in broken.requests().iter().chain(&mirror.requests()) {
        assert_eq!(request.header("authorization"), None);
    }
}

#[test]
fn what_is_denied_or_unusable_has_a_message() {
    let check = |name: &str, answer: Reply, words: &str| {
        let server = Server::start(move |_| answer.clone());
        let root = Root::new();
        let host = server.host();
        let error = pull(&job(&root, &format!("{host}/a/b:t"), &[&host])).unwrap_err();
        assert!(error.contains(words) && error.contains("/a/b:t"), "{name}: {error}");
    };
    check("denied", reply(403, "{}"), "denied");
    check("schema 1", reply(200, r#"{"schemaVersion":1}"#), "version 1");
    check("no manifest", reply(200, "<html>"), "invalid manifest");
    check("large manifest", reply(200, vec![b' '; 5 << 20]), "larger than");
    check("status", reply(418, ""), "status 418");
    let objects = objects(&config("arm64"), &layers());
    let server = Server::start(move |request| objects.answer(request));
    let root = Root::new();
    let host = server.host();
    let error = pull(&job(&root, &format!("{host}/a/b"), &[&host])).unwrap_err();
    assert!(error.contains("wrong architecture: it is for linux/arm64"), "{error}");
    // A registry with HTTP only, of which the job does not say so.
    let error = pull(&job(&root, &format!("{host}/a/b"), &[])).unwrap_err();
    assert!(error.contains("TLS with"), "{error}");
}

#[test]
fn sizes_are_limited() {
    let large = "x".repeat(200_000);
    let objects = objects(&config("amd64"), &[gzip(&tar(&[file("large", &large)]))]);
    let server = Server::start(move |request| objects.answer(request));
    let host = server.host();
    for bytes in [10, 100_000] {
        let root = Root::new();
        let mut job = job(&root, &format!("{host}/a/b"), &[&host]);
        job.limits.bytes = bytes;
        let error = pull(&job).unwrap_err();
        assert!(error.contains("too large"), "{error}");
    }
}

#[test]
fn a_password_of_ecr_is_obtained() {
    let token = STANDARD.encode("user:pass:word");
    let cloud = Server::start(move |_| {
        reply(
            200,
            format!("{{\"authorizationData\":[{{\"authorizationToken\":\"{token}\"}}]}}"),
        )
    });
    let tokens = Tokens::start(1000);
    let root = Root::new();
    let mut job = tokens.job(&root);
    let credentials = Credentials::Aws {
        access_key_id: "AKID".to_owned(),
        secret_access_key: JobSecret::new("the-key"),
        region: "eu-central-1".to_owned(),
    };
    job.credentials = Some(credentials);
    // Only its own registries get what a cloud gives.
    assert!(pull(&job).unwrap_err().contains("registries of ECR"));
    job.insecure.push(cloud.host());
    job.transfer.aws_endpoint = Some(format!("http://{}/", cloud.host()));
    check_report(&pull(&job).unwrap());
    let request = &cloud.requests()[0];
    assert_eq!((request.method.as_str(), request.body.as_slice()), ("POST", &b"{}"[..]));
    assert_eq!(request.header("x-amz-date"), Some("19700101T000000Z"));
    let value = request.header("authorization").unwrap();
    let begin = "AWS4-HMAC-SHA256 Credential=AKID/19700101/eu-central-1/ecr/aws4_request, \
                 SignedHeaders=content-type;host;x-amz-date;x-amz-target, Signature=";
    assert!(value.starts_with(begin), "{value}");
    assert!(!value.contains("the-key"));
}

#[test]
fn a_token_of_gcp_is_obtained() {
    let cloud = Server::start(|_| reply(200, r#"{"access_token":"t"}"#));
    let objects = image();
    let server = Server::start(move |request| {
        if request.header("authorization") == Some(&basic("oauth2accesstoken:t")) {
            return objects.answer(request);
        }
        reply(401, "").with("WWW-Authenticate", "Basic realm=\"x\"")
    });
    let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_RSA_SHA256).unwrap();
    let root = Root::new();
    let hosts = [server.host(), cloud.host()];
    let mut job = job(&root, &format!("{}/a/b", hosts[0]), &[&hosts[0], &hosts[1]]);
    let account = serde_json::json!({"client_email": "a@b", "private_key": key.serialize_pem(), "token_uri": "https://oauth.example/token"});
    job.credentials = Some(Credentials::Gcp {
        service_account_json: JobSecret::new(account.to_string()),
    });
    job.transfer.gcp_endpoint = Some(format!("http://{}/token", hosts[1]));
    check_report(&pull(&job).unwrap());
    let body = String::from_utf8(cloud.requests()[0].body.clone()).unwrap();
    let begin = "grant_type=urn%3Aietf%3Aparams%3Aoauth%3Agrant-type%3Ajwt-bearer&assertion=";
    let assertion = body.strip_prefix(begin).unwrap();
    let (signed, signature) = assertion.rsplit_once('.').unwrap();
    let decode = |text: &str| base64::engine::general_purpose::URL_SAFE_NO_PAD.decode(text).unwrap();
    let claims: serde_json::Value = serde_json::from_slice(&decode(signed.split_once('.').unwrap().1)).unwrap();
    assert_eq!(
        (claims["iss"].as_str(), claims["aud"].as_str()),
        (Some("a@b"), Some("https://oauth.example/token"))
    );
    let files = root.beside("jwt");
    std::fs::create_dir(&files).unwrap();
    std::fs::write(files.join("text"), signed).unwrap();
    std::fs::write(files.join("signature"), decode(signature)).unwrap();
    std::fs::write(files.join("key"), key.public_key_pem()).unwrap();
    let verified = std::process::Command::new("openssl")
        .args(["dgst", "-sha256", "-verify", "key", "-signature", "signature", "text"])
        .current_dir(&files)
        .output()
        .unwrap();
    assert!(verified.status.success(), "{verified:?}");
}
