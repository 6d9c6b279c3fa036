//! Rows that cannot be read, as a damaged database has them. Only the server's tests use this file.

use model::id::SandboxId;
use sqlx::AnyConnection;

/// Gives the row of a sandbox a word that no version has written.
pub(crate) async fn make_unreadable(raw: &mut AnyConnection, id: &SandboxId) {
    let changed = sqlx::query("UPDATE sandboxes SET kept = 'unknown' WHERE id = $1")
        .bind(id.as_str())
        .execute(raw)
        .await
        .expect("a change");
    assert_eq!(changed.rows_affected(), 1);
}
