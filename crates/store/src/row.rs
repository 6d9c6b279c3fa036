//! Decodes columns into validated types.
//!
//! The result is always a value of the model or [`StoreError::Corrupt`], which names the column and not the value.

use std::str::FromStr;

use model::id::{BuildId, NodeId, TeamId};
use sqlx::Row;
use sqlx::any::AnyRow;

use crate::error::StoreError;

/// A type that is decoded from one row of a query.
pub(crate) trait FromColumns: Sized {
    /// The table, for errors.
    const TABLE: &'static str;

    /// Reads the row.
    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError>;
}

/// What a query reads that asks for single values, for errors.
const VALUES: &str = "values that a query computes";

/// One text, as column `value`.
impl FromColumns for String {
    const TABLE: &'static str = VALUES;

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        columns.text("value")
    }
}

/// One number, as column `value`.
impl FromColumns for u64 {
    const TABLE: &'static str = VALUES;

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        u64::try_from(columns.int("value")?).map_err(|_| columns.corrupt("value"))
    }
}

/// One number of rows, as column `value`.
impl FromColumns for u32 {
    const TABLE: &'static str = VALUES;

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        columns.count("value")
    }
}

/// The id of a build, as column `value`.
impl FromColumns for BuildId {
    const TABLE: &'static str = VALUES;

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        columns.id("value")
    }
}

/// The id of a node, as column `value`.
impl FromColumns for NodeId {
    const TABLE: &'static str = VALUES;

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        columns.id("value")
    }
}

/// The id of a team, as column `value`.
impl FromColumns for TeamId {
    const TABLE: &'static str = VALUES;

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        columns.id("value")
    }
}

/// One value with its team.
impl<T: FromColumns> FromColumns for (TeamId, T) {
    const TABLE: &'static str = VALUES;

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        Ok((columns.id("team_id")?, T::from_columns(columns)?))
    }
}

/// One row, read by column name.
pub(crate) struct Columns<'r> {
    table: &'static str,
    row: &'r AnyRow,
}

impl<'r> Columns<'r> {
    pub(crate) fn decode<T: FromColumns>(row: &'r AnyRow) -> Result<T, StoreError> {
        T::from_columns(&Self { table: T::TABLE, row })
    }

    /// The error for a column with an invalid value.
    pub(crate) fn corrupt(&self, column: &'static str) -> StoreError {
        StoreError::Corrupt {
            table: self.table,
            column,
        }
    }

    pub(crate) fn text(&self, column: &'static str) -> Result<String, StoreError> {
        self.row.try_get(column).map_err(|_| self.corrupt(column))
    }

    pub(crate) fn text_opt(&self, column: &'static str) -> Result<Option<String>, StoreError> {
        self.row.try_get(column).map_err(|_| self.corrupt(column))
    }

    pub(crate) fn int(&self, column: &'static str) -> Result<i64, StoreError> {
        self.row.try_get(column).map_err(|_| self.corrupt(column))
    }

    pub(crate) fn int_opt(&self, column: &'static str) -> Result<Option<i64>, StoreError> {
        self.row.try_get(column).map_err(|_| self.corrupt(column))
    }

    pub(crate) fn count(&self, column: &'static str) -> Result<u32, StoreError> {
        u32::try_from(self.int(column)?).map_err(|_| self.corrupt(column))
    }

    pub(crate) fn flag(&self, column: &'static str) -> Result<bool, StoreError> {
        self.flag_opt(column)?.ok_or_else(|| self.corrupt(column))
    }

    pub(crate) fn flag_opt(&self, column: &'static str) -> Result<Option<bool>, StoreError> {
        match self.int_opt(column)? {
            None => Ok(None),
            Some(0) => Ok(Some(false)),
            Some(1) => Ok(Some(true)),
            Some(_) => Err(self.corrupt(column)),
        }
    }

    pub(crate) fn id<T: FromStr>(&self, column: &'static str) -> Result<T, StoreError> {
        self.id_opt(column)?.ok_or_else(|| self.corrupt(column))
    }

    pub(crate) fn id_opt<T: FromStr>(&self, column: &'static str) -> Result<Option<T>, StoreError> {
        self.text_opt(column)?
            .map(|text| text.parse().map_err(|_| self.corrupt(column)))
            .transpose()
    }
}

/// Refuses text that only one engine accepts: `TEXT` of PostgreSQL has no NUL character, that of SQLite does.
pub(crate) fn storable(what: &'static str, text: &str) -> Result<(), StoreError> {
    if text.contains('\0') {
        Err(StoreError::UnsupportedCharacter { what })
    } else {
        Ok(())
    }
}
