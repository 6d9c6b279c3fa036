//! The file of a template on its way to the platform.

use bytes::Bytes;
use http_body::Frame;

/// What a body consists of.
pub(super) type Piece = std::io::Result<Frame<Bytes>>;

/// The body of a request, piece by piece.
pub(super) struct Pieces(pub(super) tokio::sync::mpsc::Sender<Piece>);

impl Pieces {
    /// Whether the piece was taken. The platform may answer before the end.
    pub(super) async fn give(&self, piece: Bytes) -> bool {
        piece.is_empty() || self.0.send(Ok(Frame::data(piece))).await.is_ok()
    }

    /// Ends the body so that the platform keeps nothing.
    pub(super) async fn fail(&self, error: &anyhow::Error) {
        let error = std::io::Error::other(format!("{error:#}"));
        let _ = self.0.send(Err(error)).await;
    }
}
