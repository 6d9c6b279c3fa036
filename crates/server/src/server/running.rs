//! The second part of a server: its nodes, and what runs on them.

use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use protocol::node::NodeApi;

use super::stored::Stored;
use super::tasks::Tasks;
use crate::admission::AdmissionControl;
use crate::builds::{BuildServices, Builds};
use crate::deadlines::Deadlines;
use crate::layers::StoredLayers;
use crate::node::NodeHandle;
use crate::nodes::Nodes;
use crate::nodes::all::AllNodes;
use crate::nodes::keeper::NodeKeeper;
use crate::nodes::placement::Placement;
use crate::parcels::Parcels;
use crate::repositories::{Repositories, RepositoryServices};
use crate::sandboxes::policy::Policies;
use crate::sandboxes::registry::Registry;
use crate::sandboxes::tracked::Tracked;
use crate::sandboxes::unrecorded::Recording;
use crate::sandboxes::work::Work;
use crate::sandboxes::{Defaults, Sandboxes};
use crate::settings::ServerSettings;

/// The nodes of a server, and the services that need them.
pub(super) struct Running {
    pub(super) nodes: Arc<Nodes>,
    /// All nodes as if they were one.
    pub(super) node: Arc<dyn NodeApi>,
    /// All nodes, with the blob store if there is one.
    pub(super) handle: NodeHandle,
    pub(super) admission: Arc<AdmissionControl>,
    pub(super) builds: Arc<Builds>,
    pub(super) registry: Arc<Registry>,
    pub(super) sandboxes: Arc<Sandboxes>,
    pub(super) keeper: Arc<NodeKeeper>,
}

impl Running {
    pub(super) fn new(stored: &Stored, settings: &ServerSettings, tasks: &Tasks) -> Self {
        let registry = Arc::new(Registry::default());
        let placement = Placement::new(settings.chance.clone(), stored.clock.clone());
        let nodes = Arc::new(Nodes::new(placement));
        let node: Arc<dyn NodeApi> = Arc::new(AllNodes::new(Arc::clone(&nodes), Arc::clone(&registry)));
        let layers = settings.blobs.clone().map(|blobs| {
            let (store, clock, work) = (stored.store.clone(), stored.clock.clone(), tasks.work.clone());
            Arc::new(StoredLayers::new(blobs, store, Arc::clone(&node), clock, work))
        });
        let handle = NodeHandle::new(Arc::clone(&node), layers);
        let deadlines = Arc::new(Deadlines::default());
        let admission = Arc::new(AdmissionControl::new(
            stored.store.clone(),
            handle.clone(),
            settings.limits.clone(),
            settings.capacity,
            Arc::clone(&deadlines),
            stored.clock.clone(),
        ));
        let builds = Arc::new(Builds::new(
            settings.builds.clone(),
            BuildServices {
                rows: stored.rows.clone(),
                node: handle.clone(),
                tokens: stored.tokens.clone(),
                sealer: stored.sealer.clone(),
                admission: Arc::clone(&admission),
                nodes: Arc::clone(&nodes),
                resources: settings.resources,
                clock: stored.clock.clone(),
                work: tasks.work.clone(),
                telemetry: stored.telemetry.clone(),
            },
        ));
        let tracked = Arc::new(Tracked {
            registry: Arc::clone(&registry),
            deadlines,
            records: Arc::clone(&stored.records),
            metrics: Arc::clone(&stored.metrics),
        });
        let work = Arc::new(Work::new(tasks.work.clone(), tasks.stop.clone()));
        let recording = Recording::new(stored.store.clone(), Arc::clone(&tracked), Arc::clone(&work));
        let sandboxes = Arc::new(Sandboxes {
            store: stored.store.clone(),
            home: stored.rows.node().clone(),
            nodes: Arc::clone(&nodes),
            recording: Arc::new(recording),
            tracked,
            defaults: Defaults {
                resources: settings.resources,
                always_secure: settings.always_secure,
                pause: settings.pause,
            },
            policies: Policies {
                sealer: stored.sealer.clone(),
                rules: settings.egress.clone(),
                admission: Arc::clone(&admission),
                injections: Arc::clone(&stored.injections),
                tokens: stored.tokens.clone(),
                secrets: Arc::clone(&stored.secrets),
            },
            repositories: Repositories::new(
                settings.repositories.clone(),
                RepositoryServices {
                    node: handle.clone(),
                    admission: Arc::clone(&admission),
                    tokens: stored.tokens.clone(),
                    clock: stored.clock.clone(),
                    work: tasks.work.clone(),
                },
            ),
            fork_peers: OnceLock::new(),
            parcels: parcels(stored, settings),
            clock: stored.clock.clone(),
            work,
        });
        let keeper = NodeKeeper {
            store: stored.store.clone(),
            nodes: Arc::clone(&nodes),
            sandboxes: Arc::clone(&sandboxes),
            admission: Arc::clone(&admission),
            handle: handle.clone(),
            pool: settings.pool.clone(),
            tokens: stored.tokens.clone(),
            metrics: Arc::clone(&stored.metrics),
            clock: stored.clock.clone(),
            work: tasks.work.clone(),
            background: tasks.background.clone(),
            records: tasks.records.clone(),
            stop: tasks.stop.clone(),
            records_stop: tasks.records_stop.clone(),
            writing: Mutex::default(),
        };
        Self {
            nodes,
            node,
            handle,
            admission,
            builds,
            registry,
            sandboxes,
            keeper: Arc::new(keeper),
        }
    }
}

/// The copies of paused sandboxes in the blob store, if they are made.
fn parcels(stored: &Stored, settings: &ServerSettings) -> Option<Arc<Parcels>> {
    let blobs = settings.blobs.as_ref().filter(|_| settings.pause.copies)?;
    Some(Arc::new(Parcels::new(
        Arc::clone(&blobs.store),
        stored.sealer.clone(),
        Arc::clone(&stored.metrics),
        stored.owner.clone(),
        settings.pause.copy_mib_per_s,
    )))
}
