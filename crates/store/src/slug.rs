//! Namespaces of teams.

use crate::error::{StoreError, classify};
use crate::statement::{InTransaction as _, Transaction};

/// Finds a namespace for a team that no other team has: made of its name, and of its id where that is not enough.
pub(crate) async fn free_slug(tx: &mut Transaction, id: &str, name: &str) -> Result<String, StoreError> {
    const WHAT: &str = "name a team";
    let plain = model::template::slug(name);
    let digits: String = id.chars().filter(char::is_ascii_alphanumeric).rev().collect();
    for length in [0, 4, 8, digits.len()] {
        let slug = match length {
            0 => plain.clone(),
            length => format!("{plain}-{}", digits.chars().take(length).collect::<String>()),
        };
        let taken = sqlx::query("SELECT id FROM teams WHERE slug = $1")
            .bind(slug.clone())
            .optional_in(tx)
            .await
            .map_err(|error| classify(&error, "team", WHAT))?;
        if taken.is_none() {
            return Ok(slug);
        }
    }
    Err(StoreError::Conflict { what: "team" })
}
