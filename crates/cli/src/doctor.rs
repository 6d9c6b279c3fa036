//! `ringfence doctor`, and the same look at the host before `up` starts.
//!
//! The findings about the host are the runtime's; here are those that depend on configuration: whether limits may be
//! missing, whether the data directory can be used, whether the port is free.

use std::fmt::Write as _;
use std::net::TcpListener;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Result, anyhow, bail};
use runtime::probe::{self, Check, Status};
use serde::Serialize;

use crate::config::Settings;
use crate::data_dir::{DataDir, InUse};
use crate::output::{self, Format};
use crate::tls::{self, Https};

/// One finding, as it is shown.
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

/// Looks at everything and prints it.
///
/// # Errors
/// When the report cannot be printed.
pub(crate) fn run(settings: &Settings, format: Format) -> Result<ExitCode> {
    let mut checks = host(settings);
    let (data_dir, in_use) = data_dir(&settings.data_dir);
    checks.push(data_dir);
    checks.push(port(settings, in_use));
    checks.extend(https(settings));
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

/// The runtime's findings, with what the configuration allows.
fn host(settings: &Settings) -> Vec<Finding> {
    probe::probe(&settings.data_dir)
        .into_iter()
        .map(|mut check| {
            if check.name == "cgroups" && check.status == Status::Missing && settings.unlimited {
                check.status = Status::Degraded;
            }
            Finding::from(check)
        })
        .collect()
}

/// Refuses a host that lacks something, with one message about all of it.
///
/// # Errors
/// When something that sandboxes need is missing.
pub(crate) fn require_host(settings: &Settings) -> Result<()> {
    let missing: Vec<Finding> = host(settings).into_iter().filter(Finding::is_missing).collect();
    if missing.is_empty() {
        return Ok(());
    }
    Err(anyhow!("{}", refusal(&missing)))
}

fn refusal(missing: &[Finding]) -> String {
    let mut text = String::from("this host cannot run sandboxes yet:");
    for finding in missing {
        let _ = write!(
            text,
            "\n  {}: {} ({})\n    fix: {}",
            finding.name, finding.detail, finding.cost, finding.fix
        );
    }
    text.push_str("\n`ringfence doctor` shows the whole picture");
    text
}

/// Refuses to go on without root.
///
/// # Errors
/// When the process is not root's.
pub(crate) fn require_root() -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        bail!("sandboxes belong to root: run this command as root");
    }
    Ok(())
}

/// The data directory, and whether a platform runs on it.
fn data_dir(path: &Path) -> (Finding, bool) {
    const NAME: &str = "data directory";
    if !path.exists() {
        // Nothing is made here: a look changes nothing.
        let parent = path.ancestors().skip(1).find(|parent| parent.exists());
        let writable = parent.is_some_and(|parent| rustix::fs::access(parent, rustix::fs::Access::WRITE_OK).is_ok());
        let finding = if writable {
            Finding::ok(NAME, format!("{} will be made", path.display()))
        } else {
            Finding::missing(
                NAME,
                format!("{} cannot be made", path.display()),
                "nothing can be kept",
                "name another directory with --data-dir, or run as root",
            )
        };
        return (finding, false);
    }
    let locked = DataDir::existing(path).and_then(|dir| dir.lock().map(drop));
    match locked {
        Ok(()) => (Finding::ok(NAME, path.display().to_string()), false),
        Err(error) => match error.downcast_ref::<InUse>() {
            Some(_) => (
                Finding::ok(NAME, format!("{} (a platform runs on it)", path.display())),
                true,
            ),
            None if std::fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_none()) => {
                (Finding::ok(NAME, format!("{} is empty", path.display())), false)
            }
            None => {
                let detail = format!("{error:#}");
                let fix = "name another directory with --data-dir, or run as its owner";
                (Finding::missing(NAME, detail, "nothing can be kept", fix), false)
            }
        },
    }
}

fn port(settings: &Settings, running: bool) -> Finding {
    const NAME: &str = "port";
    if running {
        return Finding::ok(NAME, "not looked at: the running platform has its own");
    }
    match TcpListener::bind(settings.listen) {
        Ok(_) => Finding::ok(NAME, format!("{} is free", settings.listen)),
        Err(error) => Finding::missing(
            NAME,
            format!("{}: {error}", settings.listen),
            "clients cannot reach the platform",
            "end the program that has it, or choose another address with --listen",
        ),
    }
}

/// What `up` would find about HTTPS, none when it is off.
fn https(settings: &Settings) -> Option<Finding> {
    const NAME: &str = "https";
    const FIX: &str = "name a certificate and its private key in PEM with --tls-cert and --tls-key";
    let degraded = |detail: String, cost: &str, fix: &str| {
        let status = word(Status::Degraded);
        Finding {
            status,
            ..Finding::missing(NAME, detail, cost, fix)
        }
    };
    match &settings.https {
        Https::Off => None,
        Https::Local => Some(match tls::authority_of(&settings.data_dir) {
            Ok(Some(path)) => Finding::ok(NAME, format!("clients must trust {}", path.display())),
            Ok(None) | Err(_) => Finding::ok(NAME, "an authority of its own will be made"),
        }),
        Https::Files(files) => Some(match files.load() {
            Err(error) => Finding::missing(NAME, format!("{error:#}"), "the platform does not start", FIX),
            Ok(_) => {
                let uncovered = files.uncovered(&settings.domain_at(settings.listen.port()));
                if let Some(exposure) = files.exposure() {
                    let cost = "other users of this host can pose as the platform";
                    degraded(exposure, cost, "chmod 0600 the file of --tls-key")
                } else if uncovered.is_empty() {
                    Finding::ok(NAME, files.to_string())
                } else {
                    let detail = format!("{files} are not for {}", uncovered.join(" and "));
                    degraded(detail, "clients refuse to talk to these names", FIX)
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
        "\n`ringfence up` does not work on this host before what is missing is fixed\n"
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
