//! Log entries that the server itself writes.

use std::collections::BTreeMap;

use model::event::EventType;
use model::id::TemplateId;
use model::lifecycle::Kept;
use model::log::Level;
use protocol::node::CopiedMemory;
use store::sandboxes::SandboxRow;

use crate::clock::rfc3339;
use crate::outcome::{EndReason, OperatorCommand, PauseReason, ResumeReason};

/// The logger of these entries.
pub(super) const LOGGER: &str = "platform";

/// A lifecycle event of a sandbox. That it started, and that nothing of it runs any more, is reported by the node.
#[derive(Debug)]
pub(crate) enum LifecycleEvent<'a> {
    /// The sandbox runs, and the create request is about to be answered.
    Created(&'a SandboxRow),
    /// Its deadline was changed, in microseconds since the Unix epoch.
    TimeoutChanged(i64),
    /// The network policy of the sandbox was changed.
    NetworkChanged,
    /// Its injections were changed.
    InjectionsChanged,
    /// The sandbox was paused, for this reason.
    Paused(PauseReason, Kept),
    /// The sandbox is about to be paused at its deadline in another way than usual, for this reason.
    PausedOtherwise(&'static str),
    /// The sandbox could not be paused at its deadline, for this reason.
    NotPaused(&'static str),
    /// The sandbox could not be resumed and is still paused, for this reason.
    NotResumed(&'a str),
    /// The sandbox has moved to another node, with its processes or, for a reason, without.
    Moved(Option<&'a str>),
    /// The sandbox is started anew from its files on the node that it has moved to, for this reason.
    WithoutProcesses(&'a str),
    /// The sandbox was started anew, and is not ready, for this reason.
    NotReady(&'static str),
    /// The sandbox was resumed, for this reason.
    Resumed(ResumeReason, &'a SandboxRow),
    /// A snapshot of it was made, which is this template, with its memory or without for this reason, if it was wanted.
    Snapshotted(&'a TemplateId, &'a CopiedMemory),
    /// The sandbox was forked, into this many others.
    Forked(usize),
    /// The operator of the platform has entered the sandbox, with this command.
    OperatorEntered(OperatorCommand),
    /// The sandbox ends or has ended, for this reason.
    Ending(EndReason),
}

impl LifecycleEvent<'_> {
    /// What clients are told about it as an event; none for what is in the log alone.
    pub(super) fn kind(&self) -> Option<EventType> {
        match self {
            Self::Created(_) => Some(EventType::Created),
            Self::TimeoutChanged(_) => Some(EventType::Updated),
            Self::Paused(..) => Some(EventType::Paused),
            Self::Resumed(..) => Some(EventType::Resumed),
            Self::Snapshotted(..) => Some(EventType::Checkpointed),
            Self::Ending(_) => Some(EventType::Killed),
            Self::NetworkChanged
            | Self::InjectionsChanged
            | Self::PausedOtherwise(_)
            | Self::NotPaused(_)
            | Self::NotResumed(_)
            | Self::NotReady(_)
            | Self::Moved(_)
            | Self::WithoutProcesses(_)
            | Self::Forked(_)
            | Self::OperatorEntered(_) => None,
        }
    }

    /// The event as a log entry, without any text from clients.
    pub(super) fn describe(&self) -> (Level, &'static str, BTreeMap<String, String>) {
        let (level, message, event_type) = match self {
            Self::Created(_) => (Level::Info, "the sandbox was created", "sandbox_created"),
            Self::TimeoutChanged(_) => (Level::Info, "the timeout was changed", "timeout_changed"),
            Self::NetworkChanged => (Level::Info, "the network settings were changed", "network_changed"),
            Self::InjectionsChanged => (Level::Info, "the injections were changed", "injections_changed"),
            Self::Paused(reason, _) => {
                let message = match reason {
                    PauseReason::Client => "a client paused the sandbox",
                    PauseReason::Timeout => "the timeout was reached, and the sandbox was paused",
                    PauseReason::Shutdown => "the platform is being stopped, and the sandbox was paused",
                    PauseReason::Drain => "the operator drains the host, and the sandbox was paused",
                };
                (Level::Info, message, "sandbox_paused")
            }
            Self::PausedOtherwise("processes") => {
                let message =
                    "the timeout was reached; this host cannot keep the processes, so only the files are kept";
                (Level::Warn, message, "pause_without_processes")
            }
            Self::PausedOtherwise(_) => {
                let message = "the timeout was reached; the sandbox is kept beyond a limit of its team";
                (Level::Warn, message, "pause_beyond_limit")
            }
            Self::NotResumed(_) => {
                let message = "the sandbox could not be resumed, and is still paused";
                (Level::Error, message, "resume_failed")
            }
            Self::NotReady(_) => {
                let message = "the sandbox was started anew, and its start command has failed";
                (Level::Warn, message, "start_command_failed")
            }
            Self::Moved(None) => (Level::Info, "the sandbox has moved to another node", "sandbox_moved"),
            Self::Moved(Some(_)) => {
                let message = "the sandbox has moved to another node, with its files alone";
                (Level::Warn, message, "sandbox_moved")
            }
            Self::WithoutProcesses(_) => {
                let message = "the processes of the sandbox could not be restored on its new node, and it is started from its files";
                (Level::Warn, message, "memory_not_restored")
            }
            Self::NotPaused(_) => {
                let message = "the timeout was reached, and the sandbox cannot be paused";
                (Level::Warn, message, "pause_failed")
            }
            Self::Resumed(reason, _) => {
                let message = match reason {
                    ResumeReason::Client => "a client resumed the sandbox",
                    ResumeReason::Traffic => "traffic resumed the sandbox",
                    ResumeReason::Operator => "the operator of the platform resumed the sandbox",
                };
                (Level::Info, message, "sandbox_resumed")
            }
            Self::Snapshotted(_, CopiedMemory::Missing(_)) => {
                let message = "a snapshot of the files of the sandbox was made; its memory could not be kept";
                (Level::Warn, message, "snapshot_created")
            }
            Self::Snapshotted(..) => (Level::Info, "a snapshot of the sandbox was made", "snapshot_created"),
            Self::Forked(_) => (Level::Info, "the sandbox was forked", "sandbox_forked"),
            Self::OperatorEntered(_) => {
                let message = "the operator of the platform has entered the sandbox";
                (Level::Info, message, "operator_entered")
            }
            Self::Ending(reason) => {
                let (level, message) = match reason {
                    EndReason::Killed => (Level::Info, "a client asked to kill the sandbox"),
                    EndReason::Operator => (Level::Warn, "the operator of the platform killed the sandbox"),
                    EndReason::Expired => (Level::Info, "the timeout was reached"),
                    EndReason::Retention => (
                        Level::Warn,
                        "the sandbox was paused for as long as this platform keeps one",
                    ),
                    EndReason::Exited => (Level::Warn, "the sandbox ended by itself"),
                    EndReason::Lost => (Level::Warn, "the sandbox ended while the platform did not run"),
                };
                (level, message, "sandbox_ending")
            }
        };
        let more = match self {
            Self::Created(row) => vec![
                ("template", row.template_id.as_str().to_owned()),
                ("end_at", rfc3339(row.end_us)),
            ],
            Self::TimeoutChanged(end_us) => vec![("end_at", rfc3339(*end_us))],
            Self::NetworkChanged | Self::InjectionsChanged => Vec::new(),
            Self::Paused(reason, kept) => vec![
                ("reason", reason.as_str().to_owned()),
                ("kept", kept.as_str().to_owned()),
            ],
            Self::NotResumed(why) | Self::Moved(Some(why)) | Self::WithoutProcesses(why) => {
                vec![("reason", (*why).to_owned())]
            }
            Self::Moved(None) => Vec::new(),
            Self::OperatorEntered(command) => vec![("command", command.as_str().to_owned())],
            Self::NotPaused(why) | Self::PausedOtherwise(why) | Self::NotReady(why) => {
                vec![("reason", (*why).to_owned())]
            }
            Self::Resumed(reason, row) => vec![("reason", reason.as_str().to_owned()), ("end_at", rfc3339(row.end_us))],
            Self::Snapshotted(template, memory) => {
                let kept = match memory {
                    CopiedMemory::Copied => "processes",
                    CopiedMemory::Unwanted | CopiedMemory::Missing(_) => "filesystem",
                };
                let mut fields = vec![("template", template.to_string()), ("kept", kept.to_owned())];
                if let CopiedMemory::Missing(why) = memory {
                    fields.push(("reason", why.clone()));
                }
                fields
            }
            Self::Forked(count) => vec![("count", count.to_string())],
            Self::Ending(reason) => vec![("reason", reason.as_str().to_owned())],
        };
        let fields = [("event_type", event_type.to_owned())].into_iter().chain(more);
        let fields = fields.map(|(key, value)| (key.to_owned(), value)).collect();
        (level, message, fields)
    }
}
