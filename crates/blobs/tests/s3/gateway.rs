//! A real S3 server on the loopback, with its objects as files of a directory.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use blobs::{Blobs, S3Settings};
use model::secret::Secret;
use tokio::net::TcpSocket;

pub(crate) const BUCKET: &str = "objects";
pub(crate) const KEY_ID: &str = "a-key-id";
pub(crate) const KEY: &str = "a-key-that-is-secret";

/// The S3 server of a test, which ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Gateway {
    pub(crate) directory: tempfile::TempDir,
    port: u16,
    /// Bound to the port, so that nobody else gets it. The server sets `SO_REUSEADDR`, too, and listens there.
    _reserved: TcpSocket,
    process: Option<Child>,
}

/// Path of the program: what the environment names, or where `scripts/test.sh` puts it.
fn program() -> PathBuf {
    let known = std::env::var_os("RINGFENCE_VERSITYGW").map(PathBuf::from);
    known.unwrap_or_else(|| {
        let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target");
        let found = fs::read_dir(&target).into_iter().flatten().flatten();
        let found = found.map(|entry| entry.path().join("versitygw"));
        let found = found.filter(|path| path.exists()).max();
        found.expect("no versitygw: `scripts/test.sh unit` builds it, or name the program in RINGFENCE_VERSITYGW")
    })
}

impl Gateway {
    pub(crate) async fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir_all(directory.path().join("root").join(BUCKET)).unwrap();
        let reserved = TcpSocket::new_v4().unwrap();
        reserved.set_reuseaddr(true).unwrap();
        reserved.bind((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
        let mut gateway = Self {
            directory,
            port: reserved.local_addr().unwrap().port(),
            _reserved: reserved,
            process: None,
        };
        gateway.run().await;
        gateway
    }

    /// Starts it, or starts it again, at the same address with the same objects.
    pub(crate) async fn run(&mut self) {
        let process = Command::new(program())
            .args([
                "--port",
                &format!("127.0.0.1:{}", self.port),
                "--quiet",
                "posix",
                "--disable-object-lock-file",
            ])
            .arg(self.directory.path().join("root"))
            .env_clear()
            .env("ROOT_ACCESS_KEY_ID", KEY_ID)
            .env("ROOT_SECRET_ACCESS_KEY", KEY)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        self.process = Some(process.unwrap());
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, self.port));
        until("the server listens", || {
            TcpStream::connect_timeout(&address, Duration::from_secs(1)).is_ok()
        })
        .await;
    }

    pub(crate) fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.kill().unwrap();
            process.wait().unwrap();
        }
    }

    pub(crate) fn settings(&self) -> S3Settings {
        S3Settings {
            bucket: BUCKET.to_owned(),
            endpoint: Some(format!("http://127.0.0.1:{}", self.port)),
            region: "us-east-1".to_owned(),
            prefix: "some/where".to_owned(),
            access_key_id: KEY_ID.to_owned(),
            secret_access_key: Secret::new(KEY.to_owned()),
            allow_http: true,
            path_style: true,
            authority: None,
            journal: self.directory.path().join("journal"),
        }
    }

    pub(crate) fn blobs(&self) -> Blobs {
        Blobs::open(&self.settings()).unwrap()
    }

    /// The file of an object.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.directory.path().join("root").join(BUCKET).join(name)
    }

    /// How many uploads in parts the server has that have not ended.
    pub(crate) fn unfinished(&self) -> usize {
        let objects = fs::read_dir(self.file(".sgwtmp/multipart"))
            .into_iter()
            .flatten()
            .flatten();
        objects
            .flat_map(|object| fs::read_dir(object.path()).into_iter().flatten().flatten())
            .filter(|upload| upload.path().is_dir())
            .count()
    }

    /// How many uploads the platform has noted.
    pub(crate) fn noted(&self) -> usize {
        fs::read_dir(self.directory.path().join("journal")).unwrap().count()
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Waits for a condition, which comes if nothing is wrong.
pub(crate) async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    for _ in 0..3000 {
        if holds() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("waited for a minute: {what}");
}
