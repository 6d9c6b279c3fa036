//! Tags of templates: assignments of a name to a build. The newest of a name counts, so that a tag can be set back.
//!
//! What a template has of them is bounded: [`TAGS_MAX`] tags, and the newest [`HISTORY_MAX`] assignments of each. Older
//! ones are removed by the next assignment, except what still matters: the newest one to a build that is ready, and those
//! to builds that have not ended.

use model::id::{BuildId, TemplateId};

use crate::Store;
use crate::error::{StoreError, classify};
use crate::row::{Columns, FromColumns, storable};
use crate::statement::{InTransaction as _, Transaction};

/// Maximum number of tags of a template.
pub const TAGS_MAX: u32 = 1000;
/// How many assignments of a tag are kept.
pub const HISTORY_MAX: u32 = 100;

/// An assignment of a tag.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TagRow {
    /// The tag.
    pub tag: String,
    /// The build that the tag was assigned to.
    pub build_id: BuildId,
    /// When the tag was assigned, in microseconds since the Unix epoch.
    pub created_us: i64,
}

impl FromColumns for TagRow {
    const TABLE: &'static str = "template_tags";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        Ok(Self {
            tag: columns.text("tag")?,
            build_id: columns.id("build_id")?,
            created_us: columns.int("created_us")?,
        })
    }
}

/// An assignment of a tag to a build that is ready, as part of the history of the tag.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TagAssignmentRow {
    /// The tag.
    pub tag: String,
    /// Number of the assignment: later assignments to builds of the template have larger ones, unless tags were
    /// removed.
    pub seq: i64,
    /// The build that the tag was assigned to.
    pub build_id: BuildId,
    /// When the tag was assigned, in microseconds since the Unix epoch.
    pub created_us: i64,
    /// When the build was accepted, in microseconds since the Unix epoch.
    pub build_created_us: i64,
    /// When the build ended, in microseconds since the Unix epoch.
    pub build_finished_us: Option<i64>,
}

impl FromColumns for TagAssignmentRow {
    const TABLE: &'static str = "template_tags";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        Ok(Self {
            tag: columns.text("tag")?,
            seq: columns.int("seq")?,
            build_id: columns.id("build_id")?,
            created_us: columns.int("created_us")?,
            build_created_us: columns.int("build_created_us")?,
            build_finished_us: columns.int_opt("build_finished_us")?,
        })
    }
}

/// A tag of a template whose build is ready.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TagSummary {
    /// The tag.
    pub tag: String,
    /// When it was last assigned to such a build, in microseconds since the Unix epoch.
    pub latest_us: i64,
}

impl FromColumns for TagSummary {
    const TABLE: &'static str = "template_tags";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        Ok(Self {
            tag: columns.text("tag")?,
            latest_us: columns.int("latest_us")?,
        })
    }
}

/// Assigns a tag within a transaction. Assignments to one template are made one after another. `false` when the template
/// has as many tags as it can have; then the transaction is to be rolled back.
pub(crate) async fn assign(
    tx: &mut Transaction,
    template: &TemplateId,
    build: &BuildId,
    tag: &str,
    now_us: i64,
) -> Result<bool, StoreError> {
    const WHAT: &str = "assign a tag";
    let failed = |error: sqlx::Error| classify(&error, "tag", WHAT);
    sqlx::query("UPDATE templates SET is_public = is_public WHERE id = $1")
        .bind(template.as_str())
        .execute_in(tx)
        .await
        .map_err(|error| classify(&error, "template", WHAT))?;
    sqlx::query(
        "INSERT INTO template_tags (template_id, seq, tag, build_id, created_us) VALUES ($1, \
         (SELECT COALESCE(MAX(seq), 0) + 1 FROM template_tags WHERE template_id = $1), $2, $3, $4)",
    )
    .bind(template.as_str())
    .bind(tag)
    .bind(build.as_str())
    .bind(now_us)
    .execute_in(tx)
    .await
    .map_err(failed)?;
    // Only a tag that is new can be one too many.
    let count = sqlx::query(
        "SELECT COUNT(DISTINCT tag) AS value FROM template_tags WHERE template_id = $1 \
         AND (SELECT COUNT(*) FROM template_tags WHERE template_id = $1 AND tag = $2) = 1",
    )
    .bind(template.as_str())
    .bind(tag)
    .one_in(tx)
    .await
    .map_err(failed)?;
    let tags: u64 = Columns::decode(&count)?;
    if tags > u64::from(TAGS_MAX) {
        return Ok(false);
    }
    sqlx::query(
        "DELETE FROM template_tags WHERE template_id = $1 AND tag = $2 AND seq NOT IN \
         (SELECT seq FROM template_tags WHERE template_id = $1 AND tag = $2 \
         ORDER BY created_us DESC, seq DESC LIMIT $3) \
         AND seq NOT IN (SELECT g.seq FROM template_tags g JOIN builds b ON b.id = g.build_id \
         WHERE g.template_id = $1 AND g.tag = $2 AND b.status = 'ready' \
         ORDER BY g.created_us DESC, g.seq DESC LIMIT 1) \
         AND NOT EXISTS (SELECT 1 FROM builds b WHERE b.id = template_tags.build_id \
         AND b.status IN ('waiting', 'building'))",
    )
    .bind(template.as_str())
    .bind(tag)
    .bind(i64::from(HISTORY_MAX))
    .execute_in(tx)
    .await
    .map_err(failed)?;
    Ok(true)
}

impl Store {
    /// Assigns tags to a build of a template. `false`, and none is assigned, when the template would have more than
    /// [`TAGS_MAX`].
    ///
    /// # Errors
    /// [`StoreError::Dangling`] when there is no such build, and when the database fails.
    pub async fn tags_assign(
        &self,
        template: &TemplateId,
        build: &BuildId,
        tags: &[String],
        now_us: i64,
    ) -> Result<bool, StoreError> {
        const WHAT: &str = "assign tags";
        let mut tx = self.db.begin(WHAT).await?;
        for tag in tags {
            storable("tag", tag)?;
            if !assign(&mut tx, template, build, tag, now_us).await? {
                return Ok(false);
            }
        }
        tx.commit().await.map_err(|error| classify(&error, "tag", WHAT))?;
        self.db.sync(WHAT).await?;
        Ok(true)
    }

    /// Removes every assignment of a tag of a template.
    pub async fn tag_remove(&self, template: &TemplateId, tag: &str) -> Result<(), StoreError> {
        storable("tag", tag)?;
        let query = sqlx::query("DELETE FROM template_tags WHERE template_id = $1 AND tag = $2")
            .bind(template.as_str())
            .bind(tag);
        self.db.write_durably("tag", "remove a tag", query).await?;
        Ok(())
    }

    /// The newest assignment of each tag of a template to a build that is ready, in the order of the tags.
    pub async fn tag_list(&self, template: &TemplateId) -> Result<Vec<TagRow>, StoreError> {
        let query = sqlx::query(
            "SELECT tag, build_id, created_us FROM (SELECT g.tag, g.build_id, g.created_us, \
             ROW_NUMBER() OVER (PARTITION BY g.tag ORDER BY g.created_us DESC, g.seq DESC) AS place \
             FROM template_tags g JOIN builds b ON b.id = g.build_id \
             WHERE g.template_id = $1 AND b.status = 'ready') h WHERE place = 1",
        )
        .bind(template.as_str());
        let mut tags: Vec<TagRow> = self.db.read_all("list tags", query).await?;
        // Not by the database: the order of texts depends on its settings.
        tags.sort_by(|a, b| a.tag.cmp(&b.tag));
        Ok(tags)
    }

    /// How many tags of a template have a build that is ready.
    pub async fn tag_count(&self, template: &TemplateId) -> Result<u64, StoreError> {
        let query = sqlx::query(
            "SELECT COUNT(DISTINCT g.tag) AS value FROM template_tags g JOIN builds b ON b.id = g.build_id \
             WHERE g.template_id = $1 AND b.status = 'ready'",
        )
        .bind(template.as_str());
        self.db.read_number("count tags", query).await
    }

    /// The tags of a template that have a build that is ready, in no particular order: at most [`TAGS_MAX`].
    pub async fn tag_summaries(&self, template: &TemplateId) -> Result<Vec<TagSummary>, StoreError> {
        let query = sqlx::query(
            "SELECT g.tag, MAX(g.created_us) AS latest_us FROM template_tags g JOIN builds b ON b.id = g.build_id \
             WHERE g.template_id = $1 AND b.status = 'ready' GROUP BY g.tag",
        )
        .bind(template.as_str());
        self.db.read_all("list tags", query).await
    }

    /// The history of a tag of a template, newest first: at most `limit` assignments to builds that are ready, those
    /// after the assignment with this time and number.
    pub async fn tag_history(
        &self,
        template: &TemplateId,
        tag: &str,
        after: Option<(i64, i64)>,
        limit: u32,
    ) -> Result<Vec<TagAssignmentRow>, StoreError> {
        storable("tag", tag)?;
        let (after_us, after_seq) = after.unwrap_or((i64::MAX, i64::MAX));
        let query = sqlx::query(
            "SELECT g.tag, g.seq, g.build_id, g.created_us, b.created_us AS build_created_us, \
             b.finished_us AS build_finished_us FROM template_tags g JOIN builds b ON b.id = g.build_id \
             WHERE g.template_id = $1 AND g.tag = $2 AND b.status = 'ready' \
             AND (g.created_us < $3 OR (g.created_us = $3 AND g.seq < $4)) \
             ORDER BY g.created_us DESC, g.seq DESC LIMIT $5",
        )
        .bind(template.as_str())
        .bind(tag)
        .bind(after_us)
        .bind(after_seq)
        .bind(i64::from(limit));
        self.db.read_all("read the history of a tag", query).await
    }

    /// The newest assignments of each of these tags to builds that are ready, at most `limit` of each, newest first.
    pub async fn tag_histories(
        &self,
        template: &TemplateId,
        tags: &[&str],
        limit: u32,
    ) -> Result<Vec<TagAssignmentRow>, StoreError> {
        // A list of any length as one value: no tag has a line feed.
        let wanted: String = tags.iter().map(|tag| format!("\n{tag}\n")).collect();
        storable("tag", &wanted)?;
        let query = sqlx::query(
            "SELECT * FROM (SELECT g.tag, g.seq, g.build_id, g.created_us, b.created_us AS build_created_us, \
             b.finished_us AS build_finished_us, \
             ROW_NUMBER() OVER (PARTITION BY g.tag ORDER BY g.created_us DESC, g.seq DESC) AS place \
             FROM template_tags g JOIN builds b ON b.id = g.build_id \
             WHERE g.template_id = $1 AND b.status = 'ready' \
             AND REPLACE($2, '\n' || g.tag || '\n', '') <> $2) h WHERE place <= $3 ORDER BY created_us DESC, seq DESC",
        )
        .bind(template.as_str())
        .bind(wanted)
        .bind(i64::from(limit));
        self.db.read_all("read the history of tags", query).await
    }
}
