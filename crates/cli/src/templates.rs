//! The rows of the built-in template `base`.
//!
//! A build is never changed: when the configured size of a sandbox changes, a new build takes over, and sandboxes that
//! run keep what they were made with.

use anyhow::{Context, Result, bail};
use model::id::{BuildId, TeamId, TemplateId};
use model::resources::Resources;
use store::Store;
use store::builds::{BuildRow, BuildStatus};
use store::error::StoreError;
use store::templates::TemplateRow;
use uuid::Uuid;

/// Its name, which every team can use.
const BASE: &str = "base";

/// Ensures that `base` exists and that its newest build has these resources.
///
/// # Errors
/// When the database fails.
pub(crate) async fn ensure_base(store: &Store, resources: &Resources) -> Result<()> {
    let template = match find_base(store).await? {
        Some(template) => template.id,
        None => insert_base(store).await?,
    };
    let version = protocol::agent::VERSION;
    let latest = store.build_latest_ready(&template).await?;
    let fits = latest.is_some_and(|build| {
        (build.cpu_count, build.memory_mb, build.disk_mb)
            == (resources.cpu_count, resources.memory_mb, resources.disk_mb)
            && build.agent_version.as_deref() == Some(version)
    });
    if fits {
        return Ok(());
    }
    let now_us = crate::clock::now_us();
    let build = BuildRow {
        id: BuildId::try_from(Uuid::now_v7().to_string()).expect("a UUID in its usual form is a build's id"),
        template_id: template,
        status: BuildStatus::Ready,
        cpu_count: resources.cpu_count,
        memory_mb: resources.memory_mb,
        disk_mb: resources.disk_mb,
        agent_version: Some(version.to_owned()),
        spec_json: None,
        created_us: now_us,
        started_us: None,
        finished_us: Some(now_us),
        node_id: None,
        reason: None,
    };
    store
        .build_insert(&build)
        .await
        .context("store a build of template `base`")
}

/// Ensures that the database has no template `base`.
///
/// # Errors
/// When an earlier start offered it, or the database fails.
pub(crate) async fn ensure_no_base(store: &Store) -> Result<()> {
    if find_base(store).await?.is_some() {
        bail!("base_template is false, but the database already contains template `base`; use another database");
    }
    Ok(())
}

/// The global template of that name, resolved for a team that owns nothing, so that no alias of a team is found.
async fn find_base(store: &Store) -> Result<Option<TemplateRow>> {
    let nobody = TeamId::try_from(Uuid::nil().to_string()).expect("a UUID in its usual form is a team's id");
    store
        .template_resolve(&nobody, BASE)
        .await
        .context("look up template `base`")
}

async fn insert_base(store: &Store) -> Result<TemplateId> {
    let template = TemplateRow {
        id: TemplateId::from_random(&crate::secret::random()?),
        team_id: None,
        public: true,
        spawn_count: 0,
        last_spawned_us: None,
        created_us: crate::clock::now_us(),
        aliases: vec![BASE.to_owned()],
    };
    match store.template_insert(&template).await {
        Ok(()) => Ok(template.id),
        // Another server on the same database was faster.
        Err(StoreError::Conflict { .. }) => {
            let template = find_base(store).await?;
            template.map(|template| template.id).context("look up template `base`")
        }
        Err(error) => Err(error).context("store template `base`"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_new_size_is_a_new_build_of_the_same_template() {
        let temp = tempfile::tempdir().unwrap();
        let store = Store::open(&format!("sqlite:{}/db", temp.path().display()))
            .await
            .unwrap();
        ensure_no_base(&store).await.unwrap();
        let small = Resources::default();
        let large = Resources {
            memory_mb: small.memory_mb * 2,
            ..small
        };
        let mut builds = Vec::new();
        for resources in [small, small, large] {
            ensure_base(&store, &resources).await.unwrap();
            let base = find_base(&store).await.unwrap().unwrap();
            let build = store.build_latest_ready(&base.id).await.unwrap().unwrap();
            assert_eq!(build.memory_mb, resources.memory_mb);
            builds.push((base.id, build.id));
        }
        assert_eq!(builds[0], builds[1]);
        assert_eq!(builds[0].0, builds[2].0);
        assert_ne!(builds[0].1, builds[2].1);
        assert!(ensure_no_base(&store).await.is_err());
        store.close().await;
    }
}
