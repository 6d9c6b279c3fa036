//! A server that answers as a test says, also wrongly.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::json;

use crate::unpack::digest;

#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) headers: BTreeMap<String, String>,
    pub(crate) body: Vec<u8>,
}

impl Request {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(&'static str, String)>,
    pub(crate) body: Vec<u8>,
    /// Bytes of the body after which nothing more is sent, and how long the connection stays open then.
    pub(crate) cut: Option<(usize, Duration)>,
}

pub(crate) fn reply(status: u16, body: impl Into<Vec<u8>>) -> Reply {
    Reply {
        status,
        body: body.into(),
        ..Reply::default()
    }
}

impl Reply {
    pub(crate) fn with(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.headers.push((name, value.into()));
        self
    }

    pub(crate) fn cut(self, bytes: usize, open: Duration) -> Self {
        Self {
            cut: Some((bytes, open)),
            ..self
        }
    }
}

type Answer = Arc<dyn Fn(&Request) -> Reply + Send + Sync>;

/// Serves until the test ends.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    requests: Arc<Mutex<Vec<Request>>>,
    accepted: Arc<AtomicUsize>,
}

impl Server {
    pub(crate) fn start(answer: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let requests = Arc::new(Mutex::new(Vec::new()));
        let (answer, seen): (Answer, _) = (Arc::new(answer), Arc::clone(&requests));
        let accepted = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&accepted);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                counted.fetch_add(1, Ordering::Relaxed);
                let (answer, seen) = (Arc::clone(&answer), Arc::clone(&seen));
                std::thread::spawn(move || serve(stream, &answer, &seen));
            }
        });
        Self {
            address,
            requests,
            accepted,
        }
    }

    pub(crate) fn host(&self) -> String {
        self.address.to_string()
    }

    /// How many connections were made to it.
    pub(crate) fn accepted(&self) -> usize {
        self.accepted.load(Ordering::Relaxed)
    }

    pub(crate) fn requests(&self) -> Vec<Request> {
        self.requests.lock().clone()
    }
}

fn serve(stream: TcpStream, answer: &Answer, seen: &Mutex<Vec<Request>>) -> Option<()> {
    let mut reader = BufReader::new(stream.try_clone().ok()?);
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let mut words = line.split(' ');
    let (method, path) = (words.next()?.to_owned(), words.next()?.to_owned());
    let mut headers = BTreeMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let Some((name, value)) = line.trim_end().split_once(": ") else {
            break;
        };
        headers.insert(name.to_lowercase(), value.to_owned());
    }
    let length = headers
        .get("content-length")
        .map_or(0, |length| length.parse().unwrap());
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    let request = Request {
        method,
        path,
        headers,
        body,
    };
    seen.lock().push(request.clone());
    let reply = answer(&request);
    let mut stream = stream;
    let mut head = format!(
        "HTTP/1.1 {} X\r\nContent-Length: {}\r\nConnection: close\r\n",
        reply.status,
        reply.body.len()
    );
    for (name, value) in &reply.headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    stream.write_all(format!("{head}\r\n").as_bytes()).ok()?;
    match reply.cut {
        Some((bytes, open)) => {
            stream.write_all(&reply.body[..bytes]).ok()?;
            // The pace of a server, which the test chooses.
            std::thread::sleep(open);
        }
        None => stream.write_all(&reply.body).ok()?,
    }
    Some(())
}

/// Objects of a repository by path below `/v2/NAME/`.
#[derive(Debug, Clone)]
pub(crate) struct Objects {
    pub(crate) paths: BTreeMap<String, (&'static str, Vec<u8>)>,
    pub(crate) manifest: String,
    pub(crate) layers: Vec<String>,
}

pub(crate) const MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
pub(crate) const INDEX: &str = "application/vnd.oci.image.index.v1+json";
pub(crate) const CONFIG: &str = "application/vnd.docker.container.image.v1+json";
const LAYER: &str = "application/vnd.docker.image.rootfs.diff.tar.gzip";

pub(crate) fn descriptor(kind: &str, bytes: &[u8]) -> serde_json::Value {
    json!({"mediaType": kind, "digest": digest(bytes), "size": bytes.len()})
}

/// An image with its configuration and layers, as `latest`.
pub(crate) fn objects(config: &[u8], layers: &[Vec<u8>]) -> Objects {
    let listed: Vec<_> = layers.iter().map(|layer| descriptor(LAYER, layer)).collect();
    let manifest =
        json!({"schemaVersion": 2, "mediaType": MANIFEST, "config": descriptor(CONFIG, config), "layers": listed});
    let manifest = manifest.to_string().into_bytes();
    let mut paths = BTreeMap::new();
    for blob in layers.iter().map(Vec::as_slice).chain([config]) {
        paths.insert(
            format!("blobs/{}", digest(blob)),
            ("application/octet-stream", blob.to_vec()),
        );
    }
    paths.insert("manifests/latest".to_owned(), (MANIFEST, manifest.clone()));
    paths.insert(format!("manifests/{}", digest(&manifest)), (MANIFEST, manifest.clone()));
    Objects {
        paths,
        manifest: digest(&manifest),
        layers: layers.iter().map(|layer| digest(layer)).collect(),
    }
}

impl Objects {
    /// The right answer to a request for the repository `a/b`.
    pub(crate) fn answer(&self, request: &Request) -> Reply {
        let rest = request.path.strip_prefix("/v2/a/b/").unwrap_or_default();
        let Some((kind, bytes)) = self.paths.get(rest) else {
            return reply(404, "{}");
        };
        let start = request
            .header("range")
            .and_then(|range| range.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok());
        match start {
            Some(start) => {
                let start: usize = start;
                let range = format!("bytes {start}-{}/{}", bytes.len() - 1, bytes.len());
                reply(206, &bytes[start..]).with("Content-Range", range)
            }
            None => reply(200, bytes.as_slice()).with("Content-Type", *kind),
        }
    }
}
