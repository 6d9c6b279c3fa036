//! Lifecycle events as clients get them, in lists and at their webhooks.
//!
//! An event is a text of JSON from the moment it happens, so that a list, every attempt to send it and every signature are
//! of the same bytes. It tells what the sandbox was then, so it is made of what the records know, and not of a row that
//! changes or is gone.

use std::collections::BTreeMap;

use model::event::EventType;
use model::id::SandboxId;
use serde::Serialize;
use store::records::NewEvent;
use store::sandboxes::SandboxRow;
use uuid::Uuid;

use super::lifecycle_event::LifecycleEvent;
use crate::clock::rfc3339;

/// Maximum size of metadata in an event, in bytes. Larger metadata is left out of events: one request may set megabytes of
/// it, and each event would have them again.
const METADATA_MAX: usize = 16 * 1024;
/// The form of events, which receivers look at.
const VERSION: &str = "v2";

/// An event in the life of a sandbox. The API describes the keys.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct EventBody {
    /// The version of this form: `v2`.
    version: &'static str,
    /// The id of the event, a UUID. Attempts to send one event to a webhook have the same.
    id: String,
    /// `sandbox.lifecycle.created`, `updated`, `paused`, `resumed`, `checkpointed` or `killed`.
    #[serde(rename = "type")]
    kind: &'static str,
    /// `lifecycle`, for earlier readers.
    event_category: &'static str,
    /// `create`, `update`, `pause`, `resume`, `checkpoint` or `kill`, for earlier readers.
    event_label: &'static str,
    /// What else is known about it.
    event_data: Option<EventData>,
    sandbox_id: String,
    sandbox_team_id: String,
    sandbox_template_id: String,
    sandbox_build_id: String,
    /// The run of the sandbox, which changes with a resume.
    sandbox_execution_id: String,
    timestamp: String,
}

/// What else is known about an event.
#[derive(Debug, Default, Serialize)]
struct EventData {
    /// The metadata of the sandbox, unless it is larger than 16 KiB.
    #[serde(skip_serializing_if = "Option::is_none")]
    sandbox_metadata: Option<BTreeMap<String, String>>,
    /// When the sandbox ends now; in events of type `updated`.
    #[serde(skip_serializing_if = "Option::is_none")]
    set_timeout: Option<String>,
    /// The run that is over; in events of the types `paused` and `killed`.
    #[serde(skip_serializing_if = "Option::is_none")]
    execution: Option<Execution>,
}

/// A run of a sandbox.
#[derive(Debug, Serialize)]
struct Execution {
    started_at: String,
    vcpu_count: u32,
    /// Memory of the sandbox, in MiB.
    memory_mb: u32,
    /// How long the sandbox ran, in milliseconds.
    execution_time: i64,
}

/// What events tell about a sandbox.
#[derive(Debug)]
pub(super) struct Subject {
    template: String,
    build: String,
    execution: String,
    metadata: Option<BTreeMap<String, String>>,
    cpu_count: u32,
    memory_mb: u32,
    started_us: i64,
    /// When the run ended, unless it goes on.
    ended_us: Option<i64>,
    /// Whether the last event said that it is paused.
    is_paused: bool,
}

impl Subject {
    pub(super) fn of(row: &SandboxRow) -> Self {
        let bytes: usize = row
            .metadata
            .iter()
            .map(|(key, value)| key.len() + value.len() + 6)
            .sum();
        Self {
            template: row.template_id.to_string(),
            build: row.build_id.to_string(),
            execution: row.execution_id.clone(),
            metadata: (bytes <= METADATA_MAX && !row.metadata.is_empty()).then(|| row.metadata.clone()),
            cpu_count: row.cpu_count,
            memory_mb: row.memory_mb,
            started_us: row.started_us,
            ended_us: row.paused_us.filter(|_| row.state == model::lifecycle::State::Paused),
            is_paused: row.state == model::lifecycle::State::Paused,
        }
    }

    /// Begins a run, of which the row tells.
    pub(super) fn begin(&mut self, row: &SandboxRow) {
        self.execution.clone_from(&row.execution_id);
        self.started_us = row.started_us;
        self.ended_us = None;
    }

    /// Ends the run.
    pub(super) fn end(&mut self, now_us: i64) {
        self.ended_us.get_or_insert(now_us);
    }

    /// Whether clients get an event. A sandbox that is paused may be paused in another way, when the platform is stopped:
    /// nothing changes for its client.
    pub(super) fn is_news(&mut self, kind: EventType) -> bool {
        let was_paused = self.is_paused;
        match kind {
            EventType::Paused => self.is_paused = true,
            EventType::Resumed | EventType::Created => self.is_paused = false,
            EventType::Updated | EventType::Checkpointed | EventType::Killed => {}
        }
        kind != EventType::Paused || !was_paused
    }

    /// The event.
    pub(super) fn event(
        &self,
        kind: EventType,
        team: &model::id::TeamId,
        id: &SandboxId,
        happened: &LifecycleEvent<'_>,
        at_us: i64,
        seq: i64,
    ) -> NewEvent {
        let event_id = Uuid::now_v7().to_string();
        let set_timeout = match happened {
            LifecycleEvent::TimeoutChanged(end_us) => Some(rfc3339(*end_us)),
            _ => None,
        };
        let is_over = matches!(kind, EventType::Paused | EventType::Killed);
        let execution = is_over.then(|| Execution {
            started_at: rfc3339(self.started_us),
            vcpu_count: self.cpu_count,
            memory_mb: self.memory_mb,
            execution_time: (self.ended_us.unwrap_or(at_us) - self.started_us).max(0) / 1000,
        });
        let data = EventData {
            sandbox_metadata: self.metadata.clone(),
            set_timeout,
            execution,
        };
        let is_empty = data.sandbox_metadata.is_none() && data.set_timeout.is_none() && data.execution.is_none();
        let event = EventBody {
            version: VERSION,
            id: event_id.clone(),
            kind: kind.as_str(),
            event_category: "lifecycle",
            event_label: kind.label(),
            event_data: (!is_empty).then_some(data),
            sandbox_id: id.to_string(),
            sandbox_team_id: team.to_string(),
            sandbox_template_id: self.template.clone(),
            sandbox_build_id: self.build.clone(),
            sandbox_execution_id: self.execution.clone(),
            timestamp: rfc3339(at_us),
        };
        NewEvent {
            id: event_id,
            team_id: team.clone(),
            sandbox_id: id.clone(),
            at_us,
            seq,
            kind,
            body_json: serde_json::to_string(&event).expect("texts and numbers are always JSON"),
        }
    }
}
