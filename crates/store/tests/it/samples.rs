//! Sample rows.

use std::collections::BTreeMap;

use model::id::{BuildId, NodeId, SandboxId, TeamId, TemplateId, UserId};
use store::Store;
use store::builds::{BuildRow, BuildStatus};
use store::nodes::{Lease, LeaseOutcome, LeaseRequest};
use store::sandboxes::{NewSandbox, SandboxRow};
use store::teams::{TeamRow, UserRow};
use store::templates::TemplateRow;

/// The epoch of the lease of nodes 1 and 2, which come with the first team.
pub(crate) const FIRST_EPOCH: i64 = 1;

/// A UUID that ends in `n`.
pub(crate) fn uuid(n: u32) -> String {
    format!("00000000-0000-4000-8000-{n:012x}")
}

pub(crate) fn team_id(n: u32) -> TeamId {
    uuid(n).parse().unwrap()
}

pub(crate) fn node_id(n: u32) -> NodeId {
    uuid(n).parse().unwrap()
}

pub(crate) fn user_id(n: u32) -> UserId {
    uuid(n).parse().unwrap()
}

pub(crate) fn template_id(n: u32) -> TemplateId {
    format!("t{n:019}").parse().unwrap()
}

pub(crate) fn build_id(n: u32) -> BuildId {
    uuid(n).parse().unwrap()
}

pub(crate) fn sandbox_id(n: u32) -> SandboxId {
    format!("i{n:020}").parse().unwrap()
}

/// Acquires the leases of nodes 1 and 2 for an owner of each, where nobody has them.
async fn lease_nodes(store: &Store) {
    for n in [1, 2] {
        let request = LeaseRequest {
            node: node_id(n),
            name: format!("host {n}"),
            lease: Lease {
                owner: uuid(n).parse().unwrap(),
                until_us: 0,
            },
            now_us: 0,
            expired_us: 0,
            last_epoch: None,
        };
        if store.node_by_id(&request.node).await.unwrap().is_none() {
            let outcome = store.node_lease_acquire(&request).await.unwrap();
            assert_eq!(outcome, LeaseOutcome::Acquired { epoch: FIRST_EPOCH });
        }
    }
}

/// Stores team `n` with a user `n`. With the first team there are nodes 1 and 2.
pub(crate) async fn team(store: &Store, n: u32) -> TeamId {
    let team = TeamRow {
        id: team_id(n),
        name: format!("team {n}"),
        created_us: i64::from(n),
    };
    let user = UserRow {
        id: user_id(n),
        team_id: team.id.clone(),
        name: "default".to_owned(),
        created_us: i64::from(n),
    };
    lease_nodes(store).await;
    store.team_insert(&team).await.unwrap();
    store.user_insert(&user).await.unwrap();
    team.id
}

pub(crate) fn template(n: u32, team: Option<&TeamId>, aliases: &[&str]) -> TemplateRow {
    TemplateRow {
        id: template_id(n),
        team_id: team.cloned(),
        public: false,
        spawn_count: 0,
        last_spawned_us: None,
        created_us: i64::from(n),
        aliases: aliases.iter().map(|&alias| alias.to_owned()).collect(),
    }
}

pub(crate) fn build(n: u32, template: u32, status: BuildStatus, created_us: i64) -> BuildRow {
    BuildRow {
        id: build_id(n),
        template_id: template_id(template),
        status,
        cpu_count: 2,
        memory_mb: 1024,
        disk_mb: 10240,
        agent_version: Some("0.6.13".to_owned()),
        spec_json: None,
        created_us,
        started_us: None,
        finished_us: None,
        node_id: None,
        reason: None,
    }
}

/// Sandbox `n` of team and user `team`, created at `n` microseconds.
pub(crate) fn sandbox(n: u32, team: u32) -> NewSandbox {
    NewSandbox {
        id: sandbox_id(n),
        team_id: team_id(team),
        user_id: user_id(team),
        template_id: template_id(1),
        build_id: build_id(1),
        alias: Some("base".to_owned()),
        execution_id: uuid(n),
        end_us: 1_000_000,
        max_end_us: 2_000_000,
        cpu_count: 2,
        memory_mb: 1024,
        disk_mb: 10240,
        agent_version: "0.6.13".to_owned(),
        metadata: BTreeMap::new(),
        secure: true,
        allow_public_traffic: true,
        allow_internet_access: None,
        network_json: None,
        lifecycle_json: None,
        injections_sealed: None,
        environment_sealed: None,
        authority_of: None,
        created_us: i64::from(n),
    }
}

/// Stores a sandbox and marks it as started at `started_us`.
pub(crate) async fn running(store: &Store, new: NewSandbox, started_us: i64) -> SandboxRow {
    let row = store
        .of_node(node_id(1), FIRST_EPOCH)
        .sandbox_insert(new)
        .await
        .unwrap();
    store
        .of_node(node_id(1), FIRST_EPOCH)
        .sandbox_started(&row.id, row.version, started_us, row.end_us, "0.6.13")
        .await
        .unwrap()
        .applied()
        .unwrap()
}
