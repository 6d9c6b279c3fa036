//! Rows as a crash or an earlier version has left them, which no call of the store makes. The server's tests use this file, too.

use model::id::SandboxId;
use model::lifecycle::{Kept, State};
use sqlx::AnyConnection;

/// Gives the row of a sandbox a state in which it was left, whatever it was before.
pub(crate) async fn leave_in(raw: &mut AnyConnection, id: &SandboxId, state: State, kept: Option<Kept>) {
    let changed = sqlx::query("UPDATE sandboxes SET state = $2, kept = $3 WHERE id = $1")
        .bind(id.as_str())
        .bind(state.as_str())
        .bind(kept.map(Kept::as_str))
        .execute(raw)
        .await
        .expect("a change");
    assert_eq!(changed.rows_affected(), 1);
}
