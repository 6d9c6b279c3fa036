//! `ringfence doctor`, and the same checks of the host before `up` starts.
//!
//! The findings about the host are those of the driver; here are those about what all drivers need: whether the data
//! directory can be used, whether the port is free.

use std::fmt::Write as _;
use std::net::TcpListener;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Result, anyhow, bail};
use runtime::probe::{Check, Status};
use serde::Serialize;

use crate::config::Config;
use crate::data_dir::{DataDir, InUse};
use crate::output::{self, Format};
use crate::tls::{self, Https};

/// One finding of the report.
#[derive(Debug, Serialize)]
struct Finding {
    name: String,
    status: &'static str,
    detail: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    cost: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    fix: String,
}

impl Finding {
    fn ok(name: &str, detail: impl Into<String>) -> Self {
        Self {
            name: name.to_owned(),
            status: word(Status::Ok),
            detail: detail.into(),
            cost: String::new(),
            fix: String::new(),
        }
    }

    fn missing(name: &str, detail: impl Into<String>, cost: &str, fix: &str) -> Self {
        Self {
            name: name.to_owned(),
            status: word(Status::Missing),
            detail: detail.into(),
            cost: cost.to_owned(),
            fix: fix.to_owned(),
        }
    }

    fn is_missing(&self) -> bool {
        self.status == word(Status::Missing)
    }
}

impl From<Check> for Finding {
    fn from(check: Check) -> Self {
        Self {
            name: check.name.to_owned(),
            status: word(check.status),
            detail: check.detail,
            cost: check.cost.to_owned(),
            fix: check.fix.to_owned(),
        }
    }
}

fn word(status: Status) -> &'static str {
    match status {
        Status::Ok => "ok",
        Status::Degraded => "degraded",
        Status::Missing => "missing",
    }
}

/// The report.
#[derive(Debug, Serialize)]
struct Report {
    ready: bool,
    checks: Vec<Finding>,
}

/// Runs all checks and prints the report.
///
/// # Errors
/// When the report cannot be printed.
pub(crate) fn run(config: &Config, format: Format) -> Result<ExitCode> {
    let mut checks = host(config);
    let (data_dir, in_use) = data_dir(&config.data_dir);
    // What the driver finds wrong with it is worse than what is found here.
    if !checks.iter().any(|check| check.name == data_dir.name) {
        checks.push(data_dir);
    }
    checks.push(port(config, in_use));
    checks.extend(https(config));
    let report = Report {
        ready: !checks.iter().any(Finding::is_missing),
        checks,
    };
    match format {
        Format::Json => output::json(&report)?,
        Format::Text => output::text(&text(&report))?,
    }
    Ok(if report.ready {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// The findings of the driver that is configured.
fn host(config: &Config) -> Vec<Finding> {
    let checks = config.node.isolation.probe(&config.node.driver);
    checks.into_iter().map(Finding::from).collect()
}

/// Checks the host, with one error for all missing requirements.
///
/// # Errors
/// When a requirement of sandboxes is missing.
pub(crate) fn require_host(config: &Config) -> Result<()> {
    let missing: Vec<Finding> = host(config).into_iter().filter(Finding::is_missing).collect();
    if missing.is_empty() {
        return Ok(());
    }
    Err(anyhow!("{}", refusal(&missing)))
}

fn refusal(missing: &[Finding]) -> String {
    let mut text = String::from("this host does not meet the requirements:");
    for finding in missing {
        let _ = write!(
            text,
            "\n  {}: {} ({})\n    fix: {}",
            finding.name, finding.detail, finding.cost, finding.fix
        );
    }
    text.push_str("\nrun `ringfence doctor` for the full report");
    text
}

/// Checks that the process runs as root.
///
/// # Errors
/// When the process does not run as root.
pub(crate) fn require_root() -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        bail!("this command must run as root");
    }
    Ok(())
}

/// The data directory, and whether a platform runs on it.
fn data_dir(path: &Path) -> (Finding, bool) {
    const NAME: &str = "data directory";
    if !path.exists() {
        // Nothing is created here: checks have no side effects.
        let parent = path.ancestors().skip(1).find(|parent| parent.exists());
        let writable = parent.is_some_and(|parent| rustix::fs::access(parent, rustix::fs::Access::WRITE_OK).is_ok());
        let finding = if writable {
            Finding::ok(NAME, format!("{} will be created", path.display()))
        } else {
            Finding::missing(
                NAME,
                format!("{} cannot be created", path.display()),
                "the platform does not start",
                "choose another directory with --data-dir, or run as root",
            )
        };
        return (finding, false);
    }
    let locked = DataDir::existing(path).and_then(|dir| dir.lock().map(drop));
    match locked {
        Ok(()) => (Finding::ok(NAME, path.display().to_string()), false),
        Err(error) => match error.downcast_ref::<InUse>() {
            Some(_) => (
                Finding::ok(NAME, format!("{} (in use by a running platform)", path.display())),
                true,
            ),
            None if std::fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_none()) => {
                (Finding::ok(NAME, format!("{} is empty", path.display())), false)
            }
            None => {
                let detail = format!("{error:#}");
                let fix = "choose another directory with --data-dir, or run as its owner";
                (
                    Finding::missing(NAME, detail, "the platform does not start", fix),
                    false,
                )
            }
        },
    }
}

fn port(config: &Config, running: bool) -> Finding {
    const NAME: &str = "port";
    if running {
        return Finding::ok(NAME, "skipped: in use by the running platform");
    }
    match TcpListener::bind(config.listen) {
        Ok(_) => Finding::ok(NAME, format!("{} is free", config.listen)),
        Err(error) => Finding::missing(
            NAME,
            format!("{}: {error}", config.listen),
            "clients cannot reach the platform",
            "stop the program that uses this port, or choose another address with --listen",
        ),
    }
}

/// The HTTPS finding; none if HTTPS is off.
fn https(config: &Config) -> Option<Finding> {
    const NAME: &str = "https";
    const FIX: &str = "set --tls-cert and --tls-key to a certificate and its private key in PEM";
    let degraded = |detail: String, cost: &str, fix: &str| {
        let status = word(Status::Degraded);
        Finding {
            status,
            ..Finding::missing(NAME, detail, cost, fix)
        }
    };
    match &config.https {
        Https::Off => None,
        Https::Local => Some(match tls::authority_of(&config.data_dir) {
            Ok(Some(path)) => Finding::ok(NAME, format!("clients must trust {}", path.display())),
            Ok(None) | Err(_) => Finding::ok(NAME, "a local CA will be created"),
        }),
        Https::Acme(acme) => Some({
            let state = acme.state(&config.data_dir, crate::clock::now());
            if let Some(problem) = acme.problem() {
                let cost = "no certificate can be issued or renewed";
                degraded(
                    problem,
                    cost,
                    "correct acme.dns_hook or acme.ca, and send the platform SIGHUP to try again",
                )
            } else if let Some(exposure) = acme.exposure() {
                let cost = "they can run programs as root";
                degraded(exposure, cost, "make root its owner, and set its mode to 0755 or less")
            } else {
                match state {
                    None => Finding::ok(NAME, format!("{} will be asked for a certificate", acme.directory)),
                    Some((_, Some(problem))) => degraded(
                        format!("the certificate of {} {problem}: its renewal fails", acme.directory),
                        "clients refuse to connect after its end",
                        "look for the reason in the log of the platform",
                    ),
                    Some((valid, None)) => Finding::ok(
                        NAME,
                        format!("certificate of {}, valid until {}", acme.directory, valid.not_after),
                    ),
                }
            }
        }),
        Https::Files(files) => Some(match files.load() {
            Err(error) => Finding::missing(NAME, format!("{error:#}"), "the platform does not start", FIX),
            Ok(_) => {
                let uncovered = files.uncovered(tls::host_of(&config.domain_at(config.listen.port())));
                if let Some(exposure) = files.exposure() {
                    let cost = "other users of this host can impersonate the platform";
                    degraded(exposure, cost, "chmod 0600 the file given with --tls-key")
                } else if let Some(problem) = files.expiry_problem(crate::clock::now()) {
                    let detail = format!("the certificate in {} {problem}", files.certificates.display());
                    degraded(detail, "clients refuse to connect", "renew the certificate")
                } else if uncovered.is_empty() {
                    Finding::ok(NAME, files.to_string())
                } else {
                    let detail = format!("{files} are not valid for {}", uncovered.join(" and "));
                    degraded(detail, "clients refuse to connect to these names", FIX)
                }
            }
        }),
    }
}

fn text(report: &Report) -> String {
    let mut text = String::new();
    for finding in &report.checks {
        let _ = writeln!(text, "{:<9} {:<16} {}", finding.status, finding.name, finding.detail);
        for (label, value) in [("cost", &finding.cost), ("fix", &finding.fix)] {
            if !value.is_empty() {
                let _ = writeln!(text, "{:26} {label}: {value}", "");
            }
        }
    }
    text.push_str(if report.ready {
        "\n`ringfence up` works on this host\n"
    } else {
        "\n`ringfence up` does not work on this host until the missing requirements are met\n"
    });
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_names_everything_at_once() {
        let text = refusal(&[
            Finding::missing(
                "root",
                "running as uid 1000",
                "no sandbox can be made",
                "run ringfence as root",
            ),
            Finding::missing(
                "overlay",
                "not in the kernel",
                "no file system",
                "enable CONFIG_OVERLAY_FS",
            ),
        ]);
        for part in [
            "root",
            "uid 1000",
            "run ringfence as root",
            "overlay",
            "CONFIG_OVERLAY_FS",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    #[test]
    fn a_data_directory_is_looked_at_and_not_touched() {
        let temp = tempfile::tempdir().unwrap();
        let absent = temp.path().join("absent");
        assert_eq!(data_dir(&absent).0.status, "ok");
        assert!(!absent.exists());
        assert_eq!(data_dir(temp.path()).0.status, "ok");
        assert_eq!(std::fs::read_dir(temp.path()).unwrap().count(), 0);
        std::fs::write(temp.path().join("letter"), "dear").unwrap();
        assert_eq!(data_dir(temp.path()).0.status, "missing");
        let ours = DataDir::prepare(&absent).unwrap();
        assert!(!data_dir(&absent).1);
        let lock = ours.lock().unwrap();
        assert!(data_dir(&absent).1);
        drop(lock);
    }
}
