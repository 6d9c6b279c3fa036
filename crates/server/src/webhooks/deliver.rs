//! Sends events to webhooks.
//!
//! What is to be sent is in the database, written with the event itself, so nothing that happens to this process loses it:
//! an event is sent at least once, and twice if the process is killed between an answer and its record. Several servers may
//! share the queue; each attempt is claimed, see [`store::webhooks`].
//!
//! Bounds: attempts in flight per webhook, per team and in all, of which a team that has fewer gets the next one, so that a
//! receiver that is slow delays its own events alone; the time of an attempt; the number of attempts. How many events may
//! wait is bounded where they are written.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use model::event::EventType;
use model::id::{NodeId, TeamId};
use parking_lot::Mutex;
use store::Store;
use store::error::StoreError;
use store::webhooks::{AttemptRow, DeliveryRow, Shipment, WaitingWebhook};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use super::client::{EventClient, LOOKUP_BOUND};
use super::receiver::ReceiverRules;
use super::signature::{owner, sign};
use crate::chain::Chain;
use crate::clock::{Clock, SECOND_US};
use crate::metrics::Metrics;
use crate::outcome::AttemptOutcome;
use crate::records::Records;
use crate::seal::Sealer;
use crate::settings::WebhookSettings;

/// Attempts in flight to one webhook.
const PER_WEBHOOK: u32 = 4;
/// Attempts in flight of one team.
const PER_TEAM: u32 = 8;
/// Attempts in flight of all teams.
const TOTAL: u32 = 128;
/// How many attempts follow the first one. The pauses before them are the operator's, and three times as long each time.
const RETRIES: u32 = 5;
/// Part of a pause by which it is longer at random, as a divisor: receivers that were down are not asked all at once.
const JITTER: i64 = 5;
/// How long a claim is valid: longer than an attempt takes.
const CLAIM: Duration = Duration::from_secs(2 * LOOKUP_BOUND.as_secs());
/// How long an attempt keeps its place at least. Each costs writes to the database, which create requests wait for, so a
/// team with receivers that answer at once gets no more than 160 in a second.
const PACE: Duration = Duration::from_millis(50);
/// Pause before the queue is looked at again: many places become free and many events are written at a time.
const GATHER: Duration = Duration::from_millis(50);
/// How often the queue is looked at without a reason: another server may have added to it, or left a claim.
const POLL: Duration = Duration::from_secs(2);

/// Attempts in flight.
#[derive(Debug, Default)]
struct InFlight {
    total: u32,
    teams: HashMap<TeamId, u32>,
    webhooks: HashMap<String, u32>,
}

impl InFlight {
    /// How many more attempts to a webhook may begin.
    fn room(&self, waiting: &WaitingWebhook) -> u32 {
        let of_webhook = self.webhooks.get(&waiting.webhook_id).copied().unwrap_or(0);
        let of_team = self.teams.get(&waiting.team_id).copied().unwrap_or(0);
        PER_WEBHOOK
            .saturating_sub(of_webhook)
            .min(PER_TEAM.saturating_sub(of_team))
            .min(TOTAL.saturating_sub(self.total))
    }
}

/// The place of an attempt among those in flight, until it is dropped.
struct Slot {
    deliverer: Arc<Deliverer>,
    team: TeamId,
    webhook: String,
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut in_flight = self.deliverer.in_flight.lock();
        in_flight.total = in_flight.total.saturating_sub(1);
        release(&mut in_flight.teams, &self.team);
        release(&mut in_flight.webhooks, &self.webhook);
        drop(in_flight);
        self.deliverer.slot_free.notify_one();
    }
}

fn release<K: std::hash::Hash + Eq>(counts: &mut HashMap<K, u32>, key: &K) {
    if let Some(count) = counts.get_mut(key) {
        *count = count.saturating_sub(1);
        if *count == 0 {
            counts.remove(key);
        }
    }
}

/// The services of the deliverer.
#[derive(Debug)]
pub(crate) struct DelivererServices {
    pub(crate) store: Store,
    /// The node of this server, which has one process at a time.
    pub(crate) node: NodeId,
    pub(crate) sealer: Sealer,
    pub(crate) clock: Clock,
    pub(crate) records: Arc<Records>,
    pub(crate) metrics: Arc<Metrics>,
}

/// Sends what is due.
#[derive(Debug)]
pub(crate) struct Deliverer {
    store: Store,
    /// The node of this server, which has one process at a time.
    node: NodeId,
    sealer: Sealer,
    clock: Clock,
    records: Arc<Records>,
    metrics: Arc<Metrics>,
    client: EventClient,
    retry: Duration,
    in_flight: Mutex<InFlight>,
    slot_free: Notify,
}

impl Deliverer {
    pub(crate) fn new(services: DelivererServices, rules: Arc<ReceiverRules>, settings: WebhookSettings) -> Self {
        let DelivererServices {
            store,
            node,
            sealer,
            clock,
            records,
            metrics,
        } = services;
        Self {
            store,
            node,
            sealer,
            clock,
            records,
            metrics,
            client: EventClient::new(rules, settings.authorities),
            retry: settings.retry,
            in_flight: Mutex::default(),
            slot_free: Notify::new(),
        }
    }

    /// Sends what is due, each attempt on a task of its own, until `stop` is cancelled. Attempts that are not over by then
    /// are given up, and are due again.
    pub(crate) async fn deliver(self: Arc<Self>, tasks: TaskTracker, stop: CancellationToken) {
        let mut is_failing = false;
        // What an earlier process was sending when it was killed.
        if let Err(error) = self.store.deliveries_recover(&self.node, self.clock.now_us()).await {
            tracing::warn!(error = %Chain(&error), "cannot take over events to send: they are due again when their claims end");
        }
        loop {
            let pause = match self.begin_due(&tasks, &stop).await {
                Ok(pause) => {
                    is_failing = false;
                    pause
                }
                Err(error) => {
                    if !is_failing {
                        tracing::warn!(error = %Chain(&error), "cannot read which events are to be sent to webhooks");
                    }
                    is_failing = true;
                    POLL
                }
            };
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                () = self.records.events_written() => {}
                () = self.slot_free.notified() => {}
                () = tokio::time::sleep(pause) => {}
            }
            tokio::time::sleep(GATHER).await;
        }
    }

    /// Begins attempts for what is due as far as there is room, and returns when to look again.
    async fn begin_due(
        self: &Arc<Self>,
        tasks: &TaskTracker,
        stop: &CancellationToken,
    ) -> Result<Duration, StoreError> {
        let now_us = self.clock.now_us();
        let (mut due, later): (Vec<_>, Vec<_>) = self
            .store
            .webhooks_waiting()
            .await?
            .into_iter()
            .partition(|waiting| waiting.due_us <= now_us);
        {
            let in_flight = self.in_flight.lock();
            let of_team = |waiting: &WaitingWebhook| in_flight.teams.get(&waiting.team_id).copied().unwrap_or(0);
            due.sort_by_cached_key(|waiting| (of_team(waiting), waiting.due_us));
        }
        for waiting in due {
            let room = self.in_flight.lock().room(&waiting);
            if room == 0 || stop.is_cancelled() {
                continue;
            }
            for delivery in self.store.deliveries_due(&waiting.webhook_id, now_us, room).await? {
                self.begin(tasks, stop, &waiting, delivery).await?;
            }
        }
        let next_us = later.iter().map(|waiting| waiting.due_us - now_us).min();
        let next = next_us.map(|us| Duration::from_micros(us.unsigned_abs()));
        Ok(next.unwrap_or(POLL).min(POLL))
    }

    /// Begins an attempt, unless another server was faster.
    async fn begin(
        self: &Arc<Self>,
        tasks: &TaskTracker,
        stop: &CancellationToken,
        waiting: &WaitingWebhook,
        delivery: DeliveryRow,
    ) -> Result<(), StoreError> {
        let slot = self.take_slot(waiting);
        let attempt_id = Uuid::new_v4().to_string();
        let until_us = self.clock.now_us() + i64::try_from(CLAIM.as_micros()).unwrap_or(i64::MAX / 2);
        let webhook = &waiting.webhook_id;
        if !self
            .store
            .delivery_claim(webhook, &delivery, &attempt_id, &self.node, until_us)
            .await?
        {
            return Ok(());
        }
        let stop = stop.clone();
        tasks.spawn(async move {
            let paced = tokio::time::Instant::now() + PACE;
            let key = (slot.webhook.clone(), delivery.event_id.clone());
            let deliverer = Arc::clone(&slot.deliverer);
            let result = tokio::select! {
                biased;
                () = stop.cancelled() => {
                    let now_us = deliverer.clock.now_us();
                    deliverer.store.delivery_release(&attempt_id, (&key.0, &key.1), now_us).await
                }
                result = deliverer.attempt(&slot.webhook, &delivery, attempt_id.clone()) => result,
            };
            if let Err(error) = result {
                // Due again when the claim is over.
                tracing::warn!(webhook.id = key.0, error = %Chain(&error), "cannot record an attempt to send an event");
            }
            tokio::time::sleep_until(paced).await;
            drop(slot);
        });
        Ok(())
    }

    fn take_slot(self: &Arc<Self>, waiting: &WaitingWebhook) -> Slot {
        let mut in_flight = self.in_flight.lock();
        in_flight.total += 1;
        *in_flight.teams.entry(waiting.team_id.clone()).or_default() += 1;
        *in_flight.webhooks.entry(waiting.webhook_id.clone()).or_default() += 1;
        Slot {
            deliverer: Arc::clone(self),
            team: waiting.team_id.clone(),
            webhook: waiting.webhook_id.clone(),
        }
    }

    /// Makes an attempt, and records what became of it.
    async fn attempt(&self, webhook: &str, delivery: &DeliveryRow, attempt_id: String) -> Result<(), StoreError> {
        let Some(shipment) = self.store.delivery_shipment(webhook, &delivery.event_id).await? else {
            // The event was removed because of its age, or the webhook is gone or not enabled.
            return self.store.delivery_drop(webhook, &delivery.event_id).await;
        };
        let at_us = self.clock.now_us();
        let begun = tokio::time::Instant::now();
        let (status, error) = self.send(webhook, &attempt_id, &shipment).await;
        let duration_us = i64::try_from(begun.elapsed().as_micros()).unwrap_or(i64::MAX);
        let attempt = delivery.attempts.saturating_add(1);
        let next_us = match error {
            Some(_) if attempt <= RETRIES => Some(self.clock.now_us() + self.pause_us(attempt)),
            Some(_) | None => None,
        };
        self.metrics.webhook_attempt(match (error, next_us) {
            (None, _) => AttemptOutcome::Received,
            (Some(_), Some(_)) => AttemptOutcome::Failed,
            (Some(_), None) => AttemptOutcome::GivenUp,
        });
        let Shipment { kind, .. } = shipment;
        let error = error.map(str::to_owned);
        report(webhook, kind, status, error.as_deref());
        let row = AttemptRow {
            id: attempt_id,
            webhook_id: webhook.to_owned(),
            event_id: delivery.event_id.clone(),
            kind,
            attempt,
            at_us,
            duration_us,
            status: status.map(|status| i64::from(status.as_u16())),
            error,
            next_us,
        };
        self.store.delivery_finish(&row).await
    }

    /// Sends an event. Returns the status of the answer, if there was one, and why it was not received in one word.
    async fn send(
        &self,
        webhook: &str,
        attempt_id: &str,
        shipment: &Shipment,
    ) -> (Option<StatusCode>, Option<&'static str>) {
        let secret = match self.sealer.open(&owner(webhook), shipment.secret_sealed.as_str()) {
            Ok(secret) => secret,
            Err(error) => {
                tracing::error!(webhook.id = webhook, "cannot open the secret of a webhook: {error}");
                return (None, Some("secret"));
            }
        };
        let signature = sign(&secret, &shipment.body_json);
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("e2b-webhook-id", webhook),
            ("e2b-delivery-id", attempt_id),
            ("e2b-signature-version", "v1"),
            ("e2b-signature", signature.as_str()),
        ] {
            let value = HeaderValue::from_str(value).expect("ids and Base64 are ASCII");
            headers.insert(HeaderName::from_static(name), value);
        }
        let body = Bytes::from(shipment.body_json.clone());
        match self.client.send(&shipment.url, headers, body).await {
            Ok(status) if status.is_success() => (Some(status), None),
            Ok(status) if status.is_redirection() => (Some(status), Some("redirect")),
            Ok(status) => (Some(status), Some("status")),
            Err(error) => (None, Some(error.word())),
        }
    }

    /// The pause after an attempt that has failed, in microseconds.
    fn pause_us(&self, attempt: u32) -> i64 {
        let pause_us = i64::try_from(self.retry.as_micros()).unwrap_or(SECOND_US);
        let pause_us = pause_us.saturating_mul(3_i64.saturating_pow(attempt.saturating_sub(1)));
        // 32 random bits of a new id.
        let random = i64::from(Uuid::new_v4().as_fields().0);
        pause_us.saturating_add(pause_us / JITTER * random / i64::from(u32::MAX))
    }
}

/// Logs what became of an attempt, without the URL, which may have a secret of the tenant.
fn report(webhook: &str, kind: EventType, status: Option<StatusCode>, error: Option<&str>) {
    let status = status.map(|status| status.as_u16());
    tracing::debug!(webhook.id = webhook, %kind, status, error, "an event was sent to a webhook");
}
