//! The side of a node: it joins a server, renews its certificate, and opens the connections over which it is called.

use std::fmt;
use std::io;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use rustls::ClientConfig;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::connection::{self, Socket};
use crate::frame::{HELLO_MAX, read_frame, write_frame};
use crate::hello::{Answer, Hello, Refusal, Request, Welcome};
use crate::trust::{Credentials, Token, TrustError, join_config, make_request, server_name};

/// How long the first exchange on a connection may take, the way to the server included.
const BOUND: Duration = Duration::from_secs(15);

/// Why a server was not reached, or did not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The server was not reached, or the connection broke.
    #[error("cannot reach the server at {address}")]
    Connect {
        /// The server.
        address: Address,
        /// Why.
        #[source]
        error: io::Error,
    },
    /// The server has refused.
    #[error("the server refuses: {0}")]
    Refused(Refusal),
    /// What this node has to show cannot be used.
    #[error(transparent)]
    Trust(#[from] TrustError),
}

impl LinkError {
    /// Whether another attempt will fail as well, until an operator does something.
    #[must_use]
    pub const fn is_lasting(&self) -> bool {
        match self {
            Self::Connect { .. } => false,
            Self::Refused(refusal) => refusal.is_lasting,
            Self::Trust(_) => true,
        }
    }
}

/// The address of a server: `https://<host>:<port>`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Address {
    host: String,
    port: u16,
}

impl Address {
    /// What a socket is connected to.
    pub(crate) fn target(&self) -> (&str, u16) {
        (&self.host, self.port)
    }
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let no = || format!("{text:?} is no address of a server: write https://<host>:<port>");
        let rest = text.strip_prefix("https://").ok_or_else(no)?;
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        let (host, port) = rest.rsplit_once(':').ok_or_else(no)?;
        let port = port.parse().ok().filter(|port| *port != 0).ok_or_else(no)?;
        let bare = match host.strip_prefix('[') {
            Some(rest) => rest.strip_suffix(']').ok_or_else(no)?,
            None if host.contains(':') => return Err(no()),
            None => host,
        };
        if bare.is_empty() || bare.contains(['/', '?', '#', '@']) || bare.contains(char::is_whitespace) {
            return Err(no());
        }
        Ok(Self {
            host: bare.to_owned(),
            port,
        })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port } = self;
        if host.contains(':') {
            write!(f, "https://[{host}]:{port}")
        } else {
            write!(f, "https://{host}:{port}")
        }
    }
}

/// Joins the server that has issued `token`.
///
/// # Errors
/// When the server is not reached, is another one than that of the token, or refuses the token.
pub async fn join(address: &Address, token: &Token, name: &str) -> Result<Credentials, LinkError> {
    let (key, request) = make_request()?;
    let request = Request::Join {
        secret: token.secret(),
        request: hex::encode(request),
        name: name.to_owned(),
    };
    let (answer, _) = ask(address, join_config(token)?, &request).await?;
    issued(address, answer, key)
}

/// Gets a certificate that ends later, for a new key.
///
/// # Errors
/// When the server is not reached, or refuses.
pub async fn renew(address: &Address, credentials: &Credentials) -> Result<Credentials, LinkError> {
    let (key, request) = make_request()?;
    let request = Request::Renew {
        request: hex::encode(request),
    };
    let (answer, _) = ask(address, credentials.client_config()?, &request).await?;
    let renewed = issued(address, answer, key)?;
    if renewed.node()? != credentials.node()? {
        return Err(TrustError::Certificate("it is that of another node".to_owned()).into());
    }
    Ok(renewed)
}

/// Opens a connection over which the node is called.
///
/// # Errors
/// When the server is not reached, or refuses.
pub async fn connect(
    address: &Address,
    credentials: &Credentials,
    hello: &Hello,
) -> Result<(Welcome, TlsStream<Socket>), LinkError> {
    let request = Request::Hello(hello.clone());
    match ask(address, credentials.client_config()?, &request).await? {
        (Answer::Welcome(welcome), stream) => Ok((welcome, stream)),
        (Answer::Refused(refusal), _) => Err(LinkError::Refused(refusal)),
        (Answer::Issued { .. }, _) => Err(unexpected(address)),
    }
}

/// What this program says of itself, as far as that is always the same.
#[must_use]
pub fn hello(name: String, version: String) -> Hello {
    Hello {
        levels: crate::hello::LEVELS.to_vec(),
        name,
        version,
        ..Hello::default()
    }
}

fn issued(
    address: &Address,
    answer: Answer,
    key: secrecy::zeroize::Zeroizing<String>,
) -> Result<Credentials, LinkError> {
    match answer {
        Answer::Issued { certificate, authority } => {
            let credentials = Credentials {
                key,
                certificate,
                authority,
            };
            credentials.node()?;
            // Also checks that the certificate is that of the key.
            credentials.client_config()?;
            Ok(credentials)
        }
        Answer::Refused(refusal) => Err(LinkError::Refused(refusal)),
        Answer::Welcome(_) => Err(unexpected(address)),
    }
}

fn unexpected(address: &Address) -> LinkError {
    failed(
        address,
        io::Error::new(io::ErrorKind::InvalidData, "it answers another question"),
    )
}

fn failed(address: &Address, error: io::Error) -> LinkError {
    LinkError::Connect {
        address: address.clone(),
        error,
    }
}

/// Connects, sends the first frame, and reads the answer.
async fn ask(
    address: &Address,
    config: Arc<ClientConfig>,
    request: &Request,
) -> Result<(Answer, TlsStream<Socket>), LinkError> {
    let asking = async {
        let socket = TcpStream::connect(address.target()).await?;
        let socket = connection::socket(socket)?;
        let mut tls = TlsConnector::from(config).connect(server_name(), socket).await?;
        write_frame(&mut tls, request).await?;
        let answer = read_frame(&mut tls, HELLO_MAX).await?;
        io::Result::Ok((answer, tls))
    };
    let asked = tokio::time::timeout(BOUND, asking).await;
    asked
        .unwrap_or_else(|elapsed| Err(elapsed.into()))
        .map_err(|error| failed(address, error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        for text in ["https://a.example:3100", "https://[::1]:3100", "https://10.0.0.1:3100"] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
        assert_eq!("https://a:1/".parse::<Address>().unwrap().to_string(), "https://a:1");
        for text in [
            "",
            "a:1",
            "http://a:1",
            "https://a",
            "https://a:0",
            "https://a:x",
            "https://:1",
            "https://::1:1",
            "https://a/b:1",
        ] {
            assert!(text.parse::<Address>().is_err(), "{text}");
        }
    }
}
