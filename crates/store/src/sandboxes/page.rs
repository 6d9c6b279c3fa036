//! Lists of sandboxes, a page at a time.
//!
//! Pages are key-set: the next one begins strictly after a (time, id) pair, so sandboxes that come and go in between
//! neither hide others nor repeat them. Metadata is JSON that no query looks into, so it is matched here, over as many
//! rows of the team as it takes to fill the page.

use std::collections::BTreeMap;

use model::id::{SandboxId, TeamId, TemplateId};
use model::lifecycle::State;

use super::{SandboxRow, columns};
use crate::Store;
use crate::error::StoreError;
use crate::row::{Columns, FromColumns};

/// Rows fetched at once when only some of them will match.
const SCAN_ROWS: u32 = 256;

/// Which sandboxes are wanted. The default is all of them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SandboxFilter {
    /// Any of these states; every state when empty.
    pub states: Vec<State>,
    /// All of these labels, with exactly these values.
    pub metadata: BTreeMap<String, String>,
    /// Made of this template.
    pub template: Option<TemplateId>,
    /// Started at this time or later, in microseconds since the Unix epoch.
    pub started_from_us: Option<i64>,
}

/// In which order sandboxes are listed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Order {
    /// Latest start first; within one microsecond by ascending id.
    #[default]
    Desc,
    /// The exact reverse.
    Asc,
}

/// A place between two sandboxes in a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SandboxCursor {
    /// `started_us` of the last sandbox before this place.
    pub started_us: i64,
    /// The id of that sandbox.
    pub id: SandboxId,
}

/// A request for a page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SandboxQuery {
    /// Which sandboxes.
    pub filter: SandboxFilter,
    /// In which order.
    pub order: Order,
    /// Where to begin; at the beginning when none.
    pub after: Option<SandboxCursor>,
    /// How many at most.
    pub limit: u32,
}

/// Some sandboxes in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SandboxPage {
    /// The sandboxes; as many as the limit allows, unless there are no more.
    pub rows: Vec<SandboxRow>,
    /// Where the next page begins; none when there are no more.
    pub next: Option<SandboxCursor>,
}

/// Both orders as one text: `$1` team, `$2` and `$3` the cursor, `$4` states as `,a,b,` or `,`, `$5` template, `$6`
/// earliest start, `$7` limit.
macro_rules! page_sql {
    ($before:literal, $past:literal, $order:literal) => {
        concat!(
            "SELECT ",
            columns!(),
            " FROM sandboxes WHERE team_id = $1 AND (CAST($2 AS BIGINT) IS NULL OR started_us ",
            $before,
            " $2 OR (started_us = $2 AND id ",
            $past,
            " $3)) AND ($4 = ',' OR $4 LIKE '%,' || state || ',%') AND template_id = COALESCE($5, template_id) \
             AND started_us >= COALESCE($6, started_us) ORDER BY ",
            $order,
            " LIMIT $7"
        )
    };
}

const DESC: &str = page_sql!("<", ">", "started_us DESC, id ASC");
const ASC: &str = page_sql!(">", "<", "started_us ASC, id DESC");

impl SandboxFilter {
    fn matches_metadata(&self, row: &SandboxRow) -> bool {
        self.metadata
            .iter()
            .all(|(key, value)| row.metadata.get(key) == Some(value))
    }

    fn state_words(&self) -> String {
        self.states.iter().fold(String::from(","), |mut words, state| {
            words.push_str(state.as_str());
            words.push(',');
            words
        })
    }
}

impl SandboxRow {
    fn cursor(&self) -> SandboxCursor {
        SandboxCursor {
            started_us: self.started_us,
            id: self.id.clone(),
        }
    }
}

struct Count(i64);

impl FromColumns for Count {
    const TABLE: &'static str = "sandboxes";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        columns.int("total").map(Self)
    }
}

impl Store {
    /// One page of a team's sandboxes. `next` is set only when another sandbox matches.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn sandbox_page(&self, team: &TeamId, query: &SandboxQuery) -> Result<SandboxPage, StoreError> {
        let limit = usize::try_from(query.limit).expect("u32 fits in usize on every supported platform");
        // One more than wanted tells whether there is another page.
        let wanted = limit + 1;
        let mut rows: Vec<SandboxRow> = Vec::new();
        let mut after = query.after.clone();
        loop {
            let fetch = if query.filter.metadata.is_empty() {
                query.limit.saturating_add(1)
            } else {
                SCAN_ROWS
            };
            let batch = self.sandbox_batch(team, query, after.as_ref(), fetch).await?;
            let exhausted = batch.len() < usize::try_from(fetch).unwrap_or(usize::MAX);
            after = batch.last().map(SandboxRow::cursor);
            rows.extend(batch.into_iter().filter(|row| query.filter.matches_metadata(row)));
            if exhausted || rows.len() >= wanted {
                break;
            }
        }
        let more = rows.len() > limit;
        rows.truncate(limit);
        let next = if more {
            rows.last().map(SandboxRow::cursor)
        } else {
            None
        };
        Ok(SandboxPage { rows, next })
    }

    /// How many of a team's running sandboxes match; the filter's own states do not count.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn sandbox_count_running(&self, team: &TeamId, filter: &SandboxFilter) -> Result<u64, StoreError> {
        const WHAT: &str = "count running sandboxes";
        if filter.metadata.is_empty() {
            let query = sqlx::query(
                "SELECT COUNT(*) AS total FROM sandboxes WHERE team_id = $1 AND state = 'running' \
                 AND template_id = COALESCE($2, template_id) AND started_us >= COALESCE($3, started_us)",
            )
            .bind(team.as_str())
            .bind(filter.template.as_ref().map(TemplateId::as_str))
            .bind(filter.started_from_us);
            let total = self.db.read_optional::<Count>(WHAT, query).await?;
            return Ok(total.map_or(0, |Count(total)| u64::try_from(total).unwrap_or(0)));
        }
        let mut query = SandboxQuery {
            filter: SandboxFilter {
                states: vec![State::Running],
                ..filter.clone()
            },
            order: Order::Desc,
            after: None,
            limit: SCAN_ROWS,
        };
        let mut total = 0;
        loop {
            let page = self.sandbox_page(team, &query).await?;
            total += u64::try_from(page.rows.len()).unwrap_or(u64::MAX);
            match page.next {
                None => return Ok(total),
                next => query.after = next,
            }
        }
    }

    async fn sandbox_batch(
        &self,
        team: &TeamId,
        query: &SandboxQuery,
        after: Option<&SandboxCursor>,
        fetch: u32,
    ) -> Result<Vec<SandboxRow>, StoreError> {
        let sql = match query.order {
            Order::Desc => DESC,
            Order::Asc => ASC,
        };
        let statement = sqlx::query(sql)
            .bind(team.as_str())
            .bind(after.map(|cursor| cursor.started_us))
            .bind(after.map(|cursor| cursor.id.as_str()))
            .bind(query.filter.state_words())
            .bind(query.filter.template.as_ref().map(TemplateId::as_str))
            .bind(query.filter.started_from_us)
            .bind(i64::from(fetch));
        self.db.read_all("list sandboxes", statement).await
    }
}
