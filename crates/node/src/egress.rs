//! Connects sandboxes to the egress gateway, and writes what it reports into their logs.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use model::id::SandboxId;
use model::log::Level;
use model::network::EgressPolicy;
use protocol::node::{Logger, Traffic};
use proxy::egress::{Attachment, EgressRecord, EgressReport, InjectedRequest, Outcome, SandboxNetwork};
use runtime::driver::Sandbox;
use runtime::egress::{EgressSockets, GATEWAY};

use crate::log_writer::LogWriter;
use crate::shared::Shared;

/// Gives a sandbox its network; none where the driver or the kernel cannot.
///
/// # Errors
/// When the sockets cannot be opened.
pub(crate) fn attach(
    shared: &Shared,
    id: &SandboxId,
    sandbox: &dyn Sandbox,
    policy: EgressPolicy,
    traffic: &Arc<Traffic>,
) -> io::Result<Option<Attachment>> {
    let Some(gateway) = &shared.egress else {
        return Ok(None);
    };
    let log = LogWriter::new(id.clone(), Arc::clone(&shared.journal));
    let report = Box::new(move |report| write(&log, &report));
    let network = Arc::new(Network(sandbox.egress()?));
    gateway.attach(network, policy, report, Arc::clone(traffic)).map(Some)
}

/// The gateway's sockets in the network of a sandbox of the container driver.
#[derive(Debug)]
struct Network(EgressSockets);

impl SandboxNetwork for Network {
    fn tcp(&self) -> io::Result<TcpListener> {
        self.0.tcp()
    }

    fn udp(&self) -> BorrowedFd<'_> {
        self.0.udp()
    }

    fn receive(&self, buffer: &mut [u8]) -> io::Result<(usize, SocketAddr, SocketAddr)> {
        self.0.receive(buffer)
    }

    fn send(&self, from: SocketAddr, to: SocketAddr, payload: &[u8]) -> io::Result<()> {
        self.0.send(from, to, payload)
    }

    fn resolver(&self) -> IpAddr {
        GATEWAY.into()
    }

    fn refuse(&self, source: SocketAddr, destination: SocketAddr) -> io::Result<()> {
        self.0.refuse(source, destination)
    }
}

fn write(log: &LogWriter, report: &EgressReport) {
    let (level, message, fields) = match report {
        EgressReport::Connection(record) => entry(record),
        EgressReport::Request(request) => injected(request),
        EgressReport::Queries {
            per_second,
            waited,
            unanswered,
        } => {
            let entry = queries(*per_second, *waited, *unanswered);
            tracing::warn!(sandbox.id = %log.id(), "{}", entry.1);
            entry
        }
        EgressReport::Unreported(count) => unlogged("connections", *count),
        EgressReport::UnreportedRequests(count) => unlogged("requests with injected headers", *count),
    };
    log.write(level, Logger::Egress, message, fields);
}

/// The log entry for a request that a rule applied to.
fn injected(request: &InjectedRequest) -> (Level, String, BTreeMap<String, String>) {
    let InjectedRequest {
        rule,
        host,
        port,
        method,
        path,
        status,
    } = request;
    let outcome = match status {
        Some(status) => status.to_string(),
        None => "no response".to_owned(),
    };
    let message = format!("{method} https://{host}:{port}{path} got the headers of {rule}: {outcome}");
    let mut fields = vec![
        ("event_type", "egress_injected".to_owned()),
        ("rule", rule.clone()),
        ("host", host.clone()),
        ("port", port.to_string()),
        ("method", method.clone()),
        ("path", path.clone()),
    ];
    fields.extend(status.map(|status| ("status", status.to_string())));
    let fields = fields.into_iter().map(|(key, value)| (key.to_owned(), value));
    (Level::Info, message, fields.collect())
}

/// The log entry for DNS queries beyond the limit.
fn queries(per_second: u32, waited: u64, unanswered: u64) -> (Level, String, BTreeMap<String, String>) {
    let message = format!(
        "DNS queries are beyond the limit of {per_second} per second (egress.dns_queries_per_s): {waited} waited, and \
         {unanswered} got no answer"
    );
    let field = |key: &str, value: String| (key.to_owned(), value);
    let fields = [
        field("event_type", "egress_dns_limited".to_owned()),
        field("waited", waited.to_string()),
        field("unanswered", unanswered.to_string()),
    ];
    (Level::Warn, message, fields.into())
}

/// The log entry for what has none.
fn unlogged(what: &str, count: u64) -> (Level, String, BTreeMap<String, String>) {
    let message = format!("{count} {what} were not logged: there were too many at once");
    let field = |key: &str, value: String| (key.to_owned(), value);
    let fields = [
        field("event_type", "egress_dropped".to_owned()),
        field("dropped", count.to_string()),
    ];
    (Level::Warn, message, fields.into())
}

/// The log entry for a connection.
fn entry(record: &EgressRecord) -> (Level, String, BTreeMap<String, String>) {
    let what = match &record.name {
        Some(name) => format!("{} ({name})", record.destination),
        None => record.destination.to_string(),
    };
    let protocol = record.protocol.as_str();
    let mut fields = vec![
        ("protocol", protocol.to_owned()),
        ("destination", record.destination.to_string()),
    ];
    fields.extend(record.name.clone().map(|name| ("name", name)));
    let (level, message, event) = match &record.outcome {
        Outcome::Denied(reason) => {
            fields.push(("reason", reason.to_string()));
            let message = format!("{protocol} to {what} was refused: {reason}");
            (Level::Warn, message, "egress_denied")
        }
        Outcome::Failed(error) => {
            fields.push(("reason", error.clone()));
            let message = format!("{protocol} to {what} failed: {error}");
            (Level::Warn, message, "egress_failed")
        }
        Outcome::Ended {
            sent,
            received,
            took,
            cut,
        } => {
            fields.extend([
                ("bytes_sent", sent.to_string()),
                ("bytes_received", received.to_string()),
                ("duration_ms", took.as_millis().to_string()),
            ]);
            fields.extend(cut.map(|reason| ("reason", reason.to_string())));
            let message = match cut {
                None => format!("{protocol} to {what} ended"),
                Some(reason) => format!("{protocol} to {what} was cut: {reason}"),
            };
            (Level::Info, message, "egress_ended")
        }
    };
    fields.push(("event_type", event.to_owned()));
    let fields = fields.into_iter().map(|(key, value)| (key.to_owned(), value));
    (level, message, fields.collect())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proxy::egress::{Protocol, Reason};

    use super::*;

    #[test]
    fn entries_say_what_happened() {
        let record = |outcome| EgressRecord {
            protocol: Protocol::Tcp,
            destination: "93.184.216.34:443".parse().unwrap(),
            name: Some("example.com".to_owned()),
            outcome,
        };
        let (level, message, fields) = entry(&record(Outcome::Denied(Reason::Policy)));
        assert_eq!(level, Level::Warn);
        assert_eq!(
            message,
            "tcp to 93.184.216.34:443 (example.com) was refused: the network policy of the sandbox denies it"
        );
        assert_eq!(fields["event_type"], "egress_denied");
        assert_eq!(fields["name"], "example.com");
        let ended = Outcome::Ended {
            sent: 7,
            received: 9,
            took: Duration::from_millis(1500),
            cut: None,
        };
        let (level, _, fields) = entry(&record(ended));
        assert_eq!(level, Level::Info);
        let field = |name: &str| fields[name].as_str();
        assert_eq!((field("bytes_sent"), field("bytes_received")), ("7", "9"));
        assert_eq!(field("duration_ms"), "1500");
        let (level, message, fields) = injected(&InjectedRequest {
            rule: "injections[0]".to_owned(),
            host: "api.example.com".to_owned(),
            port: 443,
            method: "POST".to_owned(),
            path: "/v1/a".to_owned(),
            status: Some(200),
        });
        assert_eq!(level, Level::Info);
        assert_eq!(
            message,
            "POST https://api.example.com:443/v1/a got the headers of injections[0]: 200"
        );
        let field = |name: &str| fields[name].as_str();
        assert_eq!((field("event_type"), field("status")), ("egress_injected", "200"));
        let (level, message, fields) = queries(100, 7, 0);
        assert_eq!(level, Level::Warn);
        assert_eq!(
            message,
            "DNS queries are beyond the limit of 100 per second (egress.dns_queries_per_s): 7 waited, and 0 got no answer"
        );
        assert_eq!(fields["event_type"], "egress_dns_limited");
        assert_eq!((&*fields["waited"], &*fields["unanswered"]), ("7", "0"));
        let (level, message, fields) = unlogged("connections", 3);
        assert_eq!(level, Level::Warn);
        assert_eq!(message, "3 connections were not logged: there were too many at once");
        assert_eq!(fields["dropped"], "3");
    }
}
