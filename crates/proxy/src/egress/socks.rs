//! Connections through the SOCKS5 proxy of a policy (RFC 1928, RFC 1929), if the policy wants that also by TLS.
//!
//! The policy has allowed a connection before it gets here. If the proxy cannot be used, there is no connection: none is
//! ever made without it. A name of a proxy is resolved for each connection, as the operator's resolvers know it, and its
//! addresses are judged like those of destinations. The proxy gets a domain only where that was the reason to allow the
//! connection, and otherwise the address that the program chose.
//!
//! The client is written here because libraries for it refuse empty passwords, or connect by themselves. It reads at most
//! 262 bytes from a proxy. Errors are shown to the team, so they contain neither user nor password.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use model::egress_proxy::{EgressProxy, ProxyCredentials, ProxyHost, ProxyTls};
use rustls::client::Resumption;
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_util::either::Either;

use super::outside::Outside;
use super::roots::{host_roots, roots_of};
use super::sandbox::Sandbox;
use super::settings::EgressSettings;
use super::sizes::Sizes;
use super::socket::{self, ADDRESSES_MAX, reset_on_close};
use super::verdict::closed_to_all;

/// How long a proxy may take, from resolving its name to the connection that it makes.
const TIMEOUT: Duration = Duration::from_secs(30);

const VERSION: u8 = 5;
const NO_AUTHENTICATION: u8 = 0;
const BY_PASSWORD: u8 = 2;
const NO_METHOD: u8 = 0xff;
const CONNECT: u8 = 1;
const IPV4: u8 = 1;
const NAME: u8 = 3;
const IPV6: u8 = 4;

/// Where the proxy is to connect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Destination {
    Address(SocketAddr),
    /// A domain of at most 253 characters, and a port.
    Name(String, u16),
}

/// Connects through a proxy.
///
/// # Errors
/// When there is no connection, with a text for the log of the sandbox.
pub(super) async fn connect(
    sandbox: &Sandbox,
    proxy: &EgressProxy,
    destination: &Destination,
    sizes: Sizes,
) -> io::Result<Outside> {
    let outcome = timeout(TIMEOUT, try_connect(sandbox, proxy, destination, sizes)).await;
    let outcome = outcome.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
    outcome.map_err(|error| io::Error::new(error.kind(), format!("egress proxy {}: {error}", shown(proxy))))
}

async fn try_connect(
    sandbox: &Sandbox,
    proxy: &EgressProxy,
    destination: &Destination,
    sizes: Sizes,
) -> io::Result<Outside> {
    let addresses = addresses_of(sandbox, proxy).await?;
    let stream = socket::connect(&addresses, sizes).await?;
    reset_on_close(&stream);
    let mut outside = match &proxy.tls {
        None => Either::Left(stream),
        Some(tls) => Either::Right(Box::new(
            Box::pin(begin_tls(tls, &sandbox.shared.settings, stream)).await?,
        )),
    };
    let credentials = proxy.credentials.as_ref();
    request(&mut outside, credentials, destination).await?;
    Ok(outside)
}

/// The address of a proxy in the form that clients write.
fn shown(proxy: &EgressProxy) -> String {
    match &proxy.host {
        ProxyHost::Address(address) => SocketAddr::new(*address, proxy.port).to_string(),
        ProxyHost::Name(name) => format!("{name}:{}", proxy.port),
    }
}

async fn addresses_of(sandbox: &Sandbox, proxy: &EgressProxy) -> io::Result<Vec<SocketAddr>> {
    let shared = &sandbox.shared;
    let mut addresses = match &proxy.host {
        ProxyHost::Address(address) => vec![*address],
        ProxyHost::Name(name) => {
            let addresses = shared.resolver.addresses_unlimited(name, &sandbox.proxy_client);
            let addresses = addresses.await;
            addresses.map_err(|error| failed(format!("the name cannot be resolved: {error}")))?
        }
    };
    let mut why = String::new();
    addresses.retain(|address| match closed_to_all(&shared.settings, *address) {
        None => true,
        Some(reason) => {
            why = format!("{address} cannot be used: {reason}");
            false
        }
    });
    if addresses.is_empty() {
        return Err(failed(why));
    }
    addresses.truncate(ADDRESSES_MAX);
    let addresses = addresses.into_iter();
    Ok(addresses.map(|address| SocketAddr::new(address, proxy.port)).collect())
}

fn failed(why: impl Into<String>) -> io::Error {
    io::Error::other(why.into())
}

async fn begin_tls(tls: &ProxyTls, settings: &EgressSettings, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
    let roots = match &tls.ca_cert {
        Some(pem) => Arc::new(roots_of(pem).map_err(failed)?),
        None if settings.authorities.is_empty() => Arc::clone(host_roots()),
        None => {
            let mut roots = RootCertStore::clone(host_roots());
            roots.add_parsable_certificates(settings.authorities.iter().cloned());
            Arc::new(roots)
        }
    };
    let mut config = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(io::Error::other)?
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.resumption = Resumption::disabled();
    let name = match &tls.server_name {
        ProxyHost::Address(address) => ServerName::from(*address),
        ProxyHost::Name(name) => ServerName::try_from(name.clone()).map_err(io::Error::other)?,
    };
    let connected = TlsConnector::from(Arc::new(config)).connect(name, stream).await;
    connected.map_err(|error| failed(format!("no TLS: {error}")))
}

/// Requests a connection on a connection to the proxy. Afterwards the stream is that to the destination.
async fn request<S>(stream: &mut S, credentials: Option<&ProxyCredentials>, destination: &Destination) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let methods: &[u8] = match credentials {
        Some(_) => &[VERSION, 2, NO_AUTHENTICATION, BY_PASSWORD],
        None => &[VERSION, 1, NO_AUTHENTICATION],
    };
    send(stream, methods).await?;
    let [version, method] = receive(stream).await?;
    if version != VERSION {
        return Err(failed("it does not speak SOCKS5"));
    }
    match (method, credentials) {
        (NO_AUTHENTICATION, _) => {}
        (BY_PASSWORD, Some(credentials)) => authenticate(stream, credentials).await?,
        (NO_METHOD, Some(_)) => return Err(failed("it accepts neither a password nor connections without one")),
        (NO_METHOD | BY_PASSWORD, None) => return Err(failed("it requires a user and a password")),
        _ => return Err(failed("it chose a method that was not offered")),
    }
    send(stream, &connect_request(destination)?).await?;
    let [version, status, _, kind] = receive(stream).await?;
    if version != VERSION {
        return Err(failed("it does not speak SOCKS5"));
    }
    if status != 0 {
        return Err(failed(refusal(status)));
    }
    // The address from which the proxy connects says nothing.
    let length = match kind {
        IPV4 => 4,
        IPV6 => 16,
        NAME => usize::from(receive::<1, S>(stream).await?[0]),
        _ => return Err(failed("its answer has an address of unknown kind")),
    };
    let mut rest = [0; 255 + 2];
    exactly(stream, &mut rest[..length + 2]).await
}

async fn authenticate<S>(stream: &mut S, credentials: &ProxyCredentials) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let too_long = |_| failed("the user or the password is too long");
    let mut message = vec![1];
    for text in [credentials.username.as_str(), credentials.password.expose()] {
        message.push(u8::try_from(text.len()).map_err(too_long)?);
        message.extend(text.as_bytes());
    }
    send(stream, &message).await?;
    match receive(stream).await? {
        [_, 0] => Ok(()),
        _ => Err(failed("it refused the user or the password")),
    }
}

fn connect_request(destination: &Destination) -> io::Result<Vec<u8>> {
    let mut message = vec![VERSION, CONNECT, 0];
    let port = match destination {
        Destination::Address(SocketAddr::V4(address)) => {
            message.push(IPV4);
            message.extend(address.ip().octets());
            address.port()
        }
        Destination::Address(SocketAddr::V6(address)) => {
            message.push(IPV6);
            message.extend(address.ip().octets());
            address.port()
        }
        Destination::Name(name, port) => {
            message.push(NAME);
            message.push(u8::try_from(name.len()).map_err(|_| failed("the name is too long"))?);
            message.extend(name.as_bytes());
            *port
        }
    };
    message.extend(port.to_be_bytes());
    Ok(message)
}

/// What a status of a reply means (RFC 1928 section 6).
fn refusal(status: u8) -> String {
    let why = match status {
        1 => "it failed",
        2 => "its rules do not allow the destination",
        3 => "it has no route to the network of the destination",
        4 => "it cannot reach the destination",
        5 => "the destination refused the connection",
        6 => "the connection timed out on the way",
        7 => "it does not know the command",
        8 => "it does not support this kind of address",
        _ => return format!("it refused the connection with the unknown status {status}"),
    };
    why.to_owned()
}

async fn send<S: AsyncWrite + Unpin>(stream: &mut S, bytes: &[u8]) -> io::Result<()> {
    stream.write_all(bytes).await?;
    stream.flush().await
}

async fn receive<const N: usize, S: AsyncRead + Unpin>(stream: &mut S) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    exactly(stream, &mut bytes).await?;
    Ok(bytes)
}

async fn exactly<S: AsyncRead + Unpin>(stream: &mut S, bytes: &mut [u8]) -> io::Result<()> {
    let read = stream.read_exact(bytes).await;
    read.map(drop).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => failed("it closed the connection"),
        _ => error,
    })
}

#[cfg(test)]
mod tests {
    use model::secret::Secret;
    use tokio::io::duplex;

    use super::*;

    fn credentials(username: &str, password: &str) -> ProxyCredentials {
        ProxyCredentials {
            username: username.to_owned(),
            password: Secret::new(password.to_owned()),
        }
    }

    /// Requests a connection from a proxy that gives these answers to the messages that it expects.
    async fn ask(
        credentials: Option<ProxyCredentials>,
        destination: Destination,
        script: &[(&[u8], &[u8])],
    ) -> io::Result<()> {
        let (mut client, mut proxy) = duplex(1024);
        let request = async {
            let outcome = request(&mut client, credentials.as_ref(), &destination).await;
            drop(client);
            outcome
        };
        let answers = async {
            for (message, answer) in script {
                let mut received = vec![0; message.len()];
                proxy.read_exact(&mut received).await.unwrap();
                assert_eq!(received, *message);
                proxy.write_all(answer).await.unwrap();
            }
            // The end of the connection, for proxies that say less than they should.
            proxy.shutdown().await.unwrap();
            let mut rest = Vec::new();
            proxy.read_to_end(&mut rest).await.unwrap();
            assert_eq!(rest, [0; 0]);
        };
        tokio::join!(request, answers).0
    }

    const OPEN: (&[u8], &[u8]) = (&[5, 1, 0], &[5, 0]);
    const CONNECTED: &[u8] = &[5, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    const V4: &[u8] = &[5, 1, 0, 1, 203, 0, 113, 7, 1, 187];

    fn v4() -> Destination {
        Destination::Address("203.0.113.7:443".parse().unwrap())
    }

    #[tokio::test]
    async fn each_kind_of_destination_and_answer_is_understood() {
        ask(None, v4(), &[OPEN, (V4, CONNECTED)]).await.unwrap();
        let v6 = Destination::Address("[2001:db8::7]:1".parse().unwrap());
        let message = [&[5, 1, 0, 4, 0x20, 1, 0xd, 0xb8][..], &[0; 11], &[7, 0, 1]].concat();
        let answer = [&[5, 0, 0, 4][..], &[0; 18]].concat();
        ask(None, v6, &[OPEN, (&message, &answer)]).await.unwrap();
        let longest = format!("{}.b", "a".repeat(251));
        let name = Destination::Name(longest.clone(), 65535);
        let message = [&[5, 1, 0, 3, 253][..], longest.as_bytes(), &[255, 255]].concat();
        let answer = [&[5, 0, 0, 3, 255][..], &[b'x'; 257]].concat();
        ask(None, name, &[OPEN, (&message, &answer)]).await.unwrap();
    }

    #[tokio::test]
    async fn the_user_and_the_password_are_sent_if_the_proxy_asks() {
        let offer: &[u8] = &[5, 2, 0, 2];
        let user = || Some(credentials("user", "hunter2"));
        ask(user(), v4(), &[(offer, &[5, 0]), (V4, CONNECTED)]).await.unwrap();
        let login: &[u8] = b"\x01\x04user\x07hunter2";
        let asked: [(&[u8], &[u8]); 3] = [(offer, &[5, 2]), (login, &[1, 0]), (V4, CONNECTED)];
        ask(user(), v4(), &asked).await.unwrap();
        let error = ask(user(), v4(), &[(offer, &[5, 2]), (login, &[1, 1])])
            .await
            .unwrap_err();
        assert_eq!(error.to_string(), "it refused the user or the password");
        let empty: [(&[u8], &[u8]); 3] = [(offer, &[5, 2]), (b"\x01\x01u\0", &[1, 0]), (V4, CONNECTED)];
        ask(Some(credentials("u", "")), v4(), &empty).await.unwrap();
        let longest = "x".repeat(255);
        let message = [&[1, 255][..], longest.as_bytes(), &[255], longest.as_bytes()].concat();
        let asked: [(&[u8], &[u8]); 3] = [(offer, &[5, 2]), (&message, &[1, 0]), (V4, CONNECTED)];
        ask(Some(credentials(&longest, &longest)), v4(), &asked).await.unwrap();
    }

    #[tokio::test]
    async fn other_answers_are_errors() {
        const ROWS: &[(&[&[u8]], &str)] = &[
            (&[b"HT"], "does not speak SOCKS5"),
            (&[&[4, 0]], "does not speak SOCKS5"),
            (&[&[5, 2]], "requires a user"),
            (&[&[5, 255]], "requires a user"),
            (&[&[5, 1]], "not offered"),
            (&[&[5]], "closed the connection"),
            (&[&[5, 0], &[5, 2, 0, 1]], "do not allow"),
            (&[&[5, 0], &[5, 5, 0, 1]], "refused the connection"),
            (&[&[5, 0], &[5, 9, 0, 1]], "unknown status 9"),
            (&[&[5, 0], &[4, 0, 0, 1]], "does not speak SOCKS5"),
            (&[&[5, 0], &[5, 0, 0, 2]], "unknown kind"),
            (&[&[5, 0], &[5, 0, 0, 1, 0, 0, 0, 0, 0]], "closed the connection"),
            (&[&[5, 0], &[5, 0, 0, 3, 2, 0, 0, 0]], "closed the connection"),
        ];
        for (answers, part) in ROWS {
            let script: Vec<(&[u8], &[u8])> = [&OPEN.0, &V4]
                .into_iter()
                .copied()
                .zip(answers.iter().copied())
                .collect();
            let error = ask(None, v4(), &script).await.unwrap_err().to_string();
            assert!(error.contains(part), "{answers:?}: {error}");
        }
    }
}
