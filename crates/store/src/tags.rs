//! Tags of templates: assignments of a name to a build. The newest of a name counts, so that a tag can be set back.

use model::id::{BuildId, TemplateId};

use crate::Store;
use crate::db::Transaction;
use crate::error::{StoreError, classify};
use crate::row::{Columns, FromColumns, storable};

/// An assignment of a tag.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TagRow {
    /// The tag.
    pub tag: String,
    /// The build that it was assigned to.
    pub build_id: BuildId,
    /// When it was, in microseconds since the Unix epoch.
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

/// Assigns a tag within a transaction. Assignments to one template are made one after another.
pub(crate) async fn assign(
    tx: &mut Transaction,
    template: &TemplateId,
    build: &BuildId,
    tag: &str,
    now_us: i64,
) -> Result<(), StoreError> {
    sqlx::query("UPDATE templates SET is_public = is_public WHERE id = $1")
        .bind(template.as_str())
        .execute(&mut **tx)
        .await
        .map_err(|error| classify(&error, "template", "assign a tag"))?;
    sqlx::query(
        "INSERT INTO template_tags (template_id, seq, tag, build_id, created_us) VALUES ($1, \
         (SELECT COALESCE(MAX(seq), 0) + 1 FROM template_tags WHERE template_id = $1), $2, $3, $4)",
    )
    .bind(template.as_str())
    .bind(tag)
    .bind(build.as_str())
    .bind(now_us)
    .execute(&mut **tx)
    .await
    .map_err(|error| classify(&error, "tag", "assign a tag"))?;
    Ok(())
}

impl Store {
    /// Assigns tags to a build of a template.
    ///
    /// # Errors
    /// [`StoreError::Dangling`] when there is no such build, and when the database fails.
    pub async fn tags_assign(
        &self,
        template: &TemplateId,
        build: &BuildId,
        tags: &[String],
        now_us: i64,
    ) -> Result<(), StoreError> {
        const WHAT: &str = "assign tags";
        let mut tx = self.db.begin(WHAT).await?;
        for tag in tags {
            storable("tag", tag)?;
            assign(&mut tx, template, build, tag, now_us).await?;
        }
        tx.commit().await.map_err(|error| classify(&error, "tag", WHAT))?;
        self.db.sync(WHAT).await
    }

    /// Removes every assignment of a tag of a template.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn tag_remove(&self, template: &TemplateId, tag: &str) -> Result<(), StoreError> {
        storable("tag", tag)?;
        let query = sqlx::query("DELETE FROM template_tags WHERE template_id = $1 AND tag = $2")
            .bind(template.as_str())
            .bind(tag);
        self.db.write_durably("tag", "remove a tag", query).await?;
        Ok(())
    }

    /// The newest assignment of each tag of a template to a build that is ready, in the order of the tags.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn tag_list(&self, template: &TemplateId) -> Result<Vec<TagRow>, StoreError> {
        let query = sqlx::query(
            "SELECT g.tag, g.build_id, g.created_us FROM template_tags g JOIN builds b ON b.id = g.build_id \
             WHERE g.template_id = $1 AND b.status = 'ready' ORDER BY g.created_us DESC, g.seq DESC",
        )
        .bind(template.as_str());
        let mut tags: Vec<TagRow> = self.db.read_all("list tags", query).await?;
        // Stable, so the newest of each stays the first.
        tags.sort_by(|a, b| a.tag.cmp(&b.tag));
        tags.dedup_by(|later, first| later.tag == first.tag);
        Ok(tags)
    }
}
