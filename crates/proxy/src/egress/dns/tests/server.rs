//! A DNS server on loopback, by UDP and TCP.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use hickory_proto::op::{Message, ResponseCode};
use hickory_proto::rr::{Name, RData, Record};
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, UdpSocket};
use tokio::sync::Notify;
use tokio::task::JoinSet;

use super::super::Transport;

/// What a server sends for a query: any number of messages.
type Behaviour = dyn Fn(&Message, Transport) -> Vec<Vec<u8>> + Send + Sync;

pub(super) struct TestServer {
    pub(super) address: SocketAddr,
    pub(super) queries: Arc<Mutex<Vec<(Transport, Message)>>>,
    pub(super) received: Arc<Notify>,
    /// Address that sent the last datagram.
    pub(super) peer: Arc<Mutex<Option<SocketAddr>>>,
    _tasks: JoinSet<()>,
}

impl TestServer {
    pub(super) async fn start(behaviour: impl Fn(&Message, Transport) -> Vec<Vec<u8>> + Send + Sync + 'static) -> Self {
        Self::at("127.0.0.1:0", behaviour).await
    }

    pub(super) async fn at(
        address: &str,
        behaviour: impl Fn(&Message, Transport) -> Vec<Vec<u8>> + Send + Sync + 'static,
    ) -> Self {
        let (tcp, udp) = loop {
            let tcp = TcpListener::bind(address).await.unwrap();
            match UdpSocket::bind(tcp.local_addr().unwrap()).await {
                Ok(udp) => break (tcp, udp),
                Err(error) => assert_eq!(error.kind(), io::ErrorKind::AddrInUse, "{error}"),
            }
        };
        let address = tcp.local_addr().unwrap();
        let queries = Arc::new(Mutex::new(Vec::new()));
        let received = Arc::new(Notify::new());
        let behaviour: Arc<Behaviour> = Arc::new(behaviour);
        let answer = {
            let (queries, received) = (queries.clone(), received.clone());
            Arc::new(move |bytes: &[u8], transport| {
                let query = Message::from_vec(bytes).unwrap();
                let replies = behaviour(&query, transport);
                queries.lock().push((transport, query));
                received.notify_one();
                replies
            })
        };
        let mut tasks = JoinSet::new();
        let by_udp = answer.clone();
        let peer = Arc::new(Mutex::new(None));
        let last_peer = peer.clone();
        tasks.spawn(async move {
            let mut buffer = vec![0; 4096];
            loop {
                let (length, client) = udp.recv_from(&mut buffer).await.unwrap();
                *last_peer.lock() = Some(client);
                for reply in by_udp(&buffer[..length], Transport::Udp) {
                    udp.send_to(&reply, client).await.unwrap();
                }
            }
        });
        tasks.spawn(async move {
            loop {
                let (mut stream, _) = tcp.accept().await.unwrap();
                let length = stream.read_u16().await.unwrap();
                let mut query = vec![0; length.into()];
                stream.read_exact(&mut query).await.unwrap();
                for reply in answer(&query, Transport::Tcp) {
                    stream.write_u16(u16::try_from(reply.len()).unwrap()).await.unwrap();
                    // The client closes the connection if it has read enough.
                    let _ = stream.write_all(&reply).await;
                }
            }
        });
        Self {
            address,
            queries,
            received,
            peer,
            _tasks: tasks,
        }
    }

    /// Number of queries so far.
    pub(super) fn count(&self) -> usize {
        self.queries.lock().len()
    }
}

/// A response without records.
pub(super) fn empty(query: &Message) -> Message {
    let mut message = Message::response(query.metadata.id, query.metadata.op_code);
    message.queries = query.queries.clone();
    message.metadata.recursion_available = true;
    message
}

pub(super) fn failure(query: &Message, code: ResponseCode) -> Vec<Vec<u8>> {
    let mut message = empty(query);
    message.metadata.response_code = code;
    vec![message.to_vec().unwrap()]
}

/// A response with these records for the name of the question.
pub(super) fn with(query: &Message, ttl: u32, data: &[RData]) -> Vec<Vec<u8>> {
    let mut message = empty(query);
    let name = query.queries[0].name.clone();
    message.answers = data
        .iter()
        .map(|data| Record::from_rdata(name.clone(), ttl, data.clone()))
        .collect();
    vec![message.to_vec().unwrap()]
}

pub(super) fn record(name: &str, ttl: u32, data: RData) -> Record {
    Record::from_rdata(Name::from_ascii(name).unwrap(), ttl, data)
}
