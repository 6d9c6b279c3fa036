//! A connection to the outside: to the destination itself, or by way of a proxy, of which TLS is taken off here.

use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;
use tokio_util::either::Either;

/// A connection to the outside: a socket, or TLS with a proxy.
pub(super) type Outside = Either<TcpStream, Box<TlsStream<TcpStream>>>;

/// The socket of a connection to the outside.
pub(super) fn socket_of(outside: &Outside) -> &TcpStream {
    match outside {
        Either::Left(socket) => socket,
        Either::Right(stream) => stream.get_ref().0,
    }
}
