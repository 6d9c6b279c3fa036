//! Pulls from the registry that Debian packages as `docker-registry`.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use image::Program;
use protocol::image::{Credentials, JobSecret, Progress, PullJob};
use serde_json::json;
use tokio::net::TcpSocket;

use crate::archive::{Member, file, gzip, tar};
use crate::fake::{INDEX, MANIFEST, Objects, descriptor, objects};
use crate::pull::{image, job, pull};
use crate::unpack::{check, check_report, config, digest};
use crate::{Root, run};

/// `user` with the password `pass:word`, by `htpasswd -B`.
const HTPASSWD: &str = "user:$2y$05$SfKzlnJogfvPE6ZmqRZbruLScHIhPRe93NtezH2zOXWD5YzV84ZBy\n";

/// A registry that ends with the test.
struct Registry {
    child: Child,
    port: u16,
    /// Bound to the port, so that nobody else gets it. The registry sets `SO_REUSEADDR`, too, and listens there.
    _reserved: TcpSocket,
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Registry {
    /// Starts a registry on a directory; `more` are lines of its configuration.
    fn start(storage: &Path, tls: Option<(&Path, &Path)>, auth: Option<&Path>) -> Self {
        let reserved = TcpSocket::new_v4().unwrap();
        reserved.set_reuseaddr(true).unwrap();
        reserved.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let port = reserved.local_addr().unwrap().port();
        let tls = tls.map_or(String::new(), |(certificate, key)| {
            format!(
                "  tls:\n    certificate: {}\n    key: {}\n",
                certificate.display(),
                key.display()
            )
        });
        let auth = auth.map_or(String::new(), |path| {
            format!("auth:\n  htpasswd:\n    realm: test\n    path: {}\n", path.display())
        });
        let text = format!(
            "version: 0.1\nlog:\n  level: error\nstorage:\n  filesystem:\n    rootdirectory: {}\nhttp:\n  addr: 127.0.0.1:{port}\n{tls}{auth}",
            storage.display()
        );
        let path = storage.join(format!("config-{port}.yml"));
        std::fs::write(&path, text).unwrap();
        let child = Command::new("docker-registry")
            .arg("serve")
            .arg(&path)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap_or_else(|error| panic!("docker-registry: {error}: install the package docker-registry"));
        let registry = Self {
            child,
            port,
            _reserved: reserved,
        };
        let begin = Instant::now();
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(
                begin.elapsed() < Duration::from_secs(20),
                "docker-registry does not start"
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        registry
    }

    fn host(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// Sends a request and gives the place that the response names.
    fn send(&self, method: &str, path: &str, kind: &str, body: &[u8]) -> String {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: {}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
            self.host(),
            body.len()
        );
        stream.write_all(head.as_bytes()).unwrap();
        stream.write_all(body).unwrap();
        let mut response = Vec::new();
        stream.read_to_end(&mut response).unwrap();
        let response = String::from_utf8_lossy(&response).into_owned();
        assert!(response.starts_with("HTTP/1.1 20"), "{method} {path}: {response}");
        let place = response.lines().find_map(|line| line.strip_prefix("Location: "));
        place.unwrap_or_default().to_owned()
    }

    fn blob(&self, repository: &str, bytes: &[u8]) {
        let place = self.send("POST", &format!("/v2/{repository}/blobs/uploads/"), "", b"");
        let path = &place[place.find("/v2/").unwrap()..];
        let mark = if path.contains('?') { '&' } else { '?' };
        self.send(
            "PUT",
            &format!("{path}{mark}digest={}", digest(bytes)),
            "application/octet-stream",
            bytes,
        );
    }

    fn push(&self, repository: &str, objects: &Objects) {
        for (path, (_, bytes)) in &objects.paths {
            if path.starts_with("blobs/") {
                self.blob(repository, bytes);
            }
        }
        for (path, (kind, bytes)) in &objects.paths {
            if path.starts_with("manifests/") {
                self.send("PUT", &format!("/v2/{repository}/{path}"), kind, bytes);
            }
        }
    }
}

fn storage(root: &Root) -> PathBuf {
    let storage = root.beside("storage");
    std::fs::create_dir(&storage).unwrap();
    storage
}

/// Images for two architectures under one tag.
fn push_index(registry: &Registry) {
    let arm = objects(&config("arm64"), &[gzip(&tar(&[file("arm", "x")]))]);
    registry.push("a/b", &arm);
    registry.push("a/b", &image());
    let entry = |arch: &str, objects: &Objects| {
        let (_, bytes) = &objects.paths["manifests/latest"];
        let mut entry = descriptor(MANIFEST, bytes);
        entry["platform"] = json!({"os": "linux", "architecture": arch});
        entry
    };
    let index =
        json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": [entry("arm64", &arm), entry("amd64", &image())]});
    registry.send("PUT", "/v2/a/b/manifests/multi", INDEX, index.to_string().as_bytes());
}

#[test]
fn images_are_pulled_by_tag_digest_and_index() {
    let beside = Root::new();
    let registry = Registry::start(&storage(&beside), None, None);
    push_index(&registry);
    let host = registry.host();
    let digest = image().manifest;
    for name in [
        ":latest".to_owned(),
        ":multi".to_owned(),
        format!("@{digest}"),
        format!(":old@{digest}"),
    ] {
        let root = Root::new();
        let mut job = job(&root, &format!("{host}/a/b{name}"), &[&host]);
        let report = pull(&job).unwrap();
        check(&root);
        check_report(&report);
        assert_eq!(report.digest.as_deref(), Some(digest.as_str()));
        job.resolve = true;
        let resolved = Progress::Resolved { digest: digest.clone() };
        assert_eq!(run(Program::Pull, &job).unwrap(), resolved);
    }
    for (name, arch, words) in [
        ("a/b:none", "amd64", "unknown tag or digest none"),
        ("a/none", "amd64", "unknown repository a/none"),
        (
            "a/b:multi",
            "s390x",
            "wrong architecture: it is for linux/arm64, linux/amd64",
        ),
        (
            "a/b:latest",
            "arm64",
            "wrong architecture: it is for linux/amd64, and linux/arm64 is required",
        ),
    ] {
        let root = Root::new();
        let job = PullJob {
            arch: Some(arch.to_owned()),
            ..job(&root, &format!("{host}/{name}"), &[&host])
        };
        let error = pull(&job).unwrap_err();
        assert!(error.contains(words) && error.contains(name), "{error}");
    }
}

#[test]
fn tls_and_passwords_are_required() {
    let beside = Root::new();
    let storage = storage(&beside);
    Registry::start(&storage, None, None).push("a/b", &image());
    let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    let path = |name: &str, text: &str| {
        let path = beside.beside(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let (certificate, key) = (
        path("cert", &made.cert.pem()),
        path("key", &made.signing_key.serialize_pem()),
    );
    let registry = Registry::start(&storage, Some((&certificate, &key)), Some(&path("htpasswd", HTPASSWD)));
    let login = |password: &str| Credentials::Registry {
        username: "user".to_owned(),
        password: JobSecret::new(password),
    };
    let host = registry.host();
    for (host, credentials, words) in [
        (host.as_str(), Some(login("pass:word")), ""),
        (&host, Some(login("wrong")), "unauthorised"),
        (&host, None, "requires credentials"),
        // The authority of another registry, even of the same host.
        ("127.0.0.1", Some(login("pass:word")), "TLS with"),
        ("127.0.0.1:443", Some(login("pass:word")), "TLS with"),
    ] {
        let root = Root::new();
        let job = PullJob {
            authorities: [(host.to_owned(), made.cert.pem())].into(),
            credentials,
            ..job(&root, &format!("{}/a/b", registry.host()), &[])
        };
        match pull(&job) {
            Ok(report) if words.is_empty() => {
                check(&root);
                check_report(&report);
            }
            Err(error) if !words.is_empty() => assert!(error.contains(words), "{error}"),
            other => panic!("{words}: {other:?}"),
        }
    }
}

/// Peak of the resident memory of this process, in KiB.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

/// Other tests of the process use memory too, but little.
#[test]
fn a_large_image_takes_no_memory() {
    let beside = Root::new();
    let registry = Registry::start(&storage(&beside), None, None);
    let host = registry.host();
    let mut peaks = Vec::new();
    // Noise in six bits of eight, which compresses a little.
    let mut noise = Vec::new();
    let random = std::fs::File::open("/dev/urandom").unwrap();
    random.take(16 << 20).read_to_end(&mut noise).unwrap();
    for byte in &mut noise {
        *byte &= 0x3f;
    }
    for (name, files) in [("small", 1), ("large", 6)] {
        // Four layers, so that several are downloaded at the same time.
        for layer in 0..4 {
            let members: Vec<Member> = (0..files)
                .map(|number| Member {
                    data: noise.clone(),
                    ..file(&format!("{layer}/{number}"), "")
                })
                .collect();
            let path = beside.beside(&format!("{name}-{layer}"));
            let bytes = tar(&members);
            if layer == 3 {
                // The encoder that other tests use takes 20 s for this much.
                let tar = beside.beside("tar");
                std::fs::write(&tar, &bytes).unwrap();
                let mut zstd = Command::new("zstd");
                let status = zstd.args(["-q", "-1", "-o"]).arg(path).arg(&tar).status();
                assert!(status.unwrap().success());
            } else {
                std::fs::write(path, gzip(&bytes)).unwrap();
            }
        }
        let layers: Vec<Vec<u8>> = (0..4)
            .map(|layer| std::fs::read(beside.beside(&format!("{name}-{layer}"))).unwrap())
            .collect();
        registry.push(&format!("a/{name}"), &objects(&config("amd64"), &layers));
    }
    for name in ["small", "large"] {
        // The peak begins again with what is resident now.
        std::fs::write("/proc/self/clear_refs", "5").unwrap();
        let root = Root::new();
        let mut job = job(&root, &format!("{host}/a/{name}"), &[&host]);
        job.limits.bytes = 4 << 30;
        let begin = Instant::now();
        let report = pull(&job).unwrap();
        println!(
            "{name}: {} bytes in {:?}, peak {} KiB",
            report.bytes,
            begin.elapsed(),
            peak()
        );
        peaks.push(peak());
    }
    assert!(peaks[1] < peaks[0] + (128 << 10), "{peaks:?} KiB");
}
