//! Runs the statements of a transaction on records.

use crate::error::{StoreError, classify};
use crate::statement::{InTransaction as _, Query, Transaction};

pub(super) const WRITE: &str = "write records of sandboxes";

pub(super) async fn execute(tx: &mut Transaction, query: Query) -> Result<(), StoreError> {
    query
        .execute_in(tx)
        .await
        .map_err(|error| classify(&error, "record", WRITE))?;
    Ok(())
}
