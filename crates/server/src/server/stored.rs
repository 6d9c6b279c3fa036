//! The first part of a server: its database with the services that need nothing else, and what every service is given.

use std::sync::Arc;

use model::id::OwnerId;
use store::Store;
use store::nodes::NodeRows;

use super::tasks::Tasks;
use crate::authentication::Authenticator;
use crate::clock::Clock;
use crate::injections::Injections;
use crate::keys::TokenSeed;
use crate::lease::NodeLease;
use crate::metrics::Metrics;
use crate::records::Records;
use crate::sandboxes::idempotency::Claims;
use crate::seal::Sealer;
use crate::secrets::Secrets;
use crate::settings::ServerSettings;
use crate::signature::Signatures;
use crate::telemetry::{Exporters, Telemetry};
use crate::webhooks::Webhooks;
use crate::webhooks::deliver::{Deliverer, DelivererServices};
use crate::webhooks::receiver::ReceiverRules;

/// The database and the services that need nothing else.
pub(super) struct Stored {
    pub(super) owner: OwnerId,
    pub(super) rows: NodeRows,
    pub(super) store: Store,
    pub(super) clock: Clock,
    pub(super) sealer: Sealer,
    pub(super) tokens: TokenSeed,
    pub(super) metrics: Arc<Metrics>,
    /// What records requests, if traces or metrics are exported.
    pub(super) telemetry: Option<Arc<Telemetry>>,
    pub(super) exporters: Option<Exporters>,
    pub(super) records: Arc<Records>,
    pub(super) claims: Arc<Claims>,
    pub(super) authenticator: Arc<Authenticator>,
    pub(super) signatures: Arc<Signatures>,
    pub(super) secrets: Arc<Secrets>,
    pub(super) injections: Arc<Injections>,
    pub(super) webhooks: Arc<Webhooks>,
    pub(super) deliverer: Arc<Deliverer>,
}

impl Stored {
    /// The services on the database of a lease.
    pub(super) fn new(lease: &NodeLease, settings: &ServerSettings, tasks: &Tasks) -> Self {
        let rows = lease.rows().clone();
        let store = rows.store().clone();
        let (clock, sealer) = (settings.clock.clone(), settings.sealer.clone());
        let metrics = Arc::new(Metrics::new(&settings.capacity));
        let exported = settings.telemetry.clone();
        let exported = exported.map(|settings| Telemetry::new(settings, rows.node(), &metrics, clock.clone()));
        let (telemetry, exporters) = exported.unzip();
        let records = Arc::new(Records::new(
            store.clone(),
            settings.records.clone(),
            clock.clone(),
            rows.node(),
            telemetry.clone(),
        ));
        let receivers = Arc::new(ReceiverRules::new(&settings.webhooks));
        let webhooks = Webhooks::new(
            store.clone(),
            sealer.clone(),
            clock.clone(),
            Arc::clone(&receivers),
            settings.webhooks.per_team,
        );
        let deliverer = Deliverer::new(
            DelivererServices {
                store: store.clone(),
                node: rows.node().clone(),
                sealer: sealer.clone(),
                clock: clock.clone(),
                records: Arc::clone(&records),
                metrics: Arc::clone(&metrics),
            },
            receivers,
            settings.webhooks.clone(),
        );
        let claims = Claims::new(rows.clone(), clock.clone(), tasks.work.clone());
        let authenticator = Authenticator::new(store.clone(), clock.clone(), tasks.work.clone());
        let signatures = Signatures::new(store.clone(), sealer.clone(), clock.clone(), settings.signing.clone());
        let secrets = Secrets::new(store.clone(), sealer.clone(), clock.clone());
        let injections = Injections::new(store.clone(), sealer.clone(), settings.providers.clone());
        Self {
            owner: lease.owner().clone(),
            tokens: TokenSeed::new(&settings.token_seed),
            telemetry,
            exporters,
            records,
            claims: Arc::new(claims),
            authenticator: Arc::new(authenticator),
            signatures: Arc::new(signatures),
            secrets: Arc::new(secrets),
            injections: Arc::new(injections),
            webhooks: Arc::new(webhooks),
            deliverer: Arc::new(deliverer),
            metrics,
            rows,
            store,
            clock,
            sealer,
        }
    }
}
