//! Keys of what is recorded and told: logs, metrics, events, webhooks, and what is exported.

use crate::config::egress;
use crate::config::key::{Key, Kind, set};
use crate::config::values::{
    MAX, WEBHOOKS_MAX, WEBHOOKS_RETRY_MAX_S, boolean, file, host_names, kib, mib, number, seconds, some,
};

keys! {
    LOGS_RETENTION_S = {
        "logs.retention_s", None, Integer, "604800",
        "Retention of the log of a sandbox after its end, in seconds.",
        records.log_retention_s = number(0, MAX),
    },
    LOGS_MAX_ENTRIES = {
        "logs.max_entries", None, Integer, "10000",
        "Maximum number of entries in the log of a sandbox, at least 1. The oldest are deleted first.",
        records.log_entries = number(1, MAX),
    },
    LOGS_MAX_KB = {
        "logs.max_kb", None, Integer, "4096",
        "Maximum size of the log of a sandbox, in KiB, at least 16. The oldest entries are deleted first.",
        records.log_bytes = kib(16, MAX),
    },
    LOGS_MAX_TOTAL_MB = {
        "logs.max_total_mb", None, Integer, "1024",
        "Maximum size of all sandbox logs together, in MiB, at least 1. The logs of the sandboxes that ended first are \
         deleted first, then the oldest entries of the largest log.",
        records.log_total_bytes = mib(1),
    },
    METRICS_MAX_TOTAL_MB = {
        "metrics.max_total_mb", None, Integer, "1024",
        "Maximum size of all metrics samples together, in MiB, at least 1. The oldest are deleted first.",
        records.metric_total_bytes = mib(1),
    },
    METRICS_RETENTION_S = {
        "metrics.retention_s", None, Integer, "86400",
        "Retention of metrics samples, in seconds. 1,000 sandboxes write 140 to 425 MB a day.",
        records.metric_retention_s = number(0, MAX),
    },
    EVENTS_RETENTION_S = {
        "events.retention_s", None, Integer, "604800",
        "Retention of lifecycle events, of the attempts to send them, and of the metrics of teams, in seconds.",
        records.event_retention_s = number(0, MAX),
    },
    EVENTS_MAX_TOTAL_MB = {
        "events.max_total_mb", None, Integer, "512",
        "Maximum size of all lifecycle events together, in MiB, at least 1; a team has a quarter at most. The oldest of the \
         team with the most are deleted first.",
        records.event_total_bytes = mib(1),
    },
    WEBHOOKS_MAX_PER_TEAM = {
        "webhooks.max_per_team", None, Integer, "10",
        "Maximum number of webhooks of a team; 0 switches webhooks off.",
        webhooks.per_team = number(0, WEBHOOKS_MAX),
    },
    WEBHOOKS_ALLOW_PRIVATE = {
        "webhooks.allow_private", None, Text, "none",
        "Comma-separated networks in which receivers of events may be although they are not public.",
        webhooks.allow_private = egress::cidrs,
    },
    WEBHOOKS_ALLOW_HOSTS = {
        "webhooks.allow_hosts", None, Text, "none",
        "Comma-separated host names of receivers that may have any address.",
        webhooks.allow_hosts = host_names,
    },
    WEBHOOKS_DENY = {
        "webhooks.deny", None, Text, "none",
        "Comma-separated networks in which no receiver of events may be. Takes precedence over webhooks.allow_private.",
        webhooks.deny = egress::cidrs,
    },
    WEBHOOKS_ALLOW_HTTP = {
        "webhooks.allow_http", None, Boolean, "false",
        "Whether URLs of webhooks may begin with http://: events are sent in clear then.",
        webhooks.allow_http = boolean,
    },
    WEBHOOKS_CA_FILE = {
        "webhooks.ca_file", None, Text, "none",
        "File with certificates of further issuers, in PEM, that receivers of events may have.",
        webhooks_ca_file = some(file),
    },
    WEBHOOKS_RETRY_S = {
        "webhooks.retry_s", None, Integer, "10",
        "Pause before the second attempt to send an event, in seconds, 1 to 600; each of the four following ones is three \
         times as long.",
        webhooks.retry = seconds(1, WEBHOOKS_RETRY_MAX_S),
    },
    TELEMETRY_OTLP_ENDPOINT = {
        "telemetry.otlp_endpoint", None, Text, "none",
        "Address of a receiver of OpenTelemetry, such as http://127.0.0.1:4318, to which traces of API requests and metrics \
         are sent by OTLP over HTTP. Without it nothing is.",
    },
    TELEMETRY_OTLP_HEADERS_FILE = {
        "telemetry.otlp_headers_file", None, Text, "none",
        "File with headers for the receiver, such as its credential, one `Name: value` per line. Requires https:// unless the \
         receiver is on this host.",
    },
    TELEMETRY_CA_FILE = {
        "telemetry.ca_file", None, Text, "none",
        "File with certificates of further issuers, in PEM, that the receiver may have.",
    },
    TELEMETRY_SAMPLING_RATIO = {
        "telemetry.sampling_ratio", None, Number, "1",
        "Part of the traces that is recorded, from 0 to 1. Clients that send traceparent decide about theirs.",
    },
}
