//! The third part of a server: what clients and the operator reach.

use std::sync::Arc;

use proxy::ingress::Ingress;
use tokio::runtime::Handle;

use super::running::Running;
use super::stored::Stored;
use super::tasks::Tasks;
use crate::api;
use crate::api::state::{ApiState, SandboxAccess, Services};
use crate::creation::SandboxCreation;
use crate::dashboard::{Dashboard, DashboardServices};
use crate::health::Health;
use crate::listen::connections::Connections;
use crate::listen::lanes::Lanes;
use crate::listen::{Gateway, GatewayServices, Routers};
use crate::mcp::McpService;
use crate::operator::metrics::MetricSources;
use crate::operator::{self, Operator};
use crate::readers::Readers;
use crate::settings::ServerSettings;

/// What clients and the operator reach.
pub(super) struct Served {
    pub(super) gateway: Arc<Gateway>,
    pub(super) operator: Operator,
    pub(super) metric_sources: MetricSources,
    /// The runtime on which connections are accepted.
    pub(super) accepting_on: Handle,
}

impl Served {
    pub(super) fn new(stored: &Stored, running: &Running, settings: ServerSettings, tasks: &Tasks) -> Self {
        let longest_s = settings.limits.longest_lifetime_s();
        let (api, address) = api::router(api_of(stored, running, &settings), longest_s, stored.telemetry.clone());
        let dashboard = Arc::new(Dashboard::new(
            settings.dashboard,
            DashboardServices {
                store: stored.store.clone(),
                clock: stored.clock.clone(),
                authenticator: Arc::clone(&stored.authenticator),
                sandboxes: Arc::clone(&running.sandboxes),
                domain: settings.domain,
            },
        ));
        let limits = &settings.connections;
        let ingress = Ingress::new(Arc::clone(&running.node), tasks.streams.clone(), tasks.abort.clone())
            .limited(limits.into_sandboxes, limits.per_sandbox);
        let lanes = Lanes::new(settings.traffic);
        let accepting_on = lanes.accepting();
        let connections = Connections::new(settings.connections, lanes);
        let metric_sources = MetricSources {
            tls: settings.tls.clone(),
            metrics: Arc::clone(&stored.metrics),
            registry: Arc::clone(&running.registry),
            nodes: Arc::clone(&running.nodes),
            parcels: running.sandboxes.parcels.clone(),
            records: Arc::clone(&stored.records),
            admission: Arc::clone(&running.admission),
            node: running.handle.clone(),
            connections: Arc::clone(&connections),
            streams: tasks.streams.clone(),
        };
        let operator = Operator {
            store: stored.store.clone(),
            sandboxes: Arc::clone(&running.sandboxes),
            builds: Arc::clone(&running.builds),
            registry: Arc::clone(&running.registry),
            records: Arc::clone(&stored.records),
            dashboard: Arc::clone(&dashboard),
            streams: operator::Streams::new(tasks.streams.clone()),
            metrics: metric_sources.clone(),
            members: Arc::default(),
            forwarding: Arc::default(),
        };
        let routers = Routers {
            api,
            operator: operator::router(operator.clone()),
        };
        let services = GatewayServices {
            store: stored.store.clone(),
            sandboxes: Arc::clone(&running.sandboxes),
            builds: Arc::clone(&running.builds),
            registry: Arc::clone(&running.registry),
            metrics: Arc::clone(&stored.metrics),
            dashboard,
            authenticator: Arc::clone(&stored.authenticator),
            signatures: Arc::clone(&stored.signatures),
            connections,
            tls: settings.tls,
        };
        Self {
            gateway: Arc::new(Gateway::new(services, routers, address, ingress)),
            operator,
            metric_sources,
            accepting_on,
        }
    }
}

/// What the handlers of the API have.
fn api_of(stored: &Stored, running: &Running, settings: &ServerSettings) -> ApiState {
    let readers = Arc::new(Readers::new());
    ApiState::new(Services {
        store: stored.store.clone(),
        authenticator: Arc::clone(&stored.authenticator),
        clock: stored.clock.clone(),
        access: Arc::new(SandboxAccess {
            domain: settings.domain.clone(),
            tokens: stored.tokens.clone(),
        }),
        tokens: stored.tokens.clone(),
        injections: Arc::clone(&stored.injections),
        signatures: Arc::clone(&stored.signatures),
        sandboxes: Arc::clone(&running.sandboxes),
        registry: Arc::clone(&running.registry),
        secrets: Arc::clone(&stored.secrets),
        creation: SandboxCreation {
            sandboxes: Arc::clone(&running.sandboxes),
            claims: Arc::clone(&stored.claims),
        },
        builds: Arc::clone(&running.builds),
        admission: Arc::clone(&running.admission),
        records: Arc::clone(&stored.records),
        metrics: Arc::clone(&stored.metrics),
        mcp: Arc::new(McpService::new(settings.mcp.clone(), Arc::clone(&readers))),
        readers,
        health: Arc::new(Health::new(stored.store.clone())),
        webhooks: Arc::clone(&stored.webhooks),
    })
}
