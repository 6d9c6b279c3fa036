//! Lists of sandboxes, a page at a time.
//!
//! Keyset pagination: the next page begins strictly after a pair of time and id, so sandboxes that are created or
//! deleted in between neither hide others nor repeat them. Each state is read separately, in the order of an index, so
//! the cost of a page does not depend on the sandboxes in other states. Metadata is JSON that queries do not inspect:
//! the database only excludes rows that do not contain the text of a label, and the labels of the others are compared
//! here, over as many rows as it takes to fill the page.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use model::id::{SandboxId, TeamId, TemplateId};
use model::lifecycle::State;

use super::row::{SandboxRow, columns, metadata};
use crate::Store;
use crate::error::StoreError;
use crate::row::{Columns, FromColumns};

/// Rows per query when only some of them will match.
const SCAN_ROWS: u32 = 256;
/// Rows per query when only their labels are fetched.
const COUNT_ROWS: u32 = 2048;

/// A filter of sandboxes. The default matches all of them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SandboxFilter {
    /// Any of these states; every state when empty.
    pub states: Vec<State>,
    /// Labels that must all be present, with exactly these values.
    pub metadata: BTreeMap<String, String>,
    /// Only sandboxes that were created from this template.
    pub template: Option<TemplateId>,
    /// Started at this time or later, in microseconds since the Unix epoch.
    pub started_from_us: Option<i64>,
}

/// The order of a list of sandboxes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Order {
    /// Latest start first; within one microsecond by ascending id.
    #[default]
    Desc,
    /// The exact reverse of `Desc`.
    Asc,
}

/// A position in a list of sandboxes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SandboxCursor {
    /// `started_us` of the last sandbox before this position.
    pub started_us: i64,
    /// The id of the last sandbox before this position.
    pub id: SandboxId,
}

/// A request for a page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SandboxQuery {
    /// The filter.
    pub filter: SandboxFilter,
    /// The order.
    pub order: Order,
    /// Where the page begins; none for the first page.
    pub after: Option<SandboxCursor>,
    /// Maximum number of sandboxes.
    pub limit: u32,
}

/// One page of sandboxes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SandboxPage {
    /// The sandboxes: as many as the limit allows, or all that are left.
    pub rows: Vec<SandboxRow>,
    /// Where the next page begins; none when there are no more.
    pub next: Option<SandboxCursor>,
}

/// The statement of both orders, for one state, because the index has the rows of a state in this order: `$1` team,
/// `$2` and `$3` the cursor, `$4` state, `$5` template, `$6` earliest start, `$7` limit, `$8` a text that the labels
/// contain.
///
/// A missing time is replaced by the end of the range of times, so that the index search begins at the right position
/// with and without one.
macro_rules! page_sql {
    ($columns:expr, $before:literal, $past:literal, $open:literal, $order:literal) => {
        concat!(
            "SELECT ",
            $columns,
            " FROM sandboxes WHERE team_id = $1 AND state = $4 AND started_us ",
            $before,
            "= COALESCE($2, ",
            $open,
            ") AND (CAST($2 AS BIGINT) IS NULL OR started_us <> $2 OR id ",
            $past,
            " $3) AND started_us >= COALESCE($6, -9223372036854775807) \
             AND template_id = COALESCE($5, template_id) \
             AND ($8 = '' OR REPLACE(metadata_json, $8, '') <> metadata_json) ORDER BY ",
            $order,
            " LIMIT $7"
        )
    };
}

const DESC: &str = page_sql!(columns!(), "<", ">", "9223372036854775807", "started_us DESC, id ASC");
const ASC: &str = page_sql!(columns!(), ">", "<", "-9223372036854775807", "started_us ASC, id DESC");
/// The columns that a count needs, in the default order.
const LABELS: &str = page_sql!(
    "id, started_us, metadata_json",
    "<",
    ">",
    "9223372036854775807",
    "started_us DESC, id ASC"
);

impl SandboxFilter {
    fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        self.metadata.iter().all(|(key, value)| labels.get(key) == Some(value))
    }

    /// Text of the longest label as [`crate::nodes::NodeRows::sandbox_insert`] writes it. A row without this text does
    /// not match, so the database can exclude it; a row with it may still not match.
    fn label_text(&self) -> String {
        let text = |value: &String| serde_json::Value::from(value.as_str()).to_string();
        let labels = self.metadata.iter();
        let texts = labels.map(|(key, value)| format!("{}:{}", text(key), text(value)));
        texts.max_by_key(String::len).unwrap_or_default()
    }

    fn wanted_states(&self) -> &[State] {
        if self.states.is_empty() {
            &State::ALL
        } else {
            &self.states
        }
    }
}

impl Order {
    /// Whether `a` comes before, with or after `b` in this order.
    fn compare(self, a: &SandboxRow, b: &SandboxRow) -> Ordering {
        let descending = b.started_us.cmp(&a.started_us).then_with(|| a.id.cmp(&b.id));
        match self {
            Self::Desc => descending,
            Self::Asc => descending.reverse(),
        }
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

/// The part of a row that a filter by labels needs.
struct Labels {
    cursor: SandboxCursor,
    metadata: BTreeMap<String, String>,
}

impl FromColumns for Labels {
    const TABLE: &'static str = "sandboxes";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        Ok(Self {
            cursor: SandboxCursor {
                started_us: columns.int("started_us")?,
                id: columns.id("id")?,
            },
            metadata: metadata(columns)?,
        })
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
        // One more row than the limit shows whether there is another page.
        let wanted = limit + 1;
        let mut rows: Vec<SandboxRow> = Vec::new();
        let mut after = query.after.clone();
        loop {
            // The database filters by one label; with more labels, some of its rows may not match.
            let fetch = if query.filter.metadata.len() <= 1 {
                query.limit.saturating_add(1)
            } else {
                query.limit.saturating_add(1).max(SCAN_ROWS)
            };
            let batch = self.sandbox_batch(team, query, after.as_ref(), fetch).await?;
            let exhausted = batch.len() < usize::try_from(fetch).unwrap_or(usize::MAX);
            after = batch.last().map(SandboxRow::cursor);
            rows.extend(batch.into_iter().filter(|row| query.filter.matches(&row.metadata)));
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

    /// The number of a team's running sandboxes that match; the states of the filter are ignored.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn sandbox_count_running(&self, team: &TeamId, filter: &SandboxFilter) -> Result<u64, StoreError> {
        const WHAT: &str = "count running sandboxes";
        if filter.metadata.is_empty() {
            let query = sqlx::query(
                "SELECT COUNT(*) AS total FROM sandboxes WHERE team_id = $1 AND state = 'running' \
                 AND template_id = COALESCE($2, template_id) \
                 AND started_us >= COALESCE($3, -9223372036854775807)",
            )
            .bind(team.as_str())
            .bind(filter.template.as_ref().map(TemplateId::as_str))
            .bind(filter.started_from_us);
            let total = self.db.read_optional::<Count>(WHAT, query).await?;
            return Ok(total.map_or(0, |Count(total)| u64::try_from(total).unwrap_or(0)));
        }
        let mut total = 0;
        let mut after = None;
        loop {
            let query = page_query(LABELS, team, filter, State::Running, after.as_ref(), COUNT_ROWS);
            let batch: Vec<Labels> = self.db.read_all(WHAT, query).await?;
            let matching = batch.iter().filter(|row| filter.matches(&row.metadata)).count();
            total += u64::try_from(matching).unwrap_or(u64::MAX);
            let exhausted = batch.len() < usize::try_from(COUNT_ROWS).unwrap_or(usize::MAX);
            after = batch.into_iter().last().map(|row| row.cursor);
            if exhausted {
                return Ok(total);
            }
        }
    }

    /// The next `fetch` rows, before the filter by labels.
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
        let mut rows = Vec::new();
        for state in query.filter.wanted_states() {
            let statement = page_query(sql, team, &query.filter, *state, after, fetch);
            rows.extend(self.db.read_all("list sandboxes", statement).await?);
        }
        rows.sort_by(|a, b| query.order.compare(a, b));
        rows.truncate(usize::try_from(fetch).unwrap_or(usize::MAX));
        Ok(rows)
    }
}

/// One of the statements above with its arguments.
fn page_query(
    sql: &'static str,
    team: &TeamId,
    filter: &SandboxFilter,
    state: State,
    after: Option<&SandboxCursor>,
    limit: u32,
) -> crate::statement::Query {
    sqlx::query(sql)
        .bind(team.as_str())
        .bind(after.map(|cursor| cursor.started_us))
        .bind(after.map(|cursor| cursor.id.as_str()))
        .bind(state.as_str())
        .bind(filter.template.as_ref().map(TemplateId::as_str))
        .bind(filter.started_from_us)
        .bind(i64::from(limit))
        .bind(filter.label_text())
}
