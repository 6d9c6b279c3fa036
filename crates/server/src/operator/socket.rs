//! The Unix socket of the operator API: bound in a private directory, for peers with the platform's own user.

use std::fs::{File, Permissions};
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use axum::Router;
use tokio::net::{UnixListener, UnixStream};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::accept::{self, Listener};

/// How long a request head may take to arrive.
const HEAD: Duration = Duration::from_secs(10);

/// The socket. It is removed when this is dropped.
#[derive(Debug)]
pub struct OperatorSocket {
    listener: UnixListener,
    path: PathBuf,
    /// The user that runs the platform.
    owner: u32,
}

impl OperatorSocket {
    /// Name of the socket in a data directory.
    pub const NAME: &'static str = "operator.sock";

    /// Binds the socket of a data directory that this process has locked. A socket left by a killed platform is
    /// replaced.
    ///
    /// # Errors
    /// When the directory is not writable. Must be called within a runtime.
    pub fn bind(data_dir: &Path) -> io::Result<Self> {
        let path = data_dir.join(Self::NAME);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let directory = File::open(data_dir)?;
        let listener = UnixListener::bind(below(&directory))?;
        let mut socket = Self {
            listener,
            path,
            owner: 0,
        };
        std::fs::set_permissions(&socket.path, Permissions::from_mode(0o600))?;
        socket.owner = std::fs::metadata(&socket.path)?.uid();
        Ok(socket)
    }

    /// Connects to the socket of a data directory.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`] or [`io::ErrorKind::ConnectionRefused`] when no platform runs on it.
    pub async fn connect(data_dir: &Path) -> io::Result<UnixStream> {
        let directory = File::open(data_dir)?;
        UnixStream::connect(below(&directory)).await
    }
}

impl Drop for OperatorSocket {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// The path of the socket through a descriptor of its directory: the kernel refuses socket paths of 108 bytes and more,
/// and the path of a data directory may be longer.
fn below(directory: &File) -> PathBuf {
    PathBuf::from(format!(
        "/proc/self/fd/{}/{}",
        directory.as_raw_fd(),
        OperatorSocket::NAME
    ))
}

impl Listener for OperatorSocket {
    type Stream = UnixStream;

    /// Refuses connections of other users, which are possible only if the directory is open to them.
    async fn next(&self) -> io::Result<Option<UnixStream>> {
        let (stream, _) = self.listener.accept().await?;
        match stream.peer_cred() {
            Ok(peer) if peer.uid() == self.owner || peer.uid() == 0 => Ok(Some(stream)),
            Ok(peer) => {
                tracing::warn!(
                    uid = peer.uid(),
                    "refused a connection of another user to the operator socket"
                );
                Ok(None)
            }
            Err(_) => Ok(None),
        }
    }
}

/// Serves until `stop` is cancelled.
pub(crate) async fn serve(socket: OperatorSocket, router: Router, tasks: TaskTracker, stop: CancellationToken) {
    accept::serve(socket, router, HEAD, tasks, stop).await;
}
