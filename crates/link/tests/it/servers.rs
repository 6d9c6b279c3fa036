//! Two servers of one service, of which one opens streams to the other.

use std::sync::Arc;
use std::time::SystemTime;

use link::{Answers, Authority, Carried, OpenError, ServedFuture, ServerLink, Taken};
use model::id::NodeId;
use parking_lot::Mutex;
use protocol::node::SandboxStream;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::place::{BOUND, TestServer, authority, node_id};
use crate::raw;

const SERVERS: &[u8] = b"ringfence-servers/1";

/// Serves streams by sending back what arrives, except at `/cut`.
#[derive(Debug)]
struct Echo {
    from: Mutex<Vec<NodeId>>,
    cut: mpsc::Sender<()>,
}

impl Answers for Echo {
    fn takes(&self, path: &str) -> Taken {
        match path {
            "/here" => Taken::Yes,
            "/busy" => Taken::Busy,
            _ => Taken::NotHere,
        }
    }

    fn serve(self: Arc<Self>, from: NodeId, mut stream: SandboxStream) -> ServedFuture {
        Box::pin(async move {
            self.from.lock().push(from);
            let mut buffer = vec![0; 8192];
            loop {
                match stream.read(&mut buffer).await {
                    Ok(0) => break stream.shutdown().await.unwrap(),
                    Ok(_) if buffer.starts_with(b"cut") => break,
                    Ok(count) => stream.write_all(&buffer[..count]).await.unwrap(),
                    Err(_) => {
                        let _ = self.cut.send(()).await;
                        break;
                    }
                }
            }
        })
    }
}

fn link(authority: &Arc<Authority>, to: &TestServer, other: u8) -> ServerLink {
    ServerLink::new(
        Arc::clone(authority),
        node_id(101),
        node_id(other),
        to.address.clone(),
        SystemTime::now,
        (TaskTracker::new(), CancellationToken::new()),
    )
}

fn echo(server: &TestServer) -> (Arc<Echo>, mpsc::Receiver<()>) {
    let (cut, was_cut) = mpsc::channel(1);
    let echo = Arc::new(Echo {
        from: Mutex::default(),
        cut,
    });
    server.hub.answer_servers(echo.clone());
    (echo, was_cut)
}

#[tokio::test]
async fn streams_are_carried_in_both_directions() {
    let authority = Arc::new(authority());
    let server = TestServer::of(Arc::clone(&authority), 100).await;
    let (echo, _was_cut) = echo(&server);
    let link = link(&authority, &server, 100);
    let sent: Vec<u8> = (0..=255).cycle().take(2 << 20).collect();
    let (mut receiver, mut sender) = tokio::io::split(link.open("/here", Carried::Traffic).await.unwrap());
    let mut back = Vec::new();
    let sending = async {
        sender.write_all(&sent).await.unwrap();
        sender.shutdown().await.unwrap();
    };
    let (_, read) = tokio::join!(sending, receiver.read_to_end(&mut back));
    read.unwrap();
    assert!(back == sent);
    assert_eq!(*echo.from.lock(), [node_id(101)]);
    assert!(matches!(
        link.open("/there", Carried::Traffic).await,
        Err(OpenError::NotThere)
    ));
    assert!(matches!(
        link.open("/busy", Carried::Traffic).await,
        Err(OpenError::Busy)
    ));
    server.close().await;
}

#[tokio::test]
async fn a_cut_never_looks_like_an_end() {
    let authority = Arc::new(authority());
    let server = TestServer::of(Arc::clone(&authority), 100).await;
    let (_echo, mut was_cut) = echo(&server);
    let link = link(&authority, &server, 100);
    // By the server.
    let mut stream = link.open("/here", Carried::Traffic).await.unwrap();
    stream.write_all(b"cut").await.unwrap();
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).await.unwrap_err();
    // By the one that has opened it.
    let mut stream = link.open("/here", Carried::Traffic).await.unwrap();
    stream.write_all(b"x").await.unwrap();
    drop(stream);
    tokio::time::timeout(BOUND, was_cut.recv()).await.unwrap().unwrap();
    // By the loss of the connection, which is opened again only when it is needed.
    let mut stream = link.open("/here", Carried::Traffic).await.unwrap();
    server.close().await;
    stream.read_to_end(&mut rest).await.unwrap_err();
    assert!(matches!(
        link.open("/here", Carried::Traffic).await,
        Err(OpenError::Unreachable { .. })
    ));
}

#[tokio::test]
async fn traffic_leaves_places_for_the_api() {
    let authority = Arc::new(authority());
    let server = TestServer::of(Arc::clone(&authority), 100).await;
    let (_echo, was_cut) = echo(&server);
    drop(was_cut);
    let link = link(&authority, &server, 100);
    let mut open = Vec::new();
    let full = loop {
        match link.open("/here", Carried::Traffic).await {
            Ok(stream) => open.push(stream),
            Err(error) => break error,
        }
    };
    assert!(matches!(full, OpenError::Busy), "{full}");
    let mut api = link.open("/here", Carried::Api).await.unwrap();
    api.write_all(b"x").await.unwrap();
    let mut back = [0];
    tokio::time::timeout(BOUND, api.read_exact(&mut back))
        .await
        .unwrap()
        .unwrap();
    // A place is free again with its stream.
    open.pop();
    link.open("/here", Carried::Traffic).await.unwrap();
    drop(open);
    server.close().await;
}

#[tokio::test]
async fn a_server_is_the_one_that_it_is_taken_for() {
    let authority = Arc::new(authority());
    let server = TestServer::of(Arc::clone(&authority), 100).await;
    let (echo, _was_cut) = echo(&server);
    // Another server has its address now.
    let wrong = link(&authority, &server, 102).open("/here", Carried::Traffic).await;
    assert!(matches!(wrong, Err(OpenError::Unreachable { .. })));
    // A server of another service.
    let foreign = link(&Arc::new(crate::place::authority()), &server, 100)
        .open("/here", Carried::Traffic)
        .await;
    assert!(matches!(foreign, Err(OpenError::Unreachable { .. })));
    assert!(echo.from.lock().is_empty());
    server.close().await;
}

#[tokio::test]
async fn a_node_opens_no_stream_of_servers() {
    let server = TestServer::new().await;
    let (echo, _was_cut) = echo(&server);
    let credentials = server.joined().await;
    for shown in [None, Some(&credentials)] {
        let versions = [&rustls::version::TLS13];
        let connected = raw::connect_as(server.socket, &server.authority, shown, &versions, &[SERVERS]).await;
        let mut stream = connected.unwrap();
        assert_eq!(stream.get_ref().1.alpn_protocol(), Some(SERVERS));
        let _ = stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await;
        let mut rest = Vec::new();
        let read = tokio::time::timeout(BOUND, stream.read_to_end(&mut rest))
            .await
            .unwrap();
        assert!(read.is_err() || rest.is_empty(), "{rest:?}");
    }
    assert!(echo.from.lock().is_empty());
    server.close().await;
}

#[tokio::test]
async fn a_server_that_is_starting_is_not_reached() {
    let authority = Arc::new(authority());
    let server = TestServer::of(Arc::clone(&authority), 100).await;
    let link = link(&authority, &server, 100);
    assert!(matches!(
        link.open("/here", Carried::Traffic).await,
        Err(OpenError::Unreachable { .. })
    ));
    let (_echo, _was_cut) = echo(&server);
    // It is tried again after a moment.
    let opened = async {
        while link.open("/here", Carried::Traffic).await.is_err() {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(BOUND, opened).await.unwrap();
    server.close().await;
}
