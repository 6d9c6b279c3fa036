//! Runs the statements of a transaction on records.

use crate::db::{Query, Transaction};
use crate::error::{StoreError, classify};

pub(super) const WRITE: &str = "write records of sandboxes";

pub(super) async fn execute(tx: &mut Transaction, query: Query) -> Result<(), StoreError> {
    query
        .execute(&mut **tx)
        .await
        .map_err(|error| classify(&error, "record", WRITE))?;
    Ok(())
}
