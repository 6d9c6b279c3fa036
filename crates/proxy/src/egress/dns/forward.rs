//! Asks DNS servers.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use hickory_proto::op::{Edns, Message, Query, ResponseCode};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};
use tokio::time::timeout;

use super::request::MAX_DATAGRAM;
use super::response::{Received, ServerReply, receive};

/// How long a server may take. Servers that resolve recursively give up on others after about this time.
const TIMEOUT: Duration = Duration::from_secs(2);

/// How often all servers are asked, for a datagram that was lost.
const ROUNDS: usize = 2;

/// Longest response. Larger ones do not occur in practice, except in attacks.
const MAX_RESPONSE: usize = 16 << 10;

/// Datagrams from a server that are not the answer, after which the attempt fails: one with a wrong id could be a guess
/// by another host.
const MAX_UNRELATED: usize = 8;

/// How long all attempts may take together: those of three servers that are silent.
const DEADLINE: Duration = Duration::from_secs(12);

/// Asks servers in turn until one knows the answer. `None` if none does.
pub(super) async fn ask(servers: &[SocketAddr], question: &Query) -> Option<ServerReply> {
    timeout(DEADLINE, ask_in_turn(servers, question)).await.ok()?
}

async fn ask_in_turn(servers: &[SocketAddr], question: &Query) -> Option<ServerReply> {
    let mut servers = servers.to_vec();
    for _ in 0..ROUNDS {
        let mut silent = Vec::new();
        for server in servers {
            match ask_server(server, question).await {
                Ok(reply) if matches!(reply.code, ResponseCode::NoError | ResponseCode::NXDomain) => {
                    return Some(reply);
                }
                Ok(reply) => tracing::debug!(%server, code = %reply.code, "DNS server gave no answer"),
                Err(error) => {
                    tracing::debug!(%server, %error, "DNS server failed");
                    silent.push(server);
                }
            }
        }
        servers = silent;
    }
    None
}

async fn ask_server(server: SocketAddr, question: &Query) -> io::Result<ServerReply> {
    let reply = exchange(server, question, true).await?;
    match reply.code {
        // Old servers do not know EDNS (RFC 6891 section 7).
        ResponseCode::FormErr | ResponseCode::NotImp => exchange(server, question, false).await,
        _ => Ok(reply),
    }
}

async fn exchange(server: SocketAddr, question: &Query, edns: bool) -> io::Result<ServerReply> {
    // With a random id.
    let mut message = Message::query();
    message.metadata.recursion_desired = true;
    message.add_query(question.clone());
    if edns {
        let mut edns = Edns::new();
        edns.set_max_payload(MAX_DATAGRAM);
        message.set_edns(edns);
    }
    let id = message.metadata.id;
    let query = message.to_vec().map_err(io::Error::other)?;
    match timeout(TIMEOUT, by_udp(server, &query, id, question)).await?? {
        Some(reply) => Ok(reply),
        None => timeout(TIMEOUT, by_tcp(server, &query, id, question)).await?,
    }
}

/// `None` if the answer is too large for a datagram. Each query has a socket of its own, with a random port, and receives
/// from the server only.
async fn by_udp(server: SocketAddr, query: &[u8], id: u16, question: &Query) -> io::Result<Option<ServerReply>> {
    let local: SocketAddr = match server {
        SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
        SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
    };
    let socket = UdpSocket::bind(local).await?;
    socket.connect(server).await?;
    socket.send(query).await?;
    let mut buffer = vec![0; usize::from(MAX_DATAGRAM)];
    for _ in 0..MAX_UNRELATED {
        let length = socket.recv(&mut buffer).await?;
        match receive(&buffer[..length], id, question) {
            Received::Unrelated => {}
            Received::Truncated => return Ok(None),
            Received::Malformed => return Err(io::ErrorKind::InvalidData.into()),
            Received::Reply(reply) => return Ok(Some(reply)),
        }
    }
    Err(io::Error::other("too many unrelated responses"))
}

async fn by_tcp(server: SocketAddr, query: &[u8], id: u16, question: &Query) -> io::Result<ServerReply> {
    let mut stream = TcpStream::connect(server).await?;
    let length = u16::try_from(query.len()).map_err(io::Error::other)?;
    stream.write_all(&[&length.to_be_bytes()[..], query].concat()).await?;
    let length = usize::from(stream.read_u16().await?);
    if length > MAX_RESPONSE {
        return Err(io::Error::other("response is too large"));
    }
    let mut response = vec![0; length];
    stream.read_exact(&mut response).await?;
    match receive(&response, id, question) {
        Received::Reply(reply) => Ok(reply),
        Received::Unrelated | Received::Truncated | Received::Malformed => Err(io::ErrorKind::InvalidData.into()),
    }
}
