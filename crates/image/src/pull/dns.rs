//! Addresses of hosts. libc's lookups are not used: in a static program they load shared code out of the image.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use hickory_proto::op::{Message, Query};
use hickory_proto::rr::{Name, RData, RecordType};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};

const PORT: u16 = 53;
const TIMEOUT: Duration = Duration::from_secs(3);
/// Each server is asked so often.
const ROUNDS: usize = 2;
const SERVERS_MAX: usize = 3;
const FILE_MAX: usize = 64 << 10;

/// Resolves the addresses of a host, those of IPv4 first.
pub(super) async fn lookup(host: &str) -> io::Result<Vec<IpAddr>> {
    let host = host.trim_start_matches('[').trim_end_matches(']');
    if let Ok(address) = host.parse() {
        return Ok(vec![address]);
    }
    if host == "localhost" || host.ends_with(".localhost") {
        return Ok(vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()]);
    }
    let listed = hosts(&read("/etc/hosts"), host);
    if !listed.is_empty() {
        return Ok(listed);
    }
    let name = Name::from_ascii(format!("{}.", host.trim_end_matches('.'))).map_err(io::Error::other)?;
    let servers = servers(&read("/etc/resolv.conf"));
    let (v4, v6) = tokio::join!(
        ask(&servers, &name, RecordType::A),
        ask(&servers, &name, RecordType::AAAA)
    );
    let addresses = match (v4, v6) {
        (Ok(mut v4), Ok(v6)) => {
            v4.extend(v6);
            v4
        }
        (Ok(some), Err(_)) | (Err(_), Ok(some)) => some,
        (Err(error), Err(_)) => return Err(error),
    };
    if addresses.is_empty() {
        return Err(io::Error::new(io::ErrorKind::NotFound, "unknown host"));
    }
    Ok(addresses)
}

fn read(path: &str) -> String {
    let bytes = std::fs::read(path).unwrap_or_default();
    String::from_utf8_lossy(&bytes[..bytes.len().min(FILE_MAX)]).into_owned()
}

fn hosts(text: &str, host: &str) -> Vec<IpAddr> {
    text.lines()
        .filter_map(|line| {
            let mut words = line.split('#').next()?.split_ascii_whitespace();
            let address = words.next()?.parse().ok()?;
            words.any(|name| name.eq_ignore_ascii_case(host)).then_some(address)
        })
        .collect()
}

fn servers(text: &str) -> Vec<SocketAddr> {
    let server = |line: &str| {
        let mut words = line.split_ascii_whitespace();
        let keyword = words.next()?;
        let address: IpAddr = words.next()?.parse().ok()?;
        (keyword == "nameserver").then(|| SocketAddr::new(address, PORT))
    };
    text.lines().filter_map(server).take(SERVERS_MAX).collect()
}

async fn ask(servers: &[SocketAddr], name: &Name, kind: RecordType) -> io::Result<Vec<IpAddr>> {
    let mut query = Message::query();
    query.metadata.recursion_desired = true;
    query.add_query(Query::query(name.clone(), kind));
    let bytes = query.to_vec().map_err(io::Error::other)?;
    let mut last = io::Error::new(io::ErrorKind::NotFound, "no DNS server in /etc/resolv.conf");
    for _ in 0..ROUNDS {
        for server in servers {
            match tokio::time::timeout(TIMEOUT, exchange(*server, &bytes, query.metadata.id)).await {
                Ok(Ok(answer)) => return Ok(addresses(&answer)),
                Ok(Err(error)) => last = error,
                Err(_) => last = io::Error::new(io::ErrorKind::TimedOut, "the DNS server does not respond"),
            }
        }
    }
    Err(last)
}

/// Asks by UDP, and by TCP if the response does not fit.
async fn exchange(server: SocketAddr, query: &[u8], id: u16) -> io::Result<Message> {
    let any: IpAddr = match server {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0)).await?;
    socket.connect(server).await?;
    socket.send(query).await?;
    let mut buffer = vec![0; 4096];
    loop {
        let length = socket.recv(&mut buffer).await?;
        let Ok(answer) = Message::from_vec(&buffer[..length]) else {
            continue;
        };
        if answer.metadata.id != id {
            continue;
        }
        if !answer.metadata.truncation {
            return Ok(answer);
        }
        break;
    }
    let mut stream = TcpStream::connect(server).await?;
    let length = u16::try_from(query.len()).map_err(io::Error::other)?;
    stream.write_all(&[&length.to_be_bytes(), query].concat()).await?;
    let length = stream.read_u16().await?;
    let mut answer = vec![0; usize::from(length)];
    stream.read_exact(&mut answer).await?;
    Message::from_vec(&answer).map_err(io::Error::other)
}

/// All addresses in an answer: a resolver gives those of aliases with them.
fn addresses(answer: &Message) -> Vec<IpAddr> {
    let address = |data: &RData| match data {
        RData::A(address) => Some(IpAddr::V4(address.0)),
        RData::AAAA(address) => Some(IpAddr::V6(address.0)),
        _ => None,
    };
    answer
        .answers
        .iter()
        .filter_map(|record| address(&record.data))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_read() {
        let text = "127.0.0.1 localhost # x\n# 1.1.1.1 a\n10.0.0.1 b a.test A.b\nbad a.test\n";
        assert_eq!(hosts(text, "A.test"), ["10.0.0.1".parse::<IpAddr>().unwrap()]);
        assert!(hosts(text, "a").is_empty());
        let text = "search x\nnameserver 10.0.0.1\nnameserver bad\nnameserver ::1\n";
        assert_eq!(
            servers(text),
            ["10.0.0.1:53".parse().unwrap(), "[::1]:53".parse().unwrap()]
        );
    }

    #[tokio::test]
    async fn addresses_and_localhost_need_no_server() {
        assert_eq!(
            lookup("192.0.2.1").await.unwrap(),
            ["192.0.2.1".parse::<IpAddr>().unwrap()]
        );
        assert_eq!(lookup("[::1]").await.unwrap(), ["::1".parse::<IpAddr>().unwrap()]);
        assert_eq!(lookup("x.localhost").await.unwrap().len(), 2);
    }
}
