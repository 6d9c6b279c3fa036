//! Counting sandboxes at their template when they are deleted.

use model::lifecycle::State;

use super::row::SandboxRow;
use crate::statement::{InTransaction as _, Transaction};

/// Counts a sandbox that was started and is deleted at its template, in the same transaction.
pub(super) async fn count_spawned(tx: &mut Transaction, row: &SandboxRow) -> Result<(), sqlx::Error> {
    if row.state == State::Creating {
        return Ok(());
    }
    sqlx::query(
        "UPDATE templates SET spawn_count = spawn_count + 1, \
         last_spawned_us = CASE WHEN COALESCE(last_spawned_us, 0) < $2 THEN $2 ELSE last_spawned_us END \
         WHERE id = $1",
    )
    .bind(row.template_id.as_str().to_owned())
    .bind(row.started_us)
    .execute_in(tx)
    .await?;
    Ok(())
}
