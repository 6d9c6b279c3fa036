//! What runs in a sandbox to get a repository: commands of git with a configuration of their own.
//!
//! The environment is empty but for what is here, because the variables of the client could lead git elsewhere. Hooks,
//! filters, submodules, helpers and every protocol but HTTPS are off.

use model::repository::{MountPath, RepositoryUrl};
use protocol::process::ProcessConfig;

use super::error::RepositoryError;

/// The certificate of the sandbox's authority: while a repository is fetched, its host is all that can be reached, and
/// every connection to it is intercepted.
const CA_FILE: &str = "/run/ringfence/ca.pem";

const ENVIRONMENT: [&str; 7] = [
    "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME=/nonexistent",
    "LC_ALL=C",
    "GIT_CONFIG_NOSYSTEM=1",
    "GIT_CONFIG_GLOBAL=/dev/null",
    "GIT_TERMINAL_PROMPT=0",
    "GIT_ASKPASS=",
];

const CONFIGURATION: [(&str, &str); 11] = [
    ("core.hooksPath", "/dev/null"),
    ("core.fsmonitor", "false"),
    ("credential.helper", ""),
    ("protocol.allow", "never"),
    ("protocol.https.allow", "always"),
    ("submodule.recurse", "false"),
    ("fetch.recurseSubmodules", "false"),
    ("gc.auto", "0"),
    ("maintenance.auto", "false"),
    ("http.proxy", ""),
    ("http.sslCAInfo", CA_FILE),
];

/// Exit codes of the scripts.
const NO_GIT: i32 = 90;
pub(super) const NOT_OWN: i32 = 95;
const NOT_EMPTY: i32 = 92;
const NOT_MADE: i32 = 94;

/// Makes the directory of a working tree as the user who gets it.
const MAKE_AS_USER: &str = r#"umask 022
mkdir -p -- "$1" 2>/dev/null && [ -d "$1" ] && [ -O "$1" ] && [ -w "$1" ] || exit 95
[ -z "$(ls -A -- "$1")" ] || exit 92"#;

/// Makes the directory as root, for the user who gets it.
const MAKE_AS_ROOT: &str = r#"umask 022
if [ -d "$1" ] && [ -n "$(ls -A -- "$1")" ]; then exit 92; fi
case $2 in
*:*) owner=$2 ;;
*) owner=$2:$(id -g "$2" 2>/dev/null || echo 0) ;;
esac
mkdir -p -- "$1" && chown -- "$owner" "$1" || exit 94"#;

/// Asks for the references, which the code host answers only if it accepts the token.
const REFERENCES: &str = r#"command -v git >/dev/null 2>&1 || exit 90
exec git ls-remote --symref "$1" HEAD 'refs/heads/*' 'refs/tags/*'"#;

/// Makes the working tree: from a copy, if there is one that can be read, and from the code host, unless the copy has
/// everything.
const POPULATE: &str = r#"set -e
umask 022
url=$2 branch=$3 copy=$4 fetch=$5
cd -- "$1"
git init -q --template= .
git remote add origin "$url"
if [ -n "$copy" ]; then
  git -c protocol.file.allow=always fetch -q --no-tags "$copy" '+refs/remotes/origin/*:refs/remotes/origin/*' '+refs/tags/*:refs/tags/*' || fetch=1
  rm -f -- "$copy"
fi
if [ "$fetch" = 1 ]; then
  git fetch -q --prune --no-tags origin '+refs/heads/*:refs/remotes/origin/*' '+refs/tags/*:refs/tags/*'
fi
rm -f .git/FETCH_HEAD
[ -n "$branch" ] || exit 0
git symbolic-ref HEAD "refs/heads/$branch"
git rev-parse -q --verify "refs/remotes/origin/$branch^{commit}" >/dev/null || exit 0
git symbolic-ref refs/remotes/origin/HEAD "refs/remotes/origin/$branch"
git update-ref "refs/heads/$branch" "refs/remotes/origin/$branch"
git config "branch.$branch.remote" origin
git config "branch.$branch.merge" "refs/heads/$branch"
git reset -q --hard"#;

/// Writes a copy.
const COPY: &str = r#"cd -- "$1" || exit 1
git for-each-ref --format='%(refname)' refs/remotes/origin refs/tags | grep -v '^refs/remotes/origin/HEAD$' |
git bundle create -q - --stdin"#;

fn command(script: &str, arguments: &[&str]) -> ProcessConfig {
    let mut args = vec!["-i".to_owned()];
    args.extend(ENVIRONMENT.map(str::to_owned));
    args.push(format!("GIT_CONFIG_COUNT={}", CONFIGURATION.len()));
    for (index, (key, value)) in CONFIGURATION.iter().enumerate() {
        args.push(format!("GIT_CONFIG_KEY_{index}={key}"));
        args.push(format!("GIT_CONFIG_VALUE_{index}={value}"));
    }
    let shell = ["/bin/sh", "-c", script, "sh"];
    args.extend(shell.iter().chain(arguments).map(|&arg| arg.to_owned()));
    ProcessConfig {
        cmd: "/usr/bin/env".to_owned(),
        args,
        cwd: Some("/".to_owned()),
        ..ProcessConfig::default()
    }
}

pub(super) fn make_as_user(path: &MountPath) -> ProcessConfig {
    command(MAKE_AS_USER, &[path.as_str()])
}

pub(super) fn make_as_root(path: &MountPath, user: &str) -> ProcessConfig {
    command(MAKE_AS_ROOT, &[path.as_str(), user])
}

pub(super) fn references(url: &RepositoryUrl) -> ProcessConfig {
    command(REFERENCES, &[&url.https()])
}

/// `copy` is the path of a copy inside, if there is one, and `fetch` whether it lacks something.
pub(super) fn populate(
    path: &MountPath,
    url: &RepositoryUrl,
    branch: Option<&str>,
    copy: Option<&str>,
    fetch: bool,
) -> ProcessConfig {
    let url = url.https();
    let fetch = if fetch { "1" } else { "0" };
    let arguments = [
        path.as_str(),
        &url,
        branch.unwrap_or_default(),
        copy.unwrap_or_default(),
        fetch,
    ];
    command(POPULATE, &arguments)
}

pub(super) fn copy(path: &MountPath) -> ProcessConfig {
    command(COPY, &[path.as_str()])
}

/// Why a script failed.
pub(super) fn failure(code: i32, stderr: &str, path: &MountPath, url: &RepositoryUrl) -> RepositoryError {
    let refused = |why: String| RepositoryError::Refused(why);
    let (url, path) = (url.https(), path.as_str());
    match code {
        NO_GIT => return refused("the template has no git, which resources require".to_owned()),
        NOT_EMPTY => return refused(format!("mount_path {path:?} is a directory that is not empty")),
        NOT_MADE | NOT_OWN => return refused(format!("mount_path {path:?} cannot be created in this template")),
        _ => {}
    }
    let has = |parts: &[&str]| parts.iter().any(|part| stderr.contains(part));
    if has(&["No space left", "Disk quota exceeded"]) {
        return refused(format!("repository {url} does not fit on the disk of the sandbox"));
    }
    let unauthorized = [
        "Authentication failed",
        "could not read Username",
        "could not read Password",
        "returned error: 401",
        "returned error: 403",
    ];
    if has(&unauthorized) {
        return refused(format!("the code host refused authorization_token for {url}"));
    }
    if has(&["not found", "returned error: 404"]) {
        return refused(format!(
            "repository {url} does not exist, or authorization_token gives no access to it"
        ));
    }
    RepositoryError::Unreachable {
        url,
        why: last_line(stderr),
    }
}

/// The last line of an untrusted text that says something, for the log of the operator.
fn last_line(text: &str) -> String {
    let line = text
        .lines()
        .rev()
        .find(|line| !line.trim().is_empty())
        .unwrap_or_default();
    line.chars().filter(|c| !c.is_control()).take(200).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_told_apart() {
        let url: RepositoryUrl = "https://github.com/o/r".parse().expect("an address");
        let path: MountPath = "/work".parse().expect("a path");
        for (code, stderr, want) in [
            (90, "", "no git"),
            (92, "", "not empty"),
            (94, "", "cannot be created"),
            (
                128,
                "fatal: could not read Username for 'https://github.com': terminal prompts disabled\n",
                "refused authorization_token",
            ),
            (
                128,
                "fatal: Authentication failed for 'https://x'\n",
                "refused authorization_token",
            ),
            (
                128,
                "fatal: unable to access 'https://x/': The requested URL returned error: 403\n",
                "refused authorization_token",
            ),
            (
                128,
                "remote: Repository not found.\nfatal: repository 'https://x/' not found\n",
                "does not exist, or",
            ),
            (
                1,
                "error: unable to write file a: No space left on device\n",
                "does not fit",
            ),
        ] {
            match failure(code, stderr, &path, &url) {
                RepositoryError::Refused(why) => assert!(why.contains(want), "{why}"),
                other => panic!("{stderr}: {other:?}"),
            }
        }
        for stderr in [
            "fatal: unable to access: Could not resolve host: github.com\n\n",
            "",
            "\u{1b}[31mx",
        ] {
            let error = failure(128, stderr, &path, &url);
            assert!(
                matches!(&error, RepositoryError::Unreachable { why, .. } if !why.contains('\u{1b}')),
                "{error:?}"
            );
        }
    }

    #[test]
    fn arguments_are_never_part_of_a_script() {
        let url: RepositoryUrl = "https://github.com/o/r".parse().expect("an address");
        let path: MountPath = "/a b;$(id)'\"".parse().expect("a path");
        let config = populate(&path, &url, Some("main"), None, true);
        let scripts: Vec<&String> = config.args.iter().filter(|arg| arg.contains("git init")).collect();
        assert!(scripts.len() == 1 && !scripts[0].contains("$(id)"));
        assert!(config.args.iter().any(|arg| arg == path.as_str()));
        assert_eq!(config.args[0], "-i");
    }
}
