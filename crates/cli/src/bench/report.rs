//! What was measured, under which conditions, as text and as JSON.

use std::fmt::Write as _;

use measure::stats::Distribution;
use measure::table;
use serde::Serialize;

/// The conditions of a run, without which its figures cannot be compared.
#[derive(Debug, Serialize)]
pub(crate) struct Conditions {
    /// Version of this program.
    pub(crate) ringfence: &'static str,
    /// The platform.
    pub(crate) url: String,
    /// The template.
    pub(crate) template: String,
    /// When the run began.
    pub(crate) started_at: String,
    /// Cores of the client's machine.
    pub(crate) cpus: usize,
    /// Memory of the client's machine, in MiB.
    pub(crate) memory_mb: u64,
    /// Kernel of the client's machine.
    pub(crate) kernel: String,
    /// Time of one CPUID instruction there, in microseconds, if it has it. In a virtual machine each is a trap to the
    /// hypervisor, and every program that is executed has some.
    pub(crate) cpuid_us: Option<f64>,
    /// Whether the platform runs on the client's machine and shares its cores.
    pub(crate) same_machine: bool,
}

/// The times of one kind of request.
#[derive(Debug, Serialize)]
pub(crate) struct Measure {
    /// Name of what was measured.
    pub(crate) what: String,
    /// Number of concurrent clients.
    pub(crate) concurrency: usize,
    /// Requests that failed.
    pub(crate) errors: u64,
    /// Latencies of the requests that succeeded, if any did.
    #[serde(flatten)]
    pub(crate) times: Option<Distribution>,
}

/// The sustained rate of create and delete.
#[derive(Debug, Serialize)]
pub(crate) struct Sustained {
    /// Number of concurrent clients.
    pub(crate) concurrency: usize,
    /// How long, in seconds, until the last answer.
    pub(crate) seconds: f64,
    /// Sandboxes that were made and deleted.
    pub(crate) completed: usize,
    /// Successful requests per second.
    pub(crate) per_second: f64,
    /// Requests that failed.
    pub(crate) errors: u64,
}

/// The memory of idle sandboxes.
#[derive(Debug, Serialize)]
pub(crate) struct IdleMemory {
    /// Sandboxes that lived at the same time.
    pub(crate) sandboxes: usize,
    /// Available memory before, in KiB.
    pub(crate) before_kb: u64,
    /// Available memory with the sandboxes, in KiB.
    pub(crate) after_kb: u64,
    /// Available memory lost per sandbox, in KiB: agent, kernel objects, page cache that cannot be given up, all.
    /// None when there were none.
    pub(crate) per_sandbox_kb: Option<f64>,
    /// Requests that failed.
    pub(crate) errors: u64,
}

/// The whole report.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    /// The conditions.
    pub(crate) conditions: Conditions,
    /// Times of requests.
    pub(crate) requests: Vec<Measure>,
    /// Times of the stages of a create request, from the platform's answers.
    pub(crate) create_stages: Vec<Measure>,
    /// The sustained rate.
    pub(crate) sustained: Option<Sustained>,
    /// The rate of create and delete with many clients.
    pub(crate) concurrent: Option<Sustained>,
    /// What was not measured, and why.
    pub(crate) notes: Vec<String>,
    /// The memory.
    pub(crate) idle_memory: Option<IdleMemory>,
    /// Requests that failed, all together.
    pub(crate) errors: u64,
    /// The first few of the failures.
    pub(crate) error_samples: Vec<String>,
    /// Whether the run was ended early.
    pub(crate) interrupted: bool,
}

impl Report {
    /// The report as text.
    pub(crate) fn text(&self) -> String {
        let c = &self.conditions;
        let place = if c.same_machine {
            "client and platform on this machine"
        } else {
            "platform on another machine"
        };
        let cpuid = c.cpuid_us.map(|us| format!(", CPUID {us:.2} µs")).unwrap_or_default();
        let mut text = format!(
            "ringfence {} at {}, template {}, {}\n{} cpus, {} MiB, kernel {}{cpuid}; {place}\n\n",
            c.ringfence, c.url, c.template, c.started_at, c.cpus, c.memory_mb, c.kernel
        );
        if !self.requests.is_empty() {
            text.push_str(&table("milliseconds", &self.requests));
        }
        if !self.create_stages.is_empty() {
            text.push('\n');
            text.push_str(&table("create stage", &self.create_stages));
        }
        for (named, s) in [("sustained", &self.sustained), ("16 at once", &self.concurrent)] {
            let Some(s) = s else { continue };
            let _ = writeln!(
                text,
                "\n{named} create + delete: {:.1} per second ({} in {:.1} s, concurrency {}, errors {})",
                s.per_second, s.completed, s.seconds, s.concurrency, s.errors
            );
        }
        if let Some(m) = &self.idle_memory {
            let per_sandbox = m
                .per_sandbox_kb
                .map_or_else(|| "-".to_owned(), |kb| format!("{:.2} MiB", kb / 1024.0));
            let _ = writeln!(
                text,
                "\nidle memory: {per_sandbox} per sandbox (MemAvailable {:.0} MiB before, {:.0} MiB with {} sandboxes, \
                 errors {})",
                m.before_kb as f64 / 1024.0,
                m.after_kb as f64 / 1024.0,
                m.sandboxes,
                m.errors
            );
        }
        for note in &self.notes {
            let _ = writeln!(text, "\n{note}");
        }
        if self.errors > 0 {
            let _ = writeln!(text, "\n{} requests failed; first errors:", self.errors);
            for sample in &self.error_samples {
                let _ = writeln!(text, "  {sample}");
            }
        }
        if self.interrupted {
            text.push_str("\ninterrupted: the figures are incomplete\n");
        }
        text
    }
}

fn table(title: &str, measures: &[Measure]) -> String {
    let rows = measures.iter().map(|measure| {
        let mut row = vec![measure.what.clone()];
        match &measure.times {
            Some(t) => {
                row.extend([t.p50_ms, t.p90_ms, t.p99_ms, t.max_ms, t.mean_ms].map(|ms| format!("{ms:.2}")));
                row.push(t.n.to_string());
            }
            None => row.extend(["-", "-", "-", "-", "-", "0"].map(str::to_owned)),
        }
        row.push(measure.errors.to_string());
        row.push(measure.concurrency.to_string());
        row
    });
    table::columns(
        &[title, "p50", "p90", "p99", "max", "mean", "n", "errors", "concurrency"],
        rows,
    )
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn both_forms_name_the_conditions_and_every_number() {
        let report = Report {
            conditions: Conditions {
                ringfence: "0",
                url: "http://127.0.0.1:3000".to_owned(),
                template: "base".to_owned(),
                started_at: "2026-01-01T00:00:00Z".to_owned(),
                cpus: 2,
                memory_mb: 1024,
                kernel: "6.1".to_owned(),
                cpuid_us: Some(8.25),
                same_machine: true,
            },
            requests: vec![
                Measure {
                    what: "create".to_owned(),
                    concurrency: 1,
                    errors: 0,
                    times: Distribution::of(vec![Duration::from_micros(1500)]),
                },
                Measure {
                    what: "delete".to_owned(),
                    concurrency: 1,
                    errors: 3,
                    times: None,
                },
            ],
            create_stages: Vec::new(),
            sustained: Some(Sustained {
                concurrency: 4,
                seconds: 2.0,
                completed: 300,
                per_second: 150.0,
                errors: 0,
            }),
            concurrent: Some(Sustained {
                concurrency: 16,
                seconds: 2.0,
                completed: 250,
                per_second: 125.0,
                errors: 0,
            }),
            notes: vec!["fork: not here".to_owned()],
            idle_memory: Some(IdleMemory {
                sandboxes: 2,
                before_kb: 4096,
                after_kb: 0,
                per_sandbox_kb: Some(2048.0),
                errors: 0,
            }),
            errors: 3,
            error_samples: vec!["delete: status 500".to_owned()],
            interrupted: false,
        };
        let text = report.text();
        for part in [
            "2 cpus",
            "kernel 6.1, CPUID 8.25 µs",
            "16 at once create + delete: 125.0 per second",
            "fork: not here",
            "1.50",
            "150.0 per second",
            "2.00 MiB per sandbox",
            "status 500",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["requests"][0]["p50_ms"], 1.5);
        assert_eq!(json["requests"][1]["errors"], 3);
        assert!(json["requests"][1].get("p50_ms").is_none());
        assert_eq!(json["idle_memory"]["per_sandbox_kb"], 2048.0);
    }
}
