//! Statements within the transaction of a batch.

use crate::db::{Query, Transaction};
use crate::error::{StoreError, sort};

pub(super) const WRITE: &str = "write records of sandboxes";

pub(super) async fn execute(tx: &mut Transaction, query: Query) -> Result<(), StoreError> {
    query
        .execute(&mut **tx)
        .await
        .map_err(|error| sort(&error, "record", WRITE))?;
    Ok(())
}
