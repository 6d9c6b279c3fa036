//! Packages that sandboxes of an image should have, installed by its own package manager.

use model::log::Level;
use protocol::image::{PackageTool, ProvisionReport};
use protocol::process::ProcessConfig;

use super::machine::Machine;
use super::step::BASE;
use crate::builds::context::BuildContext;
use crate::builds::recipe::BuildFailure;

/// Installs the packages in `$1` together, and then each in `$2` by itself. The functions before it are those of a package
/// manager. It ends with 1 if the first failed, and with 2 if one of the others did.
const INSTALL: &str = r#"
refresh || exit 1
if [ -n "$1" ]; then install $1 || exit 1; fi
code=0
for package in $2; do
  install "$package" || { code=2; echo "$package could not be installed" >&2; }
done
clean
exit $code"#;

fn functions(tool: PackageTool) -> &'static str {
    match tool {
        PackageTool::AptGet => {
            "export DEBIAN_FRONTEND=noninteractive
refresh() { apt-get update -q; }
install() { apt-get install -y -q --no-install-recommends \"$@\"; }
clean() { rm -rf /var/lib/apt/lists/*; }"
        }
        PackageTool::Apk => {
            "refresh() { :; }
install() { apk add --no-cache \"$@\"; }
clean() { :; }"
        }
        PackageTool::Dnf => {
            "refresh() { :; }
install() { \"$(command -v dnf || command -v microdnf || command -v yum)\" install -y \"$@\"; }
clean() { :; }"
        }
        PackageTool::Pacman => {
            "refresh() { pacman -Sy --noconfirm; }
install() { pacman -S --noconfirm --needed \"$@\"; }
clean() { :; }"
        }
    }
}

/// Packages that an image lacks, which its package manager may have.
pub(super) struct Lacking {
    tool: PackageTool,
    missing: String,
    wanted: String,
}

impl Lacking {
    /// What an image lacks; none if that is nothing, or nothing can be done about it, which the log says.
    pub(super) fn of(context: &BuildContext, report: &ProvisionReport) -> Option<Self> {
        let (missing, wanted) = (report.missing.join(" "), report.wanted.join(" "));
        if missing.is_empty() && wanted.is_empty() {
            return None;
        }
        let Some(tool) = report.packages else {
            let all = [missing, wanted].join(" ");
            let all = all.trim();
            let line = format!("the image has no {all}, and it is of no distribution whose packages are known");
            context.log(Level::Warn, Some(BASE), line);
            return None;
        };
        Some(Self { tool, missing, wanted })
    }

    /// Installs the packages, if the network of the sandbox allows that. The build goes on without, and its log says
    /// so.
    pub(super) async fn install(self, context: &BuildContext, machine: &Machine<'_>) -> Result<(), BuildFailure> {
        let Self { tool, missing, wanted } = self;
        let script = format!("{}{INSTALL}", functions(tool));
        let all = [missing.as_str(), wanted.as_str()].join(" ");
        let command = ProcessConfig {
            cmd: "/bin/sh".to_owned(),
            args: vec!["-c".to_owned(), script, "sh".to_owned(), missing, wanted.clone()],
            cwd: Some("/".to_owned()),
            ..ProcessConfig::default()
        };
        let failed = match machine.run("root", command, "[base]").await?.code {
            0 => return Ok(()),
            2 => format!("not all of {wanted} could be installed"),
            _ => format!("{} could not be installed", all.trim()),
        };
        let line = format!("{failed}: the sandbox works without, and commands that need it fail");
        context.log(Level::Warn, Some(BASE), line);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs the script with functions that stand for a package manager without `failing` packages.
    fn run(failing: &str, missing: &str, wanted: &str) -> (i32, String) {
        let functions = format!(
            "refresh() {{ echo refresh; }}
install() {{ for package in \"$@\"; do case \" {failing} \" in *\" $package \"*) return 1; esac; done; echo \"install $*\"; }}
clean() {{ echo clean; }}"
        );
        let script = format!("{functions}{INSTALL}");
        let args = ["-c", &script, "sh", missing, wanted];
        let done = std::process::Command::new("/bin/sh")
            .args(args)
            .output()
            .expect("a shell");
        let out = String::from_utf8(done.stdout).expect("text").replace('\n', "; ");
        (done.status.code().expect("a code"), out)
    }

    #[test]
    fn what_can_be_installed_is() {
        for (failing, missing, wanted, want) in [
            (
                "",
                "bash sudo",
                "curl iproute2",
                (0, "refresh; install bash sudo; install curl; install iproute2; clean; "),
            ),
            (
                "curl",
                "bash",
                "curl iproute2",
                (2, "refresh; install bash; install iproute2; clean; "),
            ),
            ("bash", "bash", "curl", (1, "refresh; ")),
            ("", "", "curl", (0, "refresh; install curl; clean; ")),
            ("", "bash", "", (0, "refresh; install bash; clean; ")),
        ] {
            let (code, out) = run(failing, missing, wanted);
            assert_eq!((code, out.as_str()), want, "{failing}: {missing}: {wanted}");
        }
    }

    #[test]
    fn every_package_manager_has_all_functions() {
        for tool in [
            PackageTool::AptGet,
            PackageTool::Apk,
            PackageTool::Dnf,
            PackageTool::Pacman,
        ] {
            for function in ["refresh() {", "install() {", "clean() {"] {
                assert!(functions(tool).contains(function), "{tool:?}: {function}");
            }
        }
    }
}
